"""The first failure is the answer, the others are notes on it."""

from __future__ import annotations

import threading

from flowdp.engine.failures import Failures


def test_the_first_stays_and_the_others_are_notes() -> None:
    failures = Failures()
    assert failures.first is None
    first, second = ValueError("one"), KeyError("two")
    assert failures.add(first, 1) == "rank 1: ValueError: one"
    assert failures.add(second, 0) == "rank 0: KeyError: 'two'"
    assert failures.add(first) == "ValueError: one"  # met again on its way through: no note on itself
    assert failures.first is first
    assert first.__notes__ == ["Then rank 0: KeyError: 'two'"]


def test_a_thread_that_stays_is_named_with_its_stack() -> None:
    release, inside = threading.Event(), threading.Event()

    def stands_here() -> None:
        inside.set()
        release.wait(10)

    stuck = threading.Thread(target=stands_here, name="flowdp-worker-3")
    gone = threading.Thread(target=lambda: None, name="flowdp-worker-4")
    stuck.start()
    gone.start()
    assert inside.wait(5)
    gone.join(5)
    failures = Failures()
    failures.note_stuck([stuck, gone])  # nothing to note it on
    failures.add(ValueError("one"))
    failures.note_stuck([stuck, gone])
    release.set()
    stuck.join(5)
    failures.note_stuck([stuck, gone])
    assert failures.first is not None
    [note] = failures.first.__notes__
    assert note.startswith("flowdp-worker-3 has not left yet")
    assert "in stands_here" in note
