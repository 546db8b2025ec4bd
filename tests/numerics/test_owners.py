"""Exact steps whose parameters have one owner: as one device takes them, for every optimizer of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import flowdp
from flowdp.data.epoch_order import epoch_order
from flowdp.device.streams import HostLane, StreamLane
from flowdp.replica.exact_replica import ExactReplica
from tests.data.cards import Card
from tests.numerics.test_exact import RATIOS, apart, check_equal

SAMPLES, WINDOW, STEPS = 160, 13, 30
X = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
Y = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain SGD": partial(optim.SGD, lr=0.02),
    "Adam": partial(optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "fused AdamW": partial(optim.AdamW, lr=0.01, fused=True),
    "for each": partial(optim.AdamW, lr=0.01, foreach=True),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.01),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "Rprop": partial(optim.Rprop, lr=0.001),
    "ASGD": partial(optim.ASGD, lr=0.01),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
}
if hasattr(optim, "Muon"):

    def muon(params: Any) -> optim.Optimizer:
        return optim.Muon([one for one in params if one.dim() == 2], lr=0.01)

    OPTIMIZERS["Muon"] = muon


@pytest.fixture(autouse=True)
def lanes() -> str:
    """Plain CPU devices: cards of one kind have no owners."""
    return "cpu"


@pytest.fixture(params=["at once", "behind the gate"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The last arrival takes the step for all; or the owner does, behind the gate, as in a large model."""
    if request.param == "behind the gate":
        monkeypatch.setattr("flowdp.collective.host.SMALL", 0)
    name: str = request.param
    return name


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4, bias=False)
    ).double()


def mse(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def windows() -> Iterator[Tensor]:
    for epoch in itertools.count():
        yield from epoch_order(SAMPLES, 0, epoch).split(WINDOW)


def plain(
    make: Make,
    model: nn.Module | None = None,
    loss: Any = mse,
    clip: float | None = None,
    value: float | None = None,
) -> nn.Module:
    """Train on one device."""
    model = net() if model is None else model
    optimizer = make(model.parameters())
    for index in itertools.islice(windows(), STEPS):
        named = loss(model, (X[index], Y[index]))
        (named["loss"] if isinstance(named, dict) else named).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if value is not None:
            nn.utils.clip_grad_value_(model.parameters(), value)
        optimizer.step()
        optimizer.zero_grad()
    return model


def exact(make: Make, devices: int, model: nn.Module | None = None, **options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "loss": mse,
        "dataset": (X, Y),
        "per_device_batch_size": 4,
        "batch_size": WINDOW,
        "max_steps": STEPS,
        "devices": ["cpu"] * devices,
        "policy": "exact",
        "runtime": flowdp.RuntimeOptions(
            partition_ratios=RATIOS[devices], tune_process=flowdp.ProcessTuning(openmp=False)
        ),
        "failures": flowdp.FailureOptions(check_loss=False),
        "progress": False,
    }
    return flowdp.Trainer(net() if model is None else model, make, **{**given, **options})


@pytest.mark.usefixtures("kept_replicas")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two devices and on four, each way to take a step, with clipped gradients and without."""
    number = list(OPTIMIZERS).index(name)
    if number % 3:
        monkeypatch.setattr("flowdp.collective.host.SMALL", 0)
    devices, clip = 4 if number % 2 else 2, 0.3 if number % 4 < 2 else None
    model, make = net(), OPTIMIZERS[name]
    run = exact(make, devices, model, max_grad_norm=clip).start()
    assert run.join().global_step == STEPS
    assert apart(model, plain(make, clip=clip)) < 1e-12
    check_equal(run)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("name", "before", "after"), [("SGD", 2, 3), ("AdamW", 3, 1), ("Adafactor", 1, 2)])
def test_a_checkpoint_goes_on_with_other_owners(name: str, before: int, after: int, tmp_path: Any) -> None:
    make, model = OPTIMIZERS[name], net()
    folder = flowdp.CheckpointOptions(tmp_path, every=20, unit="step")
    exact(make, before, max_steps=20, checkpoint=folder).fit()
    exact(make, after, model, checkpoint=folder, resume=True).fit()
    assert apart(model, plain(make)) < 1e-12


class Hooked:
    """Makes an optimizer that counts its steps, as one with hooks of the user's."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, params: Any) -> optim.Optimizer:
        optimizer = optim.AdamW(params, lr=0.01)
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_: Any) -> None:
        self.steps += 1


@pytest.mark.usefixtures("steps")
def test_a_hook_of_the_optimizer_runs_once_a_step() -> None:
    hooked, model = Hooked(), net()
    exact(hooked, 3, model).fit()
    assert hooked.steps == STEPS
    assert apart(model, plain(partial(optim.AdamW, lr=0.01))) < 1e-12


class Unlike:
    """Makes optimizers that round differently, each its own way, as kinds of device do."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, params: Any) -> optim.Optimizer:
        self.made += 1
        return optim.SGD(params, lr=0.02 * (1.0 + 1e-13 * self.made))


@pytest.mark.usefixtures("kept_replicas", "steps")
def test_replicas_of_unlike_kinds_are_equal_to_the_bit() -> None:
    run = exact(Unlike(), 3).start()
    run.join()
    check_equal(run)


class Own(optim.SGD):
    """An optimizer that flowdp does not know."""


class UnlikeOwn(Unlike):
    """The same of optimizers that flowdp does not know: no rank steps a part of their parameters."""

    def __call__(self, params: Any) -> optim.Optimizer:
        self.made += 1
        return Own(params, lr=0.02 * (1.0 + 1e-13 * self.made))


@pytest.mark.usefixtures("kept_replicas")
@pytest.mark.parametrize(
    ("kinds", "owner"), [(("card", "cpu"), 0), (("cpu", "card"), 1), (("card", "another card"), 0)]
)
def test_devices_of_two_kinds(kinds: tuple[str, str], owner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first card, here fake streams, steps for both."""
    cards = {kind: Card() for kind in kinds if kind != "cpu"}
    for kind, card in cards.items():
        card.name = kind

    def open_lanes(devices: Any) -> list[Any]:
        return [
            StreamLane(device, cards[kind]) if kind in cards else HostLane(device)
            for device, kind in zip(devices, kinds, strict=True)
        ]

    monkeypatch.setattr("flowdp.replica.build.open_lanes", open_lanes)
    model, make = net(), Unlike() if "cpu" in kinds else UnlikeOwn()
    runtime = flowdp.RuntimeOptions(
        backend="cpu" if "cpu" in kinds else "local",
        partition_ratios=RATIOS[2],
        tune_process=flowdp.ProcessTuning(openmp=False),
    )
    run = exact(make, 2, model, runtime=runtime, max_grad_norm=0.5, callbacks=[flowdp.EMA(0.9)]).start()
    run.join()
    check_equal(run)
    assert apart(model, plain(partial(optim.SGD, lr=0.02), clip=0.5)) < 1e-10
    replicas = run._engine.replicas
    assert [replica.owner for replica in replicas] == [replicas[owner]] * 2
    if "cpu" not in kinds:  # the work of a rank on the CPU is on no stream
        assert not any(card.races for card in cards.values())


class Sees:
    """A loss that notes the parameters which each rank computes with, and a slow owner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[int, list[Tensor]] = {}
        take = ExactReplica.meet

        def slow(replica: ExactReplica, outcome: Any) -> None:
            if replica.owner is replica:
                sum(range(40_000))
            take(replica, outcome)

        monkeypatch.setattr(ExactReplica, "meet", slow)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        rank = flowdp.current_worker().rank
        self.seen.setdefault(rank, []).append(nn.utils.parameters_to_vector(model.parameters()).detach())
        return mse(model, batch)

    def differ(self) -> bool:
        """Whether two ranks have computed a window with different parameters."""
        first, *others = self.seen.values()
        return any(not torch.equal(*pair) for other in others for pair in zip(first, other, strict=False))


@pytest.mark.usefixtures("steps")
def test_each_forward_begins_with_the_values_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sees = Sees(monkeypatch)
    exact(OPTIMIZERS["SGD"], 3, loss=sees, per_device_batch_size=WINDOW).fit()
    assert not sees.differ()
    assert [len(seen) for seen in sees.seen.values()] == [STEPS] * 3
