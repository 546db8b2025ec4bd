"""Cost of the control plane: the coordinator per event, the gate per round, the simulator per run.

The coordinator is timed on the facts of a virtual run of 8 devices, fed to a new machine. The gate's two
meetings per round are compared with those of a `threading.Barrier`, which cannot lose a member.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter, thread_time

from bench.harness import Comparison, compare, options, report
from flowdp.device.process_tuning import SWITCH_INTERVAL_S
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.event_log import EventLog
from flowdp.machine.worker import WorkerMachine
from flowdp.options import CadenceOptions, Policy
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import Arrival
from flowdp.sim.world import VirtualRank, World
from flowdp.threads.gate import Gate
from tests.simulator.cluster import JudgedWorld
from tests.simulator.faults import draw

RANKS = 8
GATE_ROUNDS = 2_000
SEEDS = 200


def run_of(policy: Policy) -> World:
    """A run without faults on 8 unequal devices: 4,000 batches, rounds of about 10 steps of the slowest."""
    config = CoordinatorConfig(
        world_size=RANKS, batches=2_000, epochs=2, policy=policy, cadence=CadenceOptions(max_anchor=10)
    )
    ranks = [VirtualRank(WorkerMachine(rank), 10.0 + 2.0 * rank) for rank in range(RANKS)]
    world = World(Coordinator(config), GateState(RANKS), ranks, seed=0, sync_ms=0.5, noise=0.02, batch_size=8)
    world.run()
    return world


def coordinator_us(world: World, *, event_log: bool) -> float:
    """Processor time per fact in microseconds: the coordinator is one thread, so others do not count."""
    machine = Coordinator(world.coordinator.config)
    take = EventLog().take if event_log else None
    started = thread_time()
    for now_ms, fact in world.facts:
        commands = machine.handle(fact, now_ms)
        if take is not None:
            take(fact, now_ms, commands)
    return (thread_time() - started) * 1e6 / len(world.facts)


def in_threads(count: int, body: Callable[[int], None]) -> float:
    """Microseconds per round of `body` in `count` threads."""
    start = threading.Barrier(count + 1)

    def work(rank: int) -> None:
        start.wait()
        body(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    start.wait()
    started = perf_counter()
    for thread in threads:
        thread.join()
    return (perf_counter() - started) * 1e6 / GATE_ROUNDS


def gate_us(ranks: int) -> float:
    """Microseconds of a round at the gate: enter and finish."""
    gate = Gate(ranks)

    def body(rank: int) -> None:
        for round in range(GATE_ROUNDS):
            gate.enter(Arrival(rank, round, round * ranks, 1, 8))
            gate.finish(rank)

    return in_threads(ranks, body)


def barrier_us(ranks: int) -> float:
    """Microseconds of a round at a barrier: two meetings."""
    barrier = threading.Barrier(ranks)

    def body(_rank: int) -> None:
        for _ in range(GATE_ROUNDS):
            barrier.wait()
            barrier.wait()

    return in_threads(ranks, body)


def runs_per_s() -> float:
    """Virtual runs of random scenarios per second of one core."""
    started = thread_time()
    for seed in range(SEEDS):
        JudgedWorld(draw(seed)).run()
    return SEEDS / (thread_time() - started)


def main() -> None:
    arguments = options(__doc__, pairs=7).parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    figures: dict[str, float] = {}
    policies: tuple[Policy, ...] = ("sync", "cadence", "async")
    for policy in policies:
        world = run_of(policy)
        times = [coordinator_us(world, event_log=True) for _ in range(arguments.pairs)]
        figures[f"coordinator_{policy}_with_event_log_us"] = median(times)
        times = [coordinator_us(world, event_log=False) for _ in range(arguments.pairs)]
        figures[f"coordinator_{policy}_us"] = median(times)
        figures[f"coordinator_{policy}_facts_per_step"] = len(world.facts) / world.coordinator.global_step
    figures["simulator_runs_per_s"] = median(runs_per_s() for _ in range(arguments.pairs))
    results: list[Comparison] = []
    for ranks in (2, 4, 8):
        sides = {"barrier": lambda n=ranks: barrier_us(n), "gate": lambda n=ranks: gate_us(n)}
        result = compare(f"a round of {ranks}", sides, pairs=arguments.pairs)
        results.append(replace(result, unit="us"))
    report("machine", results, figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
