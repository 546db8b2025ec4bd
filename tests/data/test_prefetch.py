"""Tests of the ring: every batch right and once, every access ordered, no deadlock."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.data.epoch_order import EpochOrder, Stride
from flowdp.data.loader_source import LoaderSource
from flowdp.data.prefetch import PrefetchFeed, RingGauge
from flowdp.data.source import Batch, Source
from flowdp.data.staging import HOST_SLOTS
from flowdp.data.tensor_source import TensorSource
from flowdp.device.streams import QUIET, HostLane, Lane
from flowdp.errors import DataError, ProtocolError
from flowdp.policy.budget import Memory
from flowdp.protocol.messages import SampleRange
from tests.data.cards import Card, CardLane
from tests.data.opening import opened
from tests.limits import HANG_S

Key = tuple[int, int]
SAMPLES, BATCH, BATCHES = 43, 4, 11  # the last batch of an epoch has 3


class Samples:
    """A dataset whose samples have their index."""

    def __init__(self, length: int = SAMPLES, sample: Callable[[int], Any] | None = None) -> None:
        self.length = length
        self.sample = sample or (lambda index: {"x": torch.full((2, 3), float(index)), "y": index})

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


def reach(source: Any, ahead: int) -> None:
    """Let a reader run so far ahead."""
    source.inner.ahead = ahead


class Logged(Source):
    """A source that records its batches: none twice, none lost."""

    def __init__(self, inner: Source) -> None:
        super().__init__(inner._order)
        self.inner = inner
        self.out: set[Key] = set()
        self.returned: list[Key] = []
        self._lock = threading.Lock()

    def start(self, *, wake: Any, failed: Any) -> None:
        self.inner.start(wake=wake, failed=failed)

    def expect(self, rank: int, upcoming: Any) -> None:
        assert not any((epoch, batch) in self.out for epoch, batch, _ in upcoming), "it would be read again"
        self.inner.expect(rank, upcoming)

    def take(self, rank: int, epoch: int, batch: int, part: SampleRange | None = None) -> Batch | None:
        payload = self.inner.take(rank, epoch, batch)
        if payload is not None:
            with self._lock:
                assert (epoch, batch) not in self.out
                self.out.add((epoch, batch))
        return payload

    def give_back(self, epoch: int, batch: int, payload: Batch, part: SampleRange | None = None) -> None:
        with self._lock:
            self.out.remove((epoch, batch))
            self.returned.append((epoch, batch))
        self.inner.give_back(epoch, batch, payload)

    def close(self) -> bool:
        return self.inner.close()


class Shelf(Source):
    """A source whose batches a test adds by hand."""

    def __init__(self, batches: int = 50) -> None:
        super().__init__(EpochOrder(batches * BATCH, BATCH, 0, shuffle=False, drop_last=False))
        self.there: dict[Key, Batch] = {}
        self.asked: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self.returned: list[Key] = []

    def start(self, *, wake: Any, failed: Any) -> None: ...

    def take(self, rank: int, epoch: int, batch: int, part: SampleRange | None = None) -> Batch | None:
        self.asked.put((rank, epoch, batch))
        return self.there.pop((epoch, batch), None)

    def give_back(self, epoch: int, batch: int, payload: Batch, part: SampleRange | None = None) -> None:
        self.there[epoch, batch] = payload
        self.returned.append((epoch, batch))

    def close(self) -> bool:
        return True

    def put(self, *batches: int) -> None:
        for batch in batches:
            self.there[0, batch] = torch.full((BATCH,), float(batch))


class Rank:
    """A worker that gets its batches through a feed."""

    def __init__(self, source: Source, lane: Lane, rank: int = 0, **options: Any) -> None:
        options.setdefault("gauge", RingGauge(lane, read=lambda: None))
        self.lane = lane
        self.feed = options.pop("feed", PrefetchFeed)(source, rank, lane, **options)
        self.notes: queue.SimpleQueue[Key] = queue.SimpleQueue()
        self.seen: dict[Key, Batch] = {}
        self.waits = self.noted = 0
        self.feed.start(self._note)

    def _note(self, epoch: int, batch: int) -> None:
        self.noted += 1
        assert self.noted <= self.waits, "more notes than waits: the inbox would overflow"
        self.notes.put((epoch, batch))

    def follow(self, keys: Sequence[Key]) -> None:
        self.feed.follow([(*key, None) for key in keys])

    def take(self, key: Key) -> Batch:
        with self.lane.on(self.lane.compute):
            while (batch := self.ask(key)) is None:
                self.notes.get(timeout=HANG_S)
        return batch

    def ask(self, key: Key, part: SampleRange | None = None) -> Batch | None:
        self.waits += 1  # before the answer: the message may be faster than it
        batch = self.feed.take(*key, part)
        self.waits -= batch is not None
        return batch

    def train(self, key: Key) -> Batch:
        """A step that clones its batch."""
        batch = self.take(key)
        with self.lane.on(self.lane.compute):
            self.seen[key] = torch.utils._pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch
            )
            self.feed.release()
        return self.seen[key]


@pytest.fixture
def close() -> Iterator[Callable[[Any], Any]]:
    """A list of objects to close at the end of the test: feeds before their source."""
    things: list[Any] = []

    def later(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield later
    for thing in sorted(things, key=lambda thing: isinstance(thing, Source)):
        begin = time.perf_counter()
        assert (thing if isinstance(thing, Source) else thing.feed).close()
        assert time.perf_counter() - begin < HANG_S / 2  # the tests' own waits are longer


def tensors(length: int = SAMPLES, **options: Any) -> TensorSource:
    x = torch.arange(length, dtype=torch.float32)[:, None, None].expand(-1, 2, 3).contiguous()
    source = opened({"x": x, "y": torch.arange(length)}, BATCH, seed=3, epochs=3, **options)
    assert isinstance(source, TensorSource)
    return source


def read(dataset: Any = None, **options: Any) -> Logged:
    return Logged(opened(dataset or Samples(), BATCH, seed=3, **{"epochs": 3, **options}))


def begin(source: Source, ranks: Sequence[Rank]) -> None:
    source.start(wake=lambda rank, *key: ranks[rank].feed.wake(*key), failed=lambda error: None)


def check(source: Source, key: Key, batch: Batch) -> None:
    indices = torch.tensor(source.indices(*key))
    assert torch.equal(batch["y"], indices)
    assert torch.equal(batch["x"], indices.float()[:, None, None].expand(-1, 2, 3))


def everything(epochs: int = 3) -> list[Key]:
    return [(epoch, batch) for epoch in range(epochs) for batch in range(BATCHES)]


LANES = {"host": lambda: HostLane(torch.device("cpu")), "card": CardLane}
SOURCES = {"tensors": tensors, "read": read, "on demand": partial(read, stride=Stride(0, 2))}


def no_race(*lanes: Lane) -> None:
    for lane in lanes:
        if isinstance(lane, CardLane):
            assert lane.card.races == []


# ---------------------------------------------------------------- the batches
@pytest.mark.parametrize("source_of", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("lane_of", LANES.values(), ids=LANES)
@pytest.mark.parametrize("depth", [1, 3])
def test_all_batches_of_all_epochs(close, source_of, lane_of, depth):
    source, lane = close(source_of()), lane_of()
    rank = close(Rank(source, lane))
    rank.feed._slots.depth = depth
    begin(source, [rank])
    keys = everything()
    for i in range(0, len(keys), 9):  # in overlapping plans
        rank.follow(keys[i : i + 18])
        for key in keys[i : i + 9]:
            check(source, key, rank.train(key))
    assert list(rank.seen) == keys
    no_race(lane)
    assert rank.feed._slots.made <= depth + 1
    if isinstance(lane, CardLane):
        assert lane.card.waiters <= {"flowdp-prefetch-0"}, "the worker waited for the device"


@pytest.mark.parametrize("what", ["ready", "free", "copied"])
@pytest.mark.parametrize("source_of", SOURCES.values(), ids=SOURCES)
def test_each_edge_is_needed(close, what, source_of):
    source, lane = close(source_of()), CardLane()
    deaf = {"ready": lane.compute, "free": lane.copy}
    if what in deaf:
        lane.card.deaf.add(deaf[what])
    rank = close(Rank(source, lane))
    begin(source, [rank])
    rank.follow(everything())
    for key in everything():
        if what == "copied":
            lane.card.deaf.update(lane.made)
        rank.train(key)
    assert lane.card.races


# ---------------------------------------------------------------- changing plans
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lane_of", LANES.values(), ids=LANES)
@pytest.mark.parametrize("source_of", SOURCES.values(), ids=SOURCES)
def test_plans_change_at_any_moment(close, seed, lane_of, source_of):
    dice = random.Random(seed)
    world = dice.choice([1, 2, 3])
    source = close(source_of(takers=world))
    if isinstance(source, Logged):
        reach(source, dice.choice([1, 2, 8]))
    ranks = [close(Rank(source, lane_of(), rank)) for rank in range(world)]
    for rank in ranks:
        rank.feed._slots.depth = dice.choice([1, 2, 5])
    begin(source, ranks)
    undealt, plans = everything(), [list[Key]() for _ in ranks]
    while undealt or any(plans):
        who = dice.randrange(world)
        rank, plan = ranks[who], plans[who]
        match dice.choice(["deal", "train", "train", "train", "void"]):
            case "deal":
                count = dice.randrange(1, 6)
                plan += undealt[:count]
                del undealt[:count]
                rank.follow(plan)
            case "train" if plan:
                key = plan.pop(0)
                check(source, key, rank.train(key))
            case "void":
                kept = dice.randrange(len(plan) + 1)
                undealt = sorted(undealt + plan[kept:])
                del plan[kept:]
                rank.follow(plan)
                if isinstance(source, Logged):
                    assert not source.out & set(undealt), "a batch was not given back in time"
    trained = [key for rank in ranks for key in rank.seen]
    assert sorted(trained) == everything()
    if isinstance(source, Logged):
        assert source.out == set(everything())
    no_race(*(rank.lane for rank in ranks))


def test_the_batch_being_copied_is_given_back_at_once(close):
    class Slow(CardLane):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.go = threading.Event(), threading.Event()

        def pinned(self, shape, dtype):
            self.inside.set()
            assert self.go.wait(HANG_S)
            return super().pinned(shape, dtype)

    shelf, lane = Shelf(), Slow()
    shelf.put(0, 1, 2)
    rank = close(Rank(shelf, lane))
    rank.follow([(0, 0), (0, 1)])
    assert lane.inside.wait(HANG_S)
    rank.follow([(0, 2)])
    assert shelf.returned == [(0, 0)]
    lane.go.set()
    assert rank.train((0, 2)).tolist() == [2.0] * BATCH
    rank.follow([(0, 0), (0, 1)])
    assert rank.train((0, 0)).tolist() == [0.0] * BATCH
    assert rank.train((0, 1)).tolist() == [1.0] * BATCH
    assert len(rank.feed._slots.unused) == rank.feed._slots.made, "the slot of a batch given back is lost"
    no_race(lane)


def test_it_asks_again_when_woken(close):
    shelf = Shelf()
    rank = close(Rank(shelf, CardLane()))
    rank.follow([(0, 0)])
    assert shelf.asked.get(timeout=HANG_S) == (0, 0, 0)
    assert rank.ask((0, 0)) is None
    shelf.put(0)
    rank.feed.wake(0, 0)
    assert rank.notes.get(timeout=HANG_S) == (0, 0)
    assert rank.train((0, 0)).tolist() == [0.0] * BATCH


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("lane_of", LANES.values(), ids=LANES)
def test_short_rings_and_a_short_reader_do_not_lock_up(close, ahead, lane_of):
    source = close(read(takers=3))
    reach(source, ahead)
    ranks = [close(Rank(source, lane_of(), rank)) for rank in range(3)]
    begin(source, ranks)
    everyone = threading.Barrier(3)
    errors: list[BaseException] = []

    def work(who: int) -> None:
        mine = everything()[who::3]
        try:
            for i in range(0, len(mine), 4):
                ranks[who].follow(mine[i : i + 8])
                for key in mine[i : i + 4]:
                    check(source, key, ranks[who].train(key))
                everyone.wait(HANG_S)  # a round
        except BaseException as error:
            errors.append(error)
            everyone.abort()

    threads = [threading.Thread(target=work, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert errors == []
    assert sorted(key for rank in ranks for key in rank.seen) == everything()


# ---------------------------------------------------------------- batches of other kinds


def test_a_loose_batch_is_kept_until_the_copy_stream_has_waited_for_its_step(close):
    # Its memory returns to the copy stream when the last reference is gone, not before.
    shelf, lane = Shelf(), CardLane()
    shelf.put(0)
    for batch in (1, 2, 3, 4):
        shelf.there[0, batch] = torch.zeros(BATCH, batch)
    rank = close(Rank(shelf, lane))
    rank.train((0, 0))
    rank.follow([(0, 1)])
    rank.train((0, 1))
    (slot,) = rank.feed._slots.unused
    assert slot.batch is not None
    waited = ("copy", "waits for", slot.free.name)  # type: ignore[attr-defined]
    before = lane.card.log.count(waited)
    for batch in (2, 3, 4):
        rank.train((0, batch))
    assert lane.card.log.count(waited) > before


# ---------------------------------------------------------------- memory
class Device:
    """The memory of a device that a test sets.

    Attributes:
        spare: Bytes that batches may take.
        reads: Readings so far.
    """

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self.reads = 0

    def __call__(self) -> Memory:
        assert QUIET.locked(), "the allocator is asked while a collective may be launched"
        self.reads += 1
        return Memory(total=2**40, free=self.spare, reserved=0, active=0, peak=0, split=0)

    def gauge(self, lane: Lane, ranks: int = 1, **options: Any) -> RingGauge:
        """A gauge that finds this memory."""
        return RingGauge(lane, ranks, usage=1.0, read=self, **options)


BATCH_BYTES = BATCH * (6 * 4 + 8)


def test_the_ring_is_sized_once_the_memory_is_known(close):
    lane, device = CardLane(), Device(7 * BATCH_BYTES)
    rank = close(Rank(tensors(), lane, gauge=device.gauge(lane)))
    assert rank.feed.depth == 1
    keys = everything()
    rank.follow(keys)
    rank.train(keys[0])
    assert device.reads == 0
    rank.feed.fit()
    rank.take(keys[1])
    lane.card.until(lambda: rank.feed._slots.made == 8)
    assert rank.feed.depth == 7
    rank.feed.release()
    for key in keys[2:]:
        rank.train(key)
    assert rank.feed._slots.made == 8
    assert device.reads >= 3, "once, and once in each further epoch"
    assert lane.card.peaks_reset == 0, "the peak is the user's, too"
    no_race(lane)


def test_ranks_on_one_device_share_it(close):
    lane, device = CardLane(), Device(20 * BATCH_BYTES)
    shared = device.gauge(lane, 2)
    made = [close(Rank(tensors(), lane, who, gauge=shared)) for who in range(2)]
    for rank in made:
        rank.follow(everything())
        rank.train((0, 0))
    made[0].feed.fit()
    made[0].train((0, 1))
    assert device.reads == 0, "the other one may still have to allocate"
    made[1].feed.fit()
    made[0].take((0, 2))
    made[1].take((0, 1))
    for rank in made:
        lane.card.until(lambda: rank.feed._slots.made == 11)  # noqa: B023 - called at once
    assert [rank.feed.depth for rank in made] == [10, 10]


@pytest.mark.parametrize("source_of", SOURCES.values(), ids=SOURCES)
def test_another_program_takes_the_memory_and_gives_it_back(close, source_of):
    """Down to no batch ahead: then each is fetched when it is asked for."""
    lane, device = CardLane(), Device(9 * BATCH_BYTES)
    source = close(source_of())
    rank = close(Rank(source, lane, gauge=device.gauge(lane)))
    begin(source, [rank])
    keys = everything(3)
    rank.follow(keys)
    check(source, keys[0], rank.train(keys[0]))
    rank.feed.fit()
    for number, spare, depth in [(5, 9, 9), (8, 2, 2), (11, 0, 0), (14, -3, 0), (17, 1, 1), (20, 6, 6)]:
        device.spare = spare * BATCH_BYTES
        rank.feed._gauge.look(number)  # as an epoch of its own
        assert rank.feed.depth == depth
        assert rank.feed._slots.made <= 1 + depth, "what lay ahead has given its memory"
        assert len(rank.feed._fetched) <= depth
        for key in keys[number - 4 : number - 1]:
            check(source, key, rank.train(key))
    no_race(lane)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_limit_of_the_users_holds_at_any_time(close, limit):
    lane, device = CardLane(), Device(2**30)
    rank = close(Rank(tensors(), lane, gauge=device.gauge(lane, limit=limit)))
    assert rank.feed.depth == min(limit, 1)
    keys = everything()
    rank.follow(keys)
    for key in keys:
        check(rank.feed._source, key, rank.train(key))
        rank.feed.fit()
    assert device.reads >= 3
    assert rank.feed.depth == limit
    assert rank.feed._slots.made <= 1 + limit
    no_race(lane)


@pytest.mark.parametrize("slots", [1, 3])
def test_out_of_memory_makes_the_ring_shorter(close, slots):
    lane = CardLane(Card(room=slots * BATCH_BYTES))
    device = Device(2**30)
    rank = close(Rank(tensors(), lane, gauge=device.gauge(lane)))
    rank.follow(everything())
    rank.feed.resize(7)
    rank.take((0, 0))
    lane.card.until(lambda: lane.card.refused > 0)
    rank.feed.release()
    for key in everything()[1:]:
        check(rank.feed._source, key, rank.train(key))
    # Half of the memory: the allocator has given away its cache, and the steps need it again.
    depth = (slots - 1) // 2
    assert rank.feed._slots.made == 1 + depth
    assert lane.card.refused == 1
    assert rank.feed.depth == depth
    rank.feed.fit()
    rank.feed._gauge.look(0)
    assert rank.feed.depth == depth, "the gauge does not know it better than the device"
    rank.feed._gauge.look(1)
    assert rank.feed.depth == max(1, 2 * depth), "but may try again in the next epoch"
    no_race(lane)


def test_no_memory_for_a_single_batch_is_an_error(close):
    rank = close(Rank(tensors(), CardLane(Card(room=BATCH_BYTES - 1))))
    with pytest.raises(torch.OutOfMemoryError, match="fake card is full"):
        rank.train((0, 0))


# ---------------------------------------------------------------- poison


# ---------------------------------------------------------------- errors
def test_an_error_of_the_dataset_reaches_the_worker(close):
    def sample(index: int) -> Any:
        if index == 9:
            raise ValueError("sample 9 is broken")
        return {"x": torch.full((2, 3), float(index)), "y": index}

    source = close(read(Samples(sample=sample), shuffle=False))
    rank = close(Rank(source, CardLane()))
    begin(source, [rank])
    rank.follow(everything())
    caught = None
    for key in everything()[:3]:
        try:
            rank.train(key)
        except DataError as error:
            caught = error
    assert "sample 9 is broken" in str(caught)
    assert (0, 2) not in rank.seen


# ---------------------------------------------------------------- closing
@pytest.mark.parametrize("seed", range(6))
def test_it_closes_at_any_moment(close, seed):
    dice = random.Random(seed)
    source = close(dice.choice([tensors, read])())
    rank = close(Rank(source, CardLane()))  # the fixture closes it, and checks the time
    begin(source, [rank])
    rank.follow(everything())
    for key in everything()[: dice.randrange(12)]:
        rank.train(key)
    if dice.random() < 0.5:
        rank.ask(everything()[len(rank.seen)])
    assert rank.feed.close()
    assert not rank.feed._thread.is_alive()  # type: ignore[union-attr]


@pytest.mark.parametrize("waits_for", ["a plan", "the source", "a slot"])
def test_it_closes_while_it_waits(close, waits_for):
    shelf = Shelf()
    rank = close(Rank(shelf, CardLane(Card(room=BATCH * 4))))
    rank.feed._slots.depth = 2
    if waits_for == "the source":
        rank.follow([(0, 0)])
        shelf.asked.get(timeout=HANG_S)
    if waits_for == "a slot":
        shelf.put(0, 1)
        rank.follow([(0, 0), (0, 1)])
        rank.take((0, 0))
        assert shelf.asked.get(timeout=HANG_S) == (0, 0, 0)
        assert shelf.asked.get(timeout=HANG_S) == (0, 0, 1)
    assert rank.feed.close()
    assert rank.feed.close()


def test_a_wait_for_the_device_that_never_ends_is_told(set_grace):
    inside, stuck = threading.Event(), threading.Event()

    def synchronize() -> None:
        inside.set()
        stuck.wait(HANG_S)

    class Stuck(CardLane):
        def event(self, *, timing: bool = False) -> Any:
            mark = super().event()
            mark.synchronize = synchronize  # type: ignore[method-assign]
            return mark

    rank = Rank(tensors(), Stuck())
    rank.follow(everything())
    for key in everything()[:HOST_SLOTS]:
        rank.train(key)
    assert inside.wait(HANG_S)
    set_grace(0.05)
    assert not rank.feed.close()
    set_grace(HANG_S)
    stuck.set()
    assert rank.feed.close()


# ---------------------------------------------------------------- several in use, and parts
@pytest.mark.parametrize("source_of", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("held", [2, 3])
def test_several_batches_are_in_use_at_a_time(close, source_of, held):
    source, lane = close(source_of()), CardLane()
    rank = close(Rank(source, lane, held=held))
    begin(source, [rank])
    keys = everything(2)
    rank.follow(keys)
    while keys:
        step, keys = keys[:held], keys[held:]
        batches = [rank.take(key) for key in step]
        if len(step) == held:
            with pytest.raises(ProtocolError, match="without a release"):
                rank.feed.take(2, 0)
        with lane.on(lane.compute):
            for key, batch in zip(step, batches, strict=True):
                check(source, key, {name: leaf.clone() for name, leaf in batch.items()})
            rank.feed.release()
    assert lane.card.races == []
    assert rank.feed._slots.made <= held + 1


@pytest.mark.parametrize("source_of", SOURCES.values(), ids=SOURCES)
def test_a_step_without_room_gets_all_memory_ahead(close, source_of):
    source, lane, device = close(source_of()), CardLane(), Device(6 * BATCH * 32)
    rank = close(Rank(source, lane, held=2, gauge=device.gauge(lane)))
    begin(source, [rank])
    first, *keys = everything(3)
    rank.follow([first, *keys])
    check(source, first, rank.take(first))
    with lane.on(lane.compute):
        rank.feed.release()
    rank.feed.fit()
    check(source, keys[0], rank.take(keys[0]))
    lane.card.until(lambda: rank.feed._slots.made >= 6)
    assert rank.feed.shrink()
    assert rank.feed._slots.made <= 2
    assert rank.feed._fetched == {}
    assert not rank.feed.shrink(), "there is no more"
    reads = device.reads
    with lane.on(lane.compute):
        rank.feed.release()
    keys = keys[1:]
    for count in range(len(keys) // 2):
        for key in keys[2 * count : 2 * count + 2]:
            check(source, key, rank.take(key))
        with lane.on(lane.compute):
            rank.feed.release()
        if count == 1:
            assert device.reads == reads, "the step that had no room is not over"
            assert rank.feed.depth == 0
            rank.feed.fit()
    assert device.reads > reads
    assert 1 <= rank.feed.depth < 6, "half as many, and more in a later epoch"
    assert lane.card.races == []


def parts_of(samples: int, turn: int) -> tuple[SampleRange, SampleRange]:
    """A different split in every window; at times one rank has nothing, or almost nothing."""
    at = (0, 1, 2, samples, samples // 2)[turn % 5]
    return SampleRange(0, min(at, samples)), SampleRange(min(at, samples), samples)


@pytest.mark.parametrize("source_of", SOURCES.values(), ids=SOURCES)
def test_two_ranks_share_every_batch(close, source_of):
    """Parts differ in size, and some plans become void."""
    source = source_of()
    source = close(source.inner if isinstance(source, Logged) else source)
    card = Card()
    lanes = [CardLane(card), CardLane(card)]
    ranks = [close(Rank(source, lane, rank)) for rank, lane in enumerate(lanes)]
    begin(source, ranks)
    windows = everything(2)
    split = {key: parts_of(source.samples_in(*key), turn) for turn, key in enumerate(windows)}

    def plan(rank: int, keys: Sequence[Key]) -> list[tuple[int, int, SampleRange | None]]:
        return [(*key, split[key][rank]) for key in keys if split[key][rank].samples]

    for turn, key in enumerate(windows):
        for who, rank in enumerate(ranks):
            rank.feed.follow(plan(who, windows[turn : turn + 6]))
        if turn % 4 == 3:  # everything is given back, and split again
            for rank in ranks:
                rank.feed.follow([])
            split[key] = parts_of(source.samples_in(*key), turn + 1)
            for who, rank in enumerate(ranks):
                rank.feed.follow(plan(who, windows[turn : turn + 6]))
        seen: list[int] = []
        for who, rank in enumerate(ranks):
            part = split[key][who]
            if not part.samples:
                continue
            with rank.lane.on(rank.lane.compute):
                while (portion := rank.ask(key, part)) is None:
                    rank.notes.get(timeout=HANG_S)
                batch = portion.rows(0, portion.samples)
                assert torch.equal(batch["x"][:, 0, 0].long(), batch["y"])
                seen += batch["y"].tolist()
                rank.feed.release()
        assert seen == list(source.indices(*key))
    assert card.races == []
    if isinstance(source, LoaderSource):
        for rank in ranks:
            rank.feed.follow([])
        assert not source._left
        assert not any(key in source._read for key in windows)
