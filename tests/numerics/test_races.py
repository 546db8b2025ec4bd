"""Tests of the races in small: all contestants learn the same, and the table says what happened."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LEAST_CHARACTER_LOSS = 1.0
EAGER = ["by hand", "flowdp Trainer"]


@pytest.fixture
def lanes() -> None:
    """The device that the races name."""


@pytest.fixture(autouse=True)
def races(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples can be imported, and the settings that a race makes in its process end with the test."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """Images in the form of Fashion-MNIST, whose classes are bars of different height and grey."""
    random = np.random.default_rng(0)
    for part, samples in (("train", 640), ("t10k", 200)):
        labels = random.integers(0, 10, samples)
        images = random.integers(0, 60, (samples, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[6 : 8 + 2 * (label % 5), 6:22] += 60 + 120 * (label // 5)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    return tmp_path


def test_contestants_of_the_fashion_race_learn_alike(fashion: Path) -> None:
    race = import_module("race_fashion")
    recipe = race.Recipe(fashion, "cpu", width=4, epochs=6, target=60.0, samples=None, batch_size=20)
    results = {name: race.run(recipe, name) for name in EAGER}
    for result in results.values():
        accuracies = [accuracy for _, accuracy in result.curve]
        assert len(accuracies) == 6
        assert result.final == accuracies[-1] > 80
        assert 0 < result.first_step_s < result.figure <= result.curve[-1][0]
    assert results["by hand"].final == pytest.approx(results["flowdp Trainer"].final, abs=15)


def test_a_goal_that_is_not_reached_has_no_time(fashion: Path) -> None:
    race = import_module("race_fashion")
    recipe = race.Recipe(fashion, "cpu", width=2, epochs=1, target=100.0, samples=64, batch_size=32)
    result = race.run(recipe, "by hand")
    assert result.figure is None
    assert len(result.curve) == 1


def test_augmentation_moves_and_mirrors_whole_images() -> None:
    race = import_module("race_fashion")
    torch.manual_seed(0)
    image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    image[0, 0, 10, 5:8] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    seen = race.augmented(image.expand(400, 1, 28, 28))
    assert (seen.shape, seen.dtype) == ((400, 1, 28, 28), torch.uint8)
    assert seen.sum((1, 2, 3)).eq(6).all()
    rows, columns = (seen[:, 0] == 2).nonzero()[:, 1:].unbind(1)
    assert set(rows.tolist()) == {8, 9, 10, 11, 12}
    assert set(columns.tolist()) == {4, 5, 6, 7, 8, 19, 20, 21, 22, 23}
    assert 150 < int((columns > 14).sum()) < 250


def test_the_network_keeps_channels_last() -> None:
    race = import_module("race_fashion")
    model = race.Recipe(Path(), "cpu", width=4, epochs=1, target=1.0, samples=None).network()
    shapes = []

    def look(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        shapes.append(args[0].is_contiguous(memory_format=torch.channels_last))
        assert module.weight.is_contiguous(memory_format=torch.channels_last)

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(look)
    model(torch.randn(2, 1, 28, 28))
    assert shapes == [True] * 8


def test_contestants_of_the_gpt_race_learn_alike() -> None:
    race = import_module("race_gpt")
    sizes = {"layers": 2, "heads": 2, "channels": 32, "context": 32, "batch_size": 16, "dropout": 0.0}
    recipe = race.Recipe("cpu", iterations=50, warm_up=5, **sizes)
    results = {name: race.run(recipe, name) for name in [*EAGER, "flowdp.setup"]}
    for result in results.values():
        losses = [loss for _, loss in result.curve]
        assert len(losses) == 50
        assert losses[0] == pytest.approx(np.log(96), abs=0.4)
        assert LEAST_CHARACTER_LOSS < result.final < losses[0] - 0.8
        assert result.figure > 0
        assert result.first_step_s > 0
    hand = results["by hand"]
    assert results["flowdp Trainer"].final == pytest.approx(hand.final, abs=0.15)
    # The same batches in the same order: the same numbers.
    assert results["flowdp.setup"].final == pytest.approx(hand.final, abs=1e-4)
    np.testing.assert_allclose(results["flowdp.setup"].curve, hand.curve, atol=1e-4)


def test_a_contestant_that_fails_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    racing = import_module("racing")
    outcomes = racing.race({"by hand": partial(int, "no number"), "dies": partial(os._exit, 3)})
    result = racing.Result(3.0, 0.5, 1.0, ((1.0, 0.5),))
    lines = racing.table({**outcomes, "runs": result}, "seconds", "accuracy").splitlines()
    assert "ValueError: invalid literal" in lines[1]
    assert "BrokenProcessPool" in lines[2]
    assert lines[3].split() == ["runs", "3.00", "-", "1.00", "0.500"]
    assert capsys.readouterr().out == "by hand ...\ndies ...\n"


def test_the_table_has_ratios() -> None:
    racing = import_module("racing")
    results = {"by hand": racing.Result(2.0, 1.0, 0.1, ()), "late": racing.Result(3.0, 1.0, 0.1, ())}
    results["never"] = racing.Result(None, 1.0, 0.1, ())
    lines = racing.table(results, "ms", "loss").splitlines()
    assert [line.split()[-3] for line in lines[1:]] == ["1.00", "1.50", "-"]
    assert "not reached" in lines[3]


def test_without_matplotlib_the_table_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    racing = import_module("racing")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    racing.draw(tmp_path / "race.png", {}, "title", "ms", ("x", "y"))
    assert "needs matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "race.png").exists()


def test_the_program_prints_a_table_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "race.png"
    options = ["--small", "--device", "cpu", "--iterations", "6", "--warm-up", "2", "--picture", str(picture)]
    said = subprocess.run(
        [sys.executable, str(EXAMPLES / "race_gpt.py"), *options, "--contestants", "flowdp Trainer"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout
    rows = [line.split("  ")[0] for line in said.split("\n\n")[1].splitlines()]
    assert rows == ["contestant", "flowdp Trainer"]
    assert picture.read_bytes().startswith(b"\x89PNG")
