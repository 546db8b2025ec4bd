"""Tests of errors on their way between machines: their class, attributes, machine and traceback arrive."""

from __future__ import annotations

import pickle

import pytest

from flowdp.engine.remote_error import RemoteError, origin_of, sent_error
from flowdp.errors import (
    CheckpointError,
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    DataError,
    DeviceError,
    FlowdpError,
    MachineLostError,
    MachineWaitsError,
    OptionError,
    OutOfDeviceMemory,
    ProtocolError,
    StallError,
    StateError,
    StepError,
)

HERE = "machine 1 (b)"

ERRORS = [
    FlowdpError("it failed"),
    OptionError("it failed"),
    DataError("it failed", epoch=2, indices=[3, 4]),
    StepError("it failed", rank=3, device="cuda:1", epoch=1, step=7, indices=[5]),
    DeviceError("it failed"),
    OutOfDeviceMemory("it failed", rank=2),
    CollectiveError("it failed"),
    CollectiveAborted("it failed"),
    CollectiveTimeout("it failed"),
    MachineLostError("it failed"),
    MachineWaitsError("it failed"),
    StallError("it failed", ranks=["idle"], stacks={"flowdp-worker-0": "File ..."}),
    CheckpointError("it failed", path="a/b.ckpt", version=4),
    StateError("it failed", state={"a": 1}),
    ProtocolError("it failed", events=["one", "two"]),
]


def raised(error: BaseException) -> BaseException:
    def loss_of_the_user() -> None:
        raise error

    try:
        loss_of_the_user()
    except BaseException as caught:
        return caught
    raise AssertionError


def arrived(error: BaseException) -> BaseException:
    """The error as another machine has it."""
    sent: RemoteError = pickle.loads(pickle.dumps(sent_error(raised(error), HERE)))
    return sent.error(2)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_its_class_with_its_attributes(error: FlowdpError) -> None:
    there = arrived(error)
    assert type(there) is type(error)
    assert vars(there) == vars(error)
    assert str(there) == f"{HERE}: {error}"


def test_the_traceback_of_its_machine_is_the_cause() -> None:
    error = StepError("rank 3 failed", rank=3, device="cpu")
    error.__cause__ = ZeroDivisionError("division by zero")
    error.add_note("Then rank 4: the same")
    text = str(arrived(error).__cause__)
    assert "in loss_of_the_user\n    raise error" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "Then rank 4: the same" in text


def test_what_is_sent_on_names_the_machine_that_it_came_from() -> None:
    assert origin_of(ValueError()) is None
    there = arrived(MachineLostError("it failed"))
    assert origin_of(there) == 2
    assert sent_error(there, "machine 0").text == f"{HERE}: it failed"


def test_an_error_of_the_users_is_one_of_flowdp_with_its_text() -> None:
    class OwnError(Exception):
        """Not known on other machines."""

    there = arrived(OwnError("no such user"))
    assert type(there) is FlowdpError
    assert str(there) == f"{HERE}: OwnError: no such user"
    assert "in loss_of_the_user" in str(there.__cause__)


def test_an_error_that_cannot_be_pickled_keeps_its_text() -> None:
    there = arrived(StateError("the model does not take it", state=lambda: None))
    assert type(there) is FlowdpError
    assert str(there) == f"{HERE}: the model does not take it"
    assert "StateError" in str(there.__cause__)
