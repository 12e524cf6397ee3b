"""The page at ``/`` in a real browser, in front of a real service."""

import importlib.util
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("websockets")

import httpx

from magi_serve.server.routes import playground

Chromium = Any
"""A page, as chromium.py has it."""

DOCUMENT = "The keeper of the lighthouse wrote down every ship that passed. " * 40


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    """chromium.py, which lies beside this file."""
    path = Path(__file__).with_name("chromium.py")
    spec = importlib.util.spec_from_file_location("chromium", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(driver: ModuleType, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chromium]:
    """The playground of the running service, its models loaded."""
    executable = driver.program()
    if executable is None:
        without = f"needs a browser: {' or '.join(driver.PROGRAMS)}"
        assert os.environ.get("CI") != "true", without
        pytest.skip(without)
    service = request.getfixturevalue("service")  # slow to start, and not without a browser
    browser = driver.Chromium(executable, tmp_path / "profile")
    try:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=1200, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        browser.open(service.url + "/")
        browser.wait_for("document.getElementById('model').value")
        yield browser
    finally:
        browser.close()


def value(page: Chromium, name: str) -> str:
    return str(page.evaluate(f"document.getElementById('{name}').textContent"))


def focused(page: Chromium) -> str:
    return str(page.evaluate("document.activeElement.id"))


def tab_to(page: Chromium, name: str) -> None:
    for _ in range(20):
        if focused(page) == name:
            return
        page.press("Tab")
    raise AssertionError(f"the Tab key does not lead to {name}")


def pages_held(service: Any) -> int | None:
    kv = httpx.get(f"{service.url}/magi/v1/topology").json()["kv"]
    return None if kv is None else kv["pages"] - kv["free_pages"]


pytestmark = pytest.mark.vllm


def test_a_document_is_asked_about_by_keyboard_alone(page: Chromium, service: Any) -> None:
    tab_to(page, "document")
    page.write(DOCUMENT)
    assert value(page, "size") == f"{len(DOCUMENT):,} characters"
    tab_to(page, "question")
    page.write("Who wrote down every ship?")
    tab_to(page, "tokens")
    page.evaluate("document.activeElement.select()")
    page.write("24")
    tab_to(page, "ask")
    page.press("Enter")
    page.wait_for("document.getElementById('answer').textContent.length > 3")
    page.wait_for("/^(Done|Ended)/.test(document.getElementById('state').textContent)")
    total = re.search(r"Reading the prompt: ([\d,]+) of ([\d,]+) tokens", page.text())
    assert total is not None and total[1] == total[2] and int(total[2]) > 400
    assert value(page, "prompt-tokens").split(" ")[0] == total[2]
    assert 1 <= int(value(page, "answer-tokens")) <= 24
    assert re.fullmatch(r"\d+\.\d\d s", value(page, "first"))
    assert float(value(page, "speed")) > 0
    assert page.errors == []
    if shots := os.environ.get("PLAYGROUND_SCREENSHOTS"):
        page.wait_for("/pages held/.test(document.getElementById('kv-text').textContent)")
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            page.call("Emulation.setEmulatedMedia", features=[feature])
            page.screenshot(Path(shots) / f"playground-{scheme}.png")


def test_an_answer_that_is_stopped_frees_its_pages(page: Chromium, service: Any) -> None:
    for name, text in (("question", "Count to a million:"), ("tokens", "800")):
        page.evaluate(f"document.getElementById('{name}').value = {text!r}")
    page.evaluate("document.getElementById('kind').value = 'completion'")
    page.evaluate("document.getElementById('ask').click()")
    page.wait_for("document.getElementById('answer').textContent.length > 10")
    page.evaluate("document.getElementById('question').focus()")
    page.press("Escape")
    page.wait_for("document.getElementById('state').textContent === 'Stopped'")
    assert not page.evaluate("document.getElementById('ask').disabled")
    deadline = time.monotonic() + 30
    while pages_held(service) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_errors_are_said_and_do_no_harm(page: Chromium) -> None:
    page.evaluate("document.getElementById('question').value = 'word '.repeat(3000)")
    page.evaluate("document.getElementById('ask').click()")
    said = page.wait_for("document.getElementById('problem').textContent")
    assert "1024" in said
    assert not page.evaluate("document.getElementById('ask').disabled")


def test_the_engine_is_shown(page: Chromium) -> None:
    page.wait_for("/of [\\d,]+ pages/.test(document.getElementById('kv-text').textContent)", 20)
    assert value(page, "workers") == "1"
    row = page.evaluate("document.getElementById('groups').innerText")
    assert "cpu" in row and "MagiAttentionBackend" in row


def test_the_page_loads_nothing_from_elsewhere(page: Chromium, service: Any) -> None:
    names = page.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
    assert names and all(name.startswith(service.url) for name in names)
    assert page.errors == []
    policy = httpx.get(service.url + "/").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert re.search(r"(src|href|url\()\s*=?\s*[\"']?(https?:)?//", playground.PAGE) is None


def test_everything_to_be_used_has_a_name_and_a_colour_to_be_seen_in(page: Chromium) -> None:
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    used = {"textbox", "button", "combobox", "spinbutton", "progressbar", "table"}
    found = [n for n in tree if n.get("role", {}).get("value") in used and not n.get("ignored")]
    assert len(found) >= 9
    unnamed = [n["role"]["value"] for n in found if not n.get("name", {}).get("value")]
    assert unnamed == []
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.call("Emulation.setEmulatedMedia", features=[feature])
        for selector in ("body", ".hint", "#ask", "textarea"):
            ratio = page.evaluate(CONTRAST.replace("SELECTOR", selector))
            assert ratio >= 4.5, (scheme, selector, ratio)


CONTRAST = """(() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => parts(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const element = document.querySelector("SELECTOR");
  let behind = element;
  const ground = () => getComputedStyle(behind).backgroundColor;
  while (parts(ground())[3] === 0) { behind = behind.parentElement; }
  const pair = [light(getComputedStyle(element).color), light(ground())];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
})()"""
"""The contrast of an element's text with what is behind it, as WCAG has it."""
