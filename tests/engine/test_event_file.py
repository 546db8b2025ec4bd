"""Tests of an event log's file on a full disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flowdp import OptionError, RuntimeOptions, Trainer
from flowdp.engine.event_file import EventFile
from flowdp.machine.event_log import replay

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


def fill(file: Path) -> None:
    """From now on, this process's writes to the file find the disk full."""
    [own] = [fd for fd in os.listdir("/proc/self/fd") if same(fd, file)]
    full = os.open(FULL, os.O_WRONLY)
    os.dup2(full, int(own))
    os.close(full)


def same(fd: str, file: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(file)
    except OSError:
        return False


def trainer(event_log: Path, **options: Any) -> Trainer:
    return Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, 0.01),
        lambda model, batch: F.mse_loss(model(batch), batch),
        dataset=torch.ones(8, 1),
        per_device_batch_size=2,
        devices=2,
        runtime=RuntimeOptions(event_log=event_log),
        **options,
    )


@pytest.mark.linux
@needs_full
def test_a_disk_that_fills_up_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.jsonl"
    run = trainer(file, max_steps=10**9).start()
    records = run.metrics("round")
    next(records)
    fill(file)
    for _ in range(20):
        next(records)
    run.stop()
    assert run.join().interrupted
    [problem] = run.status().problems
    assert problem.startswith(
        f"event_log cannot be written to '{file}' ([Errno 28] No space left on device); it ends there"
    )
    assert [record.getMessage() for record in caplog.records if "event_log" in record.getMessage()] == [
        problem
    ]
    lines = file.read_text().splitlines()
    assert replay(lines).error is None
    assert replay(lines).events == len(lines) - 1


@pytest.mark.linux
@needs_full
def test_a_disk_that_is_full_before_is_told_at_the_start() -> None:
    with pytest.raises(
        OptionError, match=r"event_log cannot be written to '/dev/full' .*; give another path"
    ):
        trainer(FULL, epochs=1).start()


def test_lines_are_written_until_it_is_closed(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "run.jsonl", print)
    file.write("one\n")
    file.close()
    file.write("two\n")
    file.close()
    assert file.path.read_text() == "one\n"


@pytest.mark.posix
def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="give another path"):
        EventFile(tmp_path / "pipe", print)
