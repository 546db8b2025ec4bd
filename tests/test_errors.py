"""Tests of the public errors."""

from __future__ import annotations

import inspect

from flowdp import errors
from flowdp.errors import FlowdpError, OptionError, ProtocolError

ALL = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, FlowdpError)]


def test_one_base_for_all() -> None:
    assert {error.__name__ for error in ALL} == set(errors.__all__)
    assert issubclass(OptionError, ValueError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    page = inspect.getdoc(errors) or ""
    tree = page.split("```")[1]
    named = {line.split()[0] for line in tree.splitlines() if line.strip()}
    assert named == set(errors.__all__)


def test_a_protocol_error_shows_the_last_events() -> None:
    events = [f"event {number}" for number in range(60)]
    error = ProtocolError("two rounds are open", events=events)
    assert error.events == tuple(events)
    lines = str(error).splitlines()
    assert lines[0] == "two rounds are open"
    # The message lists fifty; the attribute has all.
    assert lines[2:] == [f"  event {number}" for number in range(10, 60)]
    assert str(ProtocolError("nothing before it")) == "nothing before it"
