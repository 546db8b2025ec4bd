"""Tests of failures: the first is raised, the others are its notes."""

from __future__ import annotations

import logging
import threading

import pytest

from flowdp.engine.failures import Failures
from flowdp.errors import StallError, StepError
from flowdp.threads.stacks import stacks
from tests.limits import HANG_S


def test_the_first_stays_and_the_others_are_notes() -> None:
    failures = Failures()
    assert failures.first is None
    first, second = ValueError("one"), KeyError("two")
    assert failures.add(first, 1) == "rank 1: ValueError: one"
    assert failures.add(second, 0) == "rank 0: KeyError: 'two'"
    assert failures.add(first) == "ValueError: one"  # seen again on its way up: no note on itself
    assert failures.first is first
    assert first.__notes__ == ["Then rank 0: KeyError: 'two'"]


def test_a_failure_that_several_threads_meet_is_told_once() -> None:
    failures = Failures()
    for rank in range(3):
        assert failures.add(OSError("disk gone"), rank) == f"rank {rank}: OSError: disk gone"
    for rank in range(3):
        failures.add(OSError("card gone"), rank)
    assert failures.first is not None
    assert failures.first.__notes__ == ["Then rank 0: OSError: card gone"]


def test_an_error_of_the_users_code_on_every_device_is_told_once() -> None:
    failures = Failures()
    for rank in range(3):
        error = StepError(f"rank {rank} failed: KeyError: 0", rank=rank, device="cpu")
        error.__cause__ = KeyError(0)
        failures.add(error, rank)
    assert failures.first is not None
    assert not hasattr(failures.first, "__notes__")


def test_what_the_others_go_on_without_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    failures, lost, fatal = Failures(), ValueError("one"), KeyError("two")
    assert failures.hold(lost, 1) == "rank 1: ValueError: one"
    failures.forgive(1)
    failures.blame(1)  # it has been forgiven
    assert (failures.first, failures.forgiven) == (None, {1: lost})
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 has left, and the others go on: one"
    ]
    failures.hold(fatal, 0)
    failures.blame(0)
    failures.blame(2)  # left unchanged
    assert (failures.first, failures.forgiven) == (fatal, {1: lost})


@pytest.mark.parametrize("failed_before", [False, True])
def test_a_failure_after_the_end_is_logged(failed_before: bool, caplog: pytest.LogCaptureFixture) -> None:
    failures, first, late = Failures(), ValueError("one"), KeyError("two")
    if failed_before:
        failures.add(first)
    failures.conclude()
    failures.add(late, 1)
    assert failures.first is (first if failed_before else None)  # an earlier report stays valid
    assert not hasattr(first, "__notes__")
    [record] = caplog.records
    assert (record.name, record.levelno) == ("flowdp", logging.ERROR)
    assert record.getMessage() == "a failure after the run's end: rank 1: KeyError: 'two'"
    assert record.exc_info is not None
    assert record.exc_info[1] is late


def test_a_thread_that_stays_is_named_with_its_stack() -> None:
    release = threading.Lock()
    release.acquire()

    def stands_here() -> None:
        release.acquire()

    stuck = threading.Thread(target=stands_here, name="flowdp-worker-3")
    gone = threading.Thread(target=lambda: None, name="flowdp-worker-4")
    stuck.start()
    gone.start()
    while not "".join(stacks([stuck]).values()).endswith("release.acquire()\n"):
        assert stuck.is_alive()
    gone.join(HANG_S)
    failures = Failures()
    failures.note_stuck([stuck, gone])  # no error to note it on
    failures.add(ValueError("one"))
    failures.note_stuck([stuck, gone])
    failures.note_stuck([stuck, gone])  # once is enough
    stalled = Failures()
    stalled.add(StallError("still", stacks=stacks([stuck])))
    stalled.note_stuck([stuck])
    release.release()
    stuck.join(HANG_S)
    failures.note_stuck([stuck, gone])
    assert failures.first is not None
    [note] = failures.first.__notes__
    assert note.startswith("flowdp-worker-3 has not left yet")
    assert "in stands_here" in note
    assert stalled.first is not None
    assert stalled.first.__notes__ == ["flowdp-worker-3 has not left yet; its stack is still the same"]
