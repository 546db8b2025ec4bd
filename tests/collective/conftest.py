"""Ends the threads that averaging by NCCL starts beside the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collective import fake_world


@pytest.fixture(autouse=True)
def no_watchdogs() -> Iterator[None]:
    """End those that a test has not ended by closing or aborting."""
    yield
    while fake_world.WATCHED:
        fake_world.WATCHED.pop()._watchdog.close()
