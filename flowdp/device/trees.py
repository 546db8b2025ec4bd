"""Taking batches, arguments and outputs apart into leaves, and building them again from others.

The containers are those of torch's pytrees, and besides them dataclasses, attrs classes, SimpleNamespace,
subclasses of dict, UserDict (and so transformers' BatchEncoding) and transformers' caches. They are opened
here and not registered with torch, because a registration is for the whole process: it would change the
behaviour of other code, and a later one of the user's own would be refused.

A **column** is a list or tuple as long as the batch that holds no tensor and no array, texts for instance. It
is a leaf, which is cut and joined like a tensor.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

__all__ = [
    "Form",
    "batch_length",
    "column",
    "concatenated",
    "cut",
    "described",
    "field_names",
    "field_of",
    "flatten",
    "is_cut",
    "is_same",
    "is_size",
    "tensors_of",
    "tree_map",
    "unflatten",
    "walk",
]

Build = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The structure of a tree; for one leaf alone, all fields are None.

    Two forms are equal where both build the same tree of the same leaves. Classes made by the
    same definition count as one, for a class that a function makes is another one in each call.

    Attributes:
        cls: Type of the container.
        keys: Names of its children: keys of a mapping, attributes of an object; None: they have positions.
        children: Forms of the children.
        build: Makes the container of its children.
    """

    cls: type | None = None
    keys: tuple[Any, ...] | None = None
    children: tuple[Form, ...] = ()
    build: Build | None = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Form)
            and (self.cls is other.cls or self._name() == other._name())
            and self.keys == other.keys
            and self.children == other.children
        )

    def __hash__(self) -> int:
        return hash((self._name(), self.keys, self.children))

    def __str__(self) -> str:
        if self.cls is None:
            return "*"
        keys = self.keys or [None] * len(self.children)
        pairs = zip(keys, self.children, strict=True)
        inside = ", ".join(f"{child}" if key is None else f"{key!r}: {child}" for key, child in pairs)
        return f"{self.cls.__name__}({inside})"

    def _name(self) -> tuple[str, str] | None:
        return None if self.cls is None else (self.cls.__module__, self.cls.__qualname__)

    def key_paths(self, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """The keys, names and positions that lead to each leaf."""
        if self.cls is None:
            yield before
            return
        keys = range(len(self.children)) if self.keys is None else self.keys
        for key, child in zip(keys, self.children, strict=True):
            # The items of a UserDict are its own for all its users.
            is_inside = key == "data" and issubclass(self.cls, UserDict)
            yield from child.key_paths(before if is_inside else (*before, key))

    def paths(self) -> Iterator[str]:
        """The path to each leaf from the root, for messages: `[0]['ids']['x']`."""
        return ("".join(f"[{key!r}]" for key in path) for path in self.key_paths())


_LEAF = Form()


def flatten(tree: Any, samples: int | None = None, *, with_sizes: bool = False) -> tuple[list[Any], Form]:
    """The leaves of a tree, in order, and how they make it.

    Args:
        tree: Tree to take apart.
        samples: Length of the batch; lists and tuples of that length without tensors are leaves. None: those
            of any length are.
        with_sizes: Whether a tuple of numbers alone may be a size: it is no column then.
    """
    leaves: list[Any] = []
    if samples and column(tree) and all(column(part) and len(part) == samples for part in tree):
        # Two lists of a batch of two samples are its fields: the root of a batch is seldom one field alone.
        return leaves, _inside(type(tree), None, tree, type(tree), leaves, samples, with_sizes)
    return leaves, _form(tree, leaves, samples, with_sizes)


def _form(node: Any, leaves: list[Any], samples: int | None, with_sizes: bool) -> Form:
    """The form of a node, whose leaves are appended."""
    cls = type(node)
    if cls is Tensor or cls in _ATOMS:
        leaves.append(node)
        return _LEAF
    if cls is tuple or isinstance(node, list):
        if not _is_column(node, samples, with_sizes):
            return _inside(cls, None, node, cls, leaves, samples, with_sizes)
    elif cls is dict:
        keys = tuple(node)
        return _inside(cls, keys, node.values(), partial(_dict, keys), leaves, samples, with_sizes)
    elif (opened := _opened(node)) is not None:
        before = len(leaves)
        form = _inside(cls, *opened, leaves, samples, with_sizes)
        if any(isinstance(leaf, _HOLDS_SAMPLES) or _is_long(leaf, samples) for leaf in leaves[before:]):
            return form
        del leaves[before:]  # a configuration, which stays one object
    leaves.append(node)
    return _LEAF


def _inside(
    cls: type,
    keys: tuple[Any, ...] | None,
    children: Any,
    build: Build,
    leaves: list[Any],
    samples: int | None,
    with_sizes: bool,
) -> Form:
    return Form(cls, keys, tuple([_form(child, leaves, samples, with_sizes) for child in children]), build)


def _is_column(node: Any, samples: int | None, with_sizes: bool) -> bool:
    if (samples is not None and (len(node) != samples or not node)) or (with_sizes and is_size(node)):
        return False
    return not any(isinstance(leaf, _HOLDS_SAMPLES) for leaf in walk(node))


def _is_long(leaf: Any, samples: int | None) -> bool:
    return column(leaf) and len(leaf) == (samples or len(leaf))


def unflatten(leaves: Sequence[Any], form: Form) -> Any:
    """The tree that the leaves make."""
    return _build(iter(leaves), form)


def _build(leaves: Iterator[Any], form: Form) -> Any:
    if form.build is None:
        return next(leaves)
    return form.build([_build(leaves, child) for child in form.children])


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with other leaves; a list or tuple without tensors is one leaf."""
    leaves, form = flatten(tree)
    return _build(map(function, leaves), form)


def batch_length(tree: Any) -> int | None:
    """Samples of a batch: the length of its first tensor that has one; None without any.

    Without a tensor it is that of the first array, and without one that of the first list of texts.
    """
    arrays: list[int] = []
    texts: list[int] = []
    for leaf in walk(tree):
        if isinstance(leaf, Tensor):
            if leaf.dim() > 0:
                return len(leaf)
        elif isinstance(leaf, np.ndarray):
            if leaf.ndim:
                arrays.append(len(leaf))
        elif leaf and isinstance(leaf, list) and all(isinstance(item, str | bytes) for item in leaf):
            texts.append(len(leaf))
    return next(iter(arrays + texts), None)


# ---------------------------------------------------------------- leaves
def tensors_of(tree: Any) -> Iterator[Tensor]:
    """All tensors of a tree, those of its objects that are not opened included."""
    for leaf in walk(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, PackedSequence):
            yield from (part for part in leaf if part is not None)
        elif type(leaf) not in _ATOMS and not isinstance(leaf, _CLOSED):
            yield from (part for part in walk(getattr(leaf, "__dict__", None)) if isinstance(part, Tensor))


def column(leaf: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether a leaf is a list or tuple of samples, where it has the right length."""
    return type(leaf) is tuple or isinstance(leaf, list)


def is_size(leaf: object) -> bool:
    """Whether an argument is a tuple of numbers alone, which is mostly a size."""
    return type(leaf) is tuple and all(type(item) in (int, float) for item in leaf)


def is_cut(leaf: Any, samples: int | None, dim: int = 0) -> bool:
    """Whether a leaf is cut: a tensor, array or column as long as the batch.

    Args:
        leaf: Any.
        samples: Length of the batch; None: nothing is cut.
        dim: Along which tensors and arrays are.
    """
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.ndim > dim and leaf.shape[dim] == samples
    return column(leaf) and len(leaf) == samples


def cut(leaf: Any, start: int, samples: int, dim: int | None = 0) -> Any:
    """Consecutive samples of a leaf, in the same memory for tensors and arrays; with `dim` None all of it."""
    if dim is None:
        return leaf
    if isinstance(leaf, Tensor):
        return leaf.narrow(dim, start, samples)
    rows = slice(start, start + samples)
    return leaf[(slice(None),) * dim + (rows,)] if isinstance(leaf, np.ndarray) else leaf[rows]


def concatenated(parts: Sequence[Any]) -> Any:
    """Leaves of several batches, one behind the other: tensors, arrays or columns."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return type(parts[0])(item for part in parts for item in part)


def is_same(leaf: Any, first: Any) -> bool:
    """Whether two leaves that are no tensors are equal; False where that is not known."""
    if leaf is first:
        return True
    if type(leaf) is not type(first):
        return False
    if column(leaf):
        return len(leaf) == len(first) and all(map(is_same, leaf, first))
    try:
        return bool(leaf == first)
    except Exception:  # an array, or a class that holds tensors, has no one answer
        return False


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def described(leaf: Any) -> str:
    """A leaf in a few words, for a message: "tensor (16, 3)"."""
    if isinstance(leaf, Tensor | np.ndarray):
        kind = "tensor" if isinstance(leaf, Tensor) else "array"
        return f"{kind} {tuple(leaf.shape)}"
    if column(leaf):
        return f"{type(leaf).__name__} of {len(leaf)}"
    return repr(leaf) if type(leaf) in _ATOMS and len(repr(leaf)) < 40 else type(leaf).__name__


# ---------------------------------------------------------------- fields
def field_names(batch: Any) -> list[Any]:
    """The fields of a batch: keys of a mapping, attributes of an object, positions of a sequence."""
    if isinstance(batch, Mapping):
        return list(batch)
    if isinstance(batch, tuple | list):
        return [*range(len(batch)), *getattr(batch, "_fields", ())]
    names = None if isinstance(batch, Tensor) else _attributes(batch)
    return [] if names is None else names


def field_of(batch: Any, field: Any) -> Any:
    """A field of a batch, by its name."""
    by_name = isinstance(field, str) and not isinstance(batch, Mapping | Tensor) and hasattr(batch, field)
    return getattr(batch, field) if by_name else batch[field]


# ---------------------------------------------------------------- containers
_HOLDS_SAMPLES = (Tensor, np.ndarray, PackedSequence)
_CLOSED = (Tensor, np.ndarray, nn.Module, PackedSequence, type, torch.Size)


def _opened(node: Any) -> tuple[tuple[Any, ...] | None, Sequence[Any], Build] | None:
    """The names of a container's children, the children, and how to build it; None for a leaf."""
    if isinstance(node, _CLOSED):
        return None
    if not tree_is_leaf(node):
        children, spec = tree_flatten(node, is_leaf=lambda part: part is not node)
        is_mapping = isinstance(node, Mapping) and len(node) == len(children)
        keys = tuple(node) if is_mapping else getattr(node, "_fields", None)
        return keys, children, partial(tree_unflatten, treespec=spec)
    names = _attributes(node)
    if names is None:
        return None
    items: tuple[Any, ...] = tuple(node) if isinstance(node, dict) else ()
    values = [node[key] for key in items] + [getattr(node, name) for name in names]
    return (*items, *names), values, partial(_object, type(node), items, names)


def _attributes(node: Any) -> list[str] | None:
    """Names of an object's attributes; None where its class is not one of those that are opened."""
    cls = type(node)
    declared: list[str] = []
    if is_dataclass(node):
        declared = [field.name for field in dataclass_fields(node)]
    elif isinstance(attrs := getattr(cls, "__attrs_attrs__", None), tuple):
        declared = [attribute.name for attribute in attrs]
    elif not isinstance(node, dict | UserDict | SimpleNamespace) and not _is_cache(cls):
        return None
    there = [name for name in declared if hasattr(node, name)]
    return there + [name for name in getattr(node, "__dict__", ()) if name not in declared]


def _is_cache(cls: type) -> bool:
    return any(base.__module__ == "transformers.cache_utils" for base in cls.__mro__)


def _dict(keys: tuple[Any, ...], children: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, children, strict=True))


def _object(cls: Any, items: tuple[Any, ...], names: Sequence[str], children: list[Any]) -> Any:
    """An object without its constructor, which may ask for anything, or compute its attributes anew.

    Args:
        cls: The class.
        items: Keys of its items, where it is a dict.
        names: Names of its attributes.
        children: Values of the items, then of the attributes.
    """
    made: Any = cls.__new__(cls)
    store = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
    for key, child in zip(items, children, strict=False):
        store(made, key, child)
    for name, child in zip(names, children[len(items) :], strict=True):
        object.__setattr__(made, name, child)
    return made


def walk(node: Any) -> Iterator[Any]:
    """All leaves of a tree, and its lists and tuples, the outer ones first."""
    cls = type(node)
    if cls is Tensor or cls in _ATOMS:
        yield node
        return
    children: Any = ()
    if cls is tuple or isinstance(node, list):
        yield node
        children = node
    elif cls is dict:
        children = node.values()
    elif (opened := _opened(node)) is not None:
        children = opened[1]
    else:
        yield node
    for child in children:
        yield from walk(child)
