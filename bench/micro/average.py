"""Cost of averaging two replicas in one process, and against gloo between two processes.

Three ratios for each model size, in pairs that take turns:

- gloo / mean: `torch.distributed.all_reduce` of one flat float32 buffer between two processes, over the mean
  of two replicas in two threads: check for moved tensors, meet at the gate, reduce a part each, meet again;
- mean / memory: over the same two meetings with, between them, each thread multiplying its replica by 1.0 in
  place: every byte of both replicas is read once and written once;
- drift / mean: the mean that also measures each replica's distance from it, over the mean alone.

One torch thread per thread and process; times are medians over the rounds of a turn, seen by rank 0 from the
start of a round to its end.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn

from bench.harness import Comparison, compare, options, report
from flowdp.collective.host import HostMean
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.process_tuning import tuned_process
from flowdp.device.streams import open_lanes
from flowdp.options import ProcessTuning
from flowdp.protocol.messages import Arrival, Outcome
from flowdp.threads.gate import Gate

CASES = ((100_000, 5), (100_000, 20), (1_000_000, 5), (25_000_000, 5))
"""(float32 parameters, number of tensors)."""

SAMPLES = (320, 192)
Measured = Callable[[int], float]


def round_ms(parameters: int, one_round: Callable[[int], object]) -> float:
    """Median time of a round on this thread, after two for the warm-up."""
    times = []
    for number in range(8 if parameters > 10_000_000 else 40):
        start = perf_counter()
        one_round(number)
        times.append((perf_counter() - start) * 1e3)
    return median(times[2:])


def in_two_threads(parameters: int, one_round: Callable[[int, int], object]) -> float:
    """Measure `one_round(rank, number)` in two threads at once; returns rank 0's time."""
    seen = [0.0, 0.0]

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        seen[rank] = round_ms(parameters, partial(one_round, rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen[0]


def two_replicas(parameters: int, tensors: int) -> list[FlatReplica]:
    length = parameters // tensors
    modules = [nn.ParameterList([torch.randn(length) for _ in range(tensors)]) for _ in (0, 1)]
    return [FlatReplica(module, rank) for rank, module in enumerate(modules)]


def arrive(gate: Gate, rank: int, number: int, drift: bool = False) -> Outcome:
    arrival = Arrival(rank, round=number, global_step=2 * number, steps=1, samples=SAMPLES[rank], drift=drift)
    return gate.enter(arrival)


def mean(parameters: int, replicas: list[FlatReplica], drift: bool) -> float:
    local = HostMean(replicas, open_lanes([torch.device("cpu")] * 2), lambda rank: gate.finish(rank))
    gate = Gate(2, local.launch)

    def one_round(rank: int, number: int) -> None:
        local.prepare(rank)
        local.average(rank, arrive(gate, rank, number, drift))()

    return in_two_threads(parameters, one_round)


def memory(parameters: int, replicas: list[FlatReplica]) -> float:
    gate = Gate(2)

    def one_round(rank: int, number: int) -> None:
        arrive(gate, rank, number)
        for own in replicas[rank].memories:
            own.mul_(1.0)
        gate.finish(rank)

    return in_two_threads(parameters, one_round)


def all_reduce(buffer: torch.Tensor, _number: int) -> None:
    dist.all_reduce(buffer)


def gloo_process(rank: int, store: str, orders: Connection) -> None:
    """Body of a gloo process: receives numbers of parameters, sends times of a round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    while parameters := orders.recv():
        buffer = torch.randn(parameters)
        orders.send(round_ms(parameters, partial(all_reduce, buffer)))
    dist.destroy_process_group()


@contextmanager
def gloo() -> Iterator[Measured]:
    """Two processes that wait on pipes for their next measurement, without using a core."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in (0, 1)]
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=gloo_process, args=(rank, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()

        def measured(parameters: int) -> float:
            for ours, _ in pipes:
                ours.send(parameters)
            seen: list[float] = [ours.recv() for ours, _ in pipes]
            return seen[0]

        yield measured
        for ours, _ in pipes:
            ours.send(0)
        for process in processes:
            process.join()


def measure(parameters: int, tensors: int, two_processes: Measured, pairs: int) -> list[Comparison]:
    """The three ratios for one model size."""
    replicas = two_replicas(parameters, tensors)
    bare = partial(mean, parameters, replicas, False)
    label = f"{parameters / 1e6:g} M in {tensors}"
    return [
        compare(label, {"gloo": partial(two_processes, parameters), "mean": bare}, pairs=pairs),
        compare(label, {"mean": bare, "memory": partial(memory, parameters, replicas)}, pairs=pairs),
        compare(label, {"drift": partial(mean, parameters, replicas, True), "mean": bare}, pairs=pairs),
    ]


def main() -> None:
    parser = options(__doc__, pairs=15)
    parser.add_argument("--quick", action="store_true", help="three pairs")
    arguments = parser.parse_args()
    pairs = 3 if arguments.quick else arguments.pairs
    torch.set_num_threads(1)
    with tuned_process(ProcessTuning()), gloo() as two_processes:
        results = [result for case in CASES for result in measure(*case, two_processes, pairs)]
    report("average", results, save=arguments.save)


if __name__ == "__main__":
    main()
