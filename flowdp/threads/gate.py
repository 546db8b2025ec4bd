"""The gate: where all ranks meet at the end of a round, and leave with one and the same answer.

Guarantees:
- One outcome per round: it is fixed once, under the lock, by the last arrival (or by the leave that makes the
  last arrival of the others); every member gets that object, or every member gets the error.
- `leave` and `abort` release all waiting ranks, at any moment; no rank waits for one that left.
- The launch runs outside the lock, so an abort never waits for it.

Not `threading.Barrier`: its abort tells ranks different things about one round, and it cannot lose a member.
Where a run has ranks on several machines, each machine has a gate for its own, and the gate of all ranks is
asked for the outcome: the last arrival here asks and waits, and `conclude` brings the answer.

Waiting is one lock per rank used as a binary semaphore: it is released once by the thread that takes the rank
out of the set of waiting ranks, under the gate's lock, so a release can be neither lost nor doubled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowdp.errors import CollectiveAborted
from flowdp.policy.formats import format_error
from flowdp.protocol.gate import GateState, PartState
from flowdp.protocol.messages import Arrival, Directives, Outcome, Requested

__all__ = ["Gate", "Waiting"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Wait of a rank in the gate.

    Attributes:
        round: The round's number.
        missing: Ranks of this machine that have not come, or, once the round is decided, not done their part
            of it. None is missing while the launch runs, and while the ranks of other machines are awaited.
        decided: All have come.
    """

    round: int
    missing: tuple[int, ...]
    decided: bool


class Gate:
    """A meeting of all ranks: `enter` decides a round, and each `finish` behind it is one more meeting.

    Threads:
        `enter`, `finish`: the rank's own. `direct`, `leave`, `waiting`, `abort`, `conclude`: any.
        `retire`: any, when no rank comes any more.

    Args:
        world_size: Ranks of the run.
        launch: Called by the last arrival with the outcome, before any rank is released; an error of it
            makes the round an error for all.
        ask: Where the run has several machines: called by the last arrival with those of this machine, to
            have the round decided by the gate of all. Must not block; `conclude` brings the answer.
        ranks: Those of this machine, then.
    """

    def __init__(
        self,
        world_size: int,
        launch: Callable[[Outcome], None] | None = None,
        ask: Callable[[tuple[Arrival, ...]], None] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        here = range(world_size) if ranks is None else ranks
        self._part = None if ask is None else PartState(here, world_size)
        self._state = GateState(world_size) if self._part is None else self._part
        self._launch = launch
        self._ask = ask
        self._asking: int | None = None  # the rank that waits for the gate of all
        self._answer: Outcome | None = None  # and the answer to it
        self._lock = threading.Lock()  # serialises every change of the state and of the two waiting sets
        self._inside: set[int] = set()  # wait for the outcome
        self._unfinished: set[int] = set()  # of the decided round, not yet in finish
        self._finishing: set[int] = set()  # wait for the rest in finish
        self._held = 0  # rounds that every member finished
        self._decided = -1  # number of the newest round that was decided
        self._outcome: dict[int, Outcome | None] = dict.fromkeys(here)
        self._wake = {rank: threading.Lock() for rank in here}
        for wake in self._wake.values():
            wake.acquire()

    def enter(self, arrival: Arrival) -> Outcome:
        """Wait for all members; returns the outcome of the round.

        Raises:
            CollectiveAborted: The gate was aborted before the round was published.
        """
        rank = arrival.rank
        asked: tuple[Arrival, ...] = ()
        with self._lock:
            outcome = self._state.enter(arrival)
            if outcome is not None:
                self._decided = outcome.round
            else:
                self._inside.add(rank)
                if self._part is not None and (asked := self._part.gathered):
                    self._asking = rank
        if asked and self._ask is not None:
            self._ask(asked)
        if outcome is None:
            self._wake[rank].acquire()
            if asked:
                outcome, self._answer = self._answer, None
        if outcome is not None:
            self._publish(outcome)
        mine, self._outcome[rank] = self._outcome[rank], None
        if mine is None:
            raise CollectiveAborted(self._state.error or "the gate was aborted")
        return mine

    def conclude(self, outcome: Outcome) -> None:
        """Take the outcome of the gate of all ranks; one that comes behind an abort changes nothing.

        Raises:
            ProtocolError: No rank here waits for it.
        """
        with self._lock:
            if self._part is None or self._part.error is not None:
                return
            self._part.conclude(outcome)
            asking, self._asking = self._asking, None
            assert asking is not None  # the last of the arrivals that were concluded
            self._answer, self._decided = outcome, outcome.round
            self._inside.discard(asking)
            self._wake[asking].release()

    def finish(self, rank: int) -> None:
        """Wait until every member of the round has called this: its part of the work is done.

        All members call it as often in a round.

        Raises:
            CollectiveAborted: The gate was aborted before all had.
        """
        with self._lock:
            if self._state.error is not None:
                raise CollectiveAborted(self._state.error)
            if rank not in self._state.members:  # taken out by another thread: none waits for it any more
                raise CollectiveAborted(f"rank {rank} left the gate")
            held = self._held
            self._finishing.add(rank)
            self._unfinished.discard(rank)
            self._end_round()
        # The last one released itself with the others, and passes at once.
        self._wake[rank].acquire()
        if self._held == held:
            raise CollectiveAborted(self._state.error or f"rank {rank} left the gate")

    def retire(self) -> None:
        """Drop the launch, and the objects that it refers to: no round follows."""
        self._launch = None

    def direct(self, directives: Directives) -> tuple[Requested, ...]:
        """Replace the directives of the next outcome; see `GateState.direct`."""
        with self._lock:
            return self._state.direct(directives)

    def leave(self, rank: int) -> None:
        """Take a rank out of the open round and all later ones; from a decided one if its part is done."""
        with self._lock:
            outcome = self._state.leave(rank)
            if outcome is not None:
                self._decided = outcome.round
            for waiting in (self._inside, self._finishing):
                if rank in waiting:
                    waiting.discard(rank)
                    self._wake[rank].release()
            self._unfinished.discard(rank)
            self._end_round()
        if outcome is not None:
            self._publish(outcome)

    def waiting(self) -> dict[int, Waiting]:
        """Ranks that wait in the gate at this moment, and the ranks they wait for."""
        with self._lock:
            there, decided = self._state.arrivals, self._decided
            missing = tuple(sorted(self._state.members.difference(there)))
            unfinished = Waiting(decided, tuple(sorted(self._unfinished)), decided=True)
            return {
                **{rank: Waiting(decided, (), decided=True) for rank in self._inside.difference(there)},
                **{rank: Waiting(there[rank].round, missing, decided=False) for rank in sorted(there)},
                **dict.fromkeys(sorted(self._finishing), unfinished),
            }

    def abort(self, reason: str) -> None:
        """Release all ranks with an error, now and for ever; the first reason stays."""
        with self._lock:
            self._state.abort(reason)
            self._release(self._inside)
            self._release(self._finishing)

    def _publish(self, outcome: Outcome) -> None:
        try:
            if self._launch is not None:
                self._launch(outcome)
        except BaseException as error:
            self.abort(f"launching round {outcome.round} failed: {format_error(error)}")
            raise
        with self._lock:
            if self._state.error is not None:
                return
            # A rank that left while the launch ran is not waited for.
            self._unfinished = self._state.members.intersection(outcome.members)
            for rank in self._unfinished:
                self._outcome[rank] = outcome
            self._release(self._inside)

    def _end_round(self) -> None:
        if self._finishing and not self._unfinished:
            self._held += 1
            self._unfinished = set(self._finishing)  # for the next one
            self._release(self._finishing)

    def _release(self, waiting: set[int]) -> None:
        for rank in waiting:
            self._wake[rank].release()
        waiting.clear()
