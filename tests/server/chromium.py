"""A real browser, driven over its own DevTools protocol: just what the playground's test needs."""

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, ""), "ArrowDown": (40, "")}


def program() -> str | None:
    """The browser of this machine, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Chromium:
    """One page of a headless browser whose profile lies in `folder`."""

    def __init__(self, executable: str, folder: Path) -> None:
        self._numbers = itertools.count(1)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        options += ["--disable-background-networking", "--remote-debugging-port=0"]
        self._process = subprocess.Popen(
            [executable, *options, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port_file = folder / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not port_file.exists() or not port_file.read_text().strip():
            assert self._process.poll() is None and time.monotonic() < deadline, "no browser"
            time.sleep(0.1)
        address = f"http://127.0.0.1:{port_file.read_text().split()[0]}/json/list"
        with urllib.request.urlopen(address) as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
        self._open = ExitStack()
        socket = connect(pages[0]["webSocketDebuggerUrl"], max_size=None)
        self._socket = self._open.enter_context(socket)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(30)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What the protocol's `method` answers; errors that the page reports meanwhile are kept."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]))
            entry = message.get("params", {}).get("entry", {})
            if message.get("method") == "Log.entryAdded" and entry.get("level") == "error":
                self.errors.append(entry["text"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 60) -> Any:
        """Its first value that counts as true."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, (expression, self.text(), self.errors)
            time.sleep(0.05)
        return value

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def open(self, url: str) -> None:
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        self.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")

    def press(self, key: str) -> None:
        code, text = _KEYS[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def write(self, text: str) -> None:
        """As if pasted where the focus is."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
