"""Joining of the outputs of a call that several devices did.

Outputs are trees (`flowdp.data.trees`). Tensors are joined along their dim, numbers are reduced, and all else
is the same on all devices, or has an entry for each sample.
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

from flowdp.data.trees import Form, column, concatenated, flatten, is_cut, is_same, unflatten
from flowdp.data_parallel.layout import PLAIN, RETURN, Callee, Layout, Reduction, WeightFunction, output_name
from flowdp.data_parallel.scatter import CallArguments
from flowdp.errors import FlowdpError

__all__ = ["Joining", "Outputs", "PartOutputs", "join"]


class PartOutputs:
    """The outputs of a module for its part.

    Args:
        tree: Return value of the module.
        samples: Samples of the part; 0 where nothing was cut.
        where: The device, for errors.
        weights: Weights of the part by the functions in `reduce`, on the device of the join.

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
        """The name of a leaf, for messages: `['loss']`."""
        return list(self.form.paths())[place]

    def key(self, place: int) -> str:
        """The key of a leaf in the options of `setup`: `loss`, `1.0`."""
        return output_name(list(self.form.key_paths())[place])


class Outputs:
    """The outputs of all parts, joined.

    Attributes:
        tensors: On the first device, without a graph, in order.
        differentiable: Flag per tensor: it asks for a gradient.
        form: The tree, and a flag per tensor: it is one number. Equal for outputs of one kind.
    """

    def __init__(
        self, parts: Sequence[PartOutputs], leaves: list[Any], seams: Sequence[_Seam], tensors: list[Tensor]
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
        """The outputs of a module, with these for its tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return unflatten(leaves, self._tree)

    def part(self, gradients: Sequence[Tensor | None], place: int) -> list[Tensor | None]:
        """The share of a part in the gradients of `tensors`."""
        return [
            None if gradient is None else seam.part(gradient, place)
            for gradient, seam in zip(gradients, self._seams, strict=True)
        ]


class SeparateOutputs(Outputs):
    """The outputs of all parts, not joined: `tree` is a list of them. The arguments are those of `join`."""

    def __init__(self, parts: Sequence[PartOutputs], pieces: Sequence[Sequence[Tensor]]) -> None:
        self.tensors = [tensor for own in pieces for tensor in own]
        self.differentiable = [tensor.requires_grad for part in parts for tensor in part.tensors]
        self.form = (parts[0].form, tuple(tensor.dim() == 0 for tensor in pieces[0]))
        self._parts = [(part.leaves, part.form, len(part.tensors)) for part in parts]

    def tree(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The outputs of each module, with these for the tensors of all."""
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
    """Rules by which the outputs of one call are joined.

    Args:
        layout: Layout of its outputs.
        callee: Callable that names the arguments, for weights.
        dim: Batch dimension of the first argument that was cut.

    Attributes:
        form: `Outputs.form` of the joined outputs; None before.
    """

    def __init__(self, layout: Layout = PLAIN, callee: Callee | None = None, dim: int = 0) -> None:
        self._layout = layout
        self._callee = callee
        self._dim = dim
        self.form: tuple[Any, ...] | None = None

    @property
    def positional(self) -> tuple[str, ...]:
        """Names of the arguments that may be given by position, where they are known."""
        return () if self._callee is None else self._callee.positional

    def weigh(self, part: CallArguments) -> dict[WeightFunction, Tensor]:
        """The weights of a part, on its device; before a module is called that may write to its inputs."""
        if self._callee is None:
            return {}
        names = self._callee.names(part.args, part.kwargs)
        return self._layout.weigh(dict(zip(names, (*part.args, *part.kwargs.values()), strict=True)))

    def join(self, parts: Sequence[PartOutputs], pieces: Sequence[Sequence[Tensor]]) -> Outputs:
        """Join the outputs as `join` does, or leave them apart."""
        is_users = len(parts) > 1 and self._layout.join is not None
        made = SeparateOutputs(parts, pieces) if is_users else join(parts, pieces, self._layout, self._dim)
        self.form = made.form
        return made

    def has_other_rows(self, parts: Sequence[PartOutputs]) -> bool:
        """Whether parts have unlike trees, or an output with rows that are not those of the samples."""
        samples = [part.samples for part in parts]
        first = parts[0]
        if any(part.form != first.form for part in parts):
            return True
        paths = [
            path for path, leaf in zip(first.form.key_paths(), first.leaves, strict=True) if leaf is _TENSOR
        ]
        columns = zip(*(part.tensors for part in parts), strict=False)  # a number may be no tensor
        return any(
            any(piece.numel() != 1 for piece in own)
            and _lengths(own, samples, self._layout.output_dim(path, self._dim)) is None
            for path, own in zip(paths, columns, strict=False)
        )


def join(
    parts: Sequence[PartOutputs],
    pieces: Sequence[Sequence[Tensor]],
    layout: Layout = PLAIN,
    dim: int = 0,
) -> Outputs:
    """Put the outputs of all parts together.

    Tensors are concatenated along their dim, where their length is the part's samples or a multiple of it; a
    number in a tensor is reduced, by default to the mean weighted by samples. Arrays, and lists without
    tensors, are concatenated where each is as long as its part; everything else must be the same in all.

    Args:
        parts: Return values of the modules, in the order of the samples.
        pieces: The tensors of each part, without a graph, on the first device.
        layout: Layout of the outputs.
        dim: Batch dimension of the first argument that was cut.

    Raises:
        FlowdpError: The outputs cannot be put together.
    """
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


class _Seam(Protocol):
    """The layout of one output tensor over the parts."""

    def join(self, pieces: Sequence[Tensor]) -> Tensor: ...

    def part(self, gradient: Tensor, place: int) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class _Rows(_Seam):
    """Pieces that lie one behind the other.

    Attributes:
        lengths: Lengths of the pieces along `dim`.
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
    """The sum of one number from each part."""

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(pieces)).sum(0, dtype=pieces[0].dtype)

    def part(self, gradient: Tensor, _place: int) -> Tensor:
        return gradient


@dataclass(frozen=True, slots=True)
class _Mean(_Seam):
    """The mean by samples of one number from each part.

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
    """The mean by weights of one number from each part.

    Attributes:
        shares: Fraction of the weight of each part. Shape (parts,), on the first device.
    """

    shares: Tensor

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        counted = torch.stack(list(pieces)) * self.shares
        # A part without anything to count may have divided by 0.
        return counted.masked_fill(self.shares == 0, 0.0).sum(0).to(pieces[0].dtype)

    def part(self, gradient: Tensor, place: int) -> Tensor | None:
        share = self.shares[place]
        if share.device.type == "cpu" and not share:
            return None  # not 0: the module may have divided by 0
        return (gradient * share).to(gradient.dtype)


def _number(
    output: PartOutputs, place: int, reduction: Reduction, like: Tensor, parts: Sequence[PartOutputs]
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
    # Nothing to count anywhere: the module's answer to that is the mean, as on one device.
    return _WeightedMean(torch.where(total == 0, weights.new_tensor(by_samples), weights / total))


def _signature(function: WeightFunction) -> str:
    return f"a function of {', '.join(inspect.signature(function).parameters)}"


def _seam(
    output: PartOutputs, place: int, pieces: Sequence[Tensor], samples: Sequence[int], dim: int
) -> _Seam:
    if len(pieces) == 1:
        return _Rows((samples[0],), 0)
    lengths = _lengths(pieces, samples, dim)
    if lengths is not None:
        return _Rows(lengths, dim)
    raise FlowdpError(
        f"output{output.name(place)} cannot be gathered: for {list(samples)} samples the devices returned "
        f"shapes {[tuple(piece.shape) for piece in pieces]}; dim {dim} must be the samples' or a multiple of "
        f"it, and the rest equal, or it must be one number, which is averaged"
        f"{_remedy(output.key(place), pieces, samples)}"
    )


def _lengths(pieces: Sequence[Tensor], samples: Sequence[int], dim: int) -> tuple[int, ...] | None:
    """Lengths of pieces that can be joined along a dim; None where they cannot."""
    if not all(piece.dim() > dim for piece in pieces):
        return None
    like = _without(pieces[0].shape, dim)
    lengths = tuple(piece.shape[dim] for piece in pieces)
    times = lengths[0] // samples[0]
    fits = all(length == times * count for length, count in zip(lengths, samples, strict=True))
    return lengths if times and fits and all(_without(piece.shape, dim) == like for piece in pieces) else None


def _remedy(key: str, pieces: Sequence[Tensor], samples: Sequence[int]) -> str:
    if all(piece.numel() == 1 for piece in pieces):
        return ": return loss.mean() or loss.squeeze()"
    for dim in range(max(piece.dim() for piece in pieces)):
        if _lengths(pieces, samples, dim) is not None:
            option = {RETURN: {key: dim} if key else dim}
            return f"; if its samples lie along dim {dim}, say dim={option} in setup()"
    return ""


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _merged(output: PartOutputs, place: int, leaves: Sequence[Any], samples: Sequence[int]) -> Any:
    """One leaf made of several that are not tensors."""
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
    if not all(is_same(leaf, first) for leaf in leaves[1:]):
        raise FlowdpError(
            f"output{output.name(place)} cannot be gathered: it is no tensor, and differs between the "
            f"devices: {leaves!r:.200}; return tensors, or lists and arrays with one entry for each sample, "
            f"in tuples, lists, dicts, dataclasses, or classes that torch knows as pytrees"
        )
    return first


class _Tensor:
    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _Tensor()
"""Stands for a tensor among leaves."""
