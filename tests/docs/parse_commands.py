"""Parses ``magi-serve`` command lines with the parsers that read them, and runs none.

    python parse_commands.py < lines.json

Reads a JSON list of lists of words; writes one object: ``errors``, what is wrong with each line,
empty where nothing is; and ``options``, every option of every parser that was asked.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from magi_serve import cli


class Parsed(Exception):
    """A sub-command has read its words: it is not to begin."""


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Options of `parser`, and of the parsers of its sub-commands."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in set(action.choices.values()):
                yield from options_of(child)


def try_line(words: list[str], options: set[str]) -> str:
    """What the parsers say against ``magi-serve WORDS``; their options are added to `options`."""
    read = argparse.ArgumentParser.parse_args
    depth = 0

    def parse_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        options.update(options_of(parser))
        found = read(parser, *args, **kwargs)
        if depth > 1:  # the first is that of `magi-serve` itself
            raise Parsed
        return found

    said = io.StringIO()
    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            cli.main(words)
        except Parsed:
            return ""
        except SystemExit as ended:
            return said.getvalue().strip().splitlines()[-1] if ended.code else ""
    return f"ended without reading its options: {said.getvalue()}"


def main() -> None:
    options: set[str] = set()
    errors = [try_line(words, options) for words in json.load(sys.stdin)]
    print(json.dumps({"errors": errors, "options": sorted(options)}))


if __name__ == "__main__":
    main()
