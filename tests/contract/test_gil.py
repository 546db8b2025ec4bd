"""docs/gil.md names what threads share: each name exists, and no state of a module is left out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(flowdp/[\w/]+\.py)` ([^|]+) \|", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")
PURE = ("policy", "machine", "sim")
"""Folders without threads."""

CONTAINERS = {
    "set",
    "dict",
    "list",
    "deque",
    "Counter",
    "defaultdict",
    "count",
    "WeakSet",
    "WeakValueDictionary",
}
GUARDS = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "local", "ContextVar"}
CACHES = {"cache", "lru_cache", "cached_property"}


def named(page: str) -> dict[str, set[str]]:
    """The words of each file that a table's rows name: of `Gate._held`, both."""
    found: dict[str, set[str]] = {}
    for file, names in ROW.findall(page):
        words = {word for name in NAME.findall(names) for word in name.split(".")}
        found.setdefault(file, set()).update(words)
    return found


def unknown(words: set[str], source: str) -> list[str]:
    return sorted(word for word in words if not re.search(rf"\b{word}\b", source))


def shared_state(source: str) -> Iterator[str]:
    """Names in a module that hold what any thread may change: containers, locks, objects, caches."""
    tree = ast.parse(source)
    own = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and not any("frozen=True" in ast.unparse(d) for d in node.decorator_list)
    }
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.FunctionDef) and {_last(d) for d in node.decorator_list} & CACHES:
            yield node.name
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        is_empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value)[1:-1]
        kind = _last(value.func) if isinstance(value, ast.Call) else ""
        if is_empty or kind in CONTAINERS | GUARDS | own:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if kind not in own or not name.isupper())  # else a constant
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def _last(node: ast.expr) -> str:
    """The last name of `threading.Lock` or `lru_cache(maxsize=1)`."""
    return re.split(r"[(\[]", ast.unparse(node))[0].rpartition(".")[2]


def test_each_name_exists() -> None:
    rows = named((ROOT / "docs/gil.md").read_text(encoding="utf-8"))
    assert len(rows) > 30
    wrong = {file: unknown(words, (ROOT / file).read_text(encoding="utf-8")) for file, words in rows.items()}
    assert {file: words for file, words in wrong.items() if words} == {}


def test_no_state_of_a_module_is_left_out() -> None:
    rows = named((ROOT / "docs/gil.md").read_text(encoding="utf-8"))
    missing = []
    for path in sorted((ROOT / "flowdp").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file.split("/")[1] not in PURE:
            state = set(shared_state(path.read_text(encoding="utf-8")))
            missing += [f"{file} {name}" for name in sorted(state - rows.get(file, set()))]
    assert missing == [], "say in the table of docs/gil.md why these are right without the interpreter lock"
