"""``magi-serve complete`` against small servers that speak as others do."""

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from magi_serve import complete

PROGRESS = [{"total": 1000, "cache": 256, "processed": p, "time_ms": p} for p in (256, 600, 1000)]


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 256},
}
ANSWER: list[Any] = [
    ": keep-alive",
    *[chunk(prompt_progress=figures) for figures in PROGRESS],
    chunk(""),
    chunk("Hé"),
    chunk("llo", "stop"),
    {"choices": [], "usage": USAGE},
    "[DONE]",
]


class Server(ThreadingHTTPServer):
    """Answers with `events`, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: list[Any] = ANSWER
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.refuses: str | None = None
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        if self.server.refuses == "key":
            self.answer(401, {"error": {"message": "give a key"}})
            return
        self.answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self.server.headers.append(self.headers)
        if self.server.refuses in asked:
            message = f"Unrecognized request argument supplied: {self.server.refuses}"
            self.answer(400, {"error": {"message": message}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in self.server.events:
            text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            line = text if text.startswith(":") else f"data: {text}"
            self.wfile.write(f"{line}\n\n".encode())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def book(tmp_path: Path) -> str:
    file = tmp_path / "book.txt"
    file.write_text("Call me Ishmaël.", "utf-8")
    return str(file)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ask(server: Server, *words: str) -> int:
    return complete.main(["--url", server.url, *words])


def test_the_answer_goes_to_stdout_and_nothing_else(
    server: Server, book: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(server, "--file", book, "Who?") == 0
    said = capsys.readouterr()
    assert said.out == "Héllo\n"
    assert "1000 prompt tokens, 256 of them cached, 2 tokens" in said.err and "\r" not in said.err


def test_the_file_comes_before_the_question_and_the_first_model_is_asked(
    server: Server, book: str
) -> None:
    assert ask(server, "--file", book, "Who?", "--max-tokens", "9", "--temperature", "0") == 0
    (asked,) = server.asked
    content = "Call me Ishmaël.\n\nWho?"
    assert asked == {
        "model": "first",
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
        "max_tokens": 9,
        "temperature": 0,
    }


def test_several_files_and_a_named_model(server: Server, book: str) -> None:
    assert ask(server, "--file", book, "--file", book, "--model", "second", "Who?") == 0
    assert server.asked[0]["messages"][0]["content"].count("Ishmaël") == 2
    assert server.asked[0]["model"] == "second"


def test_standard_input_is_a_file_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Ishmaël".encode())))
    assert ask(server, "--file", "-", "Who?") == 0
    assert server.asked[0]["messages"][0]["content"] == "Ishmaël\n\nWho?"


def test_a_bar_on_a_terminal_follows_the_prompt_and_goes(
    server: Server, book: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert ask(server, "--file", book, "Who?") == 0
    drawn = terminal.getvalue()
    assert [f"{percent:3d}%" in drawn for percent in (25, 60, 100)] == [True] * 3
    assert "600 of 1000 tokens" in drawn and "256 cached" in drawn
    last_bar, _, summary = drawn.rpartition("\r\x1b[K")
    assert "100%" in last_bar and "%" not in summary
    assert capsys.readouterr().out == "Héllo\n"


def test_a_server_that_wants_a_key_says_so(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuses = "key"
    assert ask(server, "Who?") == 1
    assert "401: give a key" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["return_progress", "stream_options"])
def test_a_server_that_does_not_know_a_field_is_asked_without(
    server: Server, book: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuses = field
    assert ask(server, "--file", book, "Who?") == 0
    assert [field in asked for asked in server.asked] == [True, False]
    assert capsys.readouterr().out == "Héllo\n"


def test_a_server_without_progress_comments_or_usage(
    server: Server, book: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = [chunk("Hello"), chunk(None, "length"), "[DONE]"]
    assert ask(server, "--file", book, "Who?") == 0
    said = capsys.readouterr()
    assert said.out == "Hello\n" and "--max-tokens" in said.err


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([chunk("He"), {"error": {"message": "the engine has died"}}], "the engine has died"),
        ([chunk("He")], "ended early"),
        ([chunk("He"), "5"], "not an OpenAI stream"),
        ([chunk("He"), "no json"], "not an OpenAI stream"),
        ([], "ended early"),
    ],
)
def test_a_broken_stream_is_an_error(
    server: Server, book: str, events: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = events
    assert ask(server, "--file", book, "Who?") == 1
    said = capsys.readouterr()
    assert reason in said.err and "Traceback" not in said.err
    assert said.out in ("He\n", "")


def test_what_a_server_refuses_is_said(
    server: Server, book: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuses = "model"
    assert ask(server, "--file", book, "Who?") == 1
    assert "400: Unrecognized request argument supplied: model" in capsys.readouterr().err


def test_no_server_is_said_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert complete.main(["--url", "http://127.0.0.1:9/v1", "Who?"]) == 1
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9/v1" in said and "--url" in said


@pytest.mark.parametrize(("name", "content"), [("none.txt", None), ("image.png", b"\x89PNG\xff")])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert complete.main(["--file", str(tmp_path / name), "Who?"]) == 1
    assert name in capsys.readouterr().err


def test_key_and_url_come_from_the_usual_variables(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert complete.main(["Who?"]) == 0
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("words", [[], ["--url", "localhost:8000", "Who?"]])
def test_wrong_usage_exits_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        complete.main(words)
    assert ended.value.code == 2


def test_ctrl_c_exits_with_130(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(complete, "_events", interrupted)
    assert ask(server, "Who?") == 130


def test_a_reader_that_goes_is_no_traceback_and_nothing_heavy_is_imported(server: Server) -> None:
    server.events = [chunk("word ") for _ in range(20000)] + [chunk("", "stop"), "[DONE]"]
    code = (
        "import sys; from magi_serve.cli import main\n"
        f"code = main(['complete', '--url', '{server.url}', 'Who?'])\n"
        "heavy = {'torch', 'vllm', 'openai', 'httpx', 'pydantic'} & set(sys.modules)\n"
        "print(heavy or '', file=sys.stderr)\n"
        "sys.exit(code)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(4) == b"word"
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(60) == 1
    assert "Traceback" not in said and "Exception" not in said and "{" not in said
