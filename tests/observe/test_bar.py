"""The progress bar: drawn where somebody looks, and gone with the run."""

from __future__ import annotations

import io
import sys
import threading
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp import OptionError, StepError, Trainer, current_worker
from flowdp.machine.commands import RoundEnded
from flowdp.observe import bar
from flowdp.observe.bar import ProgressBar, wants_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for what is drawn. No fixture: pytest takes stderr back between setup and test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flowdp-")]


def run_with(progress: Any, fails: bool = False) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if fails and current_worker().local_step == 10:
            raise ValueError("boom")
        return F.mse_loss(model(batch), batch)

    Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, 0.1),
        loss,
        dataset=torch.ones(60, 1),
        batch_size=2,
        epochs=2,
        devices=2,
        policy="sync",
        progress=progress,
    ).fit()


def test_auto_is_for_a_terminal_or_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not wants_progress("auto")
    assert wants_progress(True)
    assert not wants_progress(False)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert wants_progress("auto")
    monkeypatch.delitem(sys.modules, "ipykernel")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert wants_progress("auto")
    monkeypatch.setattr(sys, "stderr", None)  # pythonw, and other processes without a console
    assert not wants_progress("auto")


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        assert name == "tqdm"
        return None

    monkeypatch.setattr(bar, "find_spec", find_spec)
    watched(monkeypatch)
    assert not wants_progress("auto")
    assert not wants_progress(False)
    with pytest.raises(OptionError, match=r"needs tqdm: pip install 'flowdp\[progress\]'"):
        run_with(True)


def test_what_is_no_choice() -> None:
    with pytest.raises(OptionError, match="True, False or 'auto', not 'on'"):
        wants_progress("on")


@pytest.mark.parametrize("progress", [True, "auto"])
def test_it_is_drawn_and_ends_before_join_does(progress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    run_with(progress)
    assert names() == []
    drawn = terminal.getvalue()
    assert "epoch 2/2: 100%" in drawn
    assert "60/60" in drawn
    assert "loss=" in drawn
    assert drawn.endswith("\n")


def test_it_is_not_drawn_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run_with("auto")
    assert stream.getvalue() == ""


def test_it_ends_with_a_run_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with pytest.raises(StepError, match="boom"):
        run_with(True, fails=True)
    assert names() == []
    assert "/60" in terminal.getvalue()
    assert "100%" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")


def round_record(global_step: int) -> RoundEnded:
    ms = (10.0, 20.0)
    return RoundEnded(0, 1, 1, global_step, (3, 1), (96, 32), 0.25, 0.1, 64.0, ms, ms, ms, 1.0, 3)


def test_what_it_says_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    progress = ProgressBar(50, 25)
    progress.on_train_start(None)
    progress.on_round(round_record(35))
    progress.on_train_end(None)
    drawn = terminal.getvalue()
    for part in ("epoch 2/2:  70%", "35/50", "loss=0.250", "samples/s=2,000", "share=75 % 25 %"):
        assert part in drawn


def test_without_a_known_end_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    progress = ProgressBar(None, None)
    progress.on_train_start(None)
    progress.on_round(round_record(35))
    progress.on_train_end(None)
    assert "epoch 2: : 35step" in terminal.getvalue()


def test_a_resumed_run_begins_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    progress = ProgressBar(50, 25, start=30)
    progress.on_train_start(None)
    assert "30/50" in terminal.getvalue()
    progress.on_round(round_record(35))
    progress.on_train_end(None)
    assert "35/50" in terminal.getvalue()


def test_one_that_could_not_be_drawn_stays_away() -> None:
    progress = ProgressBar(50, 25)  # on_train_start has raised
    progress.on_round(round_record(35))
    progress.on_train_end(None)
