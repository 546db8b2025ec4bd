"""Tests of the start: all or nothing; a failed one leaves nothing behind."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp
from bench.reliability.interrupts import interrupt, make, places

SAMPLED = 6


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flowdp-")]


def settings() -> tuple[Any, ...]:
    return signal.getsignal(signal.SIGTERM), sys.getswitchinterval(), torch.get_num_threads()


def test_a_ctrl_c_anywhere_in_start(tmp_path: Path) -> None:
    trainer = make(tmp_path, epochs=10**6)
    lines = places(trainer)
    assert len(lines) > 500
    # Most lines build objects that nothing holds yet; `python -m bench.reliability.interrupts` tests all.
    late = [place for place in lines if place.startswith(("engine/engine.py", "trainer.py"))][-14:]
    chosen = [*lines[:: len(lines) // SAMPLED], *late]
    faults = [interrupt(trainer, place) for place in chosen]
    assert [fault for fault in faults if fault] == []
    assert faults.count([]) > len(chosen) / 2  # the other places were not reached


class NoRoom:
    """Lets this number of threads start; for another one there is no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.left = room
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("flowdp-"):
                self.left -= 1
                if self.left < 0:
                    raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)


def test_no_room_for_the_next_thread(tmp_path: Path) -> None:
    before = settings()
    trainer = make(tmp_path, epochs=10**6)
    refused, run = 0, None
    while run is None:
        with pytest.MonkeyPatch.context() as patch:
            NoRoom(patch, room=refused)
            with suppress(RuntimeError, flowdp.StepError):  # the latter in the sanity check
                run = trainer.start()
        if run is None:
            refused += 1
            assert threads() == []
            assert (
                signal.getsignal(signal.SIGTERM),
                sys.getswitchinterval(),
                torch.get_num_threads(),
            ) == before
            assert flowdp.runs() == ()
    run.stop()
    run.join()
    assert refused >= 6  # SIGTERM, reader, writer, two workers, coordinator, callbacks
