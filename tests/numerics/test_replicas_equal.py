"""Tests that all replicas have the same bits after every mean, for all kinds of tensors."""

from __future__ import annotations

import threading
from collections import defaultdict
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp

# A mean does not depend on how a batch reached its rank.
pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

SAMPLES, BATCH_SIZE, EPOCHS = 90, 4, 2  # the last batch has 2 samples


class Zoo(nn.Module):
    """Parameters of every kind that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Linear(4, 4).double()
        self.narrow = nn.Linear(4, 4).bfloat16()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(SAMPLES, dtype=torch.bool))
        self.register_buffer("level", torch.tensor(0.0, dtype=torch.float64))

    def forward(self, indices: Tensor, images: Tensor) -> Tensor:
        self.calls += 1
        self.seen[indices] = True
        h = self.norm(self.conv(images.to(memory_format=torch.channels_last))).mean((2, 3))
        h = self.wide(h.double()).float() + self.narrow(h.bfloat16()).float()
        h = self.decode(torch.tanh(self.encode(h))) * self.scale + self.frozen
        self.level = 0.9 * self.level + h.detach().double().mean()  # a new object after every call
        return (h * self.turn).abs().sum(1)


def bits(module: nn.Module) -> str:
    digest = sha256()
    for tensor in (*module.parameters(), *module.buffers()):
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Meetings:
    """Records the bits of every rank at its first step after each round."""

    def __init__(self) -> None:
        self.digests: dict[int, dict[int, str]] = defaultdict(dict)
        self._lock = threading.Lock()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        worker = flowdp.current_worker()
        with self._lock:
            is_first = worker.rank not in self.digests[worker.round]
            if is_first:
                self.digests[worker.round][worker.rank] = ""
        if is_first:
            self.digests[worker.round][worker.rank] = bits(model)
        indices, images, target = batch
        return (model(indices, images) - target).square().mean()


def train(meetings: Meetings, devices: int, policy: Any, **options: Any) -> tuple[Zoo, flowdp.Run]:
    draw = torch.Generator().manual_seed(3)
    images = torch.randn(SAMPLES, 3, 5, 5, generator=draw)
    torch.manual_seed(4)
    model = Zoo()
    run = flowdp.Trainer(
        model,
        lambda params: torch.optim.Adam(params, lr=0.01),
        meetings.loss,
        dataset=(torch.arange(SAMPLES), images, images.sum((1, 2, 3))),
        per_device_batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        devices=["cpu"] * devices,
        policy=policy,
        progress=False,
        **{"runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False))} | options,
    ).start()
    run.join()
    return model, run


def check_end(model: Zoo, run: flowdp.Run) -> None:
    replicas = run._engine.replicas
    for replica in replicas:
        for mine, first in zip(replica.flat.memories, replicas[0].flat.memories, strict=True):
            assert torch.equal(mine.view(torch.uint8), first.view(torch.uint8))
        module = replica.module
        assert bits(module) == bits(model)
        assert all(tensor.isfinite().all() for tensor in module.state_dict().values())
        assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert module.decode.weight is module.encode.weight
        assert module.seen.all()


UNEQUAL = {
    "runtime": flowdp.RuntimeOptions(partition_ratios=(3, 1)),
    "cadence": flowdp.CadenceOptions(anchor=1, max_anchor=1),
}


@pytest.mark.parametrize(
    ("devices", "policy", "options"),
    [
        (3, "sync", {}),
        (2, "cadence", UNEQUAL),
        (3, "cadence", {}),
        (4, "cadence", {"cadence": flowdp.CadenceOptions(anchor=1, overhead_target=0.5)}),
        (4, "cadence", {"cadence": flowdp.CadenceOptions(max_batch_diff=0)}),
    ],
)
def test_after_every_round(devices, policy, options):
    meetings = Meetings()
    model, run = train(meetings, devices, policy, **options)
    met = {round: digests for round, digests in meetings.digests.items() if len(digests) > 1}
    assert len(met) >= 3
    assert [round for round, digests in met.items() if len(set(digests.values())) != 1] == []
    assert len({next(iter(digests.values())) for digests in met.values()}) == len(met)
    check_end(model, run)


@pytest.mark.parametrize("devices", [2, 4])
def test_after_the_last_round_of_async(devices):
    meetings = Meetings()
    model, run = train(meetings, devices, "async")
    assert len(set(meetings.digests[-1].values())) == 1
    check_end(model, run)


def thawing(devices: int, policy: Any) -> nn.Sequential:
    """Train a model whose first layer is frozen until the loss unfreezes it, as in gradual unfreezing."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)

    def loss(module: nn.Sequential, batch: Tensor) -> Tensor:
        if flowdp.current_worker().local_step == 3:
            module[0].requires_grad_(True)
        return module(batch).square().mean()

    flowdp.Trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss,
        dataset=torch.randn(SAMPLES, 3),
        per_device_batch_size=BATCH_SIZE,
        epochs=1,
        devices=["cpu"] * devices,
        policy=policy,
        progress=False,
        runtime=flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
    ).fit()
    return model


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "exact"])
def test_a_parameter_that_the_loss_thaws_ends_the_run_instead_of_coming_apart(policy):
    with pytest.raises(flowdp.StepError, match=r"at its step.*'0.weight' was frozen when the run") as found:
        thawing(2, policy)
    assert found.value.rank in (0, 1)
    assert found.value.step is not None


class Taught(nn.Module):
    """A model, and a frozen teacher that follows its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    def follow(self) -> None:
        """Move the teacher, in a way that torch does not count."""
        for own, others in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.lerp_(others.data, 0.1)


class FollowsBehind(flowdp.Callback):
    """Moves the teacher behind each step, from one of them on."""

    def __init__(self, first: int = 1) -> None:
        self._first = first

    def on_step(self, worker: Any, loss: Tensor | None) -> None:
        if worker.local_step >= self._first:
            worker.model.follow()


def follows_inside(model: Taught, batch: Tensor) -> Tensor:
    model.follow()
    return distance(model, batch)


def distance(model: Taught, batch: Tensor) -> Tensor:
    return (model(batch) - model.teacher(batch)).square().mean() + model(batch).square().mean()


def teach(devices: int, policy: Any, loss: Any = distance, **options: Any) -> Taught:
    """Train a model with a teacher, on numbers whose last window has no part for a second device."""
    given: dict[str, Any] = {"model": Taught()} | options
    model = given["model"]
    trainer = flowdp.Trainer(
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        loss=loss,
        dataset=torch.randn(33, 3, generator=torch.Generator().manual_seed(3)),
        batch_size=8,
        devices=["cpu"] * devices,
        policy=policy,
        progress=False,
        **{"epochs": 2} | given,
    )
    state = trainer.fit()
    if not isinstance(model, nn.Module):
        model = Taught()
        state.load_into(model)
    return model


@pytest.mark.parametrize(
    ("policy", "way"), [("sync", "in the loss"), ("cadence", "late"), ("async", "behind the step")]
)
def test_a_teacher_of_each_device_ends_the_run_instead_of_coming_apart(policy: str, way: str) -> None:
    options: dict[str, Any] = {
        "in the loss": {"loss": follows_inside},
        "behind the step": {"callbacks": [FollowsBehind()]},
        "late": {"callbacks": [FollowsBehind(5)]},
    }[way]
    with pytest.raises(flowdp.StepError, match=r"frozen parameter 'teacher.weight' .*a buffer") as found:
        teach(2, policy, **options)
    assert found.value.rank in (0, 1)


def test_under_exact_a_teacher_may_follow_behind_each_step() -> None:
    one, two = (teach(devices, "exact", callbacks=[FollowsBehind()]) for devices in (1, 2))
    for mine, other in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other)
    with pytest.raises(flowdp.CollectiveError, match="the replicas differ after epoch 1"):
        teach(2, "exact", follows_inside)  # which one of them does not in the last window
