"""Ctrl-C in the body of a loop over records."""

from __future__ import annotations

import signal
import threading

import pytest

from flowdp.engine.interrupts import hearing_interrupts


def test_interrupts_are_counted_and_raised_as_ever() -> None:
    with hearing_interrupts() as outer:
        with hearing_interrupts() as inner:
            before = outer(), inner()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert (outer(), inner()) == (before[0] + 1, before[1] + 1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert outer() == before[0] + 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_is_left_alone() -> None:
    heard: list[int] = []

    def own(number: int, _frame: object) -> None:
        heard.append(number)

    signal.signal(signal.SIGINT, own)
    try:
        with hearing_interrupts() as interrupts:
            assert signal.getsignal(signal.SIGINT) is own
            signal.raise_signal(signal.SIGINT)
            assert interrupts() == 0
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [signal.SIGINT]


def test_one_that_is_set_meanwhile_stays() -> None:
    def own(_number: int, _frame: object) -> None: ...

    try:
        with hearing_interrupts():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_in_another_thread_there_is_nothing_to_hear() -> None:
    seen: list[object] = []

    def listen() -> None:
        with hearing_interrupts() as interrupts:
            seen.extend([interrupts(), signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(60)
    assert seen == [0, signal.default_int_handler]


def test_a_loop_that_ends_in_another_thread_leaves_the_handler_to_the_next() -> None:
    loop = hearing_interrupts()
    interrupts = loop.__enter__()
    thread = threading.Thread(target=loop.__exit__, args=(None, None, None))
    thread.start()
    thread.join(60)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupts() > 0
    with hearing_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
