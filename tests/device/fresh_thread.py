"""Calls in a thread that has no OpenMP pool yet."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_thread(work: Callable[[], object]) -> object:
    """The result of `work` in a thread of its own: a fresh OpenMP pool."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(60)
    return results[0]
