"""Reading a dataset: one thread, one torch DataLoader, all devices.

Sources whose datasets have an object in common read in turns, batch by batch: it may be an open file, as the
parts of a split share one, and two threads that seek and read one file get wrong samples without an error.
Batches that worker processes read need no turn.
"""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flowdp.data.batches import Portion, cloned, makes_new
from flowdp.data.epoch_order import ALL, KEPT_BATCHES, NOTHING_TRAINED, BatchOrder, Stride
from flowdp.data.limit import UNLIMITED, Limit
from flowdp.data.processes import GRACE_S, Processes, begin, starting
from flowdp.data.samples import described
from flowdp.data.source import Batch, Source
from flowdp.device.cores import set_own_threads
from flowdp.device.trees import tree_map
from flowdp.errors import DataError, ProtocolError
from flowdp.policy.formats import format_error, format_indices
from flowdp.protocol.messages import SampleRange
from flowdp.protocol.position import Position
from flowdp.threads.stacks import folded
from flowdp.threads.turns import Turns

__all__ = ["LoaderSource", "ReadPlan"]

_Key = tuple[int, ...]  # (epoch, batch), or more of it: its order is the order of reading

VALUES = (type(None), bool, int, float, str, bytes, type, FunctionType, Tensor, np.ndarray)
"""Types that any number of threads may read."""

_turns: WeakValueDictionary[int, Turns] = WeakValueDictionary()
"""Turns to be inside the code of a dataset, by the ids of objects that it has; its readers hold both."""

_finding = threading.Lock()
"""Held while turns are looked up or made."""


def _turns_of(dataset: object) -> list[Turns]:
    """Turns of a dataset, of those that it wraps, and of the objects in their attributes.

    In one order for all readers, so that no two wait for each other.
    """
    keys: set[int] = set()
    seen: set[int] = set()
    todo = [dataset]
    while todo:
        reader = todo.pop()
        if isinstance(reader, VALUES) or id(reader) in seen:
            continue
        seen.add(id(reader))
        held = getattr(reader, "__dict__", {})
        keys |= {id(reader), *(id(value) for value in held.values() if not isinstance(value, VALUES))}
        inner = held.get("datasets")  # as `ConcatDataset`; `dataset` as `Subset`
        todo += [held.get("dataset"), *(inner if isinstance(inner, (list, tuple)) else ())]
    with _finding:
        return [_turns.setdefault(key, Turns()) for key in sorted(keys)]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Epochs to read, and for whom.

    Attributes:
        epochs: Epochs to read; None: without end.
        takers: Ranks of this machine that take batches of their own: sets how far reading runs ahead of them.
        start: Where the run stands, in batches of the source: its trained part is not read again.
        on_demand: An epoch is read when a rank waits for it; processes hold some batches of the next epochs,
            and no more.
        keeps: See `Source`; for batches that are taken whole.
        limit: Part of each epoch that is read.
        stride: Batches of an epoch that are this machine's, on demand and of a stream. Others of a run on
            several machines are read as this machine's ranks expect them.
        is_part: An IterableDataset yields this machine's batches alone.
    """

    epochs: int | None
    takers: int = 1
    start: Position = NOTHING_TRAINED
    on_demand: bool = False
    keeps: bool = False
    limit: Limit = UNLIMITED
    stride: Stride = ALL
    is_part: bool = False

    def numbers(self) -> Iterator[int]:
        """Numbers of the epochs that are read."""
        first = self.start.done
        return iter(itertools.count(first) if self.epochs is None else range(first, self.epochs))

    def walk(self, batches: int) -> Iterator[tuple[int, int]]:
        """Every (epoch, batch) in the order of reading, for epochs of so many batches.

        A resumed run has those that are not trained yet, the open epochs' in ascending order.
        """
        if not self.stride.of(batches):
            return  # not one in any epoch, and there may be no last one
        for epoch in self.numbers():
            position, missing = self.start.remaining(epoch) or (0, ())
            for batch in itertools.chain(missing, range(position, batches)):
                if self.stride.has(batch):
                    yield (epoch, batch)


class LoaderSource(Source):
    """One thread that reads one DataLoader, ahead of the ranks that will take its batches.

    Deadlock: the reader pauses only while `ahead` batches behind the last one taken are stored and no rank
    waits for a later one. So a rank that holds up a round by waiting for its batch is served, however many
    batches others have not taken; and a rank whose order is the last to be dealt need not wait for each.
    Memory stays bounded: batches are dealt in the order of reading, so all before one that is taken or
    awaited belongs to this round's plan or an earlier one. At most those dealt and not taken are stored, and
    `ahead`; torch's processes hold num_workers * prefetch_factor besides, and where the source `keeps`,
    batches that are in no mean yet are stored, too.

    On demand, an epoch begins when a batch of it is waited for, and the thread starts with the first one: so
    nothing but the processes exists until then, and another source may start processes of its own.

    Args:
        order: Which samples each batch holds; None: the dataset's own.
        plan: Epochs to read.
        is_counted: The loader yields (samples, batch), because nothing else tells the number of samples.
        worker_init_fn: Called with its number in each worker process before it reads.
        loader: Further arguments of `torch.utils.data.DataLoader`.

    Attributes:
        plan: As given.
        ahead: Batches stored behind the last one taken at which the reader waits, unless a rank waits for it.
    """

    def __init__(
        self,
        order: BatchOrder | None,
        plan: ReadPlan,
        *,
        is_counted: bool,
        worker_init_fn: Callable[[int], None] | None = None,
        **loader: Any,
    ) -> None:
        super().__init__(order, plan.stride)
        self.plan = plan
        self.keeps = plan.keeps
        made: DataLoader[Any] = DataLoader(worker_init_fn=partial(begin, worker_init_fn), **loader)
        self._loader = made
        self._in_work = made.num_workers * (made.prefetch_factor or 2)  # batches that torch's processes hold
        # Two for each rank, and two for the road; with processes at least their batches in work, so that none
        # of them waits for a rank that is late.
        self.ahead = max(2 * plan.takers + 2, self._in_work)
        self._is_counted = is_counted
        self._makes_new = makes_new(made)
        self._reading: _Key = (plan.start.done, 0)  # position of the reader
        self._begun = -1  # the last epoch that was waited for, on demand; the reader's own
        self._turns = [] if self._loader.num_workers else _turns_of(self._loader.dataset)
        self._thread: threading.Thread | None = None
        self._processes: Processes | None = None
        self._iterator: Any = None  # of the loader

        # Serialises everything below; notified when the reader may have something to do.
        self._changed = threading.Condition()
        self._read: dict[_Key, Batch] = {}  # read and not taken
        self._lent: dict[_Key, tuple[int, Batch]] = {}  # kept: rank and batch
        self._samples: dict[_Key, int] = {}  # of the last that were read
        self._left: dict[_Key, int] = {}  # of those that were taken in part: samples that were not
        self._waiting: dict[_Key, list[int]] = {}  # asked for and not read -> the ranks that asked
        self._last: _Key = (plan.start.done, -1)  # everything up to it has been read, or was before
        self._taken: _Key = self._last  # the last in the order of reading that was taken
        self._error: DataError | None = None
        self._closing = False

    def start(self, *, wake: Callable[[int, int, int], None], failed: Callable[[DataError], None]) -> None:
        """Begin to read; see `Source.start`."""
        try:
            with starting():
                self._begin()
        except Exception as error:
            raise DataError(f"the DataLoader could not be started: {format_error(error)}") from error
        if self._loader.num_workers > 0:
            self._processes = Processes(self._iterator, self._loader.dataset)
        # The callbacks are the thread's alone: a source that was read must not keep the run alive.
        self._thread = threading.Thread(
            target=self._run, args=(self._feed(), wake, failed), name="flowdp-reader", daemon=True
        )
        if not self.plan.on_demand:
            self._thread.start()

    def threads(self) -> list[threading.Thread]:
        """The reader thread; see `Source.threads`."""
        return [] if self._thread is None else [self._thread]

    def waits_for(self) -> str:
        """The worker process that is to deliver the next batch; see `Source.waits_for`."""
        process = "" if self._processes is None else self._processes.awaited
        epoch, batch = self._reading[:2]
        return f"waiting for {process} to read batch {batch + 1} of epoch {epoch + 1}" if process else ""

    def take(self, rank: int, epoch: int, batch: int, part: SampleRange | None = None) -> Batch | None:
        """Hand a batch over, or None and a `wake` later; see `Source.take`."""
        key = self._key(epoch, batch, part)
        with self._changed:
            if self._error is not None:
                raise self._error
            payload = self._take(rank, key, part)
            if payload is not None:
                self._taken = max(self._taken, key)
            else:
                if self._closing or not self._comes(rank, key):
                    return None
                # A batch of one rank alone belongs to the rank that asks last: it was dealt anew.
                ranks = [] if part is None else self._waiting.get(key, [])
                self._waiting[key] = [*(other for other in ranks if other != rank), rank]
                if self._thread is not None and self._thread.ident is None:
                    self._thread.start()
            self._changed.notify()
        return payload if payload is None or part is None else self._portion(payload, key, part)

    def _key(self, epoch: int, batch: int, _part: SampleRange | None) -> _Key:
        """Key under which a batch is stored."""
        return (epoch, batch)

    def _portion(self, payload: Batch, key: _Key, part: SampleRange) -> Portion:
        """The wanted samples of a stored batch."""
        return Portion.of(payload, self.samples_in(key[0], key[1]), part)

    def _take(self, rank: int, key: _Key, part: SampleRange | None) -> Batch | None:
        """A stored batch, which stays until all its samples are taken; under the lock."""
        if part is None or key not in self._read:
            payload = self._read.pop(key, None)
            if self.keeps and payload is not None:
                self._lent[key] = rank, payload
            return payload
        whole = self._left.pop(key, None)
        left = (self.samples_in(key[0], key[1]) if whole is None else whole) - part.samples
        if left == 0:
            return self._read.pop(key)
        self._left[key] = left
        return self._read[key]

    def samples_in(self, epoch: int, batch: int) -> int:
        """Number of samples of a batch that was taken lately, or is stored here; see `Source.samples_in`."""
        if not self._is_counted:
            return super().samples_in(epoch, batch)
        with self._changed:
            samples = self._samples.get((epoch, batch))
        if samples is None:
            raise IndexError(f"batch {batch} of epoch {epoch} has not been read, or long ago")
        return samples

    def give_back(self, epoch: int, batch: int, payload: Batch, part: SampleRange | None = None) -> None:
        """Return a batch untrained; see `Source.give_back`."""
        key = (epoch, batch)
        with self._changed:
            if self._closing:
                return
            if part is not None:
                left = self._left.pop(key, 0) + part.samples
                if left < self.samples_in(epoch, batch):
                    self._left[key] = left
            self._lent.pop(key, None)
            self._read[key] = payload if part is None else payload.whole

    def settle(self, keys: Sequence[tuple[int, int]]) -> None:
        """Drop averaged batches; see `Source.settle`."""
        with self._changed:
            for key in keys:
                self._lent.pop(key, None)

    def reclaim(self, rank: int) -> None:
        """Take back a lost rank's batches; see `Source.reclaim`."""
        with self._changed:
            for key, (taker, payload) in list(self._lent.items()):
                if taker == rank:
                    del self._lent[key]
                    self._read[key] = payload

    def close(self) -> bool:
        """Stop reading; see `Source.close`."""
        with self._changed:
            self._closing = True
            self._read.clear()
            self._lent.clear()
            self._left.clear()
            self._waiting.clear()
            self._changed.notify()
        for turns in self._turns:
            turns.look()
        if self._processes is not None and self._reading[0] > self.plan.start.done:
            self._processes.look()  # the last epochs may have been read before the first had been trained
        if self._thread is None:
            return True
        if self._thread.ident is None:
            if self._processes is not None:
                self._processes.terminate()
                self._processes.shut_down()
            return True
        if self._processes is not None:
            self._thread.join(GRACE_S)
            # A thread that is left is inside the dataset's code, and torch would wait 5 s for each.
            self._processes.terminate()
        self._thread.join(GRACE_S)
        for turns in self._turns:  # it may still be inside the dataset's code, and runs to come read, too
            turns.take_away(self._thread)
        return not self._thread.is_alive()

    def _comes(self, _rank: int, key: _Key) -> bool:
        """Whether a batch that is not stored will be read; raises if there is none, or it was taken."""
        self._check_exists(key)
        if key <= self._last:
            raise ProtocolError(f"batch {key[1]} of epoch {key[0]} was taken before and not given back")
        return True

    def _check_exists(self, key: _Key) -> None:
        epoch, batch = key[:2]
        epochs = self.plan.epochs
        most = batch + 1 if self.batches is None else self.batches
        if not 0 <= batch < most or epoch < 0 or (epochs is not None and epoch >= epochs):
            raise IndexError(f"batch {batch} of epoch {epoch}: {epochs} epochs of {self.batches} batches")
        left = self.plan.start.remaining(epoch)
        if left is None or (batch < left[0] and batch not in left[1]):
            raise ProtocolError(f"batch {batch} of epoch {epoch} was trained before the run was resumed")

    def _begin(self) -> None:
        """Make the loader's iterator; in the thread that starts its worker processes."""
        self._iterator = iter(self._loader)

    def _in_turn(self, read: Callable[[], Any]) -> Any:
        """Call the dataset's own code, when no reader that shares an object does; on the reader thread."""
        with ExitStack() as held:
            for turns in self._turns:
                if not turns.begin(lambda: self._closing):
                    raise ProtocolError("the source was closed while it waited for its turn to read")
                held.callback(turns.end)
            return read()

    @abstractmethod
    def _feed(self) -> Iterator[tuple[_Key, Any]]:
        """Everything there is to read, in order; runs on the reader thread, with `_reading` up to date.

        Before it reads anything of an epoch it asks `_may_read`.
        """

    # ------------------------------------------------------------ the reader thread
    def _run(
        self,
        feed: Iterator[tuple[_Key, Any]],
        wake: Callable[[int, int, int], None],
        failed: Callable[[DataError], None],
    ) -> None:
        try:
            set_own_threads(1)  # the cores belong to the workers
            seen = self.plan.start.done
            while self._has_room():
                read = next(feed, None)
                if read is None:
                    return
                epoch, batch = read[0][:2]
                if epoch != seen and self._processes is not None:
                    self._processes.look()
                seen = epoch
                for rank in self._put(*read):
                    wake(rank, epoch, batch)
        except BaseException as error:  # also a SystemExit of the dataset: waiting ranks must hear of it
            self._fail(error, wake, failed)
        finally:
            if self._processes is not None:
                self._processes.shut_down()

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closing
                    or self._waiting
                    or sum(key > self._taken for key in self._read) < self.ahead
                )
            )
            return not self._closing

    def _may_read(self, epoch: int) -> bool:
        """Wait until an epoch may be read; False at the end. For `_feed`, on the reader thread."""
        if not self.plan.on_demand or epoch <= self._begun:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._closing or any(key[0] >= epoch for key in self._waiting))
            self._begun = epoch
            return not self._closing

    def _put(self, key: _Key, read: Any) -> Sequence[int]:
        """Store a batch, in memory that later reads leave alone; returns the ranks that wait for it."""
        samples, payload = read if self._is_counted else (0, read)
        if payload is None:
            raise TypeError("the batch is None; the collate function must return one")
        if not self._makes_new:
            payload = cloned(payload)
        elif self.keeps:
            payload = tree_map(_unshared, payload)
        with self._changed:
            if self._closing:
                return ()
            self._last = key
            self._read[key] = payload
            if self._is_counted:
                self._samples[key] = samples
                if len(self._samples) > KEPT_BATCHES:
                    del self._samples[next(iter(self._samples))]
            return self._waiting.pop(key, ())

    def _fail(
        self,
        error: BaseException,
        wake: Callable[[int, int, int], None],
        failed: Callable[[DataError], None],
    ) -> None:
        if not isinstance(error, DataError):
            error = self._describe(error)
        with self._changed:
            if self._closing:  # ending the processes may break a read; no rank waits for it
                return
            self._error = error
            waiting = list(self._waiting.items())
            self._waiting.clear()
            self._read.clear()
            self._lent.clear()
        failed(error)
        for (epoch, batch, *_), ranks in waiting:
            for rank in ranks:
                wake(rank, epoch, batch)

    def _describe(self, cause: BaseException) -> DataError:
        """The error of a read that failed."""
        epoch, batch, *part = self._reading
        indices = self.indices(epoch, batch)
        if part:
            indices = indices[slice(*part)]
        sample, text = described(cause)
        where = f"batch {batch + 1} of epoch {epoch + 1}"
        if sample is not None:
            where = f"sample {sample}, for {where},"
        elif indices:
            where += f" (samples {format_indices(indices)})"
        error = DataError(f"reading {where} failed: {text}", epoch=epoch, indices=indices, sample=sample)
        error.__cause__ = folded(cause)
        return error


def _unshared(leaf: Any) -> Any:
    """A tensor from a process, as memory of our own: shared memory is scarce, and each one an open file."""
    is_shared = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.is_shared()
    return leaf.clone() if is_shared else leaf
