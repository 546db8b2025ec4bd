"""Tests of several pauses at once: the run continues after the last one."""

from __future__ import annotations

from flowdp.engine.pauses import Pauses
from flowdp.protocol.messages import Requested


class Wishes:
    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, wish: Requested) -> int:
        self.said.append(wish.what)
        return len(self.said)


def test_the_last_one_who_leaves_lets_it_go_on() -> None:
    wishes = Wishes()
    pauses = Pauses(wishes)
    assert (pauses.enter(), pauses.enter()) == (1, 2)
    pauses.leave()
    assert wishes.said == ["pause", "pause"]
    pauses.leave()
    assert wishes.said == ["pause", "pause", "unpause"]


def test_nobody_else_lets_it_go_on_meanwhile() -> None:
    wishes = Wishes()
    pauses = Pauses(wishes)
    pauses.enter()
    pauses.unpause()
    assert wishes.said == ["pause"]
    pauses.leave()
    assert wishes.said == ["pause", "unpause"]
    pauses.unpause()
    assert wishes.said == ["pause", "unpause", "unpause"]
