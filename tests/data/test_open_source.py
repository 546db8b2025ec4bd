"""Tests of the kinds of datasets, and the sources that training and evaluation make of them."""

from __future__ import annotations

import itertools
import queue
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from flowdp.data.epoch_order import Stride, epoch_order
from flowdp.data.iterable_source import StreamReader
from flowdp.data.map_source import DemandReader, Reader
from flowdp.data.source import Source
from flowdp.data.tensor_source import TensorSource
from flowdp.engine.shared_batches import SharedBatches
from flowdp.errors import OptionError
from flowdp.protocol.position import OpenEpoch, Position
from tests.data import opening
from tests.data.opening import evaluated
from tests.limits import HANG_S

X, Y = torch.arange(46.0).reshape(23, 2), torch.arange(23)


class Pairs(Dataset[Any]):
    """23 samples (X[i], i)."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return X[index], index


def opened(dataset: object, **options: Any) -> Source:
    size = None if isinstance(dataset, DataLoader) else 5
    return opening.opened(dataset, **{"batch_size": size, "epochs": 2, **options})


def read(source: Source, epochs: int = 1, batches: int | None = None) -> list[Any]:
    """All batches of some epochs, taken by one rank; `batches`: how many, if the source does not know."""
    woken: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source.start(wake=lambda *key: woken.put(key), failed=woken.put)
    all_taken = []
    known = source.batches if batches is None else batches
    for key in [(epoch, batch) for epoch in range(epochs) for batch in range(known)]:
        taken = source.take(0, *key)
        if taken is None:
            assert woken.get(timeout=HANG_S) == (0, *key)
            taken = source.take(0, *key)
        all_taken.append(taken)
    assert source.close()
    return all_taken


def named(options: dict[str, Any]) -> str:
    """A test id that is the same in every process: a value's repr may have an address."""
    return " ".join(options) or "plain"


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, str):
        assert ours == theirs
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    else:
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


# ---------------------------------------------------------------- tensors
Named = namedtuple("Named", "x y")


@pytest.mark.parametrize(
    ("dataset", "batch"),
    [
        ((X, Y), lambda i: (X[i], Y[i])),
        ([X, Y], lambda i: [X[i], Y[i]]),
        ({"x": X, "y": Y}, lambda i: {"x": X[i], "y": Y[i]}),
        (Named(X, Y), lambda i: Named(X[i], Y[i])),
        (X, lambda i: X[i]),
        (TensorDataset(X, Y), lambda i: [X[i], Y[i]]),
    ],
    ids=["tuple", "list", "mapping", "namedtuple", "tensor", "TensorDataset"],
)
def test_tensors_are_gathered_in_their_structure(dataset, batch):
    source = opened(dataset)
    assert isinstance(source, TensorSource)
    order = epoch_order(23, 0, 1)
    for number in range(source.batches):
        index = order[number * 5 : number * 5 + 5]
        assert_same(source.take(0, 1, number), batch(index))
        assert source.indices(1, number) == tuple(index.tolist())
        assert source.samples_in(1, number) == len(index)


# ---------------------------------------------------------------- equal to torch's own DataLoader
class Itemwise(Subset[Any]):
    """A subset read sample by sample."""


SUBSETS = {
    "list": [5, 0, 22, 7, 7, 3, 11],
    "range": range(1, 23, 2),
    "array": np.array([4, 9, 1, 20, 13, 2], np.int32),
    "tensor": torch.arange(22, 4, -1),
}


@pytest.mark.parametrize("indices", SUBSETS.values(), ids=SUBSETS)
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}], ids=named)
def test_a_subset_of_tensors_is_gathered_as_torch_reads_it(indices, options):
    whole = TensorDataset(X, Y)
    ours, plain = (opened(kind(whole, indices), **options) for kind in (Subset, Itemwise))
    assert isinstance(ours, TensorSource)
    assert isinstance(plain, Reader)
    assert [ours.indices(0, batch) for batch in range(ours.batches)] == [
        plain.indices(0, batch) for batch in range(plain.batches)
    ]
    assert_same(read(ours, epochs=2), read(plain, epochs=2))


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(TensorDataset(X, Y), [-1, 3, 5, 7, 0]),
        Subset(Pairs(), [1, 3, 5, 7, 0]),
        Itemwise(TensorDataset(X, Y), [1, 3, 5, 7, 0]),
    ],
    ids=["from the end", "of samples", "a class of its own"],
)
def test_other_subsets_are_read_by_sample(dataset):
    source = opened(dataset, shuffle=False)
    assert isinstance(source, Reader)
    assert_same(read(source), list(DataLoader(dataset, 5)))


def mapping(samples):
    x, index = zip(*samples, strict=True)
    return {"x": torch.stack(x), "index": torch.tensor(index)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drop_last": True},
        {"collate_fn": mapping},
        {"num_workers": 2},
        {"collate_fn": mapping, "num_workers": 1, "drop_last": True},
    ],
    ids=named,
)
@pytest.mark.parametrize(
    "dataset", [Pairs(), TensorDataset(X, Y), list(Pairs())], ids=["map", "tensors", "list"]
)
def test_it_yields_what_torch_yields(dataset, options):
    theirs = list(DataLoader(dataset, 5, **options))
    assert_same(read(opened(dataset, shuffle=False, **options)), theirs)
    assert_same(read(opened(DataLoader(dataset, 5, **options))), theirs)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SubsetRandomSampler([1, 1, 2, 3, 5, 8, 13], generator=generator()),
        lambda: WeightedRandomSampler(torch.rand(23, generator=generator()), 17, generator=generator()),
        lambda: RandomSampler(Pairs(), replacement=True, generator=generator()),
        lambda: RandomSampler(Pairs(), num_samples=9, generator=generator()),
        lambda: SequentialSampler(range(7)),
        lambda: [3, 1, 2],
    ],
    ids=["subset", "weighted", "replacement", "num_samples", "shorter", "a list"],
)
@pytest.mark.parametrize("dataset", [Pairs(), TensorDataset(X, Y)], ids=["map", "tensors"])
def test_other_samplers_keep_their_order(sampler, dataset):
    theirs = DataLoader(dataset, 4, sampler=sampler())
    ours = opened(DataLoader(dataset, 4, sampler=sampler()))
    assert ours.batches == len(theirs)
    assert_same(read(ours, epochs=2), [*theirs, *theirs])


@pytest.mark.parametrize(
    "loader", [{"shuffle": True}, {"shuffle": True, "generator": generator()}], ids=named
)
@pytest.mark.parametrize("dataset", [Pairs(), TensorDataset(X, Y)], ids=["map", "tensors"])
def test_a_plain_random_sampler_becomes_the_seeded_order(dataset, loader):
    batches = read(opened(DataLoader(dataset, 5, **loader), seed=8), epochs=2)
    assert [i for batch in batches for i in batch[1].tolist()] == [
        *epoch_order(23, 8, 0).tolist(),
        *epoch_order(23, 8, 1).tolist(),
    ]


@pytest.mark.posix
def test_what_a_loader_says_is_used():
    started = torch.zeros(2, dtype=torch.int64).share_memory_()

    def begin(number):
        started[number] += 1

    loader = DataLoader(
        Pairs(),
        5,
        shuffle=True,
        num_workers=2,
        prefetch_factor=7,
        timeout=30,
        worker_init_fn=begin,
        drop_last=True,
        multiprocessing_context="fork",
    )
    source = opened(loader)
    assert isinstance(source, Reader)
    assert source.ahead == 14  # num_workers * prefetch_factor
    inner = source._loader
    assert (inner.prefetch_factor, inner.timeout) == (7, 30)
    assert inner.multiprocessing_context is loader.multiprocessing_context
    assert len(read(source)) == source.batches == 4
    assert started.tolist() == [1, 1]


@pytest.mark.parametrize("dataset", [Pairs(), DataLoader(Pairs(), 5, shuffle=True)], ids=["map", "loader"])
def test_the_generator_of_the_process_is_left_alone(dataset):
    torch.manual_seed(4)
    before = torch.get_rng_state()
    read(opened(dataset))
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- with batch samplers, and without any
class Growing(BatchSampler):
    """Batches of 1, 2, 3, ... indices."""

    def __iter__(self):
        indices = iter(list(self.sampler))
        for size in range(1, 7):
            yield list(itertools.islice(indices, size))

    def __len__(self):
        return 6


@pytest.mark.parametrize(
    "batch_sampler",
    [
        lambda: [[1, 2], [3], [22, 0, 5]],
        lambda: Growing(range(21), 1, False),
        lambda: Growing(SubsetRandomSampler(range(21), generator=generator()), 1, False),
        lambda: BatchSampler(SequentialSampler(range(23)), 5, True),
        lambda: BatchSampler([4, 2, 2], 2, False),
    ],
    ids=["a list", "a subclass", "with a sampler", "torch's own", "around a list"],
)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Pairs(), TensorDataset(X, Y)], ids=["map", "tensors"])
def test_the_batches_of_a_batch_sampler_keep_their_order(batch_sampler, num_workers, dataset):
    theirs = DataLoader(dataset, batch_sampler=batch_sampler(), num_workers=num_workers)
    ours = opened(DataLoader(dataset, batch_sampler=batch_sampler(), num_workers=num_workers))
    batches = [*theirs, *theirs]
    sizes = [len(batch[1]) for batch in batches]
    keys = [(epoch, batch) for epoch in range(2) for batch in range(ours.batches)]
    assert_same(read(ours, epochs=2), batches)
    assert [ours.samples_in(*key) for key in keys] == sizes


class Ragged(Dataset[Any]):
    """Item i is a batch of i + 1 samples."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"name": f"item {index}", "x": X[: index + 1].numpy()}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sampler", [None, [3, 1, 1]], ids=["in order", "a sampler"])
def test_without_a_batch_size_each_item_is_a_batch(sampler, num_workers):
    def loader() -> DataLoader[Any]:
        return DataLoader(Ragged(), batch_size=None, sampler=sampler, num_workers=num_workers)

    source = opened(loader())
    batches = list(loader())
    assert source.batches == len(batches)
    assert_same(read(source), batches)
    sizes = [len(batch["x"]) for batch in batches]
    assert [source.samples_in(0, number) for number in range(source.batches)] == sizes
    assert source.indices(0, 0) == ((0,) if sampler is None else (3,))


# ---------------------------------------------------------------- datasets without a length
class Finite(IterableDataset[Any]):
    """23 pairs, shared among the worker processes."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return ((X[index], index) for index in range(first, 23, step))


@pytest.mark.parametrize(
    "options",
    [{}, {"drop_last": True}, {"collate_fn": mapping}, {"num_workers": 2}],
    ids=named,
)
def test_an_iterable_dataset_yields_what_torch_yields(options):
    theirs = list(DataLoader(Finite(), 5, **options))
    for ours in (opened(Finite(), **options), opened(DataLoader(Finite(), 5, **options))):
        assert isinstance(ours, StreamReader)
        assert (ours.batches, ours.samples, ours.batch_size) == (None, None, 5)
        assert_same(read(ours, batches=len(theirs)), theirs)


# ---------------------------------------------------------------- datasets with __getitems__
class Batched:
    """Counts the calls of its methods."""

    def __init__(self):
        self.asked: list[list[int]] = []

    def __len__(self):
        return 23


class Whole(Batched):
    def get_batch(self, indices):
        self.asked.append(indices)
        return {"x": X[indices]}


class Fetched(Batched):
    def __getitem__(self, index):
        raise AssertionError("asked for single samples")

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [(X[index], index) for index in indices]


def test_get_batch_is_asked_for_whole_batches():
    dataset = Whole()
    batches = read(opened(dataset, shuffle=False, epochs=1))
    assert dataset.asked == [list(range(start, min(start + 5, 23))) for start in range(0, 23, 5)]
    assert_same(batches, [{"x": X[indices]} for indices in dataset.asked])


def test_getitems_is_asked_for_the_samples_of_a_batch():
    dataset = Fetched()
    batches = read(opened(dataset, shuffle=False, epochs=1))
    assert_same(batches, [[X[indices], torch.tensor(indices)] for indices in dataset.asked])
    assert [i for indices in dataset.asked for i in indices] == list(range(23))


# ---------------------------------------------------------------- refusals
class Unsized(Dataset[Any]):
    def __getitem__(self, index):
        return index


class OwnIteration(DataLoader[Any]):
    def __iter__(self):
        return iter(())


class NoLength(Sampler[int]):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (X[:0], {}, "the dataset is empty"),
        ((X, Y[:7]), {}, "differ in length .*: element 0 has 23, element 1 has 7"),
        ((X, Y), {"batch_size": None}, "batch_size is missing"),
        ((X, Y), {"batch_size": 24, "drop_last": True}, "leaves no batch: an epoch has 23 samples"),
        ((X, Y), {"collate_fn": mapping}, "this tuple, so collate_fn=.* have no use"),
        (Finite(), {"shuffle": True}, "shuffle=True has no use for Finite: an IterableDataset has its own"),
        (Unsized(), {}, "dataset must be tensors .* not <"),
        (DataLoader(Pairs(), 5), {"shuffle": True}, "shuffle=True was given beside a DataLoader"),
        (DataLoader(Pairs(), batch_sampler=NoLength()), {}, "NoLength has no __len__"),
        (OwnIteration(Pairs(), 5), {}, "OwnIteration iterates in its own way"),
    ],
)
def test_it_says_what_is_wrong(dataset, options, message):
    with pytest.raises(OptionError, match=message):
        opened(dataset, **options)


# ---------------------------------------------------------------- resumed runs
class Shuffled(Sampler[int]):
    """A new order in each iteration, but the same orders in another process."""

    def __init__(self):
        self.generator = generator()

    def __len__(self):
        return 23

    def __iter__(self):
        return iter(torch.randperm(23, generator=self.generator).tolist())


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: (X, Y),
        Pairs,
        lambda: DataLoader(Pairs(), 5, shuffle=True),
        lambda: DataLoader(Pairs(), 5, sampler=Shuffled()),
        lambda: DataLoader(TensorDataset(X, Y), 5, sampler=Shuffled()),
        lambda: DataLoader(Pairs(), batch_sampler=BatchSampler(Shuffled(), 5, False)),
        lambda: DataLoader(Pairs(), 5, sampler=DistributedSampler(Pairs(), 1, 0)),
        lambda: DataLoader([X[i : i + 5] for i in range(0, 23, 5)], batch_size=None, shuffle=True),
    ],
    ids=["tensors", "map", "loader", "sampler", "gathered", "batch sampler", "set_epoch", "items"],
)
def test_a_resumed_run_reads_on_where_it_stood(dataset):
    everything = read(opened(dataset()), epochs=2)
    start = Position(1, done=1, open=(OpenEpoch(1, 4, ((2,),), ()),), global_step=9)
    source = opened(dataset(), start=start)
    assert source.can_resume_inside
    woken: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source.start(wake=lambda *key: woken.put(key), failed=woken.put)
    for batch in (2, 4):
        taken = source.take(0, 1, batch)
        if taken is None:
            assert woken.get(timeout=HANG_S) == (0, 1, batch)
            taken = source.take(0, 1, batch)
        assert_same(taken, everything[5 + batch])
        assert source.samples_in(1, batch) == len(torch.utils._pytree.tree_leaves(taken)[0])
    assert source.close()


def test_processes_of_a_resumed_run_draw_other_numbers():
    class Noise(Pairs):
        def __getitem__(self, index):
            return torch.rand(())

    fresh, again, resumed = (
        read(opened(Noise(), num_workers=1, start=start, epochs=1), batches=2)
        for start in (None, Position(1), Position(1, global_step=7))
    )
    assert torch.equal(fresh[0], again[0])
    assert not torch.isin(resumed[0], torch.cat(fresh)).any()


# ---------------------------------------------------------------- several machines
class Custom:
    """A sampler that draws by random numbers that nothing seeds, or always the same."""

    def __init__(self, is_random: bool) -> None:
        self.is_random = is_random

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Any:
        return iter(torch.randperm(23).tolist() if self.is_random else range(22, -1, -1))


class ByEpoch(Custom):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(torch.randperm(23, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def on_machines(sampler: Any, **options: Any) -> Source:
    return opened(DataLoader(Pairs(), 5, sampler=sampler), stride=Stride(0, 2), **options)


def batched(sampler: Any) -> Source:
    return opened(
        DataLoader(Pairs(), batch_sampler=OwnBatches(sampler, 5, drop_last=False)), stride=Stride(0, 2)
    )


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


@pytest.mark.parametrize("open_with", [on_machines, batched])
@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(range(23), num_samples=9), SubsetRandomSampler(range(20)), Custom(is_random=True)],
    ids=["RandomSampler", "SubsetRandomSampler", "Custom"],
)
def test_a_sampler_without_a_seed_is_refused_on_several_machines(open_with, sampler):
    with pytest.raises(OptionError, match=f"{type(sampler).__name__} draws another order .* with a seed"):
        open_with(sampler)


@pytest.mark.parametrize("open_with", [on_machines, batched])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(23), num_samples=9, generator=torch.Generator()),
        SequentialSampler(range(20)),
        list(range(20)),
        Custom(is_random=False),
        ByEpoch(is_random=True),
    ],
    ids=["generator", "sequential", "list", "always the same", "set_epoch"],
)
def test_a_sampler_that_can_be_the_same_on_all_machines(open_with, sampler):
    assert isinstance(open_with(sampler), DemandReader)


def test_a_plain_random_sampler_draws_by_the_seed_of_the_run():
    assert (
        on_machines(RandomSampler(range(23))).identity() == on_machines(RandomSampler(range(23))).identity()
    )


def test_a_stream_of_several_machines():
    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return iter(range(9))

    for dataset in (Stream(), DataLoader(Stream(), 3)):
        source = opened(dataset, stride=Stride(1, 2))
        assert (source.stride, source.is_part) == (Stride(1, 2), False)
        source = opened(dataset, stride=Stride(1, 2), is_part=True)
        assert (source.stride, source.is_part) == (Stride(1, 2), True)


SEVEN = torch.arange(7.0)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> float:
        return float(index)


class WholeSevens(Numbers):
    def get_batch(self, indices: list[int]) -> torch.Tensor:
        return SEVEN[indices]


class Sevens(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(SEVEN.tolist())


def negative(samples: list[float]) -> torch.Tensor:
    return -torch.tensor(samples)


def opened_evaluation(dataset: object, **options: Any) -> Source:
    return evaluated(dataset, **{"batch_size": 3, **options})


def read_evaluations(source: Source, epochs: int) -> list[list[float]]:
    woken: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source.start(wake=lambda *key: woken.put(key), failed=woken.put)
    batches = []
    for key in [(epoch, batch) for epoch in range(epochs) for batch in range(3)]:
        while (taken := source.take(0, *key)) is None:
            assert woken.get(timeout=HANG_S) == (0, *key)
        batches.append((taken[0] if isinstance(taken, tuple) else taken).tolist())
    assert source.close()
    return batches


@pytest.mark.parametrize(
    "dataset",
    [SEVEN, (SEVEN,), Numbers(), WholeSevens(), Sevens(), DataLoader(Numbers(), 3)],
    ids=["tensor", "tuple", "map", "get_batch", "stream", "loader"],
)
@pytest.mark.parametrize("collate_fn", [None, negative])
def test_all_of_it_in_its_own_order_whatever_the_training_collates(dataset: object, collate_fn: Any) -> None:
    source = opened_evaluation(dataset, collate_fn=collate_fn, num_workers=0)
    collates = collate_fn and (type(dataset) is Numbers or isinstance(dataset, Sevens))
    expected = torch.tensor_split(-SEVEN if collates else SEVEN, [3, 6])
    assert read_evaluations(source, 2) == [part.tolist() for part in expected] * 2


class Reads(Dataset[Any]):
    """Counts the reads of each of 1,003 indices, in any process."""

    def __init__(self) -> None:
        self.counts = torch.zeros(1003, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 1003

    def __getitem__(self, index: int) -> int:
        self.counts[index] += 1
        return index


class ReadStream(Reads, IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(1003))


def read_by(machine: int, machines: int, dataset: object, **options: Any) -> list[list[int]]:
    """What a machine reads in two evaluations."""
    source = opened_evaluation(dataset, batch_size=8, stride=Stride(machine, machines), **options)
    batches = SharedBatches(source)
    woken: queue.SimpleQueue[bool] = queue.SimpleQueue()
    batches.start(wake=lambda *_: woken.put(True), failed=lambda _: woken.put(False))
    found: list[list[int]] = []
    for number in range(2):
        found.append([])
        while (taken := batches.take(0, number, lambda: woken.get(timeout=HANG_S))) is not None:
            batch, payload = taken
            assert batch % machines == machine
            assert source.samples_in(number, batch) == (3 if batch == 125 else 8)
            found[-1] += (payload["x"] if isinstance(payload, dict) else payload).tolist()
        assert batches.end(number) == 126
    assert source.close()
    return found


@pytest.mark.parametrize("machines", [1, 3])
@pytest.mark.parametrize("kind", ["tensors", "map", "processes", "stream", "processes of a stream"])
def test_all_machines_together_read_each_sample_once(machines: int, kind: str) -> None:
    kinds = {"tensors": lambda: {"x": torch.arange(1003)}, "map": Reads, "stream": ReadStream}
    dataset = kinds[{"processes": "map", "processes of a stream": "stream"}.get(kind, kind)]()
    options = {"num_workers": 1 if kind.startswith("processes") else 0}
    found = [read_by(machine, machines, dataset, **options) for machine in range(machines)]
    for evaluation in range(2):
        assert sorted(i for of_machine in found for i in of_machine[evaluation]) == list(range(1003))
    if type(dataset) is Reads:  # nothing is read for another machine, but for what lies ready at the end
        for machine, of_machine in enumerate(found):
            assert of_machine[0] == [i for i in range(1003) if i // 8 % machines == machine]
        assert dataset.counts.max() <= 2 + options["num_workers"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_machine_without_a_batch(num_workers: int) -> None:
    source = opened_evaluation(Numbers(), batch_size=4, num_workers=num_workers, stride=Stride(2, 3))
    batches = SharedBatches(source)
    batches.start(wake=lambda *_: None, failed=lambda _: None)
    assert batches.take(0, 0, lambda: False) is None
    assert batches.end(0) == 2
    assert source.close()
