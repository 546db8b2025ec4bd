"""Tests of the inbox: order, waits."""

from __future__ import annotations

import threading
import time

import pytest

from flowdp.threads.inbox import Inbox
from tests.limits import HANG_S


def test_messages_come_in_their_order() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(10):
        inbox.post(number)
    assert [inbox.get() for _ in range(10)] == list(range(10))


def test_nothing_comes_in_no_time() -> None:
    inbox: Inbox[int] = Inbox()
    assert inbox.get(0) is None
    # A deadline in the past means no wait.
    assert inbox.get(-5.0) is None
    inbox.post(1)
    assert inbox.get(0) == 1


def test_it_waits_as_long_as_it_was_told() -> None:
    inbox: Inbox[int] = Inbox()
    started = time.perf_counter()
    assert inbox.get(30.0) is None
    assert time.perf_counter() - started >= 0.029


@pytest.mark.parametrize("timeout_ms", [None, 60_000.0])
def test_a_message_wakes_the_reader(timeout_ms: float | None) -> None:
    inbox: Inbox[str] = Inbox()
    heard: list[str | None] = []
    reader = threading.Thread(target=lambda: heard.append(inbox.get(timeout_ms)))
    reader.start()
    inbox.post("wake up")
    reader.join(HANG_S)
    assert heard == ["wake up"]


def test_is_empty_is_whether_nothing_waits() -> None:
    inbox: Inbox[int] = Inbox()
    assert inbox.is_empty()
    inbox.post(1)
    assert not inbox.is_empty()
    inbox.get()
    assert inbox.is_empty()


def test_many_writers_lose_nothing_and_keep_their_own_order() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()
    start = threading.Barrier(4)

    def write(writer: int) -> None:
        start.wait(HANG_S)
        for number in range(1000):
            inbox.post((writer, number))

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in writers:
        thread.start()
    heard = [inbox.get(10_000.0) for _ in range(4000)]
    for thread in writers:
        thread.join(HANG_S)
    for writer in range(4):
        assert [m[1] for m in heard if m is not None and m[0] == writer] == list(range(1000))
    assert inbox.is_empty()
