"""Links between the machines of a run: orders, facts, and the gate of all ranks.

Machine 0 leads: its coordinator decides for all ranks, and the gate of all ranks is there. The others follow:
their coordinator threads pass facts on to it, and obey the commands that come back.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowdp.checkpoint.machine_states import DroppedStates, WantedStates
from flowdp.checkpoint.state_sender import StateSender
from flowdp.engine.metrics import RankMetrics
from flowdp.engine.parts import Services
from flowdp.errors import CollectiveAborted, CollectiveError, FlowdpError, MachineLostError
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Phase
from flowdp.network.channel import Sign
from flowdp.policy.formats import format_error
from flowdp.protocol.commands import (
    AbortGate,
    Command,
    CutEvaluation,
    EpochMetrics,
    EvaluationEnded,
    Finish,
    Paused,
    RoundEnded,
    Save,
    Send,
)
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import (
    Arrival,
    CheckpointWritten,
    Directives,
    Exiting,
    Fact,
    Failed,
    Leave,
    Order,
    Outcome,
    Requested,
    Tick,
)
from flowdp.threads.gate import Gate

__all__ = ["Follower", "FollowerLink", "LeaderLink", "Posts", "RemoteError", "origin_of", "sent_error"]

Posts = Mapping[int, Callable[[Order], None]]
"""By rank, what takes an order to it: its inbox, or a link to its machine."""

PASSED_ON = (AbortGate, CutEvaluation, RoundEnded, EpochMetrics, EvaluationEnded, Save, Paused, Finish)
"""Commands that all machines obey; an order goes to the machine of its rank alone."""


@dataclass(frozen=True, slots=True)
class _Orphaned:
    """The machine that leads is gone, so nothing more is decided.

    Attributes:
        error: Its loss, or that it has left, in words.
    """

    error: str


# ---------------------------------------------------------------- errors on their way
class _RemoteTracebackError(Exception):
    """Traceback of another machine, as the cause of the error that is raised here.

    Attributes:
        machine: The machine that has sent it.
    """

    def __init__(self, trace: str, machine: int) -> None:
        super().__init__(f"\n\n{trace}")
        self.machine = machine


def origin_of(error: BaseException) -> int | None:
    """The machine from which an error came; None: this one."""
    cause = error.__cause__
    return cause.machine if isinstance(cause, _RemoteTracebackError) else None


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error of another machine.

    Attributes:
        content: The error's class and attributes, pickled; None: they cannot be.
        text: The error as text, with the name of its machine.
        trace: Its traceback, as text.
    """

    content: bytes | None
    text: str
    trace: str

    def error(self, machine: int) -> BaseException:
        """An error of the same class and attributes; a `FlowdpError` where these are not known here.

        Args:
            machine: The machine that has sent it.
        """
        made: BaseException = FlowdpError(self.text)
        if self.content is not None:
            # This machine may not have a class of the user's, or an attribute.
            with suppress(Exception):
                kind, attributes = pickle.loads(self.content)
                known = kind.__new__(kind, self.text)
                known.__dict__.update(attributes)
                made = known
        made.__cause__ = _RemoteTracebackError(self.trace, machine)
        return made


def sent_error(error: BaseException, machine: str) -> RemoteError:
    """Describe an error for another machine.

    Args:
        error: The error; the text of one that comes from another machine names that one.
        machine: Name of this machine.
    """
    is_own = origin_of(error) is None
    text = f"{machine}: {error}" if is_own else str(error)
    trace = "".join(traceback.format_exception(error))
    content: bytes | None = None
    if isinstance(error, FlowdpError):
        attributes: dict[str, Any] = {
            name: value for name, value in vars(error).items() if name != "__notes__"
        }
        try:
            content = pickle.dumps((type(error), attributes))
        except Exception:  # an attribute of the user's
            content = None
    elif is_own:
        text = f"{machine}: {format_error(error)}"
    return RemoteError(content, text, trace)


# ---------------------------------------------------------------- the links
class _Link(ABC):
    """Links of a machine: signs of life, and the threads.

    Args:
        services: Objects that the threads of the run share; there is a channel.
    """

    def __init__(self, services: Services) -> None:
        team, channel = services.team, services.channel
        assert team.machines is not None
        assert channel is not None
        self._team, self._machines, self._channel = team, team.machines, channel
        self._post: Callable[[Any], None] = services.requests.inbox.post
        self._failures = services.failures
        self._gate: Gate
        self._is_over = False  # the machines know of the run's end, and may leave
        # The last of each other machine. All are there from the start: the threads of several links read it
        # at any moment, and one that grows cannot be read.
        self._signs = dict.fromkeys(channel.others, Sign())

    @property
    def signs(self) -> list[Sign]:
        """The last signs of life of the other machines: one for each, or from machine 0 for all of them."""
        return list(self._signs.values())

    def start(self, gate: Gate, sign: Callable[[], Sign]) -> None:
        """Start the threads of the links.

        Args:
            gate: Gate of this machine's ranks; none of them has come to it.
            sign: Makes a sign of life of this machine alone.
        """
        self._gate = gate
        self._channel.start(self._received, self._ended, partial(self._sign_for, sign))

    def relay(self, command: Command) -> None:
        """Do what a command that was obeyed here means for the other machines."""
        if isinstance(command, AbortGate) and isinstance(self._failures.first, MachineLostError):
            # A rank may stand in a sum with a machine that is lost: the others may not come to its end.
            self._machines.give_up()

    def _sign_for(self, sign: Callable[[], Sign], machine: int) -> Sign:
        """Sign of life for a machine: of this one, and of all that it has no link to."""
        return sum((last for other, last in self._signs.items() if other != machine), sign())

    def _early_end(self, machine: int) -> MachineLostError | None:
        """The error that a machine has closed its link; None: the run is over."""
        if self._is_over:
            return None
        return MachineLostError(f"{self._machines.names[machine]} has left the run before its end")

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Tell the other machines that the coordinator's thread here has failed."""

    @abstractmethod
    def _received(self, machine: int, message: Any) -> None: ...

    @abstractmethod
    def _ended(self, machine: int, error: CollectiveError | None) -> None: ...


class LeaderLink(_Link):
    """The links of machine 0 with all others, and the gate of all ranks; arguments as of `_Link`.

    Threads:
        Any, unless a method says otherwise.
    """

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._evaluator = services.evaluator
        self._state = GateState(services.team.world_size)
        self._lock = threading.Lock()  # serialises the gate of all ranks

    def order(self, rank: int, order: Order) -> None:
        """Send an order to a rank of another machine."""
        self._channel.send(self._team.machine_of(rank), Send(rank, order))

    def ask(self, arrivals: tuple[Arrival, ...]) -> None:
        """Bring the arrivals of one machine to the gate of all; the last machine's decide the round.

        Raises:
            CollectiveAborted: The gate was aborted.
            ProtocolError: The ranks mean different rounds.
        """
        with self._lock:
            outcome = None
            for arrival in arrivals:
                outcome = self._state.enter(arrival)
            if outcome is not None:
                self._channel.tell_all(outcome)
        if outcome is not None:
            self._gate.conclude(outcome)

    def direct(self, directives: Directives) -> tuple[Requested, ...]:
        """Replace the directives of the next outcome of all machines; see `GateState.direct`."""
        with self._lock:
            return self._state.direct(directives)

    def relay(self, command: Command) -> None:
        """Pass a command on that concerns all machines; see `_Link.relay`."""
        super().relay(command)
        if isinstance(command, AbortGate):
            with self._lock:
                self._state.abort(command.reason)
            self._tell_failure()
        self._is_over |= isinstance(command, Finish)
        if isinstance(command, PASSED_ON):
            self._channel.tell_all(command)

    def give_up(self, reason: str) -> None:
        """See `_Link.give_up`."""
        self.relay(AbortGate(reason))

    def _tell_failure(self) -> None:
        """Tell the others the first error, which their runs end with; not the machine that had it."""
        first = self._failures.first
        if first is None:
            return
        for machine in range(1, self._machines.count):
            if machine != origin_of(first):
                self._channel.send(machine, sent_error(first, self._machines.names[0]))

    def _received(self, machine: int, message: Any) -> None:
        """Take a message of a follower; on the thread of its link."""
        match message:
            case Sign():
                self._signs[machine] = message
            case RankMetrics():
                assert self._evaluator is not None
                self._evaluator.pool.take(message)
            case tuple():
                try:
                    self.ask(message)
                except CollectiveAborted:
                    pass  # its own gate hears of it in a moment
                except FlowdpError as error:
                    self._post(Failed(self._failures.add(error)))
            case RemoteError():
                self._failures.add(message.error(machine))
            case _:
                self._post(message)

    def _ended(self, machine: int, error: CollectiveError | None) -> None:
        """End the run where a machine is lost, or leaves before the end: its ranks do nothing any more."""
        error = error or self._early_end(machine)
        if error is not None:
            self._post(Failed(self._failures.add(error), tuple(self._team.of(machine))))


class FollowerLink(_Link):
    """The link of a machine that follows with machine 0; arguments as of `_Link`.

    Args:
        posts: Put an order into the inbox of each rank here.
    """

    def __init__(self, services: Services, posts: Posts) -> None:
        super().__init__(services)
        self._posts = posts
        self._outlet = services.saver.outlet

    def ask(self, arrivals: tuple[Arrival, ...]) -> None:
        """Send the arrivals of this machine's ranks to the gate of all."""
        self._channel.send(0, arrivals)

    def direct(self, _directives: Directives) -> tuple[Requested, ...]:
        """Do nothing: directives stand at the gate of all."""
        return ()

    def give_up(self, reason: str) -> None:
        """See `_Link.give_up`."""
        self.send(Failed(reason, tuple(self._team.ranks)))

    def send(self, fact: Fact) -> None:
        """Send a fact to the coordinator, with the error itself where it tells of one."""
        first = self._failures.first
        is_failure = isinstance(fact, Exiting | Failed) and fact.error is not None
        if is_failure and first is not None and origin_of(first) is None:
            self._channel.send(0, sent_error(first, self._machines.names[self._machines.index]))
        self._channel.send(0, fact)

    def _received(self, machine: int, message: Any) -> None:
        match message:
            case Sign():
                self._signs[machine] = message
            case Outcome():
                self._gate.conclude(message)
            case Send():
                self._posts[message.rank](message.order)
            case RemoteError():
                self._failures.add(message.error(machine))
            case WantedStates() | DroppedStates():
                assert isinstance(self._outlet, StateSender)
                self._outlet.take(message)
            case _:
                self._is_over |= isinstance(message, Finish)
                self._post(message)

    def _ended(self, machine: int, error: CollectiveError | None) -> None:
        """End the run where machine 0 is lost, or leaves before the end: nothing more is decided."""
        if isinstance(self._outlet, StateSender):
            self._outlet.lose()
        error = error or self._early_end(machine)
        if error is not None:
            self._post(_Orphaned(self._failures.add(error)))


class Follower:
    """The coordinator's place on a machine that follows: facts go to machine 0, and commands come from there.

    It has the interface that a `CoordinatorShell` uses of a `Coordinator`. Where machine 0 is lost it ends
    the run by itself.

    Args:
        config: The run.
        ranks: Ranks of this machine.
        send: Sends a fact to machine 0.
    """

    def __init__(self, config: CoordinatorConfig, ranks: range, send: Callable[[Fact], None]) -> None:
        self.phase = Phase.RUNNING
        self.global_step = 0 if config.start is None else config.start.global_step
        self._ranks = ranks
        self._send = send
        self._left: set[int] = set()
        self._reason: str | None = None  # of an end that is decided here

    def handle(self, fact: Any, _now_ms: float) -> list[Command]:
        """Pass a fact on, or return the command that has come."""
        commands: list[Command] = []
        match fact:
            case _ if isinstance(fact, PASSED_ON):
                commands = [fact]
                if isinstance(fact, RoundEnded):
                    self.global_step = fact.global_step
                elif isinstance(fact, Finish):
                    self.phase = Phase.DONE
            case _Orphaned() if self.phase is not Phase.DONE:
                self._reason, self.phase = fact.error, Phase.FAILING
                orders = [Send(rank, Leave(self._reason)) for rank in self._ranks if rank not in self._left]
                commands = [AbortGate(self._reason), *orders]
            case Tick() | CheckpointWritten() | _Orphaned():
                pass  # machine 0 has its own
            case _:
                if isinstance(fact, Exiting):
                    self._left.add(fact.rank)
                self._send(fact)
        if self._reason is not None and len(self._left) == len(self._ranks) and self.phase is not Phase.DONE:
            self.phase = Phase.DONE
            commands.append(Finish(self._reason, True, self.global_step, 0))
        return commands

    def deadline_ms(self) -> float | None:
        """Time to call `handle` with a `Tick`: never."""
        return None
