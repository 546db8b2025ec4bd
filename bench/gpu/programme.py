"""The parts in order, and the command that runs one in its own process, which may hang or crash.

python -m bench.gpu.programme NAME FINDINGS [--rehearse] [--limit SECONDS]
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu.part import Findings, Measure, Note, Place, Skipped

__all__ = ["PARTS", "TESTS", "Part", "run"]


@dataclass(frozen=True)
class Part:
    """A process of the programme.

    Attributes:
        limit_s: Seconds after which it is ended.
        load: Imports and returns its functions; late, so that one broken part does not affect the others.
        is_experiment: Its failure does not count in the exit code.
    """

    limit_s: float
    load: Callable[[], Measure]
    is_experiment: bool = False


def _measure(module: str, name: str = "measure") -> Measure:
    found: Measure = getattr(importlib.import_module(f"bench.gpu.{module}"), name)
    return found


def _several(ranks: int) -> Measure:
    return partial(importlib.import_module("bench.gpu.nccl").measure_several, ranks)


TESTS = "tests"
TESTS_LIMIT_S = 150.0

PARTS = {
    "facts": Part(40, partial(_measure, "facts")),
    "one_device": Part(75, partial(_measure, "one_device")),
    "loader": Part(50, partial(_measure, "one_device", "measure_loader")),
    "prefetch": Part(30, partial(_measure, "prefetch")),
    "averaging": Part(35, partial(_measure, "averaging")),
    "host": Part(25, partial(_measure, "host")),
    "capture": Part(60, partial(_measure, "capture"), is_experiment=True),
    "nccl1": Part(25, partial(_measure, "nccl", "measure_one")),
    "nccl2": Part(25, partial(_several, 2), is_experiment=True),
    "nccl4": Part(25, partial(_several, 4), is_experiment=True),
}
"""Parts in order; `tests` come after the facts. The limits add up to 9 minutes."""


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
    limit_s = arguments.limit or PARTS[arguments.name].limit_s
    # A timer in C: it works even if every Python thread hangs.
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.stderr)
    device = torch.device("cpu") if arguments.rehearse else torch.device("cuda", 0)
    if arguments.rehearse:
        torch.set_num_threads(1)  # a pool spins when other programs hold the cores
    run(arguments.name, Place(device), arguments.findings)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
