"""Requests from one machine, which all machines obey, and errors on one machine, which end all.

Run as a script with an act and a machine: that machine does it in the middle of the training.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flowdp
from tests.limits import HANG_S
from tests.machines.launch import report

SAMPLES, BATCH, EPOCHS, START = 400, 8, 6, 0.01
NEW_LR = 0.004
FAULT_STEP = 7
"""Steps of the rank that raises, before it does."""


class FaultError(Exception):
    """The error of a loss."""


def trainer(loss: Callable[[nn.Module, Any], Tensor], **options: Any) -> flowdp.Trainer:
    torch.manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(4))
    return flowdp.Trainer(
        nn.Linear(5, 1),
        lambda params: torch.optim.SGD(params, lr=START),
        loss,
        dataset=(x, x.sum(1, keepdim=True)),
        per_device_batch_size=BATCH,
        devices=["cpu"] * 2,
        policy="sync",
        progress=False,
        **options,
    )


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def records(run: flowdp.Run) -> list[Any]:
    return [
        [one.epoch, one.loss, one.lr, one.global_step, [rank.samples for rank in one.per_rank]]
        for one in run.metrics()
    ]


def steer(act: str, acts: bool) -> None:
    """Train, and do one thing in the second epoch; epochs that are written say how far all came."""
    holds = threading.Event()
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        assert worker is not None
        if act != "stop" and worker.epoch == 2:
            # So that the request, which comes in epoch 1, is there before the run is over.
            assert holds.wait(HANG_S)
        calls.append(worker.epoch)
        return mean_square(model, batch)

    with trainer(loss, epochs=10_000 if act == "stop" else EPOCHS).start() as run:
        for record in run.metrics("round"):
            if record.epoch == 1:
                break
        if act == "pause":
            if acts:
                run.pause()
            holds.set()
            with run.paused() if acts else nullcontext():
                dist.barrier()  # the other machine has paused; this one hears of it in a moment
                while run.status().phase != "paused":
                    assert not run.done, "the run ended without its pause"
                report("paused", act=act, step=run.status().global_step, calls=len(calls))
                dist.barrier()
        elif acts:
            run.stop() if act == "stop" else run.set_lr(NEW_LR)
        holds.set()
        history = records(run)
        state = run.join()
    kept = history[-2:] if act == "stop" else history
    report("steered", act=act, interrupted=state.interrupted, steps=state.global_step, history=kept)


def fail(policy: str, acts: bool) -> None:
    """Raise in the loss of this machine's second device, and report the error that join() raises."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        assert worker is not None
        if acts and worker.rank % 2 and worker.local_step == FAULT_STEP:
            report("raising", rank=worker.rank)
            raise FaultError(f"of rank {worker.rank}")
        return mean_square(model, batch)

    run = trainer(loss, epochs=10_000).start()
    try:
        run.join()
    except flowdp.FlowdpError as error:
        found = time.monotonic()
        cause = error.__cause__
        report(
            "failed",
            kind=type(error).__name__,
            text=str(error),
            rank=getattr(error, "rank", None),
            step=getattr(error, "step", None),
            cause=repr(cause)[:300],
            trace=str(cause)[-600:],
            found=found,
            threads=[one.name for one in threading.enumerate() if one.name.startswith("flowdp")],
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for word in sys.argv[1:]:
        name, machine = word.split("@")
        is_ours = os.environ["RANK"] == machine
        (fail if name == "fail" else steer)(name, is_ours)
    dist.barrier()
    dist.destroy_process_group()
