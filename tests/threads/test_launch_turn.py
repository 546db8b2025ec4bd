"""Tests of turns to launch: the number of threads inside, and no endless wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from flowdp.policy.launch_limit import LaunchLimit, Window
from flowdp.threads import launch_turn
from flowdp.threads.launch_turn import LaunchTurn, RankTurn

WAIT_S = 60.0


class Fixed(LaunchLimit):
    """A fixed limit, which records its calls."""

    def __init__(self, ranks: int, limit: int | None, *, covers_step: bool = False) -> None:
        super().__init__(ranks)
        self.limit = limit
        self.covers_step = covers_step
        self.windows: list[Window] = []
        self.forwards = 2**62  # at least in a window

    def is_enough(self, ms: float, forwards: int) -> bool:
        return forwards >= self.forwards

    def seen(self, window: Window) -> None:
        self.windows.append(window)


class Room:
    """Counts the threads inside at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = self.most = 0

    def visit(self, meet: Callable[[], object] = lambda: None) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        meet()
        with self.lock:
            self.inside -= 1


def run_all(*bodies: Callable[[], object]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_than_the_limit_are_inside(limit: int) -> None:
    turn, room = LaunchTurn(4, limit=Fixed(4, limit, covers_step=True)), Room()

    def body(rank: int) -> None:
        for _ in range(300):
            turn.ranks[rank].launch_forward(1, room.visit)
            turn.ranks[rank].launch_step(room.visit)

    run_all(*(lambda rank=rank: body(rank) for rank in range(4)))
    assert room.most <= limit
    assert room.inside == 0
    assert [rank.forward.count for rank in turn.ranks] == [300] * 4


def test_as_many_as_the_limit_are_inside_together() -> None:
    turn, met = LaunchTurn(2, limit=Fixed(2, 2)), threading.Barrier(2)
    run_all(*(lambda rank=rank: rank.launch_forward(1, met.wait, WAIT_S) for rank in turn.ranks))


def test_a_backward_inside_gives_the_turn_away_and_takes_it_back() -> None:
    turn, met, room = LaunchTurn(2, limit=Fixed(2, 1)), threading.Barrier(2), Room()

    def step(rank: RankTurn) -> None:
        for _ in range(50):
            room.visit()
            rank.run_outside(met.wait, WAIT_S)
            room.visit()

    run_all(*(lambda rank=rank: rank.launch_forward(1, step, rank) for rank in turn.ranks))
    assert room.most == 1
    assert turn._held == 0
    assert turn.ranks[0].run_outside(lambda: 5) == 5


def test_a_backward_inside_that_raises_leaves_no_turn_taken() -> None:
    turn = LaunchTurn(2, limit=Fixed(2, 1))

    def fail() -> None:
        raise ValueError("of the backward")

    for rank in (*turn.ranks, *turn.ranks):
        with pytest.raises(ValueError, match="of the backward"):
            rank.launch_forward(1, rank.run_outside, fail)
    assert turn._held == 0


def test_a_backward_inside_is_not_launching() -> None:
    policy = Fixed(2, 1)
    policy.forwards = 6
    turn = LaunchTurn(2, limit=policy)
    turn.every = 1
    for _ in range(10):
        turn.ranks[0].launch_forward(1, turn.ranks[0].run_outside, threading.Event().wait, 0.2)
    assert policy.windows
    assert all(window.forward.ms < 100.0 for window in policy.windows)
    assert all(window.forward.place_ms < 100.0 for window in policy.windows)


def test_without_a_limit_all_are_inside_and_steps_are_where_they_are_not_covered() -> None:
    met = threading.Barrier(3)
    turn = LaunchTurn(3, limit=Fixed(3, None))
    run_all(*(lambda rank=rank: rank.launch_forward(1, met.wait, WAIT_S) for rank in turn.ranks))
    turn = LaunchTurn(3, limit=Fixed(3, 1))
    run_all(*(lambda rank=rank: step_of(rank, met.wait, WAIT_S) for rank in turn.ranks))


def step_of(rank: RankTurn, *call: Any) -> None:
    """A step whose optimizer makes a call."""
    rank.launch_forward(1, lambda: None)
    rank.launch_step(*call)


def test_a_step_whose_forward_was_captured_has_no_turn() -> None:
    met = threading.Barrier(3)
    turn = LaunchTurn(3, limit=Fixed(3, 1, covers_step=True))
    for rank in turn.ranks:
        step_of(rank, lambda: None)
    run_all(*(lambda rank=rank: rank.launch_step(met.wait, WAIT_S) for rank in turn.ranks))
    assert [rank.step.count for rank in turn.ranks] == [1, 1, 1]


def test_a_loss_that_raises_gives_its_turn_back() -> None:
    turn = LaunchTurn(2, limit=Fixed(2, 1))

    def fail() -> None:
        raise ValueError("of the loss")

    for rank in (turn.ranks[0], turn.ranks[1], turn.ranks[0]):
        with pytest.raises(ValueError, match="of the loss"):
            rank.launch_forward(1, fail)
    assert turn.ranks[1].launch_forward(1, lambda: 7) == 7


def test_turns_are_given_in_the_order_in_which_ranks_ask() -> None:
    turn, order = LaunchTurn(3, limit=Fixed(3, 1)), list[int]()
    inside = threading.Event()
    go = threading.Event()

    def hold() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    threads = [threading.Thread(target=turn.ranks[0].launch_forward, args=(1, hold))]
    threads[0].start()
    assert inside.wait(WAIT_S)
    for waiting, number in ((1, 2), (2, 1)):
        threads.append(
            threading.Thread(target=turn.ranks[number].launch_forward, args=(1, order.append, number))
        )
        threads[-1].start()
        wait_for(lambda waiting=waiting: len(turn._waiting) == waiting)
    go.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == [2, 1]


def wait_for(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(20_000):
        if condition():
            return
        event.wait(0.001)
    raise AssertionError("the condition was not reached")


def test_a_limit_that_is_lifted_frees_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_turn, "TIMEOUT_S", WAIT_S)
    policy = Fixed(4, 1)
    turn, met = LaunchTurn(4, limit=policy), threading.Barrier(4)
    bodies = [lambda rank=rank: rank.launch_forward(1, met.wait, WAIT_S) for rank in turn.ranks]
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(turn._waiting) == 3)  # the holder waits for them
    policy.limit = None
    turn._obey()
    for thread in threads:
        thread.join(WAIT_S)
    assert met.n_waiting == 0
    assert not met.broken
    policy.limit = 1
    turn._obey()
    assert turn._held == 0


def test_ranks_that_wait_for_each_other_inside_go_on_without_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_turn, "TIMEOUT_S", 0.05)
    policy = Fixed(3, 1)
    turn, met = LaunchTurn(3, limit=policy), threading.Barrier(3)
    run_all(*(lambda rank=rank: rank.launch_forward(1, met.wait, WAIT_S) for rank in turn.ranks))
    assert turn.limit is None
    assert policy._timeouts == 1  # one wait, for any number of ranks in it
    assert not turn._waiting
    assert turn._held == 0


@pytest.mark.posix
def test_an_interrupted_wait_leaves_no_turn_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_turn, "TIMEOUT_S", WAIT_S)
    turn, go = LaunchTurn(2, limit=Fixed(2, 1)), threading.Event()
    mine, other = turn.ranks

    def interrupt() -> None:
        wait_for(lambda: bool(turn._waiting))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    holder = threading.Thread(target=other.launch_forward, args=(1, go.wait, WAIT_S))
    holder.start()
    wait_for(lambda: turn._held == 1)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            mine.launch_forward(1, go.wait, WAIT_S)
    finally:
        interrupter.join(WAIT_S)
        signal.signal(signal.SIGINT, before)
        go.set()
        holder.join(WAIT_S)
    assert not turn._waiting
    assert turn._held == 0
    assert mine.launch_forward(1, lambda: turn._held) == 1


def test_a_rank_that_leaves_ends_the_turns_of_the_last_one() -> None:
    turn = LaunchTurn(2, limit=LaunchLimit(2))
    turn._policy.limit = 1
    turn._obey()
    turn.ranks[1].leave()
    assert turn.limit is None
    assert turn.ranks[0].launch_forward(1, lambda: 3) == 3


def test_the_policy_gets_what_the_ranks_did() -> None:
    policy = Fixed(2, None)
    policy.forwards = 8
    turn = LaunchTurn(2, limit=policy)
    turn.every = 1
    first, second = turn.ranks

    def spin() -> int:
        return sum(range(20_000))

    for _ in range(6):
        first.launch_forward(32, spin)
        first.launch_step(lambda: None)
        second.launch_forward(16, spin)
    # The first two forwards begin the window, the next eight are in it.
    (window,) = policy.windows
    assert window.samples == 4 * (32 + 16)
    assert window.forward.count == 8
    assert window.step.count == 4
    assert 0 < window.forward.cpu_ms <= window.forward.ms * 1.5
    assert window.forward.place_ms < window.forward.ms
    assert 0 < window.gap_ms <= window.ms


def test_a_launch_bound_run_is_told_of_once() -> None:
    policy, told = Fixed(2, None), list[float]()
    policy.forwards = 2
    turn = LaunchTurn(2, told.append, policy)
    turn.every = 1

    def launch(times: int) -> None:
        for _ in range(times):
            for rank in turn.ranks:
                rank.launch_forward(1, lambda: None)

    launch(3)
    assert turn.waiting() is None
    policy.waiting = 0.4
    assert turn.waiting() == 0.4
    launch(3)
    assert not told
    policy.is_bound = True
    launch(3)
    assert told == [0.4]


def test_an_old_window_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Fixed(2, None)
    turn = LaunchTurn(2, limit=policy)
    turn.every = 1
    for rank in turn.ranks:
        rank.launch_forward(1, lambda: None)
    policy.waiting = 0.4
    assert turn.waiting() == 0.4
    monkeypatch.setattr(launch_turn, "OLD_S", -1.0)  # the steps have been captured since
    assert turn.waiting() is None


def test_hosts_that_wait_for_their_devices_are_counted() -> None:
    policy = Fixed(2, None)
    policy.forwards = 2
    turn = LaunchTurn(2, limit=policy)
    turn.every = 1
    waited = iter(range(100))
    turn.ranks[1].ahead_s = lambda: next(waited) * 0.5
    for _ in range(2):
        for rank in turn.ranks:
            rank.launch_forward(1, lambda: None)
    (window,) = policy.windows
    assert window.ahead_ms == 500.0


def test_waiting_for_a_turn_is_measured() -> None:
    policy = Fixed(2, 1)
    policy.forwards = 6
    turn = LaunchTurn(2, limit=policy)
    turn.every = 1

    def body(rank: int) -> None:
        for _ in range(40):
            turn.ranks[rank].launch_forward(1, threading.Event().wait, 0.002)

    run_all(lambda: body(0), lambda: body(1))
    waits = [window.forward.place_ms for window in policy.windows]
    assert max(waits) > 1.0
    assert max(window.forward.idle_ms for window in policy.windows) > 1.0


def test_what_is_neither_limited_nor_measured_asks_no_clock_of_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(launch_turn, "thread_time", lambda: asked.append(1) or 0.0)
    turn = LaunchTurn(2, limit=Fixed(2, None))
    for _ in range(launch_turn.EVERY - 1):
        turn.ranks[0].launch_forward(1, lambda: None)
        turn.ranks[0].launch_step(lambda: None)
    assert not asked
    turn.ranks[0].launch_forward(1, lambda: None)
    assert asked
