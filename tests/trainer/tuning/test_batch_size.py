"""Tests of the search for batch sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flowdp
from flowdp import find_batch_size
from flowdp.trainer.tuning import batch_size
from flowdp.trainer.tuning.batch_size import search_sizes
from tests.trainer.tuning.small import DATA, loss, trainer

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
ROOM = 5


@pytest.fixture
def at_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search ends by its speed, which on a busy machine is chance."""
    monkeypatch.setattr(batch_size, "SLOW_S", float("inf"))


def cramped(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with room for few samples."""
    if len(batch[0]) > ROOM:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    return loss(model, batch)


@pytest.mark.usefixtures("at_any_speed")
def test_the_largest_is_that_for_which_there_is_room() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = trainer(model=model, loss=cramped, devices=["cpu"] * 2, policy="exact")
    found = find_batch_size(given, steps=1)
    assert found.largest == (ROOM, ROOM)
    assert set(found.devices[0].speeds) == {2, 4, ROOM}
    assert found.devices[0].bound == "memory"
    assert found.fastest[0] in found.devices[0].speeds
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert flowdp.runs() == ()


@pytest.mark.usefixtures("at_any_speed")
def test_a_step_of_ones_own_that_has_no_room() -> None:
    def step(worker: Any, batch: Any) -> dict[str, Tensor]:
        value = cramped(worker.model, batch)
        worker.backward(value)
        worker.step(worker.optimizers[0])
        return {"loss": value}

    assert find_batch_size(trainer(train_step=step), steps=1).largest == (ROOM,)


@pytest.mark.usefixtures("at_any_speed")
@pytest.mark.parametrize(("most", "largest", "bound"), [(2**16, 11, "the dataset"), (1, 1, "most")])
def test_the_bounds_of_the_dataset_and_of_the_caller(most: int, largest: int, bound: str) -> None:
    few = tuple(part[:11] for part in DATA)
    (found,) = find_batch_size(trainer(dataset=few), most=most, steps=1).ranks
    assert (found.largest, found.bound) == (largest, bound)


def test_no_room_at_all() -> None:
    def full(model: nn.Module, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(flowdp.OutOfDeviceMemory, match="cpu has no room for a step of one sample"):
        find_batch_size(trainer(loss=full))


def test_a_loader_has_batches_of_its_own() -> None:
    given = trainer(dataset=DataLoader(TensorDataset(*DATA), 4), per_device_batch_size=None)
    with pytest.raises(
        flowdp.OptionError, match="cannot change the batches of a DataLoader: give the Trainer"
    ):
        find_batch_size(given)


@pytest.mark.parametrize("room", [1, 2, 3, 63, 64, 65, 1000, 4096])
def test_the_search_finds_the_largest_to_one_part_in_32(room: int) -> None:
    tried = []

    def speed(size: int) -> float | None:
        tried.append(size)
        return float(size) if size <= room else None

    found = search_sizes(CARD, speed, 4096, "the end")
    assert room - room // 32 <= found.largest <= room
    assert list(found.speeds) == sorted(found.speeds)
    assert len(tried) == len(set(tried)) <= 18
    assert found.bound == ("the end" if room == 4096 else "memory")


def test_a_cpu_device_ends_where_larger_is_no_faster() -> None:
    speeds = {2: 50.0, 4: 90.0, 8: 100.0, 16: 101.0, 32: 99.0, 64: 102.0}
    found = search_sizes(CPU, speeds.__getitem__, 4096, "the end")
    assert found.largest == 64
    assert found.bound == "speed: larger is no faster"
    assert found.fastest == 8
    # A step of less than 10 ms has not the time of its samples.
    assert search_sizes(CPU, lambda size: 1e6, 4096, "the end").largest == 4096
