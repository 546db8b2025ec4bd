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
from torch.optim.lr_scheduler import StepLR

import flowdp
from flowdp import OptionError, StepError
from flowdp.device.worker_context import CurrentWorker
from flowdp.replica.custom_step import CustomStepReplica
from flowdp.replica.learning_rate import LearningRate
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


def test_rates_of_all_optimizers_are_scaled_together() -> None:
    rates: list[tuple[float, float]] = []

    def step(worker: CurrentWorker, batch: Any) -> Mapping[str, Any]:
        rates.append(tuple(one.param_groups[0]["lr"] for one in worker.optimizers.values()))
        return gan_step(worker, batch)

    train(
        Gan(),
        step,
        1,
        epochs=1,
        scheduler=flowdp.SchedulerOptions(
            lr_lambda=lambda position: 1.0 / (1 + position), lr_scaling="linear"
        ),
    )
    assert rates == [(pytest.approx(0.01 / (1 + i)), pytest.approx(0.05 / (1 + i))) for i in range(8)]
    rates.clear()
    train(
        Gan(), step, 1, epochs=1, scheduler=flowdp.SchedulerOptions(lambda o: StepLR(o, 4, 0.5), unit="step")
    )
    assert rates == [(0.01, 0.05)] * 4 + [(0.005, 0.025)] * 4
    both = LearningRate(list(optimizers(Gan()).values()))
    both.set(0.002, 0, 0)
    assert [group["lr"] for group in both._groups] == pytest.approx([0.002, 0.01])


# ---------------------------------------------------------------- the state after a step
def replica(
    step: Any, precision: Any = "32", clip: float | None = None
) -> tuple[CustomStepReplica, CurrentWorker]:
    model = Gan()
    own = CustomStepReplica(parts_of(model, optimizers(model), precision=precision, max_grad_norm=clip), step)
    if precision == "fp16":
        own._scaler = torch.amp.GradScaler("cpu", init_scale=16.0)  # so low that nothing overflows here
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
def test_one_scaler_for_both_and_one_update_a_call() -> None:
    mine, worker = replica(gan_step, "fp16")
    assert mine._scaler is not None
    mine._scaler.set_growth_interval(2)
    for _ in range(2):
        mine.add((REAL[:6], NOISE[:6]), worker)
        mine.step()
    # The judge's update comes before the maker's backward, and the step's own update at its end.
    assert mine._scaler.get_scale() == 64.0


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
    assert mine._scaler is not None
    assert mine._scaler.get_scale() == 8.0
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
            scales.append(mine._scaler.get_scale() if mine._scaler else 0.0)
            worker.step(worker.optimizers["judge"])
        judge = judge_loss(model, batch[0], model.makes(batch[1]).detach())
        worker.backward(judge)
        worker.backward(make_loss(model, model.makes(batch[1])))
        worker.step(worker.optimizers["judge"])
        worker.step(worker.optimizers["make"])

    mine, worker = replica(step, "fp16")
    assert mine._scaler is not None
    mine._scaler.set_growth_interval(1)
    mine.add((REAL[:6], NOISE[:6]), worker)
    mine.step()
    assert scales == [16.0, 32.0, 64.0]
    assert mine._scaler.get_scale() == 256.0
    assert all(parameter.isfinite().all() for parameter in mine.module.parameters())


def test_forward_is_under_autocast_and_backward_is_not() -> None:
    seen: list[Any] = []

    def step(worker: CurrentWorker, batch: Any) -> None:
        model: Any = worker.model
        out = model.makes(batch[1])
        seen.append(out.dtype)
        loss = out.float().mean()
        loss.register_hook(lambda gradient: seen.append(torch.is_autocast_enabled("cpu")))
        worker.backward(loss)
        worker.step(worker.optimizers["make"])

    mine, worker = replica(step, "bf16")
    mine.add((REAL[:6], NOISE[:6]), worker)
    assert seen == [torch.bfloat16, False]
    assert not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------- errors


MODEL = nn.Linear(3, 1)
TWO = [SGD([MODEL.weight], 0.1), SGD([MODEL.bias], 0.1)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss": lambda model, batch: 0}, "loss and train_step each define a step"),
        ({"train_step": 3}, r"must be a function of \(worker, batch\), not 3"),
        ({"policy": "exact", "devices": 2}, "steps as it likes"),
        ({"gradient_accumulation_steps": 2}, "one call gets one batch and is one step"),
        ({"optimizer": []}, r"optimizer=\[\] holds none"),
        ({"optimizer": {"a": 3}}, "a torch optimizer or a factory of one, not 3"),
        ({"optimizer": TWO, "model": lambda: nn.Linear(3, 1)}, "give an optimizer factory"),
        ({"optimizer": TWO, "train_step": None, "loss": lambda model, batch: 0}, "gives 2 optimizers"),
        ({"train_step": None}, "loss must be a function"),
    ],
)
def test_what_is_refused(options: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {
        "policy": "cadence", "model": MODEL, "optimizer": SGD(MODEL.parameters(), 0.1),
        "train_step": gan_step, "epochs": 1,
        "dataset": (REAL, NOISE), "per_device_batch_size": 6, "devices": 1,
    } | options  # fmt: skip
    with pytest.raises(OptionError, match=match):
        flowdp.Trainer(**given)


def test_several_optimizers_of_a_factory_need_a_step() -> None:
    trainer = flowdp.Trainer(
        nn.Linear(3, 1), lambda params: [SGD(params, 0.1)] * 2, lambda model, batch: model(batch[0]).mean(),
        policy="cadence", dataset=(REAL, NOISE), per_device_batch_size=6, epochs=1, devices=1,
    )  # fmt: skip
    with pytest.raises(OptionError, match="gives 2 optimizers, and with a loss one takes the step"):
        trainer.start()


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

    with pytest.raises(StepError, match=r"LBFGS needs a closure: call optimizer\.step\(closure\)"):
        flowdp.Trainer(model, lbfgs, train_step=wrong, **options).fit()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with pytest.raises(OptionError, match=r"optimizer: LBFGS .*give train_step="):
        flowdp.Trainer(model, lbfgs(model.parameters()), loss, **options)
    with pytest.raises(OptionError, match=r"optimizer: LBFGS .*give train_step="):
        flowdp.Trainer(model, lbfgs, loss, **options).start()
