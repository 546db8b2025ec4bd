"""The arithmetic of all means: weights, flat memory, ranks that are left out.

Parameters: the mean weighted by samples, or an outer step towards it (`flowdp/collective/outer.py`). Float
buffers: the same mean in float64, so that a constant table comes out as it went in and an infinity stays one.
Integers and flags: the maximum. A rank with weight 0 takes the result and gives nothing; it is left out, not
multiplied by 0, for 0 times NaN is NaN.

Others carry the memory: `host.py` through the host's, `local.py` between devices, `nccl.py` by NCCL,
`machines_mean.py` between machines. `nccl_sums.py` has the passes around an all-reduce: scale, sum, divide.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from flowdp.collective.fused import Kernels
from flowdp.collective.outer import Move, OuterMomentum
from flowdp.device.accelerator import is_accelerator
from flowdp.device.flat_parameters import Flat
from flowdp.errors import ProtocolError

__all__ = [
    "BlockMean",
    "Carrier",
    "Op",
    "Part",
    "Site",
    "add_weighted",
    "arithmetic",
    "copy_all",
    "drift_of",
    "flat_view",
    "reduce_all",
    "relative_drift",
    "shift",
    "split_equally",
    "write_back",
]

BLOCK = 1 << 17
"""Elements of a block per torch thread. Half a megabyte of float32: the blocks of two replicas and a scratch
stay in the cache, and a call is long enough that two threads seldom wait for the interpreter lock."""

CUDA_BLOCK = 1 << 23
"""Elements of a block on a CUDA device: few launches, and a scratch of 32 MB of float32 that its cache can
still hold when the mean is spread."""

FAR_BLOCK = 1 << 21
"""Elements of a block of which some sources lie on another card: a copy of 8 MB of float32 is long beside its
launch, and two blocks of seven sources are 112 MB."""

LINE = 64
"""Parts start on multiples of this many elements: at least a cache line of any dtype, so no two threads write
to the same one."""

Op = Literal["sum", "mean", "max", "min"]


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parameters of a dtype are averaged: their own, float32 at least."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def add_weighted(total: Tensor, others: Iterable[Tensor], weights: Sequence[float | Tensor]) -> None:
    """Multiply a tensor by the first weight and add the others, each times its own, in their order."""
    first, *rest = weights
    total.mul_(first)
    for other, weight in zip(others, rest, strict=True):
        if isinstance(weight, Tensor):
            total.addcmul_(other, weight)
        else:
            total.add_(other, alpha=weight)


def relative_drift(square: float, mean_square: float) -> float:
    """||replica - mean|| / ||mean|| from the two sums of squares; 0.0 where the mean is as good as zero."""
    mean = math.sqrt(mean_square)
    return 0.0 if mean <= 1e-10 else math.sqrt(square) / mean


def drift_of(member: int, rows: Iterable[Sequence[float]]) -> tuple[float, float]:
    """The drift of a member, and the norm of the mean.

    Args:
        member: Place of the member in the rows.
        rows: Results of `BlockMean.reduce` for each part of the memories, as numbers.
    """
    sums = [sum(column) for column in zip(*rows, strict=True)]
    return relative_drift(sums[member], sums[-1]), math.sqrt(sums[-1])


class Carrier:
    """Copies of blocks from and to other devices: here, in order with the sums, on the current streams.

    Attributes:
        slots: Blocks for which there is room at once.
    """

    slots = 1

    def begin(self) -> None:
        """The sources may be read from here on."""

    def fetch(self, _slot: int, copy: Callable[[], object]) -> None:
        """Copy a block in, as soon as the sums of the last one in its slot are done."""
        copy()

    def await_fetch(self, _slot: int) -> None:
        """Let the sums wait for a block."""

    def send(self, _slot: int, copy: Callable[[], object]) -> None:
        """The sums of a block are done; copy its mean out."""
        copy()

    def end(self) -> None:
        """Let what follows the sums wait for all that was sent."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of flat memories that one object reduces.

    Attributes:
        index: Its number.
        count: Number of parts.
        is_span: Of parameters that are cut, it is the span that has its number, for the first target.
    """

    index: int = 0
    count: int = 1
    is_span: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """Place of a mean: its device, kernels and copies.

    Attributes:
        device: Device of the arithmetic; None: that of the flats.
        kernels: Kernels for this number of members on that device; None: torch alone.
        far: Sources on other devices, by index. They are brought over block by block.
        carrier: Copies from and to the other devices.
    """

    device: torch.device | None = None
    kernels: Kernels | None = None
    far: Collection[int] = ()
    carrier: Carrier = field(default_factory=Carrier)


_Kind = Literal["parameters", "unmeasured", "buffers", "counts"]


@dataclass(slots=True)
class _Block:
    """The same elements of all sources, and of all targets.

    Attributes:
        kind: Arithmetic.
        sources: One for each member.
        targets: Those on the device of the sums.
        sent: Those on other devices.
        move: Outer step.
        rows: Where a kernel writes its squares; None: torch takes the mean.
    """

    kind: _Kind
    sources: Sequence[Tensor]
    targets: Sequence[Tensor]
    sent: Sequence[Tensor]
    move: Move | None = None
    rows: slice | None = None


class BlockMean:
    """Averages one part of flat memories.

    With kernels the mean of parameters is one pass over the memory. Torch needs several, and goes block by
    block, while each block is in the cache. The blocks are cut once, and the scratch for them is made at the
    first use.

    Args:
        flats: The layout that all memories have.
        sources: The memories of each member: `sources[member][flat]`.
        targets: Memories for the mean: `targets[target][flat]`. It may be the sources themselves; a target
            may also be wider, of the dtype that `arithmetic` says.
        site: Where the mean is taken.
        part: The part that this object reduces.
        outer: Outer step of the parameters; None: they become the plain mean.

    Threads: one. Distinct parts touch distinct memory, so each may have its own.
    Streams: everything but the carrier's copies is enqueued on the current one of that device. A copy between
        two devices is ordered by torch with the current streams of both, so a caller with `far` sources or
        targets makes both current.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        sources: Sequence[Sequence[Tensor]],
        targets: Sequence[Sequence[Tensor]],
        *,
        site: Site | None = None,
        part: Part | None = None,
        outer: OuterMomentum | None = None,
    ) -> None:
        site, part = site or Site(), part or Part()
        kernels = site.kernels
        self._members = len(sources)
        self._device = site.device or (flats[0].memory.device if flats else torch.device("cpu"))
        self._far = frozenset(site.far)
        self._squares = torch.zeros(self._members + 1, dtype=torch.float64, device=self._device)
        self._cells = self._squares.unbind()
        self._scratch: dict[tuple[torch.dtype, object, int], Tensor] = {}
        self._kernels = kernels
        self._carrier = site.carrier
        self._blocks: list[_Block] = []
        rows = 0
        for index, flat in enumerate(flats):
            ours = [memories[index] for memories in sources]
            theirs = [] if targets is sources else [memories[index] for memories in targets]
            places = range(len(ours)) if targets is sources else range(len(ours), len(ours) + len(theirs))
            sent = {at for at, target in enumerate(theirs, len(ours)) if target.device != self._device}
            sent |= self._far.intersection(places)
            state = () if outer is None else outer.state(index)
            is_fused = kernels is not None and not state and kernels.take([*ours, *theirs])
            for kind, start, stop in _kinds(flat):
                first, last = _bounds(start, stop, part)
                to = places
                if part.is_span and flat.spans > 1 and start < flat.split:
                    span = flat.span(part.index)
                    first, last, to = span.start, span.stop, places[:1]
                is_in_one = is_fused and kind in ("parameters", "unmeasured")
                moved = state if kind == "parameters" else ()
                for tensors in _cut([*ours, *theirs, *moved], first, last, self._size(is_in_one)):
                    block = _Block(
                        kind,
                        tensors[: len(ours)],
                        [tensors[at] for at in to if at not in sent],
                        [tensors[at] for at in to if at in sent],
                        outer.move(*tensors[-2:]) if outer is not None and moved else None,
                    )
                    if is_in_one and kernels is not None:
                        block.rows = slice(rows, rows + kernels.blocks(last - first))
                        rows = block.rows.stop
                    self._blocks.append(block)
        self._rows = torch.zeros(rows, self._members + 1, dtype=torch.float64, device=self._device)

    def reduce(
        self, samples: Sequence[int], *, drift: bool, bad: Sequence[Tensor | None] = ()
    ) -> Tensor | None:
        """Write the mean of this part.

        Args:
            samples: Weight of each member. Shape (members,).
            drift: Whether to sum the squares.
            bad: Flag per member, on any device: its weight is 0 all the same, and it holds zeros. If all are
                bad, the mean is NaN. Empty: none is. Shape (members,).

        Returns:
            Over the measured parameters of this part: the sum of (source - mean)^2 for each member, 0 for
            one with weight 0, then the sum of mean^2. Float64, on the device, shape (members + 1,); the next
            call writes it anew. None without `drift`.

        Raises:
            ProtocolError: All weights are 0.
        """
        total = sum(samples)
        if total <= 0:
            raise ProtocolError("no member of the mean has trained a sample")
        givers = [member for member, count in enumerate(samples) if count]
        weights = [count / total for count in samples]
        flags = [None if flag is None else flag.to(self._device, non_blocking=True) for flag in bad]
        flagged = [flags[giver] for giver in givers] if flags else [None] * len(givers)
        shares = _Shares([weights[giver] for giver in givers], flagged, self._device)
        squares = None
        if drift:
            squares = self._cells
            self._squares.zero_()
        for block, sources, targets in self._brought():
            measured = squares if block.kind == "parameters" else None
            if block.rows is not None and self._kernels is not None:
                rows = None if measured is None else self._rows[block.rows]
                self._kernels.mean(sources, targets, weights, flags, rows)
                continue
            if block.kind == "buffers":
                mean = self._exact_mean(sources, givers, shares)
            elif block.kind == "counts":
                mean = self._maximum(sources, targets)
            else:
                mean = self._mean(sources, targets, givers, shares, measured)
            if block.move is not None:
                block.move(mean)
            _spread(mean, targets)
        if drift and len(self._rows):
            self._squares.add_(self._rows.sum(0))
        return self._squares if drift else None

    def _brought(self) -> Iterator[tuple[_Block, Sequence[Tensor], Sequence[Tensor]]]:
        """Each block with sources and targets on the device of the sums, which the caller then enqueues.

        The sources of the next block are under way meanwhile, and so are means of earlier ones.
        """
        carrier, blocks = self._carrier, self._blocks
        near: list[Sequence[Tensor]] = [block.sources for block in blocks]
        if self._far:
            carrier.begin()
        for at in range(-carrier.slots + 1, len(blocks)):
            coming = at + carrier.slots - 1
            if self._far and coming < len(blocks):
                slot = coming % carrier.slots
                near[coming] = [
                    self._room(source.dtype, (slot, member), source) if member in self._far else source
                    for member, source in enumerate(blocks[coming].sources)
                ]
                carrier.fetch(slot, partial(copy_all, blocks[coming].sources, near[coming]))
            if at < 0:
                continue
            block, slot = blocks[at], at % carrier.slots
            targets = block.targets or [self._room(block.sent[0].dtype, "out", block.sent[0])]
            if self._far:
                carrier.await_fetch(slot)
            yield block, near[at], targets
            if self._far or block.sent:
                carrier.send(slot, partial(_spread, targets[0], block.sent))
        if self._far:
            carrier.end()

    def _size(self, is_in_one: bool) -> int:
        """Elements of a block."""
        if is_accelerator(self._device) and (self._far or is_in_one):
            return FAR_BLOCK if self._far else sys.maxsize
        return _block_size(self._device)

    def _mean(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        givers: Sequence[int],
        shares: _Shares,
        squares: Sequence[Tensor] | None,
    ) -> Tensor:
        """The mean of parameters: in the first target, in scratch, or in a source; see `_spread`."""
        dtype = arithmetic(sources[0].dtype)
        is_narrow = not sources[0].dtype == targets[0].dtype == dtype
        if len(givers) == len(sources) == 2 and not is_narrow and not self._far:
            return self._mean_of_two(sources, targets, shares, squares)
        first, *others = givers
        # Distances need every source once more when the mean is known, so it cannot overwrite one of them.
        needed = others if squares is None else givers
        is_apart = is_narrow or any(sources[giver] is targets[0] for giver in needed)
        mean = self._room(dtype, "mean", sources[0]) if is_apart else targets[0]
        # Giver by giver, each as far towards it as its share of those so far: equal replicas stay equal to
        # the bit, which a sum of products does not promise.
        so_far = sources[first]
        share, *steps = shares.steps(dtype)
        if so_far is not mean and (is_narrow or not steps):
            so_far = mean.copy_(so_far)
        for giver, step in zip(others, steps, strict=True):
            so_far = torch.lerp(so_far, self._wide(dtype, sources[giver]), step, out=mean)
        if not steps and isinstance(share, Tensor):
            mean.mul_(share)  # NaN where the only one is left out
        if squares is not None:
            for giver in givers:
                away = self._room(dtype, "wide", sources[giver])
                squares[giver].add_(_square(torch.sub(self._wide(dtype, sources[giver]), mean, out=away)))
            squares[-1].add_(_square(mean))
        return mean

    def _mean_of_two(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        shares: _Shares,
        squares: Sequence[Tensor] | None,
    ) -> Tensor:
        """Two replicas lie on opposite sides of their mean, so the distance of one is that of both."""
        heavy, light = (0, 1) if shares.weights[0] >= shares.weights[1] else (1, 0)
        in_place = len(targets) == 2 and targets[0] is sources[0]
        mean = sources[heavy] if in_place else targets[0]
        torch.lerp(sources[heavy], sources[light], shares.of_all(mean.dtype)[light], out=mean)
        if squares is not None:
            # The lighter replica is the farther one: its distance loses the fewest digits.
            away = sources[light] if in_place else self._room(mean.dtype, "wide", mean)
            square = _square(torch.sub(sources[light], mean, out=away))
            squares[light].add_(square)
            squares[heavy].add_(square, alpha=(shares.weights[light] / shares.weights[heavy]) ** 2)
            squares[-1].add_(_square(mean))
        return mean

    def _exact_mean(self, sources: Sequence[Tensor], givers: Sequence[int], shares: _Shares) -> Tensor:
        mean = self._room(torch.float64, "mean", sources[0]).copy_(sources[givers[0]])
        others = (self._wide(torch.float64, sources[giver]) for giver in givers[1:])
        add_weighted(mean, others, shares.of_all(torch.float64))
        return mean

    def _maximum(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        is_apart = any(source is targets[0] for source in sources[1:])
        greatest = self._room(sources[0].dtype, "mean", sources[0]) if is_apart else targets[0]
        if greatest is not sources[0]:
            greatest.copy_(sources[0])
        for source in sources[1:]:
            torch.maximum(greatest, source, out=greatest)
        return greatest

    def _wide(self, dtype: torch.dtype, source: Tensor) -> Tensor:
        """A source itself, or scratch of this dtype that holds it."""
        return source if source.dtype == dtype else self._room(dtype, "wide", source).copy_(source)

    def _room(self, dtype: torch.dtype, use: object, like: Tensor) -> Tensor:
        """The scratch for a use, of this dtype, as long as a block."""
        key = dtype, use, like.numel()
        if key not in self._scratch:
            self._scratch[key] = torch.empty(like.numel(), dtype=dtype, device=self._device)
        return self._scratch[key]


def shift(flat: Flat, mean: Tensor, snapshot: Tensor) -> None:
    """Add `mean - snapshot` to the parameters of a flat, in the dtype of `arithmetic`; its buffers stay."""
    blocks = _cut((flat.memory, mean, snapshot), 0, flat.split, _block_size(flat.memory.device))
    narrow = flat.memory.dtype != mean.dtype
    room = torch.empty(2, len(blocks[0][0]) if blocks else 0, dtype=mean.dtype, device=mean.device)
    for ours, new, old in blocks:
        difference, wide = room[:, : len(ours)]
        torch.sub(new, difference.copy_(old) if narrow else old, out=difference)
        if narrow:
            ours.copy_(wide.copy_(ours).add_(difference))
        else:
            ours.add_(difference)


class _Shares:
    """The weight of each giver in a mean; they sum to 1.

    Where the device alone knows which givers are bad, they are numbers on it; nothing is copied from the
    host.

    Args:
        weights: One for each giver.
        bad: Flag of each giver; None: it is not checked.
        device: Where the mean is taken.
    """

    def __init__(self, weights: Sequence[float], bad: Sequence[Tensor | None], device: torch.device) -> None:
        self.weights = weights
        self._bad = bad
        self._device = device
        sums = accumulate(weights)
        self._here = weights, [weight / so_far for weight, so_far in zip(weights, sums, strict=True)]
        self._there: dict[torch.dtype, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}

    def of_all(self, dtype: torch.dtype) -> Sequence[float | Tensor]:
        """Share of each giver in the whole."""
        return self._in(dtype)[0]

    def steps(self, dtype: torch.dtype) -> Sequence[float | Tensor]:
        """Share of each giver in the sum up to it."""
        return self._in(dtype)[1]

    def _in(self, dtype: torch.dtype) -> tuple[Sequence[float | Tensor], Sequence[float | Tensor]]:
        if all(flag is None for flag in self._bad):
            return self._here
        if dtype not in self._there:  # where a kernel has the flags itself, it is never asked for
            self._there[dtype] = self._on_device(dtype)
        return self._there[dtype]

    def _on_device(self, dtype: torch.dtype) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        counting = torch.empty(len(self.weights), dtype=torch.float64, device=self._device)
        for cell, weight, is_bad in zip(counting.unbind(), self.weights, self._bad, strict=True):
            cell.fill_(weight)
            if is_bad is not None:
                cell.masked_fill_(is_bad, 0.0)
        so_far = counting.cumsum(0)
        steps = counting / so_far
        steps[:-1].nan_to_num_(0.0)  # no rank counts so far
        return (counting / so_far[-1]).to(dtype).unbind(), steps.to(dtype).unbind()


def _kinds(flat: Flat) -> Iterator[tuple[_Kind, int, int]]:
    """The arithmetic of each part of a flat, and where the part begins and ends."""
    yield "parameters" if flat.is_measured else "unmeasured", 0, flat.split
    yield "counts" if flat.counts else "buffers", flat.split, flat.memory.numel()


def _bounds(start: int, stop: int, part: Part) -> tuple[int, int]:
    """Begin and end of a part of a span."""
    length, after = stop - start, part.index + 1
    first, last = (length * at // part.count // LINE * LINE for at in (part.index, after))
    return start + first, stop if after == part.count else start + last


def _block_size(device: torch.device) -> int:
    return CUDA_BLOCK if is_accelerator(device) else BLOCK * torch.get_num_threads()


def _cut(tensors: Sequence[Tensor], start: int, stop: int, size: int) -> list[tuple[Tensor, ...]]:
    """The span of all tensors, block by block."""
    spans = [slice(at, min(at + size, stop)) for at in range(start, stop, size)]
    return [tuple(tensor[span] for tensor in tensors) for span in spans]


def _square(tensor: Tensor) -> Tensor:
    # A dot product on CUDA is a call of cuBLAS, which allocates at its first use.
    if is_accelerator(tensor.device):
        norm: Tensor = torch.linalg.vector_norm(tensor)
        return norm.square_()
    return torch.dot(tensor, tensor)


def _spread(mean: Tensor, targets: Sequence[Tensor]) -> None:
    for target in targets:
        if target is not mean:
            target.copy_(mean)


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source to its target, where that is another tensor; enqueued on the current streams."""
    for source, target in zip(sources, targets, strict=True):
        if target is not source:
            target.copy_(source, non_blocking=non_blocking)


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a tensor as real numbers in one dimension, detached from any graph.

    Returns:
        A view, or a copy where the tensor is not contiguous. Shape (elements,).
    """
    plain = tensor.detach()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.contiguous().view(-1)


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy the elements of a tensor's `flat_view` to the tensor, where the view is a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        real.copy_(flat.view(real.shape))


def reduce_all(tensors: Sequence[Tensor], op: Op, shares: Sequence[float] | None = None) -> None:
    """Replace each tensor by the reduction of all.

    Terms are added in the order of the tensors, float16 and bfloat16 in float32; all get the same bits.

    Args:
        tensors: Tensors of one dtype, on the device of the first or on others. Shape (elements,) each.
        op: Operation.
        shares: With "sum": factor of each tensor. A tensor with 0.0 is left out instead of multiplied, as
            0 times NaN is NaN. At least one is not 0.

    Streams: all work is enqueued on the current stream of the first tensor's device. Torch orders a copy
        between two devices with the current streams of both.
    """
    givers = [at for at in range(len(tensors)) if shares is None or shares[at]]
    first, *others = (tensors[giver].to(tensors[0].device) for giver in givers)
    is_sum = op in ("sum", "mean")
    total = first.to(arithmetic(first.dtype)) if is_sum and first.is_floating_point() else first
    if not is_sum:
        for other in others:
            (torch.maximum if op == "max" else torch.minimum)(total, other, out=total)
    elif shares is None:
        for other in others:
            total.add_(other)
    else:
        add_weighted(total, others, [shares[giver] for giver in givers])
    if op == "mean":
        total.div_(len(tensors))
    for tensor in tensors:
        if tensor is not total:
            tensor.copy_(total)


def split_equally(flats: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Split tensors of one shape at the same places into pieces for threads, or kernels, that share the work.

    Returns:
        For each piece its views of all tensors. On the CPU the pieces of two ranks stay in the cache, and
        handing one to a thread does not take longer than to reduce it.
    """
    size = CUDA_BLOCK if is_accelerator(flats[0].device) else 2 * BLOCK * torch.get_num_threads()
    return list(zip(*(flat.split(size) for flat in flats), strict=True))
