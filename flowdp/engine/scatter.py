"""Taking a call apart over the devices, and its outputs together again.

Arguments and outputs are trees (`flowdp.data.trees`). What has the batch's length along its dim is cut;
everything else goes whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from flowdp.data.trees import (
    Form,
    Uncuttable,
    batch_length,
    column,
    concatenated,
    cut,
    described,
    flatten,
    is_cut,
    unflatten,
    walk,
)
from flowdp.device.transfer import move
from flowdp.engine.layout import Callee, Layout, Reduction, WeightFunction
from flowdp.errors import FlowdpError

__all__ = ["Arguments", "Handed", "Joining", "Outputs", "Part", "Returned", "join"]


@dataclass(frozen=True, slots=True)
class Handed:
    """A tensor that a module is called with, and the caller's of which it is the whole or a part.

    Attributes:
        whole: The caller's.
        memory: Its part of the caller's memory.
        given: The module's: the same memory with a version counter of its own, or a copy on its device.
        version: Of `given`, before the module had it; None: it has no counter.
        leaf: Where the device's graph begins; None where no gradient is asked for.
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
class Part:
    """What a module is called with.

    Attributes:
        args: Positional arguments.
        kwargs: Those by name.
        handed: The tensors among them, in order.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    handed: list[Handed]

    @property
    def wanting(self) -> list[Tensor]:
        """Where the device's graph begins for the caller's tensors that ask for a gradient."""
        return [one.leaf for one in self.handed if one.leaf is not None]


class _Begin(torch.autograd.Function):
    """Hands a leaf on as a tensor that a module may write to, as it may to what another one computed."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:  # noqa: ARG004
        return leaf.data  # no view of the leaf, so that it has a version counter of its own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient


class Arguments:
    """The arguments of a call.

    Args:
        args: Positional.
        kwargs: By name.
        dims: Along which tensors are cut: one for all, or for each argument its own, first the positional
            ones; None: not at all.

    Attributes:
        samples: Length of the batch; None without a tensor, array or list of texts that has a length.
        dim: Of the tensor that has this length; 0 without.
        wanting: Tensors that ask for a gradient, in order.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        dims: int | Sequence[int | None] | None = 0,
    ) -> None:
        # A dict is never taken for a column, as a tuple of two lists of texts might be.
        named: dict[Any, Any] = {**dict(enumerate(args)), **(kwargs or {})}
        self._positional = len(args)
        of_arguments = list(dims) if isinstance(dims, Sequence) else [dims] * len(named)
        self.samples, self.dim = _length(named, of_arguments)
        self._leaves, self._form = flatten(named, self.samples, with_sizes=True)
        of_leaves = [
            dim
            for dim, argument in zip(of_arguments, self._form.children, strict=True)
            for _ in range(argument.leaves)
        ]
        self._refused: tuple[int, Uncuttable] | None = None
        self._cuts = [
            dim if dim is not None and self._is_cut(place, dim) else None
            for place, dim in enumerate(of_leaves)
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

    def check(self) -> None:
        """Look whether the batch can be cut.

        Raises:
            FlowdpError: An argument holds samples, and cannot be cut.
        """
        if self._refused is not None:
            place, why = self._refused
            raise FlowdpError(f"argument {self.names[place]}: {why}")

    @property
    def names(self) -> list[str]:
        """How each leaf is called, for messages: `0['x']`."""
        return [path.removeprefix("[").replace("]", "", 1) for path in self._form.paths()]

    def __str__(self) -> str:
        named = zip(self.names, self._leaves, strict=True)
        return ", ".join(f"{name}: {described(leaf)}" for name, leaf in named) or "no arguments"

    def part(self, start: int, samples: int, device: torch.device | None) -> Part:
        """What a device is called with.

        Args:
            start: Its first sample.
            samples: How many it takes.
            device: Where they are wanted; None: where they are.

        Streams:
            Copies are on the current ones of both devices.
        """
        own: list[Any] = []
        handed: list[Handed] = []
        for leaf, dim in zip(self._leaves, self._cuts, strict=True):
            if not isinstance(leaf, Tensor):
                own.append(leaf if dim is None else cut(leaf, start, samples, dim))
                continue
            # Without the caller's graph: the device has one of its own, which begins behind the copy. By
            # `data`, not `detach`, or a write to one part would count as one to all of them.
            memory = _piece(leaf.data, dim, start, samples)
            given = memory if device is None else move(memory, device)
            begin = None
            if self.wanting and leaf.requires_grad:
                begin = given.requires_grad_()
                given = _Begin.apply(begin)  # type: ignore[no-untyped-call]
            version = None if given.is_inference() else given._version
            handed.append(Handed(leaf, memory, given, version, begin, dim is not None))
            own.append(given)
        named = unflatten(own, self._form)
        args = tuple(named.pop(place) for place in range(self._positional))
        return Part(args, named, handed)

    def piece(self, place: int, tensor: Tensor, start: int, samples: int) -> Tensor:
        """The part of a tensor like one in `wanting`, in the caller's graph.

        Args:
            place: In `wanting`.
            tensor: Itself, or its gradient.
            start: First sample of the part.
            samples: How many it has.
        """
        return _piece(tensor, self._wanting_cuts[place], start, samples)

    def join_gradients(
        self, pieces: Sequence[Sequence[Tensor | None]], samples: Sequence[int]
    ) -> list[Tensor | None]:
        """The gradients of `wanting`: put together for what was cut, summed for what went whole.

        Args:
            pieces: For each part in order, the gradients of its `wanting`.
            samples: Of each part.
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
        try:
            return is_cut(self._leaves[place], self.samples, dim)
        except Uncuttable as why:
            self._refused = self._refused or (place, why)
            return False


def _length(named: Mapping[Any, Any], dims: Sequence[int | None]) -> tuple[int | None, int]:
    """Samples of a batch, and along which dim the tensor lies that says so."""
    given = [(value, dim) for value, dim in zip(named.values(), dims, strict=True) if dim is not None]
    for value, dim in given:
        for leaf in walk(value):
            if isinstance(leaf, Tensor) and leaf.dim() > dim:
                return leaf.shape[dim], dim
    return batch_length({place: value for place, (value, _) in enumerate(given)}), 0


def _piece(tensor: Tensor, dim: int | None, start: int, samples: int) -> Tensor:
    return tensor if dim is None else tensor.narrow(dim, start, samples)


class Returned:
    """What a module returned for its part.

    Args:
        tree: As it came.
        samples: Of the part; 0 where nothing was cut.
        where: The device, for errors.
        weights: Of the part, by the functions that `reduce` has, where the outputs are joined.

    Attributes:
        tensors: In order, with the device's graph.
    """

    def __init__(
        self,
        tree: Any,
        samples: int,
        where: torch.device,
        weights: Mapping[WeightFunction, Tensor] | None = None,
    ) -> None:
        leaves, self.form = flatten(tree)
        self.weights = weights or {}
        self.samples = samples
        self.where = where
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def name(self, place: int) -> str:
        """How a leaf is called, for messages: `['loss']`."""
        return list(self.form.paths())[place]


class Outputs:
    """The outputs of all parts, joined.

    Attributes:
        tensors: On the first device, without a graph, in order.
        differentiable: Which of them ask for a gradient.
        form: The tree, and which of the tensors are one number; equal for outputs of one kind.
    """

    def __init__(
        self, parts: Sequence[Returned], leaves: list[Any], seams: Sequence[_Seam], tensors: list[Tensor]
    ) -> None:
        self.tensors = tensors
        self.form = (parts[0].form, tuple(tensor.dim() == 0 for tensor in tensors))
        self.differentiable = [
            any(piece.requires_grad for piece in column)
            for column in zip(*(part.tensors for part in parts), strict=True)
        ]
        self._tree: Form = parts[0].form
        self._leaves = leaves
        self._seams = seams

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """What a module returns, with these for its tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return unflatten(leaves, self._tree)

    def part(self, gradients: Sequence[Tensor | None], place: int) -> list[Tensor | None]:
        """What of the gradients of `tensors` belongs to a part."""
        return [
            None if gradient is None else seam.part(gradient, place)
            for gradient, seam in zip(gradients, self._seams, strict=True)
        ]


class Apart(Outputs):
    """The outputs of all parts, not joined: `tree` is a list of them.

    Args:
        parts: What the modules returned, in order.
        pieces: The tensors of each part, without a graph, on the first device.
    """

    def __init__(self, parts: Sequence[Returned], pieces: Sequence[Sequence[Tensor]]) -> None:
        self.tensors = [tensor for own in pieces for tensor in own]
        self.differentiable = [tensor.requires_grad for part in parts for tensor in part.tensors]
        self.form = (parts[0].form, tuple(tensor.dim() == 0 for tensor in pieces[0]))
        self._parts = [(part.leaves, part.form, len(part.tensors)) for part in parts]

    def tree(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What each module returned, with these for the tensors of all."""
        rest = iter(tensors)
        return [
            unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in leaves], form)
            for leaves, form, _ in self._parts
        ]

    def part(self, gradients: Sequence[Tensor | None], place: int) -> list[Tensor | None]:
        """The gradients of a part's tensors."""
        start = sum(count for _, _, count in self._parts[:place])
        return list(gradients[start : start + self._parts[place][2]])


class Joining:
    """How the outputs of one call are put together.

    Args:
        layout: Of its outputs.
        callee: Which names the arguments, for weights.
        dim: Of the first argument that was cut.
        is_apart: Whether they are left as they are, for a function of the user's.

    Attributes:
        form: As `Outputs.form`, when they have been joined; None before.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        callee: Callee | None = None,
        dim: int = 0,
        *,
        is_apart: bool = False,
    ) -> None:
        self._layout = layout or Layout()
        self._callee = callee
        self._dim = dim
        self._is_apart = is_apart
        self.form: tuple[Any, ...] | None = None

    def weigh(self, part: Part) -> dict[WeightFunction, Tensor]:
        """The weights of a part, on its device; before a module is called that may write to its inputs."""
        if self._callee is None:
            return {}
        return self._layout.weigh(self._callee, part.args, part.kwargs)

    def join(self, parts: Sequence[Returned], pieces: Sequence[Sequence[Tensor]]) -> Outputs:
        """As the function `join`."""
        made = Apart(parts, pieces) if self._is_apart else join(parts, pieces, self._layout, self._dim)
        self.form = made.form
        return made


def join(
    parts: Sequence[Returned],
    pieces: Sequence[Sequence[Tensor]],
    layout: Layout | None = None,
    dim: int = 0,
) -> Outputs:
    """Put the outputs of all parts together.

    Tensors are concatenated along their dim, where their length is the part's samples or a multiple of it; a
    number in a tensor is reduced, by default to the mean weighted by samples. Arrays, and lists without
    tensors, are concatenated where each is as long as its part; everything else must be the same in all.

    Args:
        parts: What the modules returned, in the order of the samples.
        pieces: The tensors of each part, without a graph, on the first device.
        layout: Of the outputs; None: along dim 0, and means.
        dim: Of the first argument that was cut.

    Raises:
        FlowdpError: The outputs cannot be put together.
    """
    layout = layout or _PLAIN
    first = parts[0]
    for part in parts[1:]:
        if part.form != first.form:
            raise FlowdpError(
                f"the outputs cannot be gathered: {first.where} returned {first.form}, "
                f"{part.where} {part.form}"
            )
    samples = [part.samples for part in parts]
    paths = list(first.form.key_paths())
    seams: list[_Seam] = []
    tensors: list[Tensor] = []
    leaves: list[Any] = []
    for place, path in enumerate(paths):
        row = [part.leaves[place] for part in parts]
        if any(leaf is not _TENSOR for leaf in row):
            leaves.append(_merged(first, place, row, samples))
            continue
        leaves.append(_TENSOR)
        own = [piece[len(seams)] for piece in pieces]
        if len(parts) > 1 and all(piece.dim() == 0 for piece in own):
            seams.append(_number(first, place, layout.reduction(path), own[0], parts))
        else:
            seams.append(_seam(first, place, own, samples, layout.output_dim(path, dim)))
        tensors.append(seams[-1].join(own))
    return Outputs(parts, leaves, seams, tensors)


_PLAIN = Layout()


class _Seam(Protocol):
    """How one output tensor lies over the parts."""

    def join(self, pieces: Sequence[Tensor]) -> Tensor: ...

    def part(self, gradient: Tensor, place: int) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class _Rows(_Seam):
    """Pieces that lie one behind the other.

    Attributes:
        lengths: Of the pieces along `dim`.
    """

    lengths: tuple[int, ...]
    dim: int

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0].detach() if len(pieces) == 1 else torch.cat(list(pieces), self.dim)

    def part(self, gradient: Tensor, place: int) -> Tensor:
        if len(self.lengths) == 1:
            return gradient
        return gradient.narrow(self.dim, sum(self.lengths[:place]), self.lengths[place])


@dataclass(frozen=True, slots=True)
class _Sum(_Seam):
    """One number from each part, of which the sum is meant."""

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(pieces)).sum(0, dtype=pieces[0].dtype)

    def part(self, gradient: Tensor, place: int) -> Tensor:  # noqa: ARG002
        return gradient


@dataclass(frozen=True, slots=True)
class _Mean(_Seam):
    """One number from each part, of which the mean by samples is meant.

    Attributes:
        shares: Fraction of the samples of each part.
    """

    shares: Sequence[float]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.stack([piece * share for piece, share in zip(pieces, self.shares, strict=True)]).sum(0)

    def part(self, gradient: Tensor, place: int) -> Tensor:
        return gradient * self.shares[place]


@dataclass(frozen=True, slots=True)
class _WeightedMean(_Seam):
    """One number from each part, of which the mean by weights is meant.

    Attributes:
        shares: Fraction of the weight of each part. Shape (parts,), on the first device.
    """

    shares: Tensor

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        counted = torch.stack(list(pieces)) * self.shares
        # A part without any of the things that are counted may have divided by their number.
        return counted.masked_fill(self.shares == 0, 0.0).sum(0).to(pieces[0].dtype)

    def part(self, gradient: Tensor, place: int) -> Tensor | None:
        share = self.shares[place]
        if share.device.type == "cpu" and not share:
            return None  # not 0: the module may have divided by 0
        return (gradient * share).to(gradient.dtype)


def _number(
    output: Returned, place: int, reduction: Reduction, like: Tensor, parts: Sequence[Returned]
) -> _Seam:
    is_float = like.is_floating_point() or like.is_complex()
    if reduction == "sum" and like.dtype != torch.bool:
        return _Sum()
    if not is_float:
        raise FlowdpError(
            f"output{output.name(place)} cannot be gathered: it is one number of {like.dtype} from each "
            f"device, of which there is no mean; return a float, or one number for each sample, or say "
            f"reduce='sum' in setup()"
        )
    whole = sum(part.samples for part in parts) or 1
    by_samples = [part.samples / whole for part in parts]
    if not callable(reduction):
        return _Mean(by_samples)
    if any(reduction not in part.weights for part in parts):
        raise FlowdpError(
            f"output{output.name(place)} cannot be gathered: its weight is {_signature(reduction)}, and the "
            f"call has no such arguments"
        )
    weights = torch.stack([part.weights[reduction] for part in parts])
    total = weights.sum()
    # Nothing to count anywhere: whatever the module gives for that is the mean, as on one device.
    return _WeightedMean(torch.where(total == 0, weights.new_tensor(by_samples), weights / total))


def _signature(function: WeightFunction) -> str:
    return f"a function of {', '.join(inspect.signature(function).parameters)}"


def _seam(output: Returned, place: int, pieces: Sequence[Tensor], samples: Sequence[int], dim: int) -> _Seam:
    first = pieces[0]
    if len(pieces) == 1:
        return _Rows((samples[0],), 0)
    like = _without(first.shape, dim)
    if all(piece.dim() > dim and _without(piece.shape, dim) == like for piece in pieces):
        lengths = tuple(piece.shape[dim] for piece in pieces)
        times = lengths[0] // samples[0]
        if times and all(length == times * count for length, count in zip(lengths, samples, strict=True)):
            return _Rows(lengths, dim)
    raise FlowdpError(
        f"output{output.name(place)} cannot be gathered: for {list(samples)} samples the devices returned "
        f"shapes {[tuple(piece.shape) for piece in pieces]}; dim {dim} must be the samples' or a multiple of "
        f"it, and the rest equal, or it must be one number, which is averaged"
    )


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _merged(output: Returned, place: int, leaves: Sequence[Any], samples: Sequence[int]) -> Any:
    """One leaf of several that are no tensors."""
    first = leaves[0]
    if len(leaves) == 1 or isinstance(first, torch.device):  # that of a cache, for instance
        return first
    if isinstance(first, PackedSequence):
        raise FlowdpError(
            f"output{output.name(place)} cannot be gathered: it is a PackedSequence; return the padded tensor"
        )
    is_rows = all(isinstance(leaf, np.ndarray) for leaf in leaves) or all(map(column, leaves))
    if is_rows and all(is_cut(leaf, count) for leaf, count in zip(leaves, samples, strict=True)):
        return concatenated(leaves)
    if not all(_is_same(leaf, first) for leaf in leaves[1:]):
        raise FlowdpError(
            f"output{output.name(place)} cannot be gathered: it is no tensor, and differs between the "
            f"devices: {leaves!r:.200}; return tensors, or lists and arrays with one entry for each sample, "
            f"in tuples, lists, dicts, dataclasses, or classes that torch knows as pytrees"
        )
    return first


def _is_same(leaf: Any, first: Any) -> bool:
    if leaf is first:
        return True
    if type(leaf) is not type(first):
        return False
    if column(leaf):
        return len(leaf) == len(first) and all(map(_is_same, leaf, first))
    try:
        return bool(leaf == first)
    except Exception:  # an array, or a class that holds tensors, has no one answer
        return False


class _Tensor:
    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _Tensor()
"""Stands for a tensor among leaves."""
