"""Tests of the callback that gives a run's numbers to a logger, and of their names."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flowdp
from flowdp.observe.loggers.log import numbers_of
from flowdp.policy.tally import EpochMetrics, Tally, Work
from flowdp.protocol.commands import RoundEnded
from tests.limits import HANG_S

X = torch.arange(24.0).view(12, 2) / 24


class Book:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []

    def begin(self, settings: Any, step: int) -> None:
        self.calls.append(("begin", settings, step))

    def log(self, numbers: Any, step: int) -> None:
        self.calls.append(("log", numbers, step))

    def end(self, status: str) -> None:
        self.calls.append(("end", threading.current_thread().name, status))

    def steps(self, name: str) -> list[int]:
        return [step for kind, numbers, step in self.calls if kind == "log" and name in numbers]


def trainer(*callbacks: flowdp.Callback, **options: Any) -> flowdp.Trainer:
    given = {
        "epochs": 2,
        "policy": "sync",
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
    }
    return flowdp.Trainer(
        torch.nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
        dataset=(X, X.sum(1, keepdim=True)),
        per_device_batch_size=2,
        devices=["cpu", "cpu"],
        callbacks=callbacks,
        progress=False,
        **(given | options),
    )


def test_epochs_reach_a_logger_of_ones_own() -> None:
    book = Book()
    run = trainer(flowdp.Log(book)).start()
    run.join()
    [begin, *logged, end] = book.calls
    assert begin == ("begin", run.settings, 0)
    assert [(numbers["epoch"], step) for _, numbers, step in logged] == [(1, 6), (2, 12)]
    assert [numbers["train/loss"] for _, numbers, _ in logged] == [one.loss for one in run.history]
    assert end == ("end", "flowdp-observer", "done")


def test_rounds_where_they_are_asked_for() -> None:
    every, fifth = Book(), Book()
    trainer(flowdp.Log(every, every="round"), flowdp.Log(fifth, every=5)).fit()
    assert every.steps("round/loss")[-1] == 12
    assert set(fifth.steps("round/loss")) <= set(every.steps("round/loss"))
    assert [step // 5 for step in fifth.steps("round/loss")] == sorted(
        {step // 5 for step in every.steps("round/loss")} - {0}
    )
    assert every.steps("epoch") == fifth.steps("epoch") == [6, 12]


def test_evaluations_by_steps_are_logged() -> None:
    book = Book()
    data = X, X.sum(1, keepdim=True)
    evaluation = flowdp.EvaluationOptions(data, every=4, unit="step", sanity_check=0)
    trainer(flowdp.Log(book), evaluation=evaluation).fit()
    assert book.steps("eval/loss") == [4, 8, 12]


def test_a_resumed_run_begins_at_its_step(tmp_path: Any) -> None:
    trainer(checkpoint=tmp_path, epochs=1).fit()
    book = Book()
    run = trainer(flowdp.Log(book), checkpoint=tmp_path, resume=True).start()
    run.join()
    assert run.start_step == book.calls[0][2] == 6
    assert book.steps("epoch") == [12]


@pytest.mark.parametrize("fails", [True, False])
def test_the_end_says_how_it_was(fails: bool) -> None:
    book, go = Book(), threading.Event()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        assert go.wait(HANG_S)
        if fails:
            raise RuntimeError("boom")
        return F.mse_loss(model(batch[0]), batch[1])

    run = trainer(flowdp.Log(book), epochs=1000, loss=loss).start()
    run.stop()
    go.set()
    if fails:
        with pytest.raises(flowdp.StepError):
            run.join()
    else:
        run.join()
    assert book.calls[-1][2] == ("failed" if fails else "stopped")


def test_a_logger_that_cannot_begin_is_told_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Lost(Book):
        def begin(self, settings: Any, step: int) -> None:
            raise OSError("no such service")

    lost, book = Lost(), Book()
    run = trainer(flowdp.Log(lost), flowdp.Log(book)).start()
    run.join()
    assert lost.calls == []
    assert book.steps("epoch") == [6, 12]
    assert run.status().problems == ("Log.on_train_start raised OSError: no such service",)
    assert len(caplog.records) == 1


# ---------------------------------------------------------------- the numbers of a record
ROUND = RoundEnded(
    7, 2, 1, 30, (3, 2), (24, 16), 0.5, 1e-3, 9.0, (4.0, 5.0), (0.5, 0.25), (0.1, 0.2), 0.3, 10
)


def epoch(scalars: dict[str, float], **changes: object) -> EpochMetrics:
    tally = Tally(2, 2)
    for rank in (0, 1):
        recorded = {name: (value * 8, 8.0) for name, value in scalars.items()}
        tally.add(rank, Work(2, 1, 8, 3.0, losses=(4.0 + rank * 8, 8), scalars=recorded, lr=0.1))
    return replace(tally.result(1000.0, 10, 64, 3), **changes)


def test_an_epoch() -> None:
    numbers = numbers_of(epoch({"top1": 0.75}, eval={"accuracy": 0.5}, grad_norm=2.0))
    assert numbers["epoch"] == 3
    assert numbers["lr"] == 0.1
    assert numbers["train/loss"] == 1.0
    assert numbers["train/grad_norm"] == 2.0
    assert numbers["train/top1"] == 0.75
    assert numbers["eval/accuracy"] == 0.5
    assert numbers["run/samples_per_s"] == 16.0
    assert (numbers["rank0/loss"], numbers["rank1/loss"]) == (0.5, 1.5)
    assert numbers["rank1/top1"] == 0.75
    assert numbers["rank1/share"] == 0.5
    assert "run/divergence" not in numbers  # not measured
    assert "is_complete" not in numbers
    assert numbers_of(epoch({}, is_complete=False))["is_complete"] == 0
    assert "is_evaluated" not in numbers
    assert numbers_of(epoch({}, owes_evaluation=True))["is_evaluated"] == 0


def test_a_round() -> None:
    numbers = numbers_of(ROUND)
    assert numbers["round/number"] == 7
    assert numbers["round/loss"] == 0.5
    assert numbers["round_rank1/samples"] == 16
    assert numbers["round_rank1/data_wait_ms"] == 0.25
    assert "round/drift" not in numbers
    assert all(isinstance(value, int | float) for value in numbers.values())


def test_a_recorded_scalar_takes_no_name_of_another_number() -> None:
    without, both = numbers_of(epoch({})), numbers_of(epoch({"loss": 43.0, "a/b": 44.0}))
    assert both.items() >= without.items()
    assert [both[f"{of}/scalars/loss"] for of in ("train", "rank0", "rank1")] == [43.0] * 3
    assert both["train/a/b"] == 44.0
