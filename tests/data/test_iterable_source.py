"""Tests of datasets of unknown length: read to the end in every epoch, and the end is reported."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info

from flowdp.data.epoch_order import Stride
from flowdp.data.iterable_source import StreamReader
from flowdp.data.loader_source import ReadPlan
from flowdp.errors import DataError, ProtocolError
from flowdp.protocol.position import OpenEpoch, Position
from tests.data.test_loader_source import Watched
from tests.limits import HANG_S


class Stream(IterableDataset[Any]):
    """Epoch e has lengths[e] samples, shared among the worker processes."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.epoch = -1
        self.yielded = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.threads: set[str] = set()

    def __iter__(self):
        self.epoch += 1
        self.threads.add(threading.current_thread().name)
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for sample in range(first, self.lengths[self.epoch % len(self.lengths)], step):
            self.yielded += 1
            yield self.item(sample)

    def item(self, sample: int) -> Any:
        return sample


class Run:
    """A stream, ranks that take from it, and its reports."""

    def __init__(self, dataset: Any, batch_size: int | None = 4, *, ahead: int = 4, **options: Any) -> None:
        collate = default_convert if batch_size is None else default_collate
        plan = {field.name: options.pop(field.name) for field in fields(ReadPlan) if field.name in options}
        given = {"collate_fn": collate, "num_workers": 0, **options}
        self.reader = StreamReader(dataset, batch_size, ReadPlan(**{"epochs": 2, **plan}), **given)
        self.reader.ahead = ahead
        self.woken: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[DataError] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def start(self) -> Run:
        self.reader.on_end(lambda *end: self.ended.put(end))
        self.reader.start(wake=lambda *key: self.woken.put(key), failed=self.failed.put)
        return self

    def take(self, epoch: int, batch: int) -> Any:
        while (payload := self.reader.take(0, epoch, batch)) is None:
            assert self.woken.get(timeout=HANG_S) == (0, epoch, batch)
        return payload

    def epoch(self, epoch: int, batches: int) -> list[Any]:
        taken = [self.take(epoch, batch) for batch in range(batches)]
        assert self.ended.get(timeout=HANG_S) == (epoch, batches)
        return taken


@pytest.fixture
def runs() -> Iterator[Callable[..., Run]]:
    """Makes started runs and closes them."""
    made: list[Run] = []

    def make(dataset: Any, *given: Any, **options: Any) -> Run:
        made.append(Run(dataset, *given, **options).start())
        return made[-1]

    yield make
    for run in made:
        assert run.reader.close()
    assert not multiprocessing.active_children()


# ---------------------------------------------------------------- samples read
@pytest.mark.parametrize("drop_last", [False, True])
def test_it_yields_what_torch_yields_anew_in_each_epoch(runs, drop_last):
    run = runs(Stream(10, 4, 7), epochs=3, drop_last=drop_last)
    batches = [run.epoch(0, 2 if drop_last else 3), run.epoch(1, 1), run.epoch(2, 1 if drop_last else 2)]
    seen = [[sample for batch in epoch for sample in batch.tolist()] for epoch in batches]
    whole = [list(range(10)), list(range(4)), list(range(7))]
    assert seen == ([epoch[: len(epoch) // 4 * 4] for epoch in whole] if drop_last else whole)
    assert (run.reader.batch_size, run.reader.batches, run.reader.samples) == (4, None, None)
    assert run.reader.indices(0, 0) == ()


def test_with_processes_all_is_read_once_and_they_live_through_all_epochs(runs):
    class Where(Stream):
        def item(self, sample):
            return sample, os.getpid()

    run = runs(Where(26, 5, 26), epochs=3, num_workers=2)
    pids: set[int] = set()
    for epoch, (samples, batches) in enumerate(((26, 8), (5, 2), (26, 8))):
        taken = run.epoch(epoch, batches)
        assert sorted(s for part, _ in taken for s in part.tolist()) == list(range(samples))
        pids |= {pid for _, part in taken for pid in part.tolist()}
    assert len(pids) == 2
    assert os.getpid() not in pids


# ---------------------------------------------------------------- inside an epoch
@pytest.mark.parametrize("num_workers", [0, 2])
def test_inside_an_epoch_the_trained_batches_are_read_and_dropped(runs, num_workers, caplog):
    class Sums(Stream):
        def __iter__(self):
            self.epoch = -1  # each is the first
            return super().__iter__()

    whole = runs(Sums(18), epochs=1, ahead=9, num_workers=num_workers)
    batches = 6 if num_workers else 5
    expected = whole.epoch(0, batches)
    start = Position(1, open=(OpenEpoch(0, 4, ((1,),), ()),))
    run = Run(Sums(18), epochs=1, start=start, ahead=9, num_workers=num_workers)
    run.reader.orders = {0: whole.reader.checksum(0, 4)}
    with caplog.at_level("INFO", "flowdp"):
        run.start()
        taken = {batch: run.take(0, batch).tolist() for batch in (1, *range(4, batches))}
    assert taken == {batch: expected[batch].tolist() for batch in taken}
    assert run.ended.get(timeout=HANG_S) == (0, batches)
    assert not run.reader._read
    with pytest.raises(ProtocolError, match="trained before"):
        run.reader.take(0, 0, 0)
    assert "epoch 1: read again up to batch 4" in caplog.text
    assert run.reader.close()


def test_batches_are_told_of_in_order_as_they_are_read(runs):
    told: list[tuple[int, int, int]] = []
    run = Run(Stream(10, 4), epochs=2)
    run.reader.on_end(lambda *end: run.ended.put(end), lambda *read: told.append(read))
    run.reader.start(wake=lambda *key: run.woken.put(key), failed=run.failed.put)
    run.epoch(0, 3)
    run.epoch(1, 1)
    assert told == [(0, 0, 4), (0, 1, 4), (0, 2, 2), (1, 0, 4)]
    assert run.reader.close()


# ---------------------------------------------------------------- several machines
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_machine_has_every_nth_batch_of_the_stream(runs, num_workers):
    taken: list[tuple[int, Any]] = []
    for machine in range(3):
        run = runs(Stream(22, 2), 3, stride=Stride(machine, 3), ahead=1, num_workers=num_workers)
        batches = {0: 8, 1: max(1, num_workers)}
        for epoch, count in batches.items():
            for batch in range(machine, count, 3):
                taken += [(epoch, sample) for sample in run.take(epoch, batch)]
            assert run.reader.take(0, epoch, count + machine) is None
            assert run.ended.get(timeout=HANG_S) == (epoch, count)
    assert sorted((epoch, int(sample)) for epoch, sample in taken) == [
        *((0, sample) for sample in range(22)),
        (1, 0),
        (1, 1),
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_set_epoch_is_called_before_each_epoch(runs, num_workers):
    class Told(IterableDataset[Any]):
        def __init__(self):
            self.told = torch.zeros(1, dtype=torch.int64).share_memory_()

        def set_epoch(self, epoch):
            self.told.fill_(epoch)

        def __iter__(self):
            return iter([self.told.item()] * 3)

    run = runs(Told(), 3, epochs=3, num_workers=num_workers)
    for epoch in range(3):
        for batch in run.epoch(epoch, max(num_workers, 1)):
            assert batch.tolist() == [epoch] * 3


def test_a_stream_without_end(runs):
    class Endless(IterableDataset[Any]):
        def __iter__(self):
            number = 0
            while True:
                yield number
                number += 1

    run = runs(Endless(), 2, epochs=None)
    assert [run.take(0, batch).tolist() for batch in range(50)] == [[2 * b, 2 * b + 1] for b in range(50)]
    assert run.ended.empty()


# ---------------------------------------------------------------- reading ahead
class Announced(Stream):
    """Sets an event when a number of samples has been yielded."""

    def __init__(self, *lengths: int, at: int) -> None:
        super().__init__(*lengths)
        self.at = at
        self.reached = threading.Event()

    def item(self, sample):
        if self.yielded == self.at:
            self.reached.set()
        return sample


def test_a_rank_that_waited_beyond_the_end_does_not_drive_the_reader():
    dataset = Announced(8, at=8 + 12)
    run = Run(dataset, ahead=3, epochs=None).start()
    assert run.reader.take(0, 0, 9) is None  # dealt before the end was known
    assert run.ended.get(timeout=HANG_S) == (0, 2)
    assert run.reader.take(1, 0, 7) is None  # and now
    assert not run.reader._waiting
    # Room for one more batch, of the next epoch, but not for two.
    assert run.take(0, 0).tolist() == [0, 1, 2, 3]
    assert run.take(0, 1).tolist() == [4, 5, 6, 7]
    assert run.ended.get(timeout=HANG_S) == (1, 2)
    assert dataset.reached.wait(HANG_S)
    assert run.reader.close()
    assert dataset.yielded == 20
    assert run.woken.empty()


def test_a_batch_given_back_is_taken_again_with_its_samples(runs):
    run = runs(Stream(6))
    payload = run.take(0, 1)
    run.reader.give_back(0, 1, payload)
    assert run.reader.take(1, 0, 1) is payload
    assert run.reader.samples_in(0, 1) == 2


# ---------------------------------------------------------------- items that are batches


# ---------------------------------------------------------------- failures
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("lengths", "epoch"), [((0,), 0), ((4, 0), 1)])
def test_an_epoch_without_a_batch(runs, lengths, epoch, num_workers):
    run = runs(Stream(*lengths), num_workers=num_workers)
    error = run.failed.get(timeout=HANG_S)
    assert str(error).startswith(f"epoch {epoch + 1} of Stream has no batch: its iterator ended at once")
    assert error.epoch == epoch
    with pytest.raises(DataError):
        run.reader.take(0, epoch, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_raises_does_so_after_the_batches_before_it(runs, num_workers):
    class Breaks(Stream):
        def item(self, sample):
            if sample == 9:
                raise KeyError("label")
            return sample

    run = runs(Breaks(20), num_workers=num_workers, collate_fn=list)
    error = run.failed.get(timeout=HANG_S)
    assert error.epoch == 0
    assert error.indices == ()
    assert isinstance(error.__cause__, KeyError)
    at = 3 if num_workers else 2  # process 1 reads 1, 3, 5, 7, then 9
    assert str(error).startswith(f"reading batch {at + 1} of epoch 1 failed: KeyError")


# ---------------------------------------------------------------- closing
@pytest.mark.parametrize("num_workers", [0, 2])
def test_closing_at_any_moment(num_workers):
    assert Run(Stream(40), num_workers=num_workers).reader.close()
    before = set(threading.enumerate())
    for taken in (0, 1, 10):
        run = Run(Stream(40), num_workers=num_workers).start()
        for batch in range(taken):
            run.take(0, batch)
        assert run.reader.close()
        assert run.reader.take(0, 1, 1) is None
    assert set(threading.enumerate()) == before
    assert not multiprocessing.active_children()


# ---------------------------------------------------------------- resumed runs, reading on demand
class Told(Stream):
    """Epoch e yields e * 100 + i, by its set_epoch."""

    told = -1

    def set_epoch(self, epoch):
        self.told = epoch

    def item(self, sample):
        return self.told * 100 + sample


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_begins_with_the_epoch_where_the_run_stood(runs, num_workers):
    dataset = Told(6)
    run = runs(dataset, epochs=4, start=Position(1, done=2), num_workers=num_workers)
    assert [b.tolist() for b in run.epoch(2, 2)] == [[200, 201, 202, 203], [204, 205]]
    if not num_workers:  # a worker process has the dataset as at its start
        assert [b.tolist() for b in run.epoch(3, 2)] == [[300, 301, 302, 303], [304, 305]]
    assert dataset.yielded <= 12
    with pytest.raises(ProtocolError):
        run.reader.take(0, 1, 0)


def test_on_demand_it_is_iterated_when_somebody_waits():
    dataset = Told(6)
    run = Run(dataset, epochs=None, ahead=100, on_demand=True)
    watched = run.reader._changed = Watched()
    run.start()
    assert dataset.epoch == -1
    for epoch in range(3):
        watched.waits.clear()
        assert [batch.tolist()[0] for batch in run.epoch(epoch, 2)] == [epoch * 100, epoch * 100 + 4]
        assert watched.waits.wait(HANG_S)
        assert (dataset.told, dataset.yielded.item()) == (epoch, 6 * (epoch + 1))
    assert run.reader.close()
