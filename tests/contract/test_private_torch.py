"""Every private name of torch that flowdp uses is in docs/torch.md, with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/torch.md"
LIMIT = 55
OTHERS = {
    *("_reductions", "_computed", "_to_sync", "_update_count"),  # of torchmetrics
    *("_current_frames", "_reader", "_thread"),  # of Python
    "_is_sealed",  # of `StandInModule`, in its dict
    *("_orig", "_g"),  # ends of names of parameters, which torch documents
}
TORCH = {
    name
    for holder in (nn.Module, Tensor, Optimizer, _BaseDataLoaderIter, _MultiProcessingDataLoaderIter)
    for name in dir(holder)
} | {*vars(nn.Module()), "_data_queue", "_workers"}
"""Names that count as torch's where flowdp has the same ones for its own."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


def own_names(trees: list[ast.Module]) -> set[str]:
    """The names that flowdp defines: functions, classes, variables, attributes of `self`."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names in a module that are not flowdp's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr not in own or (node.attr in TORCH and not is_self(node.value)):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("flowdp"):
            yield from (*node.module.split("."), *(alias.name for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from () if node.value in own - TORCH else (node.value,)


def used_names(package: Path) -> set[str]:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(package.rglob("*.py"))]
    own = own_names(trees)
    return {name for tree in trees for name in foreign_names(tree, own) if is_private(name)} - OTHERS


def listed_names() -> list[str]:
    """The names of the page, each in the first column of its row."""
    rows = re.findall(r"^\| (`.+?`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_the_page_lists_the_names_in_use_and_no_others() -> None:
    listed = listed_names()
    assert len(listed) == len(set(listed))
    assert set(listed) == used_names(ROOT / "flowdp")
    assert len(listed) <= LIMIT
