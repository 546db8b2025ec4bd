"""The site of the documentation: complete, without a dead link, and without a request to another server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[2]

RESOURCES = {
    "link": ("href",),
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "object": ("data",),
}
"""Attributes by which a page has the browser fetch something; `a` has it fetched by the reader."""

FOREIGN = re.compile(r"(?:https?:)?//")
FETCHED = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class Html(HTMLParser):
    """Anchors, links and fetched resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = FETCHED.findall(text)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name == "id":
                self.anchors.add(value)
            elif value is not None and tag == "a" and name == "href":
                self.links.append(value)
            elif value is not None and name in RESOURCES.get(tag, ()):
                self.resources.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="the site needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Html]) -> None:
    fetched = {
        path.name: [one for one in page.resources if FOREIGN.match(one)] for path, page in pages.items()
    }
    assert {name: found for name, found in fetched.items() if found} == {}
    for style in site.rglob("*.css"):
        assert FETCHED.findall(style.read_text(encoding="utf-8")) == []


def test_links_and_anchors_resolve(pages: dict[Path, Html]) -> None:
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.resources]:
            target, anchor = urldefrag(link)
            if path.name == "404.html" or re.match(r"[a-z]+:|//", link):
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists() or (anchor and file in pages and unquote(anchor) not in pages[file].anchors):
                dead.append(f"{path.name}: {link}")
    assert dead == []


def test_every_page_is_in_the_navigation(site: Path, pages: dict[Path, Html]) -> None:
    reached = {(site / urldefrag(link).url).resolve() for link in pages[site / "index.html"].links}
    assert [path.name for path in pages if path.name != "404.html" and path not in reached] == []
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} <= {
        p.name for p in pages
    }


def test_the_options_of_the_trainer_stand_in_groups(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.partition('id="flowdp.Trainer"')[2]))
    first, *order = [
        "Model and step",
        "model (",
        "Data",
        "dataset (",
        "End",
        "epochs (",
        "Seeing",
        "timeline (",
    ]
    for words in order:
        text = text.partition(first)[2]
        assert words in text, f"{words!r} does not follow {first!r}"
        first = words


def test_the_notebook_has_its_outputs(site: Path) -> None:
    page = (site / "tutorial.html").read_text(encoding="utf-8")
    assert "test accuracy" in page
    assert 'src="data:image/png;base64,' in page
