"""Reading a map-style dataset: all batches in their order, or those that the ranks of this machine train.

torch gets lists of indices one by one, as many as it takes ahead, and hands their batches over in that order.

Where a run has several machines, one coordinator deals the batches of the epoch to the ranks of all of them.
The order is the same on each machine, so a machine needs only the numbers of the batches of its own ranks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from torch.utils.data import Dataset

from flowdp.data.batches import Portion
from flowdp.data.epoch_order import ALL, BatchOrder
from flowdp.data.loader_source import LoaderSource, ReadPlan
from flowdp.data.samples import Samples
from flowdp.data.source import Batch
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange

__all__ = ["DemandReader", "Reader"]

_Key = tuple[int, ...]  # (epoch, batch), or (epoch, batch, start, stop) of a part


class Reader(LoaderSource):
    """Reads every batch of every epoch, or those of its stride.

    The DataLoader runs over all epochs, so its worker processes never drain at an epoch's end.

    Args:
        dataset: Map-style.
        order: Which samples each batch holds.
        plan: Epochs to read.
        is_counted: See `LoaderSource`.
        loader: Further arguments of `LoaderSource`.
    """

    may_go_on: ClassVar[bool] = False  # there may be more to read later, where there is nothing now

    def __init__(
        self,
        dataset: Dataset[Any],
        order: BatchOrder,
        plan: ReadPlan,
        *,
        is_counted: bool = False,
        **loader: Any,
    ) -> None:
        self._lists = _Lists()
        given: dict[str, Any] = {"dataset": Samples(dataset), "batch_sampler": self._lists, **loader}
        super().__init__(order, plan, is_counted=is_counted, **given)
        # Of the reader thread, once it runs: handed to torch, which returns them in this order ...
        self._under_way: deque[_Key] = deque()
        self._order_error: DataError | None = None  # ... and raised when all before it is there
        self._walk = plan.walk(order.batches)

    def _begin(self) -> None:
        super()._begin()
        if self._loader.num_workers:
            self._more()  # the processes begin at once

    def _wanted(self) -> _Key | None:
        """The batch to be read next, under the lock; None: there is none, or no room for one."""
        return next(self._walk, None)

    def _feed(self) -> Iterator[tuple[_Key, Any]]:
        while self._has_room():
            self._more()
            if not self._under_way:
                if self._order_error is not None:
                    raise self._order_error
                if self.may_go_on:
                    continue  # the batch that was wanted is expected no longer
                return
            key = self._reading = self._under_way[0]
            if not self._may_read(key[0]):
                return
            try:
                payload = self._in_turn(partial(next, self._iterator))
            except StopIteration as stop:  # the dataset's own
                raise self._describe(stop)  # noqa: B904 - it has its cause
            self._under_way.popleft()
            yield key, payload

    def _more(self) -> None:
        """Hand torch the index lists of the next batches, as many as it takes."""
        while self._order_error is None and len(self._under_way) < max(1, self._in_work):
            with self._changed:
                key = None if self._closing else self._wanted()
            if key is None:
                return
            try:
                indices = self._order.indices(key[0], key[1])  # may iterate a sampler: not under the lock
            except DataError as error:
                self._order_error = error
                return
            self._under_way.append(key)
            self._lists.pending.append((indices[key[2] : key[3]] if len(key) > 2 else indices).tolist())
            if self._loader.num_workers:
                self._iterator._try_put_index()


class DemandReader(Reader):
    """Reads the batches that this machine's ranks expect, and nothing else.

    Of a batch that several ranks share, each rank's part is read by itself: the dataset is asked for its
    samples alone, and the collate function makes a batch of these. So the lengths to which it pads texts are
    those of the part, and a number that it takes of the whole batch is that of the part, too. An item may
    depend on its index, and not on the items read before it.

    At most `ahead` batches or parts are stored or under way, besides those that ranks wait for. What no rank
    expects any more, because its plan became void, is likely to be dealt to this machine again: it is dropped
    when its room is needed, and read again if it comes back then. That a batch is taken twice cannot be told
    here: it may rightly come back.

    Deadlock: a batch that a rank waits for is read next, however much others have not taken.

    Args:
        dataset: Map-style.
        order: Which samples each batch holds.
        plan: Epochs to read.
        options: Further arguments of `Reader`.
    """

    may_go_on: ClassVar[bool] = True

    def __init__(self, dataset: Dataset[Any], order: BatchOrder, plan: ReadPlan, **options: Any) -> None:
        super().__init__(dataset, order, plan, **options)
        self.stride = ALL
        # Under the lock of `_changed`: of each rank, in the order of its training.
        self._expected: dict[int, dict[_Key, None]] = {}

    def expect(self, rank: int, upcoming: Sequence[tuple[int, int, SampleRange | None]]) -> None:
        """Read these; see `Source.expect`."""
        keys = dict.fromkeys(self._key(*batch) for batch in upcoming)
        with self._changed:
            if self._closing or self._error is not None:
                return
            self._expected[rank] = keys
            for key, ranks in list(self._waiting.items()):
                if rank in ranks and key not in keys:
                    self._waiting[key] = [other for other in ranks if other != rank]
                    if not self._waiting[key]:
                        del self._waiting[key]
            self._changed.notify()

    def give_back(self, epoch: int, batch: int, payload: Batch, part: SampleRange | None = None) -> None:
        """Return a batch untrained; see `Source.give_back`."""
        key = self._key(epoch, batch, part)
        with self._changed:
            if not self._closing and key not in self._waiting:  # a rank that waits is served by the reader
                self._read[key] = payload if part is None else payload.whole

    def close(self) -> bool:
        """Stop reading; see `Source.close`."""
        with self._changed:
            self._closing = True
            self._expected.clear()
        return super().close()

    def _key(self, epoch: int, batch: int, part: SampleRange | None) -> _Key:
        return (epoch, batch) if part is None else (epoch, batch, part.start, part.stop)

    def _take(self, _rank: int, key: _Key, _part: SampleRange | None) -> Batch | None:
        payload = self._read.pop(key, None)
        if payload is not None:
            for keys in self._expected.values():
                keys.pop(key, None)
        return payload

    def _portion(self, payload: Batch, _key: _Key, part: SampleRange) -> Portion:
        return Portion.of(payload, part.samples)

    def _comes(self, rank: int, key: _Key) -> bool:
        self._check_exists(key)
        self._expected.setdefault(rank, {}).setdefault(key)
        return True

    # ------------------------------------------------------------ under the lock
    def _is_expected(self, key: _Key) -> bool:
        return any(key in keys for keys in self._expected.values())

    def _wanted(self) -> _Key | None:
        awaited = [key for key in self._waiting if self._is_unread(key)]
        if awaited:
            self._make_room()
            return min(awaited)
        # Batches are dealt in about the order in which the ranks will ask for them.
        first = (next(filter(self._is_unread, keys), None) for keys in self._expected.values())
        key = min((key for key in first if key is not None), default=None)
        return key if key is not None and self._make_room() else None

    def _make_room(self) -> bool:
        """Whether there is room for one more, once the oldest that no rank expects are dropped."""
        while len(self._read) + len(self._under_way) >= self.ahead:
            stale = next(itertools.filterfalse(self._is_expected, self._read), None)
            if stale is None:
                return False
            del self._read[stale]
        return True

    def _is_unread(self, key: _Key) -> bool:
        return key not in self._read and key not in self._under_way

    # ------------------------------------------------------------ the reader thread
    def _has_room(self) -> bool:
        """Wait until there is something to read, or a batch under way."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._order_error or self._under_way or self._wanted() is not None
            )
            return not self._closing


class _Lists:
    """Lists of indices for torch: a batch sampler that goes on after its end, when there are new ones.

    torch asks for a list when it has received a batch, and goes on without one where there is none. Its
    `_try_put_index` asks again, which it would do by itself for a batch that is received, and not before.
    """

    def __init__(self) -> None:
        self.pending: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        try:
            return self.pending.popleft()
        except IndexError:
            raise StopIteration from None
