"""Tests of stalls: detected in time, and only real ones."""

from __future__ import annotations

import pytest

from flowdp.policy.stall import StallWatch, Verdict


class Looker:
    """Checks as often as it is asked to, by counters that a test moves."""

    def __init__(self, timeout_ms: float | None) -> None:
        self.watch = StallWatch(timeout_ms)
        self.now_ms = 0.0
        self.progress = [0, 0]
        self.all_started, self.may_idle, self.longest_ms = True, False, 0.0
        self.said: list[tuple[float, Verdict]] = []

    def until(self, end_ms: float) -> list[tuple[float, Verdict]]:
        """Check until this time; returns the results other than "moves", with their times."""
        self.said = []
        while (due_ms := self.watch.deadline_ms()) is not None and due_ms <= end_ms:
            self.look(due_ms)
        return self.said

    def look(self, now_ms: float) -> Verdict:
        self.now_ms = now_ms
        verdict = self.watch.look(
            now_ms,
            self.progress,
            all_started=self.all_started,
            may_idle=self.may_idle,
            longest_ms=self.longest_ms,
        )
        if verdict != "moves":
            self.said.append((now_ms, verdict))
        return verdict


def test_a_standstill_is_a_stall_after_the_timeout_and_once() -> None:
    looker = Looker(60_000)
    assert looker.until(10_000) == []
    looker.progress[1] += 1
    [(when, verdict)] = looker.until(10**9)
    assert verdict == "stall"
    assert 70_000 <= when <= 72_000  # never early, at most two checks late
    assert looker.watch.still_ms >= 60_000
    assert looker.watch.deadline_ms() is None


def test_whatever_moves_holds_it_off() -> None:
    looker = Looker(1000)
    for beat in range(1, 21):
        looker.progress[beat % 2] += 1
        assert looker.until(beat * 900.0) == []


@pytest.mark.parametrize("why", ["not all started", "paused"])
def test_a_standstill_with_a_reason_is_a_warning_once_per_timeout(why: str) -> None:
    looker = Looker(1000)
    looker.all_started, looker.may_idle = why == "paused", why == "paused"
    assert looker.until(3500) == [(1000.0, "warn"), (2000.0, "warn"), (3000.0, "warn")]
    looker.progress[0] += 1  # seen by the check at 3750
    assert looker.until(5500) == [(4750.0, "warn")]


def test_the_end_of_a_pause_begins_a_new_standstill() -> None:
    looker = Looker(1000)
    looker.may_idle = True
    assert looker.until(1900) == [(1000.0, "warn")]
    looker.may_idle = False
    assert looker.until(2900) == []
    assert looker.until(10**6) == [(3000.0, "stall")]


def test_a_machine_that_slept_has_not_stalled() -> None:
    looker = Looker(1000)
    assert looker.until(250) == []
    assert looker.look(3.6e6) == "moves"
    assert looker.watch.still_ms == 250 + 500
    assert looker.until(10**9) == [(3.6e6 + 250, "stall")]
