"""Random virtual clusters at the command line.

::

    python -m tests.simulator --seeds 10000 --jobs 2      # many runs, all rules; exit code 1 on a failure
    python -m tests.simulator --seed 37 --trace           # one run, one line per event (docs/testing.md)
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.simulator.cluster import JudgedWorld
from tests.simulator.faults import draw
from tests.simulator.lives import play
from tests.simulator.rules import Violation

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
    lives: list[JudgedWorld] = []
    failure = None
    try:
        play(draw(seed), trace=_print_event if trace else None, lives=lives)
    except Violation as violation:
        failure = str(violation)
    except Exception as error:  # whatever else a machine raises is a bug, too; the other seeds still count
        failure = f"{type(error).__name__}: {error}"
    events = sum(world.events for world in lives)
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
            print(f"seed {run.seed}: {run.failure}\n    python -m tests.simulator --seed {run.seed} --trace")
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


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator", description="Random virtual clusters, judged by all rules."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="run this seed")
    what.add_argument("--seeds", type=_count, metavar="N", help="run N seeds")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="M", help="with --seeds: first")
    parser.add_argument("--jobs", type=_count, default=1, metavar="J", help="with --seeds: processes")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the answer is the exit code."""
    given = _parser().parse_args(arguments)
    if given.seeds is not None:
        return _seeds(range(given.first, given.first + given.seeds), given.jobs)
    return _seed(given.seed, given.trace)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        # Whoever reads the trace, `head` say, has seen enough; nothing may be flushed into its pipe.
        sys.stdout = None
        sys.exit(1)
