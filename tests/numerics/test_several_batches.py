"""Tests of steps of several batches, and of batch sizes per device, against plain PyTorch."""

from __future__ import annotations

import copy
import itertools
import math
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
from flowdp.engine.coordinator_thread import CoordinatorShell
from flowdp.protocol.commands import Send
from flowdp.protocol.messages import SyncNow

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


@pytest.mark.parametrize(("policy", "devices"), [("sync", 2), ("cadence", 3), ("async", 3), ("async", 1)])
def test_every_sample_once_in_steps_of_several(policy: str, devices: int, recorder: Any) -> None:
    numbers = torch.arange(SAMPLES).unsqueeze(1)
    run = train(
        net(), devices, policy, recorder.watch(lambda m, b: mse(m, (X[b[0].flatten()], b[1]))),
        dataset=(numbers, Y), gradient_accumulation_steps=4,
    )  # fmt: skip
    for epoch in range(3):
        assert recorder.samples(epoch) == Counter(range(SAMPLES))
    steps = math.ceil(math.ceil(SAMPLES / 4) / 4)
    assert run.join().global_step == 3 * steps
    trainer = flowdp.Trainer(
        net(),
        adamw,
        mse,
        policy="cadence",
        dataset=(X, Y),
        per_device_batch_size=4,
        epochs=3,
        gradient_accumulation_steps=4,
    )
    assert trainer.total_steps == 3 * steps


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_precision(precision: str) -> None:
    model = net().float()
    expected = plain(net(), 12).float()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0].float()), batch[1].float())

    train(model, 1, "sync", loss, gradient_accumulation_steps=3, precision=precision)
    assert apart(model, expected) < 0.02
    assert apart(model, net().float()) > 0.05


class Gated(Read):
    """Reads from the second batch on only when released."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= 4:
            self.is_open.wait(60)
        return super().__getitem__(index)


def test_a_pause_waits_for_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose first batch was taken is finished, as that batch could not be dealt again."""
    dataset, begun, hurried = Gated(), threading.Event(), threading.Event()
    obey = CoordinatorShell._obey

    def watched(shell: CoordinatorShell, command: Any) -> None:
        obey(shell, command)
        if isinstance(command, Send) and isinstance(command.order, SyncNow):
            hurried.set()

    monkeypatch.setattr(CoordinatorShell, "_obey", watched)
    seen: Counter[float] = Counter()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.update(batch[0][:, 0].tolist())
        begun.set()
        return mse(model, batch)

    with flowdp.Trainer(
        net(),
        adamw,
        loss,
        policy="cadence",
        dataset=dataset,
        reading=flowdp.ReadingOptions(shuffle=False),
        per_device_batch_size=4,
        epochs=1,
        devices=1,
        gradient_accumulation_steps=2,
        progress=False,
    ).start() as run:
        assert begun.wait(60)
        run.pause()
        assert hurried.wait(60)
        dataset.is_open.set()
        with run.paused():
            assert run.status().local_steps == (1,)
    assert seen == Counter(X[:, 0].tolist())


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


@pytest.mark.parametrize(("sizes", "accumulation"), [((6, 4), 1), ((4, 6), 2), ((1, 5), 2)])
def test_total_steps_in_lockstep(sizes: tuple[int, int], accumulation: int) -> None:
    options: dict[str, Any] = {"per_device_batch_size": sizes, "gradient_accumulation_steps": accumulation}
    run = train(net(), 2, "sync", **options)
    trainer = flowdp.Trainer(
        net(), adamw, mse, dataset=(X, Y), epochs=3, devices=["cpu"] * 2, policy="sync", **options
    )
    assert trainer.total_steps == run.join().global_step


def test_accumulation_with_a_batch_size_per_device() -> None:
    """Micro-batches have the device's size, and a step has a number of them."""
    sizes: dict[int, list[int]] = {0: [], 1: []}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        sizes[current_worker().rank].append(len(batch[0]))
        return mse(model, batch)

    run = train(net(), 2, "sync", loss, per_device_batch_size=(6, 3), gradient_accumulation_steps=2, epochs=1)
    assert sizes[0] == [6] * 6 + [3]
    assert sizes[1] == [3] * 6
    assert run.join().global_step == 7
