"""Tests of the reader, one thread for all ranks: each sample once, errors at once, close at any time."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, random_split

from flowdp.data.batches import Portion
from flowdp.data.epoch_order import EpochOrder
from flowdp.data.loader_source import ReadPlan, _turns_of
from flowdp.data.map_source import Reader
from flowdp.data.source import Source
from flowdp.errors import DataError, ProtocolError
from flowdp.protocol.messages import SampleRange
from flowdp.protocol.position import OpenEpoch, Position
from tests.data.opening import evaluated, opened
from tests.limits import HANG_S

SAMPLES = 103


class Counted(Dataset[Any]):
    """Counts the reads of each index, in any process, and asserts that no two threads read at once."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.counts = torch.zeros(samples, dtype=torch.int64).share_memory_()
        self.inside = 0
        self.threads: set[str] = set()

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, index):
        self.inside += 1
        assert self.inside == 1, "two threads read at once"
        self.threads.add(threading.current_thread().name)
        self.counts[index] += 1
        self.inside -= 1
        return index


class Run:
    """A reader, and ranks that take from it."""

    def __init__(self, dataset: Any, *, epochs: int | None = 2, ahead: int = 4, **options: Any) -> None:
        order = EpochOrder(
            len(dataset),
            options.pop("batch_size", 8),
            seed=1,
            shuffle=options.pop("shuffle", True),
            drop_last=options.pop("drop_last", False),
        )
        plan = {name: options.pop(name) for name in ("start", "on_demand", "keeps") if name in options}
        self.reader = Reader(dataset, order, ReadPlan(epochs, **plan), **options)
        self.reader.ahead = ahead
        self.woken: list[queue.SimpleQueue[tuple[int, int]]] = [queue.SimpleQueue() for _ in range(4)]
        self.failed: queue.SimpleQueue[DataError] = queue.SimpleQueue()

    def start(self) -> Run:
        self.reader.start(
            wake=lambda rank, epoch, batch: self.woken[rank].put((epoch, batch)), failed=self.failed.put
        )
        return self

    def take(self, rank: int, epoch: int, batch: int) -> Any:
        """Request the batch until it is there."""
        while (payload := self.reader.take(rank, epoch, batch)) is None:
            assert self.woken[rank].get(timeout=HANG_S) == (epoch, batch)
        return payload

    def close(self) -> bool:
        """Close, and assert that it waits for nothing that hangs."""
        begin = time.perf_counter()
        ended = self.reader.close()
        assert time.perf_counter() - begin < HANG_S / 2
        return ended


@pytest.fixture
def runs() -> Iterator[Any]:
    """Makes started runs and closes them."""
    made: list[Run] = []

    def make(dataset: Any, **options: Any) -> Run:
        made.append(Run(dataset, **options).start())
        return made[-1]

    yield make
    for run in made:
        run.close()


def in_threads(ranks: int, body: Any) -> None:
    """Run `body(rank)` in a thread per rank, and raise the first error."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    for error in errors:
        raise error


# ---------------------------------------------------------------- each sample once
@pytest.mark.parametrize(
    ("ranks", "num_workers", "drop_last"), [(1, 0, True), (4, 0, False), (1, 2, False), (4, 2, True)]
)
def test_every_sample_is_read_and_dealt_once_an_epoch(runs, ranks, num_workers, drop_last):
    dataset = Counted()
    run = runs(dataset, epochs=3, drop_last=drop_last, num_workers=num_workers)
    taken: list[list[int]] = [[] for _ in range(3)]

    def rank_of(rank: int) -> None:
        for epoch in range(3):
            for batch in range(rank, run.reader.batches, ranks):
                payload = run.take(rank, epoch, batch).tolist()
                assert payload == list(run.reader.indices(epoch, batch))
                assert len(payload) == run.reader.samples_in(epoch, batch)
                taken[epoch].extend(payload)

    in_threads(ranks, rank_of)
    assert run.close()
    for epoch in taken:
        assert len(epoch) == len(set(epoch)) == run.reader.samples == (96 if drop_last else SAMPLES)
    assert dataset.counts.sum() == 3 * run.reader.samples
    if not drop_last:
        assert dataset.counts.tolist() == [3] * SAMPLES
    assert dataset.threads == (set() if num_workers else {"flowdp-reader"})


# ---------------------------------------------------------------- the store
@pytest.mark.parametrize(("taken", "batches"), [([], 3), ([5], 9)], ids=["nothing", "the last order's"])
def test_no_more_than_ahead_is_read_while_nobody_waits(taken, batches):
    """An order is a range of batches: what slow ranks leave before the last one taken does not count."""
    reached = threading.Event()

    class Announced(Counted):
        def __getitem__(self, index):
            if index == batches * 8 - 1:
                reached.set()
            return super().__getitem__(index)

    dataset = Announced()
    run = Run(dataset, ahead=3, shuffle=False).start()
    for batch in taken:
        run.take(1, 0, batch)
    assert reached.wait(HANG_S)
    assert run.close()
    assert dataset.counts.tolist() == [1] * 8 * batches + [0] * (SAMPLES - 8 * batches)


def test_a_rank_that_waits_is_served_though_others_leave_theirs_lying(runs):
    run = runs(Counted(), ahead=1)
    last = run.take(3, 1, 12)
    assert last.tolist() == list(run.reader.indices(1, 12))
    for epoch, batch in [(e, b) for e in range(2) for b in range(13)][:-1]:
        assert run.reader.take(0, epoch, batch) is not None  # all of them are stored


def test_a_batch_given_back_is_taken_again(runs):
    run = runs(Counted())
    payload = run.take(0, 0, 3)
    run.reader.give_back(0, 3, payload)
    assert run.reader.take(1, 0, 3) is payload


def test_the_last_rank_that_asked_is_woken():
    begin = threading.Event()

    class Held(Counted):
        def __getitem__(self, index):
            assert begin.wait(HANG_S)
            return super().__getitem__(index)

    run = Run(Held()).start()
    assert run.reader.take(0, 0, 1) is None
    assert run.reader.take(1, 0, 1) is None  # dealt again
    begin.set()
    assert run.woken[1].get(timeout=HANG_S) == (0, 1)
    assert run.reader.take(1, 0, 1) is not None
    assert run.close()
    assert run.woken[0].empty()


# ---------------------------------------------------------------- worker processes
class Process(Counted):
    def __getitem__(self, index):
        super().__getitem__(index)
        return os.getpid()


@pytest.mark.posix
def test_the_processes_live_through_all_epochs_and_a_ctrl_c(runs):
    run = runs(Process(), epochs=5, num_workers=2, batch_size=5)
    pids = set(run.take(0, 0, 0).tolist() + run.take(0, 0, 1).tolist())
    for pid in pids:  # a terminal sends it to all processes of the job
        os.kill(pid, signal.SIGINT)
    for epoch, batch in [(e, b) for e in range(5) for b in range(run.reader.batches)][2:]:
        pids |= set(run.take(0, epoch, batch).tolist())
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert run.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class Phased(Dataset[Any]):
    """A dataset whose samples depend on attributes that a loop changes."""

    phase = 0

    def __init__(self) -> None:
        self.name, self._length = "train", None
        self.shared = multiprocessing.Value("i", 0)

    def __len__(self):
        self._length = 16
        return self._length

    def __getitem__(self, index):
        return self.phase + self.shared.value


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_change_that_worker_processes_do_not_see_is_told_once(runs, num_workers, is_wrapped, caplog):
    dataset = Phased()
    wrapped = Subset(dataset, range(16)) if is_wrapped else dataset
    run = runs(wrapped, epochs=4, ahead=1, num_workers=num_workers)
    for epoch in range(4):
        for batch in range(2):
            run.take(0, epoch, batch)
        dataset.phase = epoch + 1
        dataset.shared.value = epoch
    run.close()
    told = [
        message for message in caplog.messages if message.startswith("Phased.phase was 0 when the worker")
    ]
    assert len(told) == (num_workers > 0)


# ---------------------------------------------------------------- failures
class Broken(Counted):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def __getitem__(self, index):
        if index == self.index:
            raise KeyError("label")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_raises(runs, num_workers):
    run = runs(Broken(42), shuffle=False, num_workers=num_workers)  # sample 42 is in batch 5
    waits = run.reader.take(1, 1, 0)
    error = run.failed.get(timeout=HANG_S)
    assert waits is None
    assert (error.epoch, error.indices) == (0, tuple(range(40, 48)))
    assert isinstance(error.__cause__, KeyError)
    assert "reading sample 42, for batch 6 of epoch 1, failed: KeyError" in str(error)
    assert run.woken[1].get(timeout=HANG_S) == (1, 0)
    for rank, key in ((1, (1, 0)), (0, (0, 0)), (2, (0, 5))):
        with pytest.raises(DataError) as later:
            run.reader.take(rank, *key)
        assert later.value is error
    assert run.close()
    assert run.failed.empty()


@pytest.mark.posix
@pytest.mark.parametrize("collate_fn", [None, list], ids=["tensors", "plain numbers"])
def test_a_worker_process_that_dies(runs, collate_fn):
    class Dies(Counted):
        def __getitem__(self, index):
            if index == 42:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    run = runs(Dies(), shuffle=False, num_workers=2, collate_fn=collate_fn)
    assert run.reader.take(0, 1, 0) is None
    error = run.failed.get(timeout=HANG_S)
    assert re.search(r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly", str(error))
    assert error.epoch == 0
    assert isinstance(error.__cause__, RuntimeError)
    with pytest.raises(DataError):
        run.take(0, 1, 0)
    assert run.close()


class BreaksLater:
    """A sampler that fails in its second epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def __len__(self):
        return 12

    def __iter__(self):
        self.epochs += 1
        if self.epochs == 2:
            raise KeyError("weights")
        return iter(range(12))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_raises_does_so_after_the_batches_before_it(num_workers):
    dataset = Counted()
    loader = DataLoader(dataset, 4, sampler=BreaksLater(), num_workers=num_workers)
    source = opened(loader, epochs=3)
    failed: queue.SimpleQueue[DataError] = queue.SimpleQueue()
    source.start(wake=lambda *key: None, failed=failed.put)
    assert failed.get(timeout=HANG_S).epoch == 1
    assert dataset.counts.sum() == 12
    with pytest.raises(DataError, match="sampler BreaksLater failed in epoch 2: KeyError"):
        source.take(0, 1, 0)
    assert source.close()


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize("num_workers", [0, 2])
def test_closing_while_the_reader_waits_for_room(num_workers):
    run = Run(Counted(), ahead=1, num_workers=num_workers).start()
    run.take(0, 0, 5)
    assert run.close()
    assert run.close()  # again
    assert run.reader.take(0, 0, 0) is None  # the stored batches are gone, and no thread will be woken
    run.reader.give_back(0, 5, torch.zeros(8))
    assert run.reader.take(0, 0, 5) is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_closing_leaves_no_thread_and_no_process(num_workers):
    before = set(threading.enumerate())
    run = Run(Counted(), num_workers=num_workers).start()
    run.take(0, 0, 3)
    assert run.close()
    assert set(threading.enumerate()) == before
    assert not multiprocessing.active_children()


def test_closing_while_the_processes_are_inside_the_dataset(set_grace):
    inside = torch.zeros(1, dtype=torch.int64).share_memory_()

    class Stuck(Counted):
        def __getitem__(self, index):
            if index >= 8:
                inside.add_(1)
                threading.Event().wait()
            return super().__getitem__(index)

    run = Run(Stuck(), shuffle=False, num_workers=2).start()
    run.take(0, 0, 0)
    assert run.reader.take(0, 0, 1) is None
    processes = list(run.reader._processes._iterator._workers)
    set_grace(0.5)
    while not run.close():  # the processes are ended; a busy machine takes its time for it
        pass
    assert not any(process.is_alive() for process in processes)
    assert run.failed.empty()


def test_closing_while_the_reader_is_inside_the_dataset(set_grace):
    entered, leave = threading.Event(), threading.Event()

    class Stuck(Counted):
        def __getitem__(self, index):
            entered.set()
            assert leave.wait(HANG_S)
            return super().__getitem__(index)

    run = Run(Stuck()).start()
    assert entered.wait(HANG_S)
    set_grace(0.05)
    assert not run.close()
    set_grace(HANG_S)
    leave.set()
    assert run.close()  # that call ended it; no error was reported
    assert run.failed.empty()


# ---------------------------------------------------------------- parts of a batch that all ranks share
def cut(run: Run, rank: int, batch: int, start: int, stop: int) -> Portion | None:
    portion = run.reader.take(rank, 0, batch, SampleRange(start, stop))
    assert portion is None or isinstance(portion, Portion)
    return portion


def rows_of(run: Run, portion: Any, batch: int) -> list[int]:
    """Indices of a portion's samples in their batch."""
    order = run.reader.indices(0, batch)
    return [order.index(i) for i in portion.rows(0, portion.samples).tolist()]


def wait_for(run: Run, rank: int, batch: int, start: int, stop: int) -> Portion:
    while (portion := cut(run, rank, batch, start, stop)) is None:
        assert run.woken[rank].get(timeout=HANG_S) == (0, batch)
    return portion


def test_a_batch_stays_until_all_its_samples_are_taken(runs):
    run = runs(Counted(20))
    assert rows_of(run, wait_for(run, 0, 0, 0, 3), 0) == [0, 1, 2]
    assert rows_of(run, wait_for(run, 2, 0, 7, 8), 0) == [7]
    assert (0, 0) in run.reader._read
    assert rows_of(run, wait_for(run, 1, 0, 3, 7), 0) == [3, 4, 5, 6]
    assert (0, 0) not in run.reader._read
    assert not run.reader._left
    with pytest.raises(ProtocolError, match="was taken before"):
        cut(run, 0, 0, 0, 3)
    last = wait_for(run, 0, 2, 0, 4)  # 20 = 8 + 8 + 4
    assert last.samples == 4
    assert (0, 2) not in run.reader._read


@pytest.mark.parametrize("early", [False, True])
def test_what_is_given_back_can_be_cut_anew(runs, early):
    """Before the others have theirs, and after."""
    run = runs(Counted(20))
    first = wait_for(run, 0, 0, 0, 3)
    if early:
        run.reader.give_back(0, 0, first, SampleRange(0, 3))
        assert not run.reader._left
        wait_for(run, 0, 0, 0, 8)
    else:
        second = wait_for(run, 1, 0, 3, 8)
        assert (0, 0) not in run.reader._read
        run.reader.give_back(0, 0, first, SampleRange(0, 3))
        run.reader.give_back(0, 0, second, SampleRange(3, 8))
        wait_for(run, 1, 0, 0, 6)
        assert rows_of(run, wait_for(run, 0, 0, 6, 8), 0) == [6, 7]
    assert (0, 0) not in run.reader._read
    assert not run.reader._left


def test_all_ranks_that_wait_for_a_batch_are_woken(runs):
    class Gated(Counted):
        def __getitem__(self, index: int) -> int:
            is_open.wait(HANG_S)
            return super().__getitem__(index)

    is_open = threading.Event()
    run = runs(Gated(20))
    for rank in (0, 1, 2, 1):
        assert cut(run, rank, 1, 4 * (rank % 2), 4) is None
    is_open.set()
    assert [run.woken[rank].get(timeout=HANG_S) for rank in (0, 1, 2)] == [(0, 1)] * 3
    assert all(woken.empty() for woken in run.woken)


def test_all_ranks_that_wait_hear_of_a_failure(runs):
    class Broken(Counted):
        def __getitem__(self, index: int) -> int:
            is_open.wait(HANG_S)
            raise ZeroDivisionError("broken")

    is_open = threading.Event()
    run = runs(Broken(20))
    for rank in (0, 3):
        assert cut(run, rank, 0, rank, rank + 1) is None
    is_open.set()
    assert [run.woken[rank].get(timeout=HANG_S) for rank in (0, 3)] == [(0, 0)] * 2
    with pytest.raises(DataError, match="broken"):
        cut(run, 3, 0, 3, 4)


# ---------------------------------------------------------------- reused buffers
@pytest.mark.parametrize("kind", ["tensor", "array", "list", "dict"])
def test_a_collate_function_may_fill_one_buffer(runs, kind):
    buffers = {"tensor": torch.zeros(8), "array": np.zeros(8), "list": [0] * 8, "dict": {"x": torch.zeros(8)}}
    buffer: Any = buffers[kind]

    def collate(samples: list[int]) -> Any:
        values = buffer["x"] if kind == "dict" else buffer
        values[: len(samples)] = type(values)(samples) if kind == "list" else torch.tensor(samples)
        return buffer

    run = runs(Counted(), shuffle=False, collate_fn=collate, ahead=20)
    for _epoch in range(2):
        for batch in range(12):
            taken = run.take(0, _epoch, batch)
            assert list(taken["x"] if kind == "dict" else taken) == list(range(8 * batch, 8 * batch + 8))
        run.take(0, _epoch, 12)


# ---------------------------------------------------------------- kept batches
def test_what_a_lost_rank_took_can_be_taken_again(runs):
    run = runs(Counted(), keeps=True)
    lost = {batch: run.take(1, 0, batch) for batch in (1, 3, 5)}
    run.take(0, 0, 0)
    run.reader.settle([(0, 1)])
    run.reader.give_back(0, 5, lost[5])
    assert sorted(run.reader._lent) == [(0, 0), (0, 3)]
    with pytest.raises(ProtocolError, match="was taken before"):
        run.reader.take(0, 0, 3)  # its rank is still there
    run.reader.reclaim(1)
    for batch in (3, 5):
        assert run.take(2, 0, batch) is lost[batch]
    for batch in (0, 1, 3):
        with pytest.raises(ProtocolError, match="was taken before"):
            run.reader.take(0, 0, batch)
    run.reader.reclaim(2)  # one after the other
    assert run.take(0, 0, 5) is lost[5]
    run.reader.settle([(0, batch) for batch in (0, 3, 5)])
    run.reader.reclaim(0)
    assert run.take(3, 0, 3) is lost[3]
    with pytest.raises(ProtocolError, match="was taken before"):
        run.reader.take(3, 0, 5)


# ---------------------------------------------------------------- resumed runs
HERE = Position(world_size=2, done=1, open=(OpenEpoch(1, 6, ((4, 1), ()), ()), OpenEpoch(2, 1, ((), ()), ())))
"""Missing: of epoch 1 batches 1, 4 and all from 6 on, of epoch 2 all but batch 0."""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_not_trained_is_read_and_nothing_else(runs, num_workers):
    dataset = Counted()
    run = runs(dataset, epochs=4, start=HERE, num_workers=num_workers)
    assert run.reader.can_resume_inside
    for epoch, batches in ((1, (1, 4, *range(6, 13))), (2, range(1, 13)), (3, range(13))):
        for batch in batches:
            assert run.take(0, epoch, batch).tolist() == list(run.reader.indices(epoch, batch))
    assert run.close()
    trained = [i for batch in (0, 2, 3, 5) for i in run.reader.indices(1, batch)] + [
        *run.reader.indices(2, 0)
    ]
    expected = torch.full((SAMPLES,), 3)
    for index in trained:
        expected[index] -= 1
    assert torch.equal(dataset.counts, expected)


# ---------------------------------------------------------------- on demand
class Watched(threading.Condition):
    """Sets an event when the reader waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        return super().wait(timeout)


@pytest.mark.parametrize("ahead", [2, 100])
def test_an_epoch_begins_when_somebody_waits_for_it(ahead):
    dataset = Counted()
    run = Run(dataset, epochs=None, ahead=ahead, on_demand=True)
    watched = run.reader._changed = Watched()
    run.start()
    [thread] = run.reader.threads()
    assert not thread.is_alive()
    for epoch in range(3):
        for batch in range(13):
            watched.waits.clear()
            run.take(0, epoch, batch)
        assert watched.waits.wait(HANG_S)  # for the next epoch: all of this one were taken
        assert dataset.counts.tolist() == [epoch + 1] * SAMPLES
        assert thread.is_alive()
    assert run.close()


# ---------------------------------------------------------------- several readers of one file
class FileData(Dataset[Any]):
    """Sample i is the number i, read from a file through one handle for all readers: seek, then read.

    The first thread that reads waits between the two for another one, for up to `patience_s`.
    """

    def __init__(self, path: Path, samples: int = 24, patience_s: float = 0.3) -> None:
        path.write_bytes(np.arange(samples).tobytes())
        self.samples, self.patience_s = samples, patience_s
        self.file = path.open("rb", buffering=0)
        self.first: threading.Thread | None = None
        self.is_joined = threading.Event()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.file.seek(8 * index)
        me = threading.current_thread()
        if self.first is None:
            self.first = me
            self.is_joined.wait(self.patience_s)
        elif me is not self.first:
            self.is_joined.set()
        return int.from_bytes(self.file.read(8), "little")


class FileStream(IterableDataset[Any]):
    """The same, as an iterable dataset in its own order."""

    def __init__(self, data: FileData) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        return (self.data[index] for index in range(len(self.data)))


@pytest.fixture
def file_data(tmp_path: Path) -> Iterator[FileData]:
    data = FileData(tmp_path / "numbers")
    yield data
    data.file.close()


def read_all(sources: Sequence[Source], samples: int) -> list[list[int]]:
    """The samples that each source reads in an epoch, all at once."""
    read: list[list[int]] = [[] for _ in sources]
    woken: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in sources]
    for source, notes in zip(sources, woken, strict=True):
        source.start(wake=lambda *key, notes=notes: notes.put(key), failed=notes.put)

    def rank_of(number: int) -> None:
        for batch in range(samples // 4):
            while (payload := sources[number].take(0, 0, batch)) is None:
                assert woken[number].get(timeout=HANG_S) == (0, 0, batch)
            read[number] += payload.tolist()

    in_threads(len(sources), rank_of)
    assert all(source.close() for source in sources)
    return read


def test_a_training_and_an_evaluation_read_one_file(file_data: FileData) -> None:
    train, rest = random_split(file_data, [12, 12])
    first, second = read_all([opened(train, 4, epochs=1), evaluated(rest, 4)], 12)
    assert sorted(first) == sorted(train.indices)
    assert second == list(rest.indices)


@pytest.mark.parametrize("kind", [lambda data: data, FileStream, lambda data: DataLoader(data, batch_size=4)])
def test_two_runs_read_one_file(file_data: FileData, kind: Any) -> None:
    dataset = kind(file_data)
    size = None if isinstance(dataset, DataLoader) else 4
    sources = [opened(dataset, size, epochs=1) for _ in range(2)]
    for read in read_all(sources, 24):
        assert sorted(read) == list(range(24))


class Hanging(Counted):
    """Hangs in its first sample until released."""

    def __init__(self) -> None:
        super().__init__(8)
        self.is_inside, self.goes_on = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> int:
        self.is_inside.set()
        assert self.goes_on.wait(HANG_S)
        return index


def test_a_reader_that_has_no_room_holds_no_other_up(runs: Any) -> None:
    full = runs(Counted(), ahead=1)
    full.take(0, 0, 0)  # the next ones are stored, and not taken
    other = runs(Counted(16))
    assert other.take(0, 0, 0).shape == other.take(0, 0, 1).shape == (8,)


def test_a_reader_that_is_left_inside_a_dataset_holds_no_later_run_up(runs: Any, set_grace: Any) -> None:
    hanging = Hanging()
    run = runs(hanging)
    assert hanging.is_inside.wait(HANG_S)
    waiting = runs(Counted())
    assert waiting.close()  # it waits for its turn, and gives up
    set_grace(0.05)
    assert not run.close()
    set_grace(HANG_S)
    later = runs(Counted(8))
    assert later.take(0, 0, 0).shape == (8,)
    hanging.goes_on.set()
    run.reader.threads()[0].join(HANG_S)


# ---------------------------------------------------------------- turns of readers that share an object
class Bytes(Dataset[int]):
    """Bytes of a file that is given open."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.file.seek(index)
        return int(self.file.read(1)[0])


def shared(one: object, other: object) -> bool:
    """Whether the readers of two datasets take turns."""
    mine = _turns_of(one)
    return not set(mine).isdisjoint(_turns_of(other))


def test_readers_of_datasets_with_a_common_object_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(12)))
    with path.open("rb") as file, path.open("rb") as second:
        whole = Bytes(file)
        left, right = random_split(whole, (0.5, 0.5))
        both = ConcatDataset([Bytes(second), left])
        assert shared(left, right)
        assert shared(both, right)
        assert shared(whole, Bytes(file))
        assert not shared(whole, Bytes(second))
        whole.dataset = whole  # type: ignore[attr-defined]
        assert shared(whole, right)


def test_a_reader_that_hangs_holds_up_no_other_dataset(runs: Any) -> None:
    inside, goes_on = threading.Event(), threading.Event()

    class Hangs(Counted):
        def __getitem__(self, index: int) -> int:
            inside.set()
            goes_on.wait(HANG_S)
            return super().__getitem__(index)

    try:
        runs(Hangs())
        assert inside.wait(HANG_S)
        assert runs(Counted(), shuffle=False).take(0, 0, 0).tolist() == list(range(8))
    finally:
        goes_on.set()
