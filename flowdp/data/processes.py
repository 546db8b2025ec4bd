"""The worker processes of a torch DataLoader: how they begin, are waited for, and end."""

from __future__ import annotations

import gc
import logging
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

import torch
from torch.utils.data import get_worker_info

from flowdp.data.samples import Samples

__all__ = ["GRACE_S", "Processes", "begin", "starting"]

log = logging.getLogger("flowdp")

GRACE_S = 0.9
"""Longest wait until a thread or process has left by itself."""

DEEPEST = 8
"""Datasets inside datasets that are looked at: one may hold itself."""

CHANGED = (
    "%s.%s was %s when the worker processes of the dataset started and is %s now, which they do not see: "
    "they live through all epochs. Let a sampler decide by the epoch, with set_epoch(); or, for the batches "
    "that are read from then on, keep the value in memory that processes share (tensor.share_memory_(), "
    "multiprocessing.Value), or read with num_workers=0"
)


def begin(worker_init_fn: Callable[[int], None] | None, number: int) -> None:
    """Initialiser of a worker process, in which the user's code finds its own dataset."""
    info: Any = get_worker_info()
    if isinstance(info.dataset, Samples):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # its own `__setattr__` refuses
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
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _plain(dataset: object) -> dict[tuple[int, str, str], str]:
    """The attributes that are numbers, texts, flags or None, in words, by depth, class and name.

    Those of a dataset that it wraps, too, which it has as `dataset`, as torch's `Subset`.
    """
    attributes: dict[tuple[int, str, str], str] = {}
    for depth in range(DEEPEST):
        for holder in (*reversed(type(dataset).__mro__), dataset):
            for name, value in getattr(holder, "__dict__", {}).items():
                is_cache = value is None and name.startswith("_")  # filled when it is first asked for
                if not is_cache and (value is None or isinstance(value, bool | int | float | str)):
                    attributes[depth, type(dataset).__name__, name] = repr(value)
        dataset = getattr(dataset, "dataset", None)
    return attributes


class Processes:
    """The worker processes of a DataLoader's iterator, with a wait that ends when one of them dies.

    torch waits for its result queue alone, looks for dead processes every 5 s, and where it can raises their
    death by a signal handler in the main thread, out of whatever the user does there. Here the wait is for
    the queue and all processes together, and a death is raised in the thread that reads.

    Args:
        iterator: The iterator.
        dataset: Dataset that the processes got.
    """

    def __init__(self, iterator: Any, dataset: object) -> None:
        self._iterator = iterator
        self._dataset = dataset
        self._sent = _plain(dataset)
        self._is_waiting = False
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

    def get(self, timeout: float) -> Any:
        """Torch's call for the next result; `queue.Empty` makes it look for dead processes."""
        processes = {process.sentinel: process for process in self._iterator._workers}
        self._is_waiting = True
        ready = connection.wait([self._results._reader, *processes], timeout)
        self._is_waiting = False
        if self._results._reader not in ready:
            raise queue.Empty
        try:
            return self._results.get(timeout=timeout)
        except (OSError, EOFError):
            # Tensors travel as handles, and a process that dies takes its own with it. Once it is joined,
            # torch sees that it is dead and says so.
            for sentinel in connection.wait([*processes], timeout=GRACE_S):
                processes[sentinel].join()
            raise

    def look(self) -> None:
        """Warn, once, of an attribute of the dataset that has changed since the processes got it.

        They live through all epochs, where a DataLoader starts new ones for each: an attribute that is set
        between two epochs reaches them no more.
        """
        now = _plain(self._dataset)
        for key, value in self._sent.items():
            if now.get(key, value) != value:
                self._sent = {}
                _, kind, name = key
                log.warning(CHANGED, kind, name, value, now[key])
                return

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
