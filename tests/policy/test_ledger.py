"""Tests of the ledger: each batch of an epoch is in exactly one place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdp.policy.ledger import ENDLESS, Deal, Ledger, ReadLedger, interleave
from tests.invariants import check

EQUAL = (1.0, 1.0)


def settle(ledger: Ledger, deal: Deal, trained: tuple[int, ...]) -> None:
    for rank, (hand, count) in enumerate(zip(deal, trained, strict=True)):
        ledger.count_back(rank, hand, count)
    check(ledger)


# ---------------------------------------------------------------- the order of requests
@pytest.mark.parametrize(
    ("counts", "ms_per_step", "ahead", "asked"),
    [
        ((3, 1), (10.0, 25.0), (), [0, 1, 0, 0]),
        ((2, 2), (10.0, 10.0), (), [0, 1, 0, 1]),
        ((2, 2), (10.0, 10.0), (1, 0), [1, 0, 1, 0]),
        ((0, 2), (10.0, 10.0), (), [1, 1]),
        ((0, 0), (10.0, 10.0), (), []),
        ((4, 1, 2), (5.0, 20.0, 10.0), (), [0, 1, 2, 0, 0, 2, 0]),
    ],
)
def test_interleave(
    counts: tuple[int, ...], ms_per_step: tuple[float, ...], ahead: tuple[int, ...], asked: list[int]
) -> None:
    assert interleave(counts, ms_per_step, ahead) == asked


@given(st.data())
def test_a_deal_follows_the_order_in_which_ranks_ask(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    count, getting = (
        data.draw(st.integers(1, 5)),
        data.draw(st.sets(st.sampled_from(range(len(groups))), min_size=1)),
    )
    quotas = [count if rank in getting else 0 for rank in range(len(groups))]
    hands: list[list[int]] = [[] for _ in groups]
    position = 0
    for rank in interleave(quotas, [1.0] * len(groups)):
        hands[rank] += range(position, position + groups[rank])
        position += groups[rank]
    deal = Ledger(0, 100, len(groups), groups).deal(quotas, [1.0] * len(groups))
    assert deal == tuple(map(tuple, hands))


# ---------------------------------------------------------------- dealing
def test_a_full_round_gives_every_rank_its_quota() -> None:
    ledger = Ledger(0, 100, 2)
    deal = ledger.deal((4, 2), (10.0, 20.0))
    assert deal == ((0, 2, 3, 5), (1, 4))
    assert (ledger.position, ledger.dealt, ledger.remaining) == (6, 6, 94)
    check(ledger)


def test_the_tail_goes_to_those_that_finish_it_first() -> None:
    ledger = Ledger(0, 4, 2)
    # Rank 0 is three times as fast: it does three batches while rank 1 does one.
    assert ledger.deal((10, 10), (10.0, 30.0)) == ((0, 1, 2), (3,))
    assert ledger.remaining == 0


@pytest.mark.parametrize(
    ("batches", "due", "deal"),
    [
        (6, (), ((0, 1, 2, 3, 4, 5), ())),
        (6, (1,), ((1, 2, 3, 4, 5), (0,))),
        (6, (0, 1), ((0, 2, 3, 4, 5), (1,))),
        (1, (1,), ((), (0,))),
        (1, (0, 1), ((0,), ())),
    ],
)
def test_a_rank_that_is_due_gets_one_step_of_the_tail(batches: int, due: tuple[int, ...], deal: Deal) -> None:
    ledger = Ledger(0, batches, 2)
    assert ledger.deal((10, 10), (10.0, 1000.0), due) == deal
    check(ledger)


def test_the_tail_keeps_to_the_quotas() -> None:
    ledger = Ledger(0, 4, 2)
    assert ledger.deal((1, 4), (1.0, 100.0)) == ((0,), (1, 2, 3))


def test_whole_rounds_at_once() -> None:
    ledger = Ledger(0, 10, 3)
    assert ledger.deal((3, 3, 3), (1.0,) * 3) == ((0, 3, 6), (1, 4, 7), (2, 5, 8))
    assert ledger.whole_rounds((0, 1, 2)) == 0


# ---------------------------------------------------------------- returned batches
def test_complete_when_all_is_trained() -> None:
    ledger = Ledger(0, 4, 2)
    deal = ledger.deal((2, 2), EQUAL)
    assert not ledger.is_complete
    settle(ledger, deal, (2, 2))
    assert ledger.is_complete


def test_left_overs_are_the_ranks_first_ones() -> None:
    ledger = Ledger(0, 100, 2)
    deal = ledger.deal((4, 4), EQUAL)
    settle(ledger, deal, (4, 1))
    assert ledger.left == [[], list(deal[1][1:])]
    # They count in its quota, and come before new ones.
    again = ledger.deal((4, 4), EQUAL)
    assert again[1][:3] == deal[1][1:]
    assert [len(hand) for hand in again] == [4, 4]
    assert ledger.left == [[], []]


def test_left_overs_at_the_end_were_never_dealt() -> None:
    ledger = Ledger(0, 100, 2)
    deal = ledger.deal((3, 3), EQUAL)
    settle(ledger, deal, (3, 0))
    ledger.rewind()
    # 1 and 3 come before 4, which was trained; 5 is the last.
    assert (ledger.position, ledger.left) == (5, [[], [1, 3]])
    check(ledger)


def test_at_the_end_left_overs_change_hands() -> None:
    ledger = Ledger(0, 8, 2)
    deal = ledger.deal((4, 4), (1.0, 100.0))
    settle(ledger, deal, (4, 0))
    # Rank 1 is slow: rank 0 gets most of its returned batches.
    again = ledger.deal((4, 4), (1.0, 100.0))
    assert [len(hand) for hand in again] == [4, 0]


def test_left_overs_of_others_change_hands_when_nothing_new_is_left() -> None:
    ledger = Ledger(0, 6, 2)
    deal = ledger.deal((3, 3), EQUAL)
    settle(ledger, deal, (3, 0))
    # Three remain, all returned by rank 1, and both ranks want one or two of them.
    again = ledger.deal((1, 2), EQUAL)
    assert sorted(again[0] + again[1]) == list(deal[1])
    assert [len(hand) for hand in again] == [1, 2]


# ---------------------------------------------------------------- random histories
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_an_order_of_one_rank_is_a_deal_with_a_quota_for_it_alone(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    batches, ranks = data.draw(st.integers(1, 60)), range(len(groups))
    one, other = Ledger(0, batches, len(groups), groups), Ledger(0, batches, len(groups), groups)
    for _ in range(data.draw(st.integers(1, 20))):
        rank, steps = data.draw(st.sampled_from(ranks)), data.draw(st.integers(1, 9))
        hand = one.deal_to(rank, steps)
        assert hand == other.deal([steps * (rank == number) for number in ranks], [1.0] * len(groups))[rank]
        trained = data.draw(st.integers(0, one.steps(rank, hand)))
        for ledger in (one, other):
            ledger.count_back(rank, hand, trained)
            check(ledger)
        assert vars(one) == vars(other)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_each_batch_is_in_exactly_one_place(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    batches = data.draw(st.integers(1, 60))
    pace = data.draw(st.lists(st.floats(0.1, 50.0), min_size=ranks, max_size=ranks))
    groups = data.draw(st.lists(st.integers(1, 3), min_size=ranks, max_size=ranks))
    ledger = Ledger(0, batches, ranks, groups)
    out: list[tuple[int, tuple[int, ...]]] = []
    trained: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(("deal", "rounds", "count_back", "count_back", "rewind")))
        if what == "deal":
            quotas = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
            most = sum(quota * group for quota, group in zip(quotas, groups, strict=True))
            expected = min(most, ledger.remaining)
            short = any(len(hand) % group for hand, group in zip(ledger.left, groups, strict=True))
            deal = ledger.deal(quotas, pace)
            assert sum(map(len, deal)) == expected or short
            assert all(ledger.steps(rank, hand) <= quotas[rank] for rank, hand in enumerate(deal))
            out += list(enumerate(deal))
        elif what == "rounds" and not any(ledger.left) and batches - ledger.position >= sum(groups):
            out += list(enumerate(ledger.deal([1] * ranks, [1.0] * ranks)))
        elif what == "count_back" and out:
            rank, hand = out.pop(data.draw(st.integers(0, len(out) - 1)))
            steps = data.draw(st.integers(0, ledger.steps(rank, hand)))
            ledger.count_back(rank, hand, steps)
            trained += hand[: steps * groups[rank]]
        elif what == "rewind":
            ledger.rewind()
        check(ledger)
        places = [*trained, *(batch for _, hand in out for batch in hand)]
        places += [batch for hand in ledger.left for batch in hand]
        places += range(ledger.position, batches)
        assert sorted(places) == list(range(batches))
    # The rest can always be trained.
    for rank, hand in out:
        ledger.count_back(rank, hand, ledger.steps(rank, hand))
    while ledger.remaining:
        for rank, hand in enumerate(ledger.deal([5] * ranks, pace)):
            ledger.count_back(rank, hand, ledger.steps(rank, hand))
    assert ledger.is_complete


# ---------------------------------------------------------------- steps of several batches


def test_steps_that_were_not_taken_come_back_whole() -> None:
    ledger = Ledger(0, 100, 2, groups=(2, 1))
    first, second = ledger.deal((3, 1), (1.0, 1.0))
    ledger.count_back(0, first, 1)
    ledger.count_back(1, second, 1)
    assert (ledger.left[0], ledger.trained) == (list(first[2:]), 3)
    assert ledger.deal((3, 1), (1.0, 1.0))[0][:4] == first[2:]


def test_the_last_step_of_an_epoch_may_have_fewer() -> None:
    ledger = Ledger(0, 7, 2, groups=(3, 2))
    # Whole steps, one by one to the rank that would finish first: five batches, then the rest.
    assert ledger.deal((4, 4), (1.0, 1.5)) == ((0, 1, 2, 5, 6), (3, 4))
    ledger.count_back(0, (0, 1, 2, 5, 6), 2)
    ledger.count_back(1, (3, 4), 1)
    assert ledger.is_complete


# ---------------------------------------------------------------- epochs of unknown length
def test_the_end_takes_back_what_was_dealt_beyond_it() -> None:
    ledger = Ledger(0, ENDLESS, 2)
    first = ledger.deal((3, 3), EQUAL)
    settle(ledger, first, (3, 1))  # rank 1 returns 3 and 5
    second = ledger.deal((3, 1), EQUAL)
    assert second == ((6, 7, 8), (3,))
    ledger.end(7)
    check(ledger)
    # Rank 1 has 5; 6 and 3 are dealt; 7 and 8 never existed.
    assert (ledger.left, ledger.dealt, ledger.remaining) == ([[], [5]], 2, 1)
    settle(ledger, ((6,), (3,)), (1, 1))
    assert ledger.deal((2, 2), EQUAL) == ((5,), ())
    settle(ledger, ((5,), ()), (1, 0))
    assert ledger.is_complete


@given(st.data(), st.integers(1, 3), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_every_batch_is_trained_once_whenever_the_end_is_known(
    data: st.DataObject, ranks: int, batches: int
) -> None:
    ledger = Ledger(0, ENDLESS, ranks)
    trained: list[int] = []
    out: list[tuple[int, tuple[int, ...]]] = []
    ends_at = data.draw(st.integers(0, 12))
    for turn in range(400):
        if turn == ends_at:
            ledger.end(batches)
            out = [(rank, tuple(b for b in hand if b < batches)) for rank, hand in out]
            check(ledger)
        if ledger.is_complete:
            break
        if len(out) < 2 * ranks and ledger.remaining:
            quotas = [data.draw(st.integers(1, 5)) for _ in range(ranks)]
            out += enumerate(ledger.deal(quotas, [1.0] * ranks))
        elif out:
            rank, hand = out.pop(data.draw(st.integers(0, len(out) - 1)))
            # A rank trains the batches that exist; called early, it returns the others, as their fate is
            # unknown.
            exists = sum(batch < batches for batch in hand)
            done = data.draw(st.integers(min(1, exists), exists))
            trained += hand[:done]
            ledger.count_back(rank, hand, done)
        check(ledger)
        if data.draw(st.booleans()) and not out:
            ledger.rewind()
    assert sorted(trained) == list(range(batches))


# ---------------------------------------------------------------- lost ranks, and resuming
def test_whole_rounds_without_a_rank() -> None:
    ledger = Ledger(0, 10, 3, (1, 1, 2))
    assert ledger.deal((2, 0, 2), (1.0,) * 3) == ((0, 3), (), (1, 2, 4, 5))
    assert (ledger.position, ledger.dealt, ledger.whole_rounds((0, 2))) == (6, 6, 1)


def test_it_begins_where_another_one_stood() -> None:
    ledger = Ledger(0, 10, 2)
    ledger.resume(7, ((5, 1), (), (3,)))
    check(ledger)
    assert (ledger.left, ledger.trained, ledger.remaining) == ([[1, 3, 5], []], 4, 6)
    assert sorted(batch for hand in ledger.deal((3, 3), EQUAL) for batch in hand) == [1, 3, 5, 7, 8, 9]


def test_left_overs_of_a_lost_rank_go_round_the_others() -> None:
    ledger = Ledger(0, 9, 3)
    settle(ledger, ledger.deal((3, 3, 3), (1.0,) * 3), (0, 0, 2))
    left = [list(hand) for hand in ledger.left]
    ledger.reassign(0, (1, 2))
    check(ledger)
    assert ledger.left[0] == []
    assert sorted(ledger.left[1] + ledger.left[2]) == sorted(left[0] + left[1] + left[2])
    assert len(ledger.left[1]) - len(left[1]) == 2


# ---------------------------------------------------------------- batches that are read
def test_batches_are_dealt_when_they_were_read_and_it_is_complete_at_the_end() -> None:
    ledger = ReadLedger(0, ENDLESS, 1)
    assert ledger.remaining == 0
    assert not ledger.is_complete
    for batch in range(3):
        ledger.read(batch, 20)
    assert ledger.deal_to(0, 5) == (0, 1, 2)
    ledger.count_back(0, (0, 1, 2), 3)
    assert not ledger.is_complete  # more may come
    ledger.read(3, 7)
    ledger.end(4)
    assert ledger.deal_to(0, 5) == (3,)
    ledger.count_back(0, (3,), 1)
    assert ledger.is_complete
    assert ledger.samples == {0: 20, 1: 20, 2: 20, 3: 7}
    check(ledger)


def test_a_limit_ends_it_before_the_reader_does() -> None:
    ledger = ReadLedger(0, 2, 1)
    assert ledger.planned_steps(1) == 2
    for batch in range(4):
        ledger.read(batch, 20)
    ledger.end(4)
    assert ledger.is_ended
    assert ledger.deal_to(0, 5) == (0, 1)


def test_it_goes_on_behind_what_was_trained() -> None:
    ledger = ReadLedger(0, ENDLESS, 1)
    ledger.resume(3, [[1]])
    for batch in range(3):
        ledger.read(batch, 20)
    assert ledger.deal_to(0, 9) == (1,)
    ledger.read(3, 5)
    assert ledger.deal_to(0, 9) == (3,)
    check(ledger)
