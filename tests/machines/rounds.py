"""Rounds of averages on several machines: which samples each of them trains and evaluates.

Run as a script, it trains all cases. The loss notes the indices of its samples, which are their first column.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from tests.machines.launch import report

SAMPLES, BATCH, EPOCHS, JUDGED = 1003, 8, 3, 1003

CASES: Mapping[str, Mapping[str, Any]] = {
    "sync": {"policy": "sync"},
    "sync in bf16": {"policy": "sync", "machines": flowdp.MachineOptions(payload="bf16")},
    **{
        f"cadence, {rounds} rounds, {'overlap' if overlap else 'waiting'}, {payload}": {
            "policy": "cadence",
            "cadence": flowdp.CadenceOptions(anchor=4, max_anchor=6),
            "machines": flowdp.MachineOptions(rounds=rounds, overlap=overlap, payload=payload),
        }
        for rounds in (1, 5)
        for overlap in (True, False)
        for payload in ("full", "bf16")
    },
}


def data(count: int, seed: int) -> Tensor:
    """Rows of an index and six numbers."""
    numbers = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return torch.cat((torch.arange(count, dtype=torch.float32)[:, None], numbers), 1)


def digest(state: Mapping[str, Tensor]) -> str:
    """Checksum of the names and bits of a model."""
    found = hashlib.sha256()
    for name, value in state.items():
        found.update(name.encode())
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()


def train(name: str, devices: int) -> None:
    trained: list[tuple[int, list[int]]] = []
    judged: list[tuple[int, list[int]]] = []

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        worker = flowdp.current_worker()
        assert worker is not None
        rows = batch[0]
        trained.append((worker.epoch, rows[:, 0].int().tolist()))
        wanted: Tensor = rows[:, 1:].sum(1, keepdim=True)
        return nn.functional.mse_loss(model(rows[:, 1:]), wanted)

    def judge(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        rows = batch[0]
        judged.append((0, rows[:, 0].int().tolist()))
        return {"index": rows[:, 0].mean(), "value": model(rows[:, 1:]).mean()}

    torch.manual_seed(2)
    state = flowdp.Trainer(
        nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)),
        lambda params: torch.optim.SGD(params, lr=0.05),
        loss,
        dataset=(data(SAMPLES, 1),),
        per_device_batch_size=BATCH,
        epochs=EPOCHS,
        devices=["cpu"] * devices,
        evaluation=flowdp.EvaluationOptions((data(JUDGED, 2),), step=judge, sanity_check=0),
        progress=False,
        **CASES[name],
    ).fit()
    for epoch in range(EPOCHS):
        indices = Counter(index for one, batch in trained if one == epoch for index in batch)
        report("epoch", case=name, epoch=epoch, **packed(indices, SAMPLES))
    evaluated = Counter(index for _, batch in judged for index in batch)
    report("evaluated", case=name, **packed(evaluated, JUDGED))
    report(
        "trained",
        case=name,
        digest=digest(state.state_dict),
        steps=state.global_step,
        finite=all(value.isfinite().all().item() for value in state.state_dict.values()),
        history=[[epoch.epoch, epoch.loss, epoch.global_step, dict(epoch.eval)] for epoch in state.history],
        samples=[[one.samples for one in epoch.per_rank] for epoch in state.history],
    )


def packed(counts: Counter[int], size: int) -> dict[str, Any]:
    """Counts of indices as digits of a text, which stays short."""
    return {"counts": "".join(str(min(counts[index], 9)) for index in range(size))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        train(case, int(sys.argv[1].split(",")[int(os.environ["RANK"])]))
