"""Training of two machines with a slow link between them, beside torch's DistributedDataParallel.

::

    python -m bench.machines.slow_link --save
    python -m bench.machines.slow_link --repeats 1 --sides DDP "cadence H=50, overlap"

Each machine is a process in a network namespace of its own, with one CPU device of one thread. By default a
packet is 5 ms on the way, so a round trip takes 10 ms, and the link has 100 Mbit/s, each way. A figure is the
samples that both began in the later part of a measurement, in a second of the wall clock. Needs Linux, root.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from bench.harness import RESULTS, ROOT, commit, machine
from bench.machines.link import DEVICE, SlowLink
from bench.machines.sides import BATCH, SIDES, WARM

__all__ = ["main", "rate", "summary"]

LONGEST_S = 120.0  # beyond the training itself; ends only a measurement that hangs
PORT = 29_511


def rate(steps: Sequence[Sequence[float]]) -> float:
    """Samples per second of all machines together, in the part of the time that counts.

    Args:
        steps: Times of each machine's steps, on one clock. Shape (machines, steps).
    """
    first, last = max(one[0] for one in steps), min(one[-1] for one in steps)
    start = first + WARM * (last - first)
    return BATCH * sum(start <= at < last for one in steps for at in one) / (last - start)


def measure(link: SlowLink, side: str, seconds: float, under: Sequence[str]) -> dict[str, Any]:
    """Train on both machines once.

    Raises:
        RuntimeError: A machine failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, str(end)) for end in (0, 1)]
        alone = side == "alone"
        running = []
        try:
            for end, file in enumerate(files):
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                environment |= {"RANK": str(end), "WORLD_SIZE": "1" if alone else "2"}
                environment |= {"MASTER_ADDR": link.addresses[0], "MASTER_PORT": str(PORT)}
                environment |= {"GLOO_SOCKET_IFNAME": DEVICE}
                command = [sys.executable, "-m", "bench.machines.sides", side, str(seconds), str(file)]
                running.append(
                    subprocess.Popen(
                        link.command(end, [*under, *command]), env=environment, start_new_session=True
                    )
                )
            for process in running:
                if process.wait(LONGEST_S + seconds):
                    raise RuntimeError(f"{side}: a machine ended with status {process.returncode}")
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    steps = [one.pop("steps") for one in found]
    return {"samples_per_s": rate(steps), "steps": [len(one) for one in steps], **found[0]}


def summary(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians of each side, and how many times DDP's, where that was measured."""
    medians = {side: median(row["samples_per_s"] for row in each) for side, each in rows.items()}
    base, most = medians.get("DDP"), medians.get("alone")
    return {
        side: {
            "samples_per_s": value,
            "times_ddp": base and value / base,
            "of_alone": most and value / most,
            "runs": [row["samples_per_s"] for row in rows[side]],
        }
        for side, value in medians.items()
    }


def table(result: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each side."""
    lines = [f"{'':<30}{'samples/s':>12}{'times DDP':>12}{'of alone':>12}   lowest to highest"]
    for side, row in result.items():
        times = "" if row["times_ddp"] is None else f"{row['times_ddp']:.1f}"
        part = "" if row["of_alone"] is None else f"{100 * row['of_alone']:.0f} %"
        low, high = min(row["runs"]), max(row["runs"])
        lines.append(
            f"{side:<30}{row['samples_per_s']:>12,.0f}{times:>12}{part:>12}   {low:,.0f} to {high:,.0f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each side (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a measurement (%(default)s)")
    parser.add_argument(
        "--delay-ms", type=float, default=5.0, help="time of a packet on the way (%(default)s)"
    )
    parser.add_argument("--megabits", type=float, default=100.0, help="rate of the link (%(default)s)")
    parser.add_argument(
        "--lock", default="", help="command before each measurement, and until its end, as `flock FILE`"
    )
    parser.add_argument("--save", action="store_true", help="write the record to bench/results")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _leave)
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in given.sides}
    with SlowLink(given.delay_ms, given.megabits) as link:
        for number in range(given.repeats):
            # In turn, so that a slow phase of the host meets all sides.
            for side in given.sides if number % 2 == 0 else reversed(given.sides):
                with _Held(shlex.split(given.lock)):
                    rows[side].append(measure(link, side, given.seconds, ()))
                print(f"{side}: {json.dumps(rows[side][-1])}", flush=True)
    result = summary(rows)
    print(table(result))
    if given.save:
        path = RESULTS / f"machines_{datetime.date.today().isoformat()}_{commit()}.json"
        link_facts = {"delay_ms": given.delay_ms, "megabits": given.megabits, "seconds": given.seconds}
        record = {"name": "machines", "date": datetime.date.today().isoformat(), "commit": commit()}
        content = {**record, "machine": machine(), "link": link_facts, "results": result, "runs": rows}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"saved {path.name}")
    return 0


class _Held:
    """A lock of the host that another command holds, while measurements of others would disturb."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def __enter__(self) -> None:
        self._process = None
        if self._command:
            self._process = subprocess.Popen(
                [*self._command, "sh", "-c", "echo held; read over"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self._process.stdout is not None
            self._process.stdout.readline()

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            self._process.communicate(b"\n")


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit("ended by SIGTERM")


if __name__ == "__main__":
    sys.exit(main())
