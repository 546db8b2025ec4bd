"""Tests of the list of live runs: their devices, and their end with the process."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowdp import OptionError
from flowdp.engine import active_runs
from flowdp.observe.records import Records
from flowdp.protocol.commands import Finish
from flowdp.protocol.messages import Requested

add = active_runs.add
CPU, CARD, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


class Held:
    """The part of a run used here: it ends when it is stopped."""

    def __init__(self, *devices: torch.device, obeys: bool = True) -> None:
        self.replicas: Any = [SimpleNamespace(device=device) for device in devices]
        self.trained: object = None
        self.records = Records()
        self.obeys = obeys
        self.asked: list[str] = []
        self.joined = 0
        self.is_abandoned = False
        self.observer: list[float | None] = []
        self.told = 0

    def request(self, wish: Requested) -> int:
        self.asked.append(wish.what)
        if wish.what == "stop" and self.obeys:
            self.end()
        return len(self.asked)

    def end(self) -> None:
        self.records.end(Finish(None, True, 0, 0), over=True)

    def join(self) -> None:
        self.joined += 1

    def tell_end(self) -> None:
        self.told += 1

    def close_observer(self, timeout_s: float | None) -> bool:
        self.observer.append(timeout_s)
        return True


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An empty list of runs; those that a test adds are removed after it."""
    runs: list[Any] = []
    monkeypatch.setattr(active_runs, "_live", runs)
    monkeypatch.setattr(active_runs, "add", runs.append)
    monkeypatch.delattr("sys.last_value", raising=False)
    return runs


def test_a_card_of_a_live_run_is_refused() -> None:
    run = Held(CARD, CPU)
    active_runs.add(run)
    active_runs.check_free([CPU])
    active_runs.check_free([OTHER])
    with pytest.raises(OptionError, match=r"devices: cuda:0 is held by another run"):
        active_runs.check_free([OTHER, CARD])
    run.end()
    active_runs.check_free([CARD])


def test_a_model_of_a_live_run_is_refused() -> None:
    model, run = torch.nn.Linear(1, 1), Held(CPU)
    run.trained = model
    active_runs.add(run)
    active_runs.check_free([CPU], torch.nn.Linear(1, 1))
    active_runs.check_free([CPU], None)
    with pytest.raises(OptionError, match=r"this Linear is trained .*flowdp\.runs\(\).*run\.stop\(\)"):
        active_runs.check_free([CPU], model)
    run.end()
    active_runs.check_free([CPU], model)


def test_the_end_of_the_process_waits_for_a_run_and_wakes_one_that_is_paused(alone: list[Any]) -> None:
    run = Held(CPU)
    active_runs.add(run)
    ending = threading.Timer(0.05, run.end)
    ending.start()
    active_runs._end_of_process()
    ending.join()
    assert run.asked == ["unpause"]
    assert (run.records.is_over, run.joined) == (True, 1)
    assert run.observer[0] is None  # its callbacks end first, however long they take


def test_after_a_ctrl_c_that_nobody_caught_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Held(CPU)
    active_runs.add(run)
    monkeypatch.setattr("sys.last_value", KeyboardInterrupt(), raising=False)
    active_runs._end_of_process()
    assert run.asked == ["stop"]
    assert (run.joined, run.told) == (1, 1)


def test_one_that_does_not_obey_is_waited_for_no_longer_than_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(active_runs, "EXIT_GRACE_S", 0.05)
    monkeypatch.setattr("sys.last_value", KeyboardInterrupt(), raising=False)
    run = Held(CPU, obeys=False)
    active_runs.add(run)
    active_runs._end_of_process()
    assert run.asked == ["stop"]
    assert not run.records.is_over


def test_a_ctrl_c_while_it_waits_stops_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    run, exits = Held(CPU), []
    active_runs.add(run)
    signals = iter([KeyboardInterrupt])
    wait = run.records.wait

    def interrupted(**limits: Any) -> bool:
        for signal in signals:
            raise signal
        return wait(**limits)

    monkeypatch.setattr(active_runs, "_exit_interrupted", lambda: exits.append("interrupted"))
    monkeypatch.setattr(run.records, "wait", interrupted)
    active_runs._end_of_process()
    assert run.asked == ["unpause", "stop"]
    assert (run.joined, exits) == (1, ["interrupted"])


def test_of_two_runs_that_start_at_once_on_a_card_the_second_is_refused(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_runs, "_live", weakref.WeakSet())
    first, second = Held(CARD, CPU), Held(CARD)
    active_runs.check_free([CARD])  # both have checked
    add(first)
    with pytest.raises(OptionError, match="cuda:0 is held by another run"):
        add(second)
    assert active_runs._all() == [first]
