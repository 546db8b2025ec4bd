"""The simulator at the command line.

::

    python -m flowdp.sim --seeds 10000 --jobs 2       # many runs, all rules; exit code 1 on a failure
    python -m flowdp.sim --seed 37 --trace            # one run, one line per event (docs/testing.md)
    python -m flowdp.sim --replay run.jsonl           # a real run's story through the same machine
    python -m flowdp.sim --plan 12,28 --sync 9        # what these devices would do together
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from flowdp.errors import OptionError
from flowdp.machine.event_log import replay
from flowdp.options import Policy
from flowdp.sim.faults import draw
from flowdp.sim.lives import play
from flowdp.sim.plan import simulate
from flowdp.sim.rules import Violation
from flowdp.sim.world import World

MS_PER_HOUR = 3.6e6


@dataclass(frozen=True, slots=True)
class _Run:
    """How the run of a seed went."""

    seed: int
    lives: int
    events: int
    virtual_ms: float
    failure: str | None

    def __str__(self) -> str:
        how = self.failure or "every rule holds"
        lives = f"{self.lives} lives, " if self.lives > 1 else ""
        time = f"{self.virtual_ms / 1e3:.3f} virtual seconds"
        return f"seed {self.seed}: {how}; {lives}{self.events:,} events, {time}"


def _run_seed(seed: int, *, trace: bool = False) -> _Run:
    lives: list[World] = []
    failure = None
    try:
        play(draw(seed), trace=_print_event if trace else None, lives=lives)
    except Violation as violation:
        failure = str(violation)
    except Exception as error:  # whatever else a machine raises is a bug, too; the other seeds still count
        failure = f"{type(error).__name__}: {error}"
    events = sum(world.clock.events for world in lives)
    return _Run(seed, len(lives), events, sum(world.clock.now_ms for world in lives), failure)


def _print_event(now_ms: float, text: str) -> None:
    print(f"{now_ms:>12.3f} ms  {text}")


def _runs(seeds: range, jobs: int) -> Iterator[_Run]:
    if jobs == 1:
        yield from map(_run_seed, seeds)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap(_run_seed, seeds, chunksize=50)


def _seeds(seeds: range, jobs: int) -> int:
    started = time.perf_counter()
    lives, events, virtual_ms, failures = 0, 0, 0.0, 0
    for run in _runs(seeds, jobs):
        lives += run.lives
        events += run.events
        virtual_ms += run.virtual_ms
        if run.failure is not None:
            failures += 1
            print(f"seed {run.seed}: {run.failure}\n    python -m flowdp.sim --seed {run.seed} --trace")
    seconds = time.perf_counter() - started
    print(
        f"{len(seeds):,} runs in {seconds:.1f} s: {len(seeds) / seconds:,.0f} runs/s, {lives:,} lives, "
        f"{events:,} events, {virtual_ms / MS_PER_HOUR:.1f} virtual hours, {failures} failures"
    )
    return 1 if failures else 0


def _seed(seed: int, trace: bool) -> int:
    run = _run_seed(seed, trace=trace)
    print(run)
    return 0 if run.failure is None else 1


def _replay(path: str) -> int:
    try:
        with Path(path).open(encoding="utf-8") as file:
            result = replay(file)
    except OSError as error:
        print(f"cannot read the story: {error}", file=sys.stderr)
        return 2
    if result.coordinator is not None:
        machine = result.coordinator
        print(
            f"{result.events:,} facts give the same commands; then the run is {machine.life.value} at global "
            f"step {machine.global_step}, {machine.epochs.done} epochs done"
        )
    if result.error is not None:
        print(f"{path}: {result.error}")
        return 1
    return 0


def _plan(speeds: Sequence[float], sync_ms: float, policy: Policy) -> int:
    try:
        print(simulate(speeds, sync_ms=sync_ms, policy=policy))
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: 12,28 would be one") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flowdp.sim", description="flowdp's virtual cluster.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="run this seed")
    what.add_argument("--seeds", type=_count, metavar="N", help="run N seeds")
    what.add_argument("--replay", metavar="FILE", help="replay a story, as Trainer(story=FILE) writes it")
    what.add_argument("--plan", type=_numbers, metavar="MS,MS", help="predict a mix of devices: ms per step")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="M", help="with --seeds: first")
    parser.add_argument("--jobs", type=_count, default=1, metavar="J", help="with --seeds: processes")
    parser.add_argument("--sync", type=float, default=0.0, metavar="MS", help="with --plan: one averaging")
    parser.add_argument("--policy", choices=get_args(Policy), default="cadence", help="with --plan")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the answer is the exit code."""
    given = _parser().parse_args(arguments)
    if given.seeds is not None:
        return _seeds(range(given.first, given.first + given.seeds), given.jobs)
    if given.seed is not None:
        return _seed(given.seed, given.trace)
    if given.replay is not None:
        return _replay(given.replay)
    return _plan(given.plan, given.sync, given.policy)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        # Whoever reads the trace, `head` say, has seen enough; nothing may be flushed into its pipe.
        sys.stdout = None
        sys.exit(1)
