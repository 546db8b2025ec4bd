"""Tests that every sample of every epoch is trained exactly once, on any number of devices, with any
events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import flowdp
from tests.limits import HANG_S
from tests.numerics.conftest import Door

TEAMS = pytest.mark.parametrize(
    ("policy", "devices"), [("sync", 3), ("cadence", 1), ("cadence", 3), ("async", 2), ("async", 4)]
)
READ = pytest.mark.parametrize(
    ("policy", "devices", "num_workers"),
    [("sync", 2, 0), ("sync", 3, 2), ("cadence", 1, 2), ("cadence", 3, 0), ("async", 3, 0), ("async", 2, 2)],
)

# Full and short batches, fewer batches than devices, one sample, a batch larger than the dataset.
SIZES = [(24, 4), (23, 4), (7, 3), (5, 2), (3, 8), (1, 1), (1, 4)]


def content(index: int) -> float:
    """Values of the sample with this index, unlike those of any other sample here."""
    return float(index * index % 1009) + index / 1024


def loss(model: nn.Module, batch: Any) -> Tensor:
    indices, values = batch
    expected = torch.tensor([content(int(index)) for index in indices])
    assert torch.equal(values.float(), expected), f"samples {indices} hold {values}"
    return model(values.float().unsqueeze(1) / 1024).mean()


def tensors(count: int) -> tuple[Tensor, Tensor]:
    return torch.arange(count), torch.tensor([content(index) for index in range(count)])


def trainer(recorder: Any, dataset: Any, policy: Any, devices: int, **options: Any) -> flowdp.Trainer:
    return flowdp.Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, lr=1e-3),
        recorder.watch(loss),
        dataset=dataset,
        policy=policy,
        devices=["cpu"] * devices,
        progress=False,
        **{"runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False))}
        | {"epochs": 3, **options},
    )


def check(recorder: Any, state: flowdp.TrainedState, expected: Counter[int], epochs: int = 3) -> None:
    """Assert that every epoch had the expected samples, and that the run's records agree with the
    recorder.
    """
    assert not state.interrupted
    assert state.epochs_done == epochs
    assert state.global_step == len(recorder.steps)
    for epoch in range(epochs):
        assert recorder.samples(epoch) == expected
    check_books(recorder, state)


def check_books(recorder: Any, state: flowdp.TrainedState) -> None:
    for record in state.history:
        for rank, part in enumerate(record.per_rank):
            steps = [step for step in recorder.of(rank) if step.epoch == record.epoch]
            assert (part.steps, part.samples) == (len(steps), sum(len(step.indices) for step in steps))


# ---------------------------------------------------------------- kinds of datasets
class Map(Dataset[Any]):
    """Single samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, content(index)


@TEAMS
def test_tensors_of_any_size(recorder, policy, devices):
    for (samples, batch_size), drop_last in product(SIZES, (False, True)):
        if drop_last and samples < batch_size:
            continue
        recorder.steps.clear()
        state = trainer(
            recorder,
            tensors(samples),
            policy,
            devices,
            per_device_batch_size=batch_size,
            reading=flowdp.ReadingOptions(drop_last=drop_last),
        ).fit()
        for epoch in range(3):
            seen = recorder.samples(epoch)
            assert max(seen.values()) == 1
            assert len(seen) == (samples // batch_size * batch_size if drop_last else samples)
            lengths = [len(step.indices) for step in recorder.steps if step.epoch == epoch]
            ragged = [] if drop_last or samples % batch_size == 0 else [samples % batch_size]
            assert sorted(lengths, reverse=True) == [batch_size] * (samples // batch_size) + ragged
        assert (state.epochs_done, state.global_step) == (3, len(recorder.steps))
        check_books(recorder, state)


# ---------------------------------------------------------------- events during the run
@TEAMS
def test_a_stop_in_the_middle_trains_nothing_twice_and_counts_everything(recorder, policy, devices):
    for at in (1, 9, 30):
        recorder.steps.clear()
        door = Door()
        recorder.before = lambda _, count, at=at, door=door: door.wait() if count == at else None
        run = trainer(recorder, tensors(23), policy, devices, per_device_batch_size=4, epochs=10_000).start()
        assert door.reached.wait(HANG_S)
        run.stop()
        door.opened.set()
        state = run.join(HANG_S)
        assert state.interrupted
        assert len(recorder.steps) == state.global_step >= at
        assert len(state.history) == state.epochs_done
        for epoch in range(max(step.epoch for step in recorder.steps) + 1):
            seen = recorder.samples(epoch)
            assert max(seen.values(), default=1) == 1
            # Epochs end in order; with async a later epoch may already be complete after an open one.
            if epoch <= state.epochs_done:
                assert (len(seen) == 23) == (epoch < state.epochs_done)
        check_books(recorder, state)


@TEAMS
def test_pauses_lose_and_double_nothing(recorder, policy, devices):
    def meet(at: int) -> Door:
        door = Door()
        recorder.before = lambda _, count: door.wait() if count == at else None
        return door

    door = meet(3)
    run = trainer(recorder, tensors(23), policy, devices, per_device_batch_size=4, epochs=40).start()
    for further in (1, 8, 21):
        assert door.reached.wait(HANG_S)
        run.pause()
        door.opened.set()
        with run.paused():
            before = len(recorder.steps)
            assert run.status().phase == "paused"
            # Paused ranks have taken over the mean.
            first, *others = (replica.flat.memories for replica in run._engine.replicas)
            assert all(torch.equal(*pair) for theirs in others for pair in zip(first, theirs, strict=True))
            assert len(recorder.steps) == before
            door = meet(before + further)
    door.opened.set()
    check(recorder, run.join(HANG_S), Counter(range(23)), epochs=40)


@TEAMS
def test_max_steps_ends_inside_an_epoch_with_its_first_batches(recorder, policy, devices):
    options: dict[str, Any] = {"per_device_batch_size": 4, "epochs": None}
    trainer(recorder, tensors(23), "sync", 1, max_steps=12, **options).fit()
    order = [step.indices for step in recorder.steps]
    for steps in (1, 5, 6, 10):
        recorder.steps.clear()
        state = trainer(recorder, tensors(23), policy, devices, max_steps=steps, **options).fit()
        assert not state.interrupted
        assert (state.global_step, state.epochs_done) == (steps, steps // 6)
        assert [one.is_complete for one in state.history] == [True] * (steps // 6) + [False] * (steps % 6 > 0)
        assert sorted(step.indices for step in recorder.steps) == sorted(order[:steps])


# ---------------------------------------------------------------- batches of any size, epochs of any length
class Stream(IterableDataset[Any]):
    """An iterable dataset in its own order, longer in each epoch; processes share it."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts
        self.epoch = -1

    def __iter__(self) -> Iterator[tuple[int, float]]:
        self.epoch += 1
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from ((i, content(i)) for i in range(first, self.counts[self.epoch % len(self.counts)], step))


class Uneven:
    """A batch sampler: batches of 1, 2, 3, 1, ... samples, in a new order in each epoch."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.draw = torch.Generator().manual_seed(2)

    def __len__(self) -> int:
        return len(list(self.cut(list(range(self.count)))))

    def __iter__(self) -> Iterator[list[int]]:
        return self.cut(torch.randperm(self.count, generator=self.draw).tolist())

    def cut(self, indices: list[int]) -> Iterator[list[int]]:
        for size in cycle((1, 2, 3)):
            if not indices:
                return
            batch, indices = indices[:size], indices[size:]
            yield batch


@READ
def test_an_iterable_dataset(recorder, policy, devices, num_workers):
    counts = (46, 1, 203) if num_workers == 0 else (46, 3, 203)
    state = trainer(
        recorder,
        Stream(*counts),
        policy,
        devices,
        per_device_batch_size=4,
        reading=flowdp.ReadingOptions(num_workers=num_workers),
    ).fit()
    assert (state.epochs_done, state.global_step) == (3, len(recorder.steps))
    for epoch, count in enumerate(counts):
        assert recorder.samples(epoch) == Counter(range(count))
    check_books(recorder, state)


@READ
def test_a_batch_sampler(recorder, policy, devices, num_workers):
    loader = DataLoader(Map(47), batch_sampler=Uneven(47), num_workers=num_workers)
    state = trainer(recorder, loader, policy, devices).fit()
    check(recorder, state, Counter(range(47)))
    for epoch in range(3):
        sizes = [len(step.indices) for step in recorder.steps if step.epoch == epoch]
        assert Counter(sizes) == Counter(len(batch) for batch in Uneven(47))
