"""Gradients averaged in buckets during backward, against after it, and against torch's DDP with gloo.

- overlapped / DDP gloo, overlapped / synchronous: samples per second of an MLP of 25 million parameters, two
  ranks: threads of one process in `local_groups`, and two processes under DDP. Same model, data,
  batch, optimizer and allocator setting, one torch thread per rank. On a CPU no core is idle while backward
  runs, so overlapping gains only the time that one rank would wait for the other.
- parameter / buckets: the time to average existing gradients, one call per parameter against one per bucket
  with the copies into it, in two threads: few large tensors, and many small ones.
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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import flowdp.ddp.distributed
from bench.harness import Comparison, compare, options, report, step_ms
from flowdp.collective.local_group import local_groups
from flowdp.collective.process_group import ProcessGroup
from flowdp.ddp.synchronizer import GradientSynchronizer, Strategy
from flowdp.device.process_tuning import keep_freed_memory, tuned_process
from flowdp.options import ProcessTuning

WORLD_SIZE = 2
WIDTH = 2240
DEPTH = 5
BATCH = 32
STEPS = 6
TENSORS = ((25_000_000, 10), (1_000_000, 160))
"""(float32 parameters, number of tensors)."""

Measured = Callable[[], float]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def rate(model: nn.Module, rank: int, meet: Callable[[], object]) -> float:
    """Samples per second of all ranks together, as seen by one of them."""
    x: Tensor = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    meet()
    return BATCH * WORLD_SIZE / step_ms(step, steps=STEPS, warmup=2) * 1e3


def in_threads(work: Callable[[int, ProcessGroup], float]) -> float:
    """Run both ranks in threads; returns rank 0's measurement."""
    groups = local_groups(["cpu"] * WORLD_SIZE)
    seen = [0.0] * WORLD_SIZE

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        seen[rank] = work(rank, groups[rank])

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(WORLD_SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen[0]


def ours(strategy: Strategy) -> float:
    def work(rank: int, group: ProcessGroup) -> float:
        model = flowdp.ddp.distributed.DistributedDataParallel(mlp(), group, strategy=strategy)
        return rate(model, rank, group.barrier)

    return in_threads(work)


def averaging_ms(parameters: int, tensors: int, *, is_bucketed: bool) -> float:
    def work(_rank: int, group: ProcessGroup) -> float:
        own = [nn.Parameter(torch.zeros(parameters // tensors)) for _ in range(tensors)]
        made = [torch.ones_like(parameter) for parameter in own]
        synchronizer = GradientSynchronizer(own, group, automatic=False)

        def average() -> None:
            for parameter, gradient in zip(own, made, strict=True):
                parameter.grad = gradient  # as backward leaves it after `zero_grad()`: not in a bucket yet
            if is_bucketed:
                synchronizer.sync_all()
                return
            works = [group.all_reduce(gradient, async_op=True) for gradient in made]
            for each in works:
                each.wait()

        return step_ms(average, steps=20)

    return in_threads(work)


def ddp_process(rank: int, store: str, orders: Connection) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    while orders.recv():
        model = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
        orders.send(rate(model, rank, dist.barrier))
        del model
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def ddp() -> Iterator[Measured]:
    """Two processes that wait on pipes for their next measurement, without using a core."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(WORLD_SIZE)]
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=ddp_process, args=(rank, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()

        def measured() -> float:
            for here, _ in pipes:
                here.send(True)
            seen: list[float] = [here.recv() for here, _ in pipes]
            return seen[0]

        yield measured
        for here, _ in pipes:
            here.send(False)
        for process in processes:
            process.join()


def main() -> None:
    parser = options(__doc__, pairs=9)
    arguments = parser.parse_args()
    pairs = arguments.pairs
    torch.set_num_threads(1)
    results: list[Comparison] = []
    with tuned_process(ProcessTuning()), ddp() as two_processes:
        overlapped = partial(ours, "overlapped")
        for name, other in (("DDP gloo", two_processes), ("synchronous", partial(ours, "synchronous"))):
            sides: dict[str, Measured] = {"overlapped": overlapped, name: other}
            results.append(compare("MLP of 25 M", sides, pairs=pairs, unit="samples/s"))
        for case in TENSORS:
            label = f"{case[0] / 1e6:g} M in {case[1]}"
            sides = {
                "parameter": partial(averaging_ms, *case, is_bucketed=False),
                "buckets": partial(averaging_ms, *case, is_bucketed=True),
            }
            results.append(compare(label, sides, pairs=pairs))
    report("buckets", results, save=arguments.save)


if __name__ == "__main__":
    main()
