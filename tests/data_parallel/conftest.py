"""Fixtures of the tests of `setup`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

import flowdp
from flowdp import DataParallel


@pytest.fixture
def setup() -> Iterator[Any]:
    """`flowdp.setup` on two devices, closed at the end."""
    made: list[DataParallel] = []

    def setup(model: nn.Module, **options: Any) -> DataParallel:
        options = {"devices": ["cpu"] * 2, "cadence": False, "progress": False} | options
        made.append(flowdp.setup(model, SGD(model.parameters(), 0.1), **options))
        return made[-1]

    yield setup
    for dp in made:
        dp.close()
