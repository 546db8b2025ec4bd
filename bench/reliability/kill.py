"""Training that is killed again and again, and resumed: lost work, and the model at the end.

::

    python -m bench.reliability.kill --kills 200

Each life is a forked process that resumes the run of the life before. It dies by SIGKILL: at any moment, soon
after its start, in the middle of a write, or before a given call of it. After some deaths a power failure is
simulated, too: a newer file of which only a part is on the disk. The samples counted by the model of each
checkpoint are compared with the checkpoint's position.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch

from bench.harness import report as save_record
from bench.reliability.lives import BATCH_SIZE, DEVICES, EPOCHS, SAMPLES, Aim, Plan, live, trainer
from flowdp.checkpoint.file import UNFINISHED, read
from flowdp.errors import CheckpointError
from flowdp.options import Policy

__all__ = ["Report", "kill"]

MOST_DEATHS = 15  # of one run; its next life is not killed
TORN_EVERY = 4  # deaths, on average
FEW_MS = 4 / 60_000  # in minutes

POLICIES: tuple[Policy, ...] = ("sync", "cadence", "async", "exact")
EVERY: tuple[tuple[float, Any], ...] = ((1, "step"), (7, "step"), (FEW_MS, "minute"), (1, "epoch"))
POINTS = ("open", "read back", "rename", "sync folder", "clean up", "remove old")
"""Calls of a write before which a life kills itself, in their order."""


@dataclass(slots=True)
class Report:
    """Results of the kills.

    Attributes:
        hits: Number of kills by their aim.
        counts: Runs, lives that resumed, files found and refused.
        faults: Errors, as text.
    """

    hits: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- the folder after a life
class Folder:
    """The checkpoints of a run between two lives.

    Args:
        path: The folder.
        plan: Plan of the run.
        report: Receives the faults.
    """

    def __init__(self, path: Path, plan: Plan, report: Report) -> None:
        self.path = path
        self.newest: tuple[int, int] = (0, 0)
        self._plan = plan
        self._report = report
        self._source = trainer(plan, path).config.open_source()
        self._torn: set[Path] = set()
        self._left: set[tuple[Path, int, int]] = set()

    def look(self) -> None:
        """Check every file in the folder, after a life."""
        counts, fault = self._report.counts, self._report.faults.append
        there = self._unfinished()
        old, self._left = self._left & there, there
        for path, _, _ in there:
            counts["unfinished files, whole" if _is_whole(path) else "unfinished files, torn"] += 1
        good = []
        for path in sorted(self.path.glob("step-*.pt"), key=_number):
            if path in self._torn:
                continue
            try:
                state = read(path)
            except CheckpointError as error:
                fault(f"{self._plan}: a torn file has the name of a whole one: {error}")
                continue
            counts["checkpoints compared with their counts"] += 1
            good.append((state["version"], state["global_step"]))
            if wrong := self._compare(state):
                fault(f"{self._plan}: {path.name}: {wrong}")
        before, self.newest = self.newest, good[-1] if good else (0, 0)
        if old and self.newest != before:  # a writer removes them first
            fault(f"{self._plan}: an unfinished file of a killed life was not removed")
        if self.newest[1] < before[1]:
            fault(f"{self._plan}: the newest checkpoint went back from {before} to {self.newest}")

    def tear(self, draw: random.Random) -> None:
        """Add a newer checkpoint with only a part on the disk, or with a sector of zeros."""
        paths = sorted(self.path.glob("step-*.pt"), key=_number)
        if not paths or paths[-1] in self._torn:
            return
        content = bytearray(paths[-1].read_bytes())
        place = draw.randrange(len(content))
        if draw.random() < 0.5:
            del content[place:]
        elif any(content[place : place + 512]):
            content[place : place + 512] = bytes(len(content[place : place + 512]))
        else:
            return
        name = paths[-1].name.rpartition("-")[0]
        path = self.path / f"{name}-{_number(paths[-1]) + 1}.pt"
        path.write_bytes(content)
        self._torn.add(path)
        self._report.counts["torn files put there"] += 1

    def _compare(self, state: dict[str, Any]) -> str:
        """Compare the samples counted by the model with the checkpoint's position; "" if equal."""
        position = state["position"]
        assert self._source is not None
        assert self._source.batches is not None
        expected = torch.zeros(EPOCHS, SAMPLES, dtype=torch.int64)
        expected[: position.done] = 1
        for one in position.open:
            for batch in {*range(one.position)} - {*one.missing}:
                expected[one.epoch, list(self._source.indices(one.epoch, batch))] += 1
        counted = position.done * SAMPLES + sum(part.samples for one in position.open for part in one.sums)
        seen = state["model"]["seen"]
        if not torch.equal(seen, expected):
            return f"the samples trained do not agree with {position}: {(seen - expected).nonzero().tolist()}"
        trained = int(seen.sum())
        return "" if trained == counted else f"{trained} samples were trained, and the sums have {counted}"

    def _unfinished(self) -> set[tuple[Path, int, int]]:
        found = set()
        for path in self.path.glob("*" + UNFINISHED):
            status = path.stat()
            found.add((path, status.st_ino, status.st_ctime_ns))
        return found


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except CheckpointError:
        return False
    return True


# ---------------------------------------------------------------- many lives
def kill(
    kills: int, seed: int = 0, *, plans: Iterable[Plan] | None = None, aims: Iterable[Aim] | None = None
) -> Report:
    """Kill runs a number of times, and resume each to its end.

    Args:
        kills: Number of kills.
        seed: Seed of the plans and the moments.
        plans: The runs in order; None: drawn.
        aims: The kills in order; None: drawn.

    Threads:
        One that has used no thread pool: its forks have none.
    """
    draw, report = random.Random(seed), Report()
    wanted: dict[tuple[Policy, str], str] = {}
    drawn = iter(_aims(draw) if aims is None else aims)

    def aim() -> Aim | None:
        return next(drawn, None) if report.hits.total() < kills else None

    for plan in _plans(draw) if plans is None else plans:
        if report.hits.total() >= kills:
            break
        key = plan.policy, plan.reads
        if key not in wanted and plan.policy in ("sync", "exact"):
            with tempfile.TemporaryDirectory() as path:
                wanted[key] = _bring_to_an_end(plan, Path(path), lambda: None, report)
        with tempfile.TemporaryDirectory() as path:
            digest = _bring_to_an_end(plan, Path(path), aim, report, draw)
        if digest and digest != wanted.get(key, digest):
            report.faults.append(f"{plan}: the model is not that of a run that was never killed")
        report.counts["runs"] += 1
        if digest and key in wanted:
            report.counts["runs that ended with the bits of one never killed"] += 1
    return report


def _plans(draw: random.Random) -> Iterator[Plan]:
    rest = [*product(EVERY, ("tensors", "dataset"))]
    draw.shuffle(rest)
    for number, policy in enumerate(cycle(POLICIES)):
        (every, unit), reads = rest[(number // len(POLICIES) + number) % len(rest)]
        yield Plan(policy, every, unit, reads)


def _aims(draw: random.Random) -> Iterator[Aim]:
    while True:
        kind = draw.choice(("any moment", "any moment", "start", "write", "write", draw.choice(POINTS)))
        if kind == "any moment":
            yield Aim(kind, after_s=draw.uniform(0.0, 0.4))
        elif kind == "start":
            yield Aim(kind, after_s=draw.uniform(0.0, 0.03))
        else:
            yield Aim(kind, write=draw.choice((1, 1, 2, 3, 5)), after_s=draw.expovariate(1000))


def _bring_to_an_end(
    plan: Plan,
    path: Path,
    next_aim: Callable[[], Aim | None],
    report: Report,
    draw: random.Random | None = None,
) -> str:
    """Resume until the run ends; returns the digest of its model, "" on an error."""
    folder, deaths = Folder(path, plan, report), 0
    while True:
        aim = next_aim() if deaths < MOST_DEATHS else None
        was_killed, said = live(plan, path, aim or Aim("never"))
        last = {name: value for one in said for name, value in one.items()}
        if "error" in last:
            report.faults.append(f"{plan}: a life failed: {last['error']}")
            return ""
        if "start" in last:
            report.counts["resumes" if folder.newest[0] else "lives from the beginning"] += 1
            if tuple(last["start"]) != folder.newest:
                report.faults.append(f"{plan}: a life began at {last['start']}, not at {folder.newest}")
        report.counts["torn files refused"] += sum("refused" in one for one in said)
        folder.look()
        saved = [tuple(one["saved"]) for one in said if "saved" in one]
        if saved and saved[-1] > folder.newest:
            report.faults.append(f"{plan}: {saved[-1]} was complete, but the newest is {folder.newest}")
        if not was_killed:
            return _judge(plan, last.get("end"), report)
        deaths += 1
        assert aim is not None
        report.hits[aim.kind] += 1
        if draw is not None and draw.randrange(TORN_EVERY) == 0:
            folder.tear(draw)


def _judge(plan: Plan, end: Any, report: Report) -> str:
    window = BATCH_SIZE * DEVICES if plan.policy == "exact" else BATCH_SIZE
    expected = [EPOCHS * -(-SAMPLES // window), [SAMPLES] * EPOCHS, [1, 1]]
    if end is None:
        report.faults.append(f"{plan}: a life ended without an answer")
        return ""
    *found, digest = end
    if found != expected:
        report.faults.append(f"{plan}: steps, samples per epoch and per sample are {found}, not {expected}")
    return str(digest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, and print the table; returns 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="number of kills (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write the record to bench/results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.perf_counter()
    report = kill(options.kills, options.seed)
    took_s = time.perf_counter() - started
    for kind, count in sorted(report.hits.items()):
        print(f"killed: {kind:<48}{count:>7,}")
    for what, count in sorted(report.counts.items()):
        print(f"{what:<56}{count:>7,}")
    print(f"{'faults':<56}{len(report.faults):>7,}")
    print(f"{report.hits.total():,} kills in {took_s:.1f} s")
    for fault in report.faults:
        print(fault)
    figures = {
        "kills": report.hits.total(),
        "faults": len(report.faults),
        "took_s": took_s,
        **{f"killed: {kind}": count for kind, count in report.hits.items()},
        **report.counts,
    }
    if options.save:
        save_record("kill", [], figures=figures, save=True)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
