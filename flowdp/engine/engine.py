"""Start and end of a run's threads; a run that is started is always joined."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from flowdp.checkpoint.resume import StopPosition
from flowdp.checkpoint.writer import CapturedState
from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.host import HostMean
from flowdp.collective.select import open_collective
from flowdp.data.open_feeds import open_feeds
from flowdp.device.compiled import make_room
from flowdp.device.cores import pool_sizes, thread_budget
from flowdp.device.discovery import device_names
from flowdp.device.dispatch import prepared_torch
from flowdp.device.failed_device import keep_memory
from flowdp.device.process_tuning import as_tuning, tuned_process
from flowdp.device.streams import Lane
from flowdp.engine import active_runs
from flowdp.engine.coordinator_thread import CoordinatorShell
from flowdp.engine.diagnostics import Diagnostics, Progress
from flowdp.engine.machine_links import Follower, FollowerLink, LeaderLink, Postbox
from flowdp.engine.services import MeetingPoint, Services
from flowdp.engine.worker_thread import Mail, Worker
from flowdp.errors import FlowdpError
from flowdp.graphs.captured_step import CAPTURED
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.event_log import EventLog
from flowdp.machine.policies import ROUNDS
from flowdp.network.team import Team
from flowdp.options import Backend, FailureOptions, OuterOptions, RuntimeOptions
from flowdp.policy.efficiency import EfficiencyReport, RankTimes, efficiency_of
from flowdp.policy.stall import StallWatch
from flowdp.protocol.messages import Abort, BatchReady, DataEnded, Failed, Requested
from flowdp.protocol.position import Position
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.joint_step import JointStep
from flowdp.replica.replica import Replica
from flowdp.threads.gate import Gate
from flowdp.threads.inbox import Inbox
from flowdp.threads.latch import Latch
from flowdp.threads.shield import interrupts_held

__all__ = ["Engine"]

WORKER_INBOX = 64
"""Orders, notes and requests that may wait for a worker: two orders, one request per abandoned round (their
deadlines double), one note per batch waited for, one word per round that is late."""

FAILURE_S = 1.8
"""How long callbacks may keep a failure from being raised."""


class Engine:
    """The threads of one run, with the services that they use and close at its end.

    With `outer` the means of its replicas have an outer step, and each has its momentum (`Replica.outer`).

    Attributes:
        replicas: One per rank, equal; the run's own until it is over, and none once it has let go of them.
        is_abandoned: The user has told the run to stop and does not wait for it any more (a second Ctrl-C).
        handle: The user's `Run`, while it lives.
        begun_s: When it began, by `time.monotonic`.
        names: Names of the devices, one per rank.
        latch: Where all that a start has made waits for `begin`.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        replicas: Sequence[Replica],
        services: Services,
        failures: FailureOptions,
        runtime: RuntimeOptions,
        outer: OuterOptions | None = None,
        team: Team | None = None,
    ) -> None:
        self.config = config
        self.team = Team((config.world_size,)) if team is None else team
        self.replicas = replicas
        self.records, self.failures, self.saver = services.records, services.failures, services.saver
        self._requests = services.requests
        self._source, self._evaluator = services.source, services.evaluator
        self._fingerprint = services.fingerprint
        self._sigterm = services.sigterm
        self.close_observer = services.close_observer
        self._is_numbered = services.source.can_resume_inside
        self._read_by: Callable[[], list[threading.Thread]] = services.source.threads
        self._tuning = as_tuning(runtime.tune_process)
        self._settings = ExitStack()
        if self.team.machines is not None:
            self._settings.callback(self.team.machines.closer())
        self._progress: list[Progress] = []
        self._times: list[RankTimes] = []
        self.names = device_names([replica.device for replica in replicas])
        self.timeline = services.timeline
        self.is_abandoned = False
        self._asked_snapshots = 0
        self._asking = threading.Lock()  # numbers the snapshots
        self.handle: Any = None
        self.begun_s = 0.0
        self.latch = Latch()
        self._letting_go = threading.RLock()  # several threads may join; finalizers may, inside of it
        self._inboxes = [Inbox[Mail](WORKER_INBOX, f"rank {rank}") for rank in self.team.ranks]
        make_room(len(replicas))
        try:
            self._build(services, failures, runtime, outer)
        except BaseException:
            self._settings.close()
            raise

    def _build(
        self,
        services: Services,
        failures: FailureOptions,
        runtime: RuntimeOptions,
        outer: OuterOptions | None,
    ) -> None:
        config, ranks = self.config, self.team.ranks
        lanes = [replica.lane for replica in self.replicas]
        inboxes = dict(zip(ranks, self._inboxes, strict=True))
        self._link = self._open_link(inboxes, failures.stall_timeout)
        meeting = self._open_meeting(runtime.backend, lanes, outer)
        self._feeds = open_feeds(
            self._source,
            lanes,
            held=[(config.groups or (1,) * config.world_size)[rank] for rank in ranks],
            rows=_rows(config),
            spans=() if services.timeline is None else services.timeline.ranks,
            usage=runtime.memory_fraction,
            depth=runtime.prefetch_depth,
        )
        for lane, feed in zip(lanes, self._feeds, strict=True):
            self._settings.callback(lane.drain)
            self._settings.callback(feed.close)
        self._settings.callback(keep_memory, lanes)
        # Where the bits do not depend on measured speed, they shall not depend on the size of a pool either.
        adapts = ROUNDS[config.policy].shares == "steps"
        threads = pool_sizes([lane.device for lane in lanes], self._tuning, adapts=adapts)
        self.workers = [
            Worker(
                rank,
                self.replicas,
                services,
                meeting,
                index=index,
                feed=self._feeds[index],
                inbox=self._inboxes[index],
                threads=threads[index],
                budget=thread_budget() if self._tuning.openmp else threads[index],
                failures=failures,
                global_step=config.start.global_step if config.start is not None else 0,
                epoch=config.start.last_epoch if config.start is not None else 0,
            )
            for index, rank in enumerate(ranks)
        ]
        self._threads = [
            threading.Thread(  # in the settings of this one: torch.compile's belong to a thread
                target=copy_context().run,
                args=(worker.run,),
                name=f"flowdp-worker-{worker.rank}",
                daemon=True,
            )
            for worker in self.workers
        ]
        self.event_log = EventLog()
        machine: Coordinator | Follower = Coordinator(config)
        postboxes: dict[int, Postbox] = {**inboxes}
        if isinstance(self._link, LeaderLink):
            others = (rank for rank in range(config.world_size) if rank not in ranks)
            postboxes |= {rank: self._link.postbox(rank) for rank in others}
        elif self._link is not None:
            machine = Follower(config, ranks, self._link.send)
        diagnostics = Diagnostics(
            self.workers,
            meeting.gate,
            self._source,
            self.threads,
            self.event_log.tail,
            steps_at_gate=self.workers[0].replica.steps_at_gate,
            readers=partial(_waits_of, services),
            link=self._link,
        )
        if self._link is not None:
            self._link.sign = diagnostics.sign
        self._report: Callable[[str, int], str] = diagnostics.report
        timeout_s = failures.stall_timeout
        shell = CoordinatorShell(
            machine,
            services,
            meeting,
            event_log=self.event_log,
            workers=postboxes,
            threads=self._threads,
            watch=StallWatch(None if timeout_s is None else timeout_s * 1e3),
            diagnostics=diagnostics,
            closing=self._settings.close,
            link=self._link,
        )
        # The thread holds this engine, not only its shell: a run whose `Run` was dropped must be found at the
        # end of the process.
        self._coordinator = threading.Thread(
            target=partial(self._run, shell), name="flowdp-coordinator", daemon=True
        )

    def _open_link(
        self, inboxes: Mapping[int, Postbox], stall_s: float | None
    ) -> LeaderLink | FollowerLink | None:
        """Open the links to the other machines; None: there are none."""
        if not self.team.is_spread:
            return None
        common = (self.team, self._requests, self.failures, stall_s)
        metrics = None if self._evaluator is None else self._evaluator.meeting
        link: LeaderLink | FollowerLink
        if self.team.leads:
            link = LeaderLink(*common, metrics)
            if self.saver.collector is not None:
                self.saver.collector.tell = link.tell
        else:
            link = FollowerLink(*common, inboxes, self.saver.sender)
            if metrics is not None:
                metrics.send = link.send
        for states in (self.saver.collector, self.saver.sender):
            if states is not None:
                self._settings.callback(states.give_back)
        self._settings.callback(link.close)
        return link

    def _open_meeting(
        self, backend: Backend, lanes: Sequence[Lane], outer: OuterOptions | None
    ) -> MeetingPoint:
        exact = [replica for replica in self.replicas if isinstance(replica, ExactReplica)]
        config, averaged = self.config, [replica.averaged for replica in self.replicas]
        collective = open_collective(
            backend,
            config.policy,
            averaged,
            lanes,
            lambda index: gate.finish(self.team.ranks[index]),
            self._failed,
            outer,
            self.team,
            overlaps=config.overlaps,
        )
        self._settings.callback(collective.close)
        self._settings.callback(self.close)
        link = self._link
        joint: JointStep | None = None
        if exact:
            joint = JointStep(exact, collective, lambda index: gate.finish(self.team.ranks[index]))
        launch = collective.launch if joint is None else joint.launch
        gate = Gate(config.world_size, launch, None if link is None else link.ask, self.team.ranks)
        if link is not None:
            link.gate = gate
        is_async = ROUNDS[config.policy].averages == "snapshots" and config.world_size > 1
        snapshots = SnapshotMean(averaged, lanes, collective.outer) if is_async else None
        for replica, momentum in zip(self.replicas, collective.outer, strict=False):  # empty without outer
            replica.outer = momentum
        settle = collective.settle if config.overlaps and isinstance(collective, HostMean) else None
        return MeetingPoint(
            gate=gate, collective=collective, snapshots=snapshots, settle=settle, team=self.team, joint=joint
        )

    def start(self) -> None:
        """Start all threads; they wait for `begin`. After an error, or without that, `take_back` ends them.

        Raises:
            DataError: The dataset's worker processes could not be started.
            DeviceError: The dataset could not be brought to a device.
            RuntimeError: There is no room for another thread.

        Threads:
            The user's; it gives its OpenMP pool back.
        """
        if len(self.workers) > 1:
            self._settings.enter_context(prepared_torch())
        self._settings.enter_context(tuned_process(self._tuning))
        if self.timeline is not None:
            self._settings.callback(self.timeline.close)
            self.timeline.start()
        if self._evaluator is not None:
            self._evaluator.batches.start(wake=self._wake_evaluation, failed=self._failed)
        self._source.on_end(self._ended)
        self._source.start(wake=self._wake, failed=self._failed)
        for feed, inbox in zip(self._feeds, self._inboxes, strict=True):
            feed.start(partial(_notify, inbox))
        self.saver.start()
        if self._link is not None:
            self._link.start()
        for thread in (*self._threads, self._coordinator):
            thread.start()

    def begin(self, handle: object) -> None:
        """Let the run begin, and keep its handle, the user's `Run`: its coordinator plans the first round."""
        self.handle = handle
        self.begun_s = time.monotonic()
        if self.timeline is not None:
            self.timeline.begin(self.efficiency)
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
            with ExitStack() as undo:  # from the last to the first, whatever one of them raises
                undo.callback(self.close_observer, None)
                undo.callback(self.records.end, None, over=True)
                undo.callback(self._settings.close)
                undo.callback(self._source.close)
                if self._evaluator is not None:
                    undo.callback(self._evaluator.source.close)
                undo.callback(self.saver.close)
                for thread in (*self._threads, self._coordinator):
                    if thread.ident is not None:
                        undo.callback(thread.join)
                for inbox in self._inboxes:
                    undo.callback(inbox.post, Abort("the start was taken back"))

    def request(self, what: Requested) -> int:
        """Send a request of the user to the coordinator; returns its number at once."""
        return self._requests.request(what)

    def fail(self, error: FlowdpError) -> None:
        """End the run, on all machines, by an error from outside; one that is over is left as it is."""
        if not self.records.is_over:
            self._failed(error)

    def snapshot(self) -> CapturedState | None:
        """Take a snapshot at the end of this round; None where the run ends before.

        Threads:
            The user's.
        """
        with self._asking:
            self._asked_snapshots += 1
            number = self._asked_snapshots
        self.request(Requested("snapshot"))
        return self.saver.wait_for_snapshot(number)

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

    def close(self) -> None:
        """Hear no SIGTERM for this run any more.

        Threads:
            The user's; in the main thread the handler from before is put back.
        """
        if self._sigterm is not None:
            self._sigterm.close()

    def progress(self) -> list[Progress]:
        """Progress of each rank."""
        workers = self.workers  # read first: `let_go` keeps the progress, and then drops them
        return self._progress or [
            Progress(
                worker.current.local_step,
                worker.machine.throttled,
                worker.replica.pieces,
                None if (captured := worker.replica.captured) is None else captured.state,
                None if captured is None else captured.problem,
            )
            for worker in workers
        ]

    def times(self) -> list[RankTimes]:
        """Times of each rank, by their use."""
        workers = self.workers  # as in `progress`
        return self._times or [worker.times() for worker in workers]

    def efficiency(self) -> EfficiencyReport:
        """Attribution of the ranks' time so far."""
        captured = sum(one.capture == CAPTURED for one in self.progress())
        return replace(efficiency_of(self.times(), self.names), captured=captured)

    def stopped_at(
        self, position: Position, learning_rate: Mapping[str, Any], orders: Mapping[int, int] | None
    ) -> StopPosition | None:
        """Make the record from which a run resumes; None where it would have to read on inside an epoch."""
        is_readable = self._is_numbered or not position.open
        return StopPosition(position, self._fingerprint, learning_rate, orders) if is_readable else None

    def let_go(self) -> None:
        """Drop replicas, optimizers and all else that holds memory of a device, of a run that is over.

        A notebook keeps its runs. And the garbage collector counts objects, not their bytes: a reference
        cycle, in the user's model or in torch, may hold a card's memory for long.
        """
        with self._letting_go:
            if not self.workers:
                return
            self._progress, self._times = self.progress(), self.times()
            keep_memory(replica.lane for replica in self.replicas)
            has_cards = any(replica.lane.is_async for replica in self.replicas)
            for replica in self.replicas:
                replica.close()
            self.workers, self.replicas, self._feeds = [], (), []
            # These call us back, or know the workers; another thread may be asking them just now.
            self._read_by, self._report = list, partial(_last_report, self.event_log)
            del self._source
            self._evaluator = None
            self.close_observer = lambda _: True
            self.saver.let_go()
            if has_cards:
                gc.collect()

    def is_own_thread(self) -> bool:
        """Whether the calling thread belongs to this run."""
        return threading.current_thread() in self.threads()

    def threads(self) -> list[threading.Thread]:
        """All threads of this run but the callbacks', those that read its datasets included."""
        evaluator = self._evaluator
        readers = [*self._read_by(), *([] if evaluator is None else evaluator.source.threads())]
        writer = [] if self.saver.thread is None else [self.saver.thread]
        links = [] if self._link is None else self._link.threads()
        return [*self._threads, self._coordinator, *readers, *writer, *links]

    def report(self, headline: str, events: int) -> str:
        """Describe ranks, threads and the last events in many lines."""
        return self._report(headline, events)

    def _run(self, shell: CoordinatorShell) -> None:
        try:
            if self.latch.wait():
                shell.run()
        finally:
            self.handle = None

    def _wake(self, rank: int, epoch: int, batch: int) -> None:
        self._feeds[rank].wake(epoch, batch)

    def _ended(self, epoch: int, batches: int) -> None:
        source = self._source
        machine, machines = source.stride
        read = None if source.is_part else batches
        end = DataEnded(epoch, source.stride.of(batches), machine, machines, read)
        self._requests.inbox.post(end)

    def _wake_evaluation(self, rank: int, epoch: int, batch: int) -> None:
        _notify(self._inboxes[rank], epoch, batch)

    def _failed(self, error: FlowdpError) -> None:
        self._requests.inbox.post(Failed(self.failures.add(error)))


def _last_report(event_log: EventLog, headline: str, events: int) -> str:
    return "\n".join([headline, *event_log.tail(events)])


def _waits_of(services: Services) -> list[str]:
    """Reasons for which the readers of the datasets wait."""
    evaluator = services.evaluator
    waits = [services.source.waits_for(), "" if evaluator is None else evaluator.source.waits_for()]
    return [doing for doing in waits if doing]


def _rows(config: CoordinatorConfig) -> int | None:
    """Samples for which a prefetched part of a global batch has room: twice an equal share."""
    batch = config.global_batch
    return None if batch is None else min(batch.size, -(-2 * batch.size // config.world_size))


def _notify(inbox: Inbox[Mail], epoch: int, batch: int) -> None:
    inbox.post(BatchReady(epoch, batch))
