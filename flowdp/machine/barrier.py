"""Tasks at a barrier of all ranks: means on their way, healing replicas, evaluations, state for checkpoints.

Between two rounds, with nothing dealt, the replicas are equal and orders cannot be obeyed in different
rounds: then an order in the inbox is enough. One thing is done after the other, each in two halves, the
orders and the answers of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from flowdp.errors import ProtocolError
from flowdp.machine.config import CoordinatorConfig
from flowdp.policy.interval import Schedule
from flowdp.policy.monitor import Best, judge
from flowdp.policy.tally import EpochMetrics, MetricArray, evaluation_means
from flowdp.protocol.commands import Command, CutEvaluation, EvaluationEnded, Fail, Save, SavesPutOff, Send
from flowdp.protocol.messages import (
    BarrierTask,
    CopyReplica,
    Evaluate,
    Evaluation,
    SaveState,
    Settle,
    TaskDone,
)
from flowdp.protocol.position import Position

__all__ = ["Barrier"]


@dataclass(slots=True)
class _Asked:
    """An order that is out.

    Attributes:
        task: The order.
        waits_for: Ranks that have not answered.
        begin_ms: Time since which all ranks stand still for it.
        wishes: Wishes for a snapshot before it.
        results: Results of the evaluation so far.
        arrays: Arrays of it.
        holders: Ranks that have metrics to be merged.
        is_cut: The evaluation was cut short.
    """

    task: BarrierTask
    waits_for: set[int]
    begin_ms: float
    wishes: int
    results: list[Evaluation] = field(default_factory=list)
    arrays: dict[str, MetricArray] = field(default_factory=dict)
    holders: set[int] = field(default_factory=set)
    is_cut: bool = False


class Barrier:
    """Decides which tasks are due, and runs them at a barrier.

    Args:
        config: The run.

    Attributes:
        bad: Ranks with NaN or inf parameters, which are to be healed -> (epoch, batch) of the first, if
            known.
        versions: Checkpoints so far, those of the run that this one continues included.
        saves: Checkpoints that are due by steps or minutes.
        evaluations: Evaluations that are due by steps.
        owed_epoch: Record of the epoch whose evaluation a stop has left out or cut short.
        owed_step: The same has happened to an evaluation by steps.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        tasks, start = config.tasks, config.start or Position(config.world_size)
        self.versions = start.versions
        self.owed_epoch: EpochMetrics | None = None
        self.owed_step = False
        self._config, self._tasks = config, tasks
        self._best = start.best
        self._kept = Best()  # of `keep_best`
        self._best_before: dict[int, Best] = {}  # each epoch that was reported
        self._is_best = False  # the epoch reported last, whose state is kept
        # Complete epochs that are not reported yet, or not with their evaluation.
        self._ended = [] if start.owed_epoch is None else [start.owed_epoch]
        self.bad: dict[int, tuple[int, int] | None] = {}
        self._is_unsettled = self._wants_settling = False  # a mean may be on its way; shall be brought in
        self._asked: _Asked | None = None
        self._evaluations = self._captures = 0
        self._wishes = self._answered = 0  # for a snapshot
        self._is_told = False  # that checkpoints are put off
        owes = start.owed_epoch is not None or start.owed_step
        # Behind an owed evaluation the same step is saved once more.
        self.saves = Schedule(tasks.save, start.global_step if tasks.is_saved and not owes else -1)
        self.evaluations = Schedule(tasks.evaluation)
        if start.owed_step and start.owed_epoch is None and tasks.evaluates_steps:
            self.evaluations.ask()

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
        wants_capture = self.saves.is_wanted or self._is_best or self._answered < self._wishes
        is_begun = self._wants_settling or bool(self._asked or self.bad or self._ended)
        return is_begun or self.evaluations.is_wanted or wants_capture

    @property
    def owes(self) -> bool:
        """Whether an evaluation is left to the run that goes on from here."""
        return self.owed_epoch is not None or self.owed_step

    @property
    def is_asked(self) -> bool:
        """Whether an answer is out: every rank's part is needed."""
        return self._asked is not None

    # ------------------------------------------------------------------ due tasks
    def wish_snapshot(self) -> None:
        """The user asks for a snapshot."""
        self._wishes += 1

    def end(self, global_step: int) -> bool:
        """The run is about to end; whether a last checkpoint comes first."""
        if self.saves.is_last_due(global_step):
            self.saves.ask()
        return self.saves.is_wanted

    def settle(self) -> bool:
        """The run is about to end or to pause; whether a mean that may be on its way is brought in first."""
        self._wants_settling = self._is_unsettled
        return self._wants_settling

    def ended(self, metrics: EpochMetrics) -> list[Command]:
        """An epoch is complete; it is reported at once, or when its evaluation is."""
        if not self._ended and not self._tasks.halts(metrics.epoch):
            return [metrics, *self._check_name(metrics)]
        self._ended.append(metrics)
        return []

    def begin(self, now_ms: float, global_step: int) -> None:
        """Plan the first tasks that are due by steps or minutes."""
        self.saves.begin(now_ms, global_step)
        self.evaluations.begin(now_ms, global_step)

    def look(self, now_ms: float, global_step: int) -> list[Command]:
        """See whether a checkpoint or an evaluation is due by steps or minutes.

        The first time that a checkpoint is put off for its known cost a command tells of it.
        """
        self.saves.look(now_ms, global_step)
        self.evaluations.look(now_ms, global_step)
        plan, cost = self._tasks.save, self.saves.budget.cost  # no cost: the file before is being written
        if self._is_told or not self.saves.is_put_off or plan is None or cost is None:
            return []
        self._is_told = True
        return [SavesPutOff(plan, cost)]

    # ------------------------------------------------------------------ answers
    def trained(self) -> None:
        """Rounds have ended."""
        self._is_unsettled = self._config.overlaps

    def written(self, version: int, now_ms: float) -> None:
        """The writer is done with this checkpoint and all before it."""
        if version == self.versions:
            self.saves.budget.written(now_ms)

    def take(self, fact: TaskDone) -> None:
        """Take an answer.

        Raises:
            ProtocolError: No such task of this rank is out.
        """
        asked = self._asked
        if asked is None or fact.rank not in asked.waits_for:
            raise ProtocolError(f"unexpected {fact}: {asked} is under way")
        asked.waits_for.discard(fact.rank)
        asked.results += fact.results
        asked.arrays |= fact.arrays
        asked.holders |= {fact.rank} if fact.has_metrics else set()
        if isinstance(asked.task, CopyReplica):
            self.bad.pop(fact.rank, None)

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
            if asked is None:
                commands += self._next(now_ms, present, stand, leaves=leaves)
            elif not asked.waits_for:
                self._asked = None
                commands += self._finish(asked, now_ms, stand)
            else:
                if leaves and isinstance(asked.task, Evaluate) and not asked.is_cut:
                    asked.is_cut = True
                    commands.append(CutEvaluation())
                return commands
        return commands

    def _next(
        self, now_ms: float, present: Sequence[int], stand: Callable[[], Position], *, leaves: bool
    ) -> list[Command]:
        """Begin the first task."""
        if self._is_unsettled:
            self._is_unsettled = self._wants_settling = False
            return self._ask(Settle(), present, now_ms)
        if self.bad:
            return self._heal(present, now_ms)
        if self._ended:
            metrics = self._ended[0]
            is_due = self._tasks.evaluates(metrics.epoch)
            if is_due and not leaves:
                return self._evaluate(metrics.epoch, None, present, now_ms)
            del self._ended[0]
            return self._report(replace(metrics, owes_evaluation=is_due))
        if self.evaluations.is_wanted:
            # Before a checkpoint of the step: a run that resumes there is behind it.
            position = stand()
            self.evaluations.saved(now_ms, position.global_step)
            self.owed_step = leaves
            return [] if leaves else self._evaluate(position.done, position.global_step, present, now_ms)
        self._captures += 1
        return self._ask(SaveState(self._captures - 1, present[0], self._is_best), present, now_ms)

    def _evaluate(
        self, epoch: int, global_step: int | None, present: Sequence[int], now_ms: float
    ) -> list[Command]:
        self._evaluations += 1
        return self._ask(Evaluate(epoch, self._evaluations - 1, global_step), present, now_ms)

    def _heal(self, present: Sequence[int], now_ms: float) -> list[Command]:
        """Heal the bad replicas of a machine by one that it has, or the first of them by another's."""
        bad = [rank for rank in present if rank in self.bad]
        machine_of = self._config.machine_of
        healthy = [rank for rank in present if rank not in self.bad]
        there = [rank for rank in healthy if machine_of[rank] == machine_of[bad[0]]]
        healed = [rank for rank in bad if machine_of[rank] == machine_of[bad[0]]] if there else bad[:1]
        if there:
            return self._ask(CopyReplica(there[0]), healed, now_ms)
        return self._ask(CopyReplica(healthy[0], receiver=bad[0]), [healthy[0], bad[0]], now_ms)

    def _ask(self, task: BarrierTask, ranks: Iterable[int], now_ms: float) -> list[Command]:
        self._asked = _Asked(task, set(ranks), now_ms, self._wishes)
        return [Send(rank, task) for rank in ranks]

    def _finish(self, asked: _Asked, now_ms: float, stand: Callable[[], Position]) -> list[Command]:
        """All answers are there."""
        match asked.task:
            case Evaluate() as task if asked.holders and not asked.is_cut:
                # Machine 0 has the first ranks, and the metrics of all.
                first, asked.holders = min(asked.holders), set()
                asked.task, asked.waits_for, self._asked = replace(task, merges=True), {first}, asked
                return [Send(first, asked.task)]
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
                return [self._save(task, asked, now_ms, stand)]
        return []

    def _report(self, metrics: EpochMetrics) -> list[Command]:
        """Report an epoch, and judge it."""
        commands: list[Command] = [metrics]
        self.owed_epoch = metrics if metrics.owes_evaluation else None
        self._best_before[metrics.epoch] = self._best
        monitor = self._tasks.monitor
        if monitor is not None:
            evaluates = self._tasks.evaluates_epochs
            self._best, error = judge(self._best, monitor, metrics, evaluates=evaluates)
            self._is_best = self._best.epoch == metrics.epoch and self._tasks.keeps_best
            if error is not None:
                commands.append(Fail(error, kind="option"))
        commands += self._check_name(metrics)
        if self._tasks.saves(metrics.epoch):
            self.saves.ask()
        return commands

    def _check_name(self, metrics: EpochMetrics) -> list[Command]:
        """Check that there is a metric of the name that `keep_best` has."""
        if (monitor := self._tasks.keep_best) is None:
            return []
        self._kept, error = judge(self._kept, monitor, metrics, evaluates=self._tasks.evaluates_epochs)
        return [] if error is None else [Fail(f"keep_best: {error}", kind="option")]

    def _save(
        self, capture: SaveState, asked: _Asked, now_ms: float, stand: Callable[[], Position]
    ) -> Command:
        is_due, is_best, is_between = self.saves.is_wanted, self._is_best, self.saves.is_between
        self._is_best, self._answered = False, asked.wishes
        self.versions += is_due
        position = stand()
        if is_due:
            self.saves.saved(now_ms, position.global_step)
            self.saves.budget.saved(asked.begin_ms, now_ms)
        version = self.versions if is_due else None
        return Save(capture.number, position, version, self._answered, capture.model, is_best, is_between)
