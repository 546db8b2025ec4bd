"""The parts and calls of the programme, and the command that runs one part in a process of its own.

python -m bench.gpu.programme NAME FINDINGS [--rehearse] [--limit SECONDS]
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from bench.environments import SHARED_CARD
from bench.gpu.part import Findings, Measure, Note, Place, Skipped

__all__ = [
    "CALLS",
    "CALL_LIMIT_S",
    "PARTS",
    "TESTS",
    "TESTS_LIMIT_S",
    "Part",
    "limit_s",
    "run",
]


@dataclass(frozen=True)
class Part:
    """A process of the programme.

    Attributes:
        limit_s: Seconds after which it is ended, about twice what it is expected to take.
        load: Imports and returns its functions; late, so that one broken part does not affect the others.
        is_experiment: Its failure does not count in the exit code.
        environment: Variables of its process, where they are not set.
    """

    limit_s: float
    load: Callable[[], Measure]
    is_experiment: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def _measure(module: str, name: str = "measure") -> Measure:
    found: Measure = getattr(importlib.import_module(f"bench.gpu.{module}"), name)
    return found


def _several(ranks: int) -> Measure:
    return partial(importlib.import_module("bench.gpu.nccl").measure_several, ranks)


TESTS = "tests"
TESTS_LIMIT_S = 500.0

PARTS = {
    "facts": Part(40, partial(_measure, "facts")),
    "nccl1": Part(40, partial(_measure, "nccl", "measure_one")),
    "policies": Part(90, partial(_measure, "policies")),
    "launches": Part(290, partial(_measure, "launches")),
    "compiled": Part(130, partial(_measure, "launches", "measure_compiled"), is_experiment=True),
    "capture": Part(60, partial(_measure, "capture"), is_experiment=True),
    "drain": Part(60, partial(_measure, "drain")),
    "nccl2": Part(60, partial(_several, 2), is_experiment=True, environment=SHARED_CARD),
    "nccl4": Part(60, partial(_several, 4), is_experiment=True, environment=SHARED_CARD),
    "machines": Part(130, partial(_measure, "machines"), is_experiment=True, environment=SHARED_CARD),
    "sanitizer": Part(240, partial(_measure, "sanitizer"), is_experiment=True),
    "one_device": Part(75, partial(_measure, "one_device")),
    "loader": Part(60, partial(_measure, "one_device", "measure_loader")),
    "loop": Part(90, partial(_measure, "one_device", "measure_loop")),
    "prefetch": Part(40, partial(_measure, "prefetch")),
    "averaging": Part(40, partial(_measure, "averaging")),
    "host": Part(30, partial(_measure, "host")),
    "calls": Part(120, partial(_measure, "calls"), is_experiment=True),
    "evaluation": Part(50, partial(_measure, "evaluation")),
    "plans": Part(50, partial(_measure, "plans")),
    "reading": Part(45, partial(_measure, "reading")),
    "memory": Part(50, partial(_measure, "memory")),
    "checkpoint": Part(90, partial(_measure, "checkpoint")),
    "model": Part(180, partial(_measure, "fashion")),
    "notebook": Part(60, partial(_measure, "notebook")),
    "peers": Part(500, partial(_measure, "peers"), is_experiment=True),
    "unequal": Part(180, partial(_measure, "unequal"), is_experiment=True, environment=SHARED_CARD),
}
"""Parts in order; the tests come behind the first call's."""

CALL_LIMIT_S = 540.0
"""Sum of the limits of a call, at most: it is over within ten minutes even where every part hangs."""

CALLS: Mapping[str, tuple[str, ...]] = {
    "first": ("facts", "nccl1", "policies"),
    "tests": (TESTS,),
    "launches": ("launches", "drain", "capture", "compiled"),
    "shared": ("nccl2", "nccl4", "machines", "sanitizer"),
    "benches": (
        *("one_device", "loader", "prefetch", "averaging", "host", "evaluation", "plans"),
        *("reading", "memory", "checkpoint"),
    ),
    "model": ("model", "notebook", "loop"),
    "peers": ("peers",),
    "unequal": ("unequal", "calls"),
}
"""Parts of each call, the most telling ones first."""


def limit_s(name: str) -> float:
    """Limit of a part, or of the tests, in seconds."""
    return TESTS_LIMIT_S if name == TESTS else PARTS[name].limit_s


def run(name: str, place: Place, findings: Path) -> None:
    """Measure a part in this process; each finding is written to the file at once."""
    with findings.open("w", encoding="utf-8", buffering=1) as file:
        try:
            for finding in PARTS[name].load()(place):
                file.write(Findings.line(finding))
        except Skipped as reason:
            file.write(Findings.line(Note(f"{name}: skipped, {reason}")))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one part of the programme.")
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("findings", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU device, with tiny sizes")
    parser.add_argument("--limit", type=float, help="seconds; default: the part's own limit")
    arguments = parser.parse_args()
    limit = arguments.limit or PARTS[arguments.name].limit_s
    # A timer in C: it works even if every Python thread hangs.
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.stderr)
    device = torch.device("cpu") if arguments.rehearse else torch.device("cuda", 0)
    if arguments.rehearse:
        torch.set_num_threads(1)  # a pool spins when other programs hold the cores
    run(arguments.name, Place(device), arguments.findings)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
