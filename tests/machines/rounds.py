"""Rounds of averages on several machines: which samples each of them trains and evaluates.

Run as a script, it trains all cases. The loss notes the indices of its samples, which are their first column.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import flowdp
from tests.machines.launch import report

SAMPLES, BATCH, EPOCHS, JUDGED = 603, 8, 3, 403

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

STREAMED: Mapping[str, Mapping[str, Any]] = {
    "sync": {"policy": "sync"},
    "sync, parts": {"policy": "sync", "machines": flowdp.MachineOptions(stream="part")},
    "cadence": {"policy": "cadence"},
    "cadence, parts, 3 rounds": {
        "policy": "cadence",
        "cadence": flowdp.CadenceOptions(anchor=2, max_anchor=3),
        "machines": flowdp.MachineOptions(rounds=3, stream="part"),
    },
    "cadence, processes": {"policy": "cadence"},
}
"""Of an IterableDataset."""


class Stream(IterableDataset[Any]):
    """The rows of `data`, one after the other, shared among the worker processes.

    Args:
        rows: All of them.
        splits: Split them by machine: machine 0 has every fourth, machine 1 the others.
    """

    def __init__(self, rows: Tensor, *, splits: bool) -> None:
        self._rows = rows
        if splits:
            is_first = torch.arange(len(rows)) % 4 == 0
            self._rows = rows[is_first if dist.get_rank() == 0 else ~is_first]

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return ((row,) for row in self._rows[first::step])


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


def dataset_of(name: str, *, streams: bool, rows: int) -> dict[str, Any]:
    """Arguments of a Trainer: the dataset of a case."""
    given = data(SAMPLES, 1)[:rows]
    if not streams:
        return {"dataset": (given,), "per_device_batch_size": BATCH}
    dataset = Stream(given, splits="parts" in name)
    if "processes" in name:
        return {"dataset": DataLoader(dataset, 3 * BATCH, num_workers=2)}  # for all three devices
    return {"dataset": dataset, "per_device_batch_size": BATCH}


def train(
    name: str, devices: int, options: Mapping[str, Any], *, streams: bool = False, rows: int = SAMPLES
) -> None:
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
        **dataset_of(name, streams=streams, rows=rows),
        epochs=EPOCHS,
        devices=["cpu"] * devices,
        evaluation=flowdp.EvaluationOptions((data(JUDGED, 2),), step=judge, sanity_check=0),
        progress=False,
        **options,
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
    if sys.argv[2] == "unequal":
        dist.init_process_group("gloo")
        try:
            train("sync", 1, STREAMED["sync"], streams=True, rows=300 + 100 * dist.get_rank())
        except flowdp.OptionError as error:
            report("refused", text=str(error))
        sys.exit()
    own = int(sys.argv[1].split(",")[int(os.environ["RANK"])])
    if sys.argv[2] == "streamed":
        dist.init_process_group("gloo")  # before the dataset, which asks for the rank
        for case, options in STREAMED.items():
            train(case, own, options, streams=True)
    else:
        for case in sys.argv[2:]:
            train(case, own, CASES[case])
