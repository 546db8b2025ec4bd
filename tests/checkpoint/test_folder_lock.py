"""Tests of the folder lock: a folder belongs to one live run, of any process, and never to a dead one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp
from flowdp import OptionError
from flowdp.checkpoint.folder_lock import FolderLock

pytestmark = pytest.mark.posix

ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import os, sys, time, warnings
from pathlib import Path
from flowdp.checkpoint.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os.close(1)
    sys.stdin.read()  # outlives its parent, as a process of a DataLoader may
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def trainer(folder: Path, **options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "policy": "cadence", "dataset": torch.ones(40, 1), "per_device_batch_size": 2, "epochs": None,
        "max_steps": 10**9, "devices": 2,
        "checkpoint": folder, "resume": True,
        "loss": lambda model, batch: (model(batch) - batch).square().mean(),
    } | options  # fmt: skip
    return flowdp.Trainer(torch.nn.Linear(1, 1), lambda params: torch.optim.SGD(params, 1e-3), **given)


def test_a_cell_that_is_run_twice(tmp_path: Path) -> None:
    first = trainer(tmp_path).start()
    try:
        again = trainer(tmp_path)
        said = rf"checkpoint='{tmp_path}': a live run writes there.*flowdp\.runs\(\)"
        with pytest.raises(OptionError, match=said):
            again.start()
        with pytest.raises(OptionError, match="a live run"):
            trainer(tmp_path, resume=False).start()
        assert flowdp.runs() == (first,)
    finally:
        first.stop()
        first.join()
    run = again.start()
    run.stop()
    run.join()


def test_a_killed_process_holds_nothing_though_its_child_lives(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        mine = FolderLock(tmp_path)
        try:
            with pytest.raises(OptionError, match="a live run writes there"):
                mine.take()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        os.kill(child, 0)  # it exists
        mine.take()
        mine.give_back()


def test_a_run_that_fails_gives_its_folder_back(tmp_path: Path) -> None:
    def fails(model: Any, batch: Any) -> Any:
        raise ValueError("boom")

    with pytest.raises(flowdp.StepError):
        trainer(tmp_path, loss=fails).fit()
    lock = FolderLock(tmp_path)
    lock.take()
    lock.give_back()


def test_the_last_file_of_a_run_that_has_ended_is_waited_for(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    first.end()
    writing = threading.Timer(0.05, first.give_back)
    writing.start()
    second.take()
    writing.join()
    with pytest.raises(OptionError):
        first.take()
    second.give_back()
