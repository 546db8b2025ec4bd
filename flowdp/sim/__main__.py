"""Replays and predictions at the command line.

::

    python -m flowdp.sim --replay run.jsonl           # a real run's event log through the same machine
    python -m flowdp.sim --plan 12,28 --sync 9        # a prediction for these devices
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from flowdp.errors import OptionError
from flowdp.machine.event_log import replay
from flowdp.options import Policy
from flowdp.sim.plan import simulate


def _replay(path: str) -> int:
    try:
        with Path(path).open(encoding="utf-8") as file:
            result = replay(file)
    except OSError as error:
        print(f"cannot read the event log: {error}", file=sys.stderr)
        return 2
    if result.coordinator is not None:
        machine = result.coordinator
        print(
            f"{result.events:,} facts give the same commands; then the run is {machine.phase.value} "
            f"at global step {machine.global_step}, {machine.epochs.done} epochs done"
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flowdp.sim", description="flowdp's virtual cluster.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--replay", metavar="FILE", help="replay an event log, as RuntimeOptions(event_log=FILE) writes it"
    )
    what.add_argument("--plan", type=_numbers, metavar="MS,MS", help="predict a mix of devices: ms per step")
    parser.add_argument("--sync", type=float, default=0.0, metavar="MS", help="with --plan: one averaging")
    parser.add_argument("--policy", choices=get_args(Policy), default="cadence", help="with --plan")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay or predict; returns the exit code."""
    given = _parser().parse_args(arguments)
    if given.replay is not None:
        return _replay(given.replay)
    return _plan(given.plan, given.sync, given.policy)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        # The reader, `head` say, has closed the pipe: nothing may be flushed into it.
        sys.stdout = None
        sys.exit(1)
