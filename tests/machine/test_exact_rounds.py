"""Tests of exact rounds: the parts of windows armed after given acknowledgments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.epochs import Epochs
from flowdp.machine.exact_rounds import ExactRounds, split
from flowdp.options import CadenceOptions
from flowdp.protocol.commands import Command, Fail, RoundEnded, Send
from flowdp.protocol.gate import Window
from flowdp.protocol.messages import (
    Checksum,
    Outcome,
    SampleRange,
    StartEpoch,
    SyncAck,
    SyncNow,
    SyncPoints,
    Work,
)
from tests.invariants import check

Block = list[StartEpoch]
"""One order to every rank."""

OF_A_CARD = Checksum("a card", 7)


def rounds(
    windows: int = 100, *, world_size: int = 2, window: int = 64, last: int | None = None, **given: Any
) -> ExactRounds:
    samples = (windows - 1) * window + (window if last is None else last)
    alone = given.pop("may_be_alone", False)
    batch = GlobalBatch(window, samples, given.pop("least", 1), given.pop("forwards", None), alone)
    config = CoordinatorConfig(
        world_size=world_size,
        batches=windows,
        epochs=given.pop("epochs", 1),
        global_batch=batch,
        ratios=given.pop("ratios", None),
        cadence=CadenceOptions(**given),
    )
    return ExactRounds(config, Epochs(config))


def decide(machine: ExactRounds, now_ms: float = 0.0, *, hold: bool = False) -> list[Block]:
    """The armed blocks; there are no other commands."""
    commands = machine.decide(now_ms, hold=hold)
    check(machine)
    found: list[Block] = []
    for command in commands:
        assert isinstance(command, Send)
        assert isinstance(command.order, StartEpoch)
        if command.rank == 0:
            found.append([])
        assert len(found[-1]) == command.rank
        found[-1].append(command.order)
    return found


def sync(block: Block) -> SyncPoints:
    """The sync points, equal for all ranks."""
    first = block[0].sync
    assert first is not None
    assert all(order.sync == first and order.batches == block[0].batches for order in block)
    return first


def sizes(block: Block, index: int = 0) -> list[int]:
    """Samples of each rank in a window of the block; the parts must tile it."""
    stop, found = 0, []
    for order in block:
        assert order.parts is not None
        assert len(order.parts) == len(order.batches)
        part = order.parts[index]
        assert part.start == stop
        stop = part.stop
        found.append(part.samples)
    return found


def acks(
    block: Block,
    ms_per_sample: Sequence[float] = (1.0, 1.0),
    *,
    held: int | None = None,
    checksums: Sequence[Checksum] | None = None,
    **wishes: bool,
) -> list[SyncAck]:
    """Acknowledgments of all ranks for this number of rounds of the block."""
    first = sync(block)
    rounds_held = held or first.count
    last = sizes(block, rounds_held - 1)
    outcome = Outcome(
        first.round + rounds_held - 1,
        first.global_step + rounds_held,
        tuple(range(len(block))),
        tuple(int(size > 0) for size in last),
        tuple(last),
        window=Window(compare=checksums is not None),
        **wishes,
    )
    answers = []
    for rank, order in enumerate(block):
        assert order.parts is not None
        samples = [part.samples for part in order.parts[:rounds_held] if part.samples]
        busy_ms = sum(samples) * ms_per_sample[rank]
        pace_ms = busy_ms / max(1, len(samples))
        work = Work(
            order.epoch, len(samples), sum(samples), busy_ms, pace_ms=pace_ms, sync_ms=1.0 * rounds_held
        )
        checksum = None if checksums is None else checksums[rank]
        answers.append(SyncAck(rank, outcome, work, 1.0, checksum=checksum))
    return answers


def settle(machine: ExactRounds, answers: list[SyncAck]) -> list[Command]:
    said = [command for answer in answers for command in machine.take(answer, 0.0)]
    check(machine)
    return said


def drained(machine: ExactRounds, ms_per_sample: Sequence[float]) -> list[Block]:
    """All blocks that a run arms."""
    armed = decide(machine)
    for block in armed:
        settle(machine, acks(block, ms_per_sample))
        armed += decide(machine)
    return armed


def test_all_ranks_get_the_same_windows_and_each_its_part() -> None:
    machine = rounds()
    [block] = decide(machine)
    assert [order.batches for order in block] == [(0,), (0,)]
    assert [order.parts for order in block] == [(SampleRange(0, 32),), (SampleRange(32, 64),)]
    # One step of the run, whichever ranks take part in it.
    assert sync(block) == SyncPoints(0, 1, 1, 0, 1)


def test_the_first_round_measures_and_then_one_lies_ready() -> None:
    machine = rounds()
    [block] = decide(machine)
    assert decide(machine) == []
    [record] = settle(machine, acks(block))
    assert isinstance(record, RoundEnded)
    assert (record.global_step, record.steps, record.samples) == (1, (1, 1), (32, 32))
    first, second = decide(machine)
    assert [(sync(b).round, sync(b).global_step) for b in (first, second)] == [(1, 1), (2, 2)]


def test_parts_follow_the_measured_speeds() -> None:
    armed = drained(rounds(), (1.0, 2.5))
    split = [sizes(block) for block in armed]
    # Windows 1, 2 and 4 are ignored, 3 and 5 measure; these and the one armed by then have equal parts.
    assert split[:6] == [[32, 32]] * 6
    assert all(both == [46, 18] for both in split[6:])
    # Until then single rounds measure; blocks of a fifth of a second follow.
    assert [sync(block).count for block in armed][:6] == [1] * 6
    assert {sync(block).count for block in armed[9:-1]} == {4}


def test_the_first_round_is_not_believed() -> None:
    machine = rounds()
    [block] = decide(machine)
    settle(machine, acks(block, (50.0, 1.0)))  # rank 0 made caches that later rounds use
    armed = decide(machine)
    for block in armed:
        settle(machine, acks(block, (1.0, 1.0)))
        armed += decide(machine)
    assert all(sizes(block) == [32, 32] for block in armed)


def test_a_hint_is_believed_until_measured() -> None:
    [block] = decide(rounds(speed_hint=(0, 3.0)))
    assert sizes(block) == [16, 48]


def test_fixed_shares_do_not_look_at_the_clock() -> None:
    slow, fast = (
        [(order.batches, order.parts) for block in drained(rounds(ratios=(0.7, 0.3)), ms) for order in block]
        for ms in ((1.0, 1.0), (4.0, 1.0))
    )
    windows = [
        {
            (window, part)
            for batches, parts in armed
            for window, part in zip(batches, parts or (), strict=True)
        }
        for armed in (slow, fast)
    ]
    assert windows[0] == windows[1]
    assert len(windows[0]) == 200


def test_the_last_window_has_what_remains() -> None:
    machine = rounds(3, last=5, ratios=(0.7, 0.3), epochs=2)
    armed = drained(machine, (1.0, 1.0))
    assert sizes(armed[0]) == [45, 19]
    assert [(b[0].epoch, b[0].batches) for b in armed] == [(0, (0,)), (0, (1, 2)), (1, (0, 1, 2))]
    assert sizes(armed[1], 1) == [4, 1]
    assert machine.global_step == 6


def test_a_rank_may_have_no_sample() -> None:
    machine = rounds(2, world_size=3, last=1)
    [block] = decide(machine)
    settle(machine, acks(block, (1.0,) * 3))
    [last] = decide(machine)
    assert sizes(last) == [1, 0, 0]
    [record] = settle(machine, acks(last, (1.0,) * 3, checksums=(OF_A_CARD,) * 3))
    assert isinstance(record, RoundEnded)
    assert record.steps == (1, 0, 0)
    # The window is trained all the same, as one step.
    assert machine.global_step == 2
    assert machine.epochs.of(0).is_complete


def test_an_epoch_ends_with_a_comparison() -> None:
    armed = drained(rounds(10, epochs=2), (1.0, 1.0))
    ends = [(b[0].epoch, b[0].batches[-1]) for b in armed if sync(b).compare]
    assert ends == [(0, 9), (1, 9)]


@pytest.mark.parametrize(
    ("checksums", "named"),
    [
        ((5, 5, 5), None),
        ((5, 5, 6), "rank 2 "),
        ((6, 5, 5), "rank 0 "),
        ((5, 6, 7), "rank 1, 2 "),  # no majority: rank 0's value counts
        ((5, ("old", 6), ("old", 6)), None),  # kinds of device may round differently
        ((("old", 6), 5, 6), "rank 2 "),
    ],
)
def test_who_differs_is_named(checksums: tuple[int | tuple[str, int], ...], named: str | None) -> None:
    machine = rounds(1, world_size=3)
    [block] = decide(machine)
    given = [Checksum(*one) if isinstance(one, tuple) else Checksum("a card", one) for one in checksums]
    said = settle(machine, acks(block, (1.0,) * 3, checksums=given))
    failures = [command for command in said if isinstance(command, Fail)]
    assert len(failures) == (named is not None)
    assert all(named is not None and named in failure.error for failure in failures)


@pytest.mark.parametrize("wish", ["stop", "pause"])
def test_windows_of_void_rounds_are_planned_anew(wish: str) -> None:
    machine = rounds(ratios=(0.5, 0.5))
    [first] = decide(machine)
    settle(machine, acks(first))
    running, ready = decide(machine)
    assert (running[0].batches, ready[0].batches) == ((1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11, 12))
    # The block ends after its first round, and the rest is void.
    [record] = settle(machine, acks(running, held=1, **{wish: True}))
    assert isinstance(record, RoundEnded)
    assert (record.rounds, machine.global_step, machine.is_idle) == (1, 2, True)
    again, _ = decide(machine)
    assert again[0].batches[0] == 2
    assert again[0].plan == running[0].plan + 1


def test_a_round_in_progress_is_never_hurried() -> None:
    machine = rounds(ratios=(0.5, 0.5))
    for block in decide(machine):
        settle(machine, acks(block))
    decide(machine)
    for hold in (False, True):
        commands = machine.decide(1e9, hold=hold, meet=True)
        assert not any(
            isinstance(command, Send) and isinstance(command.order, SyncNow) for command in commands
        )
    assert machine.deadline_ms() is None


def test_one_device_takes_whole_windows() -> None:
    armed = drained(rounds(5, world_size=1), (1.0,))
    assert all(sizes(block) == [64] for block in armed)


def lone_acks(block: Block, ms_per_step: float) -> list[SyncAck]:
    """Acknowledgments of an order that one rank trains, which takes this time for each window."""
    first = sync(block)
    [rank] = [rank for rank, order in enumerate(block) if order.parts and order.parts[0].samples]
    parts = block[rank].parts
    assert parts is not None
    assert all(order.alone for order in block)
    steps, samples = len(parts), sum(part.samples for part in parts)
    there = [int(at == rank) for at in range(len(block))]
    outcome = Outcome(
        first.round,
        first.global_step + steps,
        tuple(range(len(block))),
        tuple(steps * one for one in there),
        tuple(samples * one for one in there),
    )
    busy_ms = steps * ms_per_step
    work = Work(0, steps, samples, busy_ms, pace_ms=ms_per_step)
    idle = SyncAck(0, outcome, Work(0, 0, 0, wait_ms=busy_ms), 0.1)
    return [
        SyncAck(at, outcome, work, 0.1) if at == rank else replace(idle, rank=at) for at in range(len(block))
    ]


def test_short_windows_are_trained_by_one_rank_where_that_is_faster() -> None:
    machine = rounds(4000, may_be_alone=True)
    blocks = decide(machine)
    lone = []
    for block in blocks:
        is_lone = block[0].alone
        lone.append(is_lone)
        # A shared window takes 1.6 ms and 1 ms of averaging, one of one rank 2 ms.
        settle(machine, lone_acks(block, 2.0) if is_lone else acks(block, (0.05, 0.05)))
        blocks += decide(machine)
    trial = lone.index(True)
    usual = sync(blocks[trial + 1]).count
    assert (sync(blocks[trial]).count, sync(blocks[trial]).every) == (1, -(-usual // 4))
    # The order behind it was armed before it was known how the trial went.
    assert lone[trial + 1] is False
    assert lone[trial + 2 :].count(False) < len(lone[trial + 2 :]) / 8
    assert machine.epochs.of(0).is_complete


@pytest.mark.parametrize(("ms", "alone_ms"), [(0.05, 5.0), (1.0, 200.0)], ids=["short", "long"])
def test_windows_stay_shared_where_that_is_faster(ms: float, alone_ms: float) -> None:
    machine = rounds(3000, may_be_alone=True)
    blocks = decide(machine)
    for block in blocks:
        settle(machine, lone_acks(block, alone_ms) if block[0].alone else acks(block, (ms, ms)))
        blocks += decide(machine)
    lone = [block for block in blocks if block[0].alone]
    assert lone  # it was tried
    assert sum(len(block[0].batches) for block in lone) < 3000 / 25
    assert machine.epochs.of(0).is_complete


def trained(machine: ExactRounds, ms: Any, orders: int) -> list[list[int]]:
    """Settle orders whose windows take `ms(rank, samples)`; the sizes of each one's first window."""
    found: list[list[int]] = []
    blocks = decide(machine)
    while blocks and len(found) < orders:
        block = blocks.pop(0)
        found.append(sizes(block))
        settle(machine, timed(block, ms))
        blocks += decide(machine)
    return found


def timed(block: Block, ms: Any) -> list[SyncAck]:
    """Acknowledgments of an order whose steps take a time with a fixed part."""
    first, found = sync(block), []
    last = [order.parts[-1].samples for order in block if order.parts]
    outcome = Outcome(
        first.round + first.count - 1,
        first.global_step + first.count,
        tuple(range(len(block))),
        tuple(int(samples > 0) for samples in last),
        tuple(last),
    )
    for rank, order in enumerate(block):
        assert order.parts is not None
        busy = [ms(rank, part.samples) for part in order.parts if part.samples]
        work = Work(
            0, len(busy), sum(part.samples for part in order.parts), sum(busy), pace_ms=max(busy, default=0.0)
        )
        found.append(SyncAck(rank, outcome, work, 0.1, checksum=None))
    return found


def test_a_device_that_only_holds_the_others_up_has_no_part() -> None:
    taken = itertools.count()

    def ms(rank: int, samples: int) -> float:
        is_slow = rank == 2 and next(taken) < 400
        return (30.0 if is_slow else 4.0) + 0.1 * samples

    machine = rounds(100_000, world_size=3, least=2)
    found = trained(machine, ms, 60)
    assert found[-1] == [32, 32, 0]
    assert machine.ratios[2] == machine.pace_ms[2] == 0.0
    # It is asked now and then, in orders of few windows.
    asked = [window for window in found[30:] if window[2]]
    assert 0 < len(asked) < 6
    assert all(window[2] == 2 for window in asked)


def test_it_has_its_part_again_when_it_is_fast() -> None:
    windows = 0

    def ms(rank: int, samples: int) -> float:
        nonlocal windows
        windows += rank == 0
        return (30.0 if rank and windows < 500 else 4.0) + 0.1 * samples

    found = trained(rounds(100_000, least=2), ms, 200)
    assert [64, 0] in found
    assert min(found[-1]) > 20


@pytest.mark.parametrize("forwards", [None, (40, 40, 40), (16, 16, 16)])
def test_a_share_of_zero_is_no_part(forwards: tuple[int, ...] | None) -> None:
    parts = split(64, (0.5, 0.0, 0.25), 2, forwards)
    assert [part.samples for part in parts][1] == 0
    assert sum(part.samples for part in parts) == 64
    assert all(1 not in part.ranks for part in parts)
    if forwards is not None:
        assert all(one.samples <= most * one.forwards for one, most in zip(parts, forwards, strict=True))


def test_orders_are_short_while_the_shares_still_move() -> None:
    machine, speeds = rounds(100_000, window=100), [0.1, 0.1]
    counts, blocks = [], decide(machine)
    for at in range(80):
        block = blocks.pop(0)
        counts.append(len(block[0].batches))
        if at == 40:
            speeds[1] = 0.3
        settle(machine, acks(block, speeds))
        blocks += decide(machine)
    assert min(counts[20:40]) > 2 * max(counts[42:45])
    assert min(counts[70:]) > 2 * max(counts[42:45])
