"""Ends the threads that averaging by NCCL starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collective import fake_world


@pytest.fixture(autouse=True)
def no_watchdogs() -> Iterator[None]:
    """End those that a test did not end by close or abort."""
    yield
    while fake_world.WATCHED:
        fake_world.WATCHED.pop()._comms.watchdog.close()
