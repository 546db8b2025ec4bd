"""All runs on emulated devices at the command line.

::

    python -m tests.late --seeds 20      # each policy, path and kind of data, in every order

The exit code is 1 if one of them is wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch

from tests.late.cases import EXTRA, all_of, case_of
from tests.late.doors import DOORS
from tests.late.feeds import FEEDS
from tests.late.means import MEANS
from tests.late.orders import EAGER, LATE, Order, first, shuffled
from tests.late.scenario import Scenario, faults_in


def trials(seeds: Sequence[int]) -> Iterator[tuple[Scenario, Order]]:
    """Every scenario in every order."""
    yield from map(case_of, all_of(seeds))
    roles = ("compute", "comm", "copy", "aside", "default")
    scenarios: list[Scenario] = [*EXTRA, *DOORS, *FEEDS, *MEANS]
    for scenario in scenarios:
        for order in (LATE, EAGER, *map(first, roles), *map(shuffled, seeds)):
            yield scenario, order


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.late", description="Runs on devices that are late."
    )
    parser.add_argument("--seeds", type=int, default=3, help="random orders of each run (default 3)")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # a rank that leaves is an error in the log
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count = wrong = 0
    for scenario, order in trials(range(options.seeds)):
        try:
            faults = faults_in(scenario, order)
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"]
        count += 1
        wrong += bool(faults)
        for fault in faults[:3]:
            print(f"{scenario}, {order}: {fault}", flush=True)
    print(f"{count} runs, {wrong} of them wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
