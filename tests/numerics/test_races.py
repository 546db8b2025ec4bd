"""Tests of the races in small: all contestants learn the same, and the table says what happened."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

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
