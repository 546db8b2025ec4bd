"""Tests of the containers of batches, arguments and outputs: flattened and rebuilt."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node

from flowdp.device.trees import (
    batch_length,
    cut,
    field_names,
    field_of,
    flatten,
    is_cut,
    unflatten,
)

X = torch.arange(8.0).reshape(4, 2)
Y = torch.arange(4)


@dataclass
class Plain:
    x: Tensor
    y: Tensor
    name: str = "plain"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor


@dataclass
class Derived:
    x: Tensor
    scale: InitVar[float]
    total: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.total = self.x.sum(1) * scale
        self.note = "set beside the fields"

    @cached_property
    def twice(self) -> Tensor:
        return self.x * 2


class Encoding(UserDict[str, Any]):
    """Like transformers' BatchEncoding: another constructor, items as attributes, `to`."""

    def __init__(self, data: dict[str, Any], encodings: list[str]) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: object) -> Encoding:
        raise AssertionError("its tensors are moved one by one")


class Sub(dict[str, Any]):
    pass


class Rows(list[Any]):
    pass


class Attrs:
    """A class like those of `attrs`."""

    __slots__ = ("x", "y")
    __attrs_attrs__ = (SimpleNamespace(name="x"), SimpleNamespace(name="y"))

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


Pair = namedtuple("Pair", "x y")


def tree_cut(tree: Any, start: int, samples: int, length: int = 4) -> Any:
    """The arguments of one device."""
    leaves, form = flatten(tree, length)
    return unflatten([cut(leaf, start, samples) if is_cut(leaf, length) else leaf for leaf in leaves], form)


CONTAINERS = [
    Plain(X, Y),
    Frozen(X, Y),
    Encoding({"x": X, "y": Y}, list("abcd")),
    Sub(x=X, y=Y),
    SimpleNamespace(x=X, y=Y),
    Attrs(X, Y),
    Pair(X, Y),
    OrderedDict(x=X, y=Y),
    defaultdict(list, x=X, y=Y),
    {"x": X, "y": Y},
]


@pytest.mark.parametrize("batch", CONTAINERS, ids=lambda batch: type(batch).__name__)
def test_what_batches_come_in_is_cut_and_stays_what_it_is(batch: Any) -> None:
    part = tree_cut(batch, 1, 2)
    assert type(part) is type(batch)
    assert field_of(part, "x").tolist() == X[1:3].tolist()
    assert field_of(part, "y").tolist() == [1, 2]
    assert field_of(batch, "y").tolist() == [0, 1, 2, 3], "the batch itself is left alone"
    assert {"x", "y"} <= set(field_names(batch))
    assert batch_length(batch) == 4
    assert flatten(part)[1] == flatten(batch)[1]


@pytest.mark.parametrize(
    "batch", [[X, Y], (X, Y), deque([X, Y]), Rows([X, Y])], ids=lambda b: type(b).__name__
)
def test_sequences(batch: Any) -> None:
    part = tree_cut(batch, 1, 2)
    assert type(part) is type(batch)
    assert part[1].tolist() == [1, 2]


def test_what_an_object_computed_of_its_fields_is_cut_with_them() -> None:
    batch = Derived(X, 3.0)
    batch.twice.add_(0.5)
    part = tree_cut(batch, 1, 2)
    assert part.total.tolist() == [15.0, 27.0]
    assert part.twice.tolist() == (X[1:3] * 2 + 0.5).tolist()
    assert part.note == "set beside the fields"


def test_a_library_that_registers_its_class_has_its_way() -> None:
    class Own(dict[str, Any]):
        pass

    built: list[str] = []

    def build(values: Any, keys: Any) -> Own:
        built.append("its own way")
        return Own(zip(keys, values, strict=True))

    register_pytree_node(Own, lambda own: (list(own.values()), list(own)), build)
    try:
        assert tree_cut(Own(x=X), 1, 2)["x"].tolist() == X[1:3].tolist()
        assert built == ["its own way"]
        assert list(flatten(Own(x=X))[1].paths()) == ["['x']"]
    finally:
        del SUPPORTED_NODES[Own]


def test_a_cache_of_transformers_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class is recognized by its module; a stand-in, as the package may not be installed."""
    name = "transformers.cache_utils"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))

    class Layer:
        __module__ = name

        def __init__(self, keys: Tensor) -> None:
            self.keys, self.device = keys, keys.device

    class Cache:
        __module__ = name

        def __init__(self, *layers: Layer) -> None:
            self.layers = list(layers)

    part = tree_cut(Cache(Layer(X), Layer(X + 1)), 1, 2)
    assert [layer.keys.tolist() for layer in part.layers] == [X[1:3].tolist(), (X[1:3] + 1).tolist()]


# ---------------------------------------------------------------- columns
@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        ((X, list("abcd")), ["b", "c"]),
        ((X, tuple("abcd")), ("b", "c")),
        ((X, [5, 6, 7, 8]), [6, 7]),
        ((X, (5, 6, 7, 8)), (6, 7)),
        ((X, [["a"], ["b", "c"], ["d", "e", "f", "g"], []]), [["b", "c"], ["d", "e", "f", "g"]]),
        ((X, np.array(list("abcd"))), np.array(["b", "c"])),
        ((X, [{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4}]), [{"id": 2}, {"id": 3}]),
        ((X, list("abc")), list("abc")),
        ((X, "text"), "text"),
        ((X, torch.Size([1, 2, 3, 4])), torch.Size([1, 2, 3, 4])),
        ((X, {"ids": [5, 6, 7, 8], "meta": [1]}), {"ids": [6, 7], "meta": [1]}),
        ((X, (["a", "b", "c", "d"], [5, 6, 7, 8])), (["b", "c"], [6, 7])),
    ],
)
def test_lists_as_long_as_the_batch_are_cut_like_tensors(tree: Any, wanted: Any) -> None:
    part = tree_cut(tree, 1, 2)[1]
    assert type(part) is type(wanted)
    assert np.array_equal(part, wanted) if isinstance(part, np.ndarray) else part == wanted


# ---------------------------------------------------------------- the length, and trees that cannot be cut
@pytest.mark.parametrize(
    ("tree", "length"),
    [
        (({"ids": list("abc")}, X), 4),
        ((np.ones((3, 2)), ["a"]), 3),
        ((torch.tensor(1.0), ["a", "b"]), 2),
        ((["a"], np.ones(3)), 3),
        (([1, 2], ("a", "b"), "text", None, 5, []), None),
        ((pack_sequence([X, X]),), None),
    ],
)
def test_the_length_of_a_batch(tree: Any, length: int | None) -> None:
    assert batch_length(tree) == length


class Opaque:
    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: object) -> Opaque:
        return self

    def __len__(self) -> int:
        return 4


# ---------------------------------------------------------------- forms
def test_paths_to_leaves() -> None:
    tree = {"a": [X, Plain(X, Y)], "b": Pair(X, (Y, "text")), "c": Encoding({"k": X}, [])}
    assert list(flatten(tree)[1].paths()) == [
        *("['a'][0]", "['a'][1]['x']", "['a'][1]['y']", "['a'][1]['name']"),
        *("['b']['x']", "['b']['y'][0]", "['b']['y'][1]"),
        *("['c']['k']", "['c']['_encodings']"),
    ]
    assert str(flatten({"a": [X, 1]})[1]) == "dict('a': list(*, *))"


@pytest.mark.parametrize(
    ("one", "other"),
    [((X,), [X]), ({"a": X}, {"b": X}), ((X,), (X, X)), (Plain(X, Y), Pair(X, Y)), (X, (X,)), ((X,), X)],
)
def test_other_forms_differ(one: Any, other: Any) -> None:
    assert flatten(one)[1] != flatten(other)[1]
