"""Tests of SIGTERM, whose first one requests a stop, and of Ctrl-C in the body of a loop over records."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from flowdp.engine.signals import SigtermStop, hearing_interrupts
from flowdp.errors import OptionError
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]


class Earlier:
    """The user's own handler."""

    def __init__(self) -> None:
        self.heard = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard += 1


@pytest.fixture
def earlier() -> Iterator[Earlier]:
    """Set the handler before the test, and restore the original after it."""
    handler = Earlier()
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


class Wish:
    """A run that can be asked to stop."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.by: list[str] = []
        self.stop = SigtermStop(self.ask)

    def ask(self) -> None:
        self.by.append(threading.current_thread().name)
        self.asked.release()

    def wait(self) -> None:
        assert self.asked.acquire(timeout=HANG_S)


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_the_first_asks_and_the_second_goes_to_the_handler_before(earlier: Earlier) -> None:
    run = Wish()
    sigterm()
    run.wait()
    assert run.by == ["flowdp-sigterm"]  # not the main thread, which may hold the same locks
    assert earlier.heard == 0
    sigterm()
    assert earlier.heard == 1
    run.stop.close()
    sigterm()
    assert earlier.heard == 2
    assert len(run.by) == 1


def test_all_runs_hear_it_and_the_last_one_puts_the_handler_back(earlier: Earlier) -> None:
    runs = [Wish(), Wish()]
    sigterm()
    for run in runs:
        run.wait()
    later = Wish()  # has not received that one
    for run in runs:
        run.stop.close()
    assert signal.getsignal(signal.SIGTERM) is not earlier
    sigterm()
    later.wait()
    assert earlier.heard == 0
    later.stop.close()


def test_an_end_in_another_thread_leaves_the_handler_before_in_charge(earlier: Earlier) -> None:
    run = Wish()
    closer = threading.Thread(target=run.stop.close)
    closer.start()
    closer.join(HANG_S)
    assert signal.getsignal(signal.SIGTERM) is not earlier  # only the main thread can set it
    sigterm()
    assert (earlier.heard, run.by) == (1, [])
    run.stop.close()  # now in the main thread


def test_only_the_main_thread_can(earlier: Earlier) -> None:
    said: list[str] = []

    def elsewhere() -> None:
        try:
            SigtermStop(lambda: None)
        except OptionError as error:
            said.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(HANG_S)
    assert len(said) == 1
    assert "main thread" in said[0]


@pytest.mark.posix
def test_by_default_the_second_ends_the_process_and_a_forked_one_the_first() -> None:
    program = """
import os, signal, threading, warnings
from flowdp.engine.signals import SigtermStop

asked = threading.Semaphore(0)
stop = SigtermStop(asked.release)
warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads
child = os.fork()
if not child:
    signal.raise_signal(signal.SIGTERM)
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status), asked.acquire(blocking=False), flush=True)
signal.raise_signal(signal.SIGTERM)
print(asked.acquire(timeout=60), flush=True)
signal.raise_signal(signal.SIGTERM)
print("not reached")
"""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S
    )
    assert child.stdout == f"{signal.SIGTERM:d} False\nTrue\n"
    assert child.returncode == -signal.SIGTERM
    assert child.stderr == "SIGTERM: the run stops after its round; another SIGTERM ends the process\n"


# ---------------------------------------------------------------- Ctrl-C in a loop over records
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
