"""Predictions at the command line.

::

    python -m flowdp.sim --plan 12,28 --sync 9        # a prediction for these devices
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from flowdp.errors import OptionError
from flowdp.options import Policy
from flowdp.sim.plan import simulate


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: 12,28 would be one") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flowdp.sim", description="flowdp's virtual cluster.")
    parser.add_argument(
        "--plan", type=_numbers, required=True, metavar="MS,MS", help="a mix of devices: ms per step"
    )
    parser.add_argument("--sync", type=float, default=0.0, metavar="MS", help="one averaging")
    parser.add_argument("--policy", choices=get_args(Policy), default="cadence")
    given = parser.parse_args(arguments)
    try:
        print(simulate(given.plan, sync_ms=given.sync, policy=given.policy))
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
