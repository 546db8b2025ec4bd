"""Tests of a loop's batches: those gathered on devices are those of the loader, and draw the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import flowdp
from flowdp.data_parallel import wrapper
from flowdp.data_parallel.batches import ResidentBatches, can_gather
from flowdp.data_parallel.loader import Epoch
from flowdp.device.streams import HostLane, Lane, StreamLane
from flowdp.errors import DataError, OptionError
from flowdp.policy.shares import shard_sizes
from tests.data.cards import Card

SAMPLES = 23
FAR = torch.device("cpu", 0)
CPU = torch.device("cpu")


def dataset() -> TensorDataset:
    torch.manual_seed(4)
    return TensorDataset(
        torch.randn(SAMPLES, 3),
        torch.arange(SAMPLES),
        torch.randn(SAMPLES, 2, 2) > 0,
        torch.randn(2, SAMPLES, dtype=torch.complex64).t(),
    )


def lanes(card: Card, count: int = 2) -> list[Lane]:
    return [StreamLane(FAR, card) for _ in range(count)]


class Cut:
    """Batches are cut in two equal parts, or dealt whole."""

    def __init__(self, counts: Sequence[int] | None) -> None:
        self.counts = counts

    def quotas(self) -> Sequence[int] | None:
        return self.counts

    def cut(self, samples: int) -> Sequence[int]:
        return shard_sizes(samples, (0.5, 0.5))

    def due(self) -> Sequence[int]:
        return ()


class Permuted:
    """Batches that are drawn when they are asked for an iterator, not when it is asked for the first one."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(20).view(5, 4).tolist())


LOADERS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "in order": lambda data: DataLoader(data, batch_size=4),
    "shuffled": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "shuffled, pinned": lambda data: DataLoader(data, batch_size=4, shuffle=True, pin_memory=True),
    "without the last": lambda data: DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda data: DataLoader(
        data, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "weighted": lambda data: DataLoader(
        data, batch_size=4, sampler=WeightedRandomSampler(torch.rand(SAMPLES), 30)
    ),
    "own batches": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data, num_samples=31), 7, drop_last=False)
    ),
    "drawn at once": lambda data: DataLoader(data, batch_sampler=Permuted()),
    "from the end": lambda data: DataLoader(data, batch_size=4, sampler=range(-SAMPLES, SAMPLES)),
}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("counts", [None, (2, 1)])
@pytest.mark.parametrize("loader_of", LOADERS.values(), ids=LOADERS)
def test_batches_on_devices_are_those_of_the_loader(
    loader_of: Callable[[Any], DataLoader[Any]], counts: Sequence[int] | None
) -> None:
    card = Card()
    places = lanes(card)
    wanted, found, after = [], [], []
    for places_ in ([HostLane(CPU)], places):
        torch.manual_seed(1)
        loader = loader_of(dataset())
        assert can_gather(loader, places_) is (places_ is places)
        torch.manual_seed(2)
        for _ in range(2):
            if places_ is places:
                for window in Epoch(loader, places, Cut(counts)):  # type: ignore[arg-type]
                    if counts is None:
                        found.append([window[field] for field in range(4)])
                        if window.whole is not None:
                            for one, other in zip(window.whole(), found[-1], strict=True):
                                assert torch.equal(one, other)
                    else:
                        for piece in window.pieces:
                            piece.arrive()
                            found.append([leaf.clone() for leaf in piece.batch])
                        assert type(piece.batch) is list
            else:
                wanted += [list(batch) for batch in loader]
        after.append((torch.rand(3), torch.rand(3, generator=loader.generator)))
    if counts is not None:  # in the order in which they would end
        wanted = sorted(wanted, key=str)
        found = sorted(found, key=str)
    assert len(wanted) == len(found)
    for batch, other in zip(wanted, found, strict=True):
        for one, two in zip(batch, other, strict=True):
            assert one.dtype == two.dtype
            assert torch.equal(one, two)
    assert all(map(torch.equal, *after)), "the epoch draws as many numbers as the loader"
    assert card.races == []


class Doubled(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield [2 * leaf for leaf in batch]


def test_what_stays_with_the_loader() -> None:
    card, data = Card(), dataset()
    there = lanes(card)
    graph = TensorDataset(torch.zeros(4, requires_grad=True))
    for loader in (
        Doubled(data, batch_size=4),
        DataLoader(data, batch_size=4, collate_fn=lambda samples: samples),
        DataLoader(data, batch_size=4, num_workers=1),
        DataLoader(data, batch_size=None),
        DataLoader(graph, batch_size=2),
        [[torch.zeros(2)]],
    ):
        assert not can_gather(loader, there)
    loader = DataLoader(data, batch_size=4)
    assert can_gather(loader, there)
    assert not can_gather(loader, [*there, HostLane(CPU)])
    near = [StreamLane(torch.device("cpu"), Card(total=100)), StreamLane(FAR, Card(total=100))]
    assert not can_gather(loader, near), "they would have to be copied, and do not fit"


class Freed(Card):
    """A card whose tensors are gone by the time it is asked."""

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {**super().memory_stats(device), "active_bytes.all.current": 0}


def test_tensors_take_half_of_the_free_memory_in_this_epoch_and_the_next() -> None:
    data = dataset()
    size = sum(tensor.nbytes for tensor in data.tensors)
    loader = DataLoader(data, batch_size=4)
    card = Freed(total=round(2.1 * size / 0.9))
    there = [StreamLane(FAR, card)]
    assert can_gather(loader, there)
    card.allocated = size  # the peak, of an epoch that has ended
    assert can_gather(loader, there)
    card.used = round(0.2 * size)
    assert not can_gather(loader, there), "another program uses some"


@pytest.mark.parametrize("counted", [True, False])
def test_tensors_that_are_written_during_an_epoch(counted: bool) -> None:
    card, data = Card(), TensorDataset(torch.zeros(8))
    # By another name than that of the device: they are copied there.
    there = [StreamLane(FAR, card)]
    batches = ResidentBatches(DataLoader(data, batch_size=2), there)
    seen = []
    for number in range(4):
        if counted:
            data.tensors[0].fill_(number)
        else:
            data.tensors[0].numpy()[:] = number
        rows = next(batches)
        with there[0].on(there[0].copy):
            seen += batches.bring(rows, 0)[0].tolist()
    wanted = [number for number in range(4) for _ in range(2)]
    assert seen == (wanted if counted else [0] * 8)


@pytest.mark.parametrize("index", [SAMPLES, -SAMPLES - 1])
def test_a_wrong_index_is_an_error_before_it_reaches_the_device(index: int) -> None:
    loader = DataLoader(dataset(), batch_size=2, sampler=[0, 1, 2, index])
    windows = iter(Epoch(loader, lanes(Card()), Cut(None)))  # type: ignore[arg-type]
    assert next(windows).samples == 2
    with pytest.raises(IndexError, match=f"index {index} is out of range: the dataset has {SAMPLES} samples"):
        next(windows)


def test_an_empty_batch_is_an_error() -> None:
    loader = DataLoader(dataset(), batch_sampler=[[0], []])
    windows = iter(Epoch(loader, lanes(Card()), Cut(None)))  # type: ignore[arg-type]
    next(windows)
    with pytest.raises(DataError, match="without samples"):
        next(windows)


# ---------------------------------------------------------------- a loop
@pytest.mark.parametrize("cadence", [False, True])
@pytest.mark.parametrize("options", [{}, {"prefetch_depth": 0}, {"prefetch_depth": 3}])
def test_a_loop_trains_the_same_on_streams(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], cadence: bool
) -> None:
    card, states = Card(), []
    for is_streamed in (False, True):
        if is_streamed:
            monkeypatch.setattr(
                wrapper, "open_lanes", lambda devices: [StreamLane(device, card) for device in devices]
            )
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        dp = flowdp.setup(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            devices=["cpu", "cpu"],
            loss_fn=lambda context: (context.output.squeeze(1) - context.batch[1]).square().mean(),
            cadence=cadence,
            partition_ratios=[0.5, 0.5] if not cadence else None,
            progress=False,
        )
        with dp:
            data = TensorDataset(torch.randn(SAMPLES, 3), torch.randn(SAMPLES))
            loader = DataLoader(data, batch_size=4, shuffle=not cadence)
            trained = 0
            for _ in range(2):
                for window in dp.epoch(loader, **options):
                    trained += dp.forward_batch(window).samples
                    dp.step()
            assert trained == 2 * SAMPLES
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    if not cadence:  # windows are dealt by speed
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, rtol=1e-6, atol=1e-7)
    assert card.races == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefetch_depth": -1}, "prefetch_depth must be an int of at least 0, not -1"),
        ({"prefetch_depth": 2.0}, "not 2.0"),
    ],
)
def test_arguments_of_an_epoch(options: dict[str, Any], said: str) -> None:
    with (
        flowdp.setup(torch.nn.Linear(1, 1), devices=["cpu"], progress=False) as dp,
        pytest.raises(OptionError, match=said),
    ):
        dp.epoch([], **options)
