"""One rank of data-parallel training: a module whose gradients are averaged as backward ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import SharedStatistics
from flowdp.collective.process_group import ProcessGroup
from flowdp.ddp.buckets import BUCKET_BYTES, broadcast_all
from flowdp.ddp.structure import check_alike, check_apart
from flowdp.ddp.synchronizer import GradientSynchronizer, Strategy
from flowdp.device.structure import structure
from flowdp.errors import OptionError
from flowdp.modules.stand_in import AliasModule

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(AliasModule):
    """Wraps one rank's module; every rank of the group makes one, with the same module.

    ::

        model = flowdp.DistributedDataParallel(make().to(group.device), group)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in my_part_of_the_data:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()       # gradients are the means over the ranks
            optimizer.step()                      # so parameters stay equal

    `state_dict` and the like have the module's own names. All ranks start from rank 0's values, and run the
    same number of forward and backward passes. A parameter may be unused, on one rank or on all, but not all
    parameters on a rank: a backward pass that reaches none is not heard of by the others, who wait for it.

    Args:
        module: On the group's device.
        group: This rank's: of `flowdp.local_groups`, `ProcessGroup.from_torch` or `ProcessGroup.single`.
        strategy: "overlapped" averages while backward goes on, "synchronous" at its end; with "none" you call
            `sync_gradients()` after it.
        bucket_bytes: Gradients that are averaged by one call.
        broadcast_buffers: Take rank 0's buffers before a forward in training mode with gradients.
        gradient_as_bucket_view: Let `.grad` be a view of its bucket; see `GradientSynchronizer`.

    Attributes:
        process_group: As given.

    Raises:
        OptionError: The replicas differ in structure, share memory, or lie elsewhere than the group. Every
            rank hears where.
        CollectiveError: Another rank failed, or did not come.
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
        self._is_syncing = True  # not in `no_sync`
        self._is_due = True  # the last forward was averaged: the next takes rank 0's buffers
        is_automatic = strategy != "none"
        self.sync_parameters()
        self._norms, self._norm_group = self._open_norms()
        self._synchronizer = GradientSynchronizer(
            module.named_parameters(),
            group,
            strategy=strategy if is_automatic else "synchronous",
            bucket_bytes=bucket_bytes,
            gradient_as_bucket_view=gradient_as_bucket_view,
            automatic=is_automatic,
        )
        self._seal(type(self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, with rank 0's buffers in training."""
        if self.module.training and torch.is_grad_enabled():
            if self._broadcast_buffers and self._is_due:
                broadcast_all(self.process_group, list(self.module.buffers()), 0, self._bucket_bytes)
            self._is_due = self._is_syncing
        with self._norms.among(self._norm_group, keeps=True):
            return self.module(*args, **kwargs)

    def _open_norms(self) -> tuple[SharedStatistics, ProcessGroup | None]:
        """The layers of SyncBatchNorm, and the group for their statistics: backward averages meanwhile."""
        group = self.process_group
        if group.backend != "local":  # torch synchronises its own layers over its processes
            return SharedStatistics(nn.Identity()), None
        norms = SharedStatistics(self.module)
        counts = group.all_gather_object(len(norms))
        if len(set(counts)) > 1:
            raise OptionError(f"the ranks have {counts} SyncBatchNorm layers: convert all models, or none")
        return norms, group.twin() if norms and group.size > 1 else None

    def sync_parameters(self) -> None:
        """Take rank 0's parameters and buffers. Every rank calls it.

        Raises:
            OptionError: As when made.
        """
        group = self.process_group
        structures = group.all_gather_object(_structure(self.module, group.device))
        for rank, found in enumerate(structures):
            if isinstance(found, str):
                raise OptionError(f"on rank {rank}, {found}")
        check_alike(structures)
        if group.backend == "local":
            check_apart(group.all_gather_object(self.module))
        tensors: list[Tensor] = [*self.module.parameters(), *self.module.buffers()]
        broadcast_all(self.process_group, tensors, 0, self._bucket_bytes)

    def sync_gradients(self) -> None:
        """Average the gradients as they are now. Every rank calls it.

        Backward does it by itself unless `strategy` is "none" or it ran in `no_sync()`.
        """
        with torch.no_grad():
            self._synchronizer.sync_all()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """It belongs to its rank and is not copied, nor saved: its module is."""
        raise TypeError("a DistributedDataParallel cannot be copied or saved; copy or save its .module")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients as they are: backward passes in here add up on the rank.

        The next one outside averages the sum. Buffers are sent once for all forwards that belong to one
        average, before the first of them.
        """
        synchronizer = self._synchronizer
        before = synchronizer.automatic, self._is_syncing
        synchronizer.automatic = self._is_syncing = False
        try:
            yield
        finally:
            synchronizer.automatic, self._is_syncing = before


def _structure(module: nn.Module, device: torch.device) -> dict[str, str] | str:
    """What the ranks compare; or what is wrong, for all of them to hear: else the others would wait."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        is_there = tensor.device.type == device.type
        if device.type == "cuda" and device.index is not None:
            is_there = tensor.device == device
        if not is_there:
            return f"{name!r} lies on {tensor.device} and the group on {device}; move the module first"
    try:
        return structure(module)
    except OptionError as error:
        return str(error)
