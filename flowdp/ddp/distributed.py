"""Wrapper for the module of one rank, whose gradients are averaged in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import SharedStatistics
from flowdp.collective.process_group import ProcessGroup
from flowdp.ddp.buckets import BUCKET_BYTES, broadcast_all
from flowdp.ddp.synchronizer import GradientSynchronizer, Strategy
from flowdp.device.structure import check_same, check_separate_memory, structure
from flowdp.modules.stand_in import StandInModule

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(StandInModule):
    """Wraps the module of one rank. Every rank of the group makes one, with a replica of the same module.

    ::

        model = flowdp.DistributedDataParallel(make().to(group.device), group)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in my_part_of_the_data:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()       # gradients are the means over the ranks
            optimizer.step()                      # so parameters stay equal

    `state_dict` and the like have the module's own names. All ranks start from rank 0's values and run the
    same number of forward and backward passes. A parameter may be unused, on one rank or on all, but each
    backward pass must reach at least one parameter: without any, the rank does not take part in the average,
    and the other ranks wait for it.

    Args:
        module: Replica of this rank, on the group's device.
        group: Process group of this rank, from `flowdp.local_groups`, `ProcessGroup.from_torch` or
            `ProcessGroup.single`.
        strategy: "overlapped" averages during backward, "synchronous" at its end; with "none" you call
            `sync_gradients()` after it.
        bucket_bytes: Bytes of gradients that one call averages.
        broadcast_buffers: Copy rank 0's buffers to all ranks before a forward in training mode with
            gradients.
        gradient_as_bucket_view: Make `.grad` a view of its bucket; see `GradientSynchronizer`.

    Attributes:
        process_group: The group given.

    Raises:
        OptionError: The replicas differ in structure or share memory; every rank raises it and names the
            tensor.
        CollectiveError: Another rank failed, or made no such call within the timeout.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        *,
        strategy: Strategy = "overlapped",
        bucket_bytes: int = BUCKET_BYTES,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__(module)
        self.process_group = group
        self._broadcast_buffers = broadcast_buffers
        self._bucket_bytes = bucket_bytes
        self._is_syncing = True  # outside of `no_sync`
        self._is_due = True  # the next forward takes rank 0's buffers: the gradients of the last are averaged
        self.sync_parameters()
        self._norms, self._norm_group = self._open_norms()
        self._synchronizer = GradientSynchronizer(
            module.named_parameters(),
            group,
            strategy=strategy,
            bucket_bytes=bucket_bytes,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        self._seal()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, in training after a copy of rank 0's buffers."""
        if self.module.training and torch.is_grad_enabled():
            if self._broadcast_buffers and self._is_due:
                broadcast_all(self.process_group, list(self.module.buffers()), 0, self._bucket_bytes)
            self._is_due = self._is_syncing
        with self._norms.among(self._norm_group, keeps=True):
            return self.module(*args, **kwargs)

    def _open_norms(self) -> tuple[SharedStatistics, ProcessGroup | None]:
        """The SyncBatchNorm layers and a group for them: gradients are averaged during their backward."""
        group = self.process_group
        if group.backend != "local":  # torch synchronises its own layers over its processes
            return SharedStatistics(nn.Identity()), None
        norms = SharedStatistics(self.module)
        return norms, group.twin() if norms and group.size > 1 else None

    def sync_parameters(self) -> None:
        """Copy rank 0's parameters and buffers to all ranks. Every rank calls it.

        Raises:
            OptionError: As in the constructor.
        """
        group = self.process_group
        check_same(group.all_gather_object(structure(self.module)))
        if group.backend == "local":
            check_separate_memory(group.all_gather_object(self.module))
        tensors: list[Tensor] = [*self.module.parameters(), *self.module.buffers()]
        broadcast_all(self.process_group, tensors, 0, self._bucket_bytes)

    def sync_gradients(self) -> None:
        """Average the present gradients. Every rank calls it.

        It is needed only with `strategy="none"`, or after a backward pass in `no_sync()`.
        """
        with torch.no_grad():
            self._synchronizer.sync_all()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or saved: the wrapper belongs to its rank."""
        raise TypeError("a DistributedDataParallel cannot be copied or saved; copy or save its .module")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on the rank: backward passes in this context average nothing.

        The next backward pass outside averages the sum. Buffers are copied once for all forward passes whose
        gradients are averaged together, before the first of them.
        """
        synchronizer = self._synchronizer
        before = synchronizer.automatic, self._is_syncing
        synchronizer.automatic = self._is_syncing = False
        try:
            yield
        finally:
            synchronizer.automatic, self._is_syncing = before
