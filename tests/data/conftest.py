"""Closing waits for the threads that read, however busy the machine is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowdp.data import loader_source, prefetch, processes
from tests.limits import HANG_S


@pytest.fixture(autouse=True)
def set_grace(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give readers that are closed all the time they need; a test with a stuck one sets its own."""

    def set_all(seconds: float) -> None:
        monkeypatch.setattr(loader_source, "GRACE_S", seconds)
        monkeypatch.setattr(processes, "GRACE_S", seconds)
        monkeypatch.setattr(prefetch, "_GRACE_S", seconds)

    set_all(HANG_S)
    return set_all
