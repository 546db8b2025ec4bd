"""Tests of rounds of several steps, with and without an outer step: no step is lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp import OuterOptions
from flowdp.collective import host
from flowdp.machine import planned_rounds
from flowdp.replica.rank_state import named_momentum
from tests.limits import HANG_S
from tests.numerics.conftest import StepRecorder
from tests.numerics.test_mean_of_steps import ByHand, check_equal, network, rounds_of, train

# On streams each rank has a momentum of its own, on the CPU all have one.
pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

SLOWMO = OuterOptions()
DILOCO = OuterOptions(lr=0.7, momentum=0.9, nesterov=True)
PLAIN = OuterOptions(lr=1.0, momentum=0.0)
OWN_THREADS = flowdp.ProcessTuning(openmp=False)


@pytest.fixture(params=["alone", "together"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to reduce on the host: by the last arrival, and each rank a part."""
    if request.param == "together":
        monkeypatch.setattr(host, "SMALL", 0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round is late, and so shortened: with fixed shares and rounds the bits of a run repeat."""
    monkeypatch.setattr(planned_rounds, "LATE_MS", math.inf)


FIXED = flowdp.CadenceOptions(anchor=2, max_anchor=2, divergence_guard=False)


class Outer:
    """The formula, for tensors by name, in float64."""

    def __init__(self, options: OuterOptions, start: Mapping[str, Tensor]) -> None:
        self.options = options
        self.last = {name: value.double().clone() for name, value in start.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.last.items()}

    def step(self, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, last in self.last.items():
            difference = last - mean[name].double()
            self.momentum[name] = self.options.momentum * self.momentum[name] + difference
            step = self.momentum[name]
            if self.options.nesterov:
                step = difference + self.options.momentum * self.momentum[name]
            self.last[name] = last - self.options.lr * step
        return dict(self.last)


class WithOuter(ByHand):
    """Models that step on their own, and an outer step towards their mean."""

    def __init__(self, model: nn.Module, count: int, momentum: float, options: OuterOptions) -> None:
        super().__init__(model, count, momentum)
        self.outer = Outer(options, dict(model.named_parameters()))

    def round(self, batches: Sequence[Sequence[Sequence[int]]]) -> float:
        drift = super().round(batches)
        moved = self.outer.step(dict(self.models[0].named_parameters()))
        for model in self.models:
            model.load_state_dict({**model.state_dict(), **moved})
        return drift


# ---------------------------------------------------------------- the numbers
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", [SLOWMO, DILOCO])
@pytest.mark.parametrize("ratios", [(1, 1), (3, 1), (2, 1, 1)])
def test_a_real_model_with_equal_and_unequal_steps(
    recorder: StepRecorder, ratios: tuple[int, ...], options: OuterOptions
) -> None:
    model = network()
    hand = WithOuter(model, len(ratios), 0.9, options)
    run = train(
        recorder,
        model,
        len(ratios),
        0.9,
        runtime=flowdp.RuntimeOptions(partition_ratios=ratios),
        cadence=flowdp.CadenceOptions(anchor=2, max_anchor=2),
        outer=options,
    )
    # A late round may be over before any rank has begun a step of it, and changes nothing.
    records = [record for record in run.metrics("round") if any(record.steps)]
    trained = rounds_of(recorder, len(ratios))
    assert [record.steps for record in records] == [tuple(map(len, ranks)) for ranks in trained]
    assert len(records) >= 3
    for ranks in trained:
        hand.round(ranks)
    check_equal(run, hand, 2e-5)
    state = run.join()
    assert state.outer_momentum is not None
    assert state.outer_momentum.keys() == hand.outer.momentum.keys()
    for name, value in hand.outer.momentum.items():
        torch.testing.assert_close(state.outer_momentum[name].double(), value, rtol=0, atol=2e-5)


SAMPLES, BATCH_SIZE, LR, EPOCHS = 302, 4, 0.125, 4


def linear(recorder: StepRecorder, devices: int, policy: str = "cadence", **options: Any) -> flowdp.Trainer:
    """A run whose loss is linear in the parameters: a step's gradient is the mean of its samples."""
    draw = torch.Generator().manual_seed(6)
    loss = options.pop("loss", lambda model, batch: model(batch[1]).mean())
    given: dict[str, Any] = {
        "dataset": (torch.arange(SAMPLES), torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)),
        "per_device_batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "devices": ["cpu"] * devices,
        "policy": policy,
        "outer": SLOWMO,
        "cadence": flowdp.CadenceOptions(anchor=2, max_anchor=4),
        "progress": False,
        "runtime": flowdp.RuntimeOptions(tune_process=OWN_THREADS),
    }
    return flowdp.Trainer(
        options.pop("model", None) or line(),
        lambda params: torch.optim.SGD(params, lr=LR),
        recorder.watch(loss),
        **given | options,
    )


def line() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Linear(5, 1, bias=False).double()


def expected(
    run: flowdp.Run,
    recorder: StepRecorder,
    options: OuterOptions = SLOWMO,
    bad: tuple[int, int] | None = None,
) -> Outer:
    """The outer steps of the rounds of a run with a linear loss.

    A mean is the last one less, for each rank, its part of the samples times the sum of its steps. A rank has
    no part in the round of its `bad` step, nor in the one whose outcome tells that. A round without samples
    changes nothing: in async the last meeting is one, if no rank has stepped since its snapshot.
    """
    made = Outer(options, {"weight": line().weight.detach()})
    data = run._engine._parts.services.source.tensors[1]  # type: ignore[attr-defined]
    records = list(run.metrics("round"))  # to the end
    left = [iter(enumerate(recorder.of(rank))) for rank in range(len(run._engine.replicas))]
    for record in records:
        taken = [list(itertools.islice(mine, n)) for mine, n in zip(left, record.steps, strict=True)]
        samples = [
            0
            if any((rank, number) == bad for number, _ in theirs) or f"rank {rank} had NaN" in record.reason
            else record.samples[rank]
            for rank, theirs in enumerate(taken)
        ]
        if not any(samples):
            continue
        mean = made.last["weight"][0].clone()
        for theirs, count in zip(taken, samples, strict=True):
            for _, step in theirs:
                mean -= count / sum(samples) * step.lr * data[list(step.indices)].mean(0)
        made.step({"weight": mean[None]})
    return made


def check(run: flowdp.Run, wanted: Outer) -> None:
    state = run.join(HANG_S)
    left = run._engine.failures.forgiven
    for rank, parts in enumerate(run._engine.ranks):
        if rank not in left:
            own = parts.replica.module.state_dict()["weight"]
            assert torch.equal(own, state.state_dict["weight"])
            if parts.outer is not None:
                same(named_momentum(parts.replica, parts.outer), named(state))
    torch.testing.assert_close(state.state_dict["weight"], wanted.last["weight"], rtol=0, atol=1e-11)
    if not wanted.options.is_plain:
        torch.testing.assert_close(named(state)["weight"], wanted.momentum["weight"], rtol=0, atol=1e-11)


def named(state: flowdp.TrainedState) -> Mapping[str, Tensor]:
    assert state.outer_momentum is not None
    return state.outer_momentum


SHORT = flowdp.CadenceOptions(anchor=2, max_anchor=4)


@pytest.mark.parametrize(
    ("policy", "devices", "outer", "cadence"),
    [
        ("cadence", 2, SLOWMO, SHORT),
        ("cadence", 3, DILOCO, SHORT),
        ("async", 2, DILOCO, SHORT),
        ("async", 3, SLOWMO, SHORT),
        ("async", 2, None, SHORT),
        ("async", 3, None, flowdp.CadenceOptions()),
        ("async", 3, None, flowdp.CadenceOptions(max_batch_diff=1)),  # ranks that are ahead are held
    ],
)
def test_no_step_is_lost_whatever_the_speed(
    recorder: StepRecorder, policy: str, devices: int, outer: OuterOptions | None, cadence: Any
) -> None:
    recorder.before = lambda worker, _: sum(range(20_000 * worker.rank))  # type: ignore[assignment, return-value]
    run = linear(recorder, devices, policy, outer=outer, cadence=cadence).start()
    check(run, expected(run, recorder, outer or PLAIN))
    records = list(run.metrics("round"))
    assert sum(sum(record.samples) for record in records) == EPOCHS * SAMPLES
    if policy == "async" and cadence is SHORT:  # means of snapshots, and the meetings of all
        assert {"all devices meet"} < {record.reason for record in records}


class Guarded(nn.BatchNorm1d):
    """Fails at the first negative variance."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_var is not None
        assert (self.running_var >= 0).all(), self.running_var
        return super().forward(x)


def test_variances_stay_positive_in_means_beside_the_training(recorder: StepRecorder) -> None:
    # Variances halve with every step: adding the difference of two would give values far below zero.
    model = nn.Sequential(Guarded(5, momentum=0.5), nn.Linear(5, 1)).double()
    model[0].running_var.fill_(1e6)  # type: ignore[union-attr, operator]
    run = linear(recorder, 3, "async", model=model, outer=None).start()
    assert sum(record.reason != "all devices meet" for record in run.metrics("round")) >= 4
    variance = run.join(HANG_S).state_dict["0.running_var"]
    assert bool(((variance >= 0) & (variance < 1e3)).all())


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_barriers_between_rounds_and_a_schedule_change_nothing(
    tmp_path: Path, recorder: StepRecorder, policy: str
) -> None:
    run = linear(
        recorder,
        2,
        policy,
        evaluation=flowdp.EvaluationOptions(
            torch.ones(8, 5, dtype=torch.float64),
            step=lambda model, batch: {"sum": model(batch).sum()},
            every=7,
            unit="step",
        ),
        checkpoint=flowdp.CheckpointOptions(tmp_path, every=5, unit="step"),
        scheduler=flowdp.SchedulerOptions(lr_lambda=lambda step: 0.99**step),
    ).start()
    check(run, expected(run, recorder))
    assert len(list(tmp_path.iterdir())) > 1
    assert list(run.metrics("evaluation"))


@pytest.mark.usefixtures("way", "patient")
def test_plain_numbers_are_the_plain_mean_to_the_bit(recorder: StepRecorder) -> None:
    found = []
    for outer in (None, PLAIN, SLOWMO):
        fixed = flowdp.RuntimeOptions(partition_ratios=(2, 1), tune_process=OWN_THREADS)
        run = train(recorder, network(), 2, 0.9, runtime=fixed, cadence=FIXED, outer=outer)
        found.append(run.join())
    plain, same, other = found
    assert plain.outer_momentum is None
    assert same.outer_momentum is None
    for name, value in plain.state_dict.items():
        assert torch.equal(same.state_dict[name], value)
    assert not torch.equal(other.state_dict["0.weight"], plain.state_dict["0.weight"])


def test_one_device_trains_as_without(recorder: StepRecorder) -> None:
    states = [linear(recorder, 1, "cadence", outer=outer).fit() for outer in (None, SLOWMO)]
    assert torch.equal(states[0].state_dict["weight"], states[1].state_dict["weight"])
    assert states[1].outer_momentum is None


# ---------------------------------------------------------------- healed replicas, lost devices
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_healed_replica_goes_on_with_the_others_momentum(recorder: StepRecorder, policy: str) -> None:
    def poisoned(model: nn.Module, batch: Any) -> Tensor:
        worker, value = flowdp.current_worker(), model(batch[1]).mean()
        return value * math.nan if worker.rank == 1 and worker.local_step == 4 else value

    run = linear(recorder, 3, policy, loss=poisoned).start()
    state = run.join(HANG_S)
    assert any("NaN" in problem for problem in run.status().problems)
    assert all(bool(value.isfinite().all()) for value in (*state.state_dict.values(), *named(state).values()))
    check(run, expected(run, recorder, bad=(1, 4)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_device_that_is_lost_takes_no_momentum_with_it(recorder: StepRecorder, failing: int) -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        if worker.rank == failing and worker.local_step >= 5:
            raise ValueError("mine")
        return model(batch[1]).mean()  # type: ignore[no-any-return]

    run = linear(
        recorder,
        3,
        loss=fails,
        failures=flowdp.FailureOptions(on_failure="continue"),
        cadence=flowdp.CadenceOptions(anchor=2, max_anchor=2),
        runtime=flowdp.RuntimeOptions(partition_ratios=[1.0] * 3, tune_process=OWN_THREADS),
    ).start()
    wanted = expected(run, recorder)
    check(run, wanted)
    assert [problem.split(":")[0] for problem in run.status().problems] == [f"rank {failing} left"]
    assert len(recorder.of(failing)) >= 5


# ---------------------------------------------------------------- kept, and gone on with
def repeated(model: nn.Module, **options: Any) -> flowdp.Trainer:
    """A run whose bits repeat."""
    from tests.numerics.test_mean_of_steps import data, loss

    given: dict[str, Any] = {
        "dataset": data(),
        "per_device_batch_size": 8,
        "epochs": 4,
        "devices": ["cpu", "cpu"],
        "policy": "cadence",
        "cadence": FIXED,
        "outer": DILOCO,
        "progress": False,
        "runtime": flowdp.RuntimeOptions(partition_ratios=(1, 1), tune_process=OWN_THREADS),
    }
    adam = lambda params: torch.optim.AdamW(params, lr=0.01)  # noqa: E731
    return flowdp.Trainer(model, adam, loss, **given | options)


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.usefixtures("way", "patient")
@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path, unit: Any) -> None:
    whole = repeated(network()).fit()
    save = flowdp.CheckpointOptions(tmp_path, every=1 if unit == "epoch" else 4, unit=unit)
    ends = {"epochs": 2} if unit == "epoch" else {"max_steps": 12}
    repeated(network(), checkpoint=save, **ends).fit()
    resumed = repeated(network(), checkpoint=save, resume=True).fit()
    same(resumed.state_dict, whole.state_dict)
    same(named(resumed), named(whole))
    assert bool(torch.cat([one.flatten() for one in named(whole).values()]).abs().max() > 0)


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("devices", [2, 3])
def test_other_devices_and_a_given_state_go_on_with_it(tmp_path: Path, policy: str, devices: int) -> None:
    options: dict[str, Any] = {"policy": policy, "epochs": 1}
    before = repeated(network(), checkpoint=tmp_path, **options).fit()
    options["devices"] = ["cpu"] * devices
    options["runtime"] = flowdp.RuntimeOptions(tune_process=OWN_THREADS)
    for resume in (True, before, flowdp.load_checkpoint(tmp_path)):
        folder = tmp_path if resume is True else None
        run = repeated(network(), checkpoint=folder, resume=resume, **options).start()  # no step is left
        same(named(run.join()), named(before))
        for parts in run._engine.ranks:
            same(named_momentum(parts.replica, parts.outer), named(before))
            assert parts.outer is not None
            for last, part in zip(parts.outer._last.values(), parts.replica.flat.trained(), strict=True):
                assert torch.equal(last, part)
