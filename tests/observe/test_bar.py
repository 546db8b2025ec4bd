"""Tests of the progress bar: drawn on a terminal or in a notebook, and closed with the run."""

from __future__ import annotations

import io
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp import Callback, EpochMetrics, StepError, Trainer, current_worker
from flowdp.observe import bar
from flowdp.observe.bar import ProgressBar, tell_devices, wants_progress
from flowdp.protocol.commands import RoundEnded
from tests.limits import HANG_S


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for the bar. Not a fixture: pytest takes stderr back between setup and test."""
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
        per_device_batch_size=2,
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
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not wants_progress("auto")  # a script that has imported it
    shell.kernel = "a notebook's"
    assert wants_progress("auto")
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert wants_progress("auto")
    monkeypatch.setattr(sys, "stderr", None)  # pythonw, and other processes without a console
    assert not wants_progress("auto")


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


@pytest.mark.parametrize(
    ("bar_of", "parts"),
    [
        ((50, 25), ("epoch 2/2:  70%", "35/50", "loss=0.250", "samples/s=2,000", "share=75 % 25 %")),
        ((None, None), ("epoch 2: : 35step",)),  # without a known end
        ((50, 25, 30), ("30/50", "35/50")),  # of a resumed run
    ],
)
def test_what_it_says_of_a_round(bar_of: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    progress = ProgressBar(*bar_of)
    progress.on_train_start(None)
    progress.on_round(round_record(35))
    progress.on_train_end(None)
    for part in parts:
        assert part in terminal.getvalue()


# ---------------------------------------------------------------- on a terminal
class Screen:
    """A terminal's screen: the visible part of all output."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0

    def take(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            elif part == "\x1b[A":
                self.row -= 1
            elif part.endswith("m") and part.startswith("\x1b["):
                pass  # a colour
            elif part == "\x1b[K":
                self.lines[self.row] = self.lines[self.row][: self.column]
            else:
                assert not part.startswith("\x1b"), part
                self.write(part)

    def write(self, part: str) -> None:
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
        self.column += len(part)
        assert self.column <= self.columns, f"{part!r} is wrapped"


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A pseudo terminal for stdout and stderr; at the end the list has the visible lines."""
    import fcntl  # not on Windows, nor are the other two
    import pty
    import termios

    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    written: list[bytes] = []

    def drain() -> None:
        with suppress(OSError):  # EIO, after the other end is closed
            while chunk := os.read(outside, 1 << 16):
                written.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    seen: list[str] = []
    try:
        with os.fdopen(inside, "w", buffering=1) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            patch.setattr(bar, "_told", set())
            yield seen
    finally:
        reader.join(HANG_S)
        os.close(outside)
    screen = Screen(120)
    screen.take(b"".join(written).decode())
    seen += [line.rstrip() for line in screen.lines]


TABLES = (
    r" *epoch +loss +samples/s +time *",
    r" *\d +[\d.e-]+ +[\d,]+ +[\d.]+m?s *",
    r" *device +samples/s +share +training +else *",
    r" *cpu \(rank \d\) +[\d,]+ +\d+ % +\d+ %.*",
    r"[\d,]+ samples/s, [\d.]+ % of the speed in their steps \([\d,]+\), in [\d.]+m?s",
)
BAR = r"epoch 3/3: 100%\|█+\| 90/90 \[.*, loss=.*, samples/s=.*, share=.*\]"


def small(**options: Any) -> Trainer:
    return Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda model, batch: F.mse_loss(model(batch), batch),
        dataset=torch.ones(60, 1),
        per_device_batch_size=2,
        devices=2,
        policy="sync",
        **{"epochs": 3, **options},
    )


def check(seen: list[str], *printed: str) -> None:
    bar = [line for line in seen if "%|" in line]
    assert [re.fullmatch(BAR, line) is not None for line in bar] == [True]
    tables = [[line for line in seen if re.fullmatch(form, line)] for form in TABLES]
    assert [len(lines) for lines in tables] == [1, 3, 1, 2, 1]
    others = {line for lines in tables for line in lines} | {*bar, ""}
    assert [line for line in seen if line not in others] == list(printed)


@pytest.mark.posix
def test_what_a_loop_prints_comes_out_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = []
    with terminal(monkeypatch) as seen:
        run = small().start()
        for epoch in run.metrics():
            printed.append(str(epoch))
            print(epoch)
        print(run.join().global_step, "steps")
    assert seen[0].startswith("flowdp: training on 2 x cpu | ")
    check(seen[1:], *printed, "90 steps")
    assert len(printed) == 3


@pytest.mark.posix
def test_what_a_callback_prints_comes_out_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prints(Callback):
        def on_epoch_end(self, metrics: EpochMetrics) -> None:
            print("after epoch", metrics.epoch)

        def on_checkpoint(self, checkpoint: Any) -> None:
            print("checkpoint", checkpoint.version)

    with terminal(monkeypatch) as seen:
        small(callbacks=[Prints()]).fit()
    # Writing a checkpoint takes time: the next epoch's end may be reported first.
    check(
        sorted(seen[1:]),
        *sorted(line for n in range(3) for line in (f"after epoch {n}", f"checkpoint {n + 1}")),
    )


@pytest.mark.posix
def test_a_resumed_run_prints_no_old_epoch_as_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = small(epochs=2).fit()
    printed = []
    with terminal(monkeypatch) as seen:
        run = small(resume=before).start()
        for epoch in run.metrics():
            printed.append(str(epoch))
            print(epoch)
        assert [epoch.epoch for epoch in run.poll_metrics()] == [2]
    assert [epoch.epoch for epoch in run.history] == [0, 1, 2]
    assert len(printed) == 1
    assert seen[0].startswith("flowdp: training on 2 x cpu | ")
    assert seen[1] == "flowdp: resumed from the given state, epoch 3, step 60"
    check(seen[2:], *printed)


# ---------------------------------------------------------------- the line that names the devices
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bar, "_told", set())


@pytest.mark.usefixtures("nothing_told")
def test_each_mix_of_devices_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for devices in ([CPU, CPU], [CPU, CPU], [CARD, CPU, CARD]):
        tell_devices(devices)
    lines = capsys.readouterr().err.splitlines()
    summary = str(flowdp.devices(probe=False))
    assert lines == [
        f"flowdp: training on 2 x cpu | {summary}",
        f"flowdp: training on 2 x cuda:0, cpu | {summary}",
    ]


def fit(**options: Any) -> None:
    flowdp.Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda model, batch: model(batch).mean(),
        dataset=torch.ones(8, 1),
        per_device_batch_size=2,
        epochs=1,
        devices=2,
        **options,
    ).fit()


def set_up(**options: Any) -> None:
    model = nn.Linear(1, 1)
    flowdp.setup(model, torch.optim.SGD(model.parameters(), 0.1), devices=2, **options).close()


@pytest.mark.usefixtures("nothing_told")
@pytest.mark.parametrize("start", [fit, set_up])
def test_it_is_told_by_default_and_not_with_progress_false(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()  # no terminal
    monkeypatch.setattr(sys, "stderr", stream)
    start(progress=False)
    assert stream.getvalue() == ""
    for _ in range(2):
        start()
    assert stream.getvalue().startswith("flowdp: training on 2 x cpu | ")
    assert stream.getvalue().count("\n") == 1
