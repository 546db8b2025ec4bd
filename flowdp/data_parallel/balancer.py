"""Shares of the devices in a loop that the user owns: of single batches, and of El Che's windows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from flowdp.collective.batch_norm import min_part_size, plain_layers
from flowdp.data_parallel.replicas import Replicas
from flowdp.options import CadenceOptions
from flowdp.policy.cadence import Cadence
from flowdp.policy.shares import ThroughputBalance, shard_sizes, weights_from

__all__ = ["Balancer", "SingleDevice"]

log = logging.getLogger("flowdp")

SMOOTHING = 0.3
"""Weight of the newest step in the throughput of a single device."""


class SingleDevice:
    """Shares of one device: all of every batch. Its throughput is that of the loop.

    Attributes:
        ratios: All of it. Shape (1,).
        shard_sizes: Samples in the last call or window. Shape (1,).
        throughput: Samples per millisecond between steps, smoothed. Shape (1,).
    """

    cadence = None
    ratios = (1.0,)

    def __init__(self) -> None:
        self.shard_sizes: tuple[int, ...] = (0,)
        self._samples = 0
        self.throughput: tuple[float, ...] = (0.0,)
        self._stepped_s: float | None = None

    def note_call(self, args: tuple[Any, ...]) -> None:
        """Note the arguments of a call; a fraction of a microsecond of the loop's time."""
        first = args[0] if args else None
        shape = first.shape if type(first) is Tensor or isinstance(first, Tensor) else ()
        self.note_work((shape[0] if shape else 0,))

    def note_work(self, samples: Sequence[int], _batches: Sequence[int] | None = None) -> None:
        """Note the work done."""
        self.shard_sizes = (samples[0],)
        self._samples += samples[0]

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples since the last step. Shape (1,)."""
        return (self._samples,)

    def cut(self, samples: int) -> tuple[int, ...]:
        """The whole batch."""
        return (samples,)

    def quotas(self) -> tuple[int, ...]:
        """One batch per window."""
        return (1,)

    def due(self) -> tuple[int, ...]:
        """No rank: a device alone is never without work."""
        return ()

    def step(self) -> None:
        """Learn from the time since the last step of the optimizer."""
        now_s = perf_counter()
        if self._stepped_s is not None and now_s > self._stepped_s:
            seen = self._samples / (now_s - self._stepped_s) / 1e3
            known = self.throughput[0]
            self.throughput = (SMOOTHING * seen + (1 - SMOOTHING) * known if known else seen,)
        self._stepped_s, self._samples = now_s, 0


class Balancer:
    """Shares by measured speed, from step to step.

    Args:
        replicas: The ranks; their stopwatches are read, and their pools told.
        options: Options of the windows, and the speed hint.
        windows: Whether there are windows; else every batch is cut.
        ratios: Fixed shares, summing to 1; None: by measured speed. Shape (world_size,).

    Attributes:
        cadence: Cadence of the windows; None without.
        shard_sizes: Samples per rank in the last call or window. Shape (world_size,).

    Threads: the user's; `quotas`, `due` and `cut` also by the thread that reads ahead: they read one value
        each.
    """

    def __init__(
        self,
        replicas: Replicas,
        options: CadenceOptions,
        *,
        windows: bool,
        ratios: tuple[float, ...] | None = None,
    ) -> None:
        world_size = len(replicas.modules)
        self._balance = ThroughputBalance(weights_from([0.0] * world_size, options.speed_hint))
        self._ratios = ratios
        self.cadence = Cadence(world_size, options) if windows else None
        self.shard_sizes: tuple[int, ...] = (0,) * world_size
        self._norms = plain_layers(replicas.modules[0])
        self._has_told = False
        self._watches = (*replicas.watches, replicas.summing)
        self._pools = replicas.pools
        self._samples = [0] * world_size  # since the last step
        self._batches = [0] * world_size
        self._is_mixed = False
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

    def quotas(self) -> tuple[int, ...] | None:
        """Whole batches per rank of a window; None where batches are cut. Shape (world_size,)."""
        return None if self.cadence is None else self.cadence.quotas

    def due(self) -> tuple[int, ...]:
        """Ranks that get a batch of the next window in any case; see `Cadence.due`."""
        return () if self.cadence is None else self.cadence.due

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
        # Calls beside a window would count as its time.
        self._is_mixed |= batches is None and any(self._batches)
        if not self._has_told and sum(count > 0 for count in samples) > 1 and min_part_size(self._norms) > 1:
            self._has_told = True
            log.warning(
                "BatchNorm normalises the part of each device by itself, so the result is not that of one "
                "device: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before setup() takes the "
                "statistics of the whole batch, and GroupNorm needs none"
            )

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples per rank since the last step. Shape (world_size,)."""
        return tuple(self._samples)

    def step(self) -> None:
        """Learn from the devices' times since the last step of the optimizer."""
        if self._is_mixed or not any(self._samples):
            self.discard()
            return
        for watch in self._watches:
            watch.lap()
        self._pending.append((self._samples, self._batches))
        self._forget()
        while self._pending and all(watch.is_known for watch in self._watches):
            self._learn(*self._pending.pop(0))

    def discard(self) -> None:
        """Drop the times since the last step."""
        for watch in self._watches:
            watch.discard()
        self._forget()

    def _forget(self) -> None:
        self._samples = [0] * len(self._samples)
        self._batches = [0] * len(self._samples)
        self._is_mixed = False

    def _learn(self, samples: Sequence[int], batches: Sequence[int]) -> None:
        *took_ms, sync_ms = [watch.take_ms() for watch in self._watches]
        self._balance.update(samples, took_ms)
        for pool, ms, count in zip(self._pools, took_ms, samples, strict=True):
            if not pool.is_fixed:
                pool.worked(ms, count)
        if self.cadence is not None and any(batches):
            pace = [ms / count if count else 0.0 for ms, count in zip(took_ms, batches, strict=True)]
            self.cadence.measured(pace, batches, sync_ms, None)
