"""Shares of the devices in a loop that the user owns: of single batches, and of El Che's windows.

Single batches go to the first device alone where that takes less time than to cut them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import nn

from flowdp.collective.batch_norm import PARTS_ALONE, min_part_size, plain_layers
from flowdp.data_parallel.arguments import LoopOptions
from flowdp.data_parallel.loop_timeline import LoopTimeline
from flowdp.data_parallel.optimizer_hooks import OptimizerHooks
from flowdp.data_parallel.replicas import Replicas
from flowdp.device.cores import LentThreads
from flowdp.device.streams import Lane
from flowdp.errors import OptionError
from flowdp.policy.cadence import Cadence
from flowdp.policy.shares import (
    ThroughputBalance,
    changed_shares,
    format_shares,
    hinted_weights,
    part_sizes,
)
from flowdp.policy.worth import Worth

__all__ = ["Balancer", "Pace"]

log = logging.getLogger("flowdp")

STEPLESS = 32
"""Calls with gradients without a step of the optimizer, from which on each call is a step: the loop has
another optimizer by now, or calls another method (SAM has two steps)."""


class Balancer:
    """Shares by measured speed, from step to step.

    Args:
        module: The user's.
        options: The options of the loop.
        replicas: The ranks; their stopwatches are read. None: there is one device.
        optimizers: The optimizers. Without any, no other moment than a call tells when to look at the speed.
        pace: Tries the first device alone; None: batches are cut.
        timeline: Timeline of the loop; None: there is none.

    Attributes:
        pace: As given.
        timeline: As given.
        cadence: Cadence of the windows; None without.
        shard_sizes: Samples per rank in the last call or window. Shape (world_size,).

    Threads: the user's.
    """

    def __init__(
        self,
        module: nn.Module,
        options: LoopOptions,
        replicas: Replicas | None,
        optimizers: OptimizerHooks,
        pace: Pace | None = None,
        timeline: LoopTimeline | None = None,
    ) -> None:
        world_size = 1 if replicas is None else len(replicas.modules)
        self._balance = ThroughputBalance(hinted_weights(world_size, options.cadence.speed_hint))
        self._ratios = options.ratios
        self._optimizers = optimizers
        self.pace = pace
        self.timeline = timeline
        self.cadence = Cadence(world_size, options.cadence) if options.windows else None
        self.shard_sizes: tuple[int, ...] = (0,) * world_size
        self._norms = plain_layers(module)
        self._has_told = False
        self._watches = () if timeline is None else timeline.watches
        if replicas is not None:
            self._watches = (*replicas.watches, replicas.summing)
        self._reported_shares = self.ratios
        self._steps = 0  # of the first optimizer, at the last call
        self._calls = 0  # with gradients since that step
        self._samples = [0] * world_size  # since the last step
        self._batches = [0] * world_size
        self._pending: list[tuple[list[int], list[int], int]] = []

    @property
    def ratios(self) -> tuple[float, ...]:
        """Fraction of a batch per rank. Shape (world_size,)."""
        return self._balance.ratios if self._ratios is None else self._ratios

    @property
    def recorded(self) -> LoopTimeline:
        """The timeline, which is there; see `DataParallel.timeline`."""
        if self.timeline is None:
            raise OptionError(
                "this loop records no timeline: give setup(timeline=True), or the path of a file"
            )
        return self.timeline

    @property
    def throughput(self) -> tuple[float, ...]:
        """Samples per millisecond of each rank, smoothed. Shape (world_size,)."""
        return self._balance.throughput

    def cut(self, samples: int) -> tuple[int, ...]:
        """Samples per rank of a batch. Shape (world_size,)."""
        return part_sizes(samples, self.ratios, min_part_size(self._norms))

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
            log.warning(PARTS_ALONE)
        self._note(sum(samples), is_cut=True)

    def note_alone(self, samples: int) -> None:
        """Note a batch that the first device is about to do alone."""
        if self.timeline is not None and self._optimizers.optimizers:
            self.timeline.begin_alone(self._watches[0], samples)
        self.shard_sizes = (samples, *[0] * (len(self.shard_sizes) - 1))
        self._note(samples, is_cut=False)

    def _note(self, samples: int, *, is_cut: bool) -> None:
        if self.pace is not None:
            self.pace.note(samples, is_cut=is_cut)
        steps = self._optimizers.steps
        self._calls = (self._calls if steps == self._steps else 0) + torch.is_grad_enabled()
        self._steps = steps
        if self._calls > STEPLESS or not self._optimizers.optimizers:
            self.step()

    def step(self) -> None:
        """Learn from the time since the last step of the optimizer."""
        alone = 0 if self.timeline is None else self.timeline.end_alone()
        if alone or any(self._samples):
            self._lap(alone)
        if self.pace is not None:
            self.pace.step()

    def _lap(self, alone: int) -> None:
        """Learn from the devices' own times, as soon as these are known.

        Args:
            alone: Samples that the first device has done alone, of a loop with a timeline.
        """
        for watch in self._watches:
            watch.lap()
        self._pending.append((self._samples, self._batches, alone))
        self._samples, self._batches = [0] * len(self._samples), [0] * len(self._samples)
        while self._pending and all(watch.is_known for watch in self._watches):
            self._learn(*self._pending.pop(0))

    def _learn(self, samples: list[int], batches: Sequence[int], alone: int) -> None:
        *took_ms, sync_ms = [watch.take_ms() for watch in self._watches]
        weights: Sequence[float] = ()
        if any(samples) and self._balance.update(samples, took_ms):
            weights = self.ratios
        if self.cadence is not None and any(batches):
            pace = [ms / count if count else 0.0 for ms, count in zip(took_ms, batches, strict=True)]
            self.cadence.measured(pace, batches, sync_ms, None)
            weights = self.cadence.quotas
        share = changed_shares(self._reported_shares, weights) if weights else ()
        if share:
            self._reported_shares = share
            log.info("step %d: the shares are %s from now on", self._optimizers.steps, format_shares(share))
        if self.timeline is not None:
            samples[0] += alone
            anchor = 0 if self.cadence is None else self.cadence.anchor
            self.timeline.take(self._watches, samples, share, anchor)


class Pace:
    """Times the loop from step to step, and tries both ways.

    Args:
        lanes: One per rank.
        name: Name of the module, for the log.
        threads: Threads that the process lends to the ranks while batches are cut.

    Attributes:
        is_cut: Whether the batches of the step under way are cut.
        is_settled: Whether the first device does all calls, and nothing is measured.

    Threads: the user's.

    Streams: At the edges of the steps that are timed, the host waits for all devices.
    """

    def __init__(self, lanes: Sequence[Lane], name: str, threads: LentThreads) -> None:
        self.is_cut = True
        self.is_settled = False
        self._lanes = lanes
        self._name = name
        self._threads = threads
        self._worth = Worth()
        self._samples = 0
        self._was_cut = False  # in the step under way
        self._stepped_s: float | None = None
        self._told = False

    def note(self, samples: int, *, is_cut: bool) -> None:
        """Note a call of the step under way."""
        self._samples += samples
        self._was_cut |= is_cut

    def step(self) -> None:
        """Learn from the time since the last step."""
        worth = self._worth
        if worth.is_block_edge:
            for lane in self._lanes:
                lane.drain()
        now_s, samples, has_cut = perf_counter(), self._samples, self._was_cut
        before_s, self._stepped_s, self._samples, self._was_cut = self._stepped_s, now_s, 0, False
        if before_s is None:
            return
        worth.stepped(1e3 * (now_s - before_s), samples, was_cut=has_cut)
        was_cut = self.is_cut
        self.is_cut, self.is_settled = worth.is_cut, worth.is_chosen and not worth.is_cut
        if was_cut and not self.is_cut:
            self._threads.take_back()
        elif self.is_cut and not was_cut:
            self._threads.lend()
        if self.is_settled and not self._told:
            self._told = True
            log.warning(
                "calls of %s go to %s alone: %s; this is measured again from time to time",
                self._name,
                self._lanes[0].device,
                self,
            )

    def __str__(self) -> str:
        ms = self._worth.ms
        if not ms:
            return "batches are cut, and not yet timed"
        if not self._worth.was_cut:
            return "no call had a batch to cut (other methods than forward: dp.call('name', ...))"
        # More than the number of devices is gained by faster ones, or where the time alone was a busy
        # machine's.
        ratio, least = ms[True] / ms[False], 1 / max(1, len(self._lanes))
        times = f"{ratio:.2f} times as long" if ratio >= least else f"less than {least:.2f} times as long"
        return f"a step takes {times} when its batches are cut"
