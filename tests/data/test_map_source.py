"""Tests of reading on demand: what this machine's ranks expect, each sample once, and nothing else."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from flowdp.data.batches import Portion
from flowdp.data.epoch_order import ALL, EpochOrder, Stride
from flowdp.data.loader_source import ReadPlan
from flowdp.data.map_source import DemandReader
from flowdp.data.source import Feed
from flowdp.errors import DataError, ProtocolError
from flowdp.protocol.messages import SampleRange
from flowdp.protocol.position import OpenEpoch, Position
from tests.data.opening import opened
from tests.data.test_loader_source import Broken, Counted
from tests.limits import HANG_S

SAMPLES, BATCH = 103, 8
BATCHES = 13  # the last has 7 samples

Wanted = tuple[int, int, SampleRange | None]


class Machine:
    """A machine with its source, and a feed for each of its ranks."""

    def __init__(self, dataset: Any, *, ranks: int = 1, **options: Any) -> None:
        size = None if isinstance(dataset, DataLoader) else BATCH
        given = {"batch_size": size, "seed": 1, "epochs": 3, "takers": ranks, "stride": Stride(0, 2)}
        source = opened(dataset, **{**given, **options})
        assert isinstance(source, DemandReader)
        self.dataset, self.source = dataset, source
        self.woken: list[queue.SimpleQueue[tuple[int, int]]] = [queue.SimpleQueue() for _ in range(ranks)]
        self.failed: queue.SimpleQueue[DataError] = queue.SimpleQueue()
        self.feeds = [Feed(source, rank) for rank in range(ranks)]
        for feed, woken in zip(self.feeds, self.woken, strict=True):
            feed.start(lambda epoch, batch, woken=woken: woken.put((epoch, batch)))  # type: ignore[misc]

    def start(self) -> Machine:
        self.source.start(
            wake=lambda rank, epoch, batch: self.feeds[rank].wake(epoch, batch), failed=self.failed.put
        )
        return self

    def take(self, rank: int, *key: Any) -> Any:
        """Take a batch, or a part of one, once it is there."""
        while (payload := self.feeds[rank].take(*key)) is None:
            assert self.woken[rank].get(timeout=HANG_S) == key[:2]
        return payload

    def samples(self, rank: int, epoch: int, batch: int, part: SampleRange | None = None) -> list[int]:
        """Take it, and check that it has the samples of the order."""
        payload = self.take(rank, epoch, batch, part)
        if part is not None:
            assert isinstance(payload, Portion)
            assert payload.samples == part.samples
            payload = payload.rows(0, payload.samples)
        found: list[int] = payload.tolist()
        whole = list(self.source.indices(epoch, batch))
        assert found == (whole if part is None else whole[part.start : part.stop])
        return found


@pytest.fixture
def machine() -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(*given: Any, **options: Any) -> Machine:
        made.append(Machine(*given, **options).start())
        return made[-1]

    yield make
    for one in made:
        assert one.source.close()
    assert not multiprocessing.active_children()


def whole(*batches: int, epoch: int = 0) -> list[Wanted]:
    return [(epoch, batch, None) for batch in batches]


# ---------------------------------------------------------------- what is read
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_expected_is_read_and_nothing_else(machine, num_workers):
    one = machine(Counted(), num_workers=num_workers)
    keys = [*whole(1, 4, 12), *whole(0, 7, epoch=1)]
    one.feeds[0].follow(keys)
    expected = Counter(index for key in keys for index in one.samples(0, *key))
    assert one.source.close()
    assert one.dataset.counts.tolist() == [expected[index] for index in range(SAMPLES)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_a_shared_batch_the_parts_of_this_machine_are_read(machine, num_workers):
    one = machine(Counted(), ranks=2, num_workers=num_workers)
    parts = [SampleRange(2, 4), SampleRange(4, 7)]
    for rank, part in enumerate(parts):
        one.feeds[rank].follow([(0, batch, part) for batch in range(BATCHES)])
    read = [one.samples(rank, 0, batch, part) for batch in range(BATCHES) for rank, part in enumerate(parts)]
    assert one.source.close()
    assert one.dataset.counts.sum() == BATCHES * 5 == len({index for part in read for index in part})


def shares(samples: int, count: int, draw: random.Random) -> list[SampleRange]:
    """Random parts of a batch; some are empty."""
    stops = [0, *sorted(draw.randint(0, samples) for _ in range(count - 1)), samples]
    return [SampleRange(*span) for span in itertools.pairwise(stops)]


@pytest.mark.parametrize(
    ("num_workers", "exact", "voids"),
    [(0, True, True), (0, False, False), (2, True, False), (2, False, True)],
)
def test_of_all_machines_each_sample_once_whatever_plans_become_void(machine, num_workers, exact, voids):
    """Random plans for ranks of three machines, of which some become void and are dealt anew."""
    draw = random.Random(17)
    machines = [machine(Counted(), ranks=2, stride=Stride(0, 3), num_workers=num_workers) for _ in range(3)]
    ranks = [(one, rank) for one in machines for rank in range(2)]
    announced: list[Counter[int]] = [Counter() for _ in machines]
    handed = Counter[int]()
    left = [(epoch, batch) for epoch in range(2) for batch in range(BATCHES)]
    first = machines[0].source
    while left:
        plan: list[list[Wanted]] = [[] for _ in ranks]
        dealt, left = left[:9], left[9:]
        for epoch, batch in dealt:
            if not exact:
                draw.choice(plan).append((epoch, batch, None))
                continue
            for wanted, part in zip(plan, shares(first.samples_in(epoch, batch), 6, draw), strict=True):
                if part.samples:
                    wanted.append((epoch, batch, part))
        for place, ((one, rank), wanted) in enumerate(zip(ranks, plan, strict=True)):
            one.feeds[rank].follow(wanted)
            for epoch, batch, part in wanted:
                own = one.source.indices(epoch, batch)
                announced[place // 2].update(own if part is None else own[part.start : part.stop])
        trained = draw.randrange(len(dealt) + 1) if voids else len(dealt)
        for (one, rank), wanted in zip(ranks, plan, strict=True):
            for key in wanted:
                if key[:2] in dealt[:trained]:
                    handed.update(one.samples(rank, *key))
        if draw.random() < 0.5:
            for one, rank in ranks:
                one.feeds[rank].follow([])
        left = dealt[trained:] + left
    for one in machines:
        assert one.source.close()
    assert handed == dict.fromkeys(range(SAMPLES), 2)
    read = [Counter(dict(enumerate(one.dataset.counts.tolist()))) for one in machines]
    if voids:
        assert all(of_machine <= most for of_machine, most in zip(read, announced, strict=True))
        assert sum(read, Counter()) >= handed
    else:
        assert sum(read, Counter()) == handed


def test_no_more_than_ahead_is_read_while_no_rank_waits():
    reached = threading.Event()

    class Announced(Counted):
        def __getitem__(self, index: int) -> int:
            if index == 3 * BATCH - 1:
                reached.set()
            return super().__getitem__(index)

    dataset = Announced()
    order = EpochOrder(SAMPLES, BATCH, seed=0, shuffle=False, drop_last=False)
    source = DemandReader(dataset, order, ReadPlan(1, stride=Stride(0, 2)))
    assert source.stride == ALL, "of which it reads those that its ranks expect"
    source.ahead = 3
    source.start(wake=lambda *_: None, failed=lambda _: None)
    source.expect(0, whole(*range(BATCHES)))
    assert reached.wait(HANG_S)
    assert source.close()
    assert dataset.counts.tolist() == [1] * 24 + [0] * (SAMPLES - 24)


# ---------------------------------------------------------------- void plans


def test_a_batch_given_back_is_kept_for_its_next_plan(machine):
    one = machine(Counted(), ranks=2)
    part = SampleRange(2, 5)
    for key in ((0, 3), (0, 4, part)):
        payload = one.take(0, *key)
        one.source.give_back(*key[:2], payload, *key[2:])
        # This one alone: another would be read, and one that was taken already once more.
        one.feeds[1].follow([(*key, None)[:3]])
        assert one.feeds[1].take(*key) is not None
    assert one.source.close()
    assert one.dataset.counts.sum() == BATCH + 3


# ---------------------------------------------------------------- datasets of all kinds
@pytest.mark.parametrize("num_workers", [0, 2])
def test_whole_batches_and_items_that_are_batches(machine, num_workers):
    class Whole(Counted):
        def get_batch(self, indices: Sequence[int]) -> torch.Tensor:
            return torch.tensor([self[index] for index in indices])

    one = machine(Whole(), num_workers=num_workers)
    one.feeds[0].follow(whole(3, 1))
    one.samples(0, 0, 3)
    one.samples(0, 0, 1)

    class Items(Counted):
        def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
            super().__getitem__(index)
            return torch.full((index + 1,), index)

    other = machine(DataLoader(Items(6), batch_size=None, num_workers=num_workers))
    other.feeds[0].follow(whole(5, 2))
    assert other.take(0, 0, 5).tolist() == [5] * 6
    assert other.source.samples_in(0, 5) == 6
    with pytest.raises(IndexError, match="has not been read"):
        other.source.samples_in(0, 4)
    assert other.take(0, 0, 2).tolist() == [2] * 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_is_the_same_on_all_machines(machine, num_workers):
    loaders = [
        DataLoader(
            Counted(),
            BATCH,
            sampler=torch.utils.data.RandomSampler(
                range(SAMPLES), num_samples=20, generator=torch.Generator().manual_seed(5)
            ),
            num_workers=num_workers,
        )
        for _ in range(2)
    ]
    one, other = (machine(loader) for loader in loaders)
    one.feeds[0].follow([*whole(0), *whole(1, epoch=1)])
    other.feeds[0].follow([*whole(1, 2), *whole(0, 2, epoch=1)])
    for epoch in range(2):
        taken = [one.samples(0, epoch, epoch)]
        taken += [other.samples(0, epoch, batch) for batch in (1 - epoch, 2)]
        drawn = [index for batch in taken for index in batch]
        assert len(set(drawn)) == len(drawn) == 20


# ---------------------------------------------------------------- failures
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_raises(machine, num_workers):
    one = machine(Broken(42), ranks=2, shuffle=False, num_workers=num_workers)
    part = SampleRange(1, 4)  # samples 41, 42 and 43 are in it
    one.feeds[0].follow([(0, 5, part)])
    one.source.take(1, 2, 3)
    error = one.failed.get(timeout=HANG_S)
    assert (error.epoch, error.indices) == (0, (41, 42, 43))
    assert "reading sample 42, for batch 6 of epoch 1, failed: KeyError" in str(error)
    for key in ((0, 5, part), (2, 4)):
        with pytest.raises(DataError) as later:
            one.take(0, *key)
        assert later.value is error
    one.feeds[0].follow(whole(1))
    assert one.failed.empty()


def test_a_resumed_run_reads_what_is_left(machine):
    start = Position(world_size=2, done=1, open=(OpenEpoch(1, 4, ((2,), ()), ()),))
    one = machine(Counted(), start=start)
    for key in ((0, 5), (1, 3)):
        with pytest.raises(ProtocolError, match="trained before"):
            one.feeds[0].take(*key)
    one.feeds[0].follow(whole(2, 4, epoch=1))
    one.samples(0, 1, 2)
    one.samples(0, 1, 4)


# ---------------------------------------------------------------- the end
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("expects", [False, True])
def test_closing_leaves_no_thread_and_no_process(num_workers, expects):
    before = set(threading.enumerate())
    one = Machine(Counted(), num_workers=num_workers)
    assert one.source.close()
    one = Machine(Counted(), num_workers=num_workers).start()
    if expects:
        one.feeds[0].follow(whole(*range(BATCHES)))
        one.samples(0, 0, 3)
    assert one.source.close()
    assert one.source.close()
    one.feeds[0].follow(whole(1))
    assert one.feeds[0].take(0, 1) is None
    assert set(threading.enumerate()) == before
    assert not multiprocessing.active_children()
