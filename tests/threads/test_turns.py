"""Tests of turns: one at a time, in order, and none lost with a thread that gives up or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flowdp.threads.turns import Turns
from tests.limits import HANG_S


class Asker:
    """A thread that asks for the turn, and ends it on command."""

    def __init__(self, turns: Turns, then: Callable[[], object] = bool) -> None:
        self.turns = turns
        self.then = then
        self.has_it = threading.Event()
        self.may_end = threading.Event()
        self.gives_up = False
        self.answer: bool | None = None
        self.thread = threading.Thread(target=self._run)

    def start(self) -> Asker:
        """Start, and return when it waits or has the turn."""
        waiting = len(self.turns._waiting)
        self.thread.start()
        while not self.has_it.is_set() and len(self.turns._waiting) == waiting:
            self.has_it.wait(1e-3)
        return self

    def _run(self) -> None:
        self.answer = self.turns.begin(lambda: self.gives_up)
        if self.answer:
            self.then()
            self.has_it.set()
            assert self.may_end.wait(HANG_S)
            self.turns.end()

    def end(self) -> None:
        self.may_end.set()
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()


def test_the_turn_goes_to_those_who_wait_in_their_order() -> None:
    turns, order = Turns(), list[int]()
    first = Asker(turns).start()
    others = [Asker(turns, lambda number=number: order.append(number)).start() for number in range(3)]  # type: ignore[misc]
    assert not any(other.has_it.is_set() for other in others)
    for other in others:
        other.may_end.set()
    first.end()
    for other in others:
        other.end()
    assert order == [0, 1, 2]


def test_a_thread_that_asks_again_stands_behind_those_who_wait() -> None:
    turns, order = Turns(), list[str]()
    waiter = Asker(turns, lambda: order.append("waiter"))
    waiter.may_end.set()

    def twice() -> None:
        assert turns.begin(bool)
        waiter.start()
        turns.end()
        assert turns.begin(bool)
        order.append("again")
        turns.end()

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join(HANG_S)
    waiter.end()
    assert order == ["waiter", "again"]


def test_who_gives_up_holds_nobody_up() -> None:
    turns = Turns()
    first = Asker(turns).start()
    second, third = Asker(turns).start(), Asker(turns).start()
    second.gives_up = True
    turns.look()
    second.thread.join(HANG_S)
    assert second.answer is False
    first.end()
    third.end()
    assert third.answer


def test_the_turn_of_a_thread_that_hangs_is_taken_away() -> None:
    turns = Turns()
    hanging = Asker(turns).start()
    waiter = Asker(turns).start()
    turns.take_away(waiter.thread)  # which does not have it
    assert not waiter.has_it.is_set()
    turns.take_away(hanging.thread)
    assert waiter.has_it.wait(HANG_S)
    hanging.end()  # its own end does not end another thread's turn
    late = Asker(turns).start()
    assert not late.has_it.is_set()
    waiter.end()
    late.end()
