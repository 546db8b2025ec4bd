"""From checked and built parts to running threads, and back: a run that is started is always joined."""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import perf_counter

import torch

from flowdp.collective.snapshot import Snapshots
from flowdp.data.feed import open_feeds
from flowdp.data.source import Source
from flowdp.device.process import ProcessTuning, threads_per_worker, tuned_process, usable_cores
from flowdp.engine.backends import open_collective
from flowdp.engine.coordinator import CoordinatorShell
from flowdp.engine.failures import Failures
from flowdp.engine.records import Records
from flowdp.engine.replica import Replica
from flowdp.engine.worker import Mail, Worker
from flowdp.errors import CollectiveError, DataError, OptionError
from flowdp.machine.coordinator import Coordinator, RunConfig
from flowdp.machine.story import Story
from flowdp.messages import BatchReady, DataEnded, Fact, Failed, Requested
from flowdp.options import Backend
from flowdp.threads.gate import Gate
from flowdp.threads.inbox import Inbox

__all__ = ["Engine", "check_free"]

WORKER_INBOX = 64
"""Orders, notes and requests that may wait for a worker: two orders, one request per abandoned round (their
deadlines double), one note per batch waited for and per hurried round."""

COORDINATOR_INBOX = 4096
"""Facts that may wait for the coordinator; a worker has at most a handful out."""

EXIT_GRACE_S = 5.0
"""How long the end of the process waits for a run that was told to stop."""


class Engine:
    """The threads of one run.

    Args:
        config: What the coordinator is told.
        replicas: One per rank, equal.
        source: Of all batches.
        tuning: Process-wide settings held while the run lives.
        backend: How the bytes move when replicas are averaged.
        sink: Takes every line of the story; None keeps only the last events.
        closing: Called when every thread has ended.

    Attributes:
        records: What the run has reported.
        failures: What went wrong.
        replicas: As given; the run's own until it is over, and none once it has let go of them.
        story: What the coordinator was told.
    """

    def __init__(
        self,
        config: RunConfig,
        replicas: Sequence[Replica],
        source: Source,
        tuning: ProcessTuning,
        backend: Backend = "auto",
        sink: Callable[[str], object] | None = None,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.replicas = replicas
        self.records = Records()
        self.failures = Failures()
        self._source = source
        self._tuning = tuning
        self._settings = ExitStack()
        self._settings.callback(closing)
        self._progress: list[tuple[int, str | None]] = []
        self._asked = 0
        self._asking = threading.Lock()  # numbers the wishes in the order in which the inbox has them
        self._inbox: Inbox[Fact] = Inbox(COORDINATOR_INBOX, "the coordinator")
        self._inboxes = [Inbox[Mail](WORKER_INBOX, f"rank {rank}") for rank in range(config.world_size)]
        try:
            self._build(backend, sink)
        except BaseException:
            self._settings.close()
            raise

    def _build(self, backend: Backend, sink: Callable[[str], object] | None) -> None:
        config = self.config
        lanes = [replica.lane for replica in self.replicas]
        averaged = [replica.averaged for replica in self.replicas]
        collective = open_collective(
            backend, config.policy, averaged, lanes, lambda rank: gate.finish(rank), self._collective_hung
        )
        self._settings.callback(collective.close)
        gate = Gate(config.world_size, collective.launch)
        is_async = config.policy == "async" and config.world_size > 1
        snapshots = Snapshots([replica.flat for replica in self.replicas], lanes) if is_async else None
        self._feeds = open_feeds(
            self._source, lanes, held=[replica.width for replica in self.replicas], rows=_rows(config)
        )
        for lane, feed in zip(lanes, self._feeds, strict=True):
            self._settings.callback(lane.drain)
            self._settings.callback(feed.close)
        cores = threads_per_worker(usable_cores(), config.world_size)
        self.workers = [
            Worker(
                rank,
                self.replicas[rank],
                self._source,
                self._feeds[rank],
                gate,
                collective,
                snapshots,
                self._inboxes[rank],
                self._inbox.post,
                self.failures,
                cores if self._tuning.openmp else torch.get_num_threads(),
            )
            for rank in range(config.world_size)
        ]
        self._threads = [
            threading.Thread(target=worker.run, name=f"flowdp-worker-{worker.rank}", daemon=True)
            for worker in self.workers
        ]
        machine = Coordinator(config)
        self.story = Story(machine, sink)
        shell = CoordinatorShell(
            machine,
            self.story,
            gate,
            collective,
            self._inbox,
            self._inboxes,
            self._threads,
            self._source,
            snapshots,
            self.records,
            self.failures,
            self._settings.close,
        )
        # The thread holds this engine, not only its shell: a run whose `Run` nobody keeps must be found at
        # the end of the process.
        self._coordinator = threading.Thread(
            target=partial(self._run, shell), name="flowdp-coordinator", daemon=True
        )

    def start(self) -> None:
        """Start all threads; returns at once.

        Raises:
            DataError: The dataset's worker processes could not be started.
            DeviceError: The dataset could not be brought to a device.

        Threads:
            The user's; it gives its OpenMP pool back.
        """
        self._settings.enter_context(tuned_process(self._tuning))
        try:
            self._source.on_end(self._data_ended)
            self._source.start(wake=self._wake, failed=self._data_failed)
            for feed, inbox in zip(self._feeds, self._inboxes, strict=True):
                feed.start(partial(_notify, inbox))
        except BaseException:
            self._source.close()
            self._settings.close()
            raise
        _live.add(self)
        for thread in (*self._threads, self._coordinator):  # last: it may join the others at once
            thread.start()

    def request(self, wish: Requested) -> int:
        """Tell the coordinator what the user wants; returns at once, with the number of the wish."""
        with self._asking:
            if not self.records.is_over:
                self._asked += 1
                self._inbox.post(wish)
            return self._asked

    def join(self) -> None:
        """Wait for the coordinator thread of a run that is over."""
        if self.records.is_over:
            self._coordinator.join()

    def progress(self) -> list[tuple[int, str | None]]:
        """Steps of each rank so far, and why it has no batches, if it has none."""
        return self._progress or [
            (worker.current.local_step, worker.machine.throttled) for worker in self.workers
        ]

    def let_go(self) -> None:
        """Drop replicas, optimizers and all else that holds memory of a device, of a run that is over.

        A notebook keeps its runs. And the garbage collector counts objects, not their bytes: what refers to
        itself, in the user's model or in torch, may lie on a card for long.
        """
        if not self.workers:
            return
        self._progress = self.progress()
        has_cards = any(replica.lane.is_async for replica in self.replicas)
        self.workers, self.replicas, self._feeds = [], (), []
        del self._source  # it calls us back
        if has_cards:
            gc.collect()

    def is_own_thread(self) -> bool:
        """Whether the calling thread belongs to this run."""
        return threading.current_thread() in (self._coordinator, *self._threads)

    def _run(self, shell: CoordinatorShell) -> None:
        shell.run()

    def _wake(self, rank: int, epoch: int, batch: int) -> None:
        self._feeds[rank].wake(epoch, batch)

    def _data_ended(self, epoch: int, batches: int) -> None:
        self._inbox.post(DataEnded(epoch, batches))

    def _data_failed(self, error: DataError) -> None:
        self._inbox.post(Failed(self.failures.add(error)))

    def _collective_hung(self, error: CollectiveError) -> None:
        self._inbox.post(Failed(self.failures.add(error)))


def _rows(config: RunConfig) -> int | None:
    """Samples of a rank's part of a window for which prefetched parts have room: twice an equal share."""
    if config.window is None:
        return None
    return min(config.window, -(-2 * config.window // config.world_size))


def _notify(inbox: Inbox[Mail], epoch: int, batch: int) -> None:
    inbox.post(BatchReady(epoch, batch))


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def check_free(devices: Sequence[torch.device]) -> None:
    """Check that no CUDA device of these is in the hands of a run: two would share its streams and memory.

    Raises:
        OptionError: One is.
    """
    for engine in list(_live):
        held = {replica.device for replica in engine.replicas} - {torch.device("cpu")}
        if not engine.records.is_over and (taken := held.intersection(devices)):
            names = ", ".join(sorted(map(str, taken)))
            raise OptionError(
                f"{names} is held by a run whose threads have not all left: stop() and join() it first"
            )


def _end_of_process() -> None:
    """A script that ends without `join()` waits for its runs; Ctrl-C there stops them, and so did one before.

    Daemon threads and this, not plain threads: a plain thread's wait at exit cannot be interrupted without
    an abort inside torch.
    """
    runs = list(_live)
    try:
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            _stop(runs)  # the script ended by a Ctrl-C that nobody caught
            return
        for engine in runs:
            engine.request(Requested("unpause"))  # nobody is left to do it
        for engine in runs:
            engine.records.wait()
        _await(runs)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # a second one does not wait
            _stop(runs)
        _exit_interrupted()


def _stop(runs: Sequence[Engine]) -> None:
    for engine in runs:
        engine.request(Requested("stop"))
    _await(runs)


def _await(runs: Sequence[Engine]) -> None:
    """Join runs that have ended or were told to, but for threads that stay inside the user's code."""
    deadline_s = perf_counter() + EXIT_GRACE_S
    for engine in runs:
        engine.records.wait(over=True, timeout_s=max(0.0, deadline_s - perf_counter()))
        engine.join()


def _exit_interrupted() -> None:
    """Let the process end as by a Ctrl-C that nobody caught: by SIGINT, which a shell shows as 130.

    What an atexit callback raises is printed and changes nothing. The interpreter looks, when all else is
    done, whether a KeyboardInterrupt has left code that was run from C.
    """
    names: ctypes.py_object[dict[str, object]] = ctypes.py_object({})
    with suppress(KeyboardInterrupt):
        ctypes.pythonapi.PyRun_String(b"raise KeyboardInterrupt", 257, names, names)  # 257: Py_file_input


atexit.register(_end_of_process)
