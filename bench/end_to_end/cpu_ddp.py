"""Two CPU replicas in one process against torch DistributedDataParallel with gloo in two.

Same model, data, batch, optimizer and allocator setting, one OpenMP thread per replica on both sides. flowdp
runs with K = 1 (`policy="sync"`: a mean after every step, like DDP) and with the cadence. Samples per second,
without the start-up: the clock runs from a step of the warm-up to the last step.
"""

from __future__ import annotations

import os
import socket
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flowdp
from bench.harness import compare, options, report
from bench.models import MODELS, Batch, classify, images
from flowdp.device.openmp import pause_openmp
from flowdp.device.process_tuning import keep_freed_memory
from flowdp.options import Policy

WORLD_SIZE = 2
POLICIES: dict[str, Policy] = {"K = 1": "sync", "cadence": "cadence"}
WARM_UP = 20  # steps of each replica


def flowdp_rate(name: str, steps: int, policy: Policy) -> float:
    """Samples per second of flowdp, both replicas together."""
    make, batch_size = MODELS[name]
    total = (steps + WARM_UP) * WORLD_SIZE
    run = flowdp.Trainer(
        model=make(),
        optimizer=lambda params: torch.optim.Adam(params, fused=True),
        loss=classify,
        dataset=images(batch_size * 200),
        batch_size=batch_size,
        max_steps=total,
        devices=["cpu"] * WORLD_SIZE,
        policy=policy,
        progress=False,
    ).start()
    with run:
        records = list(run.metrics("round"))
    warm = next(i for i, record in enumerate(records) if record.global_step >= WARM_UP * WORLD_SIZE)
    timed = records[warm + 1 :]
    return sum(sum(r.samples) for r in timed) / sum(r.wall_ms for r in timed) * 1e3


def ddp_rate(name: str, steps: int) -> float:
    """Samples per second of DistributedDataParallel, both processes together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=_ddp, args=(r, name, steps, port, queue)) for r in range(WORLD_SIZE)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return float(queue.get())


def _ddp(rank: int, name: str, steps: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    make, batch_size = MODELS[name]
    data = images(batch_size * 200)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    done, start = 0, 0.0
    while done < steps + WARM_UP:
        order = torch.randperm(len(data[1]))[rank::WORLD_SIZE]
        for index in order.split(batch_size):
            if done == WARM_UP:
                dist.barrier()
                start = perf_counter()
            batch: Batch = (data[0][index], data[1][index])
            loss = classify(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            done += 1
            if done == steps + WARM_UP:
                break
    dist.barrier()
    if rank == 0:
        queue.put(steps * batch_size * WORLD_SIZE / (perf_counter() - start))
    del model  # before init_process_group: gloo aborts otherwise
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = options(__doc__, pairs=5)
    parser.add_argument("--model", action="append", choices=MODELS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pause_openmp()
    results = []
    for name, steps in (("mlp", 1500), ("cnn", 250), ("wide cnn", 150)):
        if arguments.model and name not in arguments.model:
            continue
        results += [
            compare(
                f"{name}, {label}",
                {
                    "flowdp": partial(flowdp_rate, name, steps, policy),
                    "DDP gloo": partial(ddp_rate, name, steps),
                },
                pairs=arguments.pairs,
                unit="samples/s",
            )
            for label, policy in POLICIES.items()
        ]
    report("cpu_ddp", results, save=arguments.save)


if __name__ == "__main__":
    main()
