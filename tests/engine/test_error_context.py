"""Tests of the context of errors: rank, step and samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flowdp.data.epoch_order import EpochOrder
from flowdp.data.tensor_source import TensorSource
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.error_context import ErrorContext
from flowdp.errors import CollectiveError, DataError, OutOfDeviceMemory, StepError
from flowdp.machine.worker import Step

CPU = torch.device("cpu")


def place() -> ErrorContext:
    order = EpochOrder(40, 10, 0, shuffle=False, drop_last=False)
    source = TensorSource([torch.arange(40)], lambda parts: parts[0], order)
    current = CurrentWorker(1, CPU, nn.Linear(1, 1), local_step=7, sink=lambda *_: None)
    return ErrorContext(current, source)


def test_it_names_the_step() -> None:
    here = place()
    here.step = Step(2, (1, 2), 0)
    assert str(here) == ("in epoch 3, at its step 8 (batch 2, indices 10, 11, 12, 13, 14, 15, 16, 17, ...)")
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
    assert str(error) == "rank 1 on cpu failed before its first step: ValueError: no"


def test_what_has_its_place_already_passes() -> None:
    for error in (DataError("torn"), OutOfDeviceMemory("full", rank=0)):
        assert place().explain(error) is error


def test_what_torch_says_is_there() -> None:
    error: Any = place().explain(torch.OutOfMemoryError("Tried to allocate 512 bytes"))
    assert isinstance(error, OutOfDeviceMemory)
    assert error.rank == 1
    assert "Tried to allocate 512 bytes" in str(error)
