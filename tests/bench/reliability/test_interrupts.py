"""Tests of the sweep of interrupts: it finds leftovers of a start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flowdp
from bench.reliability.interrupts import interrupt, make, places
from flowdp.trainer.start import start_run


@pytest.fixture
def left() -> Iterator[list[threading.Event]]:
    """Ends the threads left by a planted fault."""
    made: list[threading.Event] = []
    yield made
    for event in made:
        event.set()


def test_a_start_that_leaves_a_thread_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[threading.Event]
) -> None:
    trainer = make(tmp_path)
    *_, last = places(trainer)

    def leaves(config: Any, undo: Any) -> flowdp.Run:
        left.append(threading.Event())
        threading.Thread(target=left[-1].wait, name="flowdp-left").start()
        return start_run(config, undo)

    assert interrupt(trainer, last) == []
    monkeypatch.setattr("flowdp.trainer.trainer.start_run", leaves)
    assert "flowdp-left" in " ".join(interrupt(trainer, last) or ())
    assert interrupt(trainer, "nowhere.py:1") is None
