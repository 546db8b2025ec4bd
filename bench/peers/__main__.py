"""flowdp beside other libraries that train on two devices: `make bench-peers`.

Two CPU devices of one thread each, three models, the same data, batches and AdamW. Each side is a program in
`bench/peers/sides`, run in fresh processes; a round has all of them once, in shuffled order. Ctrl-C
ends it, and keeps the runs until then.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from statistics import median

from bench.harness import report
from bench.peers.cases import KINDS, SIDES, Measured, as_record, measure, wait_us
from bench.peers.report import tables
from bench.peers.tasks import TASKS

MODEL_OF = {"unequal": "cnn", "failure": "cnn"}  # other kinds: all models


def main() -> None:
    options = arguments()
    began = time.monotonic()
    waits = {"cnn": wait_us("cnn")} if "unequal" in options.kind else {}
    runs: list[Measured] = []
    loads, failed = list[float](), list[str]()
    with suppress(KeyboardInterrupt):  # the record has the runs until then
        for turn in range(options.rounds):
            for kind, model, name in plan(options, turn):
                loads.append(os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
                try:
                    measured = measure(turn, kind, model, name, wait=waits.get(model, 0.0), part=options.part)
                except RuntimeError as error:  # one run of many: the others count
                    failed.append(f"{kind}, {model}, {name}: {str(error).splitlines()[0]}")
                    print(error, flush=True)
                    continue
                runs.append(measured)
                print(line(measured, time.monotonic() - began), flush=True)
    record = {
        "rounds": 1 + max((one.turn for one in runs), default=0),
        "load": round(median(loads or [0.0]), 1),
        "versions": versions(),
        "wait_us": waits,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "failed": failed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "runs": [as_record(one) for one in runs],
    }
    print("\n" + tables(record))
    report("peers", [], save=options.save, more=record)


def versions() -> dict[str, str]:
    """Versions of the libraries that are here: `--side` may leave those out that are not."""
    found: dict[str, str] = {}
    for name in ("torch", "lightning", "accelerate"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def plan(options: argparse.Namespace, turn: int) -> list[tuple[str, str, str]]:
    """Kind, model and side of each run of a round, in an order that is drawn from its number.

    Errors and memory are measured in the first round only; they hardly vary.
    """
    draw = random.Random(turn)
    blocks: dict[str, list[tuple[str, str, str]]] = {}
    for kind, model, name in product(options.kind, options.only, options.side):
        if (
            kind not in SIDES[name].kinds
            or model != MODEL_OF.get(kind, model)
            or (kind == "failure" and turn)
        ):
            continue
        # One device stands beside two equal ones.
        blocks.setdefault(f"{kind.replace('one', 'equal')} {model}", []).append((kind, model, name))
    for block in blocks.values():
        draw.shuffle(block)
    order = list(blocks.values())
    draw.shuffle(order)
    return [case for block in order for case in block]


def line(measured: Measured, passed_s: float) -> str:
    """A measurement in one line."""
    record = as_record(measured)
    values = [
        f"{key} {record[key]:.3g}"
        for key in ("first_step_s", "peak_mb", "shown_s", "exit_s", "left")
        if key in record
    ]
    if measured.rate:
        values.insert(0, f"{measured.rate:,.0f} samples/s")
    head = f"{passed_s / 60:5.1f} min  round {measured.turn + 1}  {measured.kind:<8} {measured.model:<4}"
    return f"{head} {measured.side:<14} {', '.join(values)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.peers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="runs of each side (3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="one round, a third of the steps")
    parser.add_argument("--only", action="append", choices=TASKS, metavar="MODEL", help=", ".join(TASKS))
    parser.add_argument("--side", action="append", choices=SIDES, metavar="NAME", help=", ".join(SIDES))
    parser.add_argument("--kind", action="append", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--save", action="store_true", help="write the record to bench/results")
    options = parser.parse_args()
    options.only = options.only or list(TASKS)
    options.side = options.side or list(SIDES)
    options.kind = options.kind or list(KINDS)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.part = 1 / 3 if options.quick else 1.0
    return options


if __name__ == "__main__":
    main()
