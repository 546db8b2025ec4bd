"""Tests of a hanging run's stacks: readable, with the user's line."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from flowdp.errors import OptionError, ProtocolError
from flowdp.threads.stacks import OWN, Folding, folded, is_own, stacks
from tests.limits import HANG_S


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
        thread.join(HANG_S)


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


CALLING = "def call(function):\n    return function()\n"
FAILING = "def fail():\n    raise ValueError('ours')\n"


def defined(source: str, name: str) -> Callable[..., Any]:
    """A function whose frames are flowdp's."""
    names: dict[str, Any] = {}
    exec(compile(source, f"{OWN}/engine/made.py", "exec"), names)
    return names[name]  # type: ignore[no-any-return]


def caught(function: Callable[[], object]) -> Exception:
    try:
        defined(CALLING, "call")(function)
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # of this function
        return error
    raise AssertionError("it has not raised")


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_users_error_begins_with_the_users_frame() -> None:
    def loss() -> object:
        return defined(CALLING, "call")(lambda: torch.ones(2).view(3))

    error = caught(loss)
    assert frames(error)[0] == "call"
    assert frames(folded(error)) == ["loss", "call", "<lambda>"]  # those inside of it stay
    assert not is_own(error)


def test_an_error_without_a_users_frame_begins_with_torchs() -> None:
    error = caught(partial(torch.nn.functional.cross_entropy, torch.ones(1, 2), torch.ones(2, 2)))
    assert frames(error) == ["call", "cross_entropy"]
    assert frames(folded(error)) == ["cross_entropy"]


def test_an_error_of_flowdps_own_keeps_its_frames() -> None:
    error = caught(defined(FAILING, "fail"))
    assert is_own(error)
    assert frames(folded(error)) == ["call", "fail"]


def join(error: Exception) -> None:
    with Folding():
        raise_it(error)


def raise_it(error: Exception) -> None:
    raise error


def test_an_error_of_a_run_shows_the_users_call_alone() -> None:
    error = OptionError("no")
    for _ in range(2):  # raised again, it does not grow
        with pytest.raises(OptionError) as raised:
            join(error)
        assert frames(raised.value) == ["test_an_error_of_a_run_shows_the_users_call_alone"]
    with pytest.raises(ProtocolError) as bug:
        join(ProtocolError("a bug of flowdp"))
    assert frames(bug.value)[1:] == ["join", "raise_it"]
