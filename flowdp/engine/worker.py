"""The worker's shell: a thread that does what its machine says.

Between two steps of a round it waits for nobody: it looks at its inbox and at the gate's hurry, takes the
next batch, and trains it. One message goes up per order, not per step.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from flowdp.collective.base import Collective
from flowdp.collective.snapshot import Snapshots
from flowdp.data.reader import Source
from flowdp.engine import context
from flowdp.engine.failures import Failures
from flowdp.engine.replica import Replica
from flowdp.errors import CollectiveAborted, DataError, ProtocolError, StepError
from flowdp.machine.worker import Apply, Done, Enter, Idle, Leave, Report, Snapshot, Step, WorkerMachine
from flowdp.messages import (
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
from flowdp.policy.tally import Work, pace_ms
from flowdp.threads.gate import Gate
from flowdp.threads.inbox import Inbox

__all__ = ["Mail", "Worker"]

Mail = Order | BatchReady | Hurried


class _Meter:
    """What a rank has done since its last report."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.busy_s = 0.0
        self.data_s = 0.0
        self.wait_s = 0.0
        self.loss_sum = 0.0
        self.longest_s = 0.0  # of one step, with its wait for data

    def work(self, done: Done, worker: context.CurrentWorker) -> Work:
        """Everything so far as a record; the meter starts again."""
        work = Work(
            epoch=done.epoch,
            steps=done.steps,
            samples=self.samples,
            busy_ms=self.busy_s * 1e3,
            data_ms=self.data_s * 1e3,
            pace_ms=pace_ms((self.busy_s + self.data_s) * 1e3, self.longest_s * 1e3, self.steps),
            losses=(self.loss_sum, self.samples),
            scalars=worker.drain(),
            lr=worker.lr,
        )
        self.__init__()  # type: ignore[misc]
        return work


class Worker:
    """The body of one worker thread.

    Args:
        rank: Who.
        replica: Its model and optimizer.
        source: Of all ranks' batches.
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
        self.current = context.CurrentWorker(rank, replica.device, replica.module)
        self._source = source
        self._gate = gate
        self._collective = collective
        self._snapshots = snapshots
        self._post = post
        self._failures = failures
        self._threads = threads
        self._meter = _Meter()
        self._training: Step | None = None  # for errors
        self._waited_s = 0.0  # for the batch of the next step

    def run(self) -> None:
        """Live until told to leave; whatever goes wrong is reported, never raised.

        Threads:
            The body of the worker's own thread.
        """
        error: str | None = None
        try:
            torch.set_num_threads(self._threads)
            context.bind(self.current)
            self._post(WorkerReady(self.rank))
            self._loop()
        except BaseException as cause:
            error = self._failures.add(self._explain(cause), self.rank)
        finally:
            self._post(Exiting(self.rank, error))

    def _loop(self) -> None:
        machine, inbox, gate = self.machine, self.inbox, self._gate
        while True:
            while inbox.pending:
                self._read(inbox.get())
            action = machine.next(gate.hurry)
            if type(action) is Step:
                self._step(action)
            elif type(action) is Enter:
                self._enter(action)
            elif type(action) is Report:
                done = action.done
                self._post(StepsDone(self.rank, done.plan, self._meter.work(done, self.current)))
            elif type(action) is Idle:
                self._read(inbox.get())
            elif type(action) is Snapshot:
                self._put_snapshot(action)
            elif type(action) is Apply:
                self._apply(action)
            elif type(action) is Leave:
                return

    def _read(self, mail: Mail | None) -> None:
        # A note says only that there is something to look at, and the loop looks.
        if mail is not None and not isinstance(mail, BatchReady | Hurried):
            self.machine.handle(mail)

    def _step(self, step: Step) -> None:
        start = perf_counter()
        source, current, meter = self._source, self.current, self._meter
        self._training = step
        batch = source.take(self.rank, step.epoch, step.batch)
        if batch is None:
            # It was not read yet. Orders are served meanwhile, and the loop asks the machine anew.
            self._read(self.inbox.get())
            self._waited_s += perf_counter() - start
            return
        replica = self.replica
        replica.learning_rate.advance(step.position, step.epoch, step.metric)
        samples = source.samples_in(step.epoch, step.batch)
        current.epoch, current.global_step, current.samples = step.epoch, step.position, samples
        current.lr = replica.learning_rate.value
        loss = replica.step(batch, current)
        self.machine.trained(samples)
        current.local_step += 1
        meter.steps += 1
        meter.samples += samples
        meter.loss_sum += loss * samples
        spent_s = perf_counter() - start
        meter.busy_s += spent_s
        if self._waited_s:
            meter.data_s += self._waited_s
            spent_s += self._waited_s
            self._waited_s = 0.0
        if spent_s > meter.longest_s:
            meter.longest_s = spent_s

    def _enter(self, action: Enter) -> None:
        start = perf_counter()
        self.replica.flat.gather()
        try:
            outcome = self._gate.enter(action.arrival)
            averaging = self._collective.average(self.rank, outcome)
        except CollectiveAborted:
            # Somebody else failed, and the coordinator knows: its order to leave is on its way.
            self._await_leave()
            return
        # Whatever of this was not averaging was waiting, here or for the last arrival's launch.
        self._meter.wait_s += max(0.0, perf_counter() - start - averaging.sync_ms / 1e3)
        self.current.round = outcome.round
        self._obey(outcome)
        done = self.machine.met(outcome)
        if done is not None:
            wait_ms = self._meter.wait_s * 1e3
            work = self._meter.work(done, self.current)
            self._post(SyncAck(self.rank, outcome, work, averaging.sync_ms, wait_ms, averaging.drift))

    def _obey(self, outcome: Outcome) -> None:
        if outcome.lr is not None:
            self.replica.learning_rate.set(outcome.lr, outcome.global_step, self.current.epoch)
            self.current.lr = self.replica.learning_rate.value

    def _await_leave(self) -> None:
        while not isinstance(self.machine.next(-1), Leave):
            self._read(self.inbox.get())

    def _put_snapshot(self, action: Snapshot) -> None:
        assert self._snapshots is not None
        self._snapshots.take(self.rank, action.round)
        self._post(SnapshotReady(self.rank, action.round, action.steps, action.samples))

    def _apply(self, action: Apply) -> None:
        assert self._snapshots is not None
        self._snapshots.apply(self.rank, action.round)
        self.current.round = action.round
        self._post(Updated(self.rank, action.round))

    def _explain(self, cause: BaseException) -> BaseException:
        """The error that the user will see, with the place where it happened."""
        if isinstance(cause, DataError | ProtocolError):
            return cause
        step = self._training
        epoch, batch = (None, None) if step is None else (step.epoch, step.batch)
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
