"""All lives of a run: each begins where the one before it was saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from flowdp.protocol.position import Position, decode, encode
from tests.simulator.cluster import JudgedWorld, Machines
from tests.simulator.effect import Memory
from tests.simulator.positions import check_position
from tests.simulator.recovery import judge_recovery
from tests.simulator.scenario import Scenario

__all__ = ["play"]


def play(
    scenario: Scenario,
    machines: Machines | None = None,
    trace: Callable[[float, str], None] | None = None,
    world: type[JudgedWorld] = JudgedWorld,
    lives: list[JudgedWorld] | None = None,
) -> list[JudgedWorld]:
    """Run a scenario and those that go on where it was saved.

    Args:
        scenario: The first of them.
        machines: The machines to run.
        trace: Called with the time and a line for every event; None: silent.
        world: Of which kind the virtual clusters are.
        lives: Where to put them, each before it is run; None: into a new list.

    Returns:
        The lives.

    Raises:
        Violation: A rule does not hold.
    """
    lives = [] if lives is None else lives
    saved: list[tuple[Position, Memory]] = []
    memory: Memory | None = None
    life: Scenario | None = scenario
    while life is not None:
        lives.append(world(life, machines, trace, memory))
        lives[-1].run()
        if life.disturbance is not None:
            calm = world(replace(life, disturbance=None), machines, None, memory)
            calm.run()
            judge_recovery(lives[-1], calm)
        # Of a run that ended before its first checkpoint, the one before it is tried again.
        saved = _resumable(lives[-1]) or saved
        life = lives[-1].scenario.later
        if life is None or not saved:
            break
        position, memory = saved[min(len(saved) - 1, int(life.begins_at * len(saved)))]
        life = replace(life, config=replace(life.config, start=_from_a_file(position)))
        if trace is not None:
            trace(0.0, f"the next life begins at {position}")
    return lives


def _resumable(world: JudgedWorld) -> list[tuple[Position, Memory]]:
    saved = [(save.position, memory) for save, memory in world.rules.standing.saves]
    if world.scenario.config.batches is not None:
        return saved
    # An iterator cannot be entered in the middle of an epoch.
    return [
        (position, memory)
        for position, memory in saved
        if all(len(one.missing) == one.position for one in position.open)
    ]


def _from_a_file(position: Position) -> Position:
    again = decode(json.loads(json.dumps(encode(position), allow_nan=False)))
    if not isinstance(again, Position):
        raise TypeError(f"{position} was read as {again}")
    check_position(again)
    return again
