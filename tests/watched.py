"""A lock that reports when a second thread asks for it, to bring two threads to one place at once."""

from __future__ import annotations

import threading
from types import TracebackType

from tests.limits import HANG_S


class Watched:
    """Stands for a lock; its holder can call `await_second`, which returns when another thread asks for
    it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked = 0
        self._is_second = threading.Event()

    def __enter__(self) -> Watched:
        self._asked += 1
        if self._asked == 2:
            self._is_second.set()
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def await_second(self) -> None:
        assert self._is_second.wait(HANG_S), "no other thread asks for the lock"


def both(work: object, *, times: int = 2) -> list[object]:
    """Call a function in two threads at once; returns their results or errors."""
    assert callable(work)
    found: list[object] = []

    def body() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=body) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads)
    return found
