"""Tests of the shield: a Ctrl-C is raised at the block's end, and a second one at once."""

from __future__ import annotations

import signal
import threading

import pytest

from flowdp.threads.shield import interrupts_held


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_waits_for_the_end_of_the_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def block() -> None:
        with interrupts_held():
            ctrl_c()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_one_does_not_wait_and_is_heard_once() -> None:
    with interrupts_held():
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


def test_it_can_be_heard_earlier() -> None:
    with interrupts_held() as held:
        held.release()
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            held.release()


def test_an_error_of_the_block_does_not_swallow_it() -> None:
    def block() -> None:
        with interrupts_held():
            ctrl_c()
            raise ValueError("boom")

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert isinstance(caught.value.__context__, ValueError)


def test_one_within_another() -> None:
    done = []

    def blocks() -> None:
        with interrupts_held():
            with interrupts_held():
                ctrl_c()
            done.append("inner")

    with pytest.raises(KeyboardInterrupt):
        blocks()
    assert done == ["inner"]


def test_a_handler_that_was_set_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupts_held():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with interrupts_held():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_there_is_nothing_to_hold() -> None:
    handlers = []

    def hold() -> None:
        with interrupts_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
