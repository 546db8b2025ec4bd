"""The worker's thread: it trains by the orders of its machine.

Between two steps of a round it waits for no other thread: it looks at its inbox, takes the next batch, and
trains it. One message goes up per order, not per step; on a device that runs behind its host
it goes up when the device is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from flowdp.collective.base import NOTHING
from flowdp.device import worker_context
from flowdp.device.memory import keep_memory
from flowdp.engine.barrier_tasks import BarrierTasks, described
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.meter import Meter, OrderSums, RankActivity
from flowdp.engine.micro_batches import MicroBatcher
from flowdp.engine.nan_guard import NanGuard
from flowdp.engine.parts import Mail, MeetingPoint, RankParts, Services
from flowdp.errors import CollectiveAborted, DeviceError, StepError
from flowdp.machine.worker import Apply, Done, Idle, Snapshot, Step, WorkerMachine
from flowdp.options import FailureOptions
from flowdp.policy.efficiency import Activity
from flowdp.protocol.messages import (
    Arrival,
    BarrierTask,
    BatchReady,
    Exiting,
    Leave,
    Outcome,
    SnapshotReady,
    StartEpoch,
    StepsDone,
    SyncAck,
    WorkerReady,
)
from flowdp.protocol.position import Position
from flowdp.replica.joint_step import JointStep
from flowdp.replica.replica import Replica

__all__ = ["Worker"]

CAPTURED_BY = 16
"""Steps of a rank after which its graphs are there, as a rule, and have taken their memory."""


class Worker:
    """The body of one worker thread.

    Args:
        parts: The rank's own.
        replicas: Replicas of all ranks here: one with NaN or infinite parameters copies a healthy one.
        services: Objects that the threads of the run share.
        meeting: Gate, collective and snapshots.
        failures: Whether the others continue where this rank fails by itself, and whether NaNs are errors.
        start: Position of a run that is resumed.

    Attributes:
        parts: As given.
        replica: Its replica.
        machine: Decides what comes next.
        current: The rank's record for the user's code.
        activity: What it is doing, for others to see.
    """

    def __init__(
        self,
        parts: RankParts,
        replicas: Sequence[Replica],
        services: Services,
        meeting: MeetingPoint,
        failures: FailureOptions,
        start: Position | None = None,
    ) -> None:
        self.parts, self.replica = parts, parts.replica
        replica, lane, source = parts.replica, parts.replica.lane, services.source
        spans = None if services.timeline is None else services.timeline.ranks[parts.index]
        self.activity = RankActivity(spans)
        self._services, self._meeting = services, meeting
        self._post = services.requests.inbox.post
        self._goes_on = failures.on_failure == "continue"
        # Where the others continue without a rank that raises, the batches since its last mean are dealt
        # again.
        is_known = meeting.snapshots is not None or (self._goes_on and failures.on_nan == "raise")
        is_late = lane.is_async and meeting.collective.masks and not is_known
        global_step, epoch = (0, 0) if start is None else (start.global_step, start.last_epoch)
        self.machine = WorkerMachine(parts.rank, global_step)
        with lane.on(lane.compute):
            captured = replica.captured
            self._meter = Meter(lane, None if captured is None else captured.watch, spans)
        self.current = worker_context.CurrentWorker(  # a resumed run may evaluate before its first step
            parts.rank,
            replica.device,
            replica.module,
            epoch=epoch,
            global_step=global_step,
            lr=replica.learning_rate.value,
            sink=self._meter.scalar,
            steps=replica.steps,
        )
        self._place = ErrorContext(self.current, source)
        self._batcher = MicroBatcher(parts.feed, source, replica, self.current, self._meter, self._place)
        self._numbers = NanGuard(
            replica, self.machine, self._meter, self._place, failures.on_nan, is_late=is_late
        )
        self._tasks = BarrierTasks(parts, replicas, services, meeting)
        self._part_loss: Tensor | None = None  # of the step that comes behind the gate (exact)

    @property
    def step(self) -> Step | None:
        """The step that it is in, or was in last; None while it waits for orders or does a barrier task."""
        return None if self.activity.is_idle or self.activity.task else self._place.step

    def run(self) -> None:
        """Work until ordered to leave; errors are reported, never raised.

        Threads:
            The body of the worker's own thread.
        """
        error: str | None = None
        is_alone = False
        lane = self.replica.lane
        self.activity.begin()
        try:
            self.parts.pool.begin()
            worker_context.bind(self.current)
            # Backward runs in this thread, not in autograd's one per device: no wake-up on the way, ranks
            # that share a device do not queue there, and a hook finds the thread's own state.
            with lane.on(lane.compute), torch.autograd.set_multithreading_enabled(False):
                if self.replica.frozen is not None:
                    self.replica.frozen.begin()
                self._post(WorkerReady(self.parts.rank))
                self._loop()
        except BaseException as cause:
            keep_memory([lane])
            explained = self._place.explain(cause, self.activity.task)
            is_alone = self._goes_on and not self.activity.is_bound
            is_alone &= isinstance(explained, StepError | DeviceError)
            if is_alone:
                self._batcher.lose(self.parts.index)
                with suppress(Exception):  # a dead device tells nothing more
                    self._meter.settle()  # acknowledgments that wait for it
            failures = self._services.failures
            take = failures.hold if is_alone else failures.add
            error = take(explained, self.parts.rank)
        finally:
            self.replica.leave()
            self.activity.leave()
            self._post(Exiting(self.parts.rank, error, is_alone, self.machine.unreported_samples))

    def _loop(self) -> None:
        machine, inbox, batcher = self.machine, self.parts.inbox, self._batcher
        is_empty = inbox.is_empty
        handlers: dict[type, Callable[[Any], None]] = {
            Step: self._step,
            Arrival: self._enter,
            Done: self._close,
            Idle: self._idle,
            Snapshot: self._put_snapshot,
            Apply: self._apply,
        }
        while True:
            while not is_empty():
                self._read(inbox.get())
            if batcher.fed != machine.plans:
                batcher.follow(machine)
            action = machine.next(batcher.taken > 0)
            if isinstance(action, Leave):
                break
            handlers.get(type(action), self._serve)(action)  # the others are barrier tasks
        if action.reason is None:
            self._meter.settle()
            if self.replica.frozen is not None:
                self.replica.frozen.check()

    def _idle(self, _action: Idle) -> None:
        """Wait for an order, or for a `Throttle` that lets it go on with the one that it has."""
        self._meter.settle()
        self.activity.is_idle, start_s = True, perf_counter()
        self._read(self.parts.inbox.get())
        self.activity.is_idle = False
        self.activity.spent(Activity.IDLE if self.machine.order is None else Activity.GATE, start_s)
        self._meter.settle()

    def _read(self, mail: Mail | None) -> None:
        # A note says only that there is something to look at, and the loop looks.
        if mail is not None and not isinstance(mail, BatchReady):
            self.machine.handle(mail)

    def _step(self, step: Step) -> None:
        start_s = perf_counter()
        current, meter, replica, batcher = self.current, self._meter, self.replica, self._batcher
        self._place.step = step
        is_over = batcher.taken > 0 and batcher.is_last(step)  # its end was cut off meanwhile
        while not is_over:
            is_first = not batcher.samples
            micro = batcher.next(step)
            if micro is None:
                self._await_batch(start_s)
                return
            if is_first:
                if step.alone:
                    self.parts.pool.begin_alone()
                meter.begin(start_s)
                replica.learning_rate.advance(step.position, step.epoch, step.metrics)
                current.epoch, current.global_step = step.epoch, step.position
                current.lr = replica.learning_rate.value
                replica.begin(step.part)
            is_over = batcher.is_last(step)
            try:
                batcher.add(micro)
            except CollectiveAborted:
                if self._services.failures.first is None:
                    raise
                self._await_leave()  # another rank has failed before it came to a SyncBatchNorm
                return
        self.parts.feed.release()
        loss = replica.step_alone() if step.alone else replica.step(batcher.factor)
        current.local_step += step.alone or not replica.steps_at_gate
        if self._services.step_callbacks:
            if replica.captured is not None and loss is not None:
                loss = loss.clone()  # a graph writes to its own again, and a callback may keep it
            if replica.steps_at_gate:
                self._part_loss = loss
            else:
                self._call_back(loss, batcher.samples)
        meter.end(loss, batcher.samples, step, replica.update.take_norms(), replica.loss.step_weight)
        self.parts.pool.worked(meter.step_ms, batcher.samples, alone=step.alone)
        if meter.bad:
            self._numbers.check_losses()
        self.machine.trained(batcher.samples)
        batcher.end(step)

    def _call_back(self, loss: Tensor | None, samples: int) -> None:
        """Call the callbacks of steps; an error of theirs is one of this step."""
        current = self.current
        current.samples = samples
        for call in self._services.step_callbacks:
            try:
                call(current, loss)
            except BaseException as error:
                current.local_step -= 1  # the error names the step, which is counted already
                error.add_note(f"in {getattr(call, '__qualname__', call)}")
                raise

    def _await_batch(self, start_s: float) -> None:
        """Wait for a batch that was not read yet, or for an order; then the loop asks the machine anew."""
        # Inside a step the device's time is the step's; what is due can wait for its end.
        if self.parts.inbox.is_empty() and not self._batcher.taken:
            self._meter.settle()
        if (step := self._place.step) is not None:
            self.activity.awaited = step.epoch, step.batches[self._batcher.taken]
        self._read(self.parts.inbox.get())
        self.activity.awaited = None
        self._meter.waited(perf_counter() - start_s)

    def _enter(self, arrival: Arrival) -> None:
        self._meter.meet()
        window = arrival.window
        joint, collective = self._meeting.joint, self._meeting.collective
        if window is not None and not window.alone:
            self._advance_rates(arrival)  # the last arrival may take the step
        try:
            self._numbers.read()  # the verdict on the round before
            if self.replica.frozen is not None:
                self.replica.frozen.met(self.current.epoch)
            collective.prepare(self.parts.index, self._numbers.judge)
            self._numbers.decide()
            self.activity.is_bound = True
            outcome = self._meeting.gate.enter(self.machine.judged(arrival, self.replica.touched))
            if window is not None and window.alone and isinstance(joint, JointStep):
                self.parts.pool.begin()
                reading = joint.copy_step(self.parts.index, outcome)
            else:
                reading = collective.average(self.parts.index, outcome)
                if isinstance(joint, JointStep):
                    reading = joint.timed(reading, outcome)
        except CollectiveAborted:
            # Another rank failed, and the coordinator knows: its order to leave is on its way.
            self._await_leave()
            return
        self._meter.met(reading)
        self.current.round = outcome.round
        if window is not None and not window.alone:
            try:
                self._step_together(arrival, outcome)
            except CollectiveAborted:
                self._await_leave()  # another rank has failed in its step
                return
        else:
            self._advance_rates(arrival)
            if outcome.lr:
                self._rescale(outcome, outcome.global_step)
        if outcome.lr:  # behind the step of exact: a new scheduler begins with the next one
            self.replica.learning_rate.reschedule(outcome, self.current.epoch)
            self.current.lr = self.replica.learning_rate.value
        self.activity.moved()
        order, done = self.machine.order, self.machine.met(outcome)
        self._batcher.settle()
        self.activity.is_bound = False
        if done is not None:
            self._close(done, outcome, order)
        self._numbers.met()

    def _advance_rates(self, arrival: Arrival) -> None:
        """Set the rates of this position, on a rank without a step there, too: all have, and save, the same.

        A round without any steps (async) may stand before an epoch whose scheduler waits for a metric.
        """
        order = self.machine.order
        if order is not None and order.sync is not None and order.sync.steps:
            self.current.epoch = order.epoch
            self.replica.learning_rate.advance(arrival.global_step, order.epoch, order.metrics)

    def _close(self, done: Done, outcome: Outcome | None = None, order: StartEpoch | None = None) -> None:
        """Close an order, with the mean of its last round or without one."""
        self._batcher.follow(self.machine)
        numbers, checksum = self._numbers, None
        bad, verdict, lr = numbers.take_bad(), numbers.verdict, self.current.lr
        group_lrs = self.replica.learning_rate.groups()
        if outcome is not None:
            self._fit_feed()
            checksum = self.replica.checksum() if outcome.compares else None

        def post(sums: OrderSums) -> None:
            # The last mean's, where no gate comes before this.
            if verdict is not None and verdict is numbers.verdict:
                numbers.read(is_reported=True)
            late = None if verdict is None else verdict.bad
            self.activity.count(sums, order)
            work = sums.work(done, lr, group_lrs)
            if bad or late:
                work = replace(work, bad=bad or late)
            if outcome is None:
                self._post(StepsDone(self.parts.rank, done.plan, work, done.is_last, done.mean))
                return
            mean = sums.averaging or NOTHING
            self._post(
                SyncAck(
                    self.parts.rank,
                    outcome,
                    work,
                    mean.sync_ms,
                    None if late or self.parts.rank in outcome.bad else mean.drift,
                    None if checksum is None else checksum(),
                    mean.norm,
                )
            )

        self._meter.close(post)

    def _fit_feed(self) -> None:
        """Let the feed use the memory left, once all that training needs has been allocated."""
        captured = self.replica.captured
        if captured is None or not captured.is_expected or self.current.local_step >= CAPTURED_BY:
            self.parts.feed.fit()

    def _step_together(self, arrival: Arrival, outcome: Outcome) -> None:
        """Step the optimizer, on all ranks alike: with the rates of the window's position, and the gate's."""
        replica = self.replica
        if outcome.lr:
            self._rescale(outcome, arrival.global_step)
        loss, self._part_loss = self._part_loss, None
        self.current.lr = replica.learning_rate.value
        if not any(outcome.samples):
            return
        if self._meeting.joint is not None:
            self._meeting.joint.step(self.parts.index, outcome)
        self._meter.stepped(replica.update.take_norms())
        self.current.local_step += 1
        if not arrival.samples:  # it had no part of the window
            self._place.step = self.machine.window
            self.current.global_step = arrival.global_step
        # Without a part, too: a callback that writes to the model does it on all devices alike.
        if self._services.step_callbacks:
            self._call_back(loss, arrival.samples)

    def _rescale(self, outcome: Outcome, position: int) -> None:
        self.replica.learning_rate.advance(position, self.current.epoch)
        self.replica.learning_rate.rescale(outcome)

    def _serve(self, task: BarrierTask) -> None:
        """Execute a barrier task."""
        self._meter.settle()
        self.activity.is_bound, start_s = True, perf_counter()
        self.activity.task, activity = described(task)
        self._post(self._tasks.serve(task, self._await_evaluation, self.activity.moved))
        self._numbers.take_bad()  # it has copied a healthy replica
        self.activity.moved()
        self.activity.task = ""
        self.activity.is_bound = False
        self.activity.spent(activity, start_s)
        self._meter.settle()

    def _await_evaluation(self) -> bool:
        """Wait for a note; False where it was an order to leave."""
        doing, self.activity.task = self.activity.task, f"{self.activity.task}, waiting for data"
        self._read(self.parts.inbox.get())
        self.activity.task = doing
        return not self.machine.leaves

    def _await_leave(self) -> None:
        while not self.machine.leaves:
            self._read(self.parts.inbox.get())

    def _put_snapshot(self, action: Snapshot) -> None:
        snapshots = self._meeting.snapshots
        assert snapshots is not None
        start_s = perf_counter()
        if self.replica.frozen is not None:
            self.replica.frozen.met(self.current.epoch)
        snapshots.take(self.parts.index, action.round)
        self._meter.averaged(start_s)
        self._numbers.judge()
        self._meter.send()

        def post() -> None:
            self._numbers.read(is_reported=True)
            is_bad = self.machine.is_bad
            samples = 0 if is_bad else action.samples
            self._post(SnapshotReady(self.parts.rank, action.round, action.steps, samples, bad=is_bad))

        self._meter.then(post)

    def _apply(self, action: Apply) -> None:
        snapshots = self._meeting.snapshots
        assert snapshots is not None
        start_s = perf_counter()
        snapshots.apply(self.parts.index, action.round, action.steps)
        self._meter.averaged(start_s)
        self._fit_feed()
        self.current.round = action.round
