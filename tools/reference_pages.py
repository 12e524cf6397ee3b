"""Writes docs/settings.md and docs/errors.md from what the code says.

    python tools/reference_pages.py [--check]

Settings are the fields of the two classes in `magi_serve/settings.py`. Errors are read from the
sources (`error_sources.py`). What the sources do not say, when an answer comes and what to do, is
in `error_notes.py`; an error without a note there, or a note without its error, is a mistake.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from error_notes import EXIT_CODES, FIELDS, HTTP, OF_VLLM, WEBSOCKETS, Note
from error_sources import HttpError, exception_rows, http_errors, start_errors

from magi_serve.server.middleware.errors import _TYPES
from magi_serve.settings import ENV_PREFIX, ServiceSettings, Settings

ROOT = Path(__file__).resolve().parent.parent

SETTINGS_PAGE = Template("""\
# Settings

Written by `make pages`, and compared with the code in every test run. All else is an option of
vLLM, under vLLM's own name.

## Of an engine

Read by every process of an engine, also under plain `vllm serve`. Given as a variable, or by key in
vLLM's `--additional-config '{"magi_serve": {"kernel": "triton"}}'`, which wins. A name that is not
below is refused, in either place.

$engine

## Of the service

Read by `magi-serve serve` alone. Given as an option, which wins, or as a variable.
[Security](security.md) says what each limit answers.

$service
""")

ERRORS_PAGE = Template("""\
# Errors

Written by `make pages`, and compared with the code in every test run.

## Over HTTP

An error has OpenAI's form, under `/v1/messages` Anthropic's:

```json
{"error": {"message": "...", "type": "BadRequestError", "param": "n", "code": 400}}
{"type": "error", "error": {"type": "invalid_request_error", "message": "..."}}
```

`code` is the status again; `param` is the field that it is about, or null. Messages have at most
500 characters and do not repeat what was sent. Words in capitals below are filled in. With each 429
and 503 below comes `Retry-After`, in seconds.

$http

Anthropic's types are $anthropic.

### From vLLM

vLLM's handlers answer with types and texts of their own, which are only shortened:

$of_vllm

### In a stream

A stream that has begun keeps its status 200; its end is an event with the error, then
`data: [DONE]` (of `/v1/messages`: `event: error`). A stream that ends without `[DONE]` was cut on
the way.

### WebSockets

$websockets

## When the service does not start

The last line says why, after `magi-serve: `, and the process ends with 1:

$start

To these come the reasons of a setting (`SettingsError`, with the variable or option that is wrong)
and of an attention backend that cannot serve the model, each with
`--attention-backend auto leaves the choice to vLLM`.

## Exit codes

$exit_codes

## Exceptions

All that is raised on purpose derives from `MagiServeError`; mistakes in arguments also from
`ValueError`. A message names the argument, the value, what is accepted and the way out.

$exceptions
""")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    shown = ([cell.replace("|", "\\|") for cell in row] for row in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in shown)


def quoted(text: str) -> str:
    """`text` as code, whether or not it has code in it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def settings_page() -> str:
    """The settings of an engine, and those of the HTTP service."""
    engine = [
        [f"`{name}`", f"`{ENV_PREFIX}{name.upper()}`", _default(field), _sentence(field)]
        for name, field in Settings.model_fields.items()
    ]
    service = []
    for name, field in ServiceSettings.model_fields.items():
        option = f"`--{name.replace('_', '-')}`"
        if name == "api_key":  # an option of vLLM's, which takes several
            option += " (vLLM's, takes several)"
        service.append([option, f"`{ENV_PREFIX}{name.upper()}`", _default(field), _sentence(field)])
    return SETTINGS_PAGE.substitute(
        engine=table(["key", "variable", "default", "what"], engine),
        service=table(["option", "variable", "default", "what"], service),
    )


def _default(field: Any) -> str:
    return "none" if field.default is None else f"`{field.default}`"


def _sentence(field: Any) -> str:
    return str(field.description).replace("[", "\\[")


def noted(errors: Sequence[HttpError]) -> list[tuple[HttpError, Note]]:
    """Each error with its note.

    Raises:
        SystemExit: an error has none or several, or a note has no error.
    """
    pairs, unused = [], set(HTTP)
    for error in errors:
        fitting = [part for part in HTTP if part in error.message]
        if len(fitting) != 1:
            sys.exit(f"tools/error_notes.py has {len(fitting)} notes for {error.message!r}")
        unused.discard(fitting[0])
        pairs.append((error, HTTP[fitting[0]]))
    if unused:
        sys.exit(f"tools/error_notes.py has notes of no error: {sorted(unused)}")
    return pairs


def http_rows() -> list[list[str]]:
    rows = []
    for error, note in noted(http_errors()):
        kind = _TYPES[error.status][0] if error.status in _TYPES else "ServiceUnavailableError"
        message = quoted(note.shown or error.message)
        rows.append([str(error.status), f"`{kind}`", message, note.when, note.way_out])
    return sorted([*rows, list(FIELDS)], key=lambda row: row[0])


def errors_page() -> str:
    """The catalogue of errors."""
    anthropic = [f"`{theirs}` for {status}" for status, (_, theirs) in _TYPES.items()]
    codes = [[f"`{command}`", code, when] for command, code, when in EXIT_CODES]
    return ERRORS_PAGE.substitute(
        http=table(["status", "type", "message", "when", "way out"], http_rows()),
        anthropic=", ".join(anthropic),
        of_vllm=table(["status", "type", "when"], OF_VLLM),
        websockets=table(["close code", "when"], [[str(code), when] for code, when in WEBSOCKETS]),
        start="\n".join(f"- {quoted(text)}" for text in start_errors()),
        exit_codes=table(["command", "code", "when"], codes),
        exceptions=table(["class", "module", "bases", "meaning"], exception_rows()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    for name, text in (("settings", settings_page()), ("errors", errors_page())):
        path = ROOT / f"docs/{name}.md"
        if not check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what the code says: make pages")


if __name__ == "__main__":
    main()
