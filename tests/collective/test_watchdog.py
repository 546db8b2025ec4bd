"""Tests of the watchdog: a round that begins and does not end is found once, and nothing else."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
import torch

from flowdp.collective.on_streams import ROUNDS
from flowdp.collective.watchdog import Watchdog
from flowdp.errors import CollectiveError, CollectiveTimeout
from tests.fakes import FakeCuda, FakeEvent

CARDS = [torch.device("cuda", 0), torch.device("cuda", 1)]
LIMIT_S = 0.05
LOOKS = 12  # three times the limit
WAIT_S = 60.0


class Mark(FakeEvent):
    """An event that counts queries from the time a test asks for it."""

    def __init__(self, *, passed: bool = False, broken: bool = False) -> None:
        super().__init__(FakeCuda())
        self.passed = threading.Event()
        self.broken = broken
        self.looked = threading.Event()
        self.left = LOOKS
        if passed:
            self.passed.set()

    def query(self) -> bool:
        self.left -= 1
        if self.left <= 0:
            self.looked.set()
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return super().query()

    def looks(self) -> None:
        """Wait for enough queries to pass the limit."""
        self.left = LOOKS
        self.looked.clear()
        assert self.looked.wait(WAIT_S)


class Watched:
    """A watchdog, and its findings."""

    def __init__(self) -> None:
        self.errors: list[CollectiveError] = []
        self.found = threading.Event()
        self.dog = Watchdog(CARDS, LIMIT_S, self.hung)

    def hung(self, error: CollectiveError) -> None:
        self.errors.append(error)
        self.found.set()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.dog.close()


def test_what_is_forgotten_is_not_looked_after(watched: Watched) -> None:
    """After a rank has left, its device may never reach its part."""
    begun, later = Mark(passed=True), Mark(passed=True)
    watched.dog.launched(0, begun, [Mark()])
    watched.dog.forget()
    watched.dog.launched(1, begun, [later])
    later.looks()
    assert watched.errors == []


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "flowdp-nccl-watch"]


@pytest.mark.parametrize("late", [0, 1])
def test_a_round_that_hangs_on_any_rank_is_told_once(watched: Watched, late: int) -> None:
    watched.dog.launched(6, Mark(passed=True), [Mark(passed=True), Mark(passed=True)])
    watched.dog.launched(7, Mark(passed=True), [Mark(passed=rank != late) for rank in range(2)])
    watched.dog.launched(8, Mark(passed=True), [Mark(), Mark()])
    assert watched.found.wait(WAIT_S)
    watched.dog._thread.join(WAIT_S)
    assert threads() == []
    (error,) = watched.errors
    assert isinstance(error, CollectiveTimeout)
    said = re.match(r"averaging round 7 over cuda:0, cuda:1 began more than (\S+) s ago", str(error))
    assert said is not None
    assert LIMIT_S <= float(said[1]) < WAIT_S  # longer if other programs use the cores


def test_a_round_that_waits_for_a_step_does_not_hang(watched: Watched) -> None:
    start = Mark()
    watched.dog.launched(0, start, [Mark(), Mark()])
    start.looks()
    assert not watched.errors
    start.passed.set()
    assert watched.found.wait(WAIT_S)


def test_each_round_has_its_own_time(watched: Watched) -> None:
    """Together they take longer than the limit."""
    is_over = threading.Event()

    class Brief(Mark):
        """Passed at the second query; by then the next round has been launched."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def query(self) -> bool:
            has_passed = super().query()
            if not has_passed:
                self.passed.set()
                launch(self.number + 1)
            return has_passed

    def launch(number: int) -> None:
        if number < LOOKS:
            watched.dog.launched(number, Mark(passed=True), [Brief(number)])
        else:
            is_over.set()

    launch(0)
    assert is_over.wait(WAIT_S)
    assert not watched.errors


def test_marks_that_may_be_recorded_again_are_left_alone(watched: Watched) -> None:
    old, new = Mark(), Mark()
    watched.dog.launched(0, Mark(passed=True), [old])
    for number in range(1, ROUNDS // 2 + 1):
        watched.dog.launched(number, new, [Mark()])
    new.looks()
    old.looked.clear()
    new.looks()
    assert not old.looked.is_set()
    assert not watched.errors


@pytest.mark.parametrize("which", ["start", "done"])
def test_a_device_that_failed_is_its_workers_matter(watched: Watched, which: str) -> None:
    start, done = Mark(passed=True, broken=which == "start"), Mark(broken=which == "done")
    watched.dog.launched(0, start, [done])
    done.looks()
    assert not watched.errors
    start.broken = done.broken = False
    assert watched.found.wait(WAIT_S)


@pytest.mark.parametrize("when", ["at once", "idle", "begun", "hung"])
def test_closing_at_any_moment_leaves_no_thread(watched: Watched, when: str) -> None:
    done = Mark(passed=when == "idle")
    if when != "at once":
        watched.dog.launched(0, Mark(passed=True), [done])
    if when in ("idle", "begun"):
        done.left = 1
        assert done.looked.wait(WAIT_S)
    elif when == "hung":
        assert watched.found.wait(WAIT_S)
    watched.dog.close()
    assert threads() == []
    watched.dog.close()


def test_what_is_told_may_close_it() -> None:
    dogs: list[Watchdog] = []
    is_closed = threading.Event()

    def hung(error: CollectiveError) -> None:
        dogs[0].close()
        is_closed.set()

    dogs.append(Watchdog(CARDS, LIMIT_S, hung))
    dogs[0].launched(0, Mark(passed=True), [Mark()])
    assert is_closed.wait(WAIT_S)
    dogs[0].close()
    assert threads() == []


def test_two_may_close_it(watched: Watched) -> None:
    other = threading.Thread(target=watched.dog.close)
    other.start()
    watched.dog.close()
    other.join(WAIT_S)
    assert not other.is_alive()
    assert threads() == []
