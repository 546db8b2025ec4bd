"""Tests of runs with captured steps: the bits of eager ones, and changes that are noticed."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.graphs.captured_step import Captured
from flowdp.policy.worth import LaunchWatch
from tests.data.cards import Card, put_on_streams

IMAGES, LABELS = torch.randn(64, 1, 6, 6), torch.randint(5, (64,))
SCALE = 1.0
TAKE = LaunchWatch.take
PLANT = 20
"""The step at which something is changed."""


class Net(nn.Module):
    """BatchNorm, dropout, and attributes that a user may change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(3 * 16, 5)
        self.register_buffer("shift", torch.zeros(1))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x))) * self.gain + self.shift
        made: Tensor = self.head(self.drop(y.flatten(1)))
        return made


def loss_of(model: nn.Module, batch: Any) -> Any:
    output = model(batch[0])
    accuracy = (output.argmax(1) == batch[1]).float().mean()
    return F.cross_entropy(output, batch[1]) * SCALE, {"accuracy": accuracy}


class Journal:
    """A run, and the steps at which its capture began, became void and ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = -1
        self.events: list[tuple[int, str, str]] = []
        self.models: list[Net] = []
        for name in ("_void", "end"):
            monkeypatch.setattr(Captured, name, self._spied(name))

    def _spied(self, name: str) -> Callable[..., None]:
        original = getattr(Captured, name)

        def spy(captured: Captured, text: str, **options: Any) -> None:
            self.events.append((self.step, name, text))
            original(captured, text, **options)

        return spy

    def run(
        self,
        capture: Any,
        plant: Callable[[Net], object] = lambda _: None,
        loss: Callable[..., Any] = loss_of,
        steps: int = 40,
        model: Callable[[], nn.Module] = Net,
        dataset: Any = (IMAGES, LABELS),
        **options: Any,
    ) -> dict[str, Tensor]:
        """Train, with a change before step `PLANT`; returns the model's state."""
        torch.manual_seed(5)
        self.models.clear()

        def make() -> nn.Module:
            self.models.append(model())
            return self.models[-1]

        def advance(step: int) -> float:
            if step == PLANT and self.step < PLANT:
                plant(self.models[0])
            self.step = step
            return 1.0

        options = {
            "devices": ["cpu"],
            "policy": "sync",
            "scheduler": flowdp.SchedulerOptions(lr_lambda=advance),
            **options,
        }
        self.step = -1
        ratios = options.pop("ratios", None)
        flowdp.Trainer(
            make,
            lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            loss,
            dataset=dataset,
            per_device_batch_size=4,
            max_steps=steps,
            progress=False,
            runtime=flowdp.RuntimeOptions(tune_process=False, capture=capture, partition_ratios=ratios),
            **options,
        ).fit()
        return {name: value.clone() for name, value in self.models[0].state_dict().items()}


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    """A journal of runs on fake streams."""
    card = Card()
    put_on_streams(card, monkeypatch.setattr)
    yield Journal(monkeypatch)
    assert not card.races


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def freeze(net: Net) -> None:
    net.head.requires_grad_(False)


def rescale(_: Net) -> None:
    globals()["SCALE"] = 2.0


def hook(net: Net) -> None:
    net.head.register_forward_hook(lambda _module, _inputs, output: output * 2)


def other_buffer(net: Net) -> None:
    net.shift = torch.ones(1)


CHANGES: dict[str, Callable[[Net], object]] = {
    "dropout": lambda net: setattr(net.drop, "p", 0.6),
    "attribute": lambda net: setattr(net, "gain", 0.5),
    "frozen layer": freeze,
    "eval mode": lambda net: net.eval(),
    "forward hook": hook,
    "global": rescale,
    "momentum of BatchNorm": lambda net: setattr(net.norm, "momentum", 0.5),
    "buffer": other_buffer,
    "layer": lambda net: setattr(net, "drop", nn.Identity()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_takes_effect_in_its_step(
    journal: Journal, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = CHANGES[name]
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    eager = journal.run(False, plant)
    assert not journal.events
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    captured = journal.run(True, plant)
    assert [(step, kind) for step, kind, _ in journal.events] == [(PLANT, "_void")]
    assert equal(eager, captured)


COUNTED = {"steps": 0}


def by_python_random(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1]) * (1 + random.random())


def by_the_time(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1]) * (time.perf_counter() % 1)


def by_numpy(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1]) * float(np.random.rand())


def by_a_table(model: nn.Module, batch: Any) -> Any:
    COUNTED["steps"] += 1
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if COUNTED["steps"] > PLANT else 1)


@pytest.mark.parametrize("loss", [by_the_time, by_python_random, by_numpy])
def test_a_number_that_no_guard_sees_is_found_by_the_first_comparison(
    journal: Journal, caplog: pytest.LogCaptureFixture, loss: Any
) -> None:
    journal.run(True, loss=loss)
    assert [(step, kind) for step, kind, _ in journal.events] == [(3, "end")]
    # The loss or, where the two numbers lie close together, a gradient.
    assert "a captured step differs from an eager one" in journal.events[0][2]
    assert len([line for line in caplog.messages if "go on eagerly, from the eager result" in line]) == 1


def test_a_loss_that_counts_is_not_captured(journal: Journal) -> None:
    states = []
    for capture in (False, True):
        COUNTED["steps"] = 0
        states.append(journal.run(capture, loss=by_a_table))
    assert "changes too often" in journal.events[-1][2]
    assert equal(*states)


def test_a_difference_that_comes_late_is_found_by_the_next_comparison(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1]) * float(environ["FLOWDP_TEST_SCALE"])

    monkeypatch.setenv("FLOWDP_TEST_SCALE", "1")
    journal.run(
        flowdp.CaptureOptions(compare_every=7),
        lambda _: monkeypatch.setenv("FLOWDP_TEST_SCALE", "2"),
        loss=loss,
    )
    # Step 3 is the first captured one, so the 21st is step 23: the first multiple of 7 after the change.
    assert [(step, kind) for step, kind, _ in journal.events] == [(23, "end")]


class Branches(nn.Module):
    """Which parameters take part depends on the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(36, 5), nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Any:
        made = self.first(x.flatten(1))
        return made + 0 * self.second(x.flatten(1)) if environ["FLOWDP_TEST_SCALE"] == "2" else made


def test_a_gradient_of_zeros_is_not_the_same_as_none(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(capture: bool | flowdp.CaptureOptions) -> dict[str, Tensor]:
        monkeypatch.setenv("FLOWDP_TEST_SCALE", "1")
        plant = partial(monkeypatch.setenv, "FLOWDP_TEST_SCALE", "2")
        return journal.run(capture, lambda _: plant(), images, model=Branches)

    eager, captured = run(False), run(flowdp.CaptureOptions(compare_every=1))
    assert [(step, kind) for step, kind, _ in journal.events] == [(PLANT, "end")]
    assert "the gradient of 'second.weight' is there in one of them alone" in journal.events[0][2]
    assert equal(eager, captured)


def images(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_another_shape_gets_a_graph_of_its_own_and_too_many_run_eagerly(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    data = (IMAGES[:62], LABELS[:62])  # each epoch ends with a batch of two
    eager = journal.run(False, dataset=data, steps=120)
    assert equal(eager, journal.run(True, dataset=data, steps=120))
    assert equal(eager, journal.run(flowdp.CaptureOptions(graphs=1), dataset=data, steps=120))
    assert not journal.events
    assert len([line for line in caplog.messages if "more than 1 forms" in line]) == 1


class Language(nn.Module):
    """A transformer with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layer(self.embed(x)))


def next_token(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 5))


def of_some(model: nn.Module, batch: Any) -> Any:
    counts = batch[1] > 1
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none") * counts
    return {"loss": losses.sum() / counts.sum().clamp(min=1), "weight": counts.sum()}


KINDS: dict[str, dict[str, Any]] = {
    "layers": {"model": layers},
    "images": {"model": Net},
    "language": {"model": Language, "loss": next_token, "dataset": torch.randint(11, (60, 6))},
}


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("layers", "async"),
        ("layers", "cadence"),
        ("images", "sync"),
        ("images", "exact"),
        ("language", "exact"),
    ],
)
def test_captured_steps_have_the_bits_of_eager_ones(journal: Journal, kind: str, policy: str) -> None:
    options = {"policy": policy, "steps": 60, **KINDS[kind]}
    eager = journal.run(False, **options)
    captured = journal.run(True, **options)
    assert not journal.events
    assert equal(eager, captured)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync", "model": layers},
        {"policy": "exact", "ratios": [0.5, 0.5], "model": layers},
        {"policy": "exact", "ratios": [0.7, 0.3], "model": layers, "batch_size": 16},
        {"policy": "sync", "model": layers, "gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
        {"policy": "sync", "model": layers, "precision": "bf16", "max_grad_value": 0.01},
        {"policy": "sync", "model": layers, "gradient_accumulation_steps": 3, "loss": of_some},
    ],
)
def test_several_ranks_have_the_bits_of_eager_ones(journal: Journal, options: dict[str, Any]) -> None:
    options = {"devices": ["cpu", "cpu"], "steps": 60, **options}
    eager = journal.run(False, **options)
    captured = journal.run(True, **options)
    assert not journal.events
    assert equal(eager, captured)


def test_a_teacher_that_all_ranks_read_is_left_alone_while_one_records(journal: Journal) -> None:
    torch.manual_seed(1)
    parts = [nn.Sequential(nn.Linear(36, 36), nn.Tanh()) for _ in range(30)]  # so that recording takes long
    teacher = nn.Sequential(nn.Flatten(), *parts, nn.Linear(36, 5)).requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch[0]), teacher(batch[0]))

    cadence = flowdp.CadenceOptions(anchor=4, max_anchor=8)
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "steps": 200, "model": layers, "loss": loss}
    journal.run(True, policy="async", cadence=cadence, **options)
    assert not journal.events


def test_a_checkpoint_goes_on_with_capture_and_without(journal: Journal, tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "sync", "model": layers}
    whole = journal.run(False, steps=48, **options)
    for first, second in ((True, False), (False, True), (True, True)):
        folder = tmp_path / f"{first}{second}"
        journal.run(first, steps=24, checkpoint=folder, **options)
        assert equal(whole, journal.run(second, steps=48, checkpoint=folder, resume=True, **options))
    assert not journal.events


def test_an_evaluation_runs_eagerly_and_leaves_the_graph(journal: Journal) -> None:
    data = {
        "evaluation": flowdp.EvaluationOptions((IMAGES, LABELS), step=accuracy),
        "model": Net,
        "steps": 80,
    }
    assert equal(journal.run(False, **data), journal.run(True, **data))
    assert not journal.events


def accuracy(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    assert not model.training
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


@pytest.mark.parametrize("is_waiting", [True, False])
def test_steps_are_captured_by_themselves_where_the_device_waits(
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_waiting: bool,
) -> None:
    caplog.set_level(logging.INFO, "flowdp")
    take, device_ms = TAKE, 1.0 if is_waiting else 1.5
    monkeypatch.setattr(LaunchWatch, "take", lambda watch, *_: take(watch, 1.0, device_ms))
    eager = journal.run(False, model=layers, loss=images, steps=80)
    assert equal(eager, journal.run("auto", model=layers, loss=images, steps=80))
    told = [line for line in caplog.messages if line.startswith("capture")]
    assert len(told) == 1
    assert ("CUDA graphs from now on" in told[0]) is is_waiting
    assert [kind for _, kind, _ in journal.events] == ([] if is_waiting else ["end"])
