"""Tests of a hanging run's stacks: readable, with the user's line."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from flowdp.threads.stacks import stacks


@contextmanager
def thread_inside(name: str, keeps: object = None) -> Iterator[threading.Thread]:
    """A thread inside a user's function."""
    release = threading.Lock()
    release.acquire()

    def loss_of_the_user() -> object:
        release.acquire()
        return keeps

    thread = threading.Thread(target=loss_of_the_user, name=name)
    thread.start()
    try:
        while not "".join(stacks([thread]).values()).endswith("release.acquire()\n"):
            assert thread.is_alive()
        yield thread
    finally:
        release.release()
        thread.join(60)


def test_the_stack_of_a_thread_names_the_users_line() -> None:
    with thread_inside("flowdp-worker-1") as thread:
        [(name, stack)] = stacks([thread]).items()
    assert name == "flowdp-worker-1"
    lines = stack.splitlines()
    here = next(number for number, line in enumerate(lines) if "in loss_of_the_user" in line)
    assert __file__ in lines[here]
    assert lines[here + 1].strip() == "release.acquire()"
    assert here > next(number for number, line in enumerate(lines) if "in run" in line)  # innermost last


def test_asking_for_stacks_keeps_nothing_alive() -> None:
    class Activation:
        pass

    def look() -> tuple[dict[str, str], weakref.ref[Activation]]:
        kept = Activation()
        with thread_inside("flowdp-worker-0", kept) as thread:
            return stacks([thread, threading.current_thread()]), weakref.ref(kept)

    found, gone = look()
    assert len(found) == 2
    assert gone() is None
