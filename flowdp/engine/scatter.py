"""Taking a call apart over the devices, and its outputs together again.

Arguments and outputs are pytrees. What has the batch's length along dim 0 is cut; everything else goes whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from flowdp.device.transfer import move
from flowdp.errors import FlowdpError

__all__ = ["Arguments", "Outputs", "Part", "Returned", "batch_length", "join"]


def batch_length(tree: Any) -> int | None:
    """Samples of a batch: the length of its first tensor that has one; None without any."""
    leaves, _ = tree_flatten(tree)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), None)


@dataclass(frozen=True, slots=True)
class Part:
    """What a module is called with.

    Attributes:
        args: Positional arguments.
        kwargs: Those by name.
        wanting: What stands there for the caller's tensors that ask for a gradient: leaves of a graph of the
            device's own.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanting: list[Tensor]


class Arguments:
    """The arguments of a call.

    Args:
        args: Positional.
        kwargs: By name.

    Attributes:
        samples: Length of the batch; None without a tensor that has a length.
        wanting: Tensors that ask for a gradient, in order.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self._leaves, self._spec = tree_flatten((args, kwargs or {}))
        self.samples = batch_length(self._leaves)
        self.wanting: list[Tensor] = []
        if torch.is_grad_enabled():
            self.wanting = [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

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
        wanting: list[Tensor] = []
        for leaf in self._leaves:
            if not isinstance(leaf, Tensor):
                own.append(leaf)
                continue
            # Without the caller's graph: the device has one of its own, which begins behind the copy.
            whole = leaf.detach()
            mine = whole.narrow(0, start, samples) if self._is_cut(leaf) else whole
            if device is not None:
                mine = move(mine, device)
            if self.wanting and leaf.requires_grad:
                wanting.append(mine.requires_grad_())
            own.append(mine)
        args, kwargs = tree_unflatten(own, self._spec)
        return Part(args, kwargs, wanting)

    def join_gradients(
        self, pieces: Sequence[Sequence[Tensor | None]], samples: Sequence[int]
    ) -> list[Tensor | None]:
        """The gradients of `wanting`: put together for what was cut, summed for what went whole.

        Args:
            pieces: For each part in order, the gradients of its `wanting`.
            samples: Of each part.
        """
        joined: list[Tensor | None] = []
        for leaf, *column in zip(self.wanting, *pieces, strict=True):
            there = [None if piece is None else move(piece, leaf.device) for piece in column]
            known = [piece for piece in there if piece is not None]
            if not known:
                joined.append(None)
            elif self._is_cut(leaf):
                sizes = [(count, *leaf.shape[1:]) for count in samples]
                filled = [
                    leaf.new_zeros(size) if piece is None else piece
                    for piece, size in zip(there, sizes, strict=True)
                ]
                joined.append(torch.cat(filled))
            else:
                joined.append(torch.stack(known).sum(0))
        return joined

    def _is_cut(self, leaf: Tensor) -> bool:
        return leaf.dim() > 0 and len(leaf) == self.samples


class Returned:
    """What a module returned for its part.

    Args:
        tree: As it came.
        samples: Of the part; 0 where nothing was cut.
        where: The device, for errors.

    Attributes:
        tensors: In order, with the device's graph.
    """

    def __init__(self, tree: Any, samples: int, where: torch.device) -> None:
        named, self.spec = tree_flatten_with_path(tree)
        self.samples = samples
        self.where = where
        self.names = [keystr(path) for path, _ in named]
        self.tensors = [leaf for _, leaf in named if isinstance(leaf, Tensor)]
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for _, leaf in named]


class Outputs:
    """The outputs of all parts, joined.

    Attributes:
        tensors: On the first device, without a graph, in order.
        differentiable: Which of them ask for a gradient.
    """

    def __init__(self, parts: Sequence[Returned], seams: Sequence[_Seam], tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.differentiable = [
            any(piece.requires_grad for piece in column)
            for column in zip(*(part.tensors for part in parts), strict=True)
        ]
        self._spec: TreeSpec = parts[0].spec
        self._leaves = parts[0].leaves
        self._seams = seams

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """What a module returns, with these for its tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)

    def part(self, gradients: Sequence[Tensor | None], place: int) -> list[Tensor | None]:
        """What of the gradients of `tensors` belongs to a part."""
        return [
            None if gradient is None else seam.part(gradient, place)
            for gradient, seam in zip(gradients, self._seams, strict=True)
        ]


def join(parts: Sequence[Returned], pieces: Sequence[Sequence[Tensor]]) -> Outputs:
    """Put the outputs of all parts together.

    Tensors are concatenated along dim 0, where their length is the part's samples or a multiple of it; a
    number in a tensor is averaged, weighted by samples; everything else must be the same in all parts.

    Args:
        parts: What the modules returned, in the order of the samples.
        pieces: The tensors of each part, without a graph, on the first device.

    Raises:
        FlowdpError: The outputs cannot be put together.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.spec != first.spec:
            raise FlowdpError(
                f"the outputs cannot be gathered: {first.where} returned {first.spec}, "
                f"{part.where} {part.spec}"
            )
    seams: list[_Seam] = []
    tensors: list[Tensor] = []
    for place, name in enumerate(first.names):
        leaves = [part.leaves[place] for part in parts]
        if any(leaf is not _TENSOR for leaf in leaves):
            _check_same(name, leaves)
            continue
        column = [piece[len(seams)] for piece in pieces]
        seams.append(_seam(name, column, [part.samples for part in parts]))
        tensors.append(seams[-1].join(column))
    return Outputs(parts, seams, tensors)


@dataclass(frozen=True, slots=True)
class _Seam:
    """How one output tensor lies over the parts.

    Attributes:
        lengths: Of the pieces along dim 0; None where each part has a number, and the mean is meant.
        shares: Fraction of the samples of each part.
    """

    lengths: tuple[int, ...] | None
    shares: tuple[float, ...]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0].detach()
        if self.lengths is not None:
            return torch.cat(list(pieces))
        return torch.stack([piece * share for piece, share in zip(pieces, self.shares, strict=True)]).sum(0)

    def part(self, gradient: Tensor, place: int) -> Tensor:
        if len(self.shares) == 1:
            return gradient
        if self.lengths is None:
            return gradient * self.shares[place]
        return gradient.narrow(0, sum(self.lengths[:place]), self.lengths[place])


def _seam(name: str, pieces: Sequence[Tensor], samples: Sequence[int]) -> _Seam:
    whole = sum(samples) or 1
    shares = tuple(count / whole for count in samples)
    first = pieces[0]
    if len(pieces) == 1:
        return _Seam(None, shares)
    if all(piece.dim() == 0 for piece in pieces):
        if first.is_floating_point() or first.is_complex():
            return _Seam(None, shares)
        raise FlowdpError(
            f"output{name} cannot be gathered: it is one number of {first.dtype} from each device, of which "
            f"there is no mean; return a float, or one number for each sample"
        )
    if all(piece.dim() > 0 and piece.shape[1:] == first.shape[1:] for piece in pieces):
        lengths = tuple(len(piece) for piece in pieces)
        times = lengths[0] // samples[0]
        if times and all(length == times * count for length, count in zip(lengths, samples, strict=True)):
            return _Seam(lengths, shares)
    raise FlowdpError(
        f"output{name} cannot be gathered: for {list(samples)} samples the devices returned shapes "
        f"{[tuple(piece.shape) for piece in pieces]}; dim 0 must be the samples' or a multiple of it, and "
        f"the rest equal, or it must be one number, which is averaged"
    )


def _check_same(name: str, leaves: Sequence[Any]) -> None:
    first = leaves[0]
    if not all(_is_same(leaf, first) for leaf in leaves[1:]):
        raise FlowdpError(
            f"output{name} cannot be gathered: it is no tensor, and differs between the devices: "
            f"{leaves!r:.200}; return tensors in tuples, lists, dicts, or classes that torch knows as pytrees"
        )


def _is_same(leaf: Any, first: Any) -> bool:
    try:
        return leaf is first or (type(leaf) is type(first) and bool(leaf == first))
    except Exception:  # an array, or a class that holds tensors, has no one answer
        return False


class _Tensor:
    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _Tensor()
"""Stands for a tensor among leaves."""
