"""Rows of the table: policies and remedies, on three mixes of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bench.quality.cluster import Settings, train
from bench.quality.tasks import TASKS
from flowdp.options import Policy

__all__ = ["ALONE", "MIXES", "POLICIES", "Job", "jobs", "rows", "run"]

ALONE = Settings(speeds=(1.0,))
MIXES = ((1.0, 2.5), (1.0, 1.0), (1.0, 1.0, 2.0, 4.0))
POLICIES: tuple[Policy, ...] = ("exact", "sync", "cadence", "async")


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    settings: Settings
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Its place in the record."""
        return self.task, self.settings.mix, self.settings.name, self.seed


def rows() -> list[Settings]:
    """Settings of all rows but one device, for one mix: first the user's numbers, then each remedy."""
    each = {policy: Settings(speeds=(), policy=policy) for policy in POLICIES}
    total = {policy: replace(settings, batch="total") for policy, settings in each.items()}
    found = [*each.values(), *total.values()]
    for policy, settings in each.items():
        found += [replace(settings, rate="linear"), replace(settings, rate="sqrt")]
        if policy != "exact":
            found += [replace(base, outer_momentum=0.5) for base in (settings, total[policy])]
    for settings in (each["cadence"], total["cadence"]):
        found += [replace(settings, anchor=anchor) for anchor in (4, 50)]
        found.append(replace(settings, outer_lr=0.7, outer_momentum=0.9, nesterov=True))
    for policy in ("sync", "cadence"):
        found += [replace(base, moments=True) for base in (total[policy], each[policy])]
    return found


def jobs(tasks: Sequence[str], seeds: int) -> Iterator[Job]:
    """All runs, the most telling first."""
    wanted = rows()
    first = 2 * len(POLICIES)
    for seed in range(seeds):
        yield from (Job(task, ALONE, seed) for task in tasks)
    for part in (wanted[:first], wanted[first:]):
        for mix in MIXES:
            for settings in part:
                for seed in range(seeds):
                    yield from (Job(task, replace(settings, speeds=mix), seed) for task in tasks)


def run(job: Job) -> dict[str, object]:
    """Train, and return a line of the record."""
    torch.set_num_threads(1)
    curve = train(TASKS[job.task], job.settings, job.seed)
    return {
        "task": job.task,
        "mix": job.settings.mix,
        "row": job.settings.name,
        "seed": job.seed,
        "curve": [[p.wall_ms, p.samples, round(p.loss, 5), round(p.accuracy, 5)] for p in curve],
    }
