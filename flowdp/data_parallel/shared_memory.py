"""Replicas on the CPU that use the memory of the user's parameters.

Every write to the user's parameters, of any kind, is then a write to the replica's, and nothing is sent. A
parameter to which the module itself writes in its forward cannot be shared, for all ranks would write to it
at once. So a replica begins with memory of its own; behind its first call in training mode each parameter
that the forward has left alone moves to the user's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor, nn

from flowdp.data_parallel.module_tensors import ModuleTensors
from flowdp.errors import FlowdpError

__all__ = ["SharedMemory"]


class SharedMemory:
    """The parameters that a replica has in common with the user's module.

    A replica's parameter keeps a version counter of its own. It is raised with the user's, so that torch
    finds a write between forward and backward in the graphs of all ranks, as in one.

    Threads: the rank's in `begin` and `count_writes`, the user's otherwise; never both at once.
    """

    def __init__(self, mine: ModuleTensors, users: ModuleTensors) -> None:
        self._mine = mine
        self._users = users
        self._is_decided = False
        self._before: list[Tensor] = []  # the replica's values before the forward that decides
        self._shared = [False] * len(users.parameters)
        self._versions: list[float] = _versions(users.parameters)
        self._own_versions: list[float] = []

    def has(self, index: int) -> bool:
        """Whether a tensor of the tables is shared."""
        return index < len(self._shared) and self._shared[index]

    def attach(self, index: int) -> None:
        """Move to the memory that the user's parameter has now."""
        mine, users = self._mine.parameters[index], self._users.parameters[index]
        if _can_share(mine, users):
            mine.data = users.data
        else:
            mine.data = torch.empty_like(users)
            self._shared[index] = False

    def begin(self, versions: Sequence[float], *, is_training: bool) -> None:
        """Begin a forward, when the replica has been sent everything.

        Args:
            versions: Versions of the user's parameters, before any rank's forward.
            is_training: Whether the forward may decide which memory is shared.
        """
        mine = self._mine.parameters
        if not self._is_decided:
            self._before = [tensor.detach().clone() for tensor in mine] if is_training else []
        self.count_writes(versions)
        self._own_versions = _versions(mine)

    def decide(self) -> None:
        """Decide after a forward which memory is shared, or check that the forward has not written to it.

        Raises:
            FlowdpError: It has; or its writes depend on its part of the batch.
        """
        mine, users = self._mine.parameters, self._users.parameters
        own_now, users_now = _versions(mine), _versions(users)
        is_kept = own_now == self._own_versions and users_now == self._versions
        if is_kept and not self._before and all(self._shared):
            return
        for index, (own, other) in enumerate(zip(mine, users, strict=True)):
            is_kept = (
                own_now[index] == self._own_versions[index] and users_now[index] == self._versions[index]
            )
            if self._shared[index]:
                if not is_kept:
                    raise FlowdpError(
                        f"the module's forward wrote to its parameter {self._mine.names[index]!r}, which all "
                        "CPU devices share: write to it in the loop, or keep the value in a buffer"
                    )
            elif self._before and is_kept and _can_share(own, other) and _is_still(own, self._before[index]):
                if torch.equal(own.detach(), other.detach()):
                    own.data = other.data
                    self._shared[index] = True
            elif not is_kept and not _is_close(own, other):
                raise FlowdpError(
                    f"the module's forward writes to its parameter {self._mine.names[index]!r} by its part "
                    "of the batch (as nn.Embedding with max_norm does), so the devices have different "
                    "values: write to it in the loop"
                )
        if self._before:
            self._before, self._is_decided = [], True

    def count_writes(self, versions: Sequence[float] | None = None) -> None:
        """Raise the versions of the parameters that the user has written to since the last time.

        Args:
            versions: Versions of the user's parameters; None: the present ones.
        """
        now = list(_versions(self._users.parameters) if versions is None else versions)
        if now == self._versions:
            return
        written = [
            tensor
            for tensor, new, old, is_shared in zip(
                self._mine.parameters, now, self._versions, self._shared, strict=True
            )
            if is_shared and new != old
        ]
        torch.autograd.graph.increment_version(written)
        self._versions = now


def _versions(tensors: Sequence[Tensor]) -> list[float]:
    return [nan if tensor.is_inference() else tensor._version for tensor in tensors]


def _can_share(mine: Tensor, users: Tensor) -> bool:
    return all(
        type(tensor) is nn.Parameter and tensor.layout is torch.strided and not tensor.is_inference()
        for tensor in (mine, users)
    )


def _is_still(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor has the same bits: no counter shows a write by way of `parameter.data`."""
    return torch.equal(tensor.detach(), before)


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two ranks have written the same, to rounding: they may have other numbers of threads."""
    if one.layout is not torch.strided:
        return True
    return torch.allclose(one.detach(), other.detach(), rtol=1e-3, atol=1e-5, equal_nan=True)
