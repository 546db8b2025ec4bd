"""Two kinds of devices are enough here: whether a dataset is resident makes no difference to the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flowdp.device.streams import StreamLane
from tests.data.cards import Card, put_on_streams
from tests.fakes import FakeCuda


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def lane(cuda: FakeCuda) -> StreamLane:
    return StreamLane(torch.device("cpu"), cuda)


@pytest.fixture(params=["cpu", "streams"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Plain CPU devices, and fake streams, whose uses are ordered by events."""
    if request.param == "cpu":
        yield request.param
        return
    card = Card()
    put_on_streams(card, monkeypatch.setattr)
    yield request.param
    assert not card.races
