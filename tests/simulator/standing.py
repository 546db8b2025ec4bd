"""The judge of standstills: what is done while all ranks stand still, and that nobody moves meanwhile."""

from __future__ import annotations

import math
from dataclasses import replace

from flowdp.policy.interval import MINUTE_MS, SHARE
from flowdp.policy.monitor import Best
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import EvaluationEnded, Finish, RoundEnded, Save
from flowdp.protocol.messages import (
    BarrierTask,
    CopyReplica,
    Evaluate,
    Evaluation,
    Outcome,
    SaveState,
    Settle,
    TaskDone,
)
from flowdp.protocol.position import Position
from tests.simulator.effect import Effect, Memory
from tests.simulator.scenario import Scenario
from tests.simulator.violation import Violation

__all__ = ["Standing"]


class Standing:
    """Watches the standstills of one run.

    Args:
        scenario: The run.
        effect: What was trained.
        memory: What had come of the run that it continues.

    Attributes:
        saves: The positions that were saved, each with what the judges knew then.
        is_enough: The run is to end by its monitor.
        is_stopped: The user wants it to end.
        weightless: Ranks whose samples did not count in the last outcome.
        dead: Machines without a finite replica when the last round was held.
        travels: A mean of all machines may be on its way.
    """

    def __init__(self, scenario: Scenario, effect: Effect, memory: Memory) -> None:
        self.saves: list[tuple[Save, Memory]] = []
        self.is_stopped = False
        self._scenario = scenario
        self._effect = effect
        self._tasks = scenario.config.tasks
        self._epochs = memory.epochs
        self._round = memory.round
        self._best = memory.best
        self._best_before: dict[int, Best] = {}  # each epoch
        self._versions = memory.versions
        self._saved_step = -1  # the last checkpoint's
        self._saved_ms = 0.0
        self._first_step = memory.global_step
        self._serving: dict[int, BarrierTask] = {}
        self._bad: set[int] = set()  # ranks with NaN or inf parameters, whoever knows
        self._told_bad: set[int] = set()  # those of which an outcome has told
        self.weightless: set[int] = set()
        self._left_out: set[int] = set()  # those whose gradients devices have left out: their reports tell
        self._unseen: set[int] = set()  # those that went bad since the last outcome, as devices alone know
        self._heard: set[int] = set()  # those of which an acknowledgment has told
        self._gone: set[int] = set()
        self._bad_snapshots: dict[int, int] = {}  # rank -> round of a snapshot that it took then
        self._machine_of = scenario.config.machine_of
        self._nan: set[int] = set()  # ranks whose replica is not finite now
        self.dead: set[int] = set()
        self.travels = False
        self._is_settling = False
        self._captures = 0
        self._results: dict[int, tuple[float, float]] = {}  # of the evaluation: batch -> samples, value
        self._evaluated: int | None = None  # epoch of the evaluation
        self._evaluation: Evaluate | None = None
        self._evaluated_step = -1  # the last evaluation's by steps
        self._inherited = memory.owed_epoch, memory.owed_step  # evaluations that are owed from the beginning
        self._owed_epoch: EpochMetrics | None = None
        self._is_best = False
        self._unwritten = False  # the last checkpoint
        self._allowed_ms = 0.0  # the latest time from which the next one is allowed
        self._begin_ms = 0.0
        self._asked_checkpoints = False  # by the user
        self._early: str | None = None  # a checkpoint by steps or minutes while one was being written
        self._waiting: dict[str, int] = {}  # what is due -> rounds since
        self._wished = self._answered = 0  # snapshots

    @property
    def is_enough(self) -> bool:
        """What is monitored has not got better for long enough."""
        monitor = self._tasks.monitor
        return monitor is not None and monitor.patience is not None and self._best.bad >= monitor.patience

    # ------------------------------------------------------------------ standing still
    def begins(self, now_ms: float) -> None:
        """All ranks are ready."""
        self._saved_ms = now_ms
        if any(self._inherited):
            self._waiting["evaluation"] = 0

    def ordered(self, rank: int, task: BarrierTask, stirs: str) -> None:
        """The coordinator orders a barrier task.

        Args:
            rank: Whom.
            task: What.
            stirs: Who does not stand still, and how; "" where all do.
        """
        if stirs:
            raise Violation("S18", f"{task} is ordered, and {stirs}")
        bad = self._bad if self._scenario.config.policy != "exact" else set()
        if self.travels != isinstance(task, Settle) and not self._is_settling:
            raise Violation("S28", f"{task} is ordered, and a mean is on its way: {self.travels}")
        if bad and not isinstance(task, CopyReplica | Settle):
            raise Violation("S21", f"{task} is ordered, and bad are {bad}")
        if any(other != task for other in self._serving.values()):
            raise Violation("S18", f"{task} is ordered while {self._serving} is out")
        self._serving[rank] = task
        match task:
            case Evaluate():
                if self.is_stopped or not self._is_due(task):
                    raise Violation("S22", f"{task} is not due")
                if task != self._evaluation:
                    self._evaluation, self._evaluated, self._results = task, task.epoch, {}
            case SaveState():
                self._captures = task.number + 1
            case CopyReplica():
                self._judge_donor(rank, task)
            case Settle():
                self._is_settling = True

    def _judge_donor(self, rank: int, task: CopyReplica) -> None:
        if task.donor in self._bad or (rank != task.donor and rank not in self._told_bad | self._heard):
            raise Violation("S21", f"rank {rank} is to adopt rank {task.donor}, bad are {self._bad}")
        home = self._machine_of
        is_far = task.receiver is not None
        patient = rank if task.receiver is None else task.receiver
        healthy = [r for r, machine in enumerate(home) if machine == home[patient] and r not in self._bad]
        if is_far == bool(healthy) or is_far == (home[task.donor] == home[patient]):
            raise Violation("S21", f"rank {rank} gets {task}, and healthy on its machine are {healthy}")

    def _is_due(self, task: Evaluate) -> bool:
        """Whether an evaluation is due: at an epoch's end, or once for each further so many steps."""
        if task.global_step is None or not self._tasks.evaluates_steps:
            return not self._tasks.evaluates_steps and self._tasks.evaluates(task.epoch)
        return task.global_step == self._effect.global_step and self._is_step_due(task.global_step)

    def _is_step_due(self, at: int) -> bool:
        """Whether an evaluation by steps is due, and was not made."""
        plan = self._tasks.evaluation
        if plan is None or plan.unit == "epoch":
            return False
        if at == self._first_step:
            return self._inherited[1] and self._evaluated_step != at
        last = max(self._evaluated_step, self._first_step)
        return at // plan.every > last // plan.every

    def evaluation_ended(self, event: EvaluationEnded) -> None:
        """An evaluation by steps has ended."""
        asked = self._evaluation
        is_whole = len(self._results) == self._scenario.eval_batches
        if asked is None or asked.global_step != event.global_step or not is_whole or self._serving:
            raise Violation("S22", f"{event} is reported with {asked} and {self._results}")
        if event.global_step == self._evaluated_step:
            raise Violation("S22", f"{event} is reported twice")
        weight = sum(count for count, _ in self._results.values())
        expected = math.fsum(count * value for count, value in self._results.values()) / weight
        if not math.isclose(event.eval["score"], expected, rel_tol=1e-9, abs_tol=1e-12):
            raise Violation("S22", f"{event} is reported, its evaluation says {expected}")
        self._evaluated_step = event.global_step
        self._inherited = None, False
        self._waiting.pop("evaluation", None)

    def answered(self, fact: TaskDone) -> None:
        """The coordinator hears of the end of a barrier task."""
        task = self._serving.pop(fact.rank, None)  # it may have left since
        if isinstance(task, Settle) and not self._serving:
            self.travels = self._is_settling = False

    def told(self, rank: int, what: object) -> None:
        """The coordinator tells a rank to begin something that is no barrier task."""
        if self._serving:
            raise Violation("S18", f"rank {rank} and {what} while {self._serving} is out")
        if rank in self._heard:
            raise Violation("S21", f"rank {rank} and {what}, and it is known to be bad")

    def moves(self, rank: int, what: object) -> None:
        """A rank begins something that is no barrier task."""
        if self._serving:
            raise Violation("S18", f"rank {rank} and {what} while {self._serving} is out")
        if rank in self._told_bad:
            raise Violation("S21", f"rank {rank} and {what}, and nobody has healed it")

    def is_gone(self, rank: int) -> None:
        """A rank has left."""
        self._gone.add(rank)
        self._serving.pop(rank, None)
        for ranks in (self._told_bad, self._unseen, self._heard, self._bad):
            ranks.discard(rank)

    # ------------------------------------------------------------------ numbers gone bad
    def goes_bad(self, rank: int, *, is_late: bool = False) -> None:
        """The replica of a rank gets NaN or inf parameters.

        Args:
            rank: Rank of the replica.
            is_late: Its device leaves it out of the mean, and its host hears of it behind that.
        """
        self._bad.add(rank)
        self._nan.add(rank)
        if is_late:
            self._unseen.add(rank)

    def met(self, outcome: Outcome) -> None:
        """A round is held."""
        members = set(outcome.members)
        self._round = outcome.round + (not outcome.inner)
        self.travels |= self._scenario.config.overlaps and not outcome.inner
        bad = self._bad.intersection(members) - self._unseen
        self.weightless, silent = bad, self._unseen.intersection(members)
        finite = {self._machine_of[rank] for rank in members - (self._nan - silent)}
        self.dead = {self._machine_of[rank] for rank in members} - finite
        if any(outcome.samples[rank] for rank in members - self._nan):
            self._nan -= members
        self._nan -= silent
        if bad != set(outcome.bad) or any(outcome.samples[rank] for rank in self.weightless):
            raise Violation("S21", f"bad are {bad}, and the outcome is {outcome}")
        if self._scenario.config.policy == "exact":
            self._bad -= bad | silent  # a gradient was, and is left out; of some an acknowledgment tells
            self._left_out |= silent
            self._nan -= bad
        elif not outcome.inner:
            self._told_bad |= bad
        self._unseen -= members

    def acknowledged(self, rank: int) -> None:
        """The coordinator hears that a rank was left out of the last mean before it."""
        if rank in self._gone:
            return  # this acknowledgment was on its way when the rank left
        if rank not in self._bad | self._left_out:
            raise Violation("S21", f"rank {rank} says that it is bad, and it is not")
        self._heard |= self._bad & {rank}
        self._left_out.discard(rank)

    def snapped(self, rank: int, round: int, samples: int) -> None:
        """A rank puts a snapshot down."""
        if rank in self._bad:
            self._bad_snapshots[rank] = round
            if samples:
                raise Violation("S21", f"the snapshot of rank {rank} is bad, and weighs {samples} samples")

    def averages(self, round: int) -> None:
        """The snapshots of a round are averaged."""
        for rank, number in self._bad_snapshots.items():
            if number == round:
                raise Violation("S21", f"the snapshot of rank {rank} in round {round} is bad, and averaged")

    def is_bad(self, rank: int) -> bool:
        """Whether the replica of a rank has NaN or inf parameters."""
        return rank in self._bad

    def healed(self, rank: int) -> None:
        """A rank has become what another one is."""
        for ranks in (self._bad, self._nan, self._told_bad, self._heard):
            ranks.discard(rank)

    # ------------------------------------------------------------------ what is due
    def wishes(self, what: str) -> None:
        """The user asks for something, while the run can still do it."""
        if what == "snapshot":
            self._wished += 1
        self._asked_checkpoints |= what == "checkpoint"
        self._waiting.setdefault(what, 0)

    def _is_put_off(self, now_ms: float) -> bool:
        """Whether a checkpoint by steps or minutes may still wait for the one before."""
        save = self._tasks.save
        may_wait = save is not None and save.unit != "epoch"
        return may_wait and (self._unwritten or now_ms < self._allowed_ms)

    def written(self, version: int, now_ms: float) -> None:
        """A checkpoint is written."""
        if version == self._versions:
            self._unwritten = False
            # At most all of the time from the order to the file was lost, until the coordinator hears of it.
            heard_ms = now_ms + self._scenario.latency_ms
            self._allowed_ms = max(heard_ms, self._begin_ms + (heard_ms - self._begin_ms) / SHARE)

    def reported(self, record: RoundEnded, now_ms: float) -> None:
        """Rounds are over."""
        if any(self._inherited):
            raise Violation("S22", f"{record} comes before the evaluation that the life before owes")
        if self._early is not None:
            raise Violation("S25", self._early)
        if self._is_put_off(now_ms) and "checkpoint" in self._waiting and not self._asked_checkpoints:
            self._waiting["checkpoint"] = 0
        for what in self._waiting:
            self._waiting[what] += 1
            if self._waiting[what] > self._scenario.patience:
                raise Violation("L6", f"a {what} was due {self._scenario.patience} rounds ago")
        plan = self._tasks.evaluation
        if self.is_stopped:
            self._waiting.pop("evaluation", None)
        elif plan is not None and plan.unit == "step":
            last = max(self._evaluated_step, self._first_step)
            if record.global_step // plan.every > last // plan.every:
                self._waiting.setdefault("evaluation", 0)
        save = self._tasks.save
        if save is None:
            return
        last = max(self._saved_step, self._first_step)
        by_step = save.unit == "step" and record.global_step // save.every > last // save.every
        by_time = save.unit == "minute" and now_ms - self._saved_ms >= save.every * MINUTE_MS
        if by_step or (by_time and record.global_step != self._saved_step):
            self._waiting.setdefault("checkpoint", 0)

    def evaluated(self, result: Evaluation) -> None:
        """A rank has evaluated a batch."""
        batch, samples, values = result
        if batch in self._results:
            raise Violation("S22", f"batch {batch} of the evaluation of epoch {self._evaluated} comes twice")
        self._results[batch] = (samples, values[0][1])

    def ended(self, metrics: EpochMetrics) -> None:
        """An epoch is complete."""
        self._epochs = metrics.epoch + 1
        if self.is_enough:
            raise Violation("S24", f"epoch {metrics.epoch} comes after {self._best}")
        expected: float | None = None
        if self._tasks.evaluates(metrics.epoch) and not self.is_stopped:
            is_whole = self._evaluated == metrics.epoch and len(self._results) == self._scenario.eval_batches
            if not is_whole:
                raise Violation(
                    "S22", f"epoch {metrics.epoch} is reported with the evaluation {self._results}"
                )
            weight = sum(count for count, _ in self._results.values())
            expected = math.fsum(count * value for count, value in self._results.values()) / weight
        told = metrics.eval.get("score")
        if (told is None) != (expected is None) or (
            told is not None and not math.isclose(told, expected or 0.0, rel_tol=1e-9, abs_tol=1e-12)
        ):
            raise Violation("S22", f"epoch {metrics.epoch} says {metrics.eval}, its evaluation {expected}")
        is_owed = expected is None and self._tasks.evaluates(metrics.epoch)
        if metrics.owes_evaluation != is_owed:
            raise Violation("S22", f"epoch {metrics.epoch} owes an evaluation: {is_owed}, not {metrics}")
        before = self._inherited[0]
        if before is not None and repr(replace(metrics, eval={}, owes_evaluation=True)) != repr(before):
            raise Violation("S22", f"{before} is reported again as {metrics}")
        if before is not None:
            self._waiting.pop("evaluation", None)
        self._inherited = None, self._inherited[1]
        self._owed_epoch = metrics if is_owed else None
        self._judge_best(metrics.epoch, told if self._tasks.evaluates_epochs else metrics.loss)
        if self._tasks.saves(metrics.epoch):
            self._waiting.setdefault("checkpoint", 0)

    def _judge_best(self, epoch: int, value: float | None) -> None:
        monitor, self._best_before[epoch] = self._tasks.monitor, self._best
        if monitor is None or value is None:
            return
        best, least = self._best, monitor.min_delta
        if best.value is None:
            beaten = True
        else:
            beaten = value < best.value - least if monitor.mode == "min" else value > best.value + least
        if beaten:
            self._best, self._is_best = Best(value, epoch), True
        else:
            self._best, self._is_best = Best(best.value, best.epoch, best.bad + 1), False

    # ------------------------------------------------------------------ checkpoints
    def saved(self, save: Save, now_ms: float) -> None:
        """All have put down their part of a checkpoint."""
        if self._serving or save.capture != self._captures - 1:
            raise Violation("S18", f"{save} while {self._serving} is out")
        position = save.position
        self._effect.judge_position(position)
        self._judge_owed(position)
        epochs = self._epochs_of(position.open[0].epoch if position.open else -1)
        if position.done != epochs or position.round < self._round:
            raise Violation(
                "S19", f"{epochs} epochs and {self._round} rounds are over, not those of {position}"
            )
        # An epoch that was cut short is reported again, and judged again.
        best = self._best_before.get(position.done, self._best)
        if repr(position.best) != repr(best):
            raise Violation("S19", f"the best is {best}, not that of {position}")
        is_best = self._is_best and self._tasks.keeps_best
        if save.is_best != is_best:
            raise Violation("S24", f"{save} says that it is the best: {save.is_best}")
        self._is_best = False
        self._answered = save.snapshots
        if self._answered > self._wished:
            raise Violation("S12", f"{save} answers more than {self._wished} wishes")
        if self._answered == self._wished:
            self._waiting.pop("snapshot", None)
        if save.version is not None:
            if self._unwritten and self._tasks.save is not None and self._tasks.save.unit != "epoch":
                # A round behind it shows that it was not the last one of the run.
                self._early = None if self._asked_checkpoints else f"{save} while one is being written"
            if not self._unwritten:
                self._begin_ms = now_ms - self._scenario.capture_ms - 2 * self._scenario.way_ms
            self._unwritten, self._asked_checkpoints = True, False
            self._versions += 1
            self._saved_step, self._saved_ms = position.global_step, now_ms
            self._waiting.pop("checkpoint", None)
        if (save.version or self._versions, position.versions) != (self._versions, self._versions):
            raise Violation("S23", f"{save} is not checkpoint {self._versions}")
        self.saves.append((save, self._memory(position, best)))

    def _judge_owed(self, position: Position) -> None:
        """A position names the evaluation that a stop has taken. An epoch that was cut is reported anew."""
        epoch = self._owed_epoch if self._owed_epoch and self._owed_epoch.epoch < position.done else None
        expected = epoch, self.is_stopped and self._is_step_due(position.global_step)
        if repr((position.owed_epoch, position.owed_step)) != repr(expected):
            raise Violation("S22", f"{expected} is owed, not what {position} says")

    def _epochs_of(self, first_open: int) -> int:
        """Complete epochs; one that was reported and stands open was cut short by the run's limit."""
        # Of a stream nobody may know yet that there is no more.
        is_cut = self._scenario.config.batches is None or (
            self._scenario.dealt(first_open) < self._scenario.length(first_open)
        )
        return first_open if 0 <= first_open < self._epochs and is_cut else self._epochs

    def _memory(self, position: Position, best: Best) -> Memory:
        effect = self._effect
        return Memory(
            effect.trained.copy(),
            effect.steps_in.copy(),
            effect.global_step,
            position.done,
            self._round,
            self._versions,
            best,
            position.owed_epoch,
            position.owed_step,
        )

    def stands(self, what: object) -> None:
        """The run pauses or ends."""
        if self.travels:
            raise Violation("S28", f"{what}, and a mean is on its way")

    def over(self, finish: Finish) -> None:
        """The run is over."""
        if finish.error is not None:
            return
        self.stands(finish)
        if self._bad and self._scenario.config.policy != "exact":
            raise Violation("S21", f"the run ends, and bad are {self._bad}")
        if self._left_out - self._gone:
            raise Violation("S21", f"the run ends, and nobody has told of {self._left_out}")
        if finish.position is not None:
            self._effect.judge_position(finish.position)
            self._judge_owed(finish.position)
        if self._answered < self._wished:
            raise Violation("L6", f"{self._wished} snapshots were asked for, {self._answered} taken")
        if self.is_stopped:
            self._waiting.pop("evaluation", None)
        if self._waiting:
            raise Violation("L6", f"the run ends without {sorted(self._waiting)}")
        is_saved = self._saved_step == finish.global_step
        if self._tasks.save is not None and not is_saved:
            raise Violation("S23", f"the last checkpoint is of step {self._saved_step}: {finish}")
