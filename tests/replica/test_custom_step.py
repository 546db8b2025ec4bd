"""Tests of a user's own step, with several optimizers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

import flowdp
from flowdp import StepError
from flowdp.device.worker_context import CurrentWorker
from flowdp.replica.custom_step import CustomStepReplica
from tests.parts import parts_of

CPU = torch.device("cpu")
SAMPLES = 48
draw = torch.Generator().manual_seed(0)
REAL = torch.randn(SAMPLES, 3, generator=draw) + 1.0
NOISE = torch.randn(SAMPLES, 2, generator=draw)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.makes = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        self.judges = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizers(model: Gan) -> dict[str, torch.optim.Optimizer]:
    return {"judge": Adam(model.judges.parameters(), 0.01), "make": SGD(model.makes.parameters(), 0.05)}


def judge_loss(model: Gan, real: Tensor, fake: Tensor) -> Tensor:
    yes, no = model.judges(real), model.judges(fake.detach())
    return F.softplus(-yes).mean() + F.softplus(no).mean()


def make_loss(model: Gan, fake: Tensor) -> Tensor:
    return F.softplus(-model.judges(fake)).mean()


def gan_step(worker: CurrentWorker, batch: Any) -> Mapping[str, Any]:
    real, noise = batch
    model: Any = worker.model
    fake = model.makes(noise)
    first = judge_loss(model, real, fake)
    worker.backward(first)
    worker.step(worker.optimizers["judge"])
    second = make_loss(model, fake)
    worker.backward(second)
    worker.step(worker.optimizers["make"])
    return {"loss": first, "make": second}


def plain_gan(model: Gan, batches: list[Any], clip: Any = None) -> Gan:
    model = copy.deepcopy(model)
    named = optimizers(model)

    def step(name: str, parameters: Any) -> None:
        if clip is not None:
            clip(parameters, 0.05)
        named[name].step()
        model.zero_grad()

    for real, noise in batches:
        fake = model.makes(noise)
        judge_loss(model, real, fake).backward()
        step("judge", model.judges.parameters())
        make_loss(model, fake).backward()
        step("make", model.makes.parameters())
    return model


def train(model: Any, step: Any, devices: int = 2, **options: Any) -> flowdp.Run:
    given: dict[str, Any] = {
        "dataset": (REAL, NOISE), "per_device_batch_size": 6, "epochs": 4, "policy": "sync",
        "progress": False,
        "reading": flowdp.ReadingOptions(shuffle=False), "optimizer": lambda model: optimizers(model),
    } | options  # fmt: skip
    run = flowdp.Trainer(model=model, train_step=step, devices=["cpu"] * devices, **given).start()
    run.join()
    return run


BATCHES = [*zip(REAL.split(6), NOISE.split(6), strict=True)] * 4


# ---------------------------------------------------------------- several optimizers
@pytest.mark.parametrize(
    ("clip", "options"),
    [
        (None, {}),
        (nn.utils.clip_grad_norm_, {"max_grad_norm": 0.05}),
        (nn.utils.clip_grad_value_, {"max_grad_value": 0.05}),
    ],
)
def test_on_one_device_it_is_the_plain_loop(lanes: str, clip: Any, options: dict[str, float]) -> None:
    model = Gan()
    expected = plain_gan(model, BATCHES, clip)
    run = train(model, gan_step, 1, **options)
    assert run.join().global_step == len(BATCHES)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("precision", ["32", "fp16"])
def test_a_gan_on_two_devices(lanes: str, kept_replicas: None, policy: str, precision: str) -> None:
    """Both optimizers step, the replicas are equal at the end, and the scalars are reported."""
    model, before = Gan(), Gan()
    run = train(model, gan_step, policy=policy, precision=precision, epochs=8)
    first, second = run._engine.replicas
    for mine, theirs in zip(first.flat.memories, second.flat.memories, strict=True):
        assert torch.equal(mine, theirs)
    for part in ("makes", "judges"):
        pairs = zip(getattr(model, part).parameters(), getattr(before, part).parameters(), strict=True)
        assert all(not torch.equal(new, old) for new, old in pairs)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    for epoch in run.history:
        assert 0 < epoch.loss < 10
        assert set(epoch.scalars) == {"make"}
    state = run.join().optimizer_state
    assert list(state) == ["judge", "make"]
    assert state["judge"]["state"]


def test_one_optimizer_is_a_list_of_one_and_instances_keep_their_form() -> None:
    seen: list[Any] = []

    def step(worker: CurrentWorker, batch: Any) -> None:
        seen.append(worker.optimizers)
        worker.backward(worker.model(batch[0]).mean())
        for optimizer in worker.optimizers:
            worker.step(optimizer)

    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    for given, form in (
        (SGD(model.parameters(), 0.1), list),
        ([SGD([model.weight], 0.1), Adam([model.bias], 0.1)], list),
        (lambda params: (SGD(params[:1], 0.1), SGD(params[1:], 0.1)), list),
    ):
        run = train(model, step, optimizer=given, epochs=1)
        assert isinstance(seen[-1], form)
        assert run.history[-1].loss is None
        assert not torch.equal(model.weight, before)
    assert [len(form) for form in (seen[0], seen[-1])] == [1, 2]


# ---------------------------------------------------------------- the state after a step
def replica(
    step: Any, precision: Any = "32", clip: float | None = None
) -> tuple[CustomStepReplica, CurrentWorker]:
    model = Gan()
    own = CustomStepReplica(parts_of(model, optimizers(model), precision=precision, max_grad_norm=clip), step)
    if precision == "fp16":
        own.update.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)  # so low that nothing overflows here
    worker = CurrentWorker(0, CPU, model, samples=6, sink=lambda *_: None, steps=own)
    return own, worker


def test_no_gradient_is_left_for_the_next_call() -> None:
    """One network's loss leaves gradients at the other."""

    def step(worker: CurrentWorker, batch: Any) -> None:
        assert all(parameter.grad is None for parameter in worker.model.parameters())
        model: Any = worker.model
        worker.backward(make_loss(model, model.makes(batch[1])))
        worker.step(worker.optimizers["make"])
        assert all(parameter.grad is None for parameter in model.makes.parameters())
        assert all(parameter.grad is not None for parameter in model.judges.parameters())

    mine, worker = replica(step)
    for _ in range(2):
        mine.add((REAL[:6], NOISE[:6]), worker)
        assert mine.step() is None


def test_only_an_optimizers_own_parameters_are_clipped() -> None:
    norms: list[float] = []

    def norm(module: nn.Module) -> float:
        return sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None) ** 0.5

    def step(worker: CurrentWorker, batch: Any) -> None:
        model: Any = worker.model
        before = copy.deepcopy(model.makes)
        worker.backward(1e3 * make_loss(model, model.makes(batch[1])))
        norms.append(norm(model.judges))
        worker.step(worker.optimizers["make"])
        norms.append(norm(model.judges))
        pairs = zip(model.makes.parameters(), before.parameters(), strict=True)
        norms.append(sum((new - old).square().sum().item() for new, old in pairs) ** 0.5)

    mine, worker = replica(step, clip=0.5)
    mine.add((REAL[:6], NOISE[:6]), worker)
    assert norms[0] == norms[1] > 1.0
    assert norms[2] == pytest.approx(0.05 * 0.5, rel=1e-4)


# ---------------------------------------------------------------- the scale of "fp16"


def test_an_overflow_leaves_that_optimizers_parameters_alone() -> None:
    def step(worker: CurrentWorker, batch: Any) -> None:
        model: Any = worker.model
        fake = model.makes(batch[1])
        worker.backward(judge_loss(model, batch[0], fake))
        worker.step(worker.optimizers["judge"])
        worker.backward(make_loss(model, fake).float() * 1e30)
        worker.step(worker.optimizers["make"])

    mine, worker = replica(step, "fp16")
    before = copy.deepcopy(mine.module)
    mine.add((REAL[:6], NOISE[:6]), worker)
    mine.step()
    assert mine.update.scaler is not None
    assert mine.update.scaler.get_scale() == 8.0
    assert isinstance(before, Gan)
    assert isinstance(mine.module, Gan)
    assert torch.equal(mine.module.makes[0].weight, before.makes[0].weight)
    assert not torch.equal(mine.module.judges[0].weight, before.judges[0].weight)


def test_one_optimizer_may_step_several_times_a_call() -> None:
    """As for a critic. The scale may change between steps, but never between a backward and its step."""
    scales: list[float] = []

    def step(worker: CurrentWorker, batch: Any) -> None:
        model: Any = worker.model
        for _ in range(3):
            worker.backward(judge_loss(model, batch[0], model.makes(batch[1]).detach()))
            scales.append(mine.update.scaler.get_scale() if mine.update.scaler else 0.0)
            worker.step(worker.optimizers["judge"])
        judge = judge_loss(model, batch[0], model.makes(batch[1]).detach())
        worker.backward(judge)
        worker.backward(make_loss(model, model.makes(batch[1])))
        worker.step(worker.optimizers["judge"])
        worker.step(worker.optimizers["make"])

    mine, worker = replica(step, "fp16")
    assert mine.update.scaler is not None
    mine.update.scaler.set_growth_interval(1)
    mine.add((REAL[:6], NOISE[:6]), worker)
    mine.step()
    assert scales == [16.0, 32.0, 64.0]
    assert mine.update.scaler.get_scale() == 256.0
    assert all(parameter.isfinite().all() for parameter in mine.module.parameters())


# ---------------------------------------------------------------- errors


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, max_iter=3)


def worst(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(REAL).square().mean())


def test_an_optimizer_with_a_closure_has_a_step_of_its_own() -> None:
    model = nn.Linear(3, 1)
    options: dict[str, Any] = {
        "policy": "cadence",
        "dataset": REAL,
        "per_device_batch_size": 12,
        "epochs": 1,
        "devices": ["cpu", "cpu"],
        "progress": False,
    }

    def step(worker: CurrentWorker, batch: Tensor) -> dict[str, Any]:
        (optimizer,) = worker.optimizers

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = worker.model(batch).square().mean()
            worker.backward(loss)
            return loss

        return {"loss": optimizer.step(closure)}

    before = worst(model)
    flowdp.Trainer(model, lbfgs, train_step=step, **options).fit()
    assert worst(model) < before / 2

    def wrong(worker: CurrentWorker, batch: Tensor) -> None:
        worker.backward(worker.model(batch).square().mean())
        worker.step(worker.optimizers[0])

    with pytest.raises(StepError, match="missing 1 required positional argument: 'closure'"):
        flowdp.Trainer(model, lbfgs, train_step=wrong, **options).fit()
