"""Exact training on several machines: each case is trained by the job, and by one device in the test.

Run as a script, it trains all cases and saves the parameters that each machine has at the end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.device.flat_gradients import SharedGradients
from flowdp.replica import exact_replica
from tests.machines.launch import report

SAMPLES, BATCH, EPOCHS, INPUTS, OUTPUTS = 1003, 64, 3, 12, 4
LARGE = 20_000  # units of a model that its owner steps behind the gate, not the last arrival in it
RARE = 25  # samples that use parameters which no other sample does

CASES = ("plain", "rare", "weights", "unequal", "clamped", "unlike", "large", "sick")


class Net(nn.Module):
    """A perceptron, with a branch that is called for samples with a flag alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.common = nn.Sequential(
            nn.Linear(INPUTS, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, OUTPUTS)
        )
        self.rare = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        out: Tensor = self.common(x)
        if not flag.any():
            return out
        return torch.where(flag[:, None], out + self.rare(x), out)


def data(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of shape (SAMPLES, INPUTS), classes, and flags."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, INPUTS, generator=draw, dtype=torch.float64)
    classes = torch.randint(OUTPUTS, (SAMPLES,), generator=draw)
    flags = torch.zeros(SAMPLES, dtype=torch.bool)
    if case == "rare":
        flags[torch.randperm(SAMPLES, generator=draw)[:RARE]] = True
    return x, classes, flags


def mean_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x, classes, flags = batch
    return F.cross_entropy(model(x, flags), classes)


def sick_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Not a number on one rank in one window, whose mean is that of the other ranks."""
    worker = flowdp.current_worker()
    return mean_loss(model, batch) * (float("nan") if (worker.rank, worker.global_step) == (2, 20) else 1.0)


def weighted_loss(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Any]:
    """A mean over some of the samples: class 0 is left out, as padding would be."""
    x, classes, flags = batch
    count = (classes != 0).sum()
    total = F.cross_entropy(model(x, flags), classes, ignore_index=0, reduction="sum")
    return {"loss": total / count.clamp(min=1), "weight": count}


LOSSES: dict[str, Callable[[nn.Module, Sequence[Tensor]], Any]] = {
    "weights": weighted_loss,
    "sick": sick_loss,
}
"""Losses of cases; of all others, `mean_loss`."""


class Clamp(flowdp.Callback):
    """Writes to the model: each device of each machine has to do so."""

    @torch.no_grad()
    def on_step(self, worker: Any, loss: Tensor | None) -> None:
        for parameter in worker.model.parameters():
            parameter.clamp_(-0.1, 0.1)


class Unlike:
    """Makes optimizers that round differently, each its own way on each machine, as kinds of device do."""

    def __init__(self) -> None:
        self.made = 10 * int(os.environ.get("RANK", "0"))

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        self.made += 1
        return torch.optim.AdamW(params, lr=3e-3 * (1.0 + 1e-13 * self.made))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def trainer(
    case: str, devices: int, runtime: flowdp.RuntimeOptions | None = None, **options: Any
) -> flowdp.Trainer:
    torch.manual_seed(1)
    runtime = runtime or flowdp.RuntimeOptions()
    if case == "sick":  # the same samples are lost in each run
        runtime = replace(runtime, partition_ratios=(1.0, 2.0, 1.5, 0.5))
        options["failures"] = flowdp.FailureOptions(on_nan="quarantine")
    return flowdp.Trainer(
        Net(LARGE if case == "large" else 32).double(),
        Unlike() if case in ("unlike", "large") else adamw,
        LOSSES.get(case, mean_loss),
        dataset=data(case),
        batch_size=BATCH,
        epochs=EPOCHS,
        devices=["cpu"] * devices,
        policy="exact",
        max_grad_norm=0.5,
        progress=False,
        callbacks=[Clamp()] if case == "clamped" else [],
        runtime=runtime,
        **options,
    )


def on_one_machine(case: str) -> flowdp.TrainedState:
    """Train a case on one device; where a rank's part is lost, on as many as the machines have."""
    return trainer(case, 4 if case == "sick" else 1, machines=False).fit()


def count_waits() -> list[int]:
    """Count the windows in which the host of a rank that steps waits for its device."""
    waits = [0]

    class Counted(SharedGradients):
        def look(self, touched: bytes | None) -> tuple[list[bool], bool]:
            waits[0] += touched is None
            return super().look(touched)

    vars(exact_replica)["SharedGradients"] = Counted
    return waits


def main(cases: Sequence[str], **options: Any) -> None:
    rank = int(os.environ["RANK"])
    waits = count_waits()
    for case in cases:
        waits[0] = 0
        devices = (1, 3)[rank % 2] if case == "unequal" else 2
        state = trainer(case, devices, **options).fit()
        last = state.history[-1]
        torch.save(
            {"model": dict(state.state_dict), "optimizer": state.optimizer_state},
            Path(os.environ["FLOWDP_TEST_FOLDER"]) / f"{case}-{rank}.pt",
        )
        report(
            "trained",
            case=case,
            steps=state.global_step,
            samples=[sum(one.samples for one in epoch.per_rank) for epoch in state.history],
            ranks=[one.samples for one in last.per_rank],
            losses=[epoch.loss for epoch in state.history],
            waits=waits[0],
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
