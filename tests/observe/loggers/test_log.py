"""Tests of the callback that gives a run's numbers to a logger."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flowdp

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
    assert [(numbers["epoch"], step) for _, numbers, step in logged] == [(0, 6), (1, 12)]
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
        assert go.wait(60)
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
