"""Tasks at a barrier of all ranks: means on their way, healing replicas, evaluations, state for checkpoints.

Between two rounds, with nothing dealt, the replicas are equal and orders cannot be obeyed in different
rounds: then an order in the inbox is enough. One thing is done after the other, each in two halves, the
orders and the answers of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flowdp.errors import ProtocolError
from flowdp.policy.metric_array import MetricArray
from flowdp.policy.monitor import Best, Monitor, judge
from flowdp.policy.save_budget import SaveBudget
from flowdp.policy.tally import EpochMetrics, evaluation_means
from flowdp.protocol.commands import (
    Command,
    CutEvaluation,
    EpochEnded,
    EvaluationEnded,
    Fail,
    Save,
    SavesPutOff,
    Send,
)
from flowdp.protocol.messages import (
    BarrierTask,
    CopyReplica,
    Evaluate,
    Evaluated,
    Evaluation,
    MergeMetrics,
    MetricsMerged,
    ReplicaCopied,
    SaveState,
    Settle,
    Settled,
    StateSaved,
)
from flowdp.protocol.position import Position

__all__ = ["MINUTE_MS", "Barrier", "BarrierPlan", "SavePlan", "Schedule"]


MINUTE_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Schedule of checkpoints, beside requested ones and the last one of a run.

    Attributes:
        every: After so many ...
        unit: ... of these; "step" is one of all ranks.
    """

    every: float
    unit: Literal["epoch", "step", "minute"]


@dataclass(frozen=True, slots=True)
class BarrierPlan:
    """Tasks of a run at its barriers.

    Attributes:
        save: When a checkpoint is due; None: only when it is asked for.
        eval_every: Epochs or steps of all ranks between two evaluations; None: there are none.
        eval_unit: Unit of that.
        monitor: Number that ends the run when it does not improve; None: none does.
        keeps_best: The state at the best epoch is saved.
        is_saved: The run resumes from a checkpoint in its own folder.
        inside: A run can go on inside an epoch, too: its last checkpoint may lie there.
    """

    save: SavePlan | None = None
    eval_every: int | None = None
    monitor: Monitor | None = None
    keeps_best: bool = False
    is_saved: bool = False
    inside: bool = True
    eval_unit: Literal["epoch", "step"] = "epoch"

    @property
    def evaluates_epochs(self) -> bool:
        """Whether evaluations belong to epochs, and are judged with them."""
        return self.eval_every is not None and self.eval_unit == "epoch"

    @property
    def evaluation(self) -> SavePlan | None:
        """Schedule of evaluations that are due at a step; None: there are none."""
        if self.eval_every is None or self.eval_unit == "epoch":
            return None
        return SavePlan(self.eval_every, self.eval_unit)

    def evaluates(self, epoch: int) -> bool:
        """Whether an evaluation follows this epoch."""
        return self.eval_every is not None and self.evaluates_epochs and (epoch + 1) % self.eval_every == 0

    def saves(self, epoch: int) -> bool:
        """Whether a checkpoint follows this epoch."""
        save = self.save
        return save is not None and save.unit == "epoch" and (epoch + 1) % save.every == 0

    def halts(self, epoch: int) -> bool:
        """Whether all ranks stand still behind this epoch."""
        return self.evaluates(epoch) or self.saves(epoch) or self.monitor is not None


class Schedule:
    """Next checkpoint or evaluation that is due by steps or minutes; none is due twice at the same step.

    Args:
        plan: Unit and interval; None: none is due by itself.
        saved_step: Global step of the last one; -1 before the first.

    Attributes:
        is_put_off: Whether one was due at the last look, and was put off.
    """

    def __init__(self, plan: SavePlan | None, saved_step: int = -1) -> None:
        self._plan = plan
        self._saved_step = saved_step
        self._next_step: int | None = None
        self._next_ms = math.inf
        self._is_late = False  # by the clock, and not saved since
        self._free_ms = -math.inf  # the next one is put off until then
        self._is_held = False  # as it was not free at the last look
        self.is_put_off = False

    @property
    def limit(self) -> int | None:
        """Global step at which the next one is due; None: none is due at a step, or it will be put off."""
        return None if self._is_held else self._next_step

    @property
    def deadline_ms(self) -> float | None:
        """Time at which the next one is due; None: none is due by the clock."""
        due_ms = self._free_ms if self.is_put_off else self._next_ms
        return None if math.isinf(due_ms) else due_ms

    def put_off(self, now_ms: float, free_ms: float) -> None:
        """Let none be due before a time; called before each look.

        Args:
            now_ms: The time.
            free_ms: That time; infinite while it is unknown.
        """
        self._free_ms, self._is_held = free_ms, now_ms < free_ms

    def begin(self, now_ms: float, global_step: int) -> None:
        """Plan the next one, at the beginning or behind another one."""
        plan = self._plan
        if plan is not None and plan.unit == "step":
            every = int(plan.every)
            self._next_step = (global_step // every + 1) * every
        elif plan is not None and plan.unit == "minute":
            self._next_ms = now_ms + plan.every * MINUTE_MS

    def is_due(self, now_ms: float, global_step: int) -> bool:
        """Whether one is due now."""
        if now_ms >= self._next_ms:
            self._is_late, self._next_ms = True, math.inf
        is_due = self._is_late or (self._next_step is not None and global_step >= self._next_step)
        is_due = is_due and global_step != self._saved_step
        self.is_put_off = is_due and self._is_held
        return is_due and not self._is_held

    def is_last_due(self, global_step: int) -> bool:
        """Whether the end of the run is to be saved, too."""
        return self._plan is not None and self._saved_step != global_step

    def saved(self, now_ms: float, global_step: int) -> None:
        """The one of this step is being written, or has been evaluated."""
        self._saved_step, self._is_late, self.is_put_off = global_step, False, False
        self.begin(now_ms, global_step)


@dataclass(slots=True)
class _Asked:
    """An order that is out.

    Attributes:
        task: The order.
        waits_for: Ranks that have not answered.
        results: Results of the evaluation so far.
        arrays: Arrays of it.
        holders: Ranks that have metrics to be merged.
        evaluation: Of an order to merge them, the evaluation.
        is_cut: The evaluation was cut short.
    """

    task: BarrierTask
    waits_for: set[int]
    results: list[Evaluation] = field(default_factory=list)
    arrays: dict[str, MetricArray] = field(default_factory=dict)
    holders: list[int] = field(default_factory=list)
    evaluation: Evaluate | None = None
    is_cut: bool = False


class Barrier:
    """Decides which tasks are due, and runs them at a barrier.

    Args:
        tasks: Tasks of the run.
        position: Position to resume at; None: the beginning.
        machine_of: Machine of each rank; empty: there is one. Shape (world_size,).
        overlaps: The mean of all machines travels while they train on.

    Attributes:
        versions: Checkpoints so far, those of the run that this one continues included.
        saves: Checkpoints that are due by steps or minutes.
        evaluations: Evaluations that are due by steps.
        owed_epoch: Record of the epoch whose evaluation a stop has left out or cut short.
        owed_step: The same has happened to an evaluation by steps.
    """

    def __init__(
        self,
        tasks: BarrierPlan,
        position: Position | None = None,
        machine_of: Sequence[int] = (),
        *,
        overlaps: bool = False,
    ) -> None:
        self.versions = 0 if position is None else position.versions
        self._tasks = tasks
        self._best = Best() if position is None else position.best
        self._best_before: dict[int, Best] = {}  # each epoch that was reported
        self._ended: list[EpochMetrics] = []  # complete, and not reported yet, or not with its evaluation
        self._to_heal: tuple[int, ...] = ()
        self._machine_of = machine_of
        self._overlaps = overlaps
        self._is_unsettled = self._wants_settling = False  # a mean may be on its way; shall be brought in
        self._asked: _Asked | None = None
        self._evaluations = self._captures = 0
        self._wishes = self._asked_wishes = self._answered = 0  # for a snapshot
        self._wants_save = self._is_best = False
        self._budget = None if tasks.save is None or tasks.save.unit == "epoch" else SaveBudget()
        self._begin_ms = 0.0  # of the capture
        self._is_told = False  # that checkpoints are put off
        self.owed_epoch: EpochMetrics | None = None
        self.owed_step = self._wants_evaluation = False  # due by steps
        saved_step = -1
        if position is not None and position.owed_epoch is not None:
            self._ended.append(position.owed_epoch)
        elif position is not None and position.owed_step:
            self._wants_evaluation = tasks.evaluation is not None
        elif position is not None and tasks.is_saved:  # behind an owed one, the same step is saved once more
            saved_step = position.global_step
        self.saves = Schedule(tasks.save, saved_step)
        self.evaluations = Schedule(tasks.evaluation)

    def best(self, epochs: int) -> Best:
        """Best monitored number after so many epochs, no fewer than this run began with."""
        return self._best_before.get(epochs, self._best)

    @property
    def limit(self) -> int | None:
        """Global step at which the next task is due; None: none is due at a step."""
        return min((s.limit for s in (self.saves, self.evaluations) if s.limit is not None), default=None)

    @property
    def is_enough(self) -> bool:
        """Whether the run shall end: the monitored number has not improved for `patience` epochs."""
        monitor = self._tasks.monitor
        return monitor is not None and monitor.is_enough(self._best)

    @property
    def is_wanted(self) -> bool:
        """Whether a barrier is wanted or in progress."""
        wants_capture = self._wants_save or self._is_best or self._answered < self._wishes
        is_begun = self._wants_settling or bool(self._asked or self._to_heal or self._ended)
        return is_begun or self._wants_evaluation or wants_capture

    @property
    def owes(self) -> bool:
        """Whether an evaluation is left to the run that goes on from here."""
        return self.owed_epoch is not None or self.owed_step

    @property
    def is_asked(self) -> bool:
        """Whether an answer is out: every rank's part is needed."""
        return self._asked is not None

    # ------------------------------------------------------------------ due tasks
    def wish(self, what: Literal["checkpoint", "snapshot"]) -> None:
        """The user asks for something."""
        if what == "checkpoint":
            self._wants_save = True
        else:
            self._wishes += 1

    def end(self, global_step: int) -> bool:
        """The run is about to end; whether a last checkpoint comes first."""
        self._wants_save |= self.saves.is_last_due(global_step)
        return self._wants_save

    def settle(self) -> bool:
        """The run is about to end or to pause; whether a mean that may be on its way is brought in first."""
        self._wants_settling = self._is_unsettled
        return self._wants_settling

    def heal(self, bad: Sequence[int]) -> None:
        """These replicas have NaN or inf parameters."""
        self._to_heal = tuple(bad)

    def ended(self, metrics: EpochMetrics) -> list[Command]:
        """An epoch is complete; it is reported at once, or when its evaluation is."""
        if not self._ended and not self._tasks.halts(metrics.epoch):
            return [EpochEnded(metrics)]
        self._ended.append(metrics)
        return []

    def begin(self, now_ms: float, global_step: int) -> None:
        """Plan the first tasks that are due by steps or minutes."""
        self.saves.begin(now_ms, global_step)
        self.evaluations.begin(now_ms, global_step)

    def look(self, now_ms: float, global_step: int) -> None:
        """See whether a checkpoint or an evaluation is due by steps or minutes."""
        if self._budget is not None:
            self.saves.put_off(now_ms, self._budget.free_ms)
        self._wants_save |= self.saves.is_due(now_ms, global_step)
        self._wants_evaluation |= self.evaluations.is_due(now_ms, global_step)

    def notices(self) -> list[Command]:
        """The first time that a checkpoint is put off for its known cost: a command that tells of it."""
        plan, budget = self._tasks.save, self._budget
        if self._is_told or plan is None or budget is None or not self.saves.is_put_off:
            return []
        if budget.cost is None:  # the file before is being written
            return []
        self._is_told = True
        return [SavesPutOff(plan.every, plan.unit, budget.cost, budget.wait_ms)]

    # ------------------------------------------------------------------ answers
    def trained(self) -> None:
        """Rounds have ended."""
        self._is_unsettled = self._overlaps

    def written(self, version: int, now_ms: float) -> None:
        """The writer is done with this checkpoint and all before it."""
        if self._budget is not None and version == self.versions:
            self._budget.written(now_ms)

    def take(self, fact: Evaluated | MetricsMerged | StateSaved | ReplicaCopied | Settled) -> None:
        """Take an answer.

        Raises:
            ProtocolError: No such task of this rank is out.
        """
        kinds = {
            Evaluated: Evaluate,
            MetricsMerged: MergeMetrics,
            StateSaved: SaveState,
            ReplicaCopied: CopyReplica,
            Settled: Settle,
        }
        asked = self._asked
        if asked is None or not isinstance(asked.task, kinds[type(fact)]) or fact.rank not in asked.waits_for:
            raise ProtocolError(f"unexpected {fact}: {asked} is under way")
        asked.waits_for.discard(fact.rank)
        if isinstance(fact, Evaluated | MetricsMerged):
            asked.results += fact.results
        if isinstance(fact, MetricsMerged):
            asked.arrays |= fact.arrays
        elif isinstance(fact, Evaluated) and fact.has_metrics:
            asked.holders.append(fact.rank)

    # ------------------------------------------------------------------ doing
    def decide(
        self, now_ms: float, present: Sequence[int], stand: Callable[[], Position], *, leaves: bool
    ) -> list[Command]:
        """Go on with the tasks that are due; all ranks are at the barrier.

        Args:
            now_ms: The time.
            present: The ranks that are there, at least one of them sound.
            stand: Says where the run stands.
            leaves: The run shall end: no evaluation, and one under way is cut short. It is owed then.
        """
        commands: list[Command] = []
        while self.is_wanted and not any(isinstance(command, Fail) for command in commands):
            asked = self._asked
            if asked is not None and asked.waits_for:
                if leaves and isinstance(asked.task, Evaluate) and not asked.is_cut:
                    asked.is_cut = True
                    commands.append(CutEvaluation())
                return commands
            self._asked = None
            if asked is not None:
                commands += self._finish(asked, now_ms, stand)
            else:
                commands += self._next(now_ms, present, stand, leaves=leaves)
        return commands

    def _next(
        self, now_ms: float, present: Sequence[int], stand: Callable[[], Position], *, leaves: bool
    ) -> list[Command]:
        """Begin the first task."""
        if self._is_unsettled:
            self._is_unsettled = self._wants_settling = False
            return self._ask(Settle(), present)
        if self._to_heal:
            return self._heal(present)
        if self._ended:
            metrics = self._ended[0]
            is_due = self._tasks.evaluates(metrics.epoch)
            if is_due and not leaves:
                self._evaluations += 1
                return self._ask(Evaluate(metrics.epoch, self._evaluations - 1), present)
            del self._ended[0]
            return self._report(replace(metrics, owes_evaluation=is_due))
        if self._wants_evaluation:  # before a checkpoint of the step: a run that resumes there is behind it
            self._wants_evaluation, position = False, stand()
            self.evaluations.saved(now_ms, position.global_step)
            if leaves:
                self.owed_step = True
                return []
            self._evaluations += 1
            return self._ask(Evaluate(position.done, self._evaluations - 1, position.global_step), present)
        self._asked_wishes, self._begin_ms = self._wishes, now_ms
        self._captures += 1
        return self._ask(SaveState(self._captures - 1, present[0], self._is_best), present)

    def _heal(self, present: Sequence[int]) -> list[Command]:
        """Heal the bad replicas of a machine by one that it has, or the first of them by another's."""
        bad = [rank for rank in present if rank in self._to_heal]
        if not bad:
            self._to_heal = ()
            return []
        machine_of = self._machine_of or (0,) * (present[-1] + 1)
        healthy = [rank for rank in present if rank not in self._to_heal]
        there = [rank for rank in healthy if machine_of[rank] == machine_of[bad[0]]]
        healed = [rank for rank in bad if machine_of[rank] == machine_of[bad[0]]] if there else bad[:1]
        self._to_heal = tuple(rank for rank in bad if rank not in healed)
        if there:
            return self._ask(CopyReplica(there[0]), healed)
        return self._ask(CopyReplica(healthy[0], receiver=bad[0]), [healthy[0], bad[0]])

    def _ask(self, task: BarrierTask, ranks: Sequence[int]) -> list[Command]:
        self._asked = _Asked(task, set(ranks))
        return [Send(rank, task) for rank in ranks]

    def _finish(self, asked: _Asked, now_ms: float, stand: Callable[[], Position]) -> list[Command]:
        """All answers are there."""
        match asked.evaluation or asked.task:
            case Evaluate(number=number) as task if asked.holders and not asked.is_cut:
                # Machine 0 has the first ranks, and the metrics of all machines.
                self._asked = _Asked(
                    MergeMetrics(number), {min(asked.holders)}, asked.results, asked.arrays, evaluation=task
                )
                return [Send(min(asked.holders), self._asked.task)]
            case Evaluate(epoch, _, int(global_step)):
                self.owed_step = asked.is_cut
                means = evaluation_means(asked.results)
                return [] if asked.is_cut else [EvaluationEnded(global_step, epoch, means, asked.arrays)]
            case Evaluate():
                metrics = replace(self._ended.pop(0), owes_evaluation=asked.is_cut)
                if not asked.is_cut:
                    means = evaluation_means(asked.results)
                    metrics = replace(metrics, eval=means, eval_arrays=asked.arrays)
                return self._report(metrics)
            # An epoch whose end was read meanwhile is evaluated and reported first; then it is captured anew.
            case SaveState() as task if not self._ended:
                return [self._save(task, now_ms, stand)]
        return []

    def _report(self, metrics: EpochMetrics) -> list[Command]:
        """Report an epoch, and judge it."""
        commands: list[Command] = [EpochEnded(metrics)]
        self.owed_epoch = metrics if metrics.owes_evaluation else None
        self._best_before[metrics.epoch] = self._best
        monitor = self._tasks.monitor
        if monitor is not None:
            evaluates = self._tasks.evaluates_epochs
            self._best, error = judge(self._best, monitor, metrics, evaluates=evaluates)
            self._is_best = self._best.epoch == metrics.epoch and self._tasks.keeps_best
            if error is not None:
                commands.append(Fail(error, kind="option"))
        self._wants_save |= self._tasks.saves(metrics.epoch)
        return commands

    def _save(self, capture: SaveState, now_ms: float, stand: Callable[[], Position]) -> Command:
        is_due, self._wants_save = self._wants_save, False
        is_best, self._is_best = self._is_best, False
        self.versions += is_due
        self._answered = self._asked_wishes
        position = stand()
        if is_due:
            self.saves.saved(now_ms, position.global_step)
            if self._budget is not None:
                self._budget.saved(self._begin_ms, now_ms)
        version = self.versions if is_due else None
        return Save(capture.number, position, version, self._answered, capture.model, is_best)
