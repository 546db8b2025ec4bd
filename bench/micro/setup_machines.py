"""`setup` on two processes against torch's DistributedDataParallel on the same two, by gloo.

Each process has one CPU device and one thread, and batches of its own; both sides run the same loop. The
ratio is DDP's time of a step over flowdp's. `wide mlp` has 2 million parameters and a batch of 8: its step is
little more than the sum of gradients.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
import torch.multiprocessing as spawning
from torch import nn

import flowdp
from bench.harness import compare, options, report, step_ms
from bench.models import MODELS, classify, images
from flowdp.device.process_tuning import keep_freed_memory

PROCESSES = 2
SAMPLES = 1_024


def wide_mlp() -> nn.Module:
    layers = nn.Flatten(), nn.Linear(784, 1_024), nn.ReLU(), nn.Linear(1_024, 1_024), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(1_024, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "mlp": (*MODELS["mlp"], 100),
    "cnn": (*MODELS["cnn"], 20),
    "wide mlp": (wide_mlp, 8, 20),
}
"""Name -> (factory, batch size of a process, steps of a measurement)."""


def loop_ms(name: str, *, is_setup: bool) -> float:
    """Milliseconds per step of the loop on this process, with the other one."""
    make, batch_size, steps = CASES[name]
    torch.manual_seed(0)
    module = make()
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    x, y = (one[dist.get_rank() :: PROCESSES] for one in images(SAMPLES))
    batches = cycle(list(zip(x.split(batch_size), y.split(batch_size), strict=True)))
    call: flowdp.DataParallel | nn.parallel.DistributedDataParallel
    if is_setup:
        call = flowdp.setup(module, optimizer, devices=["cpu"], progress=False)
    else:
        call = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)

    def step() -> None:
        classify(call, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    dist.barrier()
    took_ms = step_ms(step, steps=steps, warmup=10)
    dist.barrier()
    if isinstance(call, flowdp.DataParallel):
        call.close()
    return took_ms


def work(rank: int, port: int, pairs: int, save: bool) -> None:
    """One of the processes; the first reports."""
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    results = [
        compare(  # in the same order in both processes: it follows from a seed
            name,
            {
                "ddp": partial(loop_ms, name, is_setup=False),
                "setup": partial(loop_ms, name, is_setup=True),
            },
            pairs=pairs,
        )
        for name in CASES
    ]
    if rank == 0:
        report("setup_machines", results, save=save)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


def main() -> None:
    parser = options(__doc__, pairs=15)
    parser.add_argument("--quick", action="store_true", help="few pairs")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pairs = 5 if arguments.quick else arguments.pairs
    spawning.spawn(work, (port, pairs, arguments.save), nprocs=PROCESSES)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
