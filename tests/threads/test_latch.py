"""Tests of the latch: waiting threads begin together, or not at all."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from flowdp.threads.latch import Latch
from tests.limits import HANG_S


def waiting(latch: Latch) -> tuple[threading.Thread, SimpleQueue[bool]]:
    answers: SimpleQueue[bool] = SimpleQueue()
    thread = threading.Thread(target=lambda: answers.put(latch.wait()))
    thread.start()
    return thread, answers


def test_the_first_decision_counts() -> None:
    latch = Latch()
    before, answers = waiting(latch)
    latch.open()
    assert answers.get(timeout=HANG_S)
    assert not latch.shut()
    assert latch.wait()
    before.join()


def test_a_latch_that_is_shut_stays_shut() -> None:
    latch = Latch()
    before, answers = waiting(latch)
    assert latch.shut()
    assert not answers.get(timeout=HANG_S)
    latch.open()
    assert not latch.wait()
    assert latch.shut()
    before.join()
