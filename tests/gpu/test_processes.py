"""Tests of processes on a card: an error that spoils the device, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]

DEVICES = [pytest.param("cuda:0", marks=pytest.mark.gpu(1)), "cpu"]

TRAINING = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import flowdp

device, steps = sys.argv[1], []

def loss(model, batch):
    steps.append(1)
    if len(steps) == 40:
        print("going", flush=True)
    return F.cross_entropy(model(batch[0]), batch[1])

def trainer(labels, epochs):
    return flowdp.Trainer(
        nn.Linear(8, 10), lambda params: torch.optim.SGD(params, lr=0.1), loss,
        dataset=(torch.randn(len(labels), 8), labels), per_device_batch_size=8, epochs=epochs,
        devices=[device] * 2, policy="cadence", progress=False)
"""

WRONG_LABEL = """
labels = torch.zeros(800, dtype=torch.int64)
labels[500] = 99
try:
    trainer(labels, 3).fit()
except flowdp.FlowdpError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""

ENDLESS = """
run = trainer(torch.zeros(800, dtype=torch.int64), 10**6).start()
try:
    run.join()
except KeyboardInterrupt:  # how Python itself ends on one depends on its version: tests/test_exit.py
    print(run.status().phase, run.state.interrupted, flush=True)
    if device != "cpu":
        torch.cuda.synchronize()
        print(torch.ones(1, device=device).item(), flush=True)
"""


def start(device: str, body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING + body, device],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_label_out_of_range_is_an_error_and_not_a_hang(device: str) -> None:
    """On a card the kernel fails, and with it every later call of the process; join must return even so."""
    with start(device, WRONG_LABEL) as child:
        try:
            printed, errors = child.communicate(timeout=HANG_S)
        finally:
            child.kill()
    assert "Error: " in printed, printed + errors
    assert ("assert" if device != "cpu" else "Target 99") in printed
    assert child.returncode == 0, errors
    assert "CUDA warning" not in errors, errors  # of events that are destroyed on the dead device


@pytest.mark.posix
@pytest.mark.parametrize("device", DEVICES)
def test_ctrl_c_stops_the_run_and_leaves_the_device_sound(device: str) -> None:
    with start(device, ENDLESS) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "going\n", child.communicate(timeout=HANG_S)
            child.send_signal(signal.SIGINT)
            printed, errors = child.communicate(timeout=HANG_S)
        finally:
            child.kill()
    assert printed.splitlines() == ["stopped True", *(["1.0"] if device != "cpu" else [])], errors
    assert child.returncode == 0, errors
