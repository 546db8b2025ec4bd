"""The bar and the tables on a terminal of 100 columns: a pane of tmux."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.browser.terminal import open_terminal

COLUMNS = 100

SCRIPT = """
import subprocess
import torch
import flowdp

torch.set_num_threads(1)
inputs = torch.randn(512, 8)
run = flowdp.Trainer(
    torch.nn.Linear(8, 1),
    lambda params: torch.optim.SGD(params, lr=1e-3),
    torch.nn.MSELoss(),
    dataset=(inputs, inputs.sum(1, keepdim=True)),
    batch_size=4,
    epochs=1000,
    devices=["cpu"] * 2,
).start()
subprocess.run(["tmux", "wait-for", "seen"], check=True)
for _ in run.metrics():
    run.stop()
"""


def test_one_bar_and_then_the_tables(tmp_path: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with open_terminal(script, COLUMNS) as terminal:
        during = terminal.wait_for("samples/s").splitlines()
        terminal.signal("seen")
        terminal.wait_for_end()
        after = terminal.screen().splitlines()
    for screen in (during, after):
        [bar] = [line for line in screen if line.startswith("epoch ") and "/1000" in line]
        assert re.search(r"%\|.{3,}\| .*/128000 \[.* loss=.*, samples/s=.*, share=\d+ % \d+ %\]$", bar), bar
    assert not any("cpu (rank 1)" in line for line in during)
    heads = [line.split() for line in after]
    assert ["epoch", "loss", "samples/s", "time"] in heads
    assert ["device", "samples/s", "share", "training", "else"] in heads
    assert sum(line.strip().startswith("cpu (rank ") for line in after) == 2
    assert any(re.fullmatch(r"[\d,]+ of [\d,]+ samples/s \(.* %\) in .*", line) for line in after)
