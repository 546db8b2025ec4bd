"""Planned rounds for tests: the machine, and the ranks' acknowledgments."""

from __future__ import annotations

from typing import Any

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import Epochs
from flowdp.machine.planned_rounds import PlannedRounds
from flowdp.machine.policies import make_rounds
from flowdp.options import CadenceOptions, Policy
from flowdp.protocol.commands import Command, RoundEnded, Send
from flowdp.protocol.messages import DataEnded, Outcome, StartEpoch, SyncAck, SyncNow, SyncPoints, Work
from tests.invariants import check

Orders = dict[int, StartEpoch]


def epochs_of(
    batches: int | None, epochs: int | None, max_steps: int | None, world_size: int, **given: Any
) -> Epochs:
    config = CoordinatorConfig(
        world_size=world_size, batches=batches, epochs=epochs, max_steps=max_steps, **given
    )
    return Epochs(config)


def rounds(
    batches: int | None = 100,
    *,
    world_size: int = 2,
    policy: Policy = "cadence",
    epochs: int = 1,
    groups: tuple[int, ...] | None = None,
    machines: tuple[int, ...] = (),
    inner_rounds: int = 1,
    **options: Any,
) -> PlannedRounds:
    config = CoordinatorConfig(
        world_size=world_size,
        batches=batches,
        epochs=epochs,
        policy=policy,
        groups=groups,
        machines=machines,
        inner_rounds=inner_rounds,
        cadence=CadenceOptions(**options),
    )
    made = make_rounds(config, Epochs(config))
    assert isinstance(made, PlannedRounds)
    return made


def decide(
    machine: PlannedRounds, now_ms: float = 0.0, *, hold: bool = False, limit: int | None = None
) -> list[Command]:
    machine.limit = limit
    commands = machine.decide(now_ms, hold=hold)
    check(machine)
    return commands


def orders(commands: list[Command]) -> list[Orders]:
    """The orders among the commands, one mapping of ranks per block."""
    found: list[Orders] = []
    for command in commands:
        if isinstance(command, Send) and isinstance(command.order, StartEpoch):
            if command.rank == 0:
                found.append({})
            found[-1][command.rank] = command.order
    return found


def sync(order: StartEpoch) -> SyncPoints:
    assert order.sync is not None
    return order.sync


def acks(
    block: Orders,
    *,
    pace_ms: tuple[float, ...] = (10.0, 10.0),
    steps: tuple[int, ...] | None = None,
    rounds_held: int | None = None,
    drift: float | None = None,
    sync_ms: float = 1.0,
    inner_ms: float = 0.0,
    **wishes: bool,
) -> list[SyncAck]:
    """The acknowledgments of all ranks when a block has ended so."""
    first = sync(block[0])
    held = rounds_held or first.count
    done = steps or tuple(sync(order).every * held for order in block.values())
    outcome = Outcome(
        round=first.round + held - 1,
        global_step=first.global_step + sum(done),
        members=tuple(block),
        steps=done,
        samples=tuple(8 * n for n in done),
        **wishes,
    )
    return [
        SyncAck(
            rank,
            outcome,
            Work(
                order.epoch,
                done[rank],
                8 * done[rank],
                busy_ms=done[rank] * pace_ms[rank],
                pace_ms=pace_ms[rank] if done[rank] else 0.0,
                losses=(8.0 * done[rank], 8 * done[rank]),
                wait_ms=2.0,
                sync_ms=inner_ms + sync_ms if first.inner else sync_ms * held,
            ),
            sync_ms,
            drift,
        )
        for rank, order in block.items()
    ]


def settle(machine: PlannedRounds, answers: list[SyncAck], now_ms: float = 0.0) -> RoundEnded:
    *others, last = answers
    for answer in others:
        assert machine.take(answer, now_ms) == []
    [record] = machine.take(last, now_ms)
    assert isinstance(record, RoundEnded)
    return record


def stream(**given: Any) -> PlannedRounds:
    return rounds(None, **given)


def ends(machine: PlannedRounds, epoch: int, batches: int) -> list[Command]:
    end = DataEnded(epoch, batches)
    machine.epochs.end(end)
    commands = machine.end(end)
    check(machine)
    return commands


def lost(
    machine: PlannedRounds, block: Orders, rank: int, *, round: int, members: tuple[int, ...]
) -> list[SyncAck]:
    """The facts of the other ranks for the round in which a rank is missing."""
    steps = tuple(int(other in members) for other in range(3))
    held = round - sync(block[0]).round + 1
    outcome = Outcome(
        round, sync(block[0]).global_step + 3 * held - 3 + sum(steps), members, steps, (8, 8, 8), left=(rank,)
    )
    return [SyncAck(other, outcome, Work(0, held, 8 * held, pace_ms=1.0)) for other in members]


def sync_now(round: int, ranks: int = 2) -> list[Send]:
    """All ranks are called to the gate."""
    return [Send(rank, SyncNow(round)) for rank in range(ranks)]
