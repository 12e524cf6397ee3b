"""``magi-serve complete``: ask a model about files, and see how far it is with reading them.

Works with any server that speaks OpenAI's chat completions. What only some of them know is asked
for first (progress of the prompt, usage in a stream) and left out where it is refused.
"""

import argparse
import contextlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from magi_serve.errors import MagiServeError
from magi_serve.progress_bar import ProgressBar

DEFAULT_URL = "http://127.0.0.1:8000/v1"

_OPTIONAL = {"stream_options": {"include_usage": True}, "return_progress": True}
_REFUSED = (400, 422)


class CompleteError(MagiServeError):
    """No answer, or not the whole of it."""


def main(argv: Sequence[str]) -> int:
    """Run ``magi-serve complete ARGV``.

    Returns:
        0 when the answer is complete, or as long as was allowed; 1 when it is not, 130 on Ctrl-C.
    """
    args = _parse(argv)
    bar = ProgressBar(sys.stderr)
    try:
        body = {"messages": [{"role": "user", "content": _content(args)}], "stream": True}
        body["model"] = args.model or _first_model(args)
        for name in ("max_tokens", "temperature"):
            if (value := getattr(args, name)) is not None:
                body[name] = value
        _print_answer(_events(args, body), bar)
    except KeyboardInterrupt:
        bar.clear()
        return 130
    except BrokenPipeError:
        # Nobody reads on. What is left in the buffer is not to fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MagiServeError as error:
        bar.clear()
        print(f"magi-serve complete: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="magi-serve complete",
        description="Ask a model on an OpenAI-compatible server about files. The answer goes to "
        "stdout, all else to stderr.",
        epilog="The key, if the server wants one, is read from OPENAI_API_KEY.",
    )
    parser.add_argument("question", help="comes after the files in the prompt")
    parser.add_argument(
        "--file", action="append", default=[], help="text in UTF-8; several are joined; - is stdin"
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL,
        help=f"where /chat/completions is; OPENAI_BASE_URL or {DEFAULT_URL} by default",
    )
    parser.add_argument("--model", help="the server's first by default")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of the answer")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        dest="timeout_s",
        help="seconds without a byte until it gives up; 600 by default",
    )
    args = parser.parse_args(argv)
    if not args.url.startswith(("http://", "https://")):
        parser.error(f"--url={args.url} is not accepted: it begins with http:// or https://")
    args.url = args.url.rstrip("/")
    return args


def _content(args: argparse.Namespace) -> str:
    """The prompt: files first, so that the next question about them finds them in the cache."""
    parts = []
    for name in args.file:
        try:
            data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            parts.append(data.decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise CompleteError(f"--file={name}: {error}; give text in UTF-8") from error
    return "\n\n".join([*parts, args.question])


def _first_model(args: argparse.Namespace) -> str:
    try:
        with _open(args, "/models") as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        raise CompleteError(f"{args.url}/models answers {_told(error)}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CompleteError(f"{args.url}/models names no model; give --model") from error


def _open(args: argparse.Namespace, path: str, body: Any = None) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(args.url + path, data, headers)
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=args.timeout_s)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise CompleteError(f"no answer from {args.url} ({reason}); is --url right?") from error
    return answer


def _events(args: argparse.Namespace, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of the answer, until the server says that it is complete."""
    with _ask(args, body) as answer:
        for line in _lines(answer, args):
            if not line.startswith(b"data:"):
                continue  # a comment, or an event's end
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            chunk = _parsed(data)
            if chunk is None:
                raise CompleteError(f"{args.url} sends what is not an OpenAI stream")
            if error := chunk.get("error"):
                raise CompleteError(
                    error.get("message", error) if isinstance(error, dict) else error
                )
            yield chunk
    raise CompleteError("the answer ended early; the server's log may say why")


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        chunk = json.loads(data)
    except ValueError:
        return None
    return chunk if isinstance(chunk, dict) else None


def _lines(answer: http.client.HTTPResponse, args: argparse.Namespace) -> Iterator[bytes]:
    try:
        yield from answer
    except TimeoutError as error:
        raise CompleteError(
            f"{args.url} has sent nothing for {args.timeout_s:g} s; --timeout waits longer"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise CompleteError(f"the connection to {args.url} broke ({error})") from error


def _ask(args: argparse.Namespace, body: dict[str, Any]) -> http.client.HTTPResponse:
    """The answer to `body`, without those optional fields that the server says it does not know."""
    optional = dict(_OPTIONAL)
    while True:
        try:
            return _open(args, "/chat/completions", {**body, **optional})
        except urllib.error.HTTPError as error:
            told = _told(error)
            unknown = [name for name in optional if name in told]
            if error.code not in _REFUSED or not unknown:
                raise CompleteError(f"{args.url} answers {told}") from error
            for name in unknown:
                del optional[name]


def _told(error: urllib.error.HTTPError) -> str:
    """The status and the message of an answer that is an error."""
    text = error.read(65536).decode(errors="replace").strip() or str(error.reason)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return f"{error.code}: {text}"


def _print_answer(chunks: Iterator[dict[str, Any]], bar: ProgressBar) -> None:
    usage: dict[str, Any] = {}
    finish_reason = None
    last = ""
    bar.start()
    try:
        for chunk in chunks:
            if figures := chunk.get("prompt_progress"):
                bar.update(figures)
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or []:
                finish_reason = choice.get("finish_reason") or finish_reason
                text = (choice.get("delta") or {}).get("content")
                if text:
                    bar.clear()
                    last = text
                    print(text, end="", flush=True)
    finally:
        bar.clear()
        if last and not last.endswith("\n"):
            print(flush=True)
    if usage:
        print(_summary(usage), file=sys.stderr)
    if finish_reason == "length":
        print("the answer was cut at the limit; --max-tokens raises it", file=sys.stderr)


def _summary(usage: dict[str, Any]) -> str:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return (
        f"{usage.get('prompt_tokens')} prompt tokens, {cached} of them cached, "
        f"{usage.get('completion_tokens')} tokens in the answer"
    )
