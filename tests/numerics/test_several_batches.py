"""Tests of steps of several batches, and of batch sizes per device, against plain PyTorch."""

from __future__ import annotations

import copy
import itertools
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

import flowdp
from bench.cadences import cadence_for
from flowdp import current_worker
from flowdp.data.epoch_order import epoch_order

pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

SAMPLES = 57
draw = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)
Y = torch.randn(SAMPLES, 2, generator=draw, dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def adamw(params: Any) -> AdamW:
    return AdamW(params, 0.01)


def train(model: nn.Module, devices: int, policy: Any, loss: Any = mse, **options: Any) -> flowdp.Run:
    given: dict[str, Any] = {
        "dataset": (X, Y), "per_device_batch_size": 4, "epochs": 3,
        "progress": False, "optimizer": adamw,
        "runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
        "cadence": cadence_for(policy, anchor=2, max_anchor=2),
    } | options  # fmt: skip
    run = flowdp.Trainer(model=model, loss=loss, devices=["cpu"] * devices, policy=policy, **given).start()
    run.join()
    return run


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def plain(model: nn.Module, size: int, epochs: int = 3, clip: float | None = None) -> nn.Module:
    """Train on one device with batches of this size."""
    model = copy.deepcopy(model)
    optimizer = adamw(model.parameters())
    for epoch in range(epochs):
        for index in epoch_order(SAMPLES, 0, epoch).split(size):
            mse(model, (X[index], Y[index])).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


class Read(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Unequal(Dataset[Any]):
    """Its batches have no tensor of their length, so they cannot be cut or joined."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        return [{"x": x, "y": y} for x, y in samples]

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.stack([F.mse_loss(model(one["x"]), one["y"]) for one in batch]).mean()


# ---------------------------------------------------------------- accumulation
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dataset": Read(), "max_grad_norm": 0.1},
        {"dataset": Read(), "reading": flowdp.ReadingOptions(num_workers=2)},
        {"dataset": DataLoader(Read(), 4, shuffle=True), "per_device_batch_size": None},
        {
            "dataset": Unequal(),
            "reading": flowdp.ReadingOptions(collate_fn=Unequal.collate),
            "loss": Unequal.loss,
        },
    ],
    ids=["tensors", "read", "processes", "loader", "lists"],
)
def test_one_device_has_the_big_batch(options: dict[str, Any]) -> None:
    """Also if an epoch's last step has fewer batches, and its last batch fewer samples."""
    model = net()
    expected = plain(model, 12, clip=options.get("max_grad_norm"))
    run = train(model, 1, "cadence", gradient_accumulation_steps=3, **options)
    assert run.join().global_step == 3 * 5
    assert apart(model, expected) < 1e-12


def of_some(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A mean over the rows whose first target is positive, and in some batches over none."""
    counts = batch[1][:, 0] > 0.5
    losses = (model(batch[0]) - batch[1]).square().mean(1) * counts
    return {"loss": losses.sum() / counts.sum().clamp(min=1), "weight": counts.sum(), "rows": len(counts)}


class Told(flowdp.Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_step(self, _worker: Any, loss: Tensor | None) -> None:
        assert loss is not None
        self.losses.append(loss.clone())


@pytest.mark.parametrize(("policy", "sizes"), [("exact", 4), ("sync", [8]), ("cadence", 4), ("async", [8])])
def test_a_loss_counts_for_the_weight_that_it_names(policy: str, sizes: Any) -> None:
    """In a step of several batches, in the mean of an epoch, and in evaluations; under every policy alike."""
    model = net()
    expected, means, losses = copy.deepcopy(model), [], list[float]()
    optimizer = adamw(expected.parameters())
    size = 12 if policy == "exact" or sizes == 4 else 24
    for epoch in range(3):
        total = weights = 0.0
        for index in epoch_order(SAMPLES, 0, epoch).split(size):
            found = of_some(expected, (X[index], Y[index]))
            losses.append(found["loss"].item())
            total += losses[-1] * found["weight"].item()
            weights += found["weight"].item()
            found["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        means.append(total / weights)
    given: dict[str, Any] = {"gradient_accumulation_steps": 3, "per_device_batch_size": sizes}
    if policy == "exact":
        given |= {"batch_size": 4}
    told = Told()
    run = train(model, 1, policy, of_some, evaluation=(X, Y), callbacks=[told], **given)
    assert apart(model, expected) < 1e-12
    assert [loss.item() for loss in told.losses] == pytest.approx(losses, rel=1e-9)
    history = run.join().history
    assert [epoch.loss for epoch in history] == pytest.approx(means, rel=1e-9)
    assert history[-1].eval["loss"] == pytest.approx(of_some(model, (X, Y))["loss"].item(), rel=1e-9)
    assert all({*epoch.scalars} == {"rows"} == {*epoch.eval} - {"loss"} for epoch in history)


def test_batches_of_any_size_count_for_their_samples() -> None:
    """A batch sampler's batches differ: a step is the mean over its samples."""
    order = epoch_order(SAMPLES, 0, 0).tolist()
    bounds = [0, 1, 7, 9, 20, 22, 40, 41, 57]
    batches = [order[start:stop] for start, stop in itertools.pairwise(bounds)]
    model = net()
    expected = copy.deepcopy(model)
    optimizer = adamw(expected.parameters())
    for first in range(0, len(batches), 3):
        index = torch.tensor([i for batch in batches[first : first + 3] for i in batch])
        mse(expected, (X[index], Y[index])).backward()
        optimizer.step()
        optimizer.zero_grad()
    loader = DataLoader(Read(), batch_sampler=batches)
    options = {"dataset": loader, "per_device_batch_size": None, "epochs": 1}
    train(model, 1, "sync", gradient_accumulation_steps=3, **options)
    assert apart(model, expected) < 1e-12


# ---------------------------------------------------------------- a batch size per device
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("sync", {}),
        ("cadence", {"dataset": Read()}),
        ("async", {"dataset": Read(), "reading": flowdp.ReadingOptions(num_workers=2)}),
        ("async", {}),
    ],
)
def test_each_device_has_its_size(policy: str, options: dict[str, Any]) -> None:
    sizes: set[tuple[int, int]] = set()
    seen: Counter[float] = Counter()
    lock = threading.Lock()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with lock:
            sizes.add((current_worker().rank, len(batch[0])))
            assert current_worker().samples == len(batch[0]) == len(batch[1])
            seen.update(batch[0][:, 0].tolist())
        return mse(model, batch)

    train(net(), 2, policy, loss, per_device_batch_size=(6, 4), **options)
    whole = {size for size in sizes if size[1] in (6, 4)}
    assert whole >= {(0, 6), (1, 4)}
    assert max(size for rank, size in sizes if rank == 0) == 6
    assert max(size for rank, size in sizes if rank == 1) == 4
    assert seen == Counter(dict.fromkeys(X[:, 0].tolist(), 3))
