"""Tests of evaluations that a stop has taken: a resumed run makes them up, and is as if none had come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import flowdp
from flowdp import CheckpointOptions, EvaluationOptions
from flowdp.checkpoint.file import read
from tests.limits import HANG_S
from tests.reliability.small import same, stop

pytestmark = pytest.mark.usefixtures("kept_replicas")

EPOCHS, STEPS = 4, 5
X = torch.randn(70, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (70,), generator=torch.Generator().manual_seed(2))


def net(device: torch.device) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    """It halves the rate at almost every loss, so that one that it misses shows."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)


class Reports(flowdp.Callback):
    """The records of a run, as its callbacks hear of them."""

    def __init__(self) -> None:
        self.epochs: list[flowdp.EpochMetrics] = []
        self.evaluations: list[flowdp.EvaluationEnded] = []

    def on_epoch_end(self, metrics: flowdp.EpochMetrics) -> None:
        self.epochs.append(metrics)

    def on_evaluation(self, record: flowdp.EvaluationEnded) -> None:
        self.evaluations.append(record)


class Life:
    """A run, which is stopped where it is told.

    Args:
        in_evaluation: Whether it is stopped in the evaluation of this worker.
        in_step: Whether it is stopped in this worker's step.
        options: Of the Trainer.
    """

    def __init__(
        self,
        in_evaluation: Callable[[Any], bool] = lambda _: False,
        in_step: Callable[[Any], bool] = lambda _: False,
        **options: Any,
    ) -> None:
        self.reports = Reports()
        self.places: set[tuple[int, float]] = set()  # epochs and learning rates that evaluations saw
        self._handle: Future[flowdp.Run] = Future()
        self._in_evaluation, self._in_step = in_evaluation, in_step
        given: dict[str, Any] = {
            "model": net,
            "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            "loss": self._loss,
            "dataset": (X, Y),
            "batch_size": 16,
            "epochs": EPOCHS,
            "devices": ["cpu"] * 2,
            "policy": "exact",
            "evaluation": EvaluationOptions((X[:33], Y[:33]), step=self._evaluate, sanity_check=0),
            "scheduler": flowdp.SchedulerOptions(plateau, unit="epoch"),
            "callbacks": [self.reports],
            "progress": False,
            "runtime": flowdp.RuntimeOptions(
                partition_ratios=(1, 1), tune_process=flowdp.ProcessTuning(openmp=False)
            ),
        }
        if isinstance(every := options.pop("evaluation", None), int):
            given["evaluation"] = EvaluationOptions(
                (X[:33], Y[:33]), step=self._evaluate, every=every, unit="step", sanity_check=0
            )
        self.run = flowdp.Trainer(**given | options).start()
        self._handle.set_result(self.run)
        self.state = self.run.join(HANG_S)
        self.replicas = [
            {
                "model": dict(replica.module.state_dict()),
                "optimizers": replica.optimizer_states(),
                "rate": replica.learning_rate.state_dict(),
            }
            for replica in self.run._engine.replicas
        ]

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self._in_step(flowdp.current_worker()):
            stop(self._handle.result(HANG_S))
        return loss(model, batch)

    def _evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        worker = flowdp.current_worker()
        if self._in_evaluation(worker):
            stop(self._handle.result(HANG_S))
        self.places.add((worker.epoch, worker.lr))
        return {"loss": loss(model, batch)}


def compared(records: Any) -> list[Any]:
    # The order in which losses of the training are summed depends on the clock.
    return [(one.epoch, round(one.loss, 9), one.lr, dict(one.eval), one.owes_evaluation) for one in records]


def compare(lives: list[Life], whole: Life) -> None:
    """The last of several lives is where the run without a stop is, and its callbacks heard the same."""
    last = lives[-1]
    same(last.replicas, whole.replicas)
    same(compared(last.state.history), compared(whole.state.history))
    for name in ("global_step", "epochs_done", "interrupted"):
        assert getattr(last.state, name) == getattr(whole.state, name)
    final = [one for life in lives for one in life.reports.epochs if not one.owes_evaluation]
    same(compared(final), compared(whole.reports.epochs))


@pytest.mark.parametrize(
    ("where", "epoch", "by"),
    [("evaluation", 1, "file"), ("last step", EPOCHS - 1, "file"), ("last step", 1, "state")],
)
def test_the_evaluation_of_an_epoch_is_made_up_bit_for_bit(
    tmp_path: Path, where: str, epoch: int, by: str
) -> None:
    kept = {"checkpoint": CheckpointOptions(tmp_path / "a", keep_best=("loss", "min"), keep_last=1)}
    whole = Life(checkpoint=CheckpointOptions(tmp_path / "b", keep_best=("loss", "min"), keep_last=1))
    first = Life(
        in_evaluation=lambda worker: where == "evaluation" and worker.epoch == epoch,
        in_step=lambda worker: where == "last step" and worker.global_step == (epoch + 1) * STEPS - 1,
        **kept,
    )
    assert first.state.interrupted
    assert first.run.status().phase == "stopped"
    assert (first.state.epochs_done, first.state.global_step) == (epoch + 1, (epoch + 1) * STEPS)
    assert [one.owes_evaluation for one in first.state.history] == [False] * epoch + [True]
    assert not first.state.history[-1].eval
    resume: Any = first.state if by == "state" else True
    options = {"checkpoint": tmp_path / "c"} if by == "state" else kept
    second = Life(resume=resume, **options)
    compare([first, second], whole)
    assert second.reports.epochs[0].epoch == epoch
    if by == "file":
        assert read(tmp_path / "a/best.pt")["epoch"] == read(tmp_path / "b/best.pt")["epoch"]
        newest = flowdp.load_checkpoint(tmp_path / "a")
        same(compared(newest.history), compared(whole.state.history))
    assert {place for place in whole.places if place[0] >= epoch} == second.places
    # Nothing is left to be made up.
    third = Life(resume=second.state)
    assert third.reports.epochs == []
    same(compared(third.state.history), compared(whole.state.history))


@pytest.mark.parametrize(
    ("where", "at", "by"), [("evaluation", 7, "file"), ("step", 14, "state"), ("evaluation", 20, "state")]
)
def test_an_evaluation_by_steps_is_made_up_bit_for_bit(tmp_path: Path, where: str, at: int, by: str) -> None:
    every = 7 if at < 20 else 20  # the last step of the run
    options: dict[str, Any] = {"evaluation": every, "scheduler": None}
    whole = Life(**options)
    first = Life(
        in_evaluation=lambda worker: where == "evaluation" and worker.global_step == at - 1,
        in_step=lambda worker: where == "step" and worker.global_step == at - 1,
        checkpoint=tmp_path,
        **options,
    )
    assert (first.state.global_step, first.state.interrupted) == (at, True)
    assert [one.global_step for one in first.reports.evaluations] == list(range(every, at, every))
    options |= {"resume": first.state} if by == "state" else {"checkpoint": tmp_path, "resume": True}
    second = Life(**options)
    compare([first, second], whole)
    assert [*first.reports.evaluations, *second.reports.evaluations] == whole.reports.evaluations
    assert {place[0] for place in second.places} <= {place[0] for place in whole.places}
    third = Life(evaluation=every, scheduler=None, resume=second.state)
    assert third.reports.evaluations == []
