"""Cutting of the arguments of a call over the devices.

They are trees (`flowdp.data.trees`). A leaf with the batch's length along its dim is cut; everything else
goes whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdp.data.trees import (
    Uncuttable,
    batch_length,
    column,
    cut,
    described,
    flatten,
    is_cut,
    is_size,
    unflatten,
    walk,
)
from flowdp.device.copies import move
from flowdp.errors import FlowdpError

__all__ = ["ArgumentTensor", "Arguments", "CallArguments", "KeyPath", "bound", "call_module"]

log = logging.getLogger("flowdp")

KeyPath = tuple[Any, ...]
"""See `Form.key_paths`."""

CUT = -1
"""Stands for a leaf that is cut, among lengths."""

SHOWN = 6
"""Arguments that a message lists, of those that are cut and of those that are not."""


@dataclass(frozen=True, slots=True)
class ArgumentTensor:
    """A tensor among the arguments of a module's call: the whole of a tensor of the caller's, or a part.

    Attributes:
        whole: The caller's tensor.
        memory: The part of it in the caller's memory.
        given: The module's: the same memory with a version counter of its own, or a copy on its device.
        version: Version of `given` before the call; None: it has no counter.
        leaf: Begin of the device's graph; None where no gradient is asked for.
        is_cut: Whether it is a part.
    """

    whole: Tensor
    memory: Tensor
    given: Tensor
    version: int | None
    leaf: Tensor | None
    is_cut: bool

    @property
    def is_written(self) -> bool:
        """Whether the module wrote to it."""
        return self.version is not None and self.given._version != self.version

    @property
    def is_copy(self) -> bool:
        """Whether it lies on another device than the caller's."""
        return self.given.device != self.whole.device


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of one device's call of a module, and the tensors among them, in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[ArgumentTensor]

    @property
    def wanting(self) -> list[Tensor]:
        """Leaves of the device's graph for the caller's tensors that require grad."""
        return [one.leaf for one in self.tensors if one.leaf is not None]


class _Begin(torch.autograd.Function):
    """Passes a leaf on as a tensor that a module may write to, like the output of another one."""

    @staticmethod
    def forward(_ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data  # no view of the leaf, so that it has a version counter of its own

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Arguments:
    """The arguments of a call.

    Args:
        args: Positional.
        kwargs: By name.
        dims: Along which tensors are cut: one for all, or for each argument its own, first the positional
            ones; None: not at all.
        has_entries: Whether lists are known to have an entry for each sample.

    Attributes:
        samples: Length of the batch; None without a tensor, array or list of texts that has a length.
        listed: Names and positions of the lists that have an entry for each sample, where the batch is in
            lists alone: images of any size, and a record for each. Else empty.
        dim: Batch dimension of the tensor that has this length; 0 without.
        wanting: Tensors that ask for a gradient, in order.
        sparse: Path to a sparse tensor as long as the batch, which cannot be cut; None: there is none.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        dims: int | Sequence[int | None] | None = 0,
        *,
        has_entries: bool = False,
    ) -> None:
        # A dict is never taken for a column, as a tuple of two lists of texts might be.
        named: dict[Any, Any] = {**dict(enumerate(args)), **(kwargs or {})}
        self._positional = len(args)
        of_arguments = list(dims) if isinstance(dims, Sequence) else [dims] * len(named)
        self.samples, self.dim = _length(named, of_arguments)
        self.listed: frozenset[Any] = frozenset()
        entries = _entries(named, of_arguments, None if has_entries else self.samples)
        if entries is not None:
            self.samples, self.dim = entries, 0
            self.listed = frozenset(
                key
                for (key, value), dim in zip(named.items(), of_arguments, strict=True)
                if dim is not None and column(value) and len(value) == entries and not is_size(value)
            )
        self._leaves, self._form = flatten(named, self.samples, with_sizes=True)
        self._dims = [
            dim
            for dim, argument in zip(of_arguments, self._form.children, strict=True)
            for _ in range(argument.leaves)
        ]
        self.sparse: KeyPath | None = None
        self._refused: tuple[int, Uncuttable] | None = None
        self._cuts = [
            dim if dim is not None and self._is_cut(place, dim) else None
            for place, dim in enumerate(self._dims)
        ]
        asking: list[tuple[Tensor, int | None]] = []
        if torch.is_grad_enabled():
            asking = [
                (leaf, dim)
                for leaf, dim in zip(self._leaves, self._cuts, strict=True)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
        self.wanting = [leaf for leaf, _ in asking]
        self._wanting_cuts = [dim for _, dim in asking]

    def warn_uncut(self, device: torch.device) -> None:
        """Log that nothing can be cut, so that one device does the call."""
        log.warning(
            "nothing in a call can be cut (%s), so %s does such calls alone, and the other devices do "
            "nothing; give tensors or arrays whose first dimension is the batch, in tuples, dicts or "
            "dataclasses",
            self,
            device,
        )

    def check(self) -> None:
        """Check that the batch can be cut.

        Raises:
            FlowdpError: An argument holds samples, and cannot be cut.
        """
        if self._refused is not None:
            place, why = self._refused
            raise FlowdpError(f"argument {self.names[place]}: {why}")

    def apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: tuple[int, ...]
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """(args, kwargs) of each part: its entries of the lists in `listed`, and all else whole."""
        parts = []
        for stop, size in zip(accumulate(sizes), sizes, strict=True):
            named = {
                key: value[stop - size : stop] if key in self.listed else value
                for key, value in (*enumerate(args), *kwargs.items())
            }
            parts.append((tuple(named.pop(place) for place in range(len(args))), named))
        return parts  # type: ignore[return-value]

    @property
    def pattern(self) -> tuple[Any, ...]:
        """The names of the arguments, and the treatment of each leaf: equal where `ways` are."""
        return (self._positional, *self._form.keys, *map(self._way, range(len(self._leaves))))  # type: ignore[misc]

    def ways(self) -> dict[KeyPath, int | None]:
        """Treatment of leaves, by the path to each: None where it is cut, else its length.

        A leaf that goes whole and has no length, or that of one, is left out: it fits any batch.
        """
        paths = list(self._form.key_paths())
        ways = {path: self._way(place) for place, path in enumerate(paths)}
        # A list of another length than the batch's is a container.
        entries = Counter(
            path[:-1]
            for path, leaf in zip(paths, self._leaves, strict=True)
            if len(path) > 1 and isinstance(path[-1], int) and not isinstance(leaf, Tensor | np.ndarray)
        )
        lengths = {path: length for path, length in {**ways, **entries}.items() if length > 1}
        return {**lengths, **{path: None for path, way in ways.items() if way == CUT}}

    @property
    def names(self) -> list[str]:
        """The name of each leaf, for messages: `0['x']`."""
        return [path.removeprefix("[").replace("]", "", 1) for path in self._form.paths()]

    def in_words(self, start: int, samples: int, positional: Sequence[str] = ()) -> str:
        """A device's part of each argument in words, for a note on an error.

        Args:
            start: First sample of the part.
            samples: Number of its samples.
            positional: Names of the parameters that may be given by position.
        """
        parts: list[str] = []
        whole: list[str] = []
        for (place, *inside), leaf, dim in zip(self._form.key_paths(), self._leaves, self._cuts, strict=True):
            name = f"argument {place!r}"
            if isinstance(place, int) and place < len(positional):
                name += f" {positional[place]!r}"
            name += "".join(f"[{key!r}]" for key in inside)
            if dim is None or samples == self.samples:
                whole.append(f"{name} ({described(leaf)})")
            else:
                own = described(cut(leaf, start, samples, dim))
                parts.append(f"{name} ({described(leaf)} -> {own})")
        shown = [f"rows {start}-{start + samples} of " + ", ".join(parts[:SHOWN])] if parts else []
        shown += ["the whole of " + ", ".join(whole[:SHOWN])] if whole else []
        return " and ".join(shown) or "no arguments"

    def __str__(self) -> str:
        named = zip(self.names, self._leaves, strict=True)
        return ", ".join(f"{name}: {described(leaf)}" for name, leaf in named) or "no arguments"

    def part(self, start: int, samples: int, device: torch.device | None) -> CallArguments:
        """The arguments of one device: so many samples from `start` on.

        Args:
            start: First sample.
            samples: Number of samples.
            device: Device of the part; None: tensors stay where they are.

        Streams:
            Copies are on the current ones of both devices.
        """
        own: list[Any] = []
        tensors: list[ArgumentTensor] = []
        for leaf, dim in zip(self._leaves, self._cuts, strict=True):
            if not isinstance(leaf, Tensor):
                own.append(cut(leaf, start, samples, dim))
                continue
            # Without the caller's graph: the device has one of its own, which begins behind the copy. By
            # `data`, not `detach`, or a write to one part would count as one to all of them.
            memory = cut(leaf.data, start, samples, dim)
            given = memory if device is None else move(memory, device)
            begin = None
            if self.wanting and leaf.requires_grad:
                begin = given.requires_grad_()
                given = _Begin.apply(begin)  # type: ignore[no-untyped-call]
            version = None if given.is_inference() else given._version
            tensors.append(ArgumentTensor(leaf, memory, given, version, begin, dim is not None))
            own.append(given)
        named = unflatten(own, self._form)
        args = tuple(named.pop(place) for place in range(self._positional))
        return CallArguments(args, named, tensors)

    def piece(self, place: int, tensor: Tensor, start: int, samples: int) -> Tensor:
        """The part of a tensor in `wanting`, or of its gradient, in the caller's graph."""
        piece: Tensor = cut(tensor, start, samples, self._wanting_cuts[place])
        return piece

    def join_gradients(
        self, pieces: Sequence[Sequence[Tensor | None]], samples: Sequence[int]
    ) -> list[Tensor | None]:
        """The gradients of `wanting`: joined for leaves that were cut, summed for those that went whole.

        Args:
            pieces: For each part in order, the gradients of its `wanting`.
            samples: Samples of each part.
        """
        joined: list[Tensor | None] = []
        for leaf, dim, *parts in zip(self.wanting, self._wanting_cuts, *pieces, strict=True):
            there = [None if piece is None else move(piece, leaf.device) for piece in parts]
            known = [piece for piece in there if piece is not None]
            if not known:
                joined.append(None)
            elif dim is not None:
                sizes = [(*leaf.shape[:dim], count, *leaf.shape[dim + 1 :]) for count in samples]
                filled = [
                    leaf.new_zeros(size) if piece is None else piece
                    for piece, size in zip(there, sizes, strict=True)
                ]
                joined.append(torch.cat(filled, dim))
            else:
                joined.append(torch.stack(known).sum(0))
        return joined

    def _is_cut(self, place: int, dim: int) -> bool:
        leaf = self._leaves[place]
        try:
            is_own = is_cut(leaf, self.samples, dim)
        except Uncuttable as why:
            self._refused = self._refused or (place, why)
            return False
        if is_own and isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            self.sparse = self.sparse or list(self._form.key_paths())[place]
            return False
        return is_own

    def _way(self, place: int) -> int:
        """Treatment of a leaf: `CUT`, the length of one that goes whole, or 0 where it has none."""
        if self._cuts[place] is not None:
            return CUT
        leaf, dim = self._leaves[place], self._dims[place]
        if dim is None or not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim <= dim:
            return 0
        return leaf.shape[dim]


def _length(named: Mapping[Any, Any], dims: Sequence[int | None]) -> tuple[int | None, int]:
    """Samples of a batch, and the batch dimension of the tensor that they were read from."""
    given = [(value, dim) for value, dim in zip(named.values(), dims, strict=True) if dim is not None]
    for value, dim in given:
        for leaf in walk(value):
            if isinstance(leaf, Tensor) and leaf.dim() > dim:
                return leaf.shape[dim], dim
    return batch_length({place: value for place, (value, _) in enumerate(given)}), 0


def _entries(named: Mapping[Any, Any], dims: Sequence[int | None], samples: int | None) -> int | None:
    """Samples of a batch that is in lists alone, with an entry for each; None: it is not.

    Two lists of one length, one of them of records that hold tensors of other lengths than the first tensor
    (`samples`): those could not be cut. Without `samples`, lists are known to have an entry for each sample.
    """
    lists: list[Sequence[Any]] = []
    for value, dim in zip(named.values(), dims, strict=True):
        if isinstance(value, Tensor) or dim:
            return None
        if dim is None or not any(isinstance(leaf, Tensor) for leaf in walk(value)):
            continue
        if not column(value):
            return None
        lists.append(value)
    if len({len(value) for value in lists}) != 1:
        return None
    records = [
        record
        for value in lists
        if not any(isinstance(entry, Tensor) or column(entry) for entry in value)
        for record in value
    ]
    is_unlike = any(
        leaf.dim() == 0 or len(leaf) != samples
        for record in records
        for leaf in walk(record)
        if isinstance(leaf, Tensor)
    )
    return len(lists[0]) if samples is None or (len(lists) > 1 and is_unlike) else None


def call_module(module: nn.Module, part: CallArguments) -> Any:
    """The outputs of a module for its part."""
    return module(*part.args, **part.kwargs)


def bound(function: str | Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A method of a module by its name, or a function that takes the module first."""
    if not isinstance(function, str):
        return partial(function, module)
    method: Callable[..., Any] = getattr(module, function)
    return method
