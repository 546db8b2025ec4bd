"""Tests of the gate's records: frozen values, and their meaning."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from flowdp.protocol import gate, messages
from flowdp.protocol.gate import Directives, Outcome


@pytest.mark.parametrize(
    ("wishes", "voids"),
    [
        ({}, False),
        ({"lr": 0.1}, False),
        ({"stop": True}, True),
        ({"pause": True}, True),
        ({"hurried": True}, True),
        ({"left": (1,)}, True),
    ],
)
def test_what_voids(wishes: dict[str, object], voids: bool) -> None:
    assert Outcome(0, 2, (0, 1), (1, 1), (8, 8), **wishes).voids is voids  # type: ignore[arg-type]


def test_they_are_frozen_and_messages_too() -> None:
    with pytest.raises(FrozenInstanceError):
        Directives().stop = True  # type: ignore[misc]
    assert all(getattr(messages, name) is getattr(gate, name) for name in gate.__all__)
