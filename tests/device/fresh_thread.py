"""Calls in a thread without an OpenMP pool."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.limits import HANG_S


def in_thread(work: Callable[[], object]) -> object:
    """The result of `work` in its own new thread."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(HANG_S)
    return results[0]
