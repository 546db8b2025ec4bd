"""Tests of the loggers that write files, read back by `csv` and `json`."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flowdp
from tests.limits import HANG_S
from tests.reliability.small import stop

X = torch.arange(24.0).view(12, 2) / 24


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    assert all(None not in row and None not in row.values() for row in rows)  # neither too long nor too short
    return rows


def objects_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text("utf-8").splitlines()]


def logger(kind: type[flowdp.Log], path: Path) -> Any:
    """What `Log` calls, without a run."""
    return kind(path)._logger  # type: ignore[call-arg]


def trainer(*callbacks: flowdp.Callback, **options: Any) -> flowdp.Trainer:
    given = {"epochs": 2, "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1])}
    return flowdp.Trainer(
        torch.nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
        dataset=(X, X.sum(1, keepdim=True)),
        per_device_batch_size=2,
        policy="sync",
        devices=["cpu", "cpu"],
        callbacks=callbacks,
        progress=False,
        **(given | options),
    )


def test_a_run_reads_back_as_its_history(tmp_path: Path) -> None:
    table, lines = tmp_path / "deep/m.csv", tmp_path / "m.jsonl"
    run = trainer(flowdp.CSVLogger(table), flowdp.JSONLLogger(os.fspath(lines))).start()
    run.join()
    rows = rows_of(table)
    assert [float(row["train/loss"]) for row in rows] == [one.loss for one in run.history]
    assert [int(row["rank1/samples"]) for row in rows] == [one.per_rank[1].samples for one in run.history]
    assert json.loads((tmp_path / "deep/m.settings.json").read_text()) == run.settings
    first, *epochs, last = objects_of(lines)
    assert first == {"settings": run.settings}
    assert [(one["epoch"], one["global_step"]) for one in epochs] == [(1, 6), (2, 12)]
    assert last == {"status": "done"}
    assert run.status().problems == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-300, 0.1, 3])
def test_numbers_come_back_as_they_were(tmp_path: Path, value: float) -> None:
    for kind, name in ((flowdp.CSVLogger, "m.csv"), (flowdp.JSONLLogger, "m.jsonl")):
        one = logger(kind, tmp_path / name)
        one.begin({"lr": value}, 0)
        one.log({"a": value}, 1)
        one.end("done")
    [row], [settings, numbers, _] = rows_of(tmp_path / "m.csv"), objects_of(tmp_path / "m.jsonl")
    for read in (row["a"], numbers["a"], settings["settings"]["lr"]):
        assert repr(float(read)) == repr(float(value))
    assert isinstance(numbers["a"], str) is not math.isfinite(value)


def test_columns_may_come_later(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    one = logger(flowdp.CSVLogger, path)
    one.begin({}, 0)
    one.log({"a": 1.0}, 1)
    one.log({"b,\n": 2.0, "a": 3.0}, 2)
    assert len(rows_of(path)) == 2  # valid at any time
    one.log({"c": 4.0}, 3)
    one.log({"a": 5.0}, 4)
    one.end("done")
    assert [list(row.values()) for row in rows_of(path)] == [
        ["1", "1.0", "", ""],
        ["2", "3.0", "2.0", ""],
        ["3", "", "", "4.0"],
        ["4", "5.0", "", ""],
    ]
    assert [*rows_of(path)[0]] == ["global_step", "a", "b,\n", "c"]
    assert {file.name for file in tmp_path.iterdir()} == {"m.csv", "m.settings.json"}


@pytest.mark.parametrize("torn", ["", "36,", "36,ü"], ids=repr)
def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path: Path, torn: str) -> None:
    table, lines = tmp_path / "m.csv", tmp_path / "m.jsonl"
    callbacks = flowdp.CSVLogger(table), flowdp.JSONLLogger(lines)
    trainer(*callbacks, checkpoint=tmp_path / "c", epochs=2).fit()
    # A process that was killed in its fourth epoch, before the checkpoint of the third was there.
    for kind, path in zip(callbacks, (table, lines), strict=True):
        kind._logger.log({"epoch": 3, "train/later": 1.0}, 18)
        with path.open("ab") as file:
            file.write(torn.encode())
    resumed = trainer(*callbacks, checkpoint=tmp_path / "c", epochs=4, resume=True).start()
    resumed.join()
    assert resumed.status().problems == ()
    rows = rows_of(table)
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4]
    assert [float(row["train/loss"]) for row in rows] == [one.loss for one in resumed.history]
    assert [one["epoch"] for one in objects_of(lines) if "epoch" in one] == [1, 2, 3, 4]
    assert [one["status"] for one in objects_of(lines) if "status" in one] == ["done", "done"]


def test_an_epoch_that_a_stop_left_unevaluated_gives_way_to_the_evaluated_one(tmp_path: Path) -> None:
    handle: Future[flowdp.Run] = Future()

    def step(model: torch.nn.Module, batch: Any) -> dict[str, float]:
        stop(handle.result(HANG_S))
        return {"score": 1.0}

    def run(step: Any, **options: Any) -> flowdp.Run:
        table, lines = flowdp.CSVLogger(tmp_path / "m.csv"), flowdp.JSONLLogger(tmp_path / "m.jsonl")
        evaluation = flowdp.EvaluationOptions((X,), step=step, sanity_check=0)
        folder = {"checkpoint": tmp_path / "c", "resume": True}
        return trainer(table, lines, evaluation=evaluation, **folder, **options).start()

    first = run(step)
    handle.set_result(first)
    assert first.join(HANG_S).history[-1].owes_evaluation
    assert [row["is_evaluated"] for row in rows_of(tmp_path / "m.csv")] == ["0"]
    run(lambda model, batch: {"score": 1.0}).join(HANG_S)
    rows = rows_of(tmp_path / "m.csv")
    assert [(row["epoch"], row["eval/score"], row["is_evaluated"]) for row in rows] == [
        ("1", "1.0", ""),
        ("2", "1.0", ""),
    ]
    assert [one["epoch"] for one in objects_of(tmp_path / "m.jsonl") if "epoch" in one] == [1, 2]


def test_a_new_run_writes_over_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        trainer(flowdp.CSVLogger(tmp_path / "m.csv"), flowdp.JSONLLogger(tmp_path / "m.jsonl")).fit()
    assert {file.name for file in tmp_path.iterdir()} == {
        *(f"m{which}{kind}" for which in ("", "-1", "-2") for kind in (".csv", ".jsonl", ".settings.json"))
    }
    assert all(len(rows_of(tmp_path / f"m{which}.csv")) == 2 for which in ("", "-1", "-2"))
    assert "m.csv is of another run, and is called" in caplog.text


KILLED = """
import sys
from flowdp.observe.loggers.files import CSVLogger, JSONLLogger

loggers = [CSVLogger("m.csv")._logger, JSONLLogger("m.jsonl")._logger]
for one in loggers:
    one.begin({}, 0)
for step in range(1, 10**9):
    for one in loggers:
        one.log({"a": step, **({"late": 1.0} if step % 50 == 0 else {})}, step)
    print(step, flush=True)
"""


@pytest.mark.posix
def test_a_killed_process_loses_a_row_at_most(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert child.stdout is not None
    with child:
        told = next(int(line) for line in child.stdout if int(line) >= 120)
        child.send_signal(signal.SIGKILL)
    for kind, name, read in (
        (flowdp.CSVLogger, "m.csv", rows_of),
        (flowdp.JSONLLogger, "m.jsonl", objects_of),
    ):
        one = logger(kind, tmp_path / name)
        one.begin({}, 10**9)
        one.log({}, 10**9)
        one.end("done")
        steps = [int(row["global_step"]) for row in read(tmp_path / name) if "global_step" in row]
        assert steps[:told] == list(range(1, told + 1))
        assert steps[-1] == 10**9


def test_a_file_that_is_lost_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    go = threading.Event()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        assert go.wait(HANG_S)
        return F.mse_loss(model(batch[0]), batch[1])

    class Break(flowdp.Callback):
        def on_train_start(self, run: Any) -> None:
            (tmp_path / "m.csv").mkdir()
            go.set()

    table = flowdp.CSVLogger(tmp_path / "m.csv")
    run = trainer(table, Break(), loss=loss).start()
    assert run.join().epochs_done == 2
    [problem] = run.status().problems
    assert "CSVLogger.on_epoch_end raised" in problem
    assert "(2 times)" in problem
