"""Start and end of a run's threads; a run that is started is always joined."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from flowdp.checkpoint.writer import CapturedState
from flowdp.device.discovery import device_names
from flowdp.device.dispatch import prepare_torch
from flowdp.device.memory import keep_memory
from flowdp.device.process_tuning import tuned_process
from flowdp.engine import active_runs
from flowdp.engine.coordinator_thread import CoordinatorShell, EngineParts
from flowdp.engine.diagnostics import Progress
from flowdp.engine.parts import Mail, RankParts
from flowdp.errors import FlowdpError
from flowdp.graphs.captured_step import CAPTURED
from flowdp.machine.config import CoordinatorConfig
from flowdp.observe.bar import tell
from flowdp.policy.efficiency import EfficiencyReport, RankTimes, efficiency_of
from flowdp.protocol.messages import BatchRead, BatchReady, DataEnded, Leave, Requested
from flowdp.replica.replica import Replica
from flowdp.threads.inbox import Inbox
from flowdp.threads.latch import Latch
from flowdp.threads.shield import interrupts_held

__all__ = ["Engine"]

FAILURE_S = 1.8
"""How long callbacks may keep a failure from being raised."""


class Engine:
    """The threads of one run, with the services that they use and close at its end; see `build_engine`.

    Args:
        config: The run, for its coordinator.
        parts: All that its threads use.

    Attributes:
        config: As given.
        event_log: The coordinator's events.
        records: Records of the run.
        failures: Its failures.
        saver: Writer of checkpoints, and keeper of the best model.
        devices: One per rank of this machine.
        handle: The user's `Run`, while it lives.
        trained: See `Services`.
        begun_s: When it began, by `time.monotonic`.
        is_abandoned: The user has told the run to stop and does not wait for it any more (a second Ctrl-C).
        latch: Where all that a start has made waits for `begin`.
    """

    def __init__(self, config: CoordinatorConfig, parts: EngineParts) -> None:
        services = parts.services
        self.config, self.event_log = config, parts.event_log
        self.records, self.failures, self.saver = services.records, services.failures, services.saver
        self.trained, self._tells = services.trained, services.tells
        self._requests = services.requests
        self._parts: EngineParts | None = parts
        self.devices = tuple(replica.device for replica in self.replicas)
        self.latch = Latch()
        self.handle: Any = None
        self.begun_s = 0.0
        self.is_abandoned = False
        self._past: tuple[list[Progress], list[RankTimes]] = [], []  # of a run that was let go of
        self._letting_go = threading.RLock()  # several threads may join; finalizers may, inside of it
        # The thread holds this engine, not only its shell: a run whose `Run` was dropped must be found at the
        # end of the process.
        self._coordinator = threading.Thread(
            target=partial(self._run, CoordinatorShell(parts)), name="flowdp-coordinator", daemon=True
        )

    @property
    def replicas(self) -> Sequence[Replica]:
        """One per rank, equal; none once the run has let go of them."""
        return [rank.replica for rank in self.ranks]

    @property
    def ranks(self) -> Sequence[RankParts]:
        """Parts of each rank; none once the run has let go of them."""
        parts = self._parts
        return () if parts is None else [worker.parts for worker in parts.workers]

    def start(self) -> None:
        """Start all threads; they wait for `begin`. After an error, or without that, `take_back` ends them.

        Raises:
            DataError: The dataset's worker processes could not be started.
            DeviceError: The dataset could not be brought to a device.
            RuntimeError: There is no room for another thread.

        Threads:
            The user's; it gives its OpenMP pool back.
        """
        parts = self._parts
        assert parts is not None
        services = parts.services
        if len(parts.workers) > 1:
            prepare_torch()
        parts.settings.enter_context(tuned_process(parts.tuning))
        if services.timeline is not None:
            parts.settings.callback(services.timeline.close)
            services.timeline.start()
        failed = partial(self._requests.fail, is_awaited=False)
        ranks = self.ranks
        if services.evaluator is not None:
            services.evaluator.batches.start(wake=lambda rank, *_: _notify(ranks[rank].inbox), failed=failed)
        is_cut = self.config.global_batch is not None
        services.source.on_end(self._ended, self._read if is_cut else None)
        services.source.start(
            wake=lambda rank, epoch, batch: ranks[rank].feed.wake(epoch, batch), failed=failed
        )
        for rank in ranks:
            rank.feed.start(partial(_notify, rank.inbox))
        self.saver.start()
        if parts.link is not None:
            parts.link.start(parts.meeting.gate, parts.diagnostics.sign)
        for thread in (*parts.threads, self._coordinator):
            thread.start()

    def begin(self, handle: object) -> None:
        """Let the run begin, and keep its handle, the user's `Run`: its coordinator plans the first round."""
        parts = self._parts
        assert parts is not None
        self.handle = handle
        self.begun_s = time.monotonic()
        if (timeline := parts.services.timeline) is not None:
            timeline.begin(self.efficiency)
        active_runs.add(self)
        self.latch.open()

    def take_back(self) -> None:
        """Undo `start`, however far it came, and leave no thread. A run that has begun is stopped.

        Threads:
            The one that started it.
        """
        with interrupts_held():
            if not self.latch.shut():
                self.request(Requested("stop"))
                self.records.wait(over=True)
                self.join()
                self.join_callbacks()
                self.close()
                return
            self.handle = None
            active_runs.remove(self)
            parts = self._parts
            assert parts is not None
            with ExitStack() as undo:  # from the last to the first, whatever one of them raises
                undo.callback(self.close_observer, None)
                undo.callback(self.records.end, None, over=True)
                undo.callback(parts.settings.close)
                for source in parts.services.sources:
                    undo.callback(source.close)
                undo.callback(self.saver.close)
                for thread in (*parts.threads, self._coordinator):
                    if thread.ident is not None:
                        undo.callback(thread.join)
                for worker in parts.workers:
                    undo.callback(worker.parts.inbox.post, Leave("the start was taken back"))

    def request(self, what: Requested) -> int:
        """Send a request of the user; see `Requests.request`."""
        return self._requests.request(what)

    def fail(self, error: FlowdpError) -> None:
        """End the run, on all machines, by an error from outside; one that is over is left as it is."""
        if not self.records.is_over:
            self._requests.fail(error, is_awaited=False)

    def snapshot(self) -> CapturedState | None:
        """Take a snapshot at the end of this round; None where the run ends before.

        Threads:
            The user's.
        """
        return self.saver.wait_for_snapshot(self._requests.snapshot())

    def join(self) -> None:
        """Wait for the coordinator thread of a run that is over."""
        if self.records.is_over:
            self._coordinator.join()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the run's end, with a time for its callbacks, too; False when the time is up."""
        end_s = time.monotonic() + (timeout_s or 0.0)
        if not self.records.wait(timeout_s=timeout_s):
            return False
        is_heard = timeout_s is None or self.join_callbacks(end_s - time.monotonic())
        return is_heard or self.failures.first is not None

    def join_callbacks(self, timeout_s: float | None = None) -> bool:
        """Wait for the callbacks of a run that has ended; False where one does not return.

        Args:
            timeout_s: How long at most; None: as long as it takes. A failure does not wait so long.
        """
        if self.failures.first is not None:
            timeout_s = self.failures.first_s + FAILURE_S - time.monotonic()
        return self.close_observer(None if timeout_s is None else max(0.0, timeout_s))

    def close_observer(self, timeout_s: float | None) -> bool:
        """See `Services.close_observer`; of a run that was let go of all callbacks have returned."""
        parts = self._parts
        return parts is None or parts.services.close_observer(timeout_s)

    def close(self) -> None:
        """Hear no SIGTERM for this run any more.

        Threads:
            The user's; in the main thread the handler from before is put back.
        """
        self._requests.close()

    def tell_end(self) -> None:
        """Print a line on stderr that says why a run without a failure has ended, where that was not planned.

        Threads:
            The user's; it is printed once.
        """
        finish, tells, self._tells = self.records.finish, self._tells, False
        if tells and finish is not None and finish.error is None and not finish.is_planned:
            last = self.saver.last if finish.stopped else None
            tell(
                f"{finish}; checkpoint {last}; start again with resume=True to go on" if last else str(finish)
            )

    def progress(self) -> list[Progress]:
        """Progress of each rank."""
        parts = self._parts  # read first: `let_go` keeps the progress, and then drops them
        if parts is None:
            return self._past[0]
        return [
            Progress(
                worker.current.local_step,
                worker.machine.throttled,
                worker.replica.pieces,
                None if (captured := worker.replica.captured) is None else captured.state,
                None if captured is None else captured.problem,
            )
            for worker in parts.workers
        ]

    def times(self) -> list[RankTimes]:
        """Times of each rank, by their use."""
        parts = self._parts  # as in `progress`
        return self._past[1] if parts is None else [worker.activity.times() for worker in parts.workers]

    def efficiency(self) -> EfficiencyReport:
        """Attribution of the ranks' time so far."""
        captured = sum(rank.capture == CAPTURED for rank in self.progress())
        return replace(efficiency_of(self.times(), device_names(self.devices)), captured=captured)

    def let_go(self) -> None:
        """Drop replicas, optimizers and all else that holds memory of a device, of a run that is over.

        A notebook keeps its runs. And the garbage collector counts objects, not their bytes: a reference
        cycle, in the user's model or in torch, may hold a card's memory for long.
        """
        with self._letting_go:
            parts = self._parts
            if parts is None:
                return
            self._past = self.progress(), self.times()
            lanes = [replica.lane for replica in self.replicas]
            keep_memory(lanes)
            for replica in self.replicas:
                replica.close()
            self._parts = None
            self.saver.let_go()
            del parts, replica
            if any(lane.is_async for lane in lanes):
                gc.collect()

    def is_own_thread(self) -> bool:
        """Whether the calling thread belongs to this run."""
        return threading.current_thread() in self.threads()

    def threads(self) -> list[threading.Thread]:
        """All threads of this run but the callbacks', those that read its datasets included."""
        parts = self._parts
        return [self._coordinator] if parts is None else parts.all_threads(self._coordinator)

    def report(self, headline: str, events: int) -> str:
        """Describe ranks, threads and the last events in many lines."""
        parts = self._parts
        if parts is None:
            return "\n".join([headline, *self.event_log.tail(events)])
        return str(parts.diagnostics.report(headline, self.threads(), events))

    def _run(self, shell: CoordinatorShell) -> None:
        try:
            if self.latch.wait():
                shell.run()
        finally:
            self.handle = None

    def _read(self, epoch: int, batch: int, samples: int) -> None:
        """Tell the coordinator of a batch that it can deal; on the reader's thread."""
        self._requests.inbox.post(BatchRead(epoch, batch, samples))

    def _ended(self, epoch: int, batches: int) -> None:
        """Tell the coordinator that an epoch whose end was unknown has ended; on the reader's thread."""
        parts = self._parts
        assert parts is not None
        source = parts.services.source
        machine, machines = source.stride
        read = None if source.is_part else batches
        self._requests.inbox.post(DataEnded(epoch, source.stride.of(batches), machine, machines, read))


def _notify(inbox: Inbox[Mail], *_batch: int) -> None:
    inbox.post(BatchReady())
