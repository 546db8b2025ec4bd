"""Batch sizes by trial: the largest that a device has room for, and the fastest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils.data import DataLoader

from flowdp.data.open_source import dataset_length
from flowdp.device.accelerator import device_module, is_accelerator
from flowdp.errors import FlowdpError, OptionError, OutOfDeviceMemory
from flowdp.policy.formats import Table
from flowdp.replica.batch_sizes import plan_sizes
from flowdp.trainer.config import RunConfig
from flowdp.trainer.trainer import Trainer
from flowdp.trainer.tuning.trial import trial_run
from flowdp.validators import check_int

__all__ = ["BatchSizes", "DeviceBatchSizes", "find_batch_size", "search_sizes"]

MOST = 2**16
"""Batch size beyond which none is tried."""

CLOSE = 32
"""The largest size is found to one part in so many."""

GAIN = 1.05
"""Gain in speed, over three doublings, that makes a larger batch worth trying on a CPU device."""

SLOW_S = 0.01
"""Seconds of a step from which its time says something: below, chance and Python have most of it."""

AS_FAST = 0.98
"""Part of the highest speed that counts as the highest: of these sizes the smallest is the fastest."""


@dataclass(frozen=True)
class DeviceBatchSizes:
    """Batch sizes that were tried on one device, alone.

    Attributes:
        device: The device.
        speeds: Batch size -> samples per second, of the sizes for which there was room; from the smallest.
        bound: Reason why no larger one was tried.
    """

    device: torch.device
    speeds: Mapping[int, float]
    bound: str

    @property
    def largest(self) -> int:
        """Largest size that was tried and fitted."""
        return max(self.speeds)

    @property
    def fastest(self) -> int:
        """Smallest of the sizes that are as fast as the fastest."""
        enough = AS_FAST * max(self.speeds.values())
        return min(size for size, speed in self.speeds.items() if speed >= enough)


@dataclass(frozen=True)
class BatchSizes:
    """Result of `find_batch_size`; prints as a table.

    ::

        flowdp.Trainer(..., per_device_batch_size=sizes.fastest)

    Attributes:
        ranks: Result of each rank's device; ranks of one device share it. Shape (world_size,).
    """

    ranks: tuple[DeviceBatchSizes, ...]

    @property
    def largest(self) -> tuple[int, ...]:
        """Largest batch size of each rank. Shape (world_size,)."""
        return tuple(rank.largest for rank in self.ranks)

    @property
    def fastest(self) -> tuple[int, ...]:
        """Fastest batch size of each rank. Shape (world_size,)."""
        return tuple(rank.fastest for rank in self.ranks)

    @property
    def devices(self) -> tuple[DeviceBatchSizes, ...]:
        """Result of each device."""
        return tuple({rank.device: rank for rank in self.ranks}.values())

    @property
    def table(self) -> Table:
        """A row for each device."""
        rows = [
            (
                str(result.device),
                str(result.fastest),
                f"{result.speeds[result.fastest]:,.0f}",
                str(result.largest),
                f"{result.speeds[result.largest]:,.0f}",
                result.bound,
            )
            for result in self.devices
        ]
        return Table(("device", "fastest", "samples/s", "largest", "samples/s", "bound by"), rows)

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def find_batch_size(trainer: Trainer, *, most: int = MOST, steps: int = 10) -> BatchSizes:
    """Find the largest and the fastest batch size of each device, by a few steps of each size.

    ::

        sizes = flowdp.find_batch_size(trainer)
        print(sizes)

    A device trains alone, as the trainer's only one and without captured steps: first with 2 samples, then
    twice as many, until there is no room, and in between until the largest is known to one part in 32. On a
    CPU device running out of memory would end the process, so there it ends where three doublings gain less
    than 5 % of speed. Leave some room below the largest: averaging has buffers of its own, up to a copy of
    the parameters. Model, optimizer and random generators stay as they are.

    Args:
        trainer: Trainer of the run for which the sizes are sought; it is not changed.
        most: Largest size to try; the length of the dataset is a bound, too.
        steps: Steps that are timed, behind a first one that is not.

    Raises:
        OptionError: A number is out of its range, the dataset is a DataLoader, or the run cannot start.
        OutOfDeviceMemory: A device has no room for one sample.
        FlowdpError: A run failed for another reason.
    """
    check_int("most", most)
    check_int("steps", steps)
    config = trainer.config
    if isinstance(config.dataset, DataLoader):
        raise OptionError(
            "find_batch_size cannot change the batches of a DataLoader: give the Trainer its dataset, with "
            "batch_size=..., and for the loader's settings reading=ReadingOptions(...)"
        )
    length = dataset_length(config.dataset)
    bound = "most" if length is None or most <= length else "the dataset"
    end = most if length is None else min(most, length)
    results = {
        device: search_sizes(device, partial(_speed, config, device, steps), end, bound)
        for device in dict.fromkeys(config.devices)
    }
    return BatchSizes(tuple(results[device] for device in config.devices))


def search_sizes(
    device: torch.device, speed_of: Callable[[int], float | None], end: int, bound: str
) -> DeviceBatchSizes:
    """Try sizes: doubled while there is room, then halfway between the largest and the first without.

    Args:
        device: The device.
        speed_of: Samples per second at a size; None: there is no room for it.
        end: Largest size to try.
        bound: The reason for that, in words.

    Raises:
        OutOfDeviceMemory: There is no room for 1.
    """
    speeds: dict[int, float] = {}
    size, too_large = min(2, end), None  # one sample alone is refused by BatchNorm
    while True:
        speed = speed_of(size)
        if speed is None:
            too_large, bound = size, "memory"
        else:
            speeds[size] = speed
        largest = max(speeds, default=0)
        if too_large is None:
            if largest == end:
                break
            if device.type == "cpu" and _has_flattened(speeds):
                bound = "speed: larger is no faster"
                break
            size = min(2 * largest, end)
        elif too_large - largest <= max(1, largest // CLOSE):
            break
        else:
            size = (largest + too_large) // 2
    if not speeds:
        raise OutOfDeviceMemory(f"{device} has no room for a step of one sample: use a smaller model", rank=0)
    return DeviceBatchSizes(device, dict(sorted(speeds.items())), bound)


def _has_flattened(speeds: Mapping[int, float]) -> bool:
    """Whether the last three doublings gained little; speeds are in the order of the trials."""
    tried = list(speeds.values())
    if len(tried) < 4 or max(speeds) / tried[-1] < SLOW_S:
        return False
    return max(tried[-3:]) < GAIN * max(tried[:-3])


def _speed(config: RunConfig, device: torch.device, steps: int, size: int) -> float | None:
    """Samples per second of a trainer's run on one device; None: it has no room for such batches."""
    sizes = plan_sizes(config.dataset, size, None, 1, config.replica.policy, world_size=1)
    test = replace(
        config,
        devices=(device,),
        team=config.team
        if config.team.is_spread
        else replace(config.team, sizes=(1,)),  # refused, or this device alone
        replica=replace(config.replica, sizes=sizes, capture=None, repeats=False, checks_loss=False),
        reading=replace(config.reading, drop_last=True),  # all steps are of this size
        epochs=None,
        max_steps=1 + steps,
        ratios=None,
        evaluation=None,
        failures=replace(config.failures, on_failure="raise"),
    )
    try:
        with trial_run(test) as run:
            rounds = list(run.metrics(every="round"))
        if max(run.status().pieces) > 1:  # it went on in smaller pieces
            return None
    except (FlowdpError, RuntimeError) as error:
        if not _is_memory(error) and not _is_memory(error.__cause__):
            raise
        return None
    finally:
        gc.collect()  # a cycle in the model holds its memory until then
        if is_accelerator(device):
            device_module(device).empty_cache()
    timed = rounds[1:] or rounds  # the first step allocates for all others
    return 1e3 * sum(sum(record.samples) for record in timed) / sum(record.wall_ms for record in timed)


def _is_memory(error: BaseException | None) -> bool:
    """Whether a device, or the allocator of torch's CPU tensors, has no memory left."""
    return isinstance(error, OutOfDeviceMemory | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(
        error
    )
