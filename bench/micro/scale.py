"""Scale on virtual time: the coordinator's processor time and the devices' efficiency, at 2 to 1,024 ranks.

The coordinator is timed on the facts of a virtual run, fed to a new machine; the gate on arrivals alone.
Efficiency is the throughput of a run over that of its devices alone, from `flowdp.simulate`: of the second
half of a run, as the difference of two runs, so that neither the first rounds nor the last one count.

    python -m bench.micro.scale --save    # measure, and write a record
    python -m bench.micro.scale --page    # table and picture of docs/performance.md, from the newest record
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from statistics import median
from time import thread_time
from typing import TYPE_CHECKING, Any, get_args

from bench.harness import RESULTS, ROOT, options, report
from flowdp import simulate
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import WorkerMachine
from flowdp.options import CadenceOptions, Policy
from flowdp.protocol.commands import RoundEnded
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import Arrival
from flowdp.sim.world import VirtualRank, World

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Cost",
    "Efficiency",
    "coordinator_costs",
    "efficiency",
    "figure",
    "newest",
    "tables",
    "write_page",
]

PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "scale.svg"
BEGIN, END = "<!-- scale:begin -->", "<!-- scale:end -->"

POLICIES: tuple[Policy, ...] = get_args(Policy)
COLORS: Mapping[Policy, str] = {"exact": "C0", "cadence": "C1", "async": "C2", "sync": "C4"}

BATCH = 32
STEP_MS = 10.0
"""Step of the fastest device."""

NOISE = 0.1

COST_RANKS = tuple(2**power for power in range(1, 11))
COST_STEPS = 40
"""Steps of a rank in a run whose facts are timed."""

REPLAYED_STEPS = 2_000
"""Runs of few ranks are replayed until they have so many steps of all ranks: one alone is over too soon."""

RANKS = (2, 16, 128, 1024)
STEPS: Mapping[Policy, int] = {"sync": 16, "exact": 40, "async": 32, "cadence": 96}
"""Steps of a rank in the shorter of two runs: as many as the policy needs to know the speeds; of few ranks
up to four times as many, since the last round weighs more there."""

MIXES: Mapping[str, Callable[[int], list[float]]] = {
    "equal": lambda ranks: [STEP_MS] * ranks,
    "1 : 2.5": lambda ranks: [STEP_MS * (2.5 if rank % 2 else 1.0) for rank in range(ranks)],
    "1 to 4": lambda ranks: [STEP_MS * 4 ** (rank / (ranks - 1)) for rank in range(ranks)],
}
"""Milliseconds per step of the devices; the last is geometric."""

AVERAGING: Mapping[str, Callable[[int], float]] = {
    "0": lambda _: 0.0,
    "10 %": lambda _: 0.1,
    "100 %": lambda _: 1.0,
    "10 % x log2": lambda ranks: 0.1 * log2(ranks),
}
"""Time of one averaging, as a part of a step of the fastest device."""


@dataclass(frozen=True)
class Cost:
    """Processor time of the coordinator in one run.

    Attributes:
        policy: Policy of the run.
        ranks: Ranks.
        steps: Steps of all ranks.
        facts: Facts that the coordinator took.
        rounds: Averagings.
        us_per_step: Processor time of a step of one rank.
        us_per_round: Processor time of a round of all ranks.
    """

    policy: Policy
    ranks: int
    steps: int
    facts: int
    rounds: int
    us_per_step: float
    us_per_round: float


@dataclass(frozen=True)
class Efficiency:
    """Throughput of a virtual run over that of its devices alone.

    Attributes:
        policy: Policy of the run.
        mix: Mix of speeds, of `MIXES`.
        averaging: Time of an averaging, of `AVERAGING`.
        ranks: Ranks.
        efficiency: The ratio.
    """

    policy: Policy
    mix: str
    averaging: str
    ranks: int
    efficiency: float


def virtual_run(policy: Policy, ranks: int, steps: int) -> World:
    """Run of devices of 1 to 4 times the step, about `steps` steps of each, rounds of 10 of the slowest."""
    is_exact = policy == "exact"
    config = CoordinatorConfig(
        world_size=ranks,
        batches=steps if is_exact else steps * ranks,
        epochs=1,
        policy=policy,
        cadence=CadenceOptions(max_anchor=10),
        global_batch=GlobalBatch(BATCH * ranks, BATCH * ranks * steps) if is_exact else None,
    )
    devices = [VirtualRank(WorkerMachine(rank), ms) for rank, ms in enumerate(MIXES["1 to 4"](ranks))]
    world = World(
        Coordinator(config), GateState(ranks), devices, seed=0, sync_ms=0.5, noise=NOISE, batch_size=BATCH
    )
    world.run()
    return world


def replay_s(world: World) -> float:
    """Processor time of a new coordinator for the facts of a run, in seconds."""
    machine = Coordinator(world.coordinator.config)
    started = thread_time()
    for now_ms, fact in world.facts:
        machine.handle(fact, now_ms)
    return thread_time() - started


def coordinator_costs(
    ranks: Sequence[int], repeats: int, policies: Sequence[Policy] = POLICIES, steps: int = COST_STEPS
) -> list[Cost]:
    """Time the coordinator on a run of each policy and number of ranks.

    All are timed in turns, and the least of `repeats` turns counts: what else the machine does only adds.
    """
    worlds = {(policy, count): virtual_run(policy, count, steps) for count in ranks for policy in policies}
    # A run of the engine does not keep its facts: the collector shall not look at them either.
    gc.collect()
    gc.freeze()
    least = dict.fromkeys(worlds, math.inf)
    for _ in range(repeats):
        for key, world in worlds.items():
            times = [replay_s(world) for _ in range(max(1, REPLAYED_STEPS // (steps * key[1])))]
            least[key] = min(least[key], median(times))
    gc.unfreeze()
    costs = []
    for (policy, count), world in worlds.items():
        records = [record for record in world.records if isinstance(record, RoundEnded)]
        taken = sum(sum(record.steps) for record in records)
        rounds = sum(record.rounds for record in records)
        us = 1e6 * least[policy, count]
        costs.append(Cost(policy, count, taken, len(world.facts), rounds, us / taken, us / rounds))
    return costs


def gate_us(ranks: int, repeats: int) -> float:
    """Processor time of the gate's machine per arrival, the decision of the last one among them."""
    gate, times = GateState(ranks), []
    for round in range(max(10 * repeats, REPLAYED_STEPS // ranks)):
        arrivals = [Arrival(rank, round, round * ranks, 1, BATCH) for rank in range(ranks)]
        started = thread_time()
        for arrival in arrivals:
            gate.enter(arrival)
        times.append(thread_time() - started)
    return 1e6 * min(times) / ranks


def efficiency(policy: Policy, mix: str, averaging: str, ranks: int, steps: int | None = None) -> Efficiency:
    """Throughput in the second half of a run of `2 * steps` steps a rank over that of its devices alone."""
    speeds = MIXES[mix](ranks)
    sync_ms = STEP_MS * AVERAGING[averaging](ranks)
    steps = STEPS[policy] * min(4, max(1, 256 // ranks)) if steps is None else steps
    half, whole = (
        simulate(
            speeds,
            sync_ms=sync_ms,
            policy=policy,
            per_device_batch_size=BATCH,
            batches=count * ranks,
            noise=NOISE,
        )
        for count in (steps, 2 * steps)
    )
    alone = sum(1.0 / ms for ms in speeds)
    found = steps * ranks / (whole.wall_ms - half.wall_ms) / alone
    return Efficiency(policy, mix, averaging, ranks, found)


# ------------------------------------------------------------------ the page
Record = Mapping[str, Any]


def newest(folder: Path = RESULTS) -> Record:
    """The record that was written last."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("scale_*.json")]
    return max(records, key=lambda record: (record["date"], record["ended"]))


def tables(record: Record) -> str:
    """Processor time of the coordinator, and efficiency, in Markdown."""
    costs = {(one["policy"], one["ranks"]): one for one in record["costs"]}
    shown = [ranks for ranks in (2, 8, 64, 1024) if (POLICIES[0], ranks) in costs]
    parts = [
        f"`python -m bench.micro.scale`, {record['date']}, {record['commit']}, {record['machine']['cpu']}.",
        "",
        "Processor time of the coordinator for a step of one rank, and for a round of all, in microseconds:",
        "",
        _row(["ranks", *(f"{ranks:,}" for ranks in shown), *(f"{ranks:,}, a round" for ranks in shown)]),
        _row(["---"] * (1 + 2 * len(shown))),
    ]
    for policy in POLICIES:
        line = [costs[policy, ranks] for ranks in shown]
        steps = [f"{one['us_per_step']:.1f}" for one in line]
        parts.append(_row([policy, *steps, *(f"{one['us_per_round']:,.0f}" for one in line)]))
    found = {
        (one["policy"], one["mix"], one["averaging"], one["ranks"]): one["efficiency"]
        for one in record["efficiencies"]
    }
    ends = sorted({ranks for *_, ranks in found})[:: max(1, len({ranks for *_, ranks in found}) - 1)]
    parts += ["", "Efficiency, by the time of an averaging as a part of a step:", ""]
    parts.append(
        _row(["policy", "averaging", *(f"{mix}: {ranks:,} ranks" for mix in MIXES for ranks in ends)])
    )
    parts.append(_row(["---"] * (2 + len(MIXES) * len(ends))))
    for policy in POLICIES:
        for averaging in AVERAGING:
            cells = [found[policy, mix, averaging, ranks] for mix in MIXES for ranks in ends]
            parts.append(_row([policy, averaging, *(f"{value:.2f}" for value in cells)]))
    return "\n".join(parts)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figure(record: Record) -> Figure:
    """Processor time of the coordinator over the ranks, and efficiency over them for each mix."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 3.4), layout="constrained")
    drawn.patch.set_facecolor("white")  # also readable on a dark page
    first, *others = drawn.subplots(1, 1 + len(MIXES))
    for policy, color in COLORS.items():
        line = [one for one in record["costs"] if one["policy"] == policy]
        first.plot(
            [one["ranks"] for one in line], [one["us_per_step"] for one in line], color=color, label=policy
        )
    first.set_ylim(0, None)
    first.set_title("coordinator, us per step of a rank", fontsize=9)
    first.legend(fontsize=7)
    for axes, mix in zip(others, MIXES, strict=True):
        for averaging, style in (("10 %", "-"), ("10 % x log2", "--"), ("100 %", ":")):
            for policy, color in COLORS.items():
                line = [
                    one
                    for one in record["efficiencies"]
                    if (one["policy"], one["mix"], one["averaging"]) == (policy, mix, averaging)
                ]
                label = averaging if policy == "exact" else None
                x, y = [one["ranks"] for one in line], [one["efficiency"] for one in line]
                axes.plot(x, y, style, color=color, label=label)
        axes.set_ylim(0, 1.05)
        axes.set_title(f"efficiency, speeds {mix}", fontsize=9)
    others[-1].legend(fontsize=7, title="averaging / step", title_fontsize=7, labelcolor="black")
    for axes in drawn.axes:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks", fontsize=8)
        axes.tick_params(labelsize=7)
    return drawn


def write_page(record: Record) -> None:
    """Put the tables into the page, and draw the picture."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "flowdp"
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{tables(record)}\n{END}{tail}", encoding="utf-8")
    title = f"scale, {record['date']}, {record['commit']}"
    figure(record).savefig(PICTURE, metadata={"Date": None, "Title": title})


def main() -> None:
    parser = options(__doc__, pairs=3)
    parser.add_argument("--quick", action="store_true", help="few ranks and one averaging time")
    parser.add_argument("--costs", action="store_true", help="efficiencies as in the newest record")
    parser.add_argument(
        "--page", action="store_true", help="write docs/performance.md from the newest record"
    )
    arguments = parser.parse_args()
    if arguments.page:
        write_page(newest())
        return
    gc.disable()
    started = thread_time()
    # On virtual time, which is the same on each machine.
    found = list(newest()["efficiencies"]) if arguments.costs else []
    figures: dict[str, float] = {}
    timed = COST_RANKS[:6] if arguments.quick else COST_RANKS
    costs = coordinator_costs(timed, arguments.pairs)
    for cost in costs:
        figures[f"{cost.policy}_{cost.ranks}_us_per_step"] = cost.us_per_step
        figures[f"{cost.policy}_{cost.ranks}_us_per_round"] = cost.us_per_round
    for ranks in timed:
        figures[f"gate_{ranks}_us_per_arrival"] = gate_us(ranks, arguments.pairs)
    for mix in () if arguments.costs else MIXES:
        for averaging in ("10 %",) if arguments.quick else AVERAGING:
            for policy in POLICIES:
                for ranks in RANKS[:2] if arguments.quick else RANKS:
                    one = efficiency(policy, mix, averaging, ranks)
                    gc.collect()
                    found.append(asdict(one))
                    print(f"{policy} {mix} averaging {averaging} ranks {ranks}  {one.efficiency:.3f}")
    figures["bench_s"] = thread_time() - started
    more = {"ended": time.time(), "costs": [asdict(cost) for cost in costs], "efficiencies": found}
    report("scale", [], figures=figures, save=arguments.save, more=more)


if __name__ == "__main__":
    main()
