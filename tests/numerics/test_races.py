"""Tests of the races in small: all contestants learn the same, and the table says what happened."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
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
