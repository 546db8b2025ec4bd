"""Planned rounds for tests: the machine, and the ranks' acknowledgments."""

from __future__ import annotations

from typing import Any

from flowdp.machine.cadence_rounds import CadenceRounds
from flowdp.machine.epochs import Epochs
from flowdp.machine.planned_rounds import PlannedRounds, SingleRounds, SyncRounds
from flowdp.machine.rounds import Constraints
from flowdp.options import CadenceOptions
from flowdp.policy.cadence import Cadence
from flowdp.protocol.commands import Command, RoundEnded, Send
from flowdp.protocol.messages import DataEnded, Outcome, StartEpoch, SyncAck, SyncNow, SyncPoints, Work

Orders = dict[int, StartEpoch]


def rounds(
    batches: int = 100,
    *,
    world_size: int = 2,
    cadence: bool = True,
    epochs: int = 1,
    groups: tuple[int, ...] | None = None,
    **options: Any,
) -> PlannedRounds:
    ledgers = Epochs(batches, epochs, None, world_size, groups=groups)
    if cadence:
        return CadenceRounds(ledgers, Cadence(world_size, CadenceOptions(**options)), world_size)
    return (SyncRounds if world_size > 1 else SingleRounds)(ledgers, world_size)


def decide(
    machine: PlannedRounds, now_ms: float = 0.0, *, hold: bool = False, limit: int | None = None
) -> list[Command]:
    commands = machine.decide(now_ms, Constraints(hold, limit=limit))
    machine.check()
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
    machine = rounds(**given)
    machine.epochs.batches = None
    return machine


def ends(machine: PlannedRounds, epoch: int, batches: int) -> list[Command]:
    end = DataEnded(epoch, batches)
    machine.epochs.end(end)
    commands = machine.end(end)
    machine.check()
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
