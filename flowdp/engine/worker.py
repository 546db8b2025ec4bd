"""The worker's shell: a thread that does what its machine says.

Between two steps of a round it waits for nobody: it looks at its inbox and at the gate's hurry, takes the
next batch, and trains it. One message goes up per order, not per step; on a device that runs behind its host
it goes up when the device is there.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from flowdp.collective.base import Averaging, Collective
from flowdp.collective.snapshot import Snapshots
from flowdp.data.feed import Feed
from flowdp.data.source import Source
from flowdp.engine import context, meter
from flowdp.engine.device_meter import open_meter
from flowdp.engine.failures import Failures
from flowdp.engine.intake import Intake
from flowdp.engine.replica import Replica
from flowdp.errors import CollectiveAborted, DataError, ProtocolError, StepError
from flowdp.machine.worker import Apply, Done, Enter, Idle, Leave, Report, Snapshot, Step, WorkerMachine
from flowdp.messages import (
    Arrival,
    BatchReady,
    Exiting,
    Fact,
    Hurried,
    Order,
    Outcome,
    SnapshotReady,
    StepsDone,
    SyncAck,
    Updated,
    WorkerReady,
)
from flowdp.threads.gate import Gate
from flowdp.threads.inbox import Inbox

__all__ = ["Mail", "Worker"]

Mail = Order | BatchReady | Hurried


class Worker:
    """The body of one worker thread.

    Args:
        rank: Who.
        replica: Its model and optimizer.
        source: Of all ranks' batches.
        feed: Brings this rank's batches to its device.
        gate: Where the ranks meet.
        collective: Averages at the gate.
        snapshots: Averages beside the training; None where the policy has no such rounds.
        inbox: Of this thread.
        post: Puts a fact into the coordinator's inbox.
        failures: Takes what goes wrong.
        threads: Size of this thread's OpenMP pool.
    """

    def __init__(
        self,
        rank: int,
        replica: Replica,
        source: Source,
        feed: Feed,
        gate: Gate,
        collective: Collective,
        snapshots: Snapshots | None,
        inbox: Inbox[Mail],
        post: Callable[[Fact], None],
        failures: Failures,
        threads: int,
    ) -> None:
        self.rank = rank
        self.replica = replica
        self.inbox = inbox
        self.machine = WorkerMachine(rank)
        self._lane = replica.lane
        with self._lane.on(self._lane.compute):
            self._meter = open_meter(self._lane)
        self.current = context.CurrentWorker(
            rank, replica.device, replica.module, sink=self._meter.scalar, steps=replica.steps
        )
        self._intake = Intake(feed, source, replica.width)
        self._source = source
        self._feed = feed
        self._gate = gate
        self._collective = collective
        self._snapshots = snapshots
        self._post = post
        self._failures = failures
        self._threads = threads
        self._training: Step | None = None  # for errors
        self._fed = 0  # the machine's plans that the feed knows
        self._is_fit = False

    def run(self) -> None:
        """Live until told to leave; whatever goes wrong is reported, never raised.

        Threads:
            The body of the worker's own thread.
        """
        error: str | None = None
        try:
            torch.set_num_threads(self._threads)
            context.bind(self.current)
            # Backward runs in this thread, not in autograd's one per device: no wake-up on the way, ranks
            # that share a device do not queue there, and a hook finds the thread's own state.
            with self._lane.on(self._lane.compute), torch.autograd.set_multithreading_enabled(False):
                self._post(WorkerReady(self.rank))
                self._loop()
        except BaseException as cause:
            error = self._failures.add(self._explain(cause), self.rank)
        finally:
            self._post(Exiting(self.rank, error))

    def _loop(self) -> None:
        machine, inbox, gate, intake = self.machine, self.inbox, self._gate, self._intake
        while True:
            while inbox.pending:
                self._read(inbox.get())
            if self._fed != machine.plans:
                self._tell_feed()
            # A step that has begun is finished: its batches have been taken, some of them trained.
            action = machine.next(-1 if intake.is_inside else gate.hurry)
            if type(action) is Step:
                self._step(action)
            elif type(action) is Enter:
                self._enter(action)
            elif type(action) is Report:
                self._close(action.done)
            elif type(action) is Idle:
                self._meter.settle()
                self._read(inbox.get())
                self._meter.settle()
            elif type(action) is Snapshot:
                self._put_snapshot(action)
            elif type(action) is Apply:
                self._apply(action)
            elif type(action) is Leave:
                if action.reason is None:
                    self._meter.settle()
                return

    def _read(self, mail: Mail | None) -> None:
        # A note says only that there is something to look at, and the loop looks.
        if mail is not None and not isinstance(mail, BatchReady | Hurried):
            self.machine.handle(mail)

    def _tell_feed(self) -> None:
        """Let the feed know what comes: before a report lets what it holds of a void plan be dealt anew."""
        if self._fed != self.machine.plans:
            self._fed = self.machine.plans
            # Those of a step under way are the machine's until it is done, and the feed has handed some out.
            self._feed.follow(self.machine.upcoming()[self._intake.taken :])

    def _step(self, step: Step) -> None:
        start_s = perf_counter()
        current, meter, replica, intake = self.current, self._meter, self.replica, self._intake
        self._training = step
        while not intake.is_last(step):
            is_first = not intake.samples
            micro = intake.next(step)
            if micro is None:
                self._await_batch(start_s)
                return
            if is_first:
                meter.begin(start_s)
                replica.learning_rate.advance(step.position, step.epoch, step.metric)
                current.epoch, current.global_step = step.epoch, step.position
                current.lr = replica.learning_rate.value
            current.samples = micro.samples
            replica.add(micro.batch, current, micro.share)
            self._feed.release()
        loss = replica.step(intake.factor)
        meter.end(loss, intake.samples)
        self.machine.trained(intake.samples)
        intake.end()
        current.local_step += 1

    def _await_batch(self, start_s: float) -> None:
        """A batch was not read yet. Orders are served meanwhile, and the loop asks the machine anew."""
        # Inside a step the device's time is the step's; what is due can wait for its end.
        if not self.inbox.pending and not self._intake.is_inside:
            self._meter.settle()
        self._read(self.inbox.get())
        self._meter.waited(perf_counter() - start_s)

    def _enter(self, action: Enter) -> None:
        self._meter.meet()
        try:
            self._collective.prepare(self.rank)
            outcome = self._gate.enter(action.arrival)
            reading = self._collective.average(self.rank, outcome)
        except CollectiveAborted:
            # Somebody else failed, and the coordinator knows: its order to leave is on its way.
            self._await_leave()
            return
        self._meter.met(reading)
        self.current.round = outcome.round
        if action.arrival.together:
            self._step_together(action.arrival, outcome)
        elif outcome.lr is not None:
            self._set_lr(outcome.lr, outcome.global_step)
        done = self.machine.met(outcome)
        if done is not None:
            self._close(done, outcome)

    def _close(self, done: Done, outcome: Outcome | None = None) -> None:
        """An order has ended, with a mean or without one."""
        self._tell_feed()
        checksum = None
        if outcome is not None:
            self._fit_feed()
            checksum = self.replica.checksum() if outcome.compare else None

        def post(report: meter.Report) -> None:
            if outcome is None:
                self._post(StepsDone(self.rank, done.plan, report.work))
                return
            mean = report.averaging or Averaging(0.0, None)
            self._post(
                SyncAck(
                    self.rank,
                    outcome,
                    report.work,
                    mean.sync_ms,
                    report.wait_ms,
                    mean.drift,
                    None if checksum is None else checksum(),
                )
            )

        self._meter.close(done, self.current.lr, post)

    def _fit_feed(self) -> None:
        """Once, with the first mean in: by now everything that training needs has been allocated."""
        if not self._is_fit:
            self._is_fit = True
            self._feed.fit()

    def _step_together(self, arrival: Arrival, outcome: Outcome) -> None:
        """The optimizer steps, on all ranks alike: at the window's position and with the gate's rate."""
        order, replica = self.machine.order, self.replica
        assert order is not None
        self.current.epoch = order.epoch
        replica.learning_rate.advance(arrival.global_step, order.epoch, order.metric)
        if outcome.lr is not None:
            self._set_lr(outcome.lr, arrival.global_step)
        if any(outcome.samples):
            replica.meet(outcome)
            self._meter.stepped()
        self.current.lr = replica.learning_rate.value

    def _set_lr(self, lr: float, position: int) -> None:
        self.replica.learning_rate.set(lr, position, self.current.epoch)
        self.current.lr = self.replica.learning_rate.value

    def _await_leave(self) -> None:
        while not isinstance(self.machine.next(-1), Leave):
            self._read(self.inbox.get())

    def _put_snapshot(self, action: Snapshot) -> None:
        assert self._snapshots is not None
        self._snapshots.take(self.rank, action.round)
        ready = SnapshotReady(self.rank, action.round, action.steps, action.samples)
        self._meter.then(lambda: self._post(ready))

    def _apply(self, action: Apply) -> None:
        assert self._snapshots is not None
        self._snapshots.apply(self.rank, action.round)
        self._fit_feed()
        self.current.round = action.round
        updated = Updated(self.rank, action.round)
        self._meter.then(lambda: self._post(updated))

    def _explain(self, cause: BaseException) -> BaseException:
        """The error that the user will see, with the place where it happened."""
        if isinstance(cause, DataError | ProtocolError):
            return cause
        step = self._training
        epoch, batch = (None, None) if step is None else (step.epoch, step.batches[0])
        indices = () if epoch is None or batch is None else self._source.indices(epoch, batch)
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        error = StepError(
            f"rank {self.rank} on {self.replica.device} failed in epoch {epoch}, at its step "
            f"{self.current.local_step} (batch {batch}, indices {shown}): {type(cause).__name__}: {cause}",
            rank=self.rank,
            device=str(self.replica.device),
            epoch=epoch,
            step=self.current.local_step,
            indices=indices,
        )
        error.__cause__ = cause
        return error
