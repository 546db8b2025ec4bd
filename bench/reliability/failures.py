"""The matrix of failures: each fault at each place of each kind of run, and its effect for the user.

::

    python -m bench.reliability.failures --seconds 600      until the time is up
    python -m bench.reliability.failures --case error-backward-sync-2-local-middle-1

A case passes when `join()` raises the right error within 2 s of the fault (of a stall: of its detection),
with the rank, its step and the original error as the cause; or when the run continues as requested, with
every sample of every epoch. Then only a rank held by the fault may be alive, no thread is left when it is
released, and nothing is logged twice. Cases that mostly wait run side by side.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial

from bench.harness import report as save_record
from bench.reliability.faults import Case, all_cases
from bench.reliability.trial import listening, try_case

__all__ = ["Report", "matrix"]

SIDE_BY_SIDE = 8
LEAVE_S = 5.0


@dataclass(slots=True)
class Report:
    """Results of the cases.

    Attributes:
        cases: Number of cases by fault and site.
        slowest_s: Longest time from fault to error, by fault and site.
        failures: Failed cases, with their errors.
    """

    cases: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest_s: dict[tuple[str, str], float] = field(default_factory=dict)
    failures: list[tuple[Case, str]] = field(default_factory=list)


# ---------------------------------------------------------------- many cases
def matrix(
    cases: Sequence[Case], seconds: float = 1e9, tell: Callable[[Case, str], None] = lambda *_: None
) -> Report:
    """Try cases in order until the time is up.

    Args:
        cases: The cases.
        seconds: Time in which new ones begin.
        tell: Called with each failed case and its errors.
    """
    report, end_s = Report(), time.monotonic() + seconds
    with listening() as logs, ThreadPoolExecutor(SIDE_BY_SIDE, "side by side") as pool:

        def take(case: Case, wrong: list[str], took_s: float) -> None:
            key = case.fault, case.site
            report.cases[key] += 1
            report.slowest_s[key] = max(report.slowest_s.get(key, 0.0), took_s)
            if wrong:
                report.failures.append((case, "; ".join(wrong)))
                tell(*report.failures[-1])

        def take_side_by_side(some: Sequence[Case]) -> None:
            before = threading.enumerate()
            tried = pool.map(partial(try_case, logs=logs), some)
            for case, (wrong, took_s) in zip(some, tried, strict=True):
                take(case, wrong, took_s)
            if left := _left(before):
                report.failures.append((some[0], f"or a case run with it: threads are left: {left}"))
                tell(*report.failures[-1])
            logs.records.clear()

        waiting: list[Case] = []
        for case in cases:
            if time.monotonic() > end_s:
                break
            if case.waits:
                waiting.append(case)
                if len(waiting) == SIDE_BY_SIDE:
                    take_side_by_side(waiting)
                    waiting = []
                continue
            before, errors = threading.enumerate(), io.StringIO()
            with redirect_stderr(errors):
                wrong, took_s = try_case(case, logs)
            left = _left(before)
            wrong += [f"threads are left: {left}"] * bool(left)
            wrong += [f"printed: {errors.getvalue()}"] * bool(errors.getvalue())
            take(case, wrong, took_s)
        if waiting:
            take_side_by_side(waiting)
    return report


def _left(before: Sequence[threading.Thread]) -> list[str]:
    """Names of new flowdp threads that do not end."""
    fresh = [one for one in threading.enumerate() if one not in before and one.name.startswith("flowdp")]
    end_s = time.monotonic() + LEAVE_S
    for thread in fresh:
        thread.join(max(0.0, end_s - time.monotonic()))
    return [thread.name for thread in fresh if thread.is_alive()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try cases and print the table; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1e9, help="time to begin new cases in")
    parser.add_argument("--cases", type=int, help="at most this many (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of their order (%(default)s)")
    parser.add_argument("--case", metavar="NAME", help="only this case")
    parser.add_argument("--save", action="store_true", help="write the record to bench/results")
    options = parser.parse_args(arguments)
    cases = [case for case in all_cases() if options.case in (None, case.name)]
    if not cases:
        parser.error(f"no case is called {options.case!r}")
    random.Random(options.seed).shuffle(cases)

    def tell(case: Case, wrong: str) -> None:
        print(f"FAILED {case.name}: {wrong}\n    python -m bench.reliability.failures --case {case.name}")

    started = time.perf_counter()
    report = matrix(cases[: options.cases], options.seconds, tell)
    took_s, tried, failed = time.perf_counter() - started, report.cases.total(), len(report.failures)
    for (fault, site), count in sorted(report.cases.items()):
        wrong = sum((case.fault, case.site) == (fault, site) for case, _ in report.failures)
        slowest_s = report.slowest_s[fault, site]
        print(f"{fault:<8}{site:<16}{count:>6,} cases{wrong:>6,} failed   slowest error {slowest_s:.2f} s")
    print(f"{tried:,} of {len(cases):,} cases in {took_s:.1f} s, {failed:,} failed")
    if options.save:
        figures = {"cases": tried, "failed": failed, "took_s": took_s}
        slowest = {f"{fault} {site}: slowest_s": s for (fault, site), s in report.slowest_s.items()}
        save_record("failures", [], figures={**figures, **slowest}, save=True)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
