"""What mkdocs has to be told about this repository (`mkdocs.yml` names this file as a hook).

The changelog and the examples are pages of the site too; their texts stay where readers of the
repository look for them, and every link to them leads to the page. And what reads docstrings
follows neither links to folders nor folders without `__init__.py`, of which `magi_serve` has three:
it gets a copy of the sources that has neither.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "examples/README.md": "examples.md"}
LANGUAGES = {".sh": "bash", ".py": "python"}

_sources = tempfile.TemporaryDirectory(prefix="magi-serve-docs-")


@event_priority(100)  # before mkdocstrings reads its own options
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay out the sources that docstrings are read from."""
    folder = Path(_sources.name)
    shutil.copytree(
        ROOT / "magi_serve",
        folder / "magi_serve",
        ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(".py")],
        dirs_exist_ok=True,
    )
    for python in folder.rglob("*.py"):
        (python.parent / "__init__.py").touch()
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(folder)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `PAGES`, with links as they have to be in the folder of the others."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    texts = {
        "changelog.md": to_pages(changelog.replace("](docs/", "](")),
        "examples.md": examples(),
    }
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to files of `PAGES` to their pages, and read what is folded away as Markdown."""
    return to_pages(markdown, "../").replace("<details>", '<details markdown="1">')


def to_pages(markdown: str, up: str = "") -> str:
    """`markdown` with links to the files of `PAGES`, which are `up` from it, led to their pages."""
    for file, page in PAGES.items():
        markdown = markdown.replace(f"]({up}{file}", f"]({page}")
    return markdown


def examples() -> str:
    """The text about the examples, and each of them in full."""
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    parts = []
    for name in re.findall(r"\]\(([\w.]+)\)", text):
        file = ROOT / "examples" / name
        text = text.replace(f"]({name})", f"](#{name.replace('.', '')})")
        source = file.read_text(encoding="utf-8").rstrip()
        parts.append(f"## {name}\n\n```{LANGUAGES[file.suffix]}\n{source}\n```\n")
    return "\n".join([text, *parts])
