"""The coordinator's machine: facts in, commands out.

`handle` writes the fact down and then looks at all of them (level-triggered), so no edge can be lost: a stop
that comes between two rounds, a rank that dies while another is asked for its snapshot, a pause taken back
before it was obeyed. It knows no thread, no clock and no torch; the simulator runs it by the ten thousand.

The life of a run::

    starting --all ranks ready--> running --nothing left, or stop--> leaving --all ranks gone--> done
        |                            |                                                            ^
        +---------a rank failed------+-----------------> failing --------all ranks gone-----------+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from flowdp.errors import ProtocolError
from flowdp.machine.commands import AbortGate, Command, Direct, Fail, Finish, Paused, Send
from flowdp.machine.epochs import Epochs
from flowdp.machine.exact import ExactRounds
from flowdp.machine.planned import PlannedRounds
from flowdp.machine.snapshots import SnapshotRounds
from flowdp.messages import (
    Abort,
    DataEnded,
    Directives,
    Exiting,
    Fact,
    Failed,
    Order,
    Requested,
    Shutdown,
    SnapshotReady,
    StartEpoch,
    Tick,
    WorkerReady,
)
from flowdp.options import CadenceOptions, Policy
from flowdp.policy.cadence import Cadence

__all__ = ["Coordinator", "Life", "RunConfig"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the coordinator has to know of a run.

    Attributes:
        world_size: Ranks.
        batches: Batches of an epoch, in exact windows; None: not known before its end was read, which exact
            cannot have.
        epochs: How many; None: until `max_steps`.
        max_steps: Steps of all ranks after which the run ends; None: no limit.
        policy: Who waits for whom.
        cadence: How often.
        ratios: Fixed shares, summing to 1; None: by measured speed. Shape (world_size,).
        wait_for_metric: A scheduler watches the loss of the epoch before.
        window: Samples that make one step of the run (exact).
        samples: Samples of an epoch (exact): its last window has what remains.
        groups: Batches that make one step of each rank; None: one each. With `max_steps` all are equal: how
            many steps an epoch has would depend on the speeds. Shape (world_size,).
    """

    world_size: int
    batches: int | None
    epochs: int | None = None
    max_steps: int | None = None
    policy: Policy = "cadence"
    cadence: CadenceOptions = field(default_factory=CadenceOptions)
    ratios: Sequence[float] | None = None
    wait_for_metric: bool = False
    window: int | None = None
    samples: int | None = None
    groups: Sequence[int] | None = None


class Life(Enum):
    """Where a run stands."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    FAILING = "failing"
    DONE = "done"


class Coordinator:
    """Runs the rounds, carries the user's wishes to the gate, and ends the run.

    After `handle`, carry out the commands in order; when `deadline_ms` has passed, call it with `Tick`.

    Args:
        config: The run.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.life = Life.STARTING
        self.epochs = Epochs(
            config.batches,
            config.epochs,
            config.max_steps,
            config.world_size,
            config.wait_for_metric,
            config.groups,
        )
        self.rounds = self._make_rounds(config, self.epochs)
        self.error: str | None = None
        self.is_paused = False
        self._ready: set[int] = set()
        self._gone: set[int] = set()
        self._wants_stop = False
        self._wants_pause = False
        self._new_lr: float | None = None  # not yet at the gate
        self._wants_meeting = False  # so that an outcome tells the learning rate soon
        self._directives = Directives()

    @property
    def global_step(self) -> int:
        """Steps of all ranks in the rounds held so far."""
        return self.rounds.global_step

    def handle(self, fact: Fact, now_ms: float) -> list[Command]:
        """Take a fact and decide.

        Raises:
            ProtocolError: The fact is one that the protocol rules out.
        """
        commands = self._take(fact, now_ms)
        commands += self._decide(now_ms)
        return commands

    def deadline_ms(self) -> float | None:
        """When to call `handle(Tick(), ...)` if nothing happens before; None: never."""
        return self.rounds.deadline_ms() if self.life is Life.RUNNING else None

    def check(self) -> None:
        """Check the invariants.

        Raises:
            ProtocolError: One does not hold.
        """
        self.epochs.check()
        self.rounds.check()
        if self.life is Life.DONE and len(self._gone) != self.config.world_size:
            raise ProtocolError(f"done while only {sorted(self._gone)} have left")

    # ------------------------------------------------------------------ facts
    def _take(self, fact: Fact, now_ms: float) -> list[Command]:
        match fact:
            case WorkerReady():
                self._ready.add(fact.rank)
            case Exiting():
                self._take_exit(fact)
            case Failed():
                self.error = self.error or fact.error
            case Requested():
                self._take_wish(fact)
            case Tick():
                pass
            case DataEnded():
                # As soon as it is read, before the first order too; a run that is leaving has no use for it.
                if self.life in (Life.STARTING, Life.RUNNING):
                    self.epochs.end(fact.epoch, fact.batches)
                    return self.rounds.end(fact)
            case _ if self.life is Life.RUNNING:
                commands = self.rounds.take(fact, now_ms)
                self.error = next((c.error for c in commands if isinstance(c, Fail)), self.error)
                return commands
            case _ if self.life in (Life.FAILING, Life.DONE):
                pass  # said before its sender heard of the end
            case SnapshotReady() if self.life is Life.LEAVING:
                pass  # answers an abandoned round
            case _:
                raise ProtocolError(f"unexpected {fact} while the run is {self.life.value}")
        return []

    def _take_exit(self, fact: Exiting) -> None:
        self._gone.add(fact.rank)
        if fact.error is not None:
            self.error = self.error or fact.error
        elif self.life not in (Life.LEAVING, Life.FAILING):
            self.error = self.error or f"rank {fact.rank} left without being told to"

    def _take_wish(self, fact: Requested) -> None:
        match fact.what:
            case "stop":
                self._wants_stop = True
            case "pause":
                self._wants_pause = True
            case "unpause":
                self._wants_pause = False
            case "set_lr":
                self._new_lr = fact.value

    # ------------------------------------------------------------------ decisions
    def _decide(self, now_ms: float) -> list[Command]:
        commands: list[Command] = []
        if self.life is Life.STARTING and len(self._ready) == self.config.world_size and self.error is None:
            self.life = Life.RUNNING
        if self.life in (Life.STARTING, Life.RUNNING, Life.LEAVING) and self.error is not None:
            self.life = Life.FAILING
            commands.append(AbortGate(self.error))
            commands += [Send(rank, Abort(self.error)) for rank in self._present()]
        if self.life is Life.RUNNING:
            commands += self._run(now_ms)
        if self.life in (Life.LEAVING, Life.FAILING) and len(self._gone) == self.config.world_size:
            stopped = not self.epochs.is_complete
            self.life = Life.DONE
            commands.append(Finish(self.error, stopped, self.global_step, self.epochs.done))
        return commands

    def _run(self, now_ms: float) -> list[Command]:
        commands: list[Command] = list(self.epochs.ended(now_ms, self.rounds.anchor, self.global_step))
        commands += self._direct()
        hold = self._wants_stop or self._wants_pause
        orders = self.rounds.decide(now_ms, hold=hold, meet=self._wants_meeting)
        if self._wants_meeting and any(isinstance(c, Send) and _is_meeting(c.order) for c in orders):
            # Armed behind the directive, so its outcome will tell the learning rate if no earlier one did.
            self._wants_meeting = False
        commands += orders
        if not self.rounds.is_idle:
            return commands
        if self._wants_stop or self.epochs.is_complete:
            self.life = Life.LEAVING
            commands += [Send(rank, Shutdown()) for rank in self._present()]
        elif self._wants_pause and not self.is_paused:
            commands += self._stand_still()
        return commands

    def _direct(self) -> list[Command]:
        """Put the wishes at the gate, where the next outcome reads them."""
        commands: list[Command] = []
        if self.is_paused and not self._wants_pause:
            self.is_paused = False
            commands.append(Paused(False))
        wanted = Directives(self._wants_stop, self._wants_pause and not self.is_paused)
        if wanted != self._directives or self._new_lr is not None:
            self._directives = wanted
            # A learning rate is said once: an outcome may have told it before the coordinator hears of that,
            # and told again it would undo what the scheduler did since.
            commands.append(Direct(replace(wanted, lr=self._new_lr)))
            self._wants_meeting = self._wants_meeting or self._new_lr is not None
            self._new_lr = None
        return commands

    def _stand_still(self) -> list[Command]:
        self.is_paused = True
        # No round came to obey the wish, or one did: neither shall the first round after the pause.
        self._directives = replace(self._directives, pause=False)
        return [Paused(True), Direct(self._directives)]

    def _present(self) -> list[int]:
        return [rank for rank in range(self.config.world_size) if rank not in self._gone]

    @staticmethod
    def _make_rounds(config: RunConfig, epochs: Epochs) -> PlannedRounds | SnapshotRounds:
        if config.policy == "exact":
            if config.window is None or config.samples is None:
                raise ProtocolError(f"exact has to know its windows: {config}")
            hint = config.cadence.speed_hint
            return ExactRounds(epochs, config.world_size, config.window, config.samples, config.ratios, hint)
        one_step = config.policy == "sync" or (config.policy == "cadence" and not config.cadence.windows)
        if config.world_size == 1 or one_step:
            return PlannedRounds(epochs, None, config.world_size)
        cadence = Cadence(config.world_size, config.cadence, config.ratios)
        rounds = SnapshotRounds if config.policy == "async" else PlannedRounds
        return rounds(epochs, cadence, config.world_size)


def _is_meeting(order: Order) -> bool:
    return isinstance(order, StartEpoch) and order.sync is not None
