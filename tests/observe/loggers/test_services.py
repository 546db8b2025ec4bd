"""Tests of the loggers for TensorBoard, W&B and MLflow, read back by their own readers, on files alone."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flowdp
from flowdp.observe.loggers.services import _key
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = ['a,"b"', "line\nend", "ünï→✓", "loss"]
X = torch.arange(24.0).view(12, 2) / 24


def readable(name: str) -> str:
    """A recorded scalar's name behind the prefix."""
    return {"loss": "scalars/loss"}.get(name, name)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    for index, name in enumerate(HOSTILE):
        flowdp.record_scalar(name, index)
    flowdp.record_scalar("nan", math.nan)
    return F.mse_loss(model(batch[0]), batch[1])


def trainer(*callbacks: flowdp.Callback, **options: Any) -> flowdp.Trainer:
    return flowdp.Trainer(
        torch.nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
        loss_of,
        dataset=(X, X.sum(1, keepdim=True)),
        per_device_batch_size=2,
        policy="sync",
        devices=["cpu", "cpu"],
        callbacks=callbacks,
        progress=False,
        **({"epochs": 2} | options),
    )


# ------------------------------------------------------------------ TensorBoard
def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return read


def curve(folder: Path, name: str) -> dict[int, float]:
    return {event.step: event.value for event in events(folder).Scalars(name)}


def test_tensorboard_reads_the_history(tmp_path: Path) -> None:
    run = trainer(flowdp.TensorBoardLogger(tmp_path / "tb", every="round")).start()
    run.join()
    assert run.status().problems == ()
    read = curve(tmp_path / "tb", "train/loss")
    assert read == {6: pytest.approx(run.history[0].loss), 12: pytest.approx(run.history[1].loss)}
    for index, name in enumerate(HOSTILE):
        assert curve(tmp_path / "tb", f"train/{readable(name)}") == {6: index, 12: index}
    assert all(map(math.isnan, curve(tmp_path / "tb", "train/nan").values()))
    assert max(curve(tmp_path / "tb", "round/loss")) == 12
    content = events(tmp_path / "tb").SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"optimizer.lr" in content


def test_tensorboard_of_a_resumed_run_shows_no_epoch_twice(tmp_path: Path) -> None:
    logger, folder = flowdp.TensorBoardLogger(tmp_path / "tb"), tmp_path / "tb"
    trainer(logger, checkpoint=tmp_path / "c").fit()
    logger._logger.begin({}, 12)  # as by a process that was killed in its fourth epoch
    logger._logger.log({"train/loss": 77.0}, 18)
    logger._logger.log({"train/loss": 77.0}, 24)
    logger._logger.end("failed")
    state = trainer(logger, checkpoint=tmp_path / "c", resume=True, epochs=3).fit()
    read = curve(folder, "train/loss")
    assert list(read) == [6, 12, 18]
    assert list(read.values()) == pytest.approx([one.loss for one in state.history])
    trainer(logger, epochs=1).fit()
    assert list(curve(folder, "train/loss")) == [6]
    assert list(curve(folder / "earlier-1", "train/loss")) == [6, 12, 18]


# ------------------------------------------------------------------ MLflow
@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=(tmp_path / "ml").as_uri())


def test_mlflow_reads_the_history(store: Any, tmp_path: Path) -> None:
    logger = flowdp.MLflowLogger("x", run_name="a'\"", tracking_uri=store.tracking_uri)
    run = trainer(logger, checkpoint=tmp_path / "c", epochs=2).start()
    run.join()
    assert run.status().problems == ()
    run = trainer(logger, checkpoint=tmp_path / "c", epochs=3, resume=True).start()
    run.join()
    assert run.status().problems == ()
    [found] = store.search_runs([store.get_experiment_by_name("x").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "a'\""

    def read(name: str) -> list[tuple[int, float]]:
        history = store.get_metric_history(found.info.run_id, _key(name))
        return [(one.step, one.value) for one in history]

    assert read("train/loss") == [(6 * (one.epoch + 1), one.loss) for one in run.history]
    for index, name in enumerate(HOSTILE):
        assert read(f"train/{readable(name)}") == [(step, index) for step in (6, 12, 18)]
    assert all(math.isnan(value) for _, value in read("train/nan"))
    assert found.data.params["optimizer.lr"] == "0.1"
    assert found.data.params["epochs"] == "2"  # MLflow keeps the first
    trainer(logger).fit()
    assert len(store.search_runs([store.get_experiment_by_name("x").experiment_id])) == 2


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and nothing in the environment that MLflow reads."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


MLFLOW = """
import flowdp
from tests.observe.loggers.test_services import trainer

run = trainer(flowdp.MLflowLogger("x", run_name="a")).start()
run.join()
assert run.status().problems == (), run.status().problems

from mlflow import MlflowClient
client = MlflowClient()
[found] = client.search_runs([client.get_experiment_by_name("x").experiment_id])
history = client.get_metric_history(found.info.run_id, "train/loss")
assert found.info.status == "FINISHED"
assert [(one.step, one.value) for one in history] == [(6 * (e.epoch + 1), e.loss) for e in run.history]
"""


def test_mlflow_logs_to_its_own_default_store(empty: Path) -> None:
    """In a process of its own, which opens a database."""
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed (flowdp[mlflow])")
    child = subprocess.run(
        [sys.executable, "-c", MLFLOW],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=HANG_S,
    )
    assert child.returncode == 0, child.stdout + child.stderr


def test_a_store_that_mlflow_refuses_is_named_with_what_to_set(empty: Path) -> None:
    with pytest.raises(
        flowdp.OptionError, match=r"refuses the store 'odd://x'.*sqlite:///.*flowdp\[mlflow\]"
    ):
        flowdp.MLflowLogger(tracking_uri="odd://x")


# ------------------------------------------------------------------ W&B
WANDB = """
import sys
import flowdp
from tests.observe.loggers.test_services import trainer

given = dict(mode="offline", dir=".")
run = trainer(flowdp.WandbLogger("p", id="one", **given), checkpoint="c", epochs=2, resume=True).start()
run.join()
print([one.loss for one in run.history])
assert run.status().problems == (), run.status().problems

import wandb
assert wandb.run is None
own = wandb.init(id="two", **given)
trainer(flowdp.WandbLogger(), epochs=1).fit()
assert wandb.run is own
own.finish()
"""


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a run's file: blocks of 32 KB as in LevelDB's log, behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_wandb_offline_reads_the_history(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", WANDB],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"},
        timeout=HANG_S,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    losses = json.loads(child.stdout.splitlines()[0])
    [first] = (tmp_path / "wandb").glob("offline-run-*/run-one.wandb")
    [second] = (tmp_path / "wandb").glob("offline-run-*/run-two.wandb")
    records = list(wandb_records(first))
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["global_step"], row["train/loss"]) for row in rows] == list(
        zip((6, 12), losses, strict=True)
    )
    for index, name in enumerate(HOSTILE):
        assert [row[f"train/{readable(name)}"] for row in rows] == [index, index]
    assert all(math.isnan(float(row["train/nan"])) for row in rows)
    config = {
        "/".join(one.nested_key) or one.key: json.loads(one.value_json)
        for record in records
        for one in (*record.run.config.update, *record.config.update)
    }
    assert config["optimizer.lr"] == 0.1
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]
    assert next(record.run.run_id for record in records if record.run.run_id) == "one"
    assert any(record.WhichOneof("record_type") == "history" for record in wandb_records(second))


# ------------------------------------------------------------------ all
@pytest.mark.parametrize(
    ("kind", "package"),
    [
        (flowdp.TensorBoardLogger, "tensorboard"),
        (flowdp.WandbLogger, "wandb"),
        (flowdp.MLflowLogger, "mlflow"),
    ],
)
def test_a_package_that_is_missing_is_named_early(
    kind: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowdp.validators.find_spec", {}.get)
    with pytest.raises(flowdp.OptionError, match=rf"needs {package}: pip install 'flowdp\[{package}\]'"):
        kind("x")
