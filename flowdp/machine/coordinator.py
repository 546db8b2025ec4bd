"""The coordinator's machine: facts in, commands out.

`handle` writes the fact down and then looks at all of them (level-triggered), so no edge can be lost: a stop
that comes between two rounds, a rank that dies while another is asked for its snapshot, a pause taken back
before it was obeyed. It knows no thread, no clock and no torch; the simulator runs it by the ten thousand.

The phases of a run::

    starting --all ranks ready--> running --nothing left, or stop--> leaving --all ranks gone--> done
        |                            |                                                            ^
        +---------a rank failed------+-----------------> failing --------all ranks gone-----------+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from flowdp.errors import ProtocolError
from flowdp.machine.barrier import Barrier
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import Epochs
from flowdp.machine.policies import make_rounds
from flowdp.protocol.commands import (
    AbortGate,
    Command,
    EpochMetrics,
    EpochStarted,
    Fail,
    Finish,
    LeaveGate,
    Paused,
    Quarantined,
    RoundEnded,
    Send,
)
from flowdp.protocol.messages import (
    BatchRead,
    CheckpointWritten,
    DataEnded,
    Directives,
    Exiting,
    Fact,
    Failed,
    Leave,
    Order,
    Requested,
    SnapshotReady,
    StartEpoch,
    TaskDone,
    Tick,
    WorkerReady,
)
from flowdp.protocol.position import Position

__all__ = ["Coordinator", "Phase"]


class Phase(Enum):
    """Phases of a run."""

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

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.phase = Phase.STARTING
        self.epochs = Epochs(config)
        self.rounds = make_rounds(config, self.epochs)
        self.barrier = Barrier(config)
        self.error: str | None = None
        self.is_paused = False
        self._ready: set[int] = set()
        self._gone: set[int] = set()
        self._stopped_by = ""  # cause of the stop; empty: none is wanted
        self._end_ms: float | None = None  # the run is stopped then
        self._wants_pause = False
        self._new_lr: tuple[Requested, ...] = ()  # not yet at the gate
        self._wants_meeting = False  # so that an outcome tells the learning rate soon
        self._directives = Directives()
        if config.start is not None:
            self.epochs.resume(config.start)
            self.rounds.resume(config.start)
        self._begun = self.epochs.done  # epochs whose beginning has been told; one in the middle begins, too

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
        if any(isinstance(command, RoundEnded) for command in commands):
            self.barrier.trained()
        commands += self._decide(now_ms)
        return commands

    def deadline_ms(self) -> float | None:
        """Time to call `handle(Tick(), ...)` if nothing happens before; None: never."""
        if self.phase is not Phase.RUNNING:
            return None
        due = [self.rounds.deadline_ms(), self.barrier.saves.deadline_ms, self._end_ms]
        return min((ms for ms in due if ms is not None), default=None)

    # ------------------------------------------------------------------ facts
    def _take(self, fact: Fact, now_ms: float) -> list[Command]:
        match fact:
            case WorkerReady():
                self._ready.add(fact.rank)
            case Exiting():
                return self._take_exit(fact, now_ms)
            case Failed():
                self._take_failure(fact)
            case Requested("stop", cause):
                self._stopped_by = self._stopped_by or cause or "run.stop()"
            case Requested("pause" | "unpause"):
                self._wants_pause = fact.what == "pause"
            case Requested("checkpoint"):
                self.barrier.saves.ask()
            case Requested("snapshot"):
                self.barrier.wish_snapshot()
            case Requested():
                self._new_lr += (fact,)
            case Tick():
                pass
            case BatchRead():
                self.epochs.read(fact)
            case DataEnded():
                # As soon as it is read, before the first order too; a run that is leaving has no use for it.
                if self.phase in (Phase.STARTING, Phase.RUNNING):
                    error = self.epochs.end(fact)
                    if error is not None:
                        return self._failing([Fail(error, kind="option")])
                    return self.rounds.end(fact)
            case CheckpointWritten():
                self.barrier.written(fact.version, now_ms)  # in any phase: the writer may be late
            case TaskDone() if self.phase is Phase.RUNNING:
                self.barrier.take(fact)
            case _ if self.phase is Phase.RUNNING:
                return self._failing(self.rounds.take(fact, now_ms))
            case _ if self.phase in (Phase.FAILING, Phase.DONE):
                pass  # said before its sender heard of the end
            case SnapshotReady() if self.phase is Phase.LEAVING:
                pass  # answers a round that was given up
            case _:
                raise ProtocolError(f"unexpected {fact} while the run is {self.phase.value}")
        return []

    def _take_exit(self, fact: Exiting, now_ms: float) -> list[Command]:
        self._gone.add(fact.rank)
        self.barrier.bad.pop(fact.rank, None)
        if fact.error is not None:
            if fact.is_alone and self._may_go_on():
                return [LeaveGate(fact.rank), *self.rounds.take(fact, now_ms)]
            self.error = self.error or fact.error
        elif self.phase not in (Phase.LEAVING, Phase.FAILING):
            self.error = self.error or f"rank {fact.rank} left without being told to"
        return []

    def _take_failure(self, fact: Failed) -> None:
        lost = set(fact.ranks).difference(self._gone)
        # A machine whose ranks have all left as they were told is not missed.
        if lost or not fact.ranks:
            self.error = self.error or fact.error
        self._gone |= lost

    def _may_go_on(self) -> bool:
        """Whether the other ranks go on without one that has failed."""
        is_wanted = self.config.on_failure == "continue" and self.rounds.averages == "parameters"
        is_running = self.phase is Phase.RUNNING and self.error is None and not self.barrier.is_asked
        return is_wanted and is_running and bool(self._present())

    def _failing(self, commands: list[Command]) -> list[Command]:
        """Take the error of a `Fail` among the commands; returns the commands."""
        self.error = self.error or next((c.error for c in commands if isinstance(c, Fail)), None)
        return commands

    # ------------------------------------------------------------------ decisions
    def _decide(self, now_ms: float) -> list[Command]:
        commands: list[Command] = []
        if self.phase is Phase.STARTING and len(self._ready) == self.config.world_size and self.error is None:
            self.phase = Phase.RUNNING
            self.epochs.start(now_ms)
            self._end_ms = None if self.config.max_ms is None else now_ms + self.config.max_ms
            self.barrier.begin(now_ms, self.global_step)
        if self.phase is Phase.RUNNING and self.error is None:
            commands += self._run(now_ms)
        if self.phase in (Phase.STARTING, Phase.RUNNING, Phase.LEAVING) and self.error is not None:
            self.phase = Phase.FAILING
            commands.append(AbortGate(self.error))
            commands += [Send(rank, Leave(self.error)) for rank in self._present()]
        if self.phase in (Phase.LEAVING, Phase.FAILING) and len(self._gone) == self.config.world_size:
            self.phase = Phase.DONE
            if self._new_lr:  # they came behind the last round: the gate has all that no round has told
                commands.append(Directives(lr=self._new_lr))
            commands.append(self._finish(now_ms))
        return commands

    def _finish(self, now_ms: float) -> Finish:
        config, step = self.config, self.global_step
        stopped = self.barrier.owes or not (self.epochs.is_complete or self.barrier.is_enough)
        if self.error is not None:
            return Finish(self.error, stopped, step, self.epochs.complete)
        is_planned = not stopped and self.epochs.is_complete
        reason = self._stopped_by
        if is_planned:
            reason = "all epochs are trained"
            if config.epochs is None or step == config.max_steps:
                reason = f"max_steps={config.max_steps} reached"
        elif not stopped and config.tasks.monitor is not None:
            reason = config.tasks.monitor.reason(self.barrier.best(self.epochs.done))
        if not stopped and config.start is not None and config.start.global_step == step:
            is_planned, reason = False, f"nothing was left to train, {reason}"
        stands = self._position(now_ms)
        return Finish(None, stopped, step, self.epochs.complete, stands, reason, is_planned)

    def _run(self, now_ms: float) -> list[Command]:
        commands: list[Command] = []
        if self._end_ms is not None and now_ms >= self._end_ms:
            self._end_ms = None
            self._stopped_by = self._stopped_by or "max_time is up"
        anchor, is_idle = self.rounds.anchor, self.rounds.is_idle
        for metrics in self.epochs.ended(now_ms, anchor, self.global_step, is_idle=is_idle):
            commands += self._failing(self.barrier.ended(metrics))
        commands += self.barrier.look(now_ms, self.global_step)
        commands += self._judge_numbers()
        if self.rounds.is_idle and self.error is None:
            commands += self._stand(now_ms)
        commands += self._watch_metric(commands)
        if self.error is not None:
            return commands
        commands += self._direct()
        stands = self.barrier.is_wanted or self.rounds.wants_meeting
        hold = self._ends or self._wants_pause or stands
        self.rounds.limit = self.barrier.limit
        orders = self.rounds.decide(now_ms, hold=hold, meet=self._wants_meeting)
        commands += map(EpochStarted, range(self._begun, self.epochs.opened))
        self._begun = self.epochs.opened
        if self._wants_meeting and any(isinstance(c, Send) and _is_meeting(c.order) for c in orders):
            # Armed behind the directive, so its outcome will tell the learning rate if no earlier one did.
            self._wants_meeting = False
        commands += orders
        if not self.rounds.is_idle or self.barrier.is_wanted:
            return commands
        if self._ends or self.epochs.is_complete:
            self.phase = Phase.LEAVING
            commands += [Send(rank, Leave()) for rank in self._present()]
        elif self._wants_pause and not self.is_paused:
            commands += self._stand_still()
        return commands

    @property
    def _ends(self) -> bool:
        """Whether the run shall end before its last step."""
        return bool(self._stopped_by) or self.barrier.is_enough

    def _stand(self, now_ms: float) -> list[Command]:
        """Run the tasks that are due while all ranks stand still."""

        def where() -> Position:
            return self._position(now_ms)

        barrier, commands = self.barrier, list[Command]()
        while True:
            commands += barrier.decide(now_ms, self._present(), where, leaves=bool(self._stopped_by))
            if barrier.is_wanted:
                break
            is_over = self._ends or self.epochs.is_complete
            may_save = self.config.tasks.inside or not self.epochs.is_inside
            stands = is_over or (self._wants_pause and not self.is_paused)
            saves = is_over and may_save and barrier.end(self.global_step)
            if not saves and not (stands and barrier.settle()):
                break
        return self._failing(commands)

    def _watch_metric(self, commands: Sequence[Command]) -> list[Command]:
        """Show a scheduler the loss of the evaluation, and no other where the run has one."""
        if not self.config.wait_for_metric:
            return []
        for command in commands:
            if isinstance(command, EpochMetrics):
                is_seen = not self.config.tasks.evaluates_epochs or command.is_evaluated
                metric = command.eval.get("loss", command.loss) if is_seen else None
                self.epochs.watch(metric)
                if is_seen and metric is None:
                    text = f"epoch {command.epoch + 1} has no loss, and a scheduler watches it"
                    return self._failing([Fail(f"{text}: return it as 'loss'", kind="option")])
        return []

    def _judge_numbers(self) -> list[Command]:
        """Order replicas with NaN or inf parameters to copy a healthy one.

        A replica that an acknowledgment reports is reported again by the outcome before it is healed.
        """
        new = {rank: at for rank, at in self.rounds.pop_bad().items() if rank not in self.barrier.bad}
        bad = self.barrier.bad | new
        if not bad:
            return []
        # A replica whose gradient was left out of one window has taken the step of the others, and is sound.
        heals = self.rounds.averages != "gradients"
        if bad.keys() >= set(self._present()) and (heals or len(set(bad.values())) == 1):
            where = [f"rank {rank}: {_named(batch)}" for rank, batch in bad.items()]
            what = "NaN or infinite numbers in every replica, there is none left to go on from"
            return self._failing([Fail(f"{what} ({'; '.join(where)})", kind="numbers")])
        if heals:
            self.barrier.bad = bad
        return [Quarantined(rank, batch) for rank, batch in new.items()]

    def _position(self, now_ms: float) -> Position:
        done, planned, open_ = self.epochs.position(now_ms)
        cadence, owed = self.rounds.cadence, self.barrier.owed_epoch
        if owed is not None and owed.epoch >= done:  # `max_steps` cut it short: it is reported again anyway
            owed = None
        return Position(
            world_size=self.config.world_size,
            done=done,
            open=open_,
            global_step=self.global_step,
            round=self.rounds.next_round,
            planned=planned,
            metric=self.epochs.metrics[-1] if self.epochs.metrics else None,
            versions=self.barrier.versions,
            anchor=None if cadence is None else cadence.anchor,
            pace_ms=self.rounds.pace_ms,
            best=self.barrier.best(done),
            drifts=() if cadence is None else cadence.guard.history,
            owed_epoch=owed,
            owed_step=self.barrier.owed_step,
        )

    def _direct(self) -> list[Command]:
        """Put the wishes at the gate, where the next outcome reads them."""
        commands: list[Command] = []
        if self.is_paused and not self._wants_pause:
            self.is_paused = False
            commands.append(Paused(False))
        halt = self.barrier.is_wanted and not self.rounds.is_idle
        wanted = Directives(self._ends, self._wants_pause and not self.is_paused, halt=halt)
        if wanted != self._directives or self._new_lr:
            self._directives = wanted
            # A change of the rates is sent once: an outcome may have carried it before the coordinator
            # hears of that.
            commands.append(replace(wanted, lr=self._new_lr))
            self._wants_meeting = self._wants_meeting or bool(self._new_lr)
            self._new_lr = ()
        return commands

    def _stand_still(self) -> list[Command]:
        self.is_paused = True
        # No round came to obey the wish, or one did: neither shall the first round after the pause.
        self._directives = replace(self._directives, pause=False)
        return [Paused(True), self._directives]

    def _present(self) -> list[int]:
        return [rank for rank in range(self.config.world_size) if rank not in self._gone]


def _named(batch: tuple[int, int] | None) -> str:
    return "batch unknown" if batch is None else f"epoch {batch[0] + 1}, batch {batch[1] + 1}"


def _is_meeting(order: Order) -> bool:
    return isinstance(order, StartEpoch) and order.sync is not None
