"""Shares of the devices in a loop that the user owns: of single batches, and of El Che's windows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from flowdp.collective.batch_norm import min_part_size, plain_layers
from flowdp.data_parallel.replicas import Replicas
from flowdp.options import CadenceOptions
from flowdp.policy.cadence import Cadence
from flowdp.policy.shares import ThroughputBalance, shard_sizes, weights_from

__all__ = ["Balancer"]

log = logging.getLogger("flowdp")


class Balancer:
    """Shares by measured speed, from step to step.

    Args:
        module: The user's.
        replicas: The ranks; their stopwatches are read. None: there is one device.
        options: Options of the windows, and the speed hint.
        windows: Whether there are windows; else every batch is cut.
        ratios: Fixed shares, summing to 1; None: by measured speed. Shape (world_size,).

    Attributes:
        cadence: Cadence of the windows; None without.
        shard_sizes: Samples per rank in the last call or window. Shape (world_size,).

    Threads: the user's.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: Replicas | None,
        options: CadenceOptions,
        *,
        windows: bool,
        ratios: tuple[float, ...] | None = None,
    ) -> None:
        world_size = 1 if replicas is None else len(replicas.modules)
        self._balance = ThroughputBalance(weights_from([0.0] * world_size, options.speed_hint))
        self._ratios = ratios
        self.cadence = Cadence(world_size, options) if windows else None
        self.shard_sizes: tuple[int, ...] = (0,) * world_size
        self._norms = plain_layers(module)
        self._has_told = False
        self._watches = () if replicas is None else (*replicas.watches, replicas.summing)
        self._samples = [0] * world_size  # since the last step
        self._batches = [0] * world_size
        self._pending: list[tuple[list[int], list[int]]] = []

    @property
    def ratios(self) -> tuple[float, ...]:
        """Fraction of a batch per rank. Shape (world_size,)."""
        return self._balance.ratios if self._ratios is None else self._ratios

    @property
    def throughput(self) -> tuple[float, ...]:
        """Samples per millisecond of each rank, smoothed. Shape (world_size,)."""
        return self._balance.throughput

    def cut(self, samples: int) -> tuple[int, ...]:
        """Samples per rank of a batch. Shape (world_size,)."""
        return shard_sizes(samples, self.ratios, min_part_size(self._norms))

    def note_work(self, samples: Sequence[int], batches: Sequence[int] | None = None) -> None:
        """Note the ranks' batches.

        Args:
            samples: Per rank. Shape (world_size,).
            batches: Whole batches per rank, of a window; None: a call. Shape (world_size,).
        """
        self.shard_sizes = tuple(samples)
        for rank, count in enumerate(samples):
            self._samples[rank] += count
        for rank, count in enumerate(batches or ()):
            self._batches[rank] += count
        if not self._has_told and sum(count > 0 for count in samples) > 1 and min_part_size(self._norms) > 1:
            self._has_told = True
            log.warning(
                "BatchNorm normalises the part of each device by itself, so the result is not that of one "
                "device: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before setup() takes the "
                "statistics of the whole batch, and GroupNorm needs none"
            )

    def step(self) -> None:
        """Learn from the devices' times since the last step of the optimizer."""
        if not any(self._samples):
            return
        for watch in self._watches:
            watch.lap()
        self._pending.append((self._samples, self._batches))
        self._samples, self._batches = [0] * len(self._samples), [0] * len(self._samples)
        while self._pending and all(watch.is_known for watch in self._watches):
            self._learn(*self._pending.pop(0))

    def _learn(self, samples: Sequence[int], batches: Sequence[int]) -> None:
        *took_ms, sync_ms = [watch.take_ms() for watch in self._watches]
        self._balance.update(samples, took_ms)
        if self.cadence is not None and any(batches):
            pace = [ms / count if count else 0.0 for ms, count in zip(took_ms, batches, strict=True)]
            self.cadence.measured(pace, batches, sync_ms, None)
