"""Tests of the learning rate: a function of the position in the run, on any number of devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from bench.cadences import cadence_for
from flowdp import SchedulerOptions, Trainer, current_worker
from flowdp.checkpoint import file as checkpoint_file
from flowdp.errors import OptionError
from flowdp.replica.learning_rate import LearningRate

# torch 2.8: SequentialLR calls its schedulers in a way that raises its own warning.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")

EPOCHS, BATCHES = 3, 14
TOTAL = EPOCHS * BATCHES
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": lambda opt: StepLR(opt, 5, 0.5),
    "cosine": lambda opt: CosineAnnealingLR(opt, TOTAL),
    "one cycle": lambda opt: OneCycleLR(opt, 0.5, total_steps=TOTAL),
    "sequential": lambda opt: SequentialLR(opt, [LinearLR(opt, 0.1, 1.0, 6), StepLR(opt, 4, 0.5)], [6]),
    "lambda": lambda opt: LambdaLR(opt, lambda i: 1 / (1 + i)),
}
Curve = list[tuple[int, int, int, float]]  # rank, epoch, position, rate: in the order of the steps of a rank


def rate_of(
    optimizers: Any, scheduler: Any = None, unit: Any = None, lr_lambda: Any = None, factor: float = 1.0
) -> LearningRate:
    return LearningRate(optimizers, SchedulerOptions(scheduler, unit=unit, lr_lambda=lr_lambda), factor)


def sgd(lr: float = 0.1) -> SGD:
    return SGD([nn.Parameter(torch.ones(1))], lr, momentum=0.9)


def plain(make: Callable[[Optimizer], LRScheduler], steps: int, lr: float = 0.1) -> list[float]:
    """A scheduler's rates before each of these steps."""
    optimizer = sgd(lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


# ---------------------------------------------------------------- one replica
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("is_instance", [True, False])
def test_positions_may_be_skipped(name: str, is_instance: bool) -> None:
    expected = plain(SCHEDULERS[name], TOTAL)
    mine = sgd()
    scheduler: Any = SCHEDULERS[name]
    if is_instance:
        scheduler = scheduler(sgd())
        mine.param_groups[0].update(
            {k: v for k, v in scheduler.optimizer.param_groups[0].items() if k != "params"}
        )
    rate = rate_of([mine], scheduler, "step")
    for position in (0, 0, 3, 7, 8, 20, TOTAL - 1):
        rate.advance(position, 0)
        assert rate.value == pytest.approx(expected[position], rel=1e-9), position
    rate.advance(3, 0)  # the position after a round ended early may be lower: the schedule never goes back
    assert rate.value == pytest.approx(expected[-1], rel=1e-9)


MORE: dict[str, Callable[[Optimizer], LRScheduler]] = {
    **SCHEDULERS,
    "chained": lambda opt: ChainedScheduler([StepLR(opt, 3), LambdaLR(opt, lambda i: 1 / (1 + i))]),
    "nested": lambda opt: SequentialLR(opt, [LinearLR(opt), MultiStepLR(opt, [3, 5])], [6]),
    "cyclic": lambda opt: CyclicLR(opt, 0.1, 0.3, 5, scale_fn=lambda x: 0.5 ** (x - 1)),
    "restarts": lambda opt: CosineAnnealingWarmRestarts(opt, 5, 2),
    "multiplicative": lambda opt: MultiplicativeLR(opt, lambda i: 0.95),
}


def loaded(state: dict[str, Any], into: LearningRate, optimizer: Optimizer, saved: Optimizer) -> None:
    """Restore as from a checkpoint: the optimizer's groups first."""
    for group, theirs in zip(optimizer.param_groups, saved.state_dict()["param_groups"], strict=True):
        group.update({name: value for name, value in theirs.items() if name != "params"})
    into.load_state_dict(state)


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("at", [5])
def test_a_restored_rate_is_that_of_a_run_without_a_break(name: str, at: int) -> None:
    whole, first, second = sgd(), sgd(), sgd(0.7)
    uninterrupted, before, after = (rate_of([one], MORE[name], "step") for one in (whole, first, second))
    before.advance(at, 0)
    uninterrupted.advance(at, 0)
    state = checkpoint_file.plain(before.state_dict())
    before.advance(at + 3, 0)  # the saved state does not change any more
    uninterrupted_then = whole.param_groups[0]["lr"]
    loaded(state, after, second, whole)
    assert after.value == uninterrupted_then == second.param_groups[0]["lr"]
    for position in range(at, TOTAL, 2):
        uninterrupted.advance(position, 0)
        after.advance(position, 0)
        assert second.param_groups[0]["lr"] == whole.param_groups[0]["lr"]
        assert second.param_groups[0]["momentum"] == whole.param_groups[0]["momentum"]


def test_a_rate_that_was_set_stays_and_the_factor_of_the_world_does_not() -> None:
    two = rate_of([sgd()], lr_lambda=lambda step: 1.0, factor=2.0)
    three = rate_of([sgd()], lr_lambda=lambda step: 1.0, factor=3.0)
    three.load_state_dict(checkpoint_file.plain(two.state_dict()))
    assert three.value == pytest.approx(0.3)
    two.advance(4, 0)
    two.set(0.05)
    three.load_state_dict(checkpoint_file.plain(two.state_dict()))
    for position in (4, 9):
        three.advance(position, 0)
        assert three.value == pytest.approx(0.05)
    again = rate_of([sgd()], lr_lambda=lambda step: 1.0)
    again.load_state_dict(checkpoint_file.plain(three.state_dict()))
    assert again.value == pytest.approx(0.05)


def test_a_rank_without_steps_in_some_epochs_sees_their_losses_all_the_same() -> None:
    """Each loss once; an epoch that the scheduler does not see is no bad one."""
    rates = [
        rate_of([sgd()], lambda opt: ReduceLROnPlateau(opt, factor=0.1, patience=0), "epoch")
        for _ in range(2)
    ]
    losses = (1.0, 0.5, None, 0.4, 0.6, 0.3)
    for epoch in range(1, 7):
        rates[0].advance(5 * epoch, epoch, losses[:epoch])
    for epoch in (2, 6):
        rates[1].advance(5 * epoch, epoch, losses[:epoch])
    assert rates[0].value == pytest.approx(0.01)
    assert rates[0].state_dict() == rates[1].state_dict()


def test_a_rate_that_is_set_scales_all_groups_and_the_scheduler_goes_on_from_it() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = SGD([{"params": parameters[0], "lr": 0.1}, {"params": parameters[1], "lr": 0.4}])
    rate = rate_of([optimizer], lambda opt: StepLR(opt, 10, 0.1), "step")
    rate.advance(9, 0)
    rate.advance(10, 0)
    rate.set(0.02)  # at the position after the scheduler's first step: 0.01, 0.04
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02, 0.08])
    rate.advance(20, 0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.002, 0.008])


def groups_of(*rates: float) -> SGD:
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates], 0.1)


@pytest.mark.parametrize(
    "options",
    [{}, {"lr_lambda": lambda step: 0.5}, {"scheduler": lambda opt: StepLR(opt, 4, 0.1), "unit": "step"}],
)
def test_a_group_that_is_held_still_stays_so_where_a_rate_is_set(options: dict[str, Any]) -> None:
    optimizer = groups_of(0.0, 0.1, 0.4)
    rates = rate_of([optimizer], **options)
    for position, lr in enumerate((0.05, 0.0, 0.2, 0.3, 0.1, 0.2)):
        rates.check_set()
        rates.advance(position, 0)
        rates.set(lr)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0, lr, 4 * lr])


def test_a_rate_in_a_tensor_stays_in_a_tensor() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1), capturable=False)
    rate = rate_of([optimizer], lr_lambda=lambda step: 0.5)
    rate.advance(1, 0)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert rate.value == pytest.approx(0.05)


# ---------------------------------------------------------------- refusals


# ---------------------------------------------------------------- whole runs
def curve(devices: int, policy: str, is_instance: bool = False, **options: Any) -> Curve:
    """The rate at every step of a run of `EPOCHS` epochs of `BATCHES` batches."""
    lock = threading.Lock()
    steps: Curve = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        worker = current_worker()
        with lock:
            steps.append((worker.rank, worker.epoch, worker.global_step, worker.lr))
        return F.mse_loss(model(batch), batch)

    model = nn.Linear(1, 1)
    optimizer: Any = lambda params: SGD(params, 0.1, momentum=0.9)  # noqa: E731
    if is_instance:
        optimizer = optimizer(model.parameters())
        given = options["scheduler"]
        options["scheduler"] = replace(given, scheduler=given.scheduler(optimizer))
    state = Trainer(
        model,
        optimizer,
        loss,
        dataset=torch.randn(BATCHES * 2 - 1, 1),
        per_device_batch_size=2,
        epochs=EPOCHS,
        devices=devices,
        policy=policy,
        cadence=cadence_for(policy, anchor=2, max_anchor=2),
        **options,
    ).fit()
    assert len(steps) == state.global_step == TOTAL
    return steps


def furthest(steps: Curve) -> list[tuple[int, int, float]]:
    """(epoch, position, rate) of every step, with the furthest position of its rank so far."""
    reached: dict[int, int] = {}
    found = []
    for rank, epoch, position, rate in steps:
        reached[rank] = max(position, reached.get(rank, 0))
        found.append((epoch, reached[rank], rate))
    return found


@pytest.mark.parametrize(("devices", "policy"), [(2, "sync"), (3, "cadence")])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_curve_is_the_same_on_any_number_of_devices(name: str, devices: int, policy: str) -> None:
    is_instance = devices == 2
    steps = curve(devices, policy, is_instance, scheduler=SchedulerOptions(SCHEDULERS[name], unit="step"))
    expected = plain(SCHEDULERS[name], TOTAL)
    for _, position, rate in furthest(steps):
        assert rate == pytest.approx(expected[position], rel=1e-9), position


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_plateau_hears_of_every_epoch(policy: str) -> None:
    # With a threshold out of reach every epoch is a bad one.
    def never_good(optimizer: Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1.0)

    rates: dict[int, set[float]] = {}
    for _, epoch, _, rate in curve(2, policy, scheduler=SchedulerOptions(never_good, unit="epoch")):
        rates.setdefault(epoch, set()).add(rate)
    assert [sorted(rates[epoch]) for epoch in range(EPOCHS)] == [
        [pytest.approx(0.1)],
        [pytest.approx(0.01)],
        [pytest.approx(0.001)],
    ]


@pytest.mark.parametrize("devices", [3])
def test_a_function_of_the_step_and_the_scale_of_the_world(devices: int) -> None:
    ratio = 0.5
    steps = curve(
        devices,
        "sync",
        scheduler=SchedulerOptions(lr_lambda=lambda step: 1 / (1 + step), lr_scaling=ratio),
    )
    for _, _, position, rate in steps:
        assert rate == pytest.approx(0.1 * (1 + ratio * (devices - 1)) / (1 + position))


@pytest.mark.parametrize("devices", [3])
def test_a_warm_up_is_a_factor_beside_the_schedule(devices: int) -> None:
    schedule = SCHEDULERS["step"]
    steps = curve(
        devices, "sync", scheduler=SchedulerOptions(schedule, unit="step", warmup_steps=8, lr_scaling="sqrt")
    )
    expected = plain(schedule, TOTAL)
    for _, position, rate in furthest(steps):
        factor = devices**0.5 * min(1.0, (position + 1) / 8)
        assert rate == pytest.approx(expected[position] * factor, rel=1e-9), position


def test_a_resumed_warm_up_has_the_same_bits() -> None:
    stop = 7

    def fresh() -> tuple[SGD, LearningRate]:
        optimizer = sgd()
        options = SchedulerOptions(SCHEDULERS["cosine"], unit="step", warmup_steps=11, lr_scaling="sqrt")
        return optimizer, LearningRate([optimizer], options, 3**0.5)

    (whole_optimizer, whole), (cut_optimizer, cut) = fresh(), fresh()
    for position in range(stop):
        whole.advance(position, 0)
        cut.advance(position, 0)
    saved = cut.state_dict()
    cut_optimizer, cut = fresh()
    cut.load_state_dict(saved)
    for position in range(stop, TOTAL):
        whole.advance(position, 0)
        cut.advance(position, 0)
        assert cut_optimizer.param_groups[0]["lr"] == whole_optimizer.param_groups[0]["lr"]
        assert cut.value == whole.value


# ---------------------------------------------------------------- other schedulers than torch's
class Cosine:
    """Like timm's: stepped with the number of the epoch, or of the update, and ignoring the other."""

    def __init__(self, optimizer: Optimizer, t_initial: int, *, t_in_epochs: bool = True) -> None:
        self.optimizer = optimizer
        self.t_in_epochs = t_in_epochs
        self.t_initial = t_initial

    def state_dict(self) -> dict[str, Any]:
        return {"t_initial": self.t_initial}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.t_initial = state_dict["t_initial"]

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.t_in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.t_in_epochs:
            self._set(num_updates)

    def _set(self, t: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * (1 - t / self.t_initial)


class Halving:
    """A minimal scheduler."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def rates_of(scheduler: Any, unit: Any, positions: list[tuple[int, int]]) -> list[float]:
    rate = rate_of([sgd()], scheduler, unit)
    found = []
    for position, epoch in positions:
        rate.advance(position, epoch)
        found.append(rate.value)
    again = rate_of([sgd()], scheduler, unit)
    again.load_state_dict(rate.state_dict())
    assert again.value == rate.value
    return found


def test_schedulers_of_timm_and_others_of_the_users_own() -> None:
    steps = [(0, 0), (1, 0), (2, 1), (4, 2)]
    epochs = rates_of(lambda opt: Cosine(opt, 4), "epoch", steps)
    assert epochs == pytest.approx([0.1, 0.1, 0.075, 0.05])
    updates = rates_of(lambda opt: Cosine(opt, 4, t_in_epochs=False), "step", steps)
    assert updates == pytest.approx([0.1, 0.075, 0.05, 0.0])
    assert rates_of(Halving, "step", steps) == pytest.approx([0.1, 0.05, 0.025, 0.00625])


@pytest.mark.parametrize(("unit", "right"), [("step", "epoch"), ("epoch", "step")])
def test_a_unit_that_a_scheduler_of_timm_would_pass_over_in_silence(unit: Any, right: str) -> None:
    with pytest.raises(OptionError, match=f"t_in_epochs={right == 'epoch'}: say unit='{right}'"):
        rate_of([sgd()], lambda opt: Cosine(opt, 4, t_in_epochs=right == "epoch"), unit)


def test_an_optimizer_that_has_no_rate() -> None:
    """Like transformers' Adafactor with relative_step."""
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(OptionError, match="SGD has no learning rate"):
        rate_of([optimizer])


def test_rates_of_groups_are_named_by_what_tells_them_apart() -> None:
    def sgd(*names: str | None) -> torch.optim.Optimizer:
        groups = [{"params": [torch.zeros(1)], "lr": 0.1 * (at + 1)} for at in range(len(names))]
        groups = [
            group | ({} if name is None else {"name": name})
            for group, name in zip(groups, names, strict=True)
        ]
        return torch.optim.SGD(groups)

    assert LearningRate([sgd(None)]).groups() == {}
    assert list(LearningRate([sgd(None, "head")]).groups()) == ["0", "head"]
    assert list(LearningRate({"g": sgd(None), "d": sgd(None)}).groups()) == ["g", "d"]
    assert list(LearningRate({"g": sgd(None), "d": sgd("a", "b")}).groups()) == ["g", "d/a", "d/b"]
    assert list(LearningRate([sgd("a", "a"), sgd(None)]).groups()) == ["0/0", "0/1", "1/0"]
    rates = LearningRate([sgd(None, None)], SchedulerOptions(lr_lambda=lambda step: 0.5**step), 2.0)
    rates.advance(1, 0)
    assert rates.groups() == {"0": pytest.approx(0.1), "1": pytest.approx(0.2)}
