"""Tests of the ledger of several streams: each batch is in one place, and goes to its own machine alone."""

from __future__ import annotations

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from flowdp.policy.streams_ledger import StreamsLedger
from tests.invariants import check

EQUAL = (1.0, 1.0, 1.0)


def test_each_machine_has_numbers_of_its_own() -> None:
    ledger = StreamsLedger(0, None, (2, 1))
    assert ledger.deal((2, 1, 2), EQUAL) == ((0, 4), (2,), (1, 3))
    assert (ledger.dealt, ledger.trained) == (5, 0)
    assert ledger.deal((2, 2, 2), EQUAL) == ((6, 10), (8, 12), (5, 7))
    check(ledger)


def test_a_machine_whose_stream_has_ended_gets_nothing() -> None:
    ledger = StreamsLedger(0, None, (2, 1))
    ledger.end(3, 0)
    assert ledger.whole_rounds(range(3)) == 1
    assert ledger.deal((2, 2, 2), EQUAL) == ((0, 4), (2,), (1, 3))
    assert ledger.whole_rounds(range(3)) == 0
    assert ledger.deal((2, 2, 2), EQUAL) == ((), (), (5, 7))
    ledger.end(3, 1)
    check(ledger)
    assert (ledger.remaining, ledger.dealt, ledger.batches) == (0, 6, 6)
    for rank, hand in enumerate(((0, 4), (2,), (1, 3))):
        ledger.count_back(rank, hand, len(hand))
    assert not ledger.is_complete
    ledger.count_back(2, (5,), 1)
    assert ledger.is_complete


def test_what_comes_back_stays_with_its_machine() -> None:
    ledger = StreamsLedger(0, None, (2, 1))
    first, second, third = ledger.deal((2, 2, 2), EQUAL)
    ledger.count_back(0, first, 1)
    ledger.count_back(1, second, 0)
    ledger.count_back(2, third, 2)
    assert (ledger.position, sorted(chain(*ledger.left))) == (7, [2, 4, 5, 6])
    ledger.end(4, 0)
    ledger.end(2, 1)
    # Rank 0 takes over what rank 1 has left.
    assert ledger.deal((4, 0, 4), EQUAL) == ((2, 4, 6), (), ())
    ledger.count_back(0, (2, 4, 6), 3)
    assert ledger.is_complete


def test_a_limit_leaves_the_steps_that_end_first() -> None:
    ledger = StreamsLedger(0, 4, (1, 1, 1))
    assert ledger.deal((3, 3, 3), (1.0, 3.0, 2.0)) == ((0, 3), (1,), (2,))
    assert (ledger.remaining, ledger.planned_steps(1)) == (0, 4)
    check(ledger)


@given(st.data(), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_batch_is_trained_once_whenever_the_ends_are_known(
    data: st.DataObject, sizes: list[int], has_limit: bool
) -> None:
    ranks, machines = sum(sizes), len(sizes)
    machine_of = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    lengths = [data.draw(st.integers(0, 15)) for _ in sizes]
    limit = data.draw(st.integers(1, 20)) if has_limit else None
    ledger = StreamsLedger(0, limit, sizes)
    ends_at = [data.draw(st.integers(0, 6)) for _ in sizes]
    trained: list[int] = []
    out: list[tuple[int, tuple[int, ...]]] = []

    def exists(batch: int) -> bool:
        return batch // machines < lengths[batch % machines]

    for turn in range(300):
        for machine in (machine for machine, at in enumerate(ends_at) if at == turn):
            ledger.end(lengths[machine], machine)
            out = [
                (rank, tuple(b for b in hand if machine_of[rank] != machine or exists(b)))
                for rank, hand in out
            ]
            check(ledger)
        if turn > max(ends_at) and ledger.is_complete:
            break
        if ledger.remaining:
            quotas = [data.draw(st.integers(1, 4)) for _ in range(ranks)]
            hands = ledger.deal(quotas, [1.0 + rank for rank in range(ranks)])
            for rank, hand in enumerate(hands):
                assert all(batch % machines == machine_of[rank] for batch in hand)
                assert len(hand) <= quotas[rank]
                out.append((rank, hand))
        while out and data.draw(st.booleans()):
            rank, hand = out.pop(0)
            is_known = ends_at[machine_of[rank]] <= turn
            there = len(hand) if is_known else sum(map(exists, hand))
            steps = data.draw(st.integers(0, there)) if turn < 30 else there
            ledger.count_back(rank, hand, steps)
            trained += hand[:steps]
        if turn > 30:
            for rank, hand in out:
                ledger.count_back(rank, hand, len(hand))
                trained += hand
            out = []
        check(ledger)
    assert ledger.is_complete
    assert len(trained) == len(set(trained)) == min(sum(lengths), sum(lengths) if limit is None else limit)
    assert all(map(exists, trained))
