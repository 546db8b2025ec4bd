"""The gate's decision, as pure code: the members of a round, and the next action of all of them.

Orders that ranks must agree on travel no other way. Read from inboxes, each natural reading of a stop order
deadlocks or is obeyed in different rounds by different ranks; taken by the last arrival, once, it cannot.
`threads/gate.py` puts a lock around this state, `sim/` runs it as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from flowdp.errors import CollectiveAborted, ProtocolError
from flowdp.protocol.messages import Arrival, Directives, Outcome, Window

__all__ = ["GateState", "PartState", "decide"]


def decide(
    arrivals: Mapping[int, Arrival], directives: Directives, world_size: int, left: tuple[int, ...] = ()
) -> Outcome:
    """The outcome of a round all of whose members stand in the gate.

    Args:
        arrivals: Member -> how it came. Not empty.
        directives: Directives at this moment.
        world_size: Ranks of the run, those that left included.
        left: Ranks that left since the last outcome.

    Raises:
        ProtocolError: The members mean different rounds, or count from different steps.
    """
    members = tuple(sorted(arrivals))
    first = arrivals[members[0]]
    for arrival in arrivals.values():
        if (arrival.round, arrival.global_step) != (first.round, first.global_step):
            raise ProtocolError(f"ranks meet in different rounds: {first} and {arrival}")
        kinds = {(one.window and one.window.alone, one.inner) for one in (first, arrival)}
        if len(kinds) > 1:
            raise ProtocolError(f"ranks meet for rounds of different kinds: {first} and {arrival}")
    steps, samples = [0] * world_size, [0] * world_size
    for rank in members:
        arrival = arrivals[rank]
        steps[rank], samples[rank] = arrival.steps, 0 if arrival.bad else arrival.samples
    is_one_step = first.window is not None and not first.window.alone
    taken = min(1, sum(steps)) if is_one_step else sum(steps)
    taken += sum(arrival.earlier[0] for arrival in arrivals.values())
    earlier: tuple[int, ...] = ()
    if any(arrival.earlier[1] for arrival in arrivals.values()):
        earlier = tuple(arrivals[rank].earlier[1] if rank in arrivals else 0 for rank in range(world_size))
    givers = sum(1 for rank in members if samples[rank] or (earlier and earlier[rank]))
    return Outcome(
        round=first.round,
        global_step=first.global_step + taken,
        members=members,
        steps=tuple(steps),
        samples=tuple(samples),
        stop=directives.stop,
        pause=directives.pause,
        lr=directives.lr,
        hurried=any(arrival.left for arrival in arrivals.values()),
        left=left,
        # A mean of one replica is that replica; a distance of 0 would tell the guard that all is well.
        drift=givers > 1 and any(arrival.drift for arrival in arrivals.values()),
        halt=directives.halt,
        bad=tuple(rank for rank in members if arrivals[rank].bad),
        inner=first.inner,
        earlier=earlier,
        window=_window(arrivals, samples, directives),
    )


def _window(arrivals: Mapping[int, Arrival], samples: Sequence[int], directives: Directives) -> Window | None:
    """The window of all members (exact)."""
    windows = {rank: arrival.window for rank, arrival in arrivals.items() if arrival.window is not None}
    if not windows:
        return None
    touched = {window.touched for rank, window in windows.items() if samples[rank]}
    return Window(
        alone=any(window.alone for window in windows.values()),
        # A stop makes this the last round, which was unknown when it was armed.
        compare=directives.stop or any(window.compare for window in windows.values()),
        touched=touched.pop() if len(touched) == 1 else None,
    )


class GateState:
    """Members, arrivals and directives of the gate.

    After `enter`, `leave`: an `Outcome` in the answer completes the round; hand it to every one of its
    members, once. None: the round is still open.

    Attributes:
        members: Ranks that every further round needs.
        arrivals: Ranks in the open round, and their arrivals.
        directives: Directives of the next outcome.
        error: Why the gate was aborted; None while it is open.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.members = set(range(world_size))
        self.arrivals: dict[int, Arrival] = {}
        self.directives = Directives()
        self.error: str | None = None
        self._left: list[int] = []

    def enter(self, arrival: Arrival) -> Outcome | None:
        """Take an arrival.

        Raises:
            CollectiveAborted: The gate was aborted.
            ProtocolError: The rank is no member, or already inside.
        """
        if self.error is not None:
            raise CollectiveAborted(self.error)
        if arrival.rank not in self.members:
            raise ProtocolError(f"rank {arrival.rank} entered the gate after it left")
        if arrival.rank in self.arrivals:
            raise ProtocolError(f"rank {arrival.rank} entered round {arrival.round} twice")
        self.arrivals[arrival.rank] = arrival
        return self._complete()

    def leave(self, rank: int) -> Outcome | None:
        """A rank takes no part in the open round, nor in a later one. Leaving twice changes nothing."""
        if rank in self.members:
            self.members.discard(rank)
            self.arrivals.pop(rank, None)
            self._left.append(rank)
        return self._complete()

    def abort(self, reason: str) -> None:
        """Close the gate for ever; the first reason stays."""
        if self.error is None:
            self.error = reason
            self.arrivals.clear()

    def direct(self, directives: Directives) -> None:
        """Replace the directives of the next outcome; a learning rate stays until an outcome has it."""
        if directives.lr is None:
            directives = replace(directives, lr=self.directives.lr)
        self.directives = directives

    def _complete(self) -> Outcome | None:
        if self.error is not None or not self.arrivals or len(self.arrivals) < len(self.members):
            return None
        outcome = decide(self.arrivals, self.directives, self.world_size, tuple(self._left))
        self.arrivals = {}
        self._left = []
        # A stop holds until the run ends; the other wishes are fulfilled by one outcome.
        self.directives = replace(self.directives, pause=False, halt=False, lr=None)
        return outcome


class PartState(GateState):
    """Members and arrivals of one machine's gate, where the run has ranks on several.

    It decides an inner round by itself, when all its ranks have come. The arrivals for a round of all
    machines go together to a `GateState` of all ranks, on the machine that leads, and that one's outcome
    comes back here.

    Args:
        ranks: Ranks of this machine.
        world_size: Ranks of the run.
    """

    def __init__(self, ranks: Collection[int], world_size: int) -> None:
        super().__init__(world_size)
        self.members = set(ranks)
        self._begin()

    @property
    def gathered(self) -> tuple[Arrival, ...]:
        """Arrivals for the round of all machines, once all ranks here stand in the gate; else none.

        They have the steps and samples of the inner rounds before it.
        """
        if self.error is not None or len(self.arrivals) < len(self.members):
            return ()
        came = [self.arrivals[rank] for rank in sorted(self.arrivals)]
        # Without a replica that was always healthy perhaps nothing holds the samples of earlier rounds.
        is_lost = all(arrival.bad for arrival in came)
        return tuple(
            replace(
                arrival,
                earlier=(self._steps[arrival.rank], 0 if is_lost else self._samples[arrival.rank]),
            )
            for arrival in came
        )

    def conclude(self, outcome: Outcome) -> None:
        """The round of all machines is decided; the next arrivals belong to the next one.

        Raises:
            ProtocolError: Not all ranks here have come, or they mean another round.
        """
        rounds = {arrival.round for arrival in self.gathered}
        if rounds != {outcome.round}:
            raise ProtocolError(f"{outcome} came while the ranks {sorted(self.members)} mean {rounds}")
        self._begin()

    def _begin(self) -> None:
        """Count anew: a mean of all machines holds all steps so far."""
        self.arrivals = {}
        self._steps = dict.fromkeys(self.members, 0)  # in the inner rounds since the last mean of all
        self._samples = dict.fromkeys(self.members, 0)  # which their means hold

    def _complete(self) -> Outcome | None:
        if self.error is not None or not self.arrivals or len(self.arrivals) < len(self.members):
            return None
        came = self.arrivals
        if not any(arrival.inner for arrival in came.values()):
            return None
        before = sum(self._steps.values())
        outcome = decide(came, Directives(), self.world_size)
        outcome = replace(outcome, global_step=outcome.global_step + before)
        self.arrivals = {}
        for rank, arrival in came.items():
            self._steps[rank] += arrival.steps
            self._samples[rank] += outcome.samples[rank]
        return outcome
