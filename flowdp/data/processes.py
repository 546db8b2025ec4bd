"""The worker processes of a torch DataLoader: how they begin, are waited for, and end."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

import torch

__all__ = ["GRACE_S", "Processes", "SentAttributes", "begin", "starting"]

log = logging.getLogger("flowdp")

GRACE_S = 0.9
"""Longest wait until a thread or process has left by itself."""

DEEPEST = 8
"""Datasets inside datasets that are looked at: one may hold itself."""

CHANGED = (
    "%s.%s was %r when the worker processes of the dataset started and is %r now, which they do not see: "
    "they live through all epochs. Let a sampler decide by the epoch, with set_epoch(); or, for the batches "
    "that are read from then on, keep the value in memory that processes share (tensor.share_memory_(), "
    "multiprocessing.Value), or read with num_workers=0"
)


def begin(worker_init_fn: Callable[[int], None] | None, number: int) -> None:
    """Initialiser of a worker process."""
    # A terminal sends Ctrl-C to all its processes, but the run ends after its round and reads on for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if worker_init_fn is not None:
        worker_init_fn(number)


@contextmanager
def starting() -> Iterator[None]:
    """Context in which worker processes are started, so that they leave the garbage of this process alone.

    A forked process inherits it, and some must not be collected there: the process groups that an earlier run
    has closed, whose threads are in this process alone, end it by a segmentation fault (torch 2.13).
    """
    _fork.is_start = True
    try:
        yield
    finally:
        _fork.is_start = False


class _Fork(threading.local):
    """The forks of a thread.

    Attributes:
        is_start: Whether they start worker processes.
        collects: Whether garbage was collected before the one under way.
    """

    is_start = False
    collects = False

    def begin(self) -> None:
        """Keep the new process from collecting before `freeze`."""
        if self.is_start:
            self.collects = gc.isenabled()
            gc.disable()

    def end(self) -> None:
        """Go on as before, in the old process."""
        if self.is_start and self.collects:
            gc.enable()

    def freeze(self) -> None:
        """Leave all objects that were there alone, in the new process."""
        if self.is_start:
            self.is_start = False
            gc.freeze()
            if self.collects:
                gc.enable()


_fork = _Fork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_fork.begin, after_in_parent=_fork.end, after_in_child=_fork.freeze)


class SentAttributes:
    """Plain attributes of a dataset as its worker processes got them, and of those that it wraps.

    The processes live through all epochs, where a DataLoader starts new ones for each: an attribute that is
    set between two epochs reaches them no more.

    Args:
        dataset: As the processes get it. One that wraps another has it as `dataset`, as torch's `Subset`.

    Threads:
        Any.
    """

    def __init__(self, dataset: object) -> None:
        self._lock = threading.Lock()
        self._sent: list[tuple[object, dict[str, object]]] = []
        while dataset is not None and len(self._sent) < DEEPEST:
            self._sent.append((dataset, _plain(dataset)))
            dataset = getattr(dataset, "dataset", None)

    def look(self) -> None:
        """Warn, once, of an attribute that has changed."""
        with self._lock:
            for dataset, sent in self._sent:
                now = _plain(dataset)
                for name, value in sent.items():
                    is_cache = value is None and name.startswith("_")  # filled when it is first asked for
                    if name in now and repr(now[name]) != repr(value) and not is_cache:
                        log.warning(CHANGED, type(dataset).__name__, name, value, now[name])
                        self._sent = []
                        return


def _plain(dataset: object) -> dict[str, object]:
    """The attributes that are numbers, texts, flags or None, also those that its class begins with."""
    attributes: dict[str, object] = {}
    for holder in (*reversed(type(dataset).__mro__), dataset):
        attributes.update(getattr(holder, "__dict__", {}))
    return {
        name: value
        for name, value in attributes.items()
        if value is None or isinstance(value, bool | int | float | str)
    }


class Processes:
    """The worker processes of a DataLoader's iterator, with a wait that ends when one of them dies.

    torch waits for its result queue alone, looks for dead processes every 5 s, and where it can raises their
    death by a signal handler in the main thread, out of whatever the user does there. Here the wait is for
    the queue and all processes together, and a death is raised in the thread that reads.

    Args:
        iterator: The iterator.
        more: Called in the thread that waits, after a `poke`: it may hand the processes more work.
    """

    def __init__(self, iterator: Any, more: Callable[[], None] | None = None) -> None:
        self._iterator = iterator
        self._more = more
        self._is_waiting = False
        self._lock = threading.Lock()  # serialises the pokes: one at a time is in the pipe, which never fills
        self._is_poked = False
        self._poked, self._poke = connection.Pipe(duplex=False)
        self._results = iterator._data_queue
        iterator._data_queue = self
        if iterator._worker_pids_set:
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False

    @property
    def awaited(self) -> str:
        """The process that makes the next batch, in words; "" while the reader does not wait for it.

        Threads:
            Any.
        """
        iterator = self._iterator
        # Each task is given to a process in advance, and the results are taken in the order of the tasks.
        owner = iterator._task_info.get(iterator._rcvd_idx)
        if not self._is_waiting or owner is None:
            return ""
        number = owner[0]
        return f"DataLoader worker {number} (process {iterator._workers[number].pid})"

    def poke(self) -> None:
        """Have the thread that waits for a result call `more`, now or when it waits next.

        Threads:
            Any. Does not block.
        """
        with self._lock:
            if not self._is_poked:
                self._is_poked = True
                self._poke.send_bytes(b"!")

    def get(self, timeout: float) -> Any:
        """Torch's call for the next result; `queue.Empty` makes it look for dead processes."""
        processes = {process.sentinel: process for process in self._iterator._workers}
        end_s = time.monotonic() + timeout
        while True:
            self._is_waiting = True
            left_s = max(0.0, end_s - time.monotonic())
            ready = connection.wait([self._results._reader, self._poked, *processes], left_s)
            self._is_waiting = False
            if self._results._reader in ready:
                break
            if ready != [self._poked] or self._more is None:
                raise queue.Empty
            with self._lock:
                self._poked.recv_bytes()
                self._is_poked = False
            self._more()
        try:
            return self._results.get(timeout=timeout)
        except (OSError, EOFError):
            # Tensors travel as handles, and a process that dies takes its own with it. Once it is joined,
            # torch sees that it is dead and says so.
            for sentinel in connection.wait([*processes], timeout=GRACE_S):
                processes[sentinel].join()
            raise

    def terminate(self) -> None:
        """End the processes that have not left by themselves."""
        for process in self._iterator._workers:
            process.terminate()

    def shut_down(self) -> None:
        """Stop and join the processes, and the threads that fed them."""
        self._iterator._shutdown_workers()
        self._iterator._data_queue = self._results
        for feed in self._iterator._index_queues:
            if feed._thread is not None:
                feed._thread.join(GRACE_S)
