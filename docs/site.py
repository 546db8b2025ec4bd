"""Hooks of the site: pages that lie outside docs/, and docstrings as Markdown.

Links on every page are those of the repository, so that they work where it is read as files; here they become
those of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["MarkdownDocstrings", "notebook_text", "on_files", "on_page_markdown", "site_links"]

ROOT = Path(__file__).resolve().parents[1]

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "bench/README.md": "bench/README.md",
    "bench/LOG.md": "bench/LOG.md",
    "examples/notebook.ipynb": "tutorial.md",
}
"""Pages outside docs/, by their paths in the repository, and their paths in the site."""

LINK = re.compile(r"(?<=\]\()[^)\s#]+|(?<= src=\")(?!data:)[^\"#]+|(?<= srcset=\")[^\"#]+")
TEXT_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
TRAINER = "flowdp.trainer.trainer.Trainer"
ENTRY = re.compile(r"^    (\w+): .*\n(?:     .*\n)*", re.MULTILINE)
LITERAL = re.compile(r"^( *)::\n\n((?:(?:\1    .*)?\n)+)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for path, uri in OUTSIDE.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        content = notebook_text(text) if path.endswith(".ipynb") else text
        files.append(File.generated(config, uri, content=content))
    return files


def notebook_text(notebook: str) -> str:
    """The cells of a notebook as Markdown, with the outputs that it keeps."""
    parts: list[str] = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fence(source))
        parts += map(_output, cell.get("outputs", ()))
    return "\n\n".join(parts)


def _output(output: dict[str, Any]) -> str:
    """An output of a cell: HTML, a picture, else text."""
    data = output.get("data", {})
    if "text/html" in data:
        lines = "".join(data["text/html"]).splitlines()  # an empty one would end the block of HTML
        return "<div>\n" + "\n".join(line for line in lines if line.strip()) + "\n</div>"
    if "image/png" in data:
        return (
            f'<img alt="Output of the cell" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
        )
    return _fence("".join(output.get("text") or data["text/plain"]).rstrip("\n"), "text")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the repository's links on a page into the site's."""
    del config
    return site_links(markdown, page.file.src_uri, {file.src_uri for file in files})


def site_links(markdown: str, uri: str, known: set[str]) -> str:
    """The text of a page with the links of the site.

    Args:
        markdown: The text, with links of the repository.
        uri: Path of the page in the site.
        known: Paths of all files of the site. A link to another file of the repository becomes its text.
    """
    folder = posixpath.dirname(_in_repository(uri))

    def target(link: str) -> str | None:
        """The path in the site of a file of the repository; None: it is no link to one."""
        path = posixpath.normpath(posixpath.join(folder, link))
        return _in_site(path) if (ROOT / path).exists() else None

    def text(match: re.Match[str]) -> str:
        found = target(match[2].partition("#")[0])
        return match[0] if found is None or found in known or match[2].startswith("#") else match[1]

    def moved(match: re.Match[str]) -> str:
        found = target(match[0])
        return match[0] if found is None else posixpath.relpath(found, posixpath.dirname(uri) or ".")

    return LINK.sub(moved, TEXT_LINK.sub(text, markdown))


def _in_repository(uri: str) -> str:
    return {uri: path for path, uri in OUTSIDE.items()}.get(uri, f"docs/{uri}")


def _in_site(path: str) -> str:
    return OUTSIDE.get(path, path.removeprefix("docs/"))


class MarkdownDocstrings(Extension):
    """Examples behind `::` as blocks of Python, in place of reStructuredText's."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        del kwargs
        if obj.docstring is not None:
            text = LITERAL.sub(_fenced, obj.docstring.value + "\n").rstrip()
            obj.docstring.value = grouped(text) if obj.path == TRAINER else text


def grouped(docstring: str) -> str:
    """The docstring of the Trainer with its arguments in the groups of docs/trainer.md."""
    before, _, rest = docstring.partition("\nArgs:\n")
    listed, _, after = rest.partition("\n\n")
    entries = {match[1]: match[0] for match in ENTRY.finditer(listed + "\n")}
    page = (ROOT / "docs/trainer.md").read_text(encoding="utf-8")
    options = page.partition("\n## Options\n")[2].partition("\n## ")[0]
    sections = [
        f"Args: {title}\n" + "".join(entries[name] for name in re.findall(r"^\| `(\w+)`", rows, re.MULTILINE))
        for title, rows in re.findall(r"^### (.+)\n((?:(?!### ).*\n?)*)", options, re.MULTILINE)
    ]
    return "\n".join([before, "", *sections, after])


def _fenced(match: re.Match[str]) -> str:
    return indent(_fence(dedent(match[2]).strip("\n")), match[1]) + "\n\n"


def _fence(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```"
