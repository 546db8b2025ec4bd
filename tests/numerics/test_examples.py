"""Tests of the examples: the results of one device on several."""

from __future__ import annotations

import difflib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLAIN, MOVED, GAN = "02_plain_pytorch.py", "02_flowdp.py", "04_gan.py"
DEMO, RESUMED, COMPLETE = "demo.py", "06_checkpoint_resume.py", "03_complete.py"


@pytest.fixture
def lanes() -> None:
    """The devices named by the examples."""


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Use float64, in which the order of a sum does not change the results."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def check_equal(mine: nn.Module, theirs: nn.Module) -> None:
    expected: dict[str, Tensor] = theirs.state_dict()
    torch.testing.assert_close(mine.state_dict(), expected, rtol=0, atol=1e-10)


def test_a_loop_is_moved_by_two_lines() -> None:
    plain, moved = ((EXAMPLES / name).read_text().splitlines() for name in (PLAIN, MOVED))
    changes = [line for line in difflib.ndiff(plain, moved) if line[0] in "+-" and line[1:].strip()]
    assert [line[0] for line in changes] == ["+", "+"]
    assert [line[1:].strip() for line in changes] == [
        "import flowdp",
        'model = flowdp.setup(model, optimizer, devices=["cpu", "cpu"])',
    ]


def test_the_moved_loop_equals_the_plain_one(capsys: pytest.CaptureFixture[str]) -> None:
    plain, said = example(PLAIN)["main"](epochs=2), capsys.readouterr().out
    moved = example(MOVED)["main"](epochs=2)
    with moved:
        assert isinstance(moved, flowdp.DataParallel)
        assert (moved.world_size, moved.training_step) == (2, 48)
        assert min(moved.shard_sizes) > 0
        check_equal(moved, plain)
    assert capsys.readouterr().out == said
    assert said.count("\n") == 2


def test_the_demo_says_the_gain_and_shows_the_run(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'flowdp[demo]'")
    said = subprocess.run(
        [sys.executable, str(EXAMPLES / DEMO), "--epochs", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    *lines, last = said.splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == 6
    told = re.match(
        r"With a second device, 2\.5 times slower, training is \d\.\d\d times as fast as on the first one "
        r"alone \(1\.40 is possible\); with equal parts, as under DistributedDataParallel, \d\.\d\d times\. "
        r"Last losses: (\d\.\d+), (\d\.\d+), (\d\.\d+)\.",
        last,
    )
    assert told is not None, last
    assert float(told[1]) == pytest.approx(float(told[2]), abs=1e-3)
    assert float(told[1]) == pytest.approx(float(told[3]), abs=1e-3)
    about = re.search(r'"about":"([^"]+)"', (tmp_path / "demo.html").read_text(encoding="utf-8"))
    assert about is not None
    assert re.fullmatch(
        r"Sequential, 94,986 parameters . policy exact . batch size 100 . devices cpu, cpu . "
        r"\d{4}-\d\d-\d\d \d\d:\d\d",
        about[1].encode().decode("unicode_escape"),
    )


@pytest.mark.parametrize(("rank", "waits"), [(0, []), (1, [0.03, 0.015])])
def test_the_slow_device_of_the_demo_waits_in_proportion(
    rank: int, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10, 10 and 5 samples, each step of 20 ms of the processor, however much time has passed."""
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'flowdp[demo]'")
    demo, slept = example(DEMO), list[float]()
    clock = iter([7.0, 7.02, 7.04])
    timed = SimpleNamespace(thread_time=lambda: next(clock), sleep=slept.append)
    loss, model = demo["SlowRank"](2.5), demo["cnn"]()
    monkeypatch.setitem(loss.__call__.__globals__, "time", timed)
    monkeypatch.setattr(flowdp, "current_worker", lambda: SimpleNamespace(rank=rank))
    for samples in (10, 10, 5):
        loss(model, (torch.randn(samples, 1, 8, 8), torch.zeros(samples, dtype=torch.int64))).backward()
    assert slept == pytest.approx(waits)


@pytest.mark.parametrize(("rate", "is_far"), [(1330.0, False), (900.0, True)])
def test_the_demo_says_how_far_the_gain_is_from_the_possible_one(rate: float, is_far: bool) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'flowdp[demo]'")
    demo = example(DEMO)
    alone, equal, both = (demo["Trained"](None, speed, 0.1) for speed in (1000.0, 800.0, rate))
    line = demo["verdict"](alone, equal, both, 2.5)
    assert f"training is {rate / 1000:.2f} times as fast" in line
    assert "under DistributedDataParallel, 0.80 times." in line
    assert ("The table says where the rest went" in line) == is_far


def test_the_gan_says_how_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    example(GAN)["main"](steps=5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all("of the points lie in clouds" in line for line in lines)


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = example(RESUMED)
    first, second = resumed["main"](tmp_path)
    assert first.interrupted
    assert 100 <= first.global_step < 50 * 47
    # Where the stop came before an epoch's evaluation, the second run has made it up.
    kept = tuple(epoch for epoch in first.history if not epoch.owes_evaluation)
    assert len(first.history) - len(kept) <= 1
    assert second.history[: len(kept)] == kept
    assert all(sum(rank.samples for rank in epoch.per_rank) == 1500 for epoch in second.history)
    assert len(second.history[-1].per_rank) == 3

    # Early stopping: three epochs after the best one, whose state is the result.
    accuracies = [epoch.eval["accuracy"] for epoch in second.history]
    best = accuracies.index(max(accuracies))
    assert len(accuracies) == best + 4 or len(second.history) == 50
    _, test = resumed["digits"]()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    assert resumed["accuracy"](second.load_into(model), test)["accuracy"].item() == pytest.approx(
        max(accuracies)
    )
    assert max(accuracies) > 0.9

    said = capsys.readouterr().out
    assert said.count(" | eval accuracy ") == len(accuracies)
    assert f"stopped at step {first.global_step}, in epoch {first.epochs_done + 1}" in said
    assert said.count("checkpoint at step") >= 2


def test_a_complete_program_has_16_lines_at_most_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / COMPLETE).read_text()
    program = text.split("the program\n")[1].splitlines()
    assert text.count("import flowdp") == 1
    assert 1 + len([line for line in program if line.strip()]) <= 16
    monkeypatch.setattr("sys.argv", [COMPLETE, str(tmp_path)])
    torch.set_default_dtype(torch.float32)
    first = example(COMPLETE)["state"]
    assert first.epochs_done == 2
    assert {"best.pt"} < {file.name for file in tmp_path.iterdir()}
    assert "eval loss" in capsys.readouterr().out
    again = example(COMPLETE)["state"]
    assert (again.global_step, again.history) == (first.global_step, first.history)
