"""Sizes of batches and steps: of the source, and of each rank.

Ranks may have batch sizes of their own. The source then has batches of their greatest common divisor, and a
rank puts as many together as make one of its own. A step of several micro-batches takes them all from its
rank's batches. In exact, the source's batch is the window, and a rank cuts its part of it into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from flowdp.data.open_source import is_stream
from flowdp.errors import OptionError
from flowdp.machine.policies import ROUNDS
from flowdp.options import Policy
from flowdp.validators import check_int

__all__ = ["Sizes", "plan_sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of batches and steps.

    Attributes:
        source: `batch_size` of the source; None: as the DataLoader says.
        widths: Batches of the source in a micro-batch. Shape (world_size,).
        groups: And in a step; None: one each. Shape (world_size,).
        window: Samples that all ranks train together for one step (exact); None elsewhere.
        parts: Samples of a micro-batch of a window (exact), at most. Shape (world_size,).
    """

    source: int | None
    widths: tuple[int, ...]
    groups: tuple[int, ...] | None = None
    window: int | None = None
    parts: tuple[int, ...] = ()

    def steps(self, batches: int, policy: Policy) -> int | None:
        """Steps of all ranks in an epoch; None where that depends on how fast they are.

        Args:
            batches: Batches of the source in an epoch.
            policy: How the replicas are kept one model.
        """
        groups = self.groups
        if groups is None or ROUNDS[policy].averages == "gradients":
            return batches
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

    def forward(self, dataset: object) -> int:
        """Samples of the largest forward of a device; of a DataLoader's batches as it says.

        Args:
            dataset: As the user gave it.
        """
        if isinstance(dataset, DataLoader):
            own: int | None = dataset.batch_size
            return own or 1
        return max(self.parts) if self.parts else (self.source or 1) * max(self.widths)

    def samples(self, dataset: object, batches: int) -> int:
        """Samples of so many batches of the source; of batches of any size their number."""
        own = dataset.batch_size if isinstance(dataset, DataLoader) else None
        return batches * (self.source or own or 1)

    def check_end(self, max_steps: int | None) -> None:
        """Check that a run can end after so many steps.

        Raises:
            OptionError: It cannot tell how many batches to deal for them.
        """
        if max_steps is not None and len(set(self.groups or (1,))) > 1:
            raise OptionError(
                "max_steps cannot be kept with a batch_size per device: how many steps the batches make then "
                "depends on who trains them; give epochs"
            )


def plan_sizes(
    dataset: object,
    batch_size: int | Sequence[int] | None,
    global_batch_size: int | None,
    accumulation: int,
    policy: Policy,
    world_size: int,
) -> Sizes:
    """Check the sizes, and derive those of the source and the ranks.

    Args:
        dataset: As the user gave it.
        batch_size: Samples of one forward, or one number for each rank; None: as the DataLoader says.
        global_batch_size: Samples of a step of all ranks (exact); None: the sum of theirs.
        accumulation: Micro-batches of a step.
        policy: How the replicas are kept one model.
        world_size: Ranks.

    Raises:
        OptionError: They contradict each other, or the policy.
    """
    check_int("gradient_accumulation_steps", accumulation)
    sizes = _per_rank(dataset, batch_size, world_size)
    if ROUNDS[policy].averages == "gradients":
        if accumulation > 1:
            raise OptionError(
                "gradient_accumulation_steps has no use with policy='exact', which cuts each window of "
                "global_batch_size samples into micro-batches of batch_size anyway: give these two"
            )
        return _exact(dataset, sizes, global_batch_size, world_size)
    if global_batch_size is not None:
        raise OptionError(
            f"global_batch_size={global_batch_size!r} is for policy='exact', where all devices share one "
            f"step; with policy={policy!r} each device takes steps of its own, of batch_size samples"
        )
    if accumulation > 1 and is_stream(dataset):
        raise OptionError(
            "gradient_accumulation_steps needs a dataset of a known length, and an IterableDataset has none: "
            "let it yield larger batches, or wrap it in a map-style dataset"
        )
    if sizes is None:
        groups = (accumulation,) * world_size
        return Sizes(None, (1,) * world_size, groups if accumulation > 1 else None)
    unit = math.gcd(*sizes)
    widths = tuple(size // unit for size in sizes)
    groups = tuple(width * accumulation for width in widths)
    if max(groups) > 1 and is_stream(dataset):
        raise OptionError(
            "a batch_size per device needs a dataset of a known length, and an IterableDataset has none"
        )
    given = None if isinstance(dataset, DataLoader) else unit
    return Sizes(given, widths, groups if max(groups) > 1 else None)


def _per_rank(dataset: object, batch_size: object, world_size: int) -> tuple[int, ...] | None:
    """The batch size of each rank; None where the DataLoader has none, or it alone knows."""
    if isinstance(dataset, DataLoader):
        if isinstance(batch_size, Sequence):
            raise OptionError(
                f"batch_size={batch_size!r} was given beside a DataLoader, whose batches have one size: for "
                "a batch_size per device give its dataset"
            )
        if batch_size is not None:
            raise OptionError(
                f"batch_size={batch_size!r} was given beside a DataLoader; give it to the DataLoader alone"
            )
        own: Any = dataset.batch_size
        return None if own is None else (own,) * world_size
    if batch_size is None:
        raise OptionError("batch_size is missing: how many samples one device trains in one step")
    if not isinstance(batch_size, Sequence) or isinstance(batch_size, str):
        check_int("batch_size", batch_size)
        return (int(str(batch_size)),) * world_size
    for size in batch_size:
        check_int("each batch_size", size)
    if len(batch_size) != world_size:
        raise OptionError(
            f"batch_size={tuple(batch_size)!r} names {len(batch_size)} sizes for {world_size} devices"
        )
    return tuple(batch_size)


def _exact(
    dataset: object, sizes: tuple[int, ...] | None, global_batch_size: object, world_size: int
) -> Sizes:
    if is_stream(dataset):
        raise OptionError(
            "policy='exact' splits windows of a known size, and an IterableDataset has no length: use "
            "policy='sync', or a map-style dataset"
        )
    sampler = dataset.batch_sampler if isinstance(dataset, DataLoader) else None
    if sizes is None or (sampler is not None and type(sampler) is not BatchSampler):
        raise OptionError(
            "policy='exact' makes windows of global_batch_size samples by itself: give the DataLoader a "
            "batch_size and a sampler, not a batch_sampler, nor batch_size=None"
        )
    if global_batch_size is not None:
        check_int("global_batch_size", global_batch_size)
    window = sum(sizes) if global_batch_size is None else int(str(global_batch_size))
    return Sizes(window, (1,) * world_size, None, window, sizes)
