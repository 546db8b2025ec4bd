"""One machine of a measurement on the slow link: it trains, and notes the time of each step.

A process of its own, `python -m bench.machines.sides SIDE SECONDS FILE`, with the variables of torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import flowdp

__all__ = ["BATCH", "SIDES", "WARM", "cadences"]

SAMPLES, INPUTS, CLASSES, BATCH = 131_072, 512, 10, 64
"""Data of each machine, in which fifty rounds have room, and samples of a step of one device."""

WARM = 0.3
"""Part of a measurement before its figures count: the cadence is found in it."""


def cadences() -> list[str]:
    """Names of the sides with several steps between two means of all machines."""
    return [
        f"cadence H={rounds}{', overlap' if overlap else ''}{', bf16' if payload == 'bf16' else ''}"
        for rounds in (1, 10, 50)
        for overlap in (False, True)
        for payload in ("full", "bf16")
    ]


SIDES = ("alone", "DDP", "DDP, fp16", "exact", "exact, bf16", "sync", "sync, bf16", *cadences())
"""Ways to train. "alone": both machines at once, each for itself: what the two can do without a link."""


def network() -> nn.Module:
    """A perceptron of 1.1 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, CLASSES)
    )


def data() -> tuple[Tensor, Tensor]:
    """Samples with the classes that a random network gives them."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, INPUTS, generator=draw)
    teacher = torch.randn(INPUTS, CLASSES, generator=draw)
    return x, (x @ teacher).argmax(1)


def optimizer(params: Any, steps: list[float]) -> torch.optim.Optimizer:
    """The optimizer of all sides, which notes the time of each of its steps.

    A loss would not do: exact calls it more often, as it checks at times that parts of a batch add up.
    """
    made = torch.optim.SGD(params, lr=0.05)
    made.register_step_pre_hook(lambda *_: steps.append(perf_counter()))
    return made


def options(side: str) -> Mapping[str, Any]:
    """Arguments of a Trainer."""
    payload: Literal["full", "bf16"] = "bf16" if side.endswith("bf16") else "full"
    if not side.startswith("cadence"):
        if side == "alone":
            return {"policy": "exact", "machines": False, "batch_size": BATCH}
        machines = flowdp.MachineOptions(payload=payload)
        return {"policy": side.split(",")[0], "machines": machines, "batch_size": 2 * BATCH}
    rounds = int(side.split("H=")[1].split(",")[0])
    machines = flowdp.MachineOptions(rounds=rounds, overlap="overlap" in side, payload=payload)
    return {"policy": "cadence", "machines": machines, "batch_size": 2 * BATCH}


def train(side: str, seconds: float) -> tuple[list[float], dict[str, Any]]:
    """Train for so long; returns the times of the optimizer's steps, and facts of the run."""
    steps: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    run = flowdp.Trainer(
        network(),
        lambda params: optimizer(params, steps),
        loss,
        dataset=data(),
        max_time=seconds,
        devices=["cpu"],
        progress=False,
        **options(side),
    ).start()
    run.join()
    last = run.history[-1] if run.history else None
    return steps, {
        "loss": last and last.loss,
        "anchor": last and last.anchor,
        "problems": run.status().problems,
    }


def train_ddp(side: str, seconds: float) -> tuple[list[float], dict[str, Any]]:
    """Train as torch's DistributedDataParallel does, for so long."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(network())
    if side.endswith("fp16"):  # torch's hook for bfloat16 needs NCCL
        model.register_comm_hook(None, fp16_compress_hook)
    x, y = data()
    steps: list[float] = []
    chosen = optimizer(model.parameters(), steps)
    end = perf_counter() + seconds
    losses: list[float] = []
    draw = torch.Generator().manual_seed(dist.get_rank())
    going = torch.ones(1)
    while True:
        indices = torch.randint(SAMPLES, (BATCH,), generator=draw)
        loss = F.cross_entropy(model(x[indices]), y[indices])
        chosen.zero_grad()
        loss.backward()
        chosen.step()
        losses.append(loss.item())
        if len(steps) % 10 == 0:  # all end in the same step, and this costs a tenth of a round trip
            going.fill_(float(perf_counter() < end))
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
            if not going.item():
                break
    dist.destroy_process_group()
    return steps, {"loss": sum(losses[-20:]) / len(losses[-20:])}


def main(side: str, seconds: float, file: Path) -> None:
    """Train, and write the record of this machine."""
    torch.set_num_threads(1)
    steps, facts = (train_ddp if side.startswith("DDP") else train)(side, seconds)
    file.write_text(json.dumps({"steps": steps, **facts}), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the other machine may be gone, and gloo's threads with it


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
