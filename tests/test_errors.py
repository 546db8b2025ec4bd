"""Tests of the public errors and their attributes."""

from __future__ import annotations

import inspect

import pytest

from flowdp import errors
from flowdp.errors import (
    CheckpointError,
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    DataError,
    DeviceError,
    FlowdpError,
    OptionError,
    OutOfDeviceMemory,
    ProtocolError,
    StallError,
    StepError,
)

ALL = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, FlowdpError)]


def test_one_base_for_all() -> None:
    assert {error.__name__ for error in ALL} == set(errors.__all__)
    assert issubclass(OptionError, ValueError)
    assert issubclass(CollectiveAborted, CollectiveError)
    assert issubclass(CollectiveTimeout, CollectiveError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    page = inspect.getdoc(errors) or ""
    tree = page.split("```")[1]
    named = {line.split()[0] for line in tree.splitlines() if line.strip()}
    assert named == set(errors.__all__)


def test_a_step_error_says_where() -> None:
    error = StepError("it broke", rank=1, device="cpu", epoch=0, step=7, indices=[3, 4])
    assert (error.rank, error.device, error.epoch, error.step) == (1, "cpu", 0, 7)
    assert error.indices == (3, 4)
    assert str(error) == "it broke"
    early = StepError("at once", rank=0, device="cpu")
    assert (early.epoch, early.step, early.indices) == (None, None, ())


def test_a_data_error_says_where() -> None:
    error = DataError("no such file", epoch=2, indices=range(3))
    assert (error.epoch, error.indices) == (2, (0, 1, 2))
    assert DataError("before the first epoch").epoch is None


def test_a_protocol_error_shows_the_last_events() -> None:
    events = [f"event {number}" for number in range(60)]
    error = ProtocolError("two rounds are open", events=events)
    assert error.events == tuple(events)
    lines = str(error).splitlines()
    assert lines[0] == "two rounds are open"
    # The message lists fifty; the attribute has all.
    assert lines[2:] == [f"  event {number}" for number in range(10, 60)]
    assert str(ProtocolError("nothing before it")) == "nothing before it"


@pytest.mark.parametrize("error", ALL)
def test_each_error_says_what_it_means(error: type) -> None:
    assert error.__doc__


def test_out_of_memory_says_how_much_was_missing() -> None:
    error = OutOfDeviceMemory("no room", rank=1, needed_bytes=2048, free_bytes=1024)
    assert isinstance(error, DeviceError)
    assert (error.rank, error.needed_bytes, error.free_bytes) == (1, 2048, 1024)


def test_a_stall_says_who_waits_for_what() -> None:
    error = StallError("nothing moves", ranks=["in a step", "at the gate"], stacks={"flowdp-worker-0": "..."})
    assert error.ranks == ("in a step", "at the gate")
    assert error.stacks == {"flowdp-worker-0": "..."}
    assert StallError("nothing moves").stacks == {}


def test_a_checkpoint_error_names_the_file() -> None:
    error = CheckpointError("torn", path="runs/step-7.pt", version=3)
    assert (error.path, error.version) == ("runs/step-7.pt", 3)
