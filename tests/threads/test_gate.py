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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from flowdp.errors import CollectiveAborted, ProtocolError
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import Arrival, Directives, Outcome, Requested
from flowdp.threads.gate import Gate, Waiting
from tests.limits import HANG_S

STRESS_ROUNDS = int(os.environ.get("FLOWDP_GATE_ROUNDS", "30000"))


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
            thread.join(HANG_S)
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


def test_a_rank_that_another_thread_has_taken_out_does_not_wait_in_finish() -> None:
    gate, threads = Gate(2), Threads()
    for rank in range(2):
        threads.call(gate.enter, arrival(rank))
    threads.join()
    gate.leave(1)
    gate.finish(0)  # nobody comes to a further meeting
    with pytest.raises(CollectiveAborted, match="rank 1 left the gate"):
        gate.finish(1)


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
    gate.direct(Directives(pause=True, lr=(Requested("set_lr", 0.5),)))
    outcome = gate.enter(arrival(0))
    assert (outcome.pause, outcome.lr) == (True, (Requested("set_lr", 0.5),))
    gate.finish(0)
    assert gate.enter(arrival(0, 1, 1)).lr == ()


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
        self.gate.direct(Directives(lr=(Requested("set_lr", lr),), pause=True))

    def _launch(self, outcome: Outcome) -> None:
        self.told += [wish.value for wish in outcome.lr]
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


# ---------------------------------------------------------------- several machines
class Machines:
    """The gates of several machines, and the gate of all their ranks, whose outcomes come in threads."""

    def __init__(self, sizes: tuple[int, ...], launch: Callable[[Outcome], None] | None = None) -> None:
        self.world_size = sum(sizes)
        self.all = GateState(self.world_size)
        self.lock = threading.Lock()
        self.asked: list[tuple[Arrival, ...]] = []
        self.ranks: list[range] = []
        for size in sizes:
            first = self.ranks[-1].stop if self.ranks else 0
            self.ranks.append(range(first, first + size))
        self.gates = [Gate(self.world_size, launch, self.ask, ranks) for ranks in self.ranks]
        self.mail: list[queue.SimpleQueue[Outcome | None]] = [queue.SimpleQueue() for _ in sizes]
        self.links = Threads()
        for gate, mail in zip(self.gates, self.mail, strict=True):
            self.links.call(self.deliver, gate, mail)

    def ask(self, arrivals: tuple[Arrival, ...]) -> None:
        with self.lock:
            self.asked.append(arrivals)
            outcomes = [outcome for one in arrivals if (outcome := self.all.enter(one)) is not None]
            for outcome in outcomes:
                for mail in self.mail:
                    mail.put(outcome)

    def deliver(self, gate: Gate, mail: queue.SimpleQueue[Outcome | None]) -> None:
        while (outcome := mail.get()) is not None:
            gate.conclude(outcome)

    def gate_of(self, rank: int) -> Gate:
        return next(gate for gate, ranks in zip(self.gates, self.ranks, strict=True) if rank in ranks)

    def abort(self, reason: str) -> None:
        """As the coordinator's order: first where it decides, then on each machine."""
        with self.lock:
            self.all.abort(reason)
        for gate in self.gates:
            gate.abort(reason)

    def close(self) -> None:
        for mail in self.mail:
            mail.put(None)
        assert self.links.join() == [None] * len(self.mail)


@contextmanager
def machines(*sizes: int, launch: Callable[[Outcome], None] | None = None) -> Iterator[Machines]:
    opened = Machines(sizes, launch)
    try:
        yield opened
    finally:
        opened.close()


def test_ranks_of_all_machines_get_one_outcome() -> None:
    with machines(1, 2) as all_of:
        threads = Threads()
        for rank in range(3):
            threads.call(all_of.gate_of(rank).enter, arrival(rank))
        first, second, third = threads.join()
    assert isinstance(first, Outcome)
    assert first is second
    assert second is third
    assert (first.members, first.samples, first.global_step) == ((0, 1, 2), (8, 8, 8), 3)
    # Each machine has asked once, for all its ranks.
    assert sorted(tuple(one.rank for one in asked) for asked in all_of.asked) == [(0,), (1, 2)]


def test_each_machine_launches_once_before_its_ranks_are_released() -> None:
    launched: list[tuple[Outcome, str]] = []
    with machines(
        2, 1, launch=lambda outcome: launched.append((outcome, threading.current_thread().name))
    ) as all_of:
        threads = Threads()
        for rank in range(3):
            threads.call(all_of.gate_of(rank).enter, arrival(rank))
        outcome = threads.join()[0]
    assert [one for one, _ in launched] == [outcome, outcome]
    assert len({name for _, name in launched}) == 2


def test_an_abort_while_a_rank_asks_releases_all_and_a_late_answer_changes_nothing() -> None:
    gate, threads = Gate(3, ask=lambda arrivals: None, ranks=(1, 2)), Threads()
    threads.call(gate.enter, arrival(1))
    threads.call(gate.enter, arrival(2))
    waits_in(gate, 2)
    assert gate.waiting() == dict.fromkeys((1, 2), Waiting(0, missing=(), decided=False))
    gate.abort("machine 0 was lost")
    assert [str(error) for error in threads.join()] == ["machine 0 was lost"] * 2
    gate.conclude(Outcome(0, 3, (0, 1, 2), (1, 1, 1), (8, 8, 8)))
    with pytest.raises(CollectiveAborted, match="machine 0 was lost"):
        gate.enter(arrival(1, 1))


def test_an_abort_between_the_answer_and_the_launch_is_an_error_for_all() -> None:
    def ask(arrivals: tuple[Arrival, ...]) -> None:
        gate.conclude(Outcome(0, 2, (0, 1), (1, 1), (8, 8)))
        gate.abort("the user stopped it")

    gate, threads = Gate(2, lambda outcome: None, ask, (0, 1)), Threads()
    threads.call(gate.enter, arrival(0))
    threads.call(gate.enter, arrival(1))
    errors = threads.join()
    assert [(type(error), str(error)) for error in errors] == [(CollectiveAborted, "the user stopped it")] * 2


def test_a_question_that_fails_is_an_error_of_the_last_arrival() -> None:
    def ask(arrivals: tuple[Arrival, ...]) -> None:
        raise ProtocolError("ranks meet in different rounds")

    gate, threads = Gate(3, ask=ask, ranks=(0, 1)), Threads()
    threads.call(gate.enter, arrival(0))
    waits_in(gate, 1)
    with pytest.raises(ProtocolError, match="different rounds"):
        gate.enter(arrival(1))
    gate.abort("rank 1 failed")
    [waiting] = threads.join()
    assert str(waiting) == "rank 1 failed"


def test_an_answer_that_no_rank_waits_for_is_a_bug() -> None:
    outcome = Outcome(0, 2, (0, 1), (1, 1), (8, 8))
    gate, threads = Gate(2, ask=lambda arrivals: None, ranks=(1,)), Threads()
    with pytest.raises(ProtocolError, match="came while the ranks"):
        gate.conclude(outcome)
    threads.call(gate.enter, arrival(1, round=1))
    waits_in(gate, 1)
    with pytest.raises(ProtocolError, match="came while the ranks"):
        gate.conclude(outcome)
    gate.conclude(replace(outcome, round=1))
    assert [one.round for one in threads.join()] == [1]


def test_a_rank_waits_for_those_here_and_then_for_the_other_machines() -> None:
    launching: list[dict[int, Waiting]] = []
    gate = Gate(3, lambda outcome: launching.append(gate.waiting()), lambda arrivals: None, (1, 2))
    threads = Threads()
    threads.call(gate.enter, arrival(1, round=4))
    waits_in(gate, 1)
    assert gate.waiting() == {1: Waiting(4, missing=(2,), decided=False)}
    threads.call(gate.enter, arrival(2, round=4))
    waits_in(gate, 2)
    assert gate.waiting() == dict.fromkeys((1, 2), Waiting(4, missing=(), decided=False))
    gate.conclude(Outcome(4, 3, (0, 1, 2), (1, 1, 1), (8, 8, 8)))
    threads.join()
    assert launching == [{1: Waiting(4, missing=(), decided=True)}]
    assert gate.waiting() == {}


def test_inner_rounds_are_decided_here_and_travel_with_the_next_question() -> None:
    with machines(2, 1) as all_of:
        threads = Threads()
        for rank in (0, 1):
            threads.call(all_of.gates[0].enter, replace(arrival(rank), inner=True))
        first, second = threads.join()
        assert first is second
        assert (first.members, first.inner, all_of.asked) == ((0, 1), True, [])
        threads = Threads()
        for rank in range(3):
            threads.call(all_of.gate_of(rank).enter, arrival(rank, round=1))
        [outcome, *_] = threads.join()
    assert (outcome.inner, outcome.earlier, outcome.weights) == (False, (8, 8, 0), (16, 16, 8))
    assert outcome.global_step == 5


@dataclass
class Travel:
    """Rounds of ranks on several machines, some of them inner ones, with random trouble by seed."""

    seed: int

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.sizes = tuple(rng.randint(1, 3) for _ in range(rng.randint(2, 3)))
        self.inner = rng.randint(0, 2)  # rounds of one machine before each of all
        self.rounds = rng.randint(10, 120)
        self.trouble = rng.choice(("none", "none", "abort", "launch", "stop"))
        self.at = rng.randrange(self.rounds)
        self.got: list[list[Outcome]] = [[] for _ in range(sum(self.sizes))]
        self.visitor: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def launch(self, outcome: Outcome) -> None:
        if self.trouble == "launch" and outcome.round == self.at:
            raise OSError("the launch failed")

    def is_inner(self, round: int) -> bool:
        return (round + 1) % (self.inner + 1) != 0

    def member(self, rank: int) -> None:
        gate, global_step = self.all.gate_of(rank), 0
        for round in range(self.rounds):
            if round == self.at and self.trouble in ("abort", "stop"):
                self.visitor.put(self.trouble)
            came = replace(arrival(rank, round, global_step), inner=self.is_inner(round))
            try:
                outcome = gate.enter(came)
            except OSError:
                self.visitor.put("abort")  # as its coordinator would
                raise
            self.got[rank].append(outcome)
            gate.finish(rank)
            if not outcome.inner:
                global_step = outcome.global_step
            if outcome.stop:
                return

    def visit(self) -> None:
        while (what := self.visitor.get()) is not None:
            if what == "abort":
                self.all.abort("stopped from outside")
            else:
                with self.all.lock:
                    self.all.all.direct(Directives(stop=True))

    def run(self) -> int:
        with machines(*self.sizes, launch=self.launch) as self.all:
            members, visitor = Threads(), Threads()
            visitor.call(self.visit)
            for rank in range(sum(self.sizes)):
                members.call(self.member, rank)
            self.ends = members.join()
            self.visitor.put(None)
            assert visitor.join() == [None]
        return self.rounds

    def judge(self) -> None:
        fails = self.trouble in ("abort", "launch")
        allowed = (CollectiveAborted, OSError) if fails else ()
        assert all(end is None or isinstance(end, allowed) for end in self.ends), self.ends
        of_all: dict[int, Outcome] = {}
        for ranks in self.all.ranks:
            # The ranks of a machine get the same answers, as often as each other.
            first = self.got[ranks[0]]
            assert [outcome.round for outcome in first] == list(range(len(first)))
            for rank in ranks:
                assert len(self.got[rank]) == len(first)
                assert all(mine is other for mine, other in zip(self.got[rank], first, strict=True))
            for outcome in first:
                assert outcome.inner == self.is_inner(outcome.round)
                if not outcome.inner:
                    assert of_all.setdefault(outcome.round, outcome) is outcome
        for round, outcome in of_all.items():
            world = sum(self.sizes)
            assert outcome.weights == (8 * (self.inner + 1),) * world
            assert outcome.global_step == (round + 1) * world
        if not fails:
            last = max(of_all, default=0) if self.trouble == "stop" else self.rounds - 1
            assert all(mine[-1].round >= last for mine in self.got)


@pytest.mark.usefixtures("restless")
def test_stress_of_several_machines() -> None:
    rounds, seed = 0, 0
    while rounds < STRESS_ROUNDS // 6:
        travel = Travel(seed)
        rounds += travel.run()
        try:
            travel.judge()
        except AssertionError as error:
            raise AssertionError(f"travel {seed}: {error}") from error
        seed += 1
