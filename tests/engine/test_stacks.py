"""Tests of a hanging run's stacks: readable, with the user's line."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowdp.engine.stacks import describe_rank, describe_run, stacks
from flowdp.threads.gate import Waiting


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


def test_two_threads_of_one_name_are_both_told() -> None:
    with thread_inside("flowdp-reader") as training, thread_inside("flowdp-reader") as evaluation:
        found = stacks([training, evaluation])
        assert list(found) == ["flowdp-reader", f"flowdp-reader ({evaluation.ident})"]


def test_threads_that_do_not_run_have_no_stack() -> None:
    with thread_inside("flowdp-worker-0") as gone:
        pass
    with thread_inside("flowdp-worker-1"):  # which most likely reuses the ident of the ended thread
        assert stacks([gone, threading.Thread(name="not started")]) == {}


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


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"has_left": True, "step": (0, 3)}, "has left"),
        ({"step": (0, 3)}, "in a step (epoch 0, batch 3)"),
        (
            {"waiting": Waiting(12, (1,), decided=False), "step": (0, 3)},
            "at the gate in round 12, waiting for rank 1",
        ),
        (
            {"waiting": Waiting(12, (1, 3), decided=True)},
            "at the gate in round 12, waiting for ranks 1, 3 to finish the averaging",
        ),
        (
            {"waiting": Waiting(12, (), decided=True)},
            "at the gate in round 12, whose averaging is being launched",
        ),
        (
            {"waiting": Waiting(12, (), decided=False)},
            "at the gate in round 12, waiting for other machines",
        ),
        ({"awaited": (0, 7), "step": (0, 7)}, "waiting for data: batch 7 of epoch 0"),
        ({"task": "evaluates after epoch 2", "awaited": (0, 7)}, "evaluates after epoch 2"),
        ({"idle": "no data"}, "idle: no data"),
        ({}, "idle"),
    ],
)
def test_what_a_rank_is_doing(facts: dict[str, object], words: str) -> None:
    assert describe_rank(**facts) == words  # type: ignore[arg-type]


def test_the_report_of_a_run_can_be_read() -> None:
    ranks = ["in a step (epoch 0, batch 3)", "at the gate in round 12, waiting for rank 0"]
    with thread_inside("flowdp-worker-0") as first, thread_inside("flowdp-worker-1") as second:
        report = describe_run(
            "it stands", ranks, stacks([first, second]), ["1.0 ms Tick() => -", "2.0 ms Tick() => -"]
        )
    lines = report.splitlines()
    assert lines[0] == "it stands"
    assert lines[1:3] == [f"  rank 0: {ranks[0]}", f"  rank 1: {ranks[1]}"]
    assert lines[3:5] == ["", "flowdp-worker-0 is here:"]
    assert sum("in loss_of_the_user" in line for line in lines) == 2
    assert lines[-4:] == ["", "The last events:", "  1.0 ms Tick() => -", "  2.0 ms Tick() => -"]


def test_a_run_without_events_says_nothing_of_them() -> None:
    assert describe_run("running", ["idle"], {}, []) == "running\n  rank 0: idle"


def test_this_thread_can_be_asked_too() -> None:
    [stack] = stacks([threading.current_thread()]).values()
    assert sys._getframe().f_code.co_name in stack
