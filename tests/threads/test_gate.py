"""Tests of the gate with real threads: one outcome for all members of a round, and no endless wait."""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from flowdp.errors import CollectiveAborted, ProtocolError
from flowdp.protocol.messages import Arrival, Directives, Outcome
from flowdp.threads.gate import Gate, Waiting

STRESS_ROUNDS = int(os.environ.get("FLOWDP_GATE_ROUNDS", "30000"))
JOIN_S = 120.0


def arrival(rank: int, round: int = 0, global_step: int = 0, left: int = 0) -> Arrival:
    return Arrival(rank, round, global_step, 1, 8, left)


class Threads:
    """Calls in their own threads; their results or errors, in the order of the calls."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self._threads: list[threading.Thread] = []

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        place = len(self.results)
        self.results.append(None)

        def body() -> None:
            try:
                self.results[place] = function(*args)
            except Exception as error:
                self.results[place] = error

        thread = threading.Thread(target=body, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(JOIN_S)
        stuck = [t for t in self._threads if t.is_alive()]
        frames = sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames[t.ident or 0])) for t in stuck if t.ident in frames]
        assert not stuck, "these wait for ever:\n" + "\n".join(stacks)
        return self.results


def waits_in(gate: Gate, count: int) -> None:
    """Return when `count` ranks are waiting in the open round."""
    while True:
        with gate._lock:
            if len(gate._inside) == count:
                return


def finishing(gate: Gate, count: int) -> None:
    """Return when `count` ranks wait for the others to finish."""
    while True:
        with gate._lock:
            if len(gate._finishing) == count:
                return


def test_all_members_get_the_same_object() -> None:
    gate, threads = Gate(3), Threads()
    for rank in range(3):
        threads.call(gate.enter, arrival(rank))
    first, second, third = threads.join()
    assert isinstance(first, Outcome)
    assert first is second
    assert second is third
    assert first.members == (0, 1, 2)


def test_the_last_arrival_launches_for_all_before_anybody_is_released() -> None:
    launched: list[tuple[Outcome, int]] = []
    gate = Gate(3, lambda outcome: launched.append((outcome, len(gate._inside))))
    threads = Threads()
    for rank in range(3):
        threads.call(gate.enter, arrival(rank))
    outcome = threads.join()[0]
    # Once, while the two others were inside.
    assert launched == [(outcome, 2)]


def test_a_launch_that_fails_is_an_error_for_all() -> None:
    def launch(outcome: Outcome) -> None:
        raise OSError("no peer access")

    gate, threads = Gate(2, launch), Threads()
    threads.call(gate.enter, arrival(0))
    waits_in(gate, 1)
    with pytest.raises(OSError, match="no peer access"):
        gate.enter(arrival(1))
    [waiting] = threads.join()
    assert isinstance(waiting, CollectiveAborted)
    assert str(waiting) == "launching round 0 failed: OSError: no peer access"


def test_an_abort_releases_whoever_waits_and_whoever_comes() -> None:
    gate, threads = Gate(3), Threads()
    threads.call(gate.enter, arrival(0))
    threads.call(gate.enter, arrival(1))
    waits_in(gate, 2)
    gate.abort("rank 2 failed")
    assert [str(error) for error in threads.join()] == ["rank 2 failed"] * 2
    with pytest.raises(CollectiveAborted, match="rank 2 failed"):
        gate.enter(arrival(2))
    with pytest.raises(CollectiveAborted, match="rank 2 failed"):
        gate.finish(0)


def test_an_abort_while_the_launch_runs_is_an_error_for_all() -> None:
    gate = Gate(2, lambda outcome: gate.abort("the user stopped it"))
    threads = Threads()
    threads.call(gate.enter, arrival(0))
    threads.call(gate.enter, arrival(1))
    assert [str(error) for error in threads.join()] == ["the user stopped it"] * 2


def test_a_leave_completes_the_round_of_the_others() -> None:
    gate, threads = Gate(3), Threads()
    threads.call(gate.enter, arrival(0))
    threads.call(gate.enter, arrival(1))
    waits_in(gate, 2)
    gate.leave(2)
    first, second = threads.join()
    assert first is second
    assert (first.members, first.left) == ((0, 1), (2,))


def test_a_rank_that_is_taken_out_while_it_waits_is_released() -> None:
    gate, threads = Gate(2), Threads()
    threads.call(gate.enter, arrival(0))
    waits_in(gate, 1)
    gate.leave(0)
    [error] = threads.join()
    assert isinstance(error, CollectiveAborted)
    # The other one meets alone.
    assert gate.enter(arrival(1)).members == (1,)
    gate.finish(1)


def decided(world_size: int) -> Gate:
    """A gate whose first round is decided but not finished."""
    gate, threads = Gate(world_size), Threads()
    for rank in range(world_size):
        threads.call(gate.enter, arrival(rank))
    threads.join()
    return gate


def test_finish_waits_for_every_member() -> None:
    gate, threads = decided(3), Threads()
    threads.call(gate.finish, 0)
    threads.call(gate.finish, 2)
    finishing(gate, 2)
    gate.finish(1)
    assert threads.join() == [None, None]


def test_a_leave_before_its_part_is_done_fails_nobody_in_finish() -> None:
    gate, threads = decided(3), Threads()
    threads.call(gate.finish, 0)
    threads.call(gate.finish, 2)
    finishing(gate, 2)
    gate.leave(1)
    assert threads.join() == [None, None]


def test_an_abort_fails_everybody_in_finish() -> None:
    gate, threads = decided(3), Threads()
    threads.call(gate.finish, 0)
    threads.call(gate.finish, 2)
    finishing(gate, 2)
    gate.abort("rank 1 failed in its part")
    assert [str(error) for error in threads.join()] == ["rank 1 failed in its part"] * 2


def test_a_rank_that_is_taken_out_in_finish_is_released_with_an_error() -> None:
    gate, threads = decided(2), Threads()
    threads.call(gate.finish, 0)
    finishing(gate, 1)
    gate.leave(0)
    [error] = threads.join()
    assert isinstance(error, CollectiveAborted)
    assert str(error) == "rank 0 left the gate"


def test_directives_are_told_by_the_next_outcome() -> None:
    gate = Gate(1)
    gate.direct(Directives(pause=True, lr=0.5))
    outcome = gate.enter(arrival(0))
    assert (outcome.pause, outcome.lr) == (True, 0.5)
    gate.finish(0)
    assert gate.enter(arrival(0, 1, 1)).lr is None


# ---------------------------------------------------------------- stress
@dataclass
class Episode:
    """Some rounds of some threads, with random trouble by seed."""

    seed: int
    got: list[list[Outcome]] = field(default_factory=list)
    finished: list[list[int]] = field(default_factory=list)
    failed: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.world_size = rng.randint(2, 6)
        self.rounds = rng.randint(20, 400)
        trouble = rng.choice(("none", "none", "leave", "leave", "removal", "abort", "launch", "stop"))
        at = rng.randrange(self.rounds)
        self.leaves = {
            rank: (rng.randrange(self.rounds), rng.choice(("before", "inside")))
            for rank in rng.sample(range(self.world_size), rng.randint(1, self.world_size))
            if trouble == "leave"
        }
        self.fails_at = at if trouble == "launch" else None
        self.removed: int | None = None
        self.visits: dict[int, Callable[[], None]] = {}
        for round in rng.sample(range(self.rounds), min(self.rounds, 4)):
            self.visits[round] = lambda lr=round + 0.5: self._direct(lr)
        if trouble == "abort":
            self.visits[at] = lambda: self.gate.abort("stopped from outside")
        elif trouble == "removal":
            self.removed = rng.randrange(self.world_size)
            self.visits[at] = lambda: self.gate.leave(self.removed)
        elif trouble == "stop":
            self.visits[at] = lambda: self.gate.direct(Directives(stop=True))
        self.directed: list[float] = []
        self.told: list[float] = []
        self.gate = Gate(self.world_size, self._launch)
        self.ticks: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.got, self.finished, self.failed = ([[] for _ in range(self.world_size)] for _ in range(3))

    def _direct(self, lr: float) -> None:
        self.directed.append(lr)
        self.gate.direct(Directives(lr=lr, pause=True))

    def _launch(self, outcome: Outcome) -> None:
        if outcome.lr is not None:
            self.told.append(outcome.lr)
        if outcome.round == self.fails_at:
            raise OSError("the launch failed")

    def member(self, rank: int) -> None:
        """A rank's thread."""
        leave_at, where = self.leaves.get(rank, (-1, ""))
        global_step = 0
        for round in range(self.rounds):
            if round in self.visits:
                self.ticks.put(round)
            if (round, where) == (leave_at, "before"):
                self.gate.leave(rank)
                return
            outcome = self.gate.enter(arrival(rank, round, global_step))
            self.got[rank].append(outcome)
            if (round, where) == (leave_at, "inside"):
                self.gate.leave(rank)
                return
            try:
                self.gate.finish(rank)
            except CollectiveAborted:
                self.failed[rank].append(round)
                raise
            self.finished[rank].append(round)
            global_step = outcome.global_step
            if outcome.stop:
                return

    def visitor(self) -> None:
        """A thread that visits some rounds at random moments, with a request."""
        left = dict(self.visits)
        while (round := self.ticks.get()) is not None:
            if (visit := left.pop(round, None)) is not None:
                visit()

    def run(self) -> int:
        """Run to the end; returns the number of rounds with an outcome."""
        members, visitor = Threads(), Threads()
        visitor.call(self.visitor)
        for rank in range(self.world_size):
            members.call(self.member, rank)
        self.ends = members.join()
        self.ticks.put(None)
        # A launch may fail in the thread of a leave that completed the round, including the visitor's.
        self.ends += visitor.join()
        return len({outcome.round for mine in self.got for outcome in mine})

    def judge(self) -> None:
        for place, end in enumerate(self.ends):
            # A rank removed by another thread does not know it, and may enter once more.
            allowed = (CollectiveAborted, OSError) + ((ProtocolError,) if place == self.removed else ())
            assert end is None or isinstance(end, allowed), f"thread {place} ended with {end!r}"
        outcomes: dict[int, Outcome] = {}
        for rank, mine in enumerate(self.got):
            # One outcome per round and rank, in order, the same object for all ranks.
            assert [outcome.round for outcome in mine] == list(range(len(mine)))
            for outcome in mine:
                assert outcomes.setdefault(outcome.round, outcome) is outcome
                assert rank in outcome.members
        gone = self.leaves.keys() | {rank for outcome in outcomes.values() for rank in outcome.left}
        gone |= set(range(self.world_size)) - self.gate._state.members
        for round, outcome in outcomes.items():
            stayed = [rank for rank in outcome.members if rank not in gone]
            # All ranks that stayed got it, and finish succeeded for all of them or for none.
            assert all(len(self.got[rank]) > round for rank in stayed)
            ended = [round in self.finished[rank] for rank in stayed]
            assert all(ended) or not any(ended), f"round {round} was finished by {ended}"
        # A learning rate is delivered once, unless it was replaced before.
        assert len(set(self.told)) == len(self.told)
        assert set(self.told) <= set(self.directed)
        if self.gate._state.error is None:
            assert not any(self.failed[rank] for rank in range(self.world_size) if rank not in gone)


@pytest.fixture
def restless() -> Iterator[None]:
    """Make threads switch far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_stress() -> None:
    rounds, seed = 0, 0
    while rounds < STRESS_ROUNDS:
        episode = Episode(seed)
        rounds += episode.run()
        try:
            episode.judge()
        except AssertionError as error:
            raise AssertionError(f"episode {seed}: {error}") from error
        seed += 1
    assert seed > STRESS_ROUNDS // 400


def test_the_gate_tells_who_waits_for_whom() -> None:
    while_launching: list[dict[int, Waiting]] = []
    gate, threads = Gate(3, lambda outcome: while_launching.append(gate.waiting())), Threads()
    assert gate.waiting() == {}
    threads.call(gate.enter, arrival(1, round=7))
    waits_in(gate, 1)
    assert gate.waiting() == {1: Waiting(7, missing=(0, 2), decided=False)}
    threads.call(gate.enter, arrival(0, round=7))
    waits_in(gate, 2)
    gate.leave(2)  # which completes the round of the two
    threads.join()
    assert while_launching == [dict.fromkeys((0, 1), Waiting(7, missing=(), decided=True))]
    assert gate.waiting() == {}
    threads.call(gate.finish, 1)
    finishing(gate, 1)
    assert gate.waiting() == {1: Waiting(7, missing=(0,), decided=True)}
    gate.finish(0)
    threads.join()
    threads.call(gate.enter, arrival(0, round=8))
    waits_in(gate, 1)
    assert gate.waiting() == {0: Waiting(8, missing=(1,), decided=False)}
    gate.abort("over")
    assert gate.waiting() == {}
    threads.join()


def test_a_retired_gate_keeps_nothing_of_what_it_launched() -> None:
    class Launcher:
        def launch(self, outcome: Outcome) -> None:
            """A launch that does nothing."""

    launcher = Launcher()
    gate, gone = Gate(1, launcher.launch), weakref.ref(launcher)
    del launcher
    assert gone() is not None
    gate.retire()
    assert gone() is None
