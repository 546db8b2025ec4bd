"""Tests of torchrun: it restarts a script whose process died, and the script resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.posix

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, signal, sys, threading
from itertools import count

import torch
import flowdp

restarts, steps = os.environ["TORCHELASTIC_RESTART_COUNT"], count()


def loss(model, batch):
    if restarts == "0" and next(steps) > 30:  # of 40: the run does not end before its first file is written
        threading.Event().wait()
    return model(batch[0]).square().mean()


def die(checkpoint):
    if restarts == "0":
        os.kill(os.getpid(), signal.SIGKILL)


run = flowdp.Trainer(
    torch.nn.Linear(4, 2),
    lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    loss,
    dataset=(torch.ones(64, 4),),
    batch_size=8,
    epochs=5,
    devices=["cpu", "cpu"],
    policy="sync",
    checkpoint=sys.argv[1],
    callbacks=[flowdp.OnCheckpoint(die)],
    resume=True,
    progress=False,
).start()
for epoch in run.metrics():
    print("start", restarts, "epoch", epoch.epoch, flush=True)
run.join()
"""


def test_a_killed_process_is_started_again_and_resumes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    done = subprocess.run(
        [*command, "--monitor-interval", "0.1", str(script), str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("start")]
    resumed = [int(epoch) for _, restarts, _, epoch in lines if restarts == "1"]
    assert resumed == list(range(resumed[0], 5))
    assert resumed[0] > 0  # the end of an epoch was saved before the process died
