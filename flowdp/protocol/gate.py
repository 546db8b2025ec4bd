"""The gate: arrivals of the ranks, and the one outcome that all of them get.

Anything that all ranks must do in the same round is decided here, once, as pure code, and travels in no
order. Read from inboxes, each natural reading of a stop order deadlocks or is obeyed in different rounds by
different ranks; taken by the last arrival, once, it cannot. `threads/gate.py` puts a lock around this state,
`sim/` runs it as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, attrgetter
from typing import Any, Literal

from flowdp.errors import CollectiveAborted, ProtocolError

__all__ = ["Arrival", "Directives", "GateState", "Outcome", "PartState", "Requested", "Window", "decide"]


@dataclass(slots=True)
class Window:
    """The window of a round in which one optimizer steps for all ranks (exact).

    Attributes:
        alone: One rank has taken the steps of all windows, and the others take over its replica; else the
            steps of all ranks are one step of the run, which is taken behind the gate.
        compare: The replicas are compared after the step: every rank sums the bits of its parameters.
        touched: Parameters that have gradients, see `SharedGradients.touched`; in an outcome those that the
            gradients of each member with samples touched, and None where they are not the same ones.
    """

    alone: bool = False
    compare: bool = False
    touched: bytes | None = b""


@dataclass(slots=True)
class Arrival:
    """A rank stands in the gate. Nothing changes the record from then on.

    Attributes:
        rank: Rank index.
        round: Round number; all members must agree on it.
        global_step: Steps of all ranks before this round, as the order said.
        steps: Steps this rank has taken since the last mean.
        samples: Samples of those steps: its weight.
        left: Steps of its order that it did not take, because it was hurried.
        drift: Whether its order wants the distance from the mean measured.
        bad: Its replica has NaN or inf parameters, or its device left it out of the mean before for them: it
            weighs nothing.
        inner: The round is one of this machine's ranks alone, before one of all machines.
        earlier: Steps in the inner rounds since the last mean of all machines, and samples that their means
            hold; its machine's gate says.
        window: The window (exact); elsewhere None.
    """

    rank: int
    round: int
    global_step: int
    steps: int
    samples: int
    left: int = 0
    drift: bool = False
    bad: bool = False
    inner: bool = False
    earlier: tuple[int, int] = (0, 0)
    window: Window | None = None

    @property
    def is_alone(self) -> bool | None:
        """Whether one rank has taken the steps of all windows (exact); None elsewhere."""
        return None if self.window is None else self.window.alone


_meeting = attrgetter("round", "global_step", "inner", "is_alone")


@dataclass(frozen=True, slots=True)
class Requested:
    """The user asked for something.

    Attributes:
        what: Action that is asked for.
        value: The learning rate of "set_lr", the factor of "scale_lr", the `SchedulerOptions` of
            "set_scheduler", which leave this process for no other; the cause of a "stop", where it is not
            `run.stop()`; None otherwise.
    """

    what: Literal["stop", "pause", "unpause", "set_lr", "scale_lr", "set_scheduler", "checkpoint", "snapshot"]
    value: Any = None


@dataclass(frozen=True, slots=True)
class Directives:
    """Contents of the next outcome.

    Attributes:
        stop: End the run with this round. Stays until the run ends.
        pause: Stand still after this round. Consumed by the outcome.
        lr: Requests that change the learning rates, in their order. Consumed by the outcome.
        halt: Stop at a barrier after this round, for an evaluation or a checkpoint. Consumed by the
            outcome.
    """

    stop: bool = False
    pause: bool = False
    lr: tuple[Requested, ...] = ()
    halt: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round: decided once, the same object for every member.

    Attributes:
        round: Its number.
        global_step: Steps of all ranks after it; behind an inner round, those up to the last mean of all
            machines, and those of this machine's ranks since.
        members: Ranks that took part, ascending.
        steps: Steps per rank since the last mean. Shape (world_size,); 0 for ranks that left.
        samples: Samples per rank since the last mean: its weights. Of several machines, those in each one's
            mean of its own replicas (`local_weights`); `weights` has those of the machines. Shape
            (world_size,). On devices a replica that has had NaN or inf parameters in this round may weigh
            nothing all the same: the next outcome tells, or the work that the rank acknowledges.
        stop: The run ends here.
        pause: All ranks stop after it.
        lr: Requests that change the learning rates, in their order.
        hurried: Some member came with fewer steps than planned.
        left: Ranks that left the gate since the last outcome.
        drift: The distance from the mean is measured.
        halt: All ranks stop at a barrier after it, and wait for the coordinator's tasks.
        bad: Members that weighed nothing, as they had NaN or inf parameters in this round, or in the one
            before, as their devices told their hosts since.
        inner: The members are the ranks of one machine, which has decided it by itself. It voids nothing:
            what all machines have armed, they void together.
        earlier: Samples per rank in the inner rounds before it. Shape (world_size,); empty: there were none.
        window: The window of all members (exact); elsewhere None.
    """

    round: int
    global_step: int
    members: tuple[int, ...]
    steps: tuple[int, ...]
    samples: tuple[int, ...]
    stop: bool = False
    pause: bool = False
    lr: tuple[Requested, ...] = ()
    hurried: bool = False
    left: tuple[int, ...] = ()
    drift: bool = False
    halt: bool = False
    bad: tuple[int, ...] = ()
    inner: bool = False
    earlier: tuple[int, ...] = ()
    window: Window | None = None

    @property
    def voids(self) -> bool:
        """Whether everything armed behind this round is void and planned anew."""
        if self.inner:
            return False
        return self.stop or self.pause or self.halt or self.hurried or bool(self.left) or bool(self.bad)

    @property
    def compares(self) -> bool:
        """Whether the replicas are compared after the step of this round (exact)."""
        return self.window is not None and self.window.compare

    @property
    def weights(self) -> tuple[int, ...]:
        """Samples per rank since the last mean of all machines, as far as this mean holds them.

        The weight of a machine is the sum over its ranks. Shape (world_size,).
        """
        return tuple(map(add, self.samples, self.earlier)) if self.earlier else self.samples

    def local_weights(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Weights of one machine's replicas in its own mean, which then weighs the sum of their `weights`.

        Where no healthy rank has trained since an inner mean, each of them is that mean.

        Args:
            ranks: Ranks of the machine, those that left excluded.

        Returns:
            One for each rank, all 0 where the machine has nothing to give.
        """
        samples = tuple(self.samples[rank] for rank in ranks)
        weights = self.weights
        if not any(samples) and any(weights[rank] for rank in ranks):
            return tuple(int(rank not in self.bad) for rank in ranks)
        return samples


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
        if _meeting(arrival) != _meeting(first):
            raise ProtocolError(f"ranks meet in different rounds: {first} and {arrival}")
    steps, samples = [0] * world_size, [0] * world_size
    for rank in members:
        arrival = arrivals[rank]
        steps[rank], samples[rank] = arrival.steps, 0 if arrival.bad else arrival.samples
    # Of windows that all ranks share (exact), the steps of all are one step of the run.
    taken = min(1, sum(steps)) if first.is_alone is False else sum(steps)
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

    def direct(self, directives: Directives) -> tuple[Requested, ...]:
        """Replace the directives of the next outcome; changes of the rates stay until an outcome has them.

        Returns:
            The changes that no outcome has yet.
        """
        self.directives = replace(directives, lr=self.directives.lr + directives.lr)
        return self.directives.lr

    def _complete(self) -> Outcome | None:
        if self.error is not None or not self.arrivals or len(self.arrivals) < len(self.members):
            return None
        outcome = decide(self.arrivals, self.directives, self.world_size, tuple(self._left))
        self.arrivals = {}
        self._left = []
        if self.directives.pause or self.directives.halt or self.directives.lr:
            # A stop holds until the run ends; the other wishes are fulfilled by one outcome.
            self.directives = Directives(stop=self.directives.stop)
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
