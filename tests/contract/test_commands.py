"""The commands on the pages: their targets, modules, files, options and extras exist."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.programs import FENCE, ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]

INLINE = re.compile(r"`([^`\n]+)`")
MAKE = re.compile(r"^\s*make ([\w-]+)(.*)$", re.MULTILINE)
PYTHON = re.compile(r"python3? (?:-m ([\w.]+)|([\w/]+\.py))([^\n#]*)")
TORCHRUN = re.compile(r"torchrun ((?:.*\\\n)*[^\n#]*)")
EXTRA = re.compile(r"flowdp\[([\w,]+)\]")
OPTION = re.compile(r"(?<![\w-])--([a-z][\w-]*)")


def commands(page: Path) -> list[str]:
    """The shell blocks of a page, and its code within lines."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for language, block in FENCE.findall(text) if language in ("", "bash")]
    return [*blocks, *INLINE.findall(FENCE.sub("", text))]


def program_of(name: str) -> str:
    """The text of a script, or of the package of a module, whose helpers may take its options."""
    path = ROOT / f"{name}.py" if "/" in name else ROOT / name.partition(".")[0]
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)


def unknown(options: str, program: str) -> list[str]:
    return [option for option in OPTION.findall(options) if f'"--{option}"' not in program]


def faults(command: str) -> list[str]:
    """What a command names that does not exist."""
    found = [f"flowdp[{extra}]" for names in EXTRA.findall(command) for extra in names.split(",")]
    found = [extra for extra in found if extra[7:-1] not in EXTRAS]
    for target, rest in MAKE.findall(command):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
        if recipe is None:
            found.append(f"make {target}")
        elif options := re.search(r'ARGS="?([^"\n]*)', rest):
            module = re.search(r"-m ((?:bench|tests|docs)[\w.]*)", recipe[1])
            found += unknown(options[1], program_of(module[1])) if module else []
    for module, file, rest in PYTHON.findall(command):
        if module.split(".")[0] in ("bench", "tests", "docs", "flowdp", "examples"):
            name = module
        elif file.startswith("examples/"):
            name = file.removesuffix(".py")
        else:
            continue
        is_there = (ROOT / name.replace(".", "/")).is_dir() or (
            ROOT / f"{name.replace('.', '/')}.py"
        ).exists()
        found += unknown(rest, program_of(name)) if is_there else [name]
    for options in TORCHRUN.findall(command):
        run = importlib.util.find_spec("torch.distributed.run")
        assert run is not None
        assert run.origin is not None
        given = options.partition(".py")
        found += unknown(given[0], Path(run.origin).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands(page: Path) -> None:
    assert [(command, fault) for command in commands(page) for fault in faults(command)] == []


@pytest.mark.parametrize(
    "command",
    [
        "make tset",
        'make gpu ARGS="--cal first"',
        "python -m bench.micro.nothing",
        "python -m bench.micro.launch --quikc",
        "python examples/09_nothing.py",
        "torchrun --nodes 2 train.py",
        "pip install flowdp[cuda99]",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert faults(command)
