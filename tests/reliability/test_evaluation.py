"""Tests of evaluation between epochs, and its uses: early stopping, the best state, plateau schedulers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp import EarlyStopping, FlowdpError, StepError
from tests.limits import HANG_S
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import ENDLESS, Door, count, stop, trainer

POLICIES = ("sync", "cadence", "async", "exact")
NUMBERS = torch.randn(37, 3, generator=torch.Generator().manual_seed(8))
EVALUATED = (torch.arange(37), NUMBERS, NUMBERS.sum(1))


class Net(nn.Module):
    """With batch norm and dropout: training mode gives other results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).squeeze(1)


def loss(model: nn.Module, batch: Any) -> Any:
    _, x, y = batch
    predicted = model(x)
    return F.mse_loss(predicted, y), {"distance": (predicted - y).abs().mean()}


def plain(model: nn.Module) -> dict[str, float]:
    """Evaluation of a model by plain PyTorch."""
    model.eval()
    with torch.no_grad():
        predicted = model(EVALUATED[1])
    return {
        "loss": F.mse_loss(predicted, EVALUATED[2]).item(),
        "distance": (predicted - EVALUATED[2]).abs().mean().item(),
    }


def real(policy: str, devices: int, **options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "model": Net(),
        "optimizer": lambda params: torch.optim.Adam(params, lr=0.05),
        "loss": loss,
        "dataset": tuple(tensor[:36] for tensor in EVALUATED),
        "per_device_batch_size": 4,
        "epochs": 2,
        "policy": policy,
        "devices": ["cpu"] * devices,
        "evaluation": EVALUATED,
        "runtime": flowdp.RuntimeOptions(
            partition_ratios=None if policy == "sync" else [1.0] * devices,
            tune_process=flowdp.ProcessTuning(openmp=False),
        ),  # batch norm needs two samples
        "progress": False,
    }
    return flowdp.Trainer(**given | options)


@pytest.mark.parametrize(("devices", "own"), [(1, False), (3, True)])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_means_are_those_of_plain_pytorch_and_each_sample_is_there_once(
    policy: str, devices: int, own: bool
) -> None:
    seen: Counter[int] = Counter()

    def step(model: nn.Module, batch: Any) -> Mapping[str, Any]:
        seen.update(batch[0].tolist())
        value, scalars = loss(model, batch)
        return {"loss": value, **scalars}

    model = Net()
    evaluated = flowdp.EvaluationOptions(EVALUATED, step=step, sanity_check=0) if own else EVALUATED
    state = real(policy, devices, model=model, evaluation=evaluated).fit()
    assert [set(record.eval) for record in state.history] == [{"loss", "distance"}] * 2
    assert state.history[-1].eval == pytest.approx(plain(model), rel=1e-5)
    assert not own or seen == dict.fromkeys(range(37), 2)
    assert "distance" in state.history[-1].scalars


@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_an_evaluation_changes_nothing_of_the_training(policy: str) -> None:
    with_it, without = (
        real(policy, 2, evaluation=dataset, model=DropNothing()).fit().state_dict
        for dataset in (EVALUATED, None)
    )
    assert all(torch.equal(value, without[name]) for name, value in with_it.items())


class DropNothing(Net):
    """Without dropout: on the CPU its random numbers are the process's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner[2] = nn.Identity()


# ---------------------------------------------------------------- decisions by the evaluation
class Climbs(nn.Module):
    """Its one number is that of the last epoch trained, from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))


def climbs(policy: str, devices: int, scores: list[float], **options: Any) -> flowdp.Trainer:
    """A run of 8 samples in batches of 2 that climbs by 1 per epoch; the list has each epoch's score."""
    steps = 4 // devices

    def rise(model: nn.Module, batch: Any) -> Tensor:
        value = model.value
        assert isinstance(value, Tensor)
        return -value / steps

    def score(model: nn.Module, batch: Any) -> Mapping[str, float]:
        return {"score": scores[round(float(model.value)) - 1]}

    given: dict[str, Any] = {
        "model": Climbs(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
        "loss": rise,
        "dataset": (torch.arange(8),),
        "per_device_batch_size": 2,
        "policy": policy,
        "devices": ["cpu"] * devices,
        "epochs": len(scores),
        "evaluation": flowdp.EvaluationOptions((torch.arange(5),), step=score, sanity_check=0),
        "progress": False,
        "runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
    }
    return flowdp.Trainer(**given | options)


SCORES = [1.0, 3.0, 2.0, 2.5, 9.0, 9.0]


@pytest.mark.parametrize(("policy", "devices"), [("sync", 1), ("sync", 2), ("cadence", 1), ("async", 1)])
@pytest.mark.parametrize("restore", [False, True])
def test_early_stopping_ends_in_its_epoch_with_its_answer(policy: str, devices: int, restore: bool) -> None:
    stopping = EarlyStopping("score", patience=2, mode="max", restore_best=restore)
    state = climbs(policy, devices, SCORES, callbacks=[stopping]).fit()
    assert [record.eval["score"] for record in state.history] == SCORES[:4]
    assert not state.interrupted
    assert (state.epochs_done, state.global_step) == (4, 16)
    assert state.state_dict["value"].item() == (2 if restore else 4)


def test_the_best_one_is_known_in_a_resumed_run(tmp_path: Path) -> None:
    stopping = EarlyStopping("score", patience=2, mode="max", restore_best=True)
    options: dict[str, Any] = {"checkpoint": tmp_path, "callbacks": [stopping]}
    climbs("sync", 2, SCORES, epochs=3, **options).fit()
    state = climbs("sync", 2, SCORES, resume=True, **options).fit()
    assert (state.epochs_done, state.state_dict["value"].item()) == (4, 2)
    # Already decided: a run resumed from the end ends at once.
    again = climbs("sync", 2, SCORES, resume=True, **options).fit()
    assert (again.epochs_done, again.global_step, again.state_dict["value"].item()) == (4, 16, 2)


@pytest.mark.parametrize("devices", [2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_scheduler_that_watches_sees_the_evaluated_loss(
    recorder: StepRecorder, policy: str, devices: int
) -> None:
    def watches(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    options: dict[str, Any] = {"scheduler": flowdp.SchedulerOptions(watches, unit="epoch"), "epochs": 4}
    evaluated = {
        "evaluation": flowdp.EvaluationOptions((torch.arange(5),), step=lambda model, batch: {"loss": 1.0}),
        # which never gets better; the training's does
    }
    state = trainer(recorder, policy, devices, **options, **evaluated).fit()
    assert [record.lr for record in state.history] == [1.0, 1.0, 0.5, 0.25]
    state = trainer(recorder, policy, devices, **options).fit()
    assert {record.lr for record in state.history} == {1.0}


# ---------------------------------------------------------------- interrupted and failing evaluations
@pytest.mark.parametrize(("policy", "devices"), list(zip(POLICIES, (1, 2, 2, 2), strict=True)))
def test_stop_cuts_an_evaluation(tmp_path: Path, recorder: StepRecorder, policy: str, devices: int) -> None:
    door, batches = Door(), []

    def step(model: nn.Module, batch: Any) -> Mapping[str, float]:
        batches.append(batch)
        if len(batches) > devices:
            door.wait()
        return {"score": 1.0}

    run = trainer(
        recorder,
        policy,
        devices,
        evaluation=flowdp.EvaluationOptions((torch.arange(4000),), step=step, sanity_check=0),
        checkpoint=tmp_path,
        **ENDLESS,
    ).start()
    assert door.reached.wait(HANG_S)
    stop(run)
    door.opened.set()
    state = run.join(HANG_S)
    assert len(batches) <= 2 * devices
    assert state.interrupted
    assert (state.epochs_done, dict(state.history[0].eval)) == (1, {})
    scored = flowdp.EvaluationOptions((torch.arange(8),), step=lambda model, batch: {"score": 2.0})
    options: dict[str, Any] = {"checkpoint": tmp_path, "resume": True, "evaluation": scored}
    resumed = trainer(recorder, policy, devices, epochs=2, **options).fit()
    assert resumed.epochs_done == 2
    assert [record.eval for record in resumed.history] == [{"score": 2.0}] * 2


@pytest.mark.parametrize(("policy", "devices"), list(zip(POLICIES, (1, 2, 2, 2), strict=True)))
def test_a_failing_evaluation_ends_the_run(recorder: StepRecorder, policy: str, devices: int) -> None:
    def step(model: nn.Module, batch: Any) -> Mapping[str, float]:
        raise ValueError("mine")

    run = trainer(
        recorder,
        policy,
        devices,
        evaluation=flowdp.EvaluationOptions((torch.arange(9),), step=step, sanity_check=0),
    ).start()
    with pytest.raises(StepError, match="failed while it evaluates after epoch 1: ValueError: mine"):
        run.join(HANG_S)


def test_a_callback_ends_the_run_only_where_it_says_so(recorder: StepRecorder) -> None:
    class Raises(flowdp.Callback):
        def on_epoch_end(self, metrics: flowdp.EpochMetrics) -> None:
            raise ValueError("mine")

    class Ends(Raises):
        ends_run = True

    run = trainer(recorder, "sync", 2, callbacks=[Raises()]).start()
    assert run.join(HANG_S).epochs_done == 3
    assert run.status().problems == ("Raises.on_epoch_end raised ValueError: mine (3 times)",)
    run = trainer(recorder, "sync", 2, callbacks=[Ends()], loss=count, **ENDLESS).start()
    with pytest.raises(FlowdpError, match=r"Ends.on_epoch_end raised ValueError: mine") as caught:
        run.join(HANG_S)
    assert isinstance(caught.value.__cause__, ValueError)
