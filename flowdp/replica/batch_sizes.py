"""Sizes of batches and steps: of the source, and of each rank.

Ranks may have batch sizes of their own. The source then has batches of their greatest common divisor, and a
rank puts as many together as make one of its own. A step of several micro-batches takes them all from its
rank's batches. In exact, the source's batch is the window, and a rank cuts its part of it into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.data import BatchSampler, DataLoader

from flowdp.data.open_source import is_stream
from flowdp.errors import OptionError
from flowdp.machine.policies import ROUNDS
from flowdp.options import Policy
from flowdp.validators import check_int

__all__ = ["Sizes", "grows", "listed", "plan_sizes", "policy_of"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of batches and steps.

    Attributes:
        source: Samples of a batch of the source; None: as the DataLoader says.
        widths: Batches of the source in a micro-batch. Shape (world_size,).
        groups: And in a step. Shape (world_size,).
        window: Samples that all ranks train together for one step (exact); None elsewhere.
        parts: Samples of a micro-batch of a window (exact), at most. Shape (world_size,).
    """

    source: int | None
    widths: tuple[int, ...]
    groups: tuple[int, ...]
    window: int | None = None
    parts: tuple[int, ...] = ()

    def steps(self, batches: int, policy: Policy) -> int | None:
        """Steps of all ranks in an epoch; None where that depends on how fast they are.

        Args:
            batches: Batches of the source in an epoch.
            policy: How the replicas are kept one model.
        """
        groups = self.groups
        if len(set(groups)) == 1:
            return -(-batches // groups[0])
        if ROUNDS[policy].shares != "equal":
            return None
        rounds, rest = divmod(batches, sum(groups))
        tail = 0
        while rest > 0:  # the last round gives each rank a step, in order, as far as the batches go
            rest -= groups[tail]
            tail += 1
        return rounds * len(groups) + tail

    def forwards(self, dataset: object) -> tuple[int, ...] | None:
        """Samples of a forward of each rank, at most; None where the DataLoader's batches are of any size.

        Args:
            dataset: As the user gave it.
        """
        unit = self._unit(dataset)
        return self.parts or (None if unit is None else tuple(unit * width for width in self.widths))

    def together(self, dataset: object) -> int | None:
        """Samples of one step of all ranks; None as above."""
        unit = self._unit(dataset)
        return self.window or (None if unit is None else unit * sum(self.groups))

    def samples(self, dataset: object, batches: int) -> int:
        """Samples of so many batches of the source; of batches of any size their number."""
        return batches * (self._unit(dataset) or 1)

    def _unit(self, dataset: object) -> int | None:
        """Samples of a batch of the source."""
        own = dataset.batch_size if isinstance(dataset, DataLoader) else None
        return self.source or own

    def check_end(self, max_steps: int | None) -> None:
        """Check that a run can end after so many steps.

        Raises:
            OptionError: It cannot tell how many batches to deal for them.
        """
        if max_steps is not None and len(set(self.groups)) > 1:
            raise OptionError(
                "max_steps cannot be kept with a per_device_batch_size that differs: how many steps the "
                "batches make then depends on the devices that train them; give epochs"
            )


def listed(sizes: Sequence[int]) -> int | str:
    """Sizes of the ranks, for people: one number where they are equal."""
    return sizes[0] if len(set(sizes)) == 1 else " | ".join(map(str, sizes))


def policy_of(policy: Policy, world_size: int, dataset: object, train_step: object) -> Policy:
    """Policy of a run: on one device all are alike, so what "exact" cannot split is trained under "sync"."""
    is_free = train_step is not None or is_stream(dataset) or _has_own_batches(dataset)
    return "sync" if policy == "exact" and world_size == 1 and is_free else policy


def grows(dataset: object, batch_size: object, per_device: object, policy: Policy) -> bool:
    """Whether n devices together train n times the samples of one in a step; arguments as of `plan_sizes`."""
    if _has_own_batches(dataset):  # each device trains whole ones
        return True
    is_shared = isinstance(dataset, DataLoader) and ROUNDS[policy].averages == "gradients"
    return per_device is not None and batch_size is None and not is_shared


def plan_sizes(
    dataset: object,
    batch_size: int | None,
    per_device: int | Sequence[int] | None,
    accumulation: int,
    policy: Policy,
    world_size: int,
) -> Sizes:
    """Check the sizes, and derive those of the source and the ranks.

    Args:
        dataset: As the user gave it; a DataLoader's own batch size stands for `batch_size`.
        batch_size: Samples of one step of all ranks together; None: the sum of theirs.
        per_device: Samples of one forward of a rank, or one number for each; None: as `batch_size` says.
        accumulation: Micro-batches of a step.
        policy: How the replicas are kept one model.
        world_size: Ranks.

    Raises:
        OptionError: They contradict each other, or the policy.
    """
    check_int("gradient_accumulation_steps", accumulation)
    whole = _whole(dataset, batch_size)
    each = _each(per_device, world_size)
    if ROUNDS[policy].averages == "gradients":
        return _exact(dataset, whole, each, accumulation, world_size)
    is_loader = isinstance(dataset, DataLoader)
    if whole is not None and each is not None and not is_loader:
        raise OptionError(
            f"batch_size={whole} is that of all devices together, and with policy={policy!r} "
            f"per_device_batch_size={per_device!r} says the same in another way: give one of them"
        )
    if whole is None and each is None and not is_loader:
        raise OptionError("batch_size is missing: how many samples all devices train together in one step")
    if accumulation > 1 and is_stream(dataset):
        raise OptionError(
            "gradient_accumulation_steps needs a dataset of a known length, and an IterableDataset has none: "
            "let it yield larger batches, or wrap it in a map-style dataset"
        )
    if each is not None and _has_own_batches(dataset):
        raise OptionError(
            f"per_device_batch_size={per_device!r} was given beside a DataLoader whose batches are its own "
            "(a batch_sampler, or batch_size=None), and they cannot be made anew: leave it out"
        )
    if each is None:
        if whole is None or _has_own_batches(dataset):  # each device trains whole batches of the loader
            return Sizes(None, (1,) * world_size, (accumulation,) * world_size)
        each = (-(-whole // world_size),) * world_size
    unit = math.gcd(*each)
    widths = tuple(size // unit for size in each)
    groups = tuple(width * accumulation for width in widths)
    if max(groups) > 1 and is_stream(dataset):
        raise OptionError(
            "a per_device_batch_size that differs between devices needs a dataset of a known length, and an "
            "IterableDataset has none"
        )
    return Sizes(unit, widths, groups)


def _whole(dataset: object, batch_size: object) -> int | None:
    """Samples of a step of all ranks; None where they are not given, or the DataLoader has no size."""
    if isinstance(dataset, DataLoader):
        if batch_size is not None:
            raise OptionError(
                f"batch_size={batch_size!r} was given beside a DataLoader; give it to the DataLoader alone"
            )
        own: int | None = dataset.batch_size
        return own
    if isinstance(batch_size, Sequence) and not isinstance(batch_size, str):
        raise OptionError(
            f"batch_size={batch_size!r} is one number, for all devices together; a number for each is "
            f"per_device_batch_size={list(batch_size)!r}"
        )
    check_int("batch_size", batch_size, optional=True)
    return None if batch_size is None else int(str(batch_size))


def _each(per_device: object, world_size: int) -> tuple[int, ...] | None:
    """Samples of a forward of each rank; None where they are not given."""
    if per_device is None:
        return None
    if not isinstance(per_device, Sequence) or isinstance(per_device, str):
        check_int("per_device_batch_size", per_device)
        return (int(str(per_device)),) * world_size
    for size in per_device:
        check_int("each per_device_batch_size", size)
    if len(per_device) != world_size:
        raise OptionError(
            f"per_device_batch_size={tuple(per_device)!r} names {len(per_device)} sizes for {world_size} "
            "devices"
        )
    return tuple(per_device)


def _has_own_batches(dataset: object) -> bool:
    """Whether a dataset is a DataLoader whose batches cannot be made anew with another size."""
    if not isinstance(dataset, DataLoader):
        return False
    own = dataset.batch_sampler
    return dataset.batch_size is None or (own is not None and type(own) is not BatchSampler)


def _exact(
    dataset: object, whole: int | None, each: tuple[int, ...] | None, accumulation: int, world_size: int
) -> Sizes:
    if _has_own_batches(dataset):
        raise OptionError(
            "policy='exact', the default, makes batches of batch_size samples by itself: give the DataLoader "
            "a batch_size and a sampler, not a batch_sampler, nor batch_size=None, or use policy='sync'"
        )
    if whole is None and each is None:
        raise OptionError("batch_size is missing: how many samples all devices train together in one step")
    whole = sum(each or ()) if whole is None else whole
    window = whole * accumulation
    # With accumulation a forward is at most as large as without it.
    parts = each or (whole if accumulation > 1 else window,) * world_size
    ones = (1,) * world_size
    return Sizes(window, ones, ones, window, parts)
