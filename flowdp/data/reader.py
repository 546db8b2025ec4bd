"""Reading a dataset: one thread, one torch DataLoader, all devices.

`Source` is what a worker sees: it asks for a batch by its number and has it at once or is woken once it is
there. `Reader` is the source of everything that is not plain tensors. Two threads that read one dataset that
seeks and reads a file get wrong samples without an error, so `__getitem__` is never called by two at once.
"""

from __future__ import annotations

import queue
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import connection
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flowdp.data.order import AllEpochs, Order
from flowdp.errors import DataError, ProtocolError

__all__ = ["Batch", "Reader", "Source"]

Batch = Any
"""A pytree of tensors, or whatever the collate function returns."""

_Key = tuple[int, int]  # (epoch, batch): its order is the order of reading

# `close` waits this long for the reader to leave by itself, then as long again after ending its processes.
_GRACE_S = 0.9


class Source(ABC):
    """Deals the batches of a dataset, each by its (epoch, batch), to whoever it was planned for.

    Attributes:
        batch_size: Samples of every batch but, without drop_last, an epoch's last.
        batches: Batches of an epoch.
        samples: Samples dealt in an epoch, without a dropped tail.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self.batch_size = order.batch_size
        self.batches = order.batches
        self.samples = order.samples

    def samples_in(self, epoch: int, batch: int) -> int:
        """How many samples a batch holds.

        Threads:
            Any.

        Raises:
            IndexError: An epoch has no such batch.
        """
        return self._order.samples_in(epoch, batch)

    def indices(self, epoch: int, batch: int) -> tuple[int, ...]:
        """The dataset indices of a batch, for errors that name them.

        Threads:
            Any.

        Raises:
            IndexError: An epoch has no such batch.
        """
        return tuple(self._order.indices(epoch, batch).tolist())

    @abstractmethod
    def start(self, *, wake: Callable[[int, int, int], None], failed: Callable[[DataError], None]) -> None:
        """Begin to read. Call it once, before any other thread of the run exists.

        Args:
            wake: Called as `wake(rank, epoch, batch)` once a batch is there that `take` did not have; that
                rank asks again. Must not block.
            failed: Called once, if reading fails.

        Threads:
            The calling thread starts the dataset's worker processes; the reader thread calls back.

        Raises:
            DataError: The worker processes could not be started.
        """

    @abstractmethod
    def take(self, rank: int, epoch: int, batch: int) -> Batch | None:
        """Hand a batch over, or None where it has not been read yet and `wake` will follow.

        Threads:
            Any; one batch is taken by one rank.

        Raises:
            DataError: The dataset failed.
            IndexError: There is no such batch.
            ProtocolError: The batch was taken before and not given back.
        """

    @abstractmethod
    def give_back(self, epoch: int, batch: int, payload: Batch) -> None:
        """Return a batch that was taken and not trained, so that it can be taken again.

        Call it before the report that lets the batch be dealt anew.

        Threads:
            Any.
        """

    @abstractmethod
    def close(self) -> bool:
        """Stop reading and end what was started; takes 2 s at most, at any moment, and may be called twice.

        Returns:
            False where a thread is still inside the dataset's own code; it ends with that call.

        Threads:
            Any but the reader's own, so not from `wake` or `failed`.
        """


class Reader(Source):
    """Reads every batch of every epoch in order, ahead of the ranks that will take them.

    The DataLoader runs over all epochs, so its worker processes never drain at an epoch's end.

    Deadlock: the reader stands still only while `ahead` batches lie here and no rank waits for a later one.
    So whoever holds up a round by waiting for its batch is served, whatever others have left lying. That
    stays bounded: batches are dealt in the order of reading, so everything read on the way to a batch that is
    waited for belongs to this plan or an earlier one. What lies here is at most `ahead` batches or those
    dealt and not taken, whichever is more; torch's processes hold num_workers * prefetch_factor besides.

    Args:
        dataset: Map-style.
        order: Which samples each batch holds.
        epochs: Epochs to read; None: without end.
        ahead: Batches read and not taken above which the reader waits, unless a rank waits for it.
        worker_init_fn: Called with its number in each worker process before it reads.
        loader: Further arguments of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        *,
        epochs: int | None,
        ahead: int,
        worker_init_fn: Callable[[int], None] | None = None,
        **loader: Any,
    ) -> None:
        super().__init__(order)
        self.epochs = epochs
        self.ahead = ahead
        self._plan = AllEpochs(order, epochs)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self._plan, worker_init_fn=partial(_begin, worker_init_fn), **loader
        )
        self._thread: threading.Thread | None = None
        self._processes: _Processes | None = None

        # Serialises everything below; notified when the reader may have something to do.
        self._changed = threading.Condition()
        self._read: dict[_Key, Batch] = {}  # read and not taken
        self._waiting: dict[_Key, int] = {}  # asked for and not read -> the rank that asked last
        self._last: _Key = (0, -1)  # everything up to it has been read
        self._error: DataError | None = None
        self._closing = False

    def start(self, *, wake: Callable[[int, int, int], None], failed: Callable[[DataError], None]) -> None:
        """Begin to read; see `Source.start`."""
        try:
            iterator = iter(self._loader)
        except Exception as error:
            raise DataError(
                f"the DataLoader could not be started: {type(error).__name__}: {error}"
            ) from error
        if self._loader.num_workers > 0:
            self._processes = _Processes(iterator)
        self._thread = threading.Thread(
            target=self._run, args=(iterator, wake, failed), name="flowdp-reader", daemon=True
        )
        self._thread.start()

    def take(self, rank: int, epoch: int, batch: int) -> Batch | None:
        """Hand a batch over, or None and a `wake` later; see `Source.take`."""
        key = (epoch, batch)
        with self._changed:
            if self._error is not None:
                raise self._error
            payload = self._read.pop(key, None)
            if payload is None:
                if self._closing:
                    return None
                self._check(key)
                self._waiting[key] = rank
            self._changed.notify()
        return payload

    def give_back(self, epoch: int, batch: int, payload: Batch) -> None:
        """Return a batch untrained; see `Source.give_back`."""
        with self._changed:
            if not self._closing:
                self._read[epoch, batch] = payload

    def close(self) -> bool:
        """Stop reading; see `Source.close`."""
        with self._changed:
            self._closing = True
            self._read.clear()
            self._waiting.clear()
            self._changed.notify()
        if self._thread is None:
            return True
        if self._processes is not None:
            self._thread.join(_GRACE_S)
            # Whoever is left is inside the dataset's code, and torch would wait 5 s for each.
            self._processes.terminate()
        self._thread.join(_GRACE_S)
        return not self._thread.is_alive()

    def _check(self, key: _Key) -> None:
        epoch, batch = key
        if not 0 <= batch < self.batches or epoch < 0 or (self.epochs is not None and epoch >= self.epochs):
            raise IndexError(
                f"batch {batch} of epoch {epoch}: {self.epochs} epochs of {self.batches} batches"
            )
        if key <= self._last:
            raise ProtocolError(f"batch {batch} of epoch {epoch} was taken before and not given back")

    # ------------------------------------------------------------ the reader thread
    def _run(
        self,
        iterator: Iterator[Batch],
        wake: Callable[[int, int, int], None],
        failed: Callable[[DataError], None],
    ) -> None:
        torch.set_num_threads(1)  # this thread's own; the cores belong to the workers
        key = (0, 0)
        try:
            for key in self._plan.walk():
                if not self._has_room():
                    return
                rank = self._put(key, self._next(iterator))
                if rank is not None:
                    wake(rank, *key)
        except BaseException as error:  # also a SystemExit of the dataset: whoever waits must hear of it
            self._fail(key, error, wake, failed)
        finally:
            if self._processes is not None:
                self._processes.shut_down()

    def _next(self, iterator: Iterator[Batch]) -> Batch:
        try:
            return next(iterator)
        except StopIteration:
            if self._plan.error is not None:
                raise self._plan.error from self._plan.error.__cause__
            raise

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting or len(self._read) < self.ahead)
            return not self._closing

    def _put(self, key: _Key, payload: Batch) -> int | None:
        if payload is None:
            raise TypeError("the batch is None; the collate function must return one")
        with self._changed:
            if self._closing:
                return None
            self._read[key] = payload
            self._last = key
            return self._waiting.pop(key, None)

    def _fail(
        self,
        key: _Key,
        error: BaseException,
        wake: Callable[[int, int, int], None],
        failed: Callable[[DataError], None],
    ) -> None:
        if not isinstance(error, DataError):
            error = self._describe(key, error)
        with self._changed:
            if self._closing:  # ending the processes may break a read; nobody waits for it
                return
            self._error = error
            waiting = list(self._waiting.items())
            self._waiting.clear()
            self._read.clear()
        failed(error)
        for (epoch, batch), rank in waiting:
            wake(rank, epoch, batch)

    def _describe(self, key: _Key, cause: BaseException) -> DataError:
        epoch, batch = key
        indices = self.indices(epoch, batch)
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        error = DataError(
            f"reading batch {batch} of epoch {epoch} (samples {shown}) failed: "
            f"{type(cause).__name__}: {cause}",
            epoch=epoch,
            indices=indices,
        )
        error.__cause__ = cause
        return error


def _begin(worker_init_fn: Callable[[int], None] | None, number: int) -> None:
    """What a worker process does first."""
    # A terminal sends Ctrl-C to all its processes, but the run ends after its round and reads on for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if worker_init_fn is not None:
        worker_init_fn(number)


class _Processes:
    """The worker processes of a DataLoader's iterator, with a wait that ends when one of them dies.

    torch waits for its result queue alone, looks for dead processes every 5 s, and where it can raises their
    death by a signal handler in the main thread, out of whatever the user does there. Here the wait is for
    the queue and all processes together, and a death is raised in the thread that reads.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._results = iterator._data_queue
        iterator._data_queue = self
        if iterator._worker_pids_set:
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False

    def get(self, timeout: float) -> Any:
        """What torch calls for the next result; `queue.Empty` makes it look for dead processes."""
        processes = {process.sentinel: process for process in self._iterator._workers}
        ready = connection.wait([self._results._reader, *processes], timeout)
        if self._results._reader not in ready:
            raise queue.Empty
        try:
            return self._results.get(timeout=timeout)
        except (OSError, EOFError):
            # Tensors travel as handles, and a process that dies takes its own with it. Once it is joined,
            # torch sees that it is dead and says so.
            for sentinel in connection.wait([*processes], timeout=_GRACE_S):
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
                feed._thread.join(_GRACE_S)
