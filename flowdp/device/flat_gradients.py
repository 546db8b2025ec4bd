"""The gradients of a replica as flat memory, for one rank alone and for ranks that average them.

The memory is laid out as the replica's own: a gradient lies where its parameter lies there. Every parameter's
`grad` is a view of it for good. So backward adds up where the optimizer reads, nothing is allocated, zeroing
is one call for each dtype, and clipping is one norm and one product.

A view that is made with `.data` counts its changes by itself: torch raises its version with every backward
that adds to it. That tells, without a hook and without asking the device, whether a parameter had a part in
the loss. So a parameter that had none has no gradient at the step, as in plain torch. Code that writes
gradients past torch says so with `torch.autograd.graph.increment_version`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import add, attrgetter, is_, ne, sub

import torch
from torch import Tensor, nn

from flowdp.device.copies import ALIGNMENT
from flowdp.device.flat_parameters import Flat, FlatReplica, FlatTensors

__all__ = ["FlatGradients", "SharedGradients"]

BLOCK = 1 << 20
"""Elements of a block of a norm: so many are cast at a time, and so many rounding errors add up."""

_grad = attrgetter("grad")
_version = attrgetter("_version")


class FlatGradients:
    """One rank's gradients as flat memory, in which the parameters of a replica get their `grad`.

    Attributes:
        parameters: Parameters of the replica, as `FlatReplica.parameters` has them.
        views: The place of each of their gradients, which a graph may write to: see `forget`, `wrote`.
        homes: The memory of each of the replica's flats, parameters at least. Shape (elements,) each.
        is_void: Whether they were forgotten.
        thawable: See `FlatReplica`: each has a gradient of its own beside them, once it is trained.

    Threads:
        The owner of the replica.
    """

    def __init__(self, replica: FlatReplica) -> None:
        self.homes = [self._open(flat) for flat in replica.flats]
        self._parts = [
            home[: flat.split] for flat, home in zip(replica.flats, self.homes, strict=True) if flat.split
        ]
        self._stepped = self._parts  # of them, what the optimizer steps
        self.thawable = replica.thawable
        by_dtype = {home.dtype: home for home in self.homes}
        self.parameters: list[nn.Parameter] = []
        self.views: list[Tensor] = []
        self._versions: list[int] = []
        self.is_void = False
        for parameter, view in replica.parameters():
            self.parameters.append(parameter)
            self.views.append(_twin(view, by_dtype))
        self.clear()

    def forget(self) -> None:
        """Begin another sum: what is there means nothing, and is not read; `begin` or `wrote` follow.

        So nothing is enqueued where a graph writes all of it in the next step. That puts every gradient in
        its place, too.
        """
        self.is_void = True
        self._versions = list(map(_version, self.views))

    def begin(self) -> None:
        """Let backward add to zeros, in a step that none has begun."""
        if self.is_void:
            self.clear()

    def wrote(self, views: Sequence[Tensor]) -> None:
        """Note that a graph has written to these of the `views`; where all were void, to all."""
        self.is_void = False
        # By the versions it is told which parameters a step has touched.
        torch.autograd.graph.increment_version(views)

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Context whose writes touch nothing, for work that is undone behind it, or only recorded."""
        before, is_void = list(map(_version, self.views)), self.is_void
        try:
            yield
        finally:
            now = map(_version, self.views)
            self._versions = list(map(add, self._versions, map(sub, now, before)))
            self.is_void = is_void

    @property
    def is_touched(self) -> bool:
        """Whether any backward has added to a gradient since the last `clear`."""
        return any(
            parameter.grad is not own or own._version != version
            for parameter, own, version in zip(self.parameters, self.views, self._versions, strict=True)
        )

    def collect(self) -> list[bool]:
        """Bring in gradients that were put in the place of the views; tell which parameters were touched.

        A gradient that was set to None counts as zero, and as not touched.
        """
        if self.is_void:
            self.clear()
        own = self.views
        touched = list(map(ne, map(_version, own), self._versions))
        if not all(map(is_, map(_grad, self.parameters), own)):
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is not own[index]:
                    touched[index] = _replace(own[index], parameter.grad)
                    parameter.grad = own[index]
        return touched

    def show(self, touched: Sequence[bool]) -> None:
        """Let the parameters that were not touched have no gradient, until the next `clear`."""
        for parameter, own, is_there in zip(self.parameters, self.views, touched, strict=True):
            parameter.grad = own if is_there else None

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients."""
        for part in (*self._stepped, *self.thawed()):
            part.mul_(factor)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to this 2-norm where theirs is larger; returns theirs. Shape [].

        Streams:
            On the current one; nothing is read back.
        """
        norm = self.norm()
        self.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def clamp(self, max_value: float) -> None:
        """Clip each gradient to at most this absolute value; of complex ones real and imaginary part."""
        for part in (*self._stepped, *self.thawed()):
            part.clamp_(-max_value, max_value)

    def norm(self) -> Tensor:
        """The 2-norm of all gradients. Float64, shape []."""
        blocks = [
            torch.linalg.vector_norm(block, dtype=self._sums_in(part.dtype)).double()
            for part in (*self._stepped, *self.thawed())
            for block in part.split(BLOCK)
        ]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(blocks))
        return norm

    def thawed(self) -> list[Tensor]:
        """Gradients of parameters that were frozen at first, of complex ones real and imaginary part."""
        own = [one.grad for one in self.thawable if one.grad is not None]
        return [torch.view_as_real(one) if one.is_complex() else one for one in own]

    def clear(self) -> None:
        """Begin another sum: all gradients are zero, and every parameter has its own again."""
        for part in self._parts:
            part.zero_()
        self.is_void = False
        self._take_places()

    def _take_places(self) -> None:
        if not all(map(is_, map(_grad, self.parameters), self.views)):
            for parameter, own in zip(self.parameters, self.views, strict=True):
                parameter.grad = own
        for parameter in self.thawable:
            parameter.grad = None
        self._versions = list(map(_version, self.views))

    def _sums_in(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a norm adds up."""
        return dtype if dtype == torch.float64 else torch.float32

    def _open(self, flat: Flat) -> Tensor:
        return torch.zeros(flat.split, dtype=flat.memory.dtype, device=flat.memory.device)


class SharedGradients(FlatGradients, FlatTensors):
    """One rank's gradients and buffers, and the weight of its losses, as the flat memory that ranks average.

    The buffers follow the gradients, as copies. A parameter that no backward has touched has no gradient at
    the step. The ranks say at the gate which ones theirs touched. Where these differ, it depends on the ranks
    that count, which the device alone may know: behind the weight there is a number for each parameter, whose
    mean is not zero where a rank that counts has touched it.

    Attributes:
        rank: Rank of the replica.
        flats: As the replica's, gradients in place of parameters; and one for the weight.
        weight: Weight of the losses, per sample. Float64, shape [].
        touched: A byte each: whether losses name a weight, then whether each parameter is touched. `gather`
            sets it.
        square: The square of the norm of the rank's span, by `measure`. Float64, shape [].
        sum_of_squares: Those of all ranks together, where each has a span; None: this one has all.

    Threads:
        The owner of the replica.
    """

    square: Tensor
    sum_of_squares: Tensor | None = None

    def __init__(self, replica: FlatReplica) -> None:
        self.rank = replica.rank
        self._replica = replica
        device = replica.flats[0].memory.device
        self.touched = bytes(1 + len(list(replica.parameters())))
        size = ALIGNMENT // torch.float64.itemsize + len(self.touched)
        extra = torch.zeros(size, dtype=torch.float64, device=device)
        self.weight, self._numbers = extra[0], extra[1 : 1 + len(self.touched)]
        self._extra, self._cleared = extra, torch.zeros_like(extra)
        self.is_weighted = False
        super().__init__(replica)
        twins = [Flat(home, flat.split) for flat, home in zip(replica.flats, self.homes, strict=True)]
        self.flats = (*twins, Flat(extra, len(extra)))

    def trained(self) -> list[Tensor]:
        """The gradients; see `FlatTensors.trained`."""
        return self._parts

    def cut(self) -> None:
        """Cut them into the spans of the replica, each of which one rank alone has to have the mean of."""
        *twins, extra = self.flats
        pairs = zip(twins, self._replica.flats, strict=True)
        self.flats = (*(replace(twin, spans=flat.spans) for twin, flat in pairs), extra)

    def own_span(self) -> None:
        """Clip and scale the rank's own span alone: elsewhere is no mean."""
        self._stepped = [flat.memory[flat.span(self.rank)] for flat in self.flats[:-1] if flat.split]
        self.square = self.sum_of_squares = torch.zeros_like(self.weight)

    def measure(self) -> None:
        """Take the square of the norm of the rank's own span."""
        torch.square(super().norm(), out=self.square)

    def norm(self) -> Tensor:
        """See `FlatGradients.norm`."""
        return super().norm() if self.sum_of_squares is None else self.sum_of_squares.sqrt()

    def gather(self) -> None:
        """Copy in buffers, and gradients outside of flat memory; mark touched parameters. See `collect`."""
        self._tell(bytes((self.is_weighted, *self.collect())))
        self._replica.gather()
        for theirs, mine in self._buffers():
            mine.copy_(theirs)

    def scatter(self) -> None:
        """Bring the mean of the buffers to the module."""
        for theirs, mine in self._buffers():
            theirs.copy_(mine)
        self._replica.scatter()

    def settle(self, touched: bytes | None) -> list[bool]:
        """Divide the mean by the weight, as one device would; returns which parameters any rank touched.

        Args:
            touched: As for `look`.

        Streams:
            As `look`.
        """
        of_any, is_weighted = self.look(touched)
        self.divide(is_weighted=is_weighted)
        return of_any

    def look(self, touched: bytes | None) -> tuple[list[bool], bool]:
        """Parameters that any rank has touched, and whether a loss has named a weight: for all ranks alike.

        Args:
            touched: The `touched` of all ranks with samples; None: they are not alike.

        Streams:
            On the current one. The host waits for it where they are not.
        """
        is_weighted, *of_any = map(bool, self._numbers.tolist() if touched is None else touched)
        return of_any, is_weighted

    def _take_places(self) -> None:
        super()._take_places()
        self._extra.copy_(self._cleared)
        self.is_weighted = False

    def divide(self, *, is_weighted: bool) -> None:
        """Divide the gradients that this rank steps by the weight, where a loss has named one."""
        if is_weighted:
            weight = torch.where(self.weight == 0, 1.0, self.weight)  # a mean over nothing has no gradient
            for part in self._stepped:
                part.div_(weight)

    def _tell(self, touched: bytes) -> None:
        """Say which ones are touched, on the device until others are: most windows touch the same ones."""
        if touched != self.touched:
            for at, (before, now) in enumerate(zip(self.touched, touched, strict=True)):
                if before != now:  # by an operation each: a copy from the host would wait for the device
                    self._cleared[1 + at].fill_(now)
            self._numbers.copy_(self._cleared[1 : 1 + len(touched)])
            self.touched = touched

    def _sums_in(self, _dtype: torch.dtype) -> torch.dtype:  # for all alike
        # So that it is the same on cards that add in another order.
        return torch.float64

    def _open(self, flat: Flat) -> Tensor:
        return torch.zeros_like(flat.memory)

    def _buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The buffers of the replica and their copies here."""
        for theirs, mine in zip(self._replica.flats, self.homes, strict=True):
            if theirs.split < theirs.memory.numel():
                yield theirs.memory[theirs.split :], mine[theirs.split :]


def _replace(own: Tensor, gradient: Tensor | None) -> bool:
    """Copy a gradient into its place, zeros for None; returns whether there is one."""
    if gradient is None:
        own.zero_()
    else:
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        own.copy_(dense.detach())
    return gradient is not None


def _twin(view: Tensor, homes: dict[torch.dtype, Tensor]) -> Tensor:
    """The same place in the gradients' memory, with a version of its own."""
    real = view.dtype.to_real() if view.dtype.is_complex else view.dtype
    home = homes[real].view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
    own: Tensor = home.data
    return own
