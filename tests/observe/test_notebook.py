"""Tests of the dashboard's widgets, without a browser; tests/browser has it in Jupyter."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import flowdp
from tests.limits import HANG_S

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")


@pytest.fixture
def run() -> Any:
    """A run that is held in its first step until it has been asked to stop."""
    is_asked = threading.Event()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if flowdp.current_worker().local_step == 0:
            assert is_asked.wait(HANG_S)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    run = flowdp.Trainer(
        nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.25),
        loss,
        dataset=(torch.randn(400, 2), torch.randn(400, 1)),
        batch_size=4,
        epochs=1000,
        devices=["cpu"],
        policy="cadence",
        cadence=flowdp.CadenceOptions(max_anchor=4),
        progress=False,
    ).start()
    run.is_asked = is_asked
    yield run
    is_asked.set()
    run.stop()
    run.join(HANG_S)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "flowdp-display"]


def test_the_buttons_steer_the_run(run: Any) -> None:
    board = run.dashboard()
    bar, view = board.children
    pause, stop, rate, apply, said = bar.children
    assert "running" in view.value
    assert rate.value == 0.25  # before the first round
    rate.value = -1.0
    apply.click()
    assert "lr must be" in said.value
    rate.value = 0.125
    apply.click()
    assert "0.125" in said.value
    pause.value = True
    run.is_asked.set()
    with run.paused():
        assert run.status().phase == "paused"
    pause.value = False
    stop.click()
    assert run.join(HANG_S).interrupted
    for thread in threads():
        thread.join(HANG_S)
    assert "stopped" in view.value
    assert [control.disabled for control in (pause, stop, rate, apply)] == [True] * 4
    assert {one.lr for one in run.metrics("round")} >= {0.125}


def test_a_board_of_a_run_that_is_over_ends_its_thread(run: Any) -> None:
    run.stop()
    run.is_asked.set()
    run.join(HANG_S)
    board = run.dashboard()
    for thread in threads():
        thread.join(HANG_S)
    assert "stopped" in board.children[1].value
    assert board.children[0].children[1].disabled
