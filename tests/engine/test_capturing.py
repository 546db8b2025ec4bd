"""Runs with captured steps: the bits of eager ones, and changes that are noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.engine.captured import Captured

IMAGES, LABELS = torch.randn(64, 1, 6, 6), torch.randint(5, (64,))
SCALE = 1.0
PLANT = 20
"""The step at which something is changed."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """BatchNorm, dropout, and things that a user may change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(3 * 16, 5)
        self.register_buffer("shift", torch.zeros(1))
        self.gain = 1.0
        self.gains = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x))) * self.gain * self.gains[0] + self.shift
        made: Tensor = self.head(self.drop(y.flatten(1)))
        return made


def loss_of(model: nn.Module, batch: Any) -> Any:
    output = model(batch[0])
    accuracy = (output.argmax(1) == batch[1]).float().mean()
    return F.cross_entropy(output, batch[1]) * SCALE, {"accuracy": accuracy}


class Journal:
    """A run, and the steps in which its capture began, was void and ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = -1
        self.events: list[tuple[int, str, str]] = []
        self.models: list[Net] = []
        for name in ("_void", "_end"):
            monkeypatch.setattr(Captured, name, self._spied(name))

    def _spied(self, name: str) -> Callable[..., None]:
        original = getattr(Captured, name)

        def spy(captured: Captured, text: str, **options: Any) -> None:
            self.events.append((self.step, name, text))
            original(captured, text, **options)

        return spy

    def run(
        self,
        capture: bool | flowdp.CaptureOptions,
        plant: Callable[[Net], object] = lambda _: None,
        loss: Callable[..., Any] = loss_of,
        steps: int = 40,
        model: Callable[[], nn.Module] = Net,
        dataset: Any = (IMAGES, LABELS),
        **options: Any,
    ) -> dict[str, Tensor]:
        """Train, and change something before step `PLANT`; returns the state of the model."""
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

        options = {"devices": ["cpu"], "policy": "sync", "lr_lambda": advance, **options}
        self.step = -1
        flowdp.Trainer(
            make,
            lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            loss,
            dataset=dataset,
            batch_size=4,
            max_steps=steps,
            progress=False,
            tune_process=False,
            capture=capture,
            **options,
        ).fit()
        return {name: value.clone() for name, value in self.models[0].state_dict().items()}


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    return Journal(monkeypatch)


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


CHANGES: dict[str, tuple[Callable[[Net], object], str]] = {
    "dropout": (lambda net: setattr(net.drop, "p", 0.6), "drop.p was 0.3, it is 0.6"),
    "attribute": (lambda net: setattr(net, "gain", 0.5), "gain was 1.0, it is 0.5"),
    "list": (lambda net: net.gains.__setitem__(0, 0.5), "gains"),
    "frozen layer": (freeze, "head.weight.requires_grad was True"),
    "eval mode": (lambda net: net.eval(), "training was True, it is False"),
    "forward hook": (hook, "_forward_hooks"),
    "global": (rescale, "SCALE"),
    "momentum of BatchNorm": (lambda net: setattr(net.norm, "momentum", 0.5), "norm.momentum was 0.1"),
    "buffer": (other_buffer, "shift"),
    "layer": (lambda net: setattr(net, "drop", nn.Identity()), "another object"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_takes_effect_in_its_step(
    journal: Journal, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, told = CHANGES[name]
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    eager = journal.run(False, plant)
    assert not journal.events
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    captured = journal.run(True, plant)
    assert [(step, kind) for step, kind, _ in journal.events] == [(PLANT, "_void")]
    assert told in journal.events[0][2]
    assert equal(eager, captured)
