"""Tests of a live run: reading, steering and ending it."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from bench.cadences import cadence_for
from flowdp import (
    Callback,
    CheckpointError,
    CheckpointOptions,
    EarlyStopping,
    EpochMetrics,
    EvaluationOptions,
    OptionError,
    ReadingOptions,
    Run,
    SchedulerOptions,
    StateError,
    StepError,
    TrainedState,
    Trainer,
    current_worker,
    runs,
)
from flowdp.threads.stacks import OWN
from tests.limits import HANG_S

pytestmark = pytest.mark.usefixtures("stopped_runs")

POLICIES = ["sync", "cadence", "async"]
SAMPLES = 60
ENDLESS: dict[str, Any] = {"epochs": None, "max_steps": 10**9}


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch)


def trainer(loss: Callable[..., Any] = mse, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "policy": "cadence",
        "model": nn.Linear(1, 1),
        "optimizer": lambda params: torch.optim.SGD(params, 1e-3),
        "dataset": torch.arange(float(SAMPLES)).unsqueeze(1) / SAMPLES,
        "per_device_batch_size": 2,
        "epochs": 3,
        "devices": 2,
        "cadence": cadence_for(options.get("policy", "cadence"), anchor=3, max_anchor=3),
    } | options
    return Trainer(loss=loss, **given)


class Steps:
    """A loss that counts, and wakes threads that wait for a number of steps."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.seen: list[tuple[int, int, int, float]] = []  # rank, round, position, rate
        self.is_forbidden = False
        self.violated = threading.Event()

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        if self.is_forbidden:
            self.violated.set()
        worker = current_worker()
        with self.changed:
            self.seen.append((worker.rank, worker.round, worker.global_step, worker.lr))
            self.changed.notify_all()
        return mse(model, batch)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, HANG_S)

    def wait_for_more(self, steps: int) -> None:
        target = len(self.seen) + steps
        self.wait_until(lambda: len(self.seen) >= target)


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("devices", [1, 3])
def test_a_run_to_its_end(policy: str, devices: int) -> None:
    run = trainer(policy=policy, devices=devices).start()
    state = run.join()
    assert run.join() is state
    assert run.state is state
    assert run.done
    assert run.error is None
    assert (state.global_step, state.epochs_done, state.interrupted) == (90, 3, False)
    assert (run.world_size, run.devices) == (devices, (torch.device("cpu"),) * devices)
    assert [epoch.epoch for epoch in state.history] == [0, 1, 2]
    for epoch in state.history:
        assert sum(part.samples for part in epoch.per_rank) == SAMPLES
        assert sum(part.steps for part in epoch.per_rank) == SAMPLES // 2
        told = [record for record in run.metrics("round") if record.epoch == epoch.epoch]
        assert epoch.rounds == sum(record.rounds for record in told)
        assert epoch.sync_ms == pytest.approx(sum(record.rounds * record.sync_ms for record in told))
    status = run.status()
    assert (status.phase, status.global_step, status.epochs_done) == ("done", 90, 3)
    assert sum(status.local_steps) == 90
    assert str(status).startswith("done | 3 epochs | step 90 | steps per rank ")
    assert str(status).endswith(" | all epochs are trained")
    assert "Finish(" in run.dump()
    assert len(run.dump(5).splitlines()) == 6


@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_device_counts_every_step_of_exact(devices: int) -> None:
    run = trainer(policy="exact", devices=devices, epochs=20).start()
    state = run.join()
    assert run.status().local_steps[0] == state.global_step  # also those that it takes alone


@pytest.mark.parametrize("policy", POLICIES)
def test_records_of_rounds_and_of_every_so_many_steps(policy: str) -> None:
    run = trainer(policy=policy).start()
    rounds = list(run.metrics("round"))
    assert [sum(part) for part in zip(*(record.steps for record in rounds), strict=True)] == [
        sum(part) for part in zip(*(tuple(r.steps for r in e.per_rank) for e in run.history), strict=True)
    ]
    assert rounds[-1].global_step == 90
    # A round that a busy machine has made late may be cut short before its first step.
    assert all(before.global_step <= after.global_step for before, after in pairwise(rounds))
    for every in (1, 20):
        expected = [
            after
            for before, after in pairwise([0, *(record.global_step for record in rounds)])
            if before // every < after // every
        ]
        assert [record.global_step for record in run.metrics(every)] == expected


def test_a_run_under_way() -> None:
    steps = Steps()
    run = trainer(steps, **ENDLESS).start()
    steps.wait_for_more(200)
    assert not run.done
    assert run.state is None
    status = run.status()
    assert status.phase == "running"
    assert "StartEpoch" in run.dump()
    with pytest.raises(TimeoutError, match=r"continues after 0.01 s: running \| "):
        run.join(0.01)
    steps.wait_for_more(10)
    assert run.status().global_step >= status.global_step
    run.stop()
    assert run.join().global_step == len(steps.seen)
    assert run.status().phase == "stopped"


@pytest.mark.usefixtures("kept_replicas")
# ---------------------------------------------------------------- stopping
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("devices", "steps_before"), [(1, 1), (2, 0), (4, 40)])
def test_stop_at_any_moment(policy: str, devices: int, steps_before: int) -> None:
    steps = Steps()
    model = nn.Linear(1, 1)
    run = trainer(steps, model=model, policy=policy, devices=devices, **ENDLESS).start()
    steps.wait_until(lambda: len(steps.seen) >= steps_before)
    run.stop()
    run.stop()
    state = run.join(HANG_S)
    assert state.interrupted
    assert state.global_step == len(steps.seen) >= steps_before
    assert torch.equal(model.weight, state.state_dict["weight"])
    replicas = [replica.module.weight for replica in run._engine.replicas]
    assert all(torch.equal(weight, model.weight) for weight in replicas)  # after one last round
    run.stop()
    run.pause()
    run.set_lr(0.5)
    assert run.join() is state


# ---------------------------------------------------------------- pauses


def test_the_first_one_to_leave_sets_nobody_going() -> None:
    steps = Steps()
    run = trainer(steps, **ENDLESS).start()
    with run.paused():
        with run.paused():
            pass
        run.unpause()
        steps.is_forbidden = True
        assert not steps.violated.wait(0.02)
        steps.is_forbidden = False
    steps.wait_for_more(20)
    run.stop()
    run.join()


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_while_standing_still(policy: str) -> None:
    steps = Steps()
    run = trainer(steps, policy=policy, **ENDLESS).start()
    with run.paused():
        before = len(steps.seen)
        run.stop()
        state = run.join(HANG_S)
        assert state.global_step == len(steps.seen) == before
    with run.paused():  # after the end of a run there is no wait
        pass
    assert run.join() is state


# ---------------------------------------------------------------- the learning rate
@pytest.mark.parametrize("policy", [*POLICIES, "exact"])
@pytest.mark.parametrize("devices", [3])
def test_a_new_rate_comes_to_all_ranks_in_the_same_round(policy: str, devices: int) -> None:
    steps = Steps()
    run = trainer(steps, policy=policy, devices=devices, **ENDLESS).start()
    steps.wait_for_more(60)
    run.set_lr(0.004)
    steps.wait_until(lambda: {rank for rank, _, _, lr in steps.seen if lr == 0.004} == set(range(devices)))
    run.stop()
    run.join()
    old = [number for _, number, _, lr in steps.seen if lr != 0.004]
    new = [number for _, number, _, lr in steps.seen if lr == 0.004]
    assert max(old) < min(new)
    assert {lr for _, _, _, lr in steps.seen} == {0.001, 0.004}
    last = list(run.metrics("round"))[-1]
    assert last.lr == 0.004


@pytest.mark.parametrize("policy", [*POLICIES, "exact"])
def test_a_factor_multiplies_the_rates_of_all_ranks_once(policy: str) -> None:
    steps = Steps()
    run = trainer(steps, policy=policy, devices=3, **ENDLESS).start()
    assert run.lr == 1e-3
    steps.wait_for_more(30)
    with run.paused():
        run.scale_lr(0.5)
        run.set_lr(0.016)
        run.scale_lr(0.5)
        run.scale_lr(0.5)
    steps.wait_until(lambda: {rank for rank, _, _, lr in steps.seen if lr == 0.004} == {0, 1, 2})
    assert {lr for _, _, _, lr in steps.seen} == {0.001, 0.004}
    run.scale_lr(2.0)
    steps.wait_until(lambda: {rank for rank, _, _, lr in steps.seen if lr == 0.008} == {0, 1, 2})
    with run.paused():
        assert [replica.learning_rate.value for replica in run._engine.replicas] == [0.008] * 3
        assert run.lr == 0.008
    run.stop()
    run.join()


@pytest.mark.parametrize("policy", ["cadence", "exact"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rate_that_no_round_has_obeyed_is_named_at_the_end(
    policy: str, goes_on: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps, rate = Steps(), 0.004 if goes_on else 0.001
    run = trainer(steps, policy=policy, devices=2, checkpoint=tmp_path, **ENDLESS).start()
    steps.wait_for_more(20)
    with run.paused():
        assert run.set_lr(0.004)
        assert run.scale_lr(1.0)
        if not goes_on:
            assert run.stop()
    run.stop()
    run.join()
    told = [message for message in caplog.messages if "after the last round" in message]
    assert [message.split(" came ")[0] for message in told] == ["run.set_lr(), run.scale_lr()"] * (
        not goes_on
    )

    resumed = trainer(steps, policy=policy, devices=2, resume=tmp_path, **ENDLESS).start()
    steps.wait_for_more(1)  # before its first step a run has no rate to read
    resumed.stop()
    resumed.join()
    assert resumed.lr == rate


def test_a_rate_that_is_set_behind_the_last_epoch_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    def step(_model: nn.Module, _batch: Tensor) -> dict[str, float]:
        assert runs()[0].set_lr(0.5)
        return {}

    caplog.set_level(logging.INFO, "flowdp")
    evaluation = EvaluationOptions(torch.zeros(4, 1), step=step, sanity_check=0)
    trainer(devices=1, epochs=1, evaluation=evaluation).fit()
    [told] = [record for record in caplog.records if "after the last round" in record.message]
    assert told.message.startswith("run.set_lr() came")
    assert told.levelno == logging.INFO


def halving(every: int) -> SchedulerOptions:
    return SchedulerOptions(lambda optimizer: StepLR(optimizer, every, 0.5), unit="step")


@pytest.mark.parametrize("policy", [*POLICIES, "exact"])
def test_another_scheduler_begins_at_the_rates_of_its_moment_on_all_ranks(policy: str) -> None:
    steps = Steps()
    before = SchedulerOptions(lr_lambda=lambda step: 1.0 if step < 40 else 0.1)
    run = trainer(steps, policy=policy, devices=3, scheduler=before, **ENDLESS).start()
    ranks = {0, 1, 2} if policy != "exact" else {0}  # there a rank may have no part of a step
    steps.wait_until(lambda: {seen[0] for seen in steps.seen if seen[2] > 80} >= ranks)
    with run.paused():
        known = len(steps.seen)
        run.scale_lr(2.0)
        run.set_scheduler(halving(50))
    steps.wait_until(lambda: {seen[0] for seen in steps.seen[known:] if seen[3] < 6e-5} >= ranks)
    run.stop()
    run.join()
    for rank in ranks:
        rates = [lr for who, _, _, lr in steps.seen[known:] if who == rank]
        assert max(rates) == pytest.approx(2e-4)
        rates = rates[rates.index(max(rates)) :]  # the round before obeys, with its own rate
        assert all(following <= rate for rate, following in pairwise(rates))
    if policy in ("sync", "exact"):  # elsewhere a round that was cut short has counted on more steps
        rates_at: dict[int, set[float]] = {}
        for _, _, position, lr in steps.seen[known:]:
            rates_at.setdefault(position, set()).add(lr)
        assert all(len(rates) == 1 for rates in rates_at.values())


@pytest.mark.parametrize("policy", ["cadence", "exact"])
def test_a_scheduler_that_was_set_is_resumed_with_itself(policy: str, tmp_path: Path) -> None:
    steps = Steps()
    options: dict[str, Any] = {"policy": policy, "checkpoint": tmp_path, "resume": True, **ENDLESS}
    run = trainer(steps, **options).start()
    steps.wait_for_more(30)
    with run.paused():
        known = len(steps.seen)
        run.set_scheduler(halving(40))
        run.scale_lr(3.0)
    steps.wait_until(lambda: steps.seen[-1][3] < 1e-3)
    run.stop()
    run.join()
    known = next(at for at, seen in enumerate(steps.seen) if at >= known and seen[3] != 1e-3)
    begin = min(position for _, _, position, _ in steps.seen[known:])  # any rank may be seen first
    with pytest.raises(CheckpointError, match="resume with the same scheduler"):
        trainer(**options).start()
    again = Steps()
    run = trainer(again, scheduler=halving(40), **options).start()
    again.wait_for_more(100)
    run.stop()
    run.join()
    for _, _, position, lr in steps.seen[known:] + again.seen:
        assert lr == pytest.approx(3e-3 * 0.5 ** ((position - begin) // 40))


def test_wishes_that_cannot_be_met_raise_where_they_are_made() -> None:
    steps = Steps()
    run = trainer(steps, policy="async", **ENDLESS).start()
    made = StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), 1)
    plateau = SchedulerOptions(lambda optimizer: ReduceLROnPlateau(optimizer), unit="epoch")
    wrong: list[tuple[Any, str]] = [
        (made, "scheduler must be SchedulerOptions"),
        (SchedulerOptions(made, unit="step"), "give a scheduler factory"),
        (SchedulerOptions(lambda optimizer: None, unit="step"), "the scheduler factory returned None"),
        (SchedulerOptions(lr_lambda=lambda step: 1.0, warmup_steps=3), "of a run's start"),
        (SchedulerOptions(lr_lambda=lambda step: 1.0, lr_scaling="linear"), "of a run's start"),
        (plateau, "unit='step'"),
    ]
    for options, message in wrong:
        with pytest.raises(OptionError, match=message):
            run.set_scheduler(options)
    for factor in (0, -1.0, float("nan"), "2", True):
        with pytest.raises(OptionError, match="factor must be a number above 0"):
            run.scale_lr(factor)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        run.set_scheduler(SchedulerOptions(lambda optimizer: 1 / 0, unit="step"))  # type: ignore[arg-type,return-value]
    steps.wait_for_more(30)
    run.stop()
    assert run.join().interrupted
    other = trainer(policy="cadence", **ENDLESS).start()
    with pytest.raises(OptionError, match=r"watches the loss needs a run that waits for it"):
        other.set_scheduler(plateau)
    other.stop()
    other.join()


# ---------------------------------------------------------------- epochs
class Epochs(Callback):
    """Writes down the epochs that begin and end."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []

    def on_epoch_start(self, epoch: int) -> None:
        assert epoch not in self.ended
        self.begun.append(epoch)

    def on_epoch_end(self, metrics: EpochMetrics) -> None:
        assert metrics.epoch in self.begun
        self.ended.append(metrics.epoch)


@pytest.mark.parametrize("policy", [*POLICIES, "exact"])
@pytest.mark.parametrize("devices", [1, 3])
def test_each_epoch_is_told_when_it_begins(policy: str, devices: int) -> None:
    epochs = Epochs()
    trainer(policy=policy, devices=devices, callbacks=[epochs]).start().join()
    assert epochs.begun == epochs.ended == [0, 1, 2]


def test_a_run_that_resumes_inside_an_epoch_begins_with_it(tmp_path: Path) -> None:
    before, after = Epochs(), Epochs()
    options: dict[str, Any] = {"policy": "exact", "checkpoint": tmp_path, "resume": True}
    trainer(max_steps=20, callbacks=[before], **options).start().join()
    trainer(callbacks=[after], **options).start().join()
    assert (before.begun, before.ended[:1]) == ([0, 1], [0])
    assert (after.begun, after.ended) == ([1, 2], [1, 2])


# ---------------------------------------------------------------- Ctrl-C
@pytest.mark.posix
@pytest.mark.parametrize(
    ("policy", "where"),
    [("sync", "join"), ("cadence", "metrics"), ("async", "fit"), ("sync", "block"), ("sync", "body")],
)
def test_ctrl_c_ends_the_run_and_keeps_what_it_has_made(
    policy: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps()
    model = nn.Linear(1, 1)
    runs: list[Run] = []
    started = threading.Event()
    main = threading.main_thread()
    folder = None if where == "metrics" else tmp_path
    job = trainer(steps, model=model, policy=policy, checkpoint=folder, progress="auto", **ENDLESS)
    if where == "fit":
        start = job.start
        job.start = lambda: runs.append(start()) or started.set() or runs[0]
    else:
        runs.append(job.start())
        started.set()

    def interrupt() -> None:
        assert started.wait(HANG_S)
        assert runs[0]._engine.records.wait_for_reader(HANG_S)
        steps.wait_for_more(30)
        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    def wait() -> None:
        if where == "join":
            runs[0].join()
        elif where == "metrics":
            for _ in runs[0].metrics(10**6):
                pass
        elif where == "body":
            for _ in runs[0].metrics("round"):
                steps.wait_for_more(10**9)
        elif where == "fit":
            job.fit()
        else:
            with runs[0]:
                steps.wait_for_more(10**9)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(KeyboardInterrupt) as raised:
        wait()
    watcher.join(HANG_S)
    assert not [frame for frame in traceback.extract_tb(raised.value.__traceback__) if OWN in frame.filename]
    state = runs[0].state
    assert state is not None
    assert state.interrupted
    assert state.global_step == len(steps.seen) >= 30
    assert torch.equal(model.weight, state.state_dict["weight"])
    assert runs[0].join() is state
    assert runs[0].status().reason == "Ctrl-C"
    saved = ""
    if folder is not None:
        (newest,) = folder.glob(f"step-{state.global_step:012}-*.pt")
        saved = f"; checkpoint {newest}; start again with resume=True to go on"
    [told] = [line for line in capsys.readouterr().err.splitlines() if "stopped" in line]
    assert told.startswith("flowdp: stopped ")
    assert told.endswith(f", step {state.global_step:,}: Ctrl-C{saved}")


# ---------------------------------------------------------------- norms and shares
@pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)
@pytest.mark.parametrize("policy", [*POLICIES, "exact"])
def test_records_carry_the_norm_of_the_gradients_that_are_clipped(policy: str, lanes: str) -> None:
    """The gradient of the mean of `weight * x` is the mean of x, independent of the training before."""

    data = torch.tensor([[3.0], [3.0], [3.0], [3.0], [5.0], [5.0], [5.0], [5.0]])

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() / len(batch)

    run = trainer(
        loss, model=nn.Linear(1, 1, bias=False), dataset=data,
        per_device_batch_size=4 if policy != "exact" else 2,
        reading=ReadingOptions(shuffle=False), max_grad_norm=0.1, policy=policy, epochs=2,
    ).start()  # fmt: skip
    rounds = [record for record in run.metrics("round") if record.grad_norm is not None]
    for epoch in run.join().history:
        assert epoch.grad_norm == pytest.approx(4.0, rel=1e-3)
        assert epoch.grad_norm_max == pytest.approx(5.0, rel=1e-3)
    assert max(record.grad_norm_max or 0.0 for record in rounds) == pytest.approx(5.0, rel=1e-3)
    assert all(3.0 - 1e-2 <= (record.grad_norm or 0.0) <= (record.grad_norm_max or 0.0) for record in rounds)


@pytest.mark.parametrize("policy", ["cadence", "exact"])
def test_shares_that_change_are_told_and_logged(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flowdp")

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        end = time.perf_counter() + (0.004 if current_worker().rank == 1 else 0.0005) * len(batch)
        while time.perf_counter() < end:  # a device eight times slower
            pass
        return mse(model, batch)

    extra = {"batch_size": 20} if policy == "exact" else {"per_device_batch_size": 1}
    run = trainer(loss, policy=policy, **extra).start()
    told = [record.share for record in run.metrics("round") if record.share]
    run.join()
    assert told
    assert all(len(share) == 2 and sum(share) == pytest.approx(1.0) for share in told)
    assert told[-1][0] > 0.5 > told[-1][1]
    assert sum("the shares are" in record.getMessage() for record in caplog.records) == len(told)


# ---------------------------------------------------------------- the with statement


def test_leaving_the_block_by_an_exception_stops() -> None:
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    steps = Steps()
    run = trainer(steps, model=model, **ENDLESS).start()

    def block() -> None:
        with run:
            steps.wait_for_more(30)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        block()
    assert run.state is not None
    assert run.state.interrupted
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, run.state.state_dict["weight"])


# ---------------------------------------------------------------- several runs


def test_a_second_start_goes_on_from_the_module() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if current_worker().local_step == 0:
            first.append(model.weight.detach().clone())
        return mse(model, batch)

    first: list[Tensor] = []
    model = nn.Linear(1, 1)
    job = trainer(loss, model=model, devices=1)
    before = model.weight.detach().clone()
    job.fit()
    between = model.weight.detach().clone()
    assert job.fit().global_step == 90
    assert torch.equal(first[0], before)
    assert torch.equal(first[1], between)
    assert not torch.equal(before, between)


# ---------------------------------------------------------------- results
def test_the_module_is_not_touched_until_the_end() -> None:
    model = nn.Linear(1, 1).double().eval()
    pointer, before = model.weight.data_ptr(), model.weight.detach().clone()
    steps = Steps()
    run = trainer(steps, model=model, dataset=torch.ones(8, 1).double(), **ENDLESS).start()
    steps.wait_for_more(30)
    assert torch.equal(model.weight, before)
    run.stop()
    run.join()
    assert not torch.equal(model.weight, before)
    assert (model.weight.dtype, model.weight.data_ptr(), model.training) == (torch.float64, pointer, False)
    assert model.weight.grad is None


# ---------------------------------------------------------------- a model that changes during training
class Registers(nn.Linear):
    """Registers something in forward `number` of each replica."""

    def __init__(self, kind: str, number: int = 1) -> None:
        super().__init__(1, 1)
        self.kind, self.number, self.calls = kind, number, 0
        self.register_buffer("late_none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.number:
            if self.kind == "parameter":
                self.late = nn.Parameter(torch.ones(1))
            elif self.kind == "none":
                self.late_none = torch.ones(1)
            else:
                self.register_buffer("late", torch.ones(1), persistent=self.kind == "buffer")
        return super().forward(x)


def own_step(worker: Any, batch: Any) -> None:
    loss = mse(worker.model, batch)
    worker.backward(loss)
    worker.step(worker.optimizers[0])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("options", [{}, {"policy": "exact"}, {"loss": None, "train_step": own_step}])
@pytest.mark.parametrize(
    ("kind", "named"),
    [("parameter", "parameter 'late'"), ("buffer", "buffer 'late'"), ("none", "buffer 'late_none'")],
)
def test_what_is_registered_in_the_first_forward_is_an_error_of_the_first_step(
    kind: str, named: str, options: dict[str, Any], devices: int
) -> None:
    with pytest.raises(StepError, match=f"{named} was registered in the first step") as raised:
        trainer(model=Registers(kind), devices=devices, **options).fit()
    assert raised.value.step == 0
    assert ("persistent=False" in str(raised.value)) == (kind != "parameter")


class Stuck(torch.optim.SGD):
    """An optimizer whose second step raises."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        if self.taken > 1:
            raise ArithmeticError("stuck")
        return super().step(closure)


@pytest.mark.parametrize("policy", [*POLICIES, "exact"])
def test_an_error_of_the_optimizer_names_the_step_that_it_was_to_take(policy: str) -> None:
    with pytest.raises(StepError, match=r"at its step 2 \(.*ArithmeticError: stuck") as raised:
        trainer(policy=policy, optimizer=lambda params: Stuck(params, 0.1)).fit()
    assert raised.value.step == 1


class Refuses(nn.Linear):
    """A model that takes no weights."""

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise KeyError("never")


@pytest.mark.parametrize("model", [Registers("parameter", 4), Registers("buffer", 4), Refuses(1, 1)])
def test_a_finished_run_is_not_lost_with_a_model_that_does_not_take_it(model: nn.Module) -> None:
    run = trainer(model=model).start()
    with pytest.raises(StateError, match="the run has ended well, but the model does not take") as raised:
        run.join()
    state = raised.value.state
    assert isinstance(state, TrainedState)
    assert state.epochs_done == 3
    assert isinstance(raised.value.__cause__, (RuntimeError, KeyError))
    assert run.state is run.snapshot() is state
    assert run.status().phase == "done"
    assert run.error is None
    for ask in (run.join, lambda: list(run.metrics())):
        with pytest.raises(StateError) as again:
            ask()
        assert again.value is raised.value


# ---------------------------------------------------------------- runs of the process
def test_a_run_whose_handle_is_lost_is_found_and_stopped() -> None:
    assert runs() == ()
    first, second = (trainer(**ENDLESS).start() for _ in range(2))
    assert runs() == (first, second)
    first.stop()
    first.join()
    assert runs() == (second,)
    del second
    gc.collect()
    (found,) = runs()
    found.stop()
    assert found.join().interrupted
    assert runs() == ()


# ---------------------------------------------------------------- what is said, and what is refused
def test_a_second_start_on_a_model_is_refused_while_the_first_lives() -> None:
    own = trainer(**ENDLESS)
    first = own.start()
    other = trainer(model=own.config.replica.model)
    for again in (own, other):
        with pytest.raises(OptionError, match=r"model: this Linear is trained .*runs\(\).*run\.stop\(\)"):
            again.start()
    assert runs() == (first,)
    assert first.stop()
    first.join()
    assert other.start().join().epochs_done == 3


def test_runs_of_one_factory_and_forwards_beside_a_run_share_no_model() -> None:
    def make_model() -> nn.Module:
        return nn.Linear(1, 1)

    live = [trainer(model=make_model, **ENDLESS).start() for _ in range(2)]
    own = trainer(**ENDLESS)
    live.append(own.start())
    assert own.predict(torch.ones(4, 1)).shape == (4, 1)
    for run in live:
        run.stop()
        run.join()


COMMANDS: list[Callable[[Run], bool]] = [
    Run.stop,
    Run.pause,
    Run.unpause,
    Run.checkpoint,
    lambda run: run.set_lr(0.1),
    lambda run: run.scale_lr(2.0),
    lambda run: run.set_scheduler(None),
]


def test_a_command_says_whether_the_run_takes_it(tmp_path: Path) -> None:
    run = trainer(checkpoint=tmp_path, **ENDLESS).start()
    assert all(command(run) for command in COMMANDS[1:])
    with run.paused():
        assert not run.unpause()  # the block's end does it
    assert run.stop()
    before = run.join().state_dict
    assert [command(run) for command in COMMANDS] == [False] * len(COMMANDS)
    assert run.join().state_dict is before
    assert run.status().reason == "run.stop()"


def constant(model: nn.Module, batch: Any) -> Tensor:
    return 0 * model(batch).sum() + 1


@pytest.mark.parametrize("policy", [*POLICIES, "exact"])
def test_early_stopping_is_no_interruption(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    stopping = EarlyStopping(patience=2)
    run = trainer(constant, policy=policy, epochs=20, callbacks=[stopping], progress="auto").start()
    state = run.join()
    assert (state.epochs_done, state.interrupted, run.status().phase) == (3, False, "done")
    assert run.status().reason == "early stopping, no 'loss' better than 1.0000 in 2 epochs"
    run.join()
    lines = [line for line in capsys.readouterr().err.splitlines() if "ended" in line]
    assert lines == [f"flowdp: ended after 3 epochs, step {state.global_step}: {run.status().reason}"]


def test_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(max_time=0.05, progress="auto", **ENDLESS).start()
    assert run.join().interrupted
    assert run.status().reason == "max_time is up"
    assert ": max_time is up" in capsys.readouterr().err


def test_a_run_that_goes_on_says_from_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"checkpoint": tmp_path, "resume": True, "progress": "auto"}
    trainer(**options).fit()
    assert "ended" not in capsys.readouterr().err  # as it was planned
    newest = tmp_path / "step-000000000090-3.pt"

    run = trainer(**options).start()
    run.join()
    told = "ended after 3 epochs, step 90: nothing was left to train, all epochs are trained"
    assert capsys.readouterr().err.splitlines()[-1] == f"flowdp: {told}"
    assert str(run.report()).startswith("no samples were trained in ")

    with caplog.at_level("INFO", logger="flowdp"):
        trainer(**options, epochs=4).fit()
    resumed = f"resumed from checkpoint {str(newest)!r}, epoch 4, step 90"
    assert {resumed, "ended after 4 epochs, step 120: all epochs are trained"} <= set(caplog.messages)
    assert resumed not in capsys.readouterr().err  # the log has it
    trainer(**options, epochs=5).fit()
    assert ", epoch 5, step 120\n" in capsys.readouterr().err
    trainer(**{**options, "progress": False}, epochs=6).fit()
    assert "resumed" not in capsys.readouterr().err


def test_keep_best_of_an_unknown_name_fails_in_the_first_epoch(tmp_path: Path) -> None:
    def recorded(model: nn.Module, batch: Any) -> Any:
        worker = current_worker()
        assert worker is not None
        return mse(model, batch), {"norm": 1.0} if worker.epoch == 0 else {}

    wrong = CheckpointOptions(tmp_path / "a", keep_best=("accuracy", "max"))
    with pytest.raises(OptionError, match=r"keep_best: nothing in epoch 1 is called 'accuracy'.*'loss'"):
        trainer(checkpoint=wrong).fit()
    # One that was there once is known, in a run that goes on, too.
    right = CheckpointOptions(tmp_path / "b", keep_best=("norm", "max"))
    trainer(recorded, checkpoint=right).fit()
    assert trainer(recorded, checkpoint=right, resume=True, epochs=4).fit().epochs_done == 4


@pytest.mark.parametrize("policy", [*POLICIES, "exact"])
def test_a_batch_above_the_dataset_is_told(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer(policy=policy, per_device_batch_size=None, batch_size=SAMPLES + 2, epochs=1).fit()
    assert "a step of 62 samples (batch_size) is above the 60 of the dataset" in caplog.messages
    caplog.clear()
    trainer(policy=policy, per_device_batch_size=None, batch_size=SAMPLES, epochs=1).fit()
    assert "is above" not in caplog.text
