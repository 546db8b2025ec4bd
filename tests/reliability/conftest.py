"""Shared parts of the tests of reliability: one thread per worker, a recorder, and small runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowdp.engine import active_runs
from flowdp.protocol.messages import Requested
from tests.numerics.conftest import StepRecorder


@pytest.fixture(autouse=True)
def stop_runs() -> Iterator[None]:
    """End runs left by a failed test, so that the tests end, too."""
    yield
    for engine in list(active_runs._live):
        engine.request(Requested("stop"))


@pytest.fixture
def recorder() -> StepRecorder:
    return StepRecorder()
