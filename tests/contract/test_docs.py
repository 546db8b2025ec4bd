"""The pages point at things that exist."""

from __future__ import annotations

import ast
import importlib
import re
from inspect import Parameter, signature
from pathlib import Path

import pytest

import flowdp
from tests.docs.programs import CONTINUES, FENCE, programs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "bench/LOG.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_NAME = re.compile(r"(?<![\w./-])flowdp((?:\.[A-Za-z_]\w*)+)")
CODE_PATH = re.compile(r"`((?:flowdp|tests|bench|examples|docs)/[\w./-]*)`")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in HEADING.findall(page)
    }


def exists(dotted: str) -> bool:
    """Whether `dotted` is a module of flowdp, or an attribute or a field of something in it."""
    value: object = importlib.import_module("flowdp")
    path = "flowdp"
    for part in dotted.split(".")[1:]:
        path = f"{path}.{part}"
        if hasattr(value, part):
            value = getattr(value, part)
        elif part in getattr(value, "__annotations__", {}):
            value = None
        else:
            try:
                value = importlib.import_module(path)
            except ModuleNotFoundError:
                return False
    return True


def broken_links(page: str, folder: Path) -> list[str]:
    """Relative links of a page in `folder` whose file, or whose heading in it, is not there."""

    def leads(link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = folder / path
        if path and not target.exists():
            return False
        return not anchor or anchor in anchors(target.read_text(encoding="utf-8") if path else page)

    return [link for link in LINK.findall(page) if not re.match(r"[a-z]+:", link) and not leads(link)]


def unknown_names(page: str) -> list[str]:
    """Dotted names below flowdp that a page uses and that do not exist."""
    return sorted({name for tail in CODE_NAME.findall(page) if not exists(name := f"flowdp{tail}")})


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_page(file: Path) -> None:
    page = file.read_text(encoding="utf-8")
    assert broken_links(page, file.parent) == []
    if file.name != "CHANGELOG.md":  # it may speak of names that are gone
        assert unknown_names(page) == []
        assert [path for path in CODE_PATH.findall(page) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_code_of_a_page_is_whole(file: Path) -> None:
    """`docs/test_pages.py` runs it; here is what a reader sees at once."""
    for program in programs(str(file.relative_to(ROOT))):
        placeholders = [
            node.lineno
            for node in ast.walk(ast.parse(program.code))
            if isinstance(node, ast.Call) and any(is_ellipsis(argument) for argument in node.args)
        ]
        assert placeholders == [], "`...` as an argument: a reader cannot run it"
    for language, block in FENCE.findall(file.read_text(encoding="utf-8")):
        if language == "python" and not block.startswith(CONTINUES):
            assert "import " in block, f"no import, and not {CONTINUES!r}:\n{block}"


def is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: flowdp\.(\w+)$", page, re.MULTILINE)) == sorted(flowdp.__all__)


def test_the_page_of_the_trainer_has_every_option_with_its_default() -> None:
    page = (ROOT / "docs/trainer.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", page, re.MULTILINE)
    expected = [
        (name, "" if option.default is Parameter.empty else repr(option.default).replace("'", '"'))
        for name, option in signature(flowdp.Trainer).parameters.items()
    ]
    assert sorted(rows) == sorted(expected)


def test_the_examples_are_numbered_without_a_gap() -> None:
    numbers = {int(file.name[:2]) for file in (ROOT / "examples").glob("[0-9]*")}
    assert numbers == set(range(1, len(numbers) + 1))
