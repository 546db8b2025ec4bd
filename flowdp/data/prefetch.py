"""Batches copied to the device ahead of the worker.

::

    source -> host buffer (pinned) ==copy stream==> slot        -> compute stream -> the same slot again
              3 of them              `copied`       depth + 1      `ready` `free`

One thread per rank. A host buffer is filled once the copy out of it has been passed, which the thread waits
for. The device orders all else: a copy waits for the slot's `free`, `compute` for the slot's `ready`. So
neither the worker nor its stream ever waits for the host's side of a copy. A batch is allocated on the copy
stream, which has waited for `free` when the batch before it in the slot is let go: so the allocator gives it
that memory again, and no other.

The fetched batches are always the beginning of the worker's list, in that order. So a batch that a worker
waits for has every batch before it out of the way, and a slot: no order of events can lock the two up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from flowdp.data.batches import Portion, taken_apart
from flowdp.data.moving import is_plain
from flowdp.data.source import Batch, Feed, Source
from flowdp.data.staging import CopySpans, Staging
from flowdp.data.tensor_source import TensorSource
from flowdp.device.cores import set_own_threads
from flowdp.device.memory import keep_memory, read_memory
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.errors import ProtocolError
from flowdp.policy.budget import USAGE, Memory, RingBudget, payload_depth
from flowdp.protocol.messages import SampleRange
from flowdp.timeline.spans import RankSpans

__all__ = ["PrefetchFeed", "RingGauge"]

_Key = tuple[int, int, SampleRange | None]  # (epoch, batch, part)
_GRACE_S = 0.9


@dataclass(slots=True, eq=False)
class Slot:
    """Place of one batch on the device.

    Attributes:
        ready: Recorded on `copy` behind the copy of the batch.
        free: Recorded on `compute` behind the step that used it.
        batch: The last batch here.
    """

    ready: Event
    free: Event
    batch: Batch = None


@dataclass(slots=True)
class Slots:
    """The slots of a rank.

    Attributes:
        lane: Lane of the rank.
        held: Most of them that are in use at a time: there may always be so many.
        depth: How many more there may be.
        made: Slots that exist.
        unused: Those of them without a batch that is wanted.
    """

    lane: Lane
    held: int
    depth: int
    made: int = 0
    unused: deque[Slot] = field(default_factory=deque)

    @property
    def limit(self) -> int:
        """Most slots that may exist."""
        return self.held + self.depth

    @property
    def ahead(self) -> int:
        """Slots but for those in use."""
        return max(0, self.made - self.held)

    def lend(self) -> Slot | None:
        """A slot to fill, a new one where none is unused; None: all are in use."""
        if self.unused:
            return self.unused.popleft()
        if self.made >= self.limit:
            return None
        self.made += 1
        return Slot(self.lane.event(), self.lane.event())

    def give_back(self, slot: Slot) -> None:
        """Take back a slot; one above the limit is dropped, with its memory."""
        if self.made <= self.limit:
            self.unused.append(slot)
            return
        self.made -= 1
        self.lane.copy.wait_event(slot.free)
        slot.batch = None

    def resize(self, depth: int) -> None:
        """Set the depth: unused slots beyond go now, those in use when they come back."""
        self.depth = depth
        while self.unused and self.made > self.limit:
            self.give_back(self.unused.pop())


@dataclass(slots=True, eq=False)
class _Fetched:
    """A batch on its way to the device, or there.

    Attributes:
        key: Its (epoch, batch, part).
        payload: The source's own batch, to give back; None where it is gathered.
        slot: Slot of its copy, once that is enqueued.
        is_dropped: Whether it was given back.
    """

    key: _Key
    payload: Batch
    slot: Slot | None = None
    is_dropped: bool = False


class RingGauge:
    """Sizes the rings of a device's ranks by its memory.

    It is read by the prefetch threads, before they fetch a batch: at the first mean, in each epoch, once in a
    second, and after a step that ran out of memory. So a ring grows into memory that is free, and makes room
    for training and for other programs, down to no batch ahead; nothing on the way of a step asks.

    Args:
        lane: Lane of one of the ranks.
        ranks: Ranks of the device, each of which joins.
        usage: Part of the device that may be in use.
        limit: Batches ahead of a rank, at most; None: `DEPTH_LIMIT`.
        read: Reads the memory, in tests.

    Threads:
        Any.
    """

    def __init__(
        self,
        lane: Lane,
        ranks: int = 1,
        *,
        usage: float = USAGE,
        limit: int | None = None,
        read: Callable[[], Memory | None] | None = None,
    ) -> None:
        self._read = partial(read_memory, lane) if read is None else read
        self._rings: list[PrefetchFeed] = []
        self._lock = threading.Lock()  # guards the budget; taken before that of a ring
        self._budget = RingBudget(ranks, usage=usage, limit=limit)

    def join(self, ring: PrefetchFeed) -> None:
        """Add a ring."""
        self._rings.append(ring)

    @property
    def first(self) -> int:
        """Batches ahead of a rank before the memory has been read."""
        return self._budget.first

    def trained(self, ring: PrefetchFeed) -> None:
        """Note that the rank of a ring has taken a whole step."""
        with self._lock:
            if self._rings:
                self._budget.trained(self._rings.index(ring))

    def look(self, epoch: int) -> None:
        """Read the memory and size all rings of the device by it, where that is due.

        Args:
            epoch: Index of the epoch of the batch that is to be fetched.
        """
        now_ms = perf_counter() * 1e3
        with self._lock:
            if not self._rings or not self._budget.is_due(epoch, now_ms):
                return
            with QUIET:
                memory = self._read()
            sizes = [ring.batch_bytes for ring in self._rings]
            ahead_bytes = sum(ring.ahead * size for ring, size in zip(self._rings, sizes, strict=True))
            depths = self._budget.depths(memory, sizes, ahead_bytes, epoch, now_ms)
            for ring, depth in zip(self._rings, depths, strict=True):
                ring.resize(depth)

    def ran_short(self, ring: PrefetchFeed) -> None:
        """Note that a ring had no room for more batches ahead than it has, and shorten it."""
        with self._lock:
            if self._rings:
                ring.resize(self._budget.ran_short(self._rings.index(ring), ring.ahead))

    def give_all(self) -> bool:
        """Free the memory of all rings of the device, as a step has run out of memory.

        Returns:
            False where they held nothing ahead.
        """
        with self._lock:
            self._budget.step_ran_short([ring.ahead for ring in self._rings])
            given = [ring.resize(0) for ring in self._rings]  # each of them, also behind one that gives
            return any(given)

    def close(self) -> None:
        """Let all rings go, as the run is over: they keep it alive."""
        with self._lock:
            self._rings.clear()


class PrefetchFeed(Feed):
    """Copies a rank's batches ahead of it.

    Until the gauge has been read one batch is fetched ahead of those in use; where it leaves room for none,
    each is fetched when it is asked for. The memory of a batch may be written over from `release` on, so a
    step that keeps one clones it.

    Args:
        source: Source of all ranks' batches.
        rank: Rank index.
        lane: Its device.
        gauge: Gauge of the device, which sizes the ring; this one joins it.
        held: Most batches in use at a time.
        spans: Recorder of the rank's spans; None: there is no timeline.

    Attributes:
        batch_bytes: Size of the largest batch so far on the device; 0 before the first.
    """

    def __init__(
        self,
        source: Source,
        rank: int,
        lane: Lane,
        *,
        gauge: RingGauge,
        held: int = 1,
        spans: RankSpans | None = None,
    ) -> None:
        super().__init__(source, rank)
        self._lane = lane
        self._gauge = gauge
        is_gathered = isinstance(source, TensorSource) and all(map(is_plain, source.tensors))
        self._tensors = source if is_gathered and isinstance(source, TensorSource) else None
        self._staging = Staging(lane)
        self._copies = None if spans is None else CopySpans(lane, spans)
        self.batch_bytes = 0
        self._thread: threading.Thread | None = None
        self._in_use: list[Slot] = []  # the worker's

        # Serialises everything below; notified when there may be something to do for the prefetch thread.
        self._changed = threading.Condition()
        self._upcoming: deque[_Key] = deque()
        self._fetched: dict[_Key, _Fetched] = {}  # the beginning of `_upcoming`, in its order
        self._asked = False  # the source did not have the next one, and will wake us
        self._wanted: _Key | None = None  # the worker waits for it
        self._slots = Slots(lane, held, gauge.first)
        self._is_trained = False  # the gauge knows of a whole step
        self._error: BaseException | None = None
        self._closing = False
        gauge.join(self)

    @property
    def depth(self) -> int:
        """Batches fetched ahead of those in use, at most; any thread may ask."""
        return self._slots.depth

    # ------------------------------------------------------------ for the gauge
    @property
    def ahead(self) -> int:
        """Slots of the ring but for those in use."""
        return self._slots.ahead

    def resize(self, depth: int) -> bool:
        """Hold so many batches ahead; those beyond go back to the source.

        The gauge calls one ring after another, and holds its own lock meanwhile.

        Returns:
            Whether memory became free, or will.
        """
        with self._changed:
            if self._tensors is None:
                depth = min(depth, payload_depth(self.batch_bytes))
            made = self._slots.made
            self._slots.resize(depth)
            if depth == 0:  # it may be for a step that ran out of memory: the gauge waits for a whole one
                self._is_trained = False
            if len(self._fetched) > self._most_ahead:
                self._give_back(self._most_ahead)
            self._changed.notify()
            # One that is being filled now goes when it is.
            return self._slots.made < made or self._slots.made > self._slots.limit

    # ------------------------------------------------------------ the worker
    def start(self, notify: Callable[[int, int], None]) -> None:
        """Start the prefetch thread; see `Feed.start`."""
        super().start(notify)
        self._thread = threading.Thread(target=self._run, name=f"flowdp-prefetch-{self._rank}", daemon=True)
        self._thread.start()

    def follow(self, upcoming: Sequence[_Key]) -> None:
        """Fetch these; see `Feed.follow`."""
        with self._changed:
            self._follow(upcoming)

    def take(self, epoch: int, batch: int, part: SampleRange | None = None) -> Batch | None:
        """Hand a batch over; see `Feed.take`."""
        key = (epoch, batch, part)
        if len(self._in_use) >= self._slots.held:
            raise ProtocolError(f"rank {self._rank} took batch {batch} of epoch {epoch} without a release")
        with self._changed:
            if not self._upcoming or self._upcoming[0] != key:
                self._follow([key, *(other for other in self._upcoming if other != key)])
            fetched = self._fetched.get(key)
            if fetched is None or fetched.slot is None:
                if self._error is not None:
                    raise self._error
                self._wanted = key
                self._changed.notify()
                return None
            self._wanted = None
            self._upcoming.popleft()
            del self._fetched[key]
            self._changed.notify()
        self._in_use.append(fetched.slot)
        self._lane.compute.wait_event(fetched.slot.ready)
        return fetched.slot.batch

    def release(self) -> None:
        """Let the slots of the batches in use be filled again; see `Feed.release`."""
        slots, self._in_use = self._in_use, []
        if not slots and not self._closing:
            raise ProtocolError(f"rank {self._rank} released a batch that it had not taken")
        for slot in slots:
            slot.free.record(self._lane.compute)
        with self._changed:
            if not self._closing:
                for slot in slots:
                    self._slots.give_back(slot)
                self._changed.notify()

    def wake(self, _epoch: int, _batch: int) -> None:  # an old one makes us ask once too often
        """Let the prefetch thread ask again; see `Feed.wake`."""
        with self._changed:
            self._asked = False
            self._changed.notify()

    def fit(self) -> None:
        """Let the gauge be read from now on; see `Feed.fit`."""
        with self._changed:
            is_known, self._is_trained = self._is_trained, True
        if not is_known:
            self._gauge.trained(self)

    def shrink(self) -> bool:
        """Give all memory ahead back, as its neighbours do; see `Feed.shrink`."""
        has_given = self._gauge.give_all()
        with self._changed:  # for the slot that is being filled
            self._changed.wait_for(
                lambda: self._closing or self._error or self._slots.made <= self._slots.limit, _GRACE_S
            )
        return has_given

    def close(self) -> bool:
        """End the prefetch thread; see `Feed.close`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(_GRACE_S)
            if self._thread.is_alive():
                return False
        with self._changed:  # a reference to an ended run must not keep the device's memory
            self._fetched.clear()
            self._slots.unused.clear()
            self._staging.clear()
            self._in_use = []
        self._gauge.close()
        return True

    def _follow(self, upcoming: Sequence[_Key]) -> None:
        """Take over another list, under the lock; give back fetched batches that are not its beginning."""
        self._upcoming = deque(upcoming)
        pairs = zip(self._fetched, upcoming, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._give_back(kept)
        self._changed.notify()

    def _give_back(self, kept: int) -> None:
        """Give all fetched batches back but for the first ones, under the lock."""
        for key in list(self._fetched)[kept:]:
            fetched = self._fetched.pop(key)
            fetched.is_dropped = True
            if fetched.slot is not None:  # else the prefetch thread is at it, and looks
                self._slots.give_back(fetched.slot)
            if fetched.payload is not None:
                epoch, batch, part = key
                self._source.give_back(epoch, batch, fetched.payload, part)
        self._source.expect(self._rank, list(self._upcoming)[kept:])
        # Another rank may have asked for it since, and would be woken in our place: ask again.
        self._asked = False

    @property
    def _most_ahead(self) -> int:
        """Batches that may be fetched now, under the lock: the one that the worker waits for in any case."""
        return max(self.depth, self._wanted is not None)

    # ------------------------------------------------------------ the prefetch thread
    def _run(self) -> None:
        try:
            set_own_threads(1)  # the cores belong to the workers
            with torch.no_grad(), self._lane.on(self._lane.copy):
                while (fetched := self._fetch()) is not None:
                    self._load(fetched)
                    self._gauge.look(fetched.key[0])
                if self._copies is not None:
                    self._copies.close()
        except BaseException as error:  # the waiting worker must hear of it
            keep_memory([self._lane])
            self._fail(error)

    def _fetch(self) -> _Fetched | None:
        """Wait for the next batch from the source; None at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(self._may_fetch)
                if self._closing:
                    return None
                key = self._upcoming[len(self._fetched)]
                payload = None
                if self._tensors is None:
                    # Under the lock: a `follow` finds it here, or it lies at the source.
                    payload = self._source.take(self._rank, *key)
                    if payload is None:
                        self._asked = True
                        continue
                self._fetched[key] = _Fetched(key, payload)
                return self._fetched[key]

    def _may_fetch(self) -> bool:
        ahead = len(self._fetched)
        return self._closing or (not self._asked and ahead < min(self._most_ahead, len(self._upcoming)))

    def _load(self, fetched: _Fetched) -> None:
        """Bring a batch to the device, unless it is given back meanwhile, or the end comes."""
        while (slot := self._acquire(fetched)) is not None:
            try:
                self._fill(slot, fetched)
            except torch.OutOfMemoryError:
                if not self._make_room():
                    raise
                continue
            with self._changed:
                if fetched.is_dropped:
                    self._slots.give_back(slot)
                    self._changed.notify_all()
                    return
                fetched.slot = slot
                is_wanted = self._wanted == fetched.key
                if is_wanted:
                    self._wanted = None  # one note for each wait: nothing else bounds the worker's inbox
            if is_wanted:
                self._notify(*fetched.key[:2])
            return

    def _fill(self, slot: Slot, fetched: _Fetched) -> None:
        """Enqueue the copies of a batch into a slot.

        Raises:
            torch.OutOfMemoryError: The device has no room for it.
        """
        self._lane.copy.wait_event(slot.free)
        slot.batch = None
        with nullcontext() if self._copies is None else self._copies.copy():
            slot.batch = self._bring(fetched)
            slot.ready.record(self._lane.copy)

    def _bring(self, fetched: _Fetched) -> Batch:
        moved: list[Any]
        build: Callable[[list[Any]], Batch]
        if self._tensors is None:
            leaves, build = taken_apart(fetched.payload)
            moved = self._staging.bring(leaves)
        else:
            moved, build = self._staging.gather(self._tensors, *fetched.key), self._tensors.pack
            if fetched.key[2] is not None:
                build = partial(Portion.gathered, pack=build)
        nbytes = sum(leaf.nbytes for leaf in moved if isinstance(leaf, Tensor))
        self.batch_bytes = max(self.batch_bytes, nbytes)
        return build(moved)

    def _acquire(self, fetched: _Fetched) -> Slot | None:
        """Wait for a slot; None where the batch was given back meanwhile, or at the end."""
        with self._changed:
            while not (self._closing or fetched.is_dropped):
                if slot := self._slots.lend():
                    return slot
                self._changed.wait()
        return None

    def _make_room(self) -> bool:
        """Drop the slot for whose batch there was no memory, and shorten the ring; False: it has no more."""
        with self._changed:
            self._slots.made -= 1
            is_spare = self._slots.made >= self._slots.held
        if not is_spare:
            return self._gauge.give_all()
        # Half of what there is: torch has emptied its cache for us, and the steps want it back.
        self._gauge.ran_short(self)
        return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._closing:
                return
            self._error = error
            wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._notify(*wanted[:2])
