"""Imports go downward only, and the pure rooms stay pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]

LAYERS = (
    {"errors"},
    {"validators"},
    {"options"},
    {"policy"},
    {"device", "protocol"},
    {"graphs", "machine", "modules", "network", "threads", "timeline"},
    {"collective", "data", "sim"},
    {"checkpoint"},
    {"observe", "replica"},
    {"checks", "engine"},
    {"data_parallel", "ddp", "trainer"},
    {"__init__"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

STANDARD_LIBRARY_ALONE = {
    *("errors", "validators", "options", "policy", "protocol", "machine", "sim", "threads"),
}
PURE = STANDARD_LIBRARY_ALONE - {"threads"}
IMPURE = {"threading", "queue", "time", "os", "logging"}
ONLY_IN = dict.fromkeys(("cupy", "cupyx", "cupy_backends"), "collective/fused.py")


def room_of(module: tuple[str, ...]) -> str:
    """The room of a dotted name below flowdp; what no layer names lies above all, as `flowdp` itself does."""
    return module[0] if module and module[0] in LEVEL else "__init__"


def imports_of(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and absolute dotted name of everything that a module of `package` imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            if base == ("flowdp",):  # `from flowdp import policy`: the names are the rooms
                for alias in node.names:
                    yield node.lineno, (*base, alias.name)
            else:
                yield node.lineno, base


def offence(path: str, room: str, target: tuple[str, ...]) -> str | None:
    """What is wrong with a module of `room` importing `target`; None when nothing is."""
    if target[0] == "flowdp":
        other = room_of(target[1:])
        if other != room and LEVEL[other] >= LEVEL[room]:
            return f"{room} must not import {other}"
        return None
    # A `__main__` is the shell around a pure room: nothing imports it, and it may look at the clock.
    if room in PURE and target[0] in IMPURE and not path.endswith("__main__.py"):
        return f"{room} is pure and must not import {target[0]}"
    if room in STANDARD_LIBRARY_ALONE and target[0] not in sys.stdlib_module_names:
        return f"{room} has the standard library alone, not {target[0]}"
    if ONLY_IN.get(target[0], path) != path:
        return f"{target[0]} belongs in {ONLY_IN[target[0]]} alone"
    return None


def offences(package: Path) -> list[str]:
    """Every import below the folder `package` that breaks a rule, as file:line: reason."""
    found = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        path = file.relative_to(package).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
        for line, target in imports_of(tree, ("flowdp", *parts[:-1])):
            if reason := offence(path, room_of(parts), target):
                found.append(f"flowdp/{path}:{line}: {reason}")
    return found


def test_imports_go_downward() -> None:
    found = offences(ROOT / "flowdp")
    assert not found, "\n" + "\n".join(found)


def circle(package: Path) -> list[str]:
    """Modules below the folder `package` that import each other in a circle, if there is one."""
    modules = {
        (package.name, *file.relative_to(package).with_suffix("").parts) for file in package.rglob("*.py")
    }
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for module in modules:
        tree = ast.parse(package.joinpath(*module[1:]).with_suffix(".py").read_text(encoding="utf-8"))
        graph[module] = {target for target in targets_of(tree) if target in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [".".join(module) for module in error.args[1]]
    return []


def targets_of(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Dotted names of imports, and of each name imported from a package: it may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            base = tuple(node.module.split("."))
            yield base
            yield from ((*base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)


def test_imports_have_no_circle() -> None:
    assert not circle(ROOT / "flowdp")


def test_public_names_need_no_extra() -> None:
    program = """
import sys
for extra in ("cupy", "matplotlib", "safetensors"):
    sys.modules[extra] = None       # `import cupy` raises ImportError from here on
import torch                        # what torch loads on its own account is not ours
before = set(sys.modules)
import flowdp.api
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded & {"cupy", "cupyx", "tqdm", "sklearn", "tensorboard", "wandb", "mlflow"}))
"""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "[]"
