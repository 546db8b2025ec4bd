"""The gradients of a replica as flat memory: what ranks average that take one optimizer step together.

The memory is laid out as the replica's own: a gradient lies where its parameter lies there, and the buffers
follow, as copies. Every parameter's `grad` is a view of it for good. So backward adds up where the mean is
taken, nothing is allocated, and clipping is one norm and one product.

A view that is made with `.data` counts its changes by itself: torch raises its version with every backward
that adds to it. That tells, without a hook and without asking the device, whether a parameter had a part in
the loss. The ranks tell each other on the host, before they meet. So a parameter that none of them touched
has no gradient at the step, as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from flowdp.device.tensors import ALIGNMENT, Flat, FlatReplica, FlatTensors
from flowdp.errors import OptionError

__all__ = ["FlatGradients", "Touched"]

BLOCK = 1 << 20
"""Elements that are cast to float64 at a time for a norm."""


class Touched:
    """What each rank's backward has touched in a round, for all others to read behind the gate.

    Two rounds are kept: a rank may write the next one's while a slower one still reads this one's, and comes
    to the one after only when all have left this one.

    Args:
        world_size: Ranks.

    Attributes:
        world_size: Ranks.

    Threads:
        `put`: each rank's own, once a round, before the gate. `union`, `any_weighted`: any, behind it.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._rows: list[list[tuple[Sequence[bool], bool]]] = [[((), False)] * world_size for _ in range(2)]

    def put(self, rank: int, turn: int, touched: Sequence[bool], is_weighted: bool) -> None:
        """Say which parameters this rank has touched, and whether its losses named a weight."""
        self._rows[turn % 2][rank] = touched, is_weighted

    def union(self, turn: int, members: Sequence[int]) -> list[bool]:
        """Which parameters any of the members has touched."""
        rows = [self._rows[turn % 2][member][0] for member in members]
        return [any(column) for column in zip(*rows, strict=True)]

    def any_weighted(self, turn: int, members: Sequence[int]) -> bool:
        """Whether the losses of any of the members named a weight."""
        return any(self._rows[turn % 2][member][1] for member in members)


class FlatGradients(FlatTensors):
    """One rank's gradients and buffers, and the weight of its losses, as flat memory.

    Args:
        replica: Whose; its parameters get their `grad` here.
        module: The replica's.
        touched: What all ranks tell each other.

    Attributes:
        rank: The replica's.
        flats: As the replica's, gradients in place of parameters; and one for the weight.
        weight: Of the losses, per sample. Float64, shape [].

    Raises:
        OptionError: Two parameters of the module are two objects over one memory.

    Threads:
        The owner of the replica.
    """

    def __init__(self, replica: FlatReplica, module: nn.Module, touched: Touched) -> None:
        self.rank = replica.rank
        self._replica = replica
        self._touched = touched
        self._turn = 0
        self._specs = replica._specs
        device = replica.flats[0].memory.device
        extra = torch.zeros(ALIGNMENT // torch.float64.itemsize, dtype=torch.float64, device=device)
        self.weight = extra[0]
        twins = [Flat(torch.zeros_like(flat.memory), flat.split) for flat in replica.flats]
        self.flats = (*twins, Flat(extra, len(extra)))
        self._parts = [twin.memory[: twin.split] for twin in twins if twin.split]
        homes = {flat.memory.dtype: twin.memory for flat, twin in zip(replica.flats, twins, strict=True)}
        self._parameters: list[nn.Parameter] = []
        self._gradients: list[Tensor] = []
        for parameter, view in replica.parameters():
            self._parameters.append(parameter)
            self._gradients.append(_twin(view, homes))
        _check_all_there(module, self._parameters, self.rank)
        self.is_weighted = False
        self.clear()

    @property
    def is_touched(self) -> bool:
        """Whether any backward has added to a gradient since the last `clear`."""
        return any(
            parameter.grad is not own or own._version != version
            for parameter, own, version in zip(self._parameters, self._gradients, self._versions, strict=True)
        )

    def trained(self) -> list[Tensor]:
        """The gradients; see `FlatTensors.trained`."""
        return self._parts

    def gather(self) -> None:
        """Bring in the buffers, and what somebody put in the place of a gradient; tell what was touched.

        A gradient that was set to None counts as zero, and as not touched.
        """
        touched: list[bool] = []
        for parameter, own, version in zip(self._parameters, self._gradients, self._versions, strict=True):
            gradient = parameter.grad
            if gradient is own:
                touched.append(own._version != version)
                continue
            touched.append(gradient is not None)
            if gradient is None:
                own.zero_()
            else:
                own.copy_(gradient)
            parameter.grad = own
        self._turn += 1
        self._touched.put(self.rank, self._turn, touched, self.is_weighted)
        self._replica.gather()
        for theirs, mine in self._buffers():
            mine.copy_(theirs)

    def scatter(self) -> None:
        """Bring the mean of the buffers to the module."""
        for theirs, mine in self._buffers():
            theirs.copy_(mine)
        self._replica.scatter()

    def settle(self, members: Sequence[int]) -> None:
        """Make of the mean what one device would have: divided by the weight, None where nobody was.

        Args:
            members: Of the round.
        """
        present = self._touched.union(self._turn, members)
        for parameter, own, is_there in zip(self._parameters, self._gradients, present, strict=True):
            parameter.grad = own if is_there else None
        if self._touched.any_weighted(self._turn, members):
            for part in self._parts:
                part.div_(self.weight)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to this 2-norm where theirs is larger; returns theirs. Shape [].

        Streams:
            On the current one; nothing is read back.
        """
        norm = self.norm()
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for part in self._parts:
            part.mul_(coefficient)
        return norm

    def norm(self) -> Tensor:
        """The 2-norm of all gradients, in float64, so that it is the same on cards that add in another order.

        Shape [].
        """
        blocks = [
            torch.linalg.vector_norm(block, dtype=torch.float64)
            for part in self._parts
            for block in part.split(BLOCK)
        ]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(blocks))
        return norm

    def clear(self) -> None:
        """Begin another sum: all gradients are zero, and every parameter has its own again."""
        for part in self._parts:
            part.zero_()
        self.weight.zero_()
        self.is_weighted = False
        for parameter, own in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = own
        self._versions = [own._version for own in self._gradients]

    def _buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The buffers of the replica and their copies here."""
        for theirs, mine in zip(self._replica.flats, self.flats, strict=False):
            if theirs.split < theirs.memory.numel():
                yield theirs.memory[theirs.split :], mine.memory[theirs.split :]


def _twin(view: Tensor, homes: dict[torch.dtype, Tensor]) -> Tensor:
    """The same place in the gradients' memory, with a version of its own."""
    real = view.dtype.to_real() if view.dtype.is_complex else view.dtype
    home = homes[real].view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
    own: Tensor = home.data
    return own


def _check_all_there(module: nn.Module, flat: Sequence[nn.Parameter], rank: int) -> None:
    own = {id(parameter) for parameter in flat}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in own:
            raise OptionError(
                f"policy='exact': parameter {name!r} on rank {rank} is a second object over the memory of "
                "another one, and cannot have a gradient of its own; tie them by one nn.Parameter"
            )
