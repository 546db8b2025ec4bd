"""Tests of the order of epochs, with flodl's vectors for the sampler, make_partition and the dataloader."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flowdp.data.epoch_order import (
    BatchOrder,
    EpochOrder,
    SamplerOrder,
    epoch_order,
)
from flowdp.data.loader_source import ReadPlan
from flowdp.errors import DataError, OptionError, ProtocolError
from flowdp.protocol.position import OpenEpoch, Position
from tests.data.opening import opened
from tests.limits import HANG_S

VECTORS: dict[str, dict[str, Any]] = {
    vector["id"]: vector
    for vector in json.loads((Path(__file__).parents[1] / "vectors/flodl.json").read_text())
    if vector["area"] in ("sampler", "make_partition", "dataloader")
}


def whole(order: BatchOrder, epoch: int) -> list[int]:
    return [index for batch in range(order.batches) for index in order.indices(epoch, batch).tolist()]


# ---------------------------------------------------------------- epoch_order
def test_it_is_a_permutation_that_depends_on_seed_and_epoch_alone():
    first = epoch_order(1000, 3, 5)
    torch.manual_seed(99)  # independent of the process's generator
    assert torch.equal(first, epoch_order(1000, 3, 5))
    assert first.dtype == torch.int64
    assert sorted(first.tolist()) == list(range(1000))


def test_seed_and_epoch_are_not_added():
    orders = [tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(20) for epoch in range(20)]
    assert len(set(orders)) == 400


def test_the_order_of_a_seed_stays_what_it_is():
    # A resumed run must get the same order with any later version.
    assert epoch_order(8, 0, 0).tolist() == [6, 4, 1, 3, 7, 5, 2, 0]
    assert epoch_order(8, 0, 1).tolist() == [7, 3, 5, 1, 2, 4, 6, 0]


# ---------------------------------------------------------------- EpochOrder
@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 70),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_every_sample_lies_in_one_batch(samples, batch_size, drop_last, shuffle, epoch):
    order = EpochOrder(samples, batch_size, 1, shuffle, drop_last)
    seen = whole(order, epoch)
    sizes = [order.samples_in(epoch, batch) for batch in range(order.batches)]
    assert sizes == [len(order.indices(epoch, batch)) for batch in range(order.batches)]
    assert order.batches == (math.floor if drop_last else math.ceil)(samples / batch_size)
    assert order.samples == sum(sizes) == len(seen) == len(set(seen))
    assert set(seen) <= set(range(samples))
    if drop_last:
        assert set(sizes) <= {batch_size}
        assert samples - order.samples < batch_size
    else:
        assert order.samples == samples
    if not shuffle:
        assert seen == list(range(order.samples))


def test_an_epoch_is_drawn_once_however_many_threads_ask(monkeypatch):
    drawn = []

    def counting(samples: int, seed: int, epoch: int) -> torch.Tensor:
        drawn.append(epoch)
        return epoch_order(samples, seed, epoch)

    monkeypatch.setattr("flowdp.data.epoch_order.epoch_order", counting)
    order = EpochOrder(5000, 10, 0, True, False)
    together = threading.Barrier(4)

    def rank(number: int) -> list[list[int]]:
        together.wait(HANG_S)
        # Two ranks are an epoch ahead of the other two, as with the asynchronous policy.
        return [whole(order, epoch) for epoch in (number % 2, number % 2 + 1)]

    with ThreadPoolExecutor(4) as pool:
        for number, epochs in enumerate(pool.map(rank, range(4))):
            assert epochs == [epoch_order(5000, 0, number % 2 + i).tolist() for i in (0, 1)]
    assert sorted(drawn) == [0, 1, 2]


# ---------------------------------------------------------------- SamplerOrder
def generator(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(23)),
    "subset": lambda: SubsetRandomSampler([4, 8, 15, 16, 22, 3, 1], generator=generator()),
    "subset of a tensor": lambda: SubsetRandomSampler(torch.arange(9), generator=generator()),
    "weighted": lambda: WeightedRandomSampler([0.1, 0.5, 0.4], 17, generator=generator()),
    "replacement": lambda: RandomSampler(range(23), replacement=True, generator=generator()),
    "num_samples": lambda: RandomSampler(range(23), num_samples=40, generator=generator()),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_is_dealt_in_its_own_order(kind, drop_last):
    order, twin = SamplerOrder(SAMPLERS[kind](), 4, drop_last), SAMPLERS[kind]()
    for epoch in range(3):
        drawn = [int(index) for index in twin]
        kept = drawn[: len(drawn) // 4 * 4] if drop_last else drawn
        assert whole(order, epoch) == kept


class Counted:
    """Yields epoch * 100 + i, and counts its iterations."""

    def __init__(self, length: int, yielded: int | None = None) -> None:
        self.length = length
        self.yielded = length if yielded is None else yielded
        self.iterated = 0

    def __len__(self):
        return self.length

    def __iter__(self):
        self.iterated += 1
        return iter(range(self.iterated * 100 - 100, self.iterated * 100 - 100 + self.yielded))


def test_a_sampler_is_iterated_once_per_epoch_when_the_epoch_is_asked_for():
    sampler = Counted(10)
    order = SamplerOrder(sampler, 3, False)
    assert sampler.iterated == 0
    assert whole(order, 0) == list(range(10))
    order.indices(0, 0)
    assert sampler.iterated == 1


def test_threads_in_several_epochs_share_one_sampler():
    sampler = Counted(50)
    order = SamplerOrder(sampler, 7, False)
    together = threading.Barrier(4)

    def rank(number: int) -> list[int]:
        together.wait(HANG_S)
        return whole(order, number % 2)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rank, range(4))) == [list(range(50)), list(range(100, 150))] * 2
    assert sampler.iterated == 2


def test_set_epoch_is_called_before_each_epoch():
    class Distributed(Counted):
        def __init__(self):
            super().__init__(4)
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    sampler = Distributed()
    SamplerOrder(sampler, 2, False).indices(2, 0)
    assert sampler.epochs == [0, 1, 2]


def test_a_run_that_begins_later_draws_the_epochs_before_on_the_way():
    sampler = Counted(10)
    order = SamplerOrder(sampler, 3, first=7)
    assert whole(order, 7) == list(range(700, 710))
    assert sampler.iterated == 8


@pytest.mark.parametrize("batch_size", [1, None])
def test_a_sampler_that_is_told_its_epoch_is_not_drawn_before(batch_size):
    class Told:
        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __len__(self):
            return 4

        def __iter__(self):
            numbers = range(self.epochs[-1] * 4, self.epochs[-1] * 4 + 4)
            return iter(numbers if batch_size else [[number] for number in numbers])

    sampler = Told()
    order = SamplerOrder(sampler, batch_size, first=7)
    assert whole(order, 8) == list(range(32, 36))
    assert whole(order, 7) == list(range(28, 32))
    assert sampler.epochs == [7, 8]
    with pytest.raises(ProtocolError):
        order.indices(6, 0)


# ---------------------------------------------------------------- batch samplers
class Buckets:
    """Batches of 1, 2, 3, ... samples, different ones in each epoch."""

    def __init__(self, batches: int = 4) -> None:
        self.batches = batches
        self.epoch = -1

    def __len__(self):
        return self.batches

    def __iter__(self):
        self.epoch += 1
        for batch in range(self.batches):
            yield [100 * self.epoch + 10 * batch + i for i in range((batch + self.epoch) % 3 + 1)]


def test_a_batch_sampler_makes_batches_of_any_size():
    order, twin = SamplerOrder(Buckets()), Buckets()
    assert (order.batches, order.batch_size, order.samples) == (4, None, None)
    for epoch in range(3):
        batches = list(twin)
        assert [order.samples_in(epoch, batch) for batch in range(4)] == [len(batch) for batch in batches]
        assert [order.indices(epoch, batch).tolist() for batch in range(4)] == batches
    assert order.indices(0, 1).tolist() == [10, 11]
    with pytest.raises(IndexError, match="batch 4 of an epoch of 4 batches"):
        order.samples_in(0, 4)


@pytest.mark.parametrize("where", ["the batch sampler", "its sampler"])
def test_a_batch_sampler_is_told_its_epoch(where):
    told: list[int] = []

    class Told(Buckets):
        def set_epoch(self, epoch):
            told.append(epoch)

    batch_sampler = Told() if where == "the batch sampler" else Buckets()
    batch_sampler.sampler = Told()  # asked only if the other one has none
    SamplerOrder(batch_sampler).indices(2, 0)
    assert told == [0, 1, 2]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[1], []], "list failed in epoch 1: ValueError: a batch has no samples"),
        ([[1], ["a"]], "list failed in epoch 1: TypeError"),
        ([1, 2], "list failed in epoch 1: TypeError"),
    ],
)
def test_a_batch_sampler_that_yields_something_else(batches, message):
    with pytest.raises(DataError, match=message) as e:
        SamplerOrder(batches).indices(0, 0)
    assert e.value.epoch == 0


# ---------------------------------------------------------------- checksums
def checksums(order: BatchOrder, epochs: int = 3) -> list[int | None]:
    for epoch in range(epochs):
        order.indices(epoch, 0)
    return [order.checksum(epoch) for epoch in range(epochs)]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_that_draws_the_same_has_the_same_checksums(kind):
    order = SamplerOrder(SAMPLERS[kind](), 4, False)
    assert order.checksum(0) is None  # not drawn yet
    found = checksums(order)
    assert None not in found
    assert found == checksums(SamplerOrder(SAMPLERS[kind](), 4, False))
    assert len(set(found)) == (1 if kind == "sequential" else 3)


def test_two_samples_that_change_places_change_the_checksum_but_not_in_what_is_dropped():
    def found(indices: list[int], drop_last: bool) -> int | None:
        return checksums(SamplerOrder(indices, 2, drop_last), 1)[0]

    assert found([0, 1, 2, 3, 4], False) != found([0, 1, 3, 2, 4], False)
    assert found([0, 1, 2, 3, 4], False) != found([0, 1, 2, 3, 5], False)
    assert found([0, 1, 2, 3, 4], True) == found([0, 1, 2, 3, 5], True)


# ---------------------------------------------------------------- the order of reading


@given(
    done=st.integers(0, 3),
    positions=st.lists(st.integers(0, 5), max_size=2),
    missing=st.sets(st.integers(0, 4), max_size=3),
)
def test_it_walks_what_was_not_trained_in_the_order_of_the_epochs(done, positions, missing):
    opened = [
        OpenEpoch(done + i, position, (tuple(sorted(b for b in missing if b < position)), ()), ())
        for i, position in enumerate(positions)
    ]
    start = Position(world_size=2, done=done, open=tuple(opened))
    walked = list(ReadPlan(5, start=start).walk(5))
    trained = {(e.epoch, b) for e in opened for b in range(e.position) if b not in missing}
    assert walked == [(e, b) for e in range(done, 5) for b in range(5) if (e, b) not in trained]


# ---------------------------------------------------------------- flodl's vectors
# Differences:
# - the permutation is our own: flodl seeds epoch e with seed + e, which repeats orders across seeds;
# - DL-005: flodl silently trains nothing; here a drop_last that leaves no batch is an OptionError;
# - DL-001, DL-021: drop_last is flodl's default but not ours (torch's), so it is passed;
# - DL-019: names are the keys of a mapping of tensors, so their number cannot be wrong;
# - DL-023: there are no empty batches, so no dataset is asked for one.
NOT_HERE = {"DL-019", "DL-023"}


def source_of(setup: dict[str, Any]) -> Any:
    reading = {name: setup.get(name) for name in ("shuffle", "drop_last")}
    return opened(torch.arange(setup["n"]), setup.get("batch_size", 4), 42, **reading)


def pair_is_equal(setup: dict[str, Any], given_: dict[str, Any]) -> dict[str, Any]:
    seeds, epochs = given_.get("seeds", [setup.get("seed")]), given_.get("epochs", [given_.get("epoch")])
    first, second = (epoch_order(setup["n"], seed, epoch) for seed in seeds for epoch in epochs)
    return {"equal": torch.equal(first, second)}


def lengths(_setup: dict[str, Any], _given: dict[str, Any]) -> dict[str, Any]:
    orders = EpochOrder(50, 7, 42, True, False), EpochOrder(30, 7, 42, False, False)
    return {"len": [len(whole(order, 0)) for order in orders]}


def same_slice_again(setup: dict[str, Any], given_: dict[str, Any]) -> dict[str, Any]:
    start, size = setup["slice"]
    draws = [epoch_order(setup["total"], setup["seed"], setup["epoch"]) for _ in range(given_["repeat"])]
    return {"equal": torch.equal(*(drawn[start : start + size] for drawn in draws))}


def slices(setup: dict[str, Any], given_: dict[str, Any]) -> dict[str, Any]:
    drawn = whole(EpochOrder(setup["total"], 10, setup["seed"], True, False), setup["epoch"])
    parts = [set(drawn[start : start + size]) for start, size in given_["slices"]]
    union = set().union(*parts)
    is_disjoint = len(union) == sum(size for _, size in given_["slices"])
    return {"disjoint": is_disjoint, "pairwise_disjoint": is_disjoint, "union": len(union)}


def size_of_a_part(setup: dict[str, Any], given_: dict[str, Any]) -> dict[str, Any]:
    _, size = given_["plan"]
    return {"partition_len": len(EpochOrder(setup["total"], size, 42, True, False).indices(0, 0))}


def batches_of(setup: dict[str, Any], given_: dict[str, Any]) -> dict[str, Any]:
    source, epochs = source_of(setup), given_.get("epochs", [given_.get("epoch", 0)])
    taken = [[source.take(0, epoch, batch) for batch in range(source.batches)] for epoch in epochs]
    items = [torch.cat(batches).tolist() for batches in taken]
    return {
        "num_batches": source.batches,
        "last_batch_len": len(taken[0][-1]),
        "batches": [batch.tolist() for batch in taken[0]],
        "items_seen": list(map(len, items)),
        "no_duplicates": all(len(set(seen)) == len(seen) for seen in items),
        "resident_on_cpu": taken[0][0].is_cpu,
    }


def nothing_to_train(setup: dict[str, Any], _given: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(OptionError, match=r"leaves no batch|empty"):
        source_of(setup)
    return {}


ANSWERS = {
    **dict.fromkeys(("SM-002", "SM-004"), pair_is_equal),
    "SM-006": lengths,
    **dict.fromkeys(("MP-001", "MP-005"), slices),
    "MP-003": same_slice_again,
    "MP-007": size_of_a_part,
    **dict.fromkeys(("DL-005", "DL-017"), nothing_to_train),
    **dict.fromkeys(
        ("DL-001", "DL-003", "DL-007", "DL-009", "DL-011", "DL-013", "DL-015", "DL-021"), batches_of
    ),
}


def test_no_vector_is_forgotten():
    assert set(VECTORS) == ANSWERS.keys() | NOT_HERE


@pytest.mark.parametrize("name", ANSWERS)
def test_vector(name):
    vector = VECTORS[name]
    setup = vector["setup"] | ({"drop_last": True} if name == "DL-021" else {})
    answers, expected = ANSWERS[name](setup, vector["input"]), vector["expected"]
    said = {key: value for key, value in answers.items() if key in expected}
    assert said == {key: expected[key] for key in said}
    assert said or ANSWERS[name] is nothing_to_train


def test_orders_lie_on_the_host_whatever_the_users_default_device_is() -> None:
    with torch.device("meta"):
        shuffled = EpochOrder(6, 2, 0, shuffle=True, drop_last=False)
        straight = EpochOrder(6, 2, 0, shuffle=False, drop_last=False)
        drawn = SamplerOrder([3, 1, 2], 2, drop_last=False)
        for order in (shuffled, straight, drawn):
            assert order.indices(0, 0).device.type == "cpu"
