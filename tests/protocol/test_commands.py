"""Tests of commands: frozen values, all in the union that shells match on."""

from __future__ import annotations

import typing
from dataclasses import is_dataclass

import pytest

from flowdp.protocol import commands
from flowdp.protocol.commands import Command
from flowdp.protocol.messages import Fact

MEMBERS = typing.get_args(Command)


def test_the_union_holds_every_command_once() -> None:
    defined = {getattr(commands, name) for name in commands.__all__ if name != "Command"}
    assert set(MEMBERS) == defined
    assert len(MEMBERS) == len(defined)
    assert not set(MEMBERS) & set(typing.get_args(Fact))


@pytest.mark.parametrize("command", MEMBERS, ids=lambda command: command.__name__)
def test_a_command_is_frozen_and_small(command: type) -> None:
    assert is_dataclass(command)
    assert command.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(command)
    assert command.__name__ in commands.__all__
    assert command.__doc__
