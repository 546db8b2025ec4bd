"""Taking batches, arguments and outputs apart into leaves, and building them again from others.

The containers are those of torch's pytrees, and besides them those that batches come in: dataclasses, attrs
classes, SimpleNamespace, subclasses of dict, UserDict (and so transformers' BatchEncoding) and transformers'
caches. They are opened here and not registered with torch, because a registration is for the whole process:
it would change the behaviour of other code, and a later one of the user's own would be refused.

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
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_unflatten

__all__ = [
    "Form",
    "Uncuttable",
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
    "moves_itself",
    "tensors_of",
    "tree_map",
    "unflatten",
    "walk",
]

Names = tuple[Any, ...]


class Uncuttable(TypeError):
    """A leaf holds samples and cannot be cut."""


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
        spec: Spec of a container that torch knows and this module does not.
    """

    cls: type | None = None
    keys: Names | None = None
    children: tuple[Form, ...] = ()
    build: Callable[[list[Any]], Any] | None = None
    spec: TreeSpec | None = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Form)
            and (self.cls is other.cls or _is_same_definition(self.cls, other.cls))
            and self.keys == other.keys
            and self.spec == other.spec
            and self.children == other.children
        )

    def __hash__(self) -> int:
        return hash((self.cls and self.cls.__qualname__, self.keys, self.children))

    def __str__(self) -> str:
        if self.cls is None:
            return "*"
        keys = self.keys or [None] * len(self.children)
        pairs = zip(keys, self.children, strict=True)
        inside = ", ".join(f"{child}" if key is None else f"{key!r}: {child}" for key, child in pairs)
        return f"{self.cls.__name__}({inside})"

    @property
    def leaves(self) -> int:
        """The number of leaves."""
        return 1 if self.cls is None else sum(child.leaves for child in self.children)

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

    def paths(self, before: str = "") -> Iterator[str]:
        """The path to each leaf from the root, as Python: `[0].ids['x']`."""
        if self.cls is None:
            yield before
            return
        for step, child in self._steps():
            yield from child.paths(before + step)

    def lists(self, before: str = "", first: int = 0) -> Iterator[tuple[str, int, slice]]:
        """The path to each list, its length, and the places of its leaves; `first` is that of its own."""
        for step, child in self._steps():
            if child.cls is list:
                yield before + step, len(child.children), slice(first, first + child.leaves)
            yield from child.lists(before + step, first)
            first += child.leaves

    def _steps(self) -> Iterator[tuple[str, Form]]:
        """The children, each with the step to it, as Python."""
        is_mapping = self.cls is not None and issubclass(self.cls, Mapping)
        is_mapping = is_mapping and not issubclass(self.cls, UserDict)  # type: ignore[arg-type]
        for place, child in enumerate(self.children):
            step = f"[{place}]"
            if self.keys is not None:
                key = self.keys[place]
                step = f"[{key!r}]" if is_mapping else f".{key}"
            yield step, child


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
    opening = _Walk(leaves, samples, with_sizes)
    if samples and column(tree) and all(column(part) and len(part) == samples for part in tree):
        # Two lists of a batch of two samples are its fields: the root of a batch is seldom one field alone.
        return leaves, opening.inside(tree)
    return leaves, opening.form(tree)


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
def moves_itself(leaf: object) -> bool:
    """Whether a leaf that is not a tensor is moved by its own `to`."""
    return hasattr(leaf, "to")


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

    Raises:
        Uncuttable: It holds samples, and cannot be cut: a PackedSequence, or an object of an unknown class
            that is as long as the batch, or holds a tensor that is.
    """
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.ndim > dim and leaf.shape[dim] == samples
    if column(leaf):
        return len(leaf) == samples
    if samples and type(leaf) not in _ATOMS:
        _check_whole(leaf, samples)
    return False


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
_NOT_LOOKED_INTO = (
    type,
    nn.Module,
    torch.Generator,
    torch.Stream,
    torch.Event,
    torch.cuda.Event,
    torch.xpu.Event,
)


def _check_whole(leaf: Any, samples: int) -> None:
    advice = (
        "put its tensors into a tuple, dict or dataclass, or register its class with "
        "torch.utils._pytree.register_pytree_node"
    )
    if isinstance(leaf, PackedSequence):
        raise Uncuttable(
            "a PackedSequence holds its samples time step by time step, and cannot be cut; give the padded "
            "tensor and the lengths, and pack them inside the module"
        )
    if isinstance(leaf, _NOT_LOOKED_INTO) or (callable(leaf) and not moves_itself(leaf)):
        return
    found = None
    if any(part.dim() > 0 and len(part) == samples for part in tensors_of(leaf)):
        found = "holds a tensor that is"
    elif moves_itself(leaf) and hasattr(leaf, "__len__") and len(leaf) == samples:
        found = "is"
    if found is not None:
        raise Uncuttable(
            f"an object of class {type(leaf).__name__} {found} as long as the batch ({samples}), and how to "
            f"cut it is not known; {advice}"
        )


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
class _Walk:
    """A walk over a tree, which appends its leaves to a list; see `flatten`."""

    def __init__(self, leaves: list[Any], samples: int | None, with_sizes: bool) -> None:
        self._leaves = leaves
        self._samples = samples
        self._with_sizes = with_sizes
        self._above: list[int] = []  # objects that are open: one that holds itself is not opened again

    def form(self, node: Any) -> Form:
        cls = type(node)
        if cls is Tensor or cls in _ATOMS:
            self._leaves.append(node)
            return _LEAF
        if cls is tuple or isinstance(node, list):
            if self._is_column(node):
                self._leaves.append(node)
                return _LEAF
            return self.inside(node)
        if cls is dict:
            return Form(dict, tuple(node), self._all(node.values()), partial(_dict, tuple(node)))
        return self._other(node)

    def inside(self, node: Any) -> Form:
        """The form of a list or tuple, opened."""
        cls = type(node)
        return Form(cls, None, self._all(node), cls)

    def _all(self, nodes: Any) -> tuple[Form, ...]:
        return tuple(map(self.form, nodes))

    def _is_column(self, node: Any) -> bool:
        if self._samples is not None and (len(node) != self._samples or not node):
            return False
        if self._with_sizes and is_size(node):
            return False
        return not any(isinstance(leaf, _HOLDS_SAMPLES) for leaf in walk(node))

    def _other(self, node: Any) -> Form:
        opened = None if id(node) in self._above else _opened(node)
        if opened is None:
            self._leaves.append(node)
            return _LEAF
        keys, children, build, spec = opened
        before = len(self._leaves)
        self._above.append(id(node))
        forms = self._all(children)
        self._above.pop()
        if spec is None and not any(map(self._is_data, self._leaves[before:])):
            self._leaves[before:] = [node]  # a configuration, which stays one object
            return _LEAF
        return Form(type(node), keys, forms, build, spec)

    def _is_data(self, leaf: object) -> bool:
        return isinstance(leaf, _HOLDS_SAMPLES) or (
            column(leaf) and len(leaf) == (self._samples or len(leaf))
        )


_Opened = tuple[Names | None, Sequence[Any], Callable[[list[Any]], Any], TreeSpec | None]

_HOLDS_SAMPLES = (Tensor, np.ndarray, PackedSequence)
_CLOSED = (Tensor, np.ndarray, nn.Module, PackedSequence, type)


def _opened(node: Any) -> _Opened | None:
    """The children of a container and how to build it; None for a leaf."""
    cls = type(node)
    if isinstance(node, _CLOSED) or cls is torch.Size:
        return None
    if isinstance(node, tuple) and isinstance(fields := getattr(node, "_fields", None), tuple):
        return fields, node, cls._make, None
    if not tree_is_leaf(node):
        children, spec = tree_flatten(node, is_leaf=lambda part: part is not node)
        is_mapping = isinstance(node, Mapping) and len(node) == len(children)
        return tuple(node) if is_mapping else None, children, partial(tree_unflatten, treespec=spec), spec
    if isinstance(node, dict):
        attached = getattr(node, "__dict__", {})
        mirrored = tuple(name for name in attached if name in node and node[name] is attached[name])
        keys, names = tuple(node), tuple(name for name in attached if name not in mirrored)
        values = [*node.values(), *(attached[name] for name in names)]
        return (*keys, *names), values, partial(_mapping, cls, keys, names, mirrored), None
    attributes = _attributes(node)
    if attributes is None and isinstance(node, Mapping):
        keys = tuple(node)
        return keys, list(node.values()), partial(_mapping_of_pairs, cls, keys), None
    if attributes is None:
        return None
    return (
        tuple(attributes),
        [getattr(node, name) for name in attributes],
        partial(_object, cls, attributes),
        None,
    )


def _attributes(node: Any) -> list[str] | None:
    """Names of an object's attributes; None where its class is not one of those that are opened."""
    cls = type(node)
    declared: list[str] = []
    if is_dataclass(node):
        declared = [field.name for field in dataclass_fields(node)]
    elif isinstance(attrs := getattr(cls, "__attrs_attrs__", None), tuple):
        declared = [attribute.name for attribute in attrs]
    elif not isinstance(node, UserDict | SimpleNamespace) and not _is_cache(cls):
        return None
    there = [name for name in declared if hasattr(node, name)]
    return there + [name for name in getattr(node, "__dict__", ()) if name not in declared]


def _is_cache(cls: type) -> bool:
    return any(base.__module__ == "transformers.cache_utils" for base in cls.__mro__)


def _dict(keys: Names, children: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, children, strict=True))


def _mapping(cls: Any, keys: Names, names: Names, mirrored: Names, children: list[Any]) -> Any:
    """A mapping of a subclass of dict, without its constructor: that may ask for anything.

    Args:
        cls: The class.
        keys: Keys of its items.
        names: Names of its attributes.
        mirrored: Attributes that show an item, in classes that offer both.
        children: Values of the items, then of the attributes.
    """
    made: Any = cls.__new__(cls)
    store = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
    for key, child in zip(keys, children, strict=False):
        store(made, key, child)
    for name, child in zip(names, children[len(keys) :], strict=True):
        object.__setattr__(made, name, child)
    for name in mirrored:
        object.__setattr__(made, name, made[name])
    return made


def _mapping_of_pairs(cls: Any, keys: Names, children: list[Any]) -> Any:
    """A mapping that is no dict, by its constructor: a MappingProxyType, for instance."""
    return cls(_dict(keys, children))


def _object(cls: Any, names: Sequence[str], children: list[Any]) -> Any:
    """An object without its constructor, which would compute its attributes anew."""
    made: Any = cls.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def _is_same_definition(one: type | None, other: type | None) -> bool:
    return (
        one is not None
        and other is not None
        and (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
    )


def walk(node: Any, above: tuple[int, ...] = ()) -> Iterator[Any]:
    """All leaves of a tree, and its lists and tuples, the outer ones first; `above` are open objects' ids."""
    cls = type(node)
    if cls is Tensor or cls in _ATOMS:
        yield node
        return
    children: Any = None
    if cls is tuple or isinstance(node, list):
        yield node
        children = node
    elif cls is dict:
        children = node.values()
    elif id(node) not in above and (opened := _opened(node)) is not None:
        children, above = opened[1], (*above, id(node))
    if children is None:
        yield node
        return
    for child in children:
        yield from walk(child, above)
