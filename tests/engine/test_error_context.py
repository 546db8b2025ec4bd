"""Tests of the context of errors: rank, step and samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flowdp.data.epoch_order import EpochOrder
from flowdp.data.tensor_source import TensorSource
from flowdp.device.streams import HostLane, Lane, StreamLane
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.error_context import ErrorContext
from flowdp.errors import CollectiveError, DataError, OutOfDeviceMemory, StepError
from flowdp.machine.worker import Step
from tests.data.cards import Card

CPU = torch.device("cpu")


def place(lane: Lane | None = None) -> ErrorContext:
    order = EpochOrder(40, 10, 0, shuffle=False, drop_last=False)
    source = TensorSource([torch.arange(40)], lambda parts: parts[0], order)
    current = CurrentWorker(1, CPU, nn.Linear(1, 1), local_step=7, sink=lambda *_: None)
    return ErrorContext(current, lane or HostLane(CPU), source)


def test_it_names_the_step() -> None:
    here = place()
    here.step = Step(2, (1, 2), 0)
    assert str(here) == ("in epoch 2, at its step 7 (batch 1, indices 10, 11, 12, 13, 14, 15, 16, 17, ...)")
    error = here.explain(ValueError("no"))
    assert isinstance(error, StepError)
    assert str(error) == f"rank 1 on cpu failed {here}: ValueError: no"
    assert (error.rank, error.device, error.epoch, error.step) == (1, "cpu", 2, 7)
    assert error.indices == tuple(range(10, 20))
    assert isinstance(error.__cause__, ValueError)


def test_a_lost_machine_is_no_fault_of_the_step() -> None:
    here = place()
    here.step = Step(2, (1, 2), 0)
    error = CollectiveError("a sum failed: one was lost")
    error.__cause__ = RuntimeError("Connection closed by peer")
    assert here.explain(error) is error


def test_before_the_first_step_there_is_nothing_to_name() -> None:
    error = place().explain(ValueError("no"))
    assert isinstance(error, StepError)
    assert (error.epoch, error.indices) == (None, ())


def test_what_has_its_place_already_passes() -> None:
    for error in (DataError("torn"), OutOfDeviceMemory("full", rank=0)):
        assert place().explain(error) is error


@pytest.mark.parametrize(
    ("said", "needed", "free"),
    [
        ("Tried to allocate 20.00 MiB. GPU 0 has ... GiB of which 1.50 GiB is free.", 20 * 2**20, 3 * 2**29),
        ("Tried to allocate 512 bytes", 512, None),
        ("out of memory", None, None),
        ("Tried to allocate 3 elephants", None, None),
    ],
)
def test_the_numbers_are_those_of_torchs_message(said: str, needed: int | None, free: int | None) -> None:
    error: Any = place().explain(torch.OutOfMemoryError(said))
    assert isinstance(error, OutOfDeviceMemory)
    assert (error.rank, error.needed_bytes, error.free_bytes) == (1, needed, free)
    assert said in str(error)


def test_a_device_is_asked_for_what_torch_does_not_say() -> None:
    here = place(StreamLane(CPU, Card(total=1000, used=400)))
    error: Any = here.explain(torch.OutOfMemoryError("out of memory"))
    assert error.free_bytes == 600


def test_a_tensor_of_another_device_is_what_the_loss_brought() -> None:
    said = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    error = place().explain(RuntimeError(said))
    assert "take it from the batch or the model" in str(error)
    assert "take it from the batch" not in str(place().explain(RuntimeError("another one")))
