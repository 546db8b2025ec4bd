"""Cutting of the arguments of a call over the devices.

They are trees (`flowdp.device.trees`). A leaf with the batch's length along its dim is cut; everything else
goes whole. The parts are views in the caller's graph: autograd puts their gradients together, as those of
any other views.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdp.data_parallel.join import join
from flowdp.data_parallel.layout import Call, Callee, Layout, WeightFunction
from flowdp.device.trees import column, cut, described, flatten, is_cut, is_size, tree_map, unflatten, walk

__all__ = ["Arguments", "Part"]


class Part:
    """The arguments of one device.

    Args:
        call: Positional and named arguments.
        rank: Rank of the device.
        samples: Samples of the part; 0 where nothing is cut.

    Attributes:
        args: Positional arguments.
        kwargs: Arguments by name.
        tensors: The tensors among the arguments, in order. Their number is the same in all parts of a call,
            unless the user's `split` made them, or they are entries of lists.
        weights: Weights of the part by the functions in `reduce`.
    """

    def __init__(self, call: Call, rank: int, samples: int) -> None:
        self.args, self.kwargs = call
        self.rank = rank
        self.samples = samples
        self._leaves, self._form = flatten(call)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.weights: dict[WeightFunction, Tensor] = {}

    def replaced(self, tensors: Sequence[Tensor]) -> Part:
        """The same arguments with other tensors in the places of `tensors`."""
        rest = iter(tensors)
        made = copy(self)
        made._leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        made.args, made.kwargs = unflatten(made._leaves, self._form)
        made.tensors = list(tensors)
        return made


class Arguments:
    """The arguments of a call.

    Lists that have once had an entry for each sample are not taken for anything else in later calls.

    Args:
        layout: Dims along which they are cut, or the user's way to do it.
        callee: Function that is called.
        args: Positional.
        kwargs: By name.

    Attributes:
        callee: As given.
        samples: Length of the batch; None without a tensor, array or list of texts that has a length.
        dim: Batch dimension of the tensor or array that has this length; 0 without.
    """

    def __init__(self, layout: Layout, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.callee = callee
        self._layout = layout
        self._call = args, kwargs
        # A dict is never taken for a column, as a tuple of two lists of texts might be.
        self._values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        self._names = dict(zip(self._values, callee.names(args, kwargs), strict=True))
        dims = {key: layout.argument_dim(key, name) for key, name in self._names.items()}
        self._dims = {key: dim for key, dim in dims.items() if dim is not None}
        self.samples, self.dim = _length(self._values, self._dims)
        self._lists = _lists(self._values, self._dims, has_entries=callee.has_entries)
        if self._lists:
            callee.has_entries = True
            self.samples, self.dim = len(self._values[self._lists[0]]), 0
        self._leaves, self._form = flatten(self._values, self.samples, with_sizes=True)
        self._paths = list(self._form.key_paths())
        self._cuts = [
            None if self._lists else self._cut_dim(leaf, self._dims.get(path[0]))
            for path, leaf in zip(self._paths, self._leaves, strict=True)
        ]

    @property
    def pattern(self) -> Hashable:
        """The names of the arguments, and which leaves are cut: with another one a call has another form."""
        cuts = zip(self._paths, self._cuts, strict=True)
        paths = [(self._names[path[0]], *path[1:]) for path, dim in cuts if dim is not None]
        return frozenset(self._names.values()), frozenset(paths), len(self._lists)

    def mapped(self, function: Callable[[Any], Any]) -> Arguments:
        """The same arguments, with a function of each leaf in its place."""
        args, kwargs = tree_map(function, [*self._call])
        return Arguments(self._layout, self.callee, tuple(args), kwargs)

    def whole(self, rank: int = 0) -> Part:
        """All arguments, as one part."""
        return self._part(self._call, rank, self.samples or 0)

    def parts(self, sizes: Sequence[int]) -> list[Part]:
        """The parts, of consecutive samples; for less than two that are not empty, the whole.

        Args:
            sizes: Samples of each rank; one with 0 has no part.
        """
        taken = {rank: size for rank, size in enumerate(sizes) if size}
        if len(taken) < 2:
            return [self.whole(next(iter(taken), 0))]
        if self._layout.split is not None:
            calls = self._layout.split(*self._call, tuple(taken.values()))
        else:
            stops = accumulate(taken.values())
            calls = [self._rows(stop - size, size) for stop, size in zip(stops, taken.values(), strict=True)]
        return [self._part(call, *part) for call, part in zip(calls, taken.items(), strict=True)]

    def join(self, outputs: Sequence[Any], parts: Sequence[Part]) -> Any:
        """Put the outputs of parts together.

        Raises:
            FlowdpError: They cannot be.
        """
        samples, weights = [part.samples for part in parts], [part.weights for part in parts]
        return join(outputs, samples, self._layout, self.dim, weights)

    def in_words(self, sizes: Sequence[int]) -> str:
        """The cut in words, for messages."""
        taken = [size for size in sizes if size]
        pieces = f"{sum(taken)} samples as {' + '.join(map(str, taken))}"
        for path, leaf, dim in zip(self._paths, self._leaves, self._cuts, strict=True):
            if dim is not None and isinstance(leaf, Tensor):
                return f"{pieces}, along dim {dim} of {self._names[path[0]]!r} of shape {tuple(leaf.shape)}"
        return pieces

    def described(self) -> str:
        """The arguments in words, for messages."""
        leaves = zip(self._paths, self._leaves, strict=True)
        words = ", ".join(f"{_shown(path)}: {described(leaf)}" for path, leaf in leaves)
        return f"{words:.1000}" or "no arguments"

    def _part(self, call: Call, rank: int, samples: int) -> Part:
        part = Part(call, rank, samples)
        names = self.callee.names(part.args, part.kwargs)
        part.weights = self._layout.weigh(dict(zip(names, (*part.args, *part.kwargs.values()), strict=True)))
        return part

    def _rows(self, start: int, samples: int) -> Call:
        """The call for some samples."""
        leaves = zip(self._leaves, self._cuts, strict=True)
        rows = unflatten([cut(leaf, start, samples, dim) for leaf, dim in leaves], self._form)
        rows |= {key: cut(self._values[key], start, samples) for key in self._lists}
        return tuple(rows.pop(place) for place in range(len(self._call[0]))), rows

    def _cut_dim(self, leaf: Any, dim: int | None) -> int | None:
        """The dim along which a leaf is cut; None where it goes whole."""
        is_strided = isinstance(leaf, Tensor) and leaf.layout is torch.strided
        is_rows = is_strided or isinstance(leaf, np.ndarray) or column(leaf)
        return dim if is_rows and dim is not None and is_cut(leaf, self.samples, dim) else None


def _shown(path: tuple[Any, ...]) -> str:
    """The path to a leaf, for a message: `'x'['ids']`."""
    return repr(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def _length(values: Mapping[Any, Any], dims: Mapping[Any, int]) -> tuple[int | None, int]:
    """Samples of a batch, and the batch dimension of the tensor or array that they were read from."""

    def leaves() -> Iterator[tuple[Any, int]]:
        return ((leaf, dim) for key, dim in dims.items() for leaf in walk(values[key]))

    for kind in (Tensor, np.ndarray):
        for leaf, dim in leaves():
            if isinstance(leaf, kind) and leaf.ndim > dim:
                return leaf.shape[dim], dim
    for leaf, _ in leaves():
        if isinstance(leaf, list) and leaf and all(isinstance(item, str | bytes) for item in leaf):
            return len(leaf), 0
    return None, 0


def _lists(values: Mapping[Any, Any], dims: Mapping[Any, int], *, has_entries: bool) -> list[Any]:
    """The arguments that are lists with an entry for each sample, as of a detection model.

    Where the batch is in lists of one length alone, tensors in one and records in another; or, if lists are
    known to have an entry for each sample (`has_entries`), in any.
    """
    lists = [values[key] for key in dims if any(isinstance(leaf, Tensor) for leaf in walk(values[key]))]
    if any(dims.values()) or not all(map(column, lists)) or len(set(map(len, lists))) != 1:
        return []
    if not has_entries and {isinstance(entries[0], Mapping) for entries in lists} != {True, False}:
        return []
    columns = [key for key in dims if column(values[key]) and not is_size(values[key])]
    return [key for key in columns if len(values[key]) == len(lists[0])]
