"""Machines on virtual time: efficiency by the rounds between two means of all, at 2 to 1,024 machines.

Each machine has one device of 50 ms a step, rounds of two steps, and a link of 1 Gbit/s with 0.5 ms of
latency; the model has 25 MB. Efficiency is the throughput of a run over that of its machines alone, from
`flowdp.simulate`: of the second half of a run, as the difference of two runs, so that neither the first
rounds nor the last one count.

    python -m bench.micro.scale_machines --save    # all, and write a record: some minutes
    python -m bench.micro.scale_machines --quick   # 2 and 8 machines
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from bench.harness import options, report
from flowdp import simulate
from flowdp.options import CadenceOptions, MachineOptions

__all__ = ["Point", "point"]

MACHINES = (2, 8, 64, 1024)
ROUNDS = (1, 10, 50, 100)
STEP_MS = 50.0
ANCHOR = 2
NOISE = 0.1
MODEL_MB = 25.0


@dataclass(frozen=True)
class Point:
    """One cell of the table.

    Attributes:
        machines: Machines.
        rounds: Rounds from one mean of all machines to the next.
        overlap: They train while it travels.
        efficiency: Throughput over that of the machines alone.
        mean_ms: Time of one mean of all machines.
        mbit: What each machine sends, in Mbit/s, on average over the longer run; it receives as much.
        wall_s: Time that the two virtual runs took.
    """

    machines: int
    rounds: int
    overlap: bool
    efficiency: float
    mean_ms: float
    mbit: float
    wall_s: float


def point(machines: int, rounds: int, *, overlap: bool) -> Point:
    """Throughput of the second half of a run over that of its machines alone."""
    # Few machines hold more means of all: the noise of one weighs more there.
    steps = ANCHOR * rounds * min(8, max(1, 64 // machines))
    started = time.perf_counter()
    half, whole = (
        simulate(
            [STEP_MS],
            machines=machines,
            machine_options=MachineOptions(rounds=rounds, overlap=overlap),
            cadence=CadenceOptions(anchor=ANCHOR, max_anchor=ANCHOR),
            batches=machines * (ANCHOR + count),
            noise=NOISE,
            model_mb=MODEL_MB,
        )
        for count in (steps, 2 * steps)
    )
    wall_s = time.perf_counter() - started
    found = steps * STEP_MS / (whole.wall_ms - half.wall_ms)
    return Point(machines, rounds, overlap, found, whole.mean_ms, 8e-6 * whole.bytes_per_s, wall_s)


def main() -> None:
    parser = options(__doc__, pairs=1)
    parser.add_argument("--quick", action="store_true", help="2 and 8 machines")
    arguments = parser.parse_args()
    found = []
    for machines in MACHINES[:2] if arguments.quick else MACHINES:
        for overlap in (False, True):
            for rounds in ROUNDS:
                one = point(machines, rounds, overlap=overlap)
                found.append(asdict(one))
                print(
                    f"{machines:>5} machines, {rounds:>3} rounds, overlap {overlap!s:<5}  "
                    f"{one.efficiency:.3f}  {one.mbit:6.1f} Mbit/s  {one.wall_s:6.1f} s",
                    flush=True,
                )
    figures = {
        f"{one['machines']}_{one['rounds']}_{'overlap' if one['overlap'] else 'waits'}": one["efficiency"]
        for one in found
    }
    report("machines_scale", [], figures=figures, save=arguments.save, more={"points": found})


if __name__ == "__main__":
    main()
