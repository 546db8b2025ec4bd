"""Tests of virtual time."""

from __future__ import annotations

import random

from flowdp.sim.clock import Clock


def test_things_happen_in_the_order_of_time_then_of_asking() -> None:
    clock = Clock(random.Random(0), 0.0)
    happened: list[tuple[float, str]] = []

    def note(name: str) -> None:
        happened.append((clock.now_ms, name))

    clock.after(5.0, note, "late")
    clock.after(1.0, note, "first")
    clock.after(1.0, note, "second")
    # A callback may schedule others.
    clock.after(2.0, lambda: clock.after(1.5, note, "asked for at 2"))
    while clock.advance():
        pass
    assert happened == [(1.0, "first"), (1.0, "second"), (3.5, "asked for at 2"), (5.0, "late")]
    assert not clock.advance()


def test_no_message_overtakes_another_on_its_link() -> None:
    clock = Clock(random.Random(1), 10.0)
    heard: dict[str, list[int]] = {"up": [], "down": []}
    for number in range(50):
        for link in heard:
            clock.send(link, heard[link].append, number)
    while clock.advance():
        assert clock.now_ms <= 10.0
    assert heard == {"up": list(range(50)), "down": list(range(50))}


def test_a_late_message_holds_its_link_and_no_other() -> None:
    clock = Clock(random.Random(1), 1.0)
    heard: list[str] = []
    clock.send("a", heard.append, "late", extra_ms=100.0)
    clock.send("a", heard.append, "behind it")
    clock.send("b", heard.append, "beside it")
    while clock.advance():
        pass
    assert heard == ["beside it", "late", "behind it"]
    assert clock.now_ms >= 100.0
