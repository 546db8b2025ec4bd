"""Tests of a run's epochs: batches to deal, and complete epochs."""

from __future__ import annotations

import pytest

from flowdp.machine.config import BarrierPlan, CoordinatorConfig, GlobalBatch
from flowdp.machine.epochs import Epochs
from flowdp.policy.interval import Interval
from flowdp.policy.ledger import Ledger
from flowdp.protocol.messages import BatchRead, DataEnded, Work
from flowdp.protocol.position import Position
from tests.invariants import check
from tests.planned import epochs_of

PACE = (1.0, 1.0)


def dealt(epochs: Epochs, quotas: tuple[int, int] = (2, 2), now_ms: float = 0.0) -> Ledger:
    ledger = epochs.dealing(now_ms)
    assert ledger is not None
    ledger.deal(quotas, PACE)
    return ledger


def trained(epochs: Epochs, epoch: int, rank: int, batches: tuple[int, ...], loss: float = 1.0) -> None:
    epochs.of(epoch).count_back(rank, batches, len(batches))
    samples = 8 * len(batches)
    epochs.record(rank, Work(epoch, len(batches), samples, losses=(loss * samples, samples)))


def test_an_epoch_is_complete_when_all_of_it_was_trained() -> None:
    epochs = epochs_of(4, 1, None, 2)
    dealt(epochs, now_ms=10.0)
    trained(epochs, 0, 0, (0, 2), loss=1.0)
    # Half of it: nothing is complete.
    assert epochs.ended(20.0, 5, 2) == []
    assert not epochs.is_complete
    trained(epochs, 0, 1, (1, 3), loss=3.0)
    [metrics] = epochs.ended(110.0, 5, 4)
    assert (metrics.epoch, metrics.loss, metrics.epoch_ms) == (0, 2.0, 100.0)
    assert (metrics.anchor, metrics.global_step, metrics.epochs) == (5, 4, 1)
    assert epochs.is_complete
    assert epochs.done == 1
    # Reported once.
    assert epochs.ended(120.0, 5, 4) == []


def test_the_next_epoch_is_dealt_while_the_one_before_runs() -> None:
    epochs = epochs_of(4, 2, None, 2)
    first = dealt(epochs)
    second = dealt(epochs)
    assert (first.epoch, second.epoch) == (0, 1)
    assert epochs.dealing(0.0) is None
    assert epochs.is_exhausted
    # The later one is trained first: it waits for its turn.
    trained(epochs, 1, 0, (0, 2))
    trained(epochs, 1, 1, (1, 3))
    assert epochs.ended(5.0, 1, 4) == []
    trained(epochs, 0, 0, (0, 2))
    trained(epochs, 0, 1, (1, 3))
    assert [metrics.epoch for metrics in epochs.ended(6.0, 1, 8)] == [0, 1]
    assert epochs.is_complete


def test_an_epoch_begins_when_the_one_before_has_ended() -> None:
    epochs = epochs_of(4, 2, None, 2)
    dealt(epochs, now_ms=0.0)
    dealt(epochs, now_ms=90.0)
    for epoch, now_ms in ((0, 100.0), (1, 250.0)):
        trained(epochs, epoch, 0, (0, 2))
        trained(epochs, epoch, 1, (1, 3))
        [metrics] = epochs.ended(now_ms, 1, 4)
        # Its first batches were dealt at 90 ms, but its time does not overlap the epoch before.
        assert metrics.epoch_ms == (100.0, 150.0)[epoch]


def test_what_comes_back_is_dealt_before_the_next_epoch() -> None:
    epochs = epochs_of(4, 2, None, 2)
    first = dealt(epochs)
    dealt(epochs)
    # Rank 1 trained nothing of the first epoch.
    first.count_back(1, (1, 3), 0)
    assert not epochs.is_exhausted
    assert epochs.dealing(0.0) is first


def test_a_scheduler_that_waits_for_the_loss_holds_the_next_epoch() -> None:
    epochs = epochs_of(4, 2, None, 2, wait_for_metric=True)
    dealt(epochs)
    assert epochs.metrics == ()
    assert epochs.dealing(0.0) is None
    assert not epochs.is_exhausted
    trained(epochs, 0, 0, (0, 2), loss=0.5)
    trained(epochs, 0, 1, (1, 3), loss=0.5)
    epochs.ended(1.0, 1, 4)
    assert epochs.metrics == (0.5,)
    assert dealt(epochs).epoch == 1


@pytest.mark.parametrize(
    ("epochs", "max_steps", "lengths"),
    [
        (2, None, [4, 4]),
        (None, 10, [4, 4, 2]),
        (2, 6, [4, 2]),
        (2, 4, [4]),
        (2, 100, [4, 4]),
    ],
)
def test_the_run_ends_by_epochs_or_by_steps(
    epochs: int | None, max_steps: int | None, lengths: list[int]
) -> None:
    run = epochs_of(4, epochs, max_steps, 1)
    found = []
    while (ledger := run.dealing(0.0)) is not None:
        found.append(ledger.batches)
        ledger.deal((ledger.batches,), (1.0,))
    assert found == lengths


def test_max_steps_counts_steps_of_several_batches() -> None:
    run = epochs_of(5, None, 5, 2, groups=(2, 2))  # an epoch is 2 + 2 + 1 batches: three steps
    first = run.dealing(0.0)
    assert first is not None
    assert first.batches == 5
    first.deal((2, 2), (1.0, 1.0))
    second = run.dealing(0.0)
    assert second is not None
    assert second.batches == 4
    second.deal((2, 2), (1.0, 1.0))
    assert run.dealing(0.0) is None


def test_a_round_that_is_out_belongs_to_the_last_epoch() -> None:
    """Snapshots are averaged after the epoch of their steps is complete; the last epoch waits for them."""
    epochs = epochs_of(2, 2, None, 2)
    for epoch in range(2):
        dealt(epochs, (1, 1))
        trained(epochs, epoch, 0, (0,))
        trained(epochs, epoch, 1, (1,))
        if epoch == 0:
            assert [one.epoch for one in epochs.ended(1.0, 1, 0, is_idle=False)] == [0]  # another one follows
            assert epochs.close_round(0, 2.0, 0.5, 1) == 1  # before it began
    assert epochs.ended(3.0, 1, 2, is_idle=False) == []
    assert epochs.close_round(1, 3.0, None, 1) == 1
    [metrics] = epochs.ended(4.0, 1, 4, is_idle=True)
    assert (metrics.rounds, metrics.sync_ms, metrics.divergence) == (2, 5.0, 0.5)


def test_an_epoch_that_max_steps_cuts_is_not_complete() -> None:
    epochs = epochs_of(4, None, 6, 2)
    for epoch, quotas in enumerate(((2, 2), (1, 1))):
        dealt(epochs, quotas)
        trained(epochs, epoch, 0, (0, 2)[: quotas[0]])
        trained(epochs, epoch, 1, (1, 3)[: quotas[1]])
    assert [one.is_complete for one in epochs.ended(1.0, 1, 6)] == [True, False]
    assert (epochs.done, epochs.complete, epochs.is_complete) == (2, 1, True)


# ---------------------------------------------------------------- epochs of unknown length
def test_an_epoch_of_unknown_length_ends_where_its_end_was_read() -> None:
    epochs = epochs_of(None, 2, None, 2)
    assert dealt(epochs).remaining > 10**9
    assert not epochs.is_exhausted
    epochs.end(DataEnded(0, 3))  # batch 3, which rank 1 holds, never existed
    check(epochs)
    assert epochs.of(0).remaining == 0
    trained(epochs, 0, 0, (0, 2))
    trained(epochs, 0, 1, (1,))
    [metrics] = epochs.ended(5.0, 1, 3)
    assert sum(rank.steps for rank in metrics.per_rank) == 3
    assert not epochs.is_complete
    # The next one may be longer.
    assert dealt(epochs).epoch == 1
    epochs.end(DataEnded(1, 4))
    trained(epochs, 1, 0, (0, 2))
    trained(epochs, 1, 1, (1, 3))
    assert len(epochs.ended(9.0, 1, 7)) == 1
    assert epochs.is_complete
    assert epochs.is_exhausted


def test_max_steps_counts_through_epochs_of_any_length() -> None:
    epochs = epochs_of(None, None, 5, 2)
    assert dealt(epochs).batches == 5
    epochs.end(DataEnded(0, 3))
    # Two are left for the epoch after it, of any length.
    assert dealt(epochs).batches == 2
    epochs.end(DataEnded(1, 100))
    assert epochs.of(1).batches == 2
    assert epochs.dealing(0.0) is None
    for epoch, hands in ((0, ((0, 2), (1,))), (1, ((0,), (1,)))):
        for rank, hand in enumerate(hands):
            trained(epochs, epoch, rank, hand)
    assert len(epochs.ended(1.0, 1, 5)) == 2
    assert epochs.is_complete


def test_the_streams_of_machines_end_one_after_the_other() -> None:
    epochs = epochs_of(None, 2, None, 2, machines=(1, 1))
    assert dealt(epochs).position == 4
    epochs.end(DataEnded(0, 1, 1, 2))  # batch 3 never existed
    epochs.end(DataEnded(1, 2, 1, 2))
    check(epochs)
    trained(epochs, 0, 0, (0, 2))
    trained(epochs, 0, 1, (1,))
    assert epochs.ended(1.0, 1, 3) == []
    assert epochs.of(0).deal((2, 2), PACE) == ((4, 6), ())
    trained(epochs, 0, 0, (4, 6))
    assert not epochs.is_exhausted
    epochs.end(DataEnded(0, 4, 0, 2))
    assert len(epochs.ended(2.0, 1, 5)) == 1
    ledger = epochs.dealing(2.0)
    assert ledger is not None
    assert ledger.deal((3, 3), PACE) == ((0, 2, 4), (1, 3))
    epochs.end(DataEnded(1, 3, 0, 2))
    trained(epochs, 1, 0, (0, 2, 4))
    trained(epochs, 1, 1, (1, 3))
    [metrics] = epochs.ended(3.0, 1, 10)
    assert sum(rank.steps for rank in metrics.per_rank) == 5
    assert epochs.is_complete
    assert epochs._ends == {}


def test_max_steps_counts_the_short_last_step_of_each_stream() -> None:
    epochs = epochs_of(None, None, 4, 2, groups=(2, 2), machines=(1, 1))
    ledger = dealt(epochs, (1, 1))
    epochs.end(DataEnded(0, 1, 0, 2))
    epochs.end(DataEnded(0, 3, 1, 2))
    ledger.count_back(0, (0,), 1)
    ledger.count_back(1, (1, 3), 1)
    assert ledger.deal((1, 1), PACE) == ((), (5,))
    ledger.count_back(1, (5,), 1)
    assert len(epochs.ended(1.0, 1, 3)) == 1
    # The three steps of the first epoch leave one.
    ledger = epochs.dealing(1.0)
    assert ledger is not None
    assert sum(map(len, ledger.deal((1, 1), PACE))) == 2
    assert epochs.dealing(1.0) is None


# ---------------------------------------------------------------- barriers, and resuming
def test_an_epoch_that_halts_holds_the_next_one() -> None:
    epochs = epochs_of(4, 4, None, 2, tasks=BarrierPlan(Interval(2, "epoch")))
    assert [dealt(epochs).epoch for _ in range(2)] == [0, 1]
    assert epochs.dealing(0.0) is None
    assert epochs.is_exhausted
    for epoch in (0, 1):
        trained(epochs, epoch, 0, (0, 2))
        trained(epochs, epoch, 1, (1, 3))
    epochs.ended(1.0, 1, 4)
    assert not epochs.is_exhausted
    assert [dealt(epochs).epoch for _ in range(2)] == [2, 3]


def test_a_position_can_be_gone_on_from_by_other_ranks() -> None:
    first = epochs_of(9, 2, None, 2)
    dealt(first, (3, 3), now_ms=100.0)
    for rank, hand in enumerate(((0, 2, 4), (1, 3, 5))):
        steps = 3 if rank == 0 else 1
        first.of(0).count_back(rank, hand, steps)
        first.record(rank, Work(0, steps, 8 * steps, busy_ms=5.0, losses=(8.0 * steps, 8 * steps)))
    first.close_round(0, 2.0, 0.1, 1)
    first.rewind()
    done, planned, open_ = first.position(150.0)
    assert (done, planned) == (0, 0)
    [one] = open_
    assert (one.position, one.left, one.missing, one.spent_ms) == (5, ((), (3,)), (3,), 50.0)
    assert [(sums.steps, sums.samples) for sums in one.sums] == [(3, 24), (1, 8)]

    second = epochs_of(9, 2, None, 3)
    second.resume(Position(2, done, open_, 4, planned=planned))
    second.start(1000.0)  # the ranks took a second to be ready
    ledger = second.dealing(1000.0)
    assert ledger is not None
    assert ledger.left == [[], [3], []]
    assert ledger.deal((2, 2, 1), (1.0, 1.0, 1.0)) == ((5, 7), (3, 8), (6,))
    for rank, hand in enumerate(((5, 7), (3, 8), (6,))):
        trained(second, 0, rank, hand)
    [metrics] = second.ended(1070.0, 1, 9)
    assert (metrics.epoch, metrics.rounds, metrics.sync_ms, metrics.divergence) == (0, 1, 2.0, 0.1)
    assert metrics.epoch_ms == 120.0
    assert [rank.samples for rank in metrics.per_rank] == [40, 24, 8]
    # The sums of the first run are separate.
    assert [sums.steps for sums in one.sums] == [3, 1]


def test_an_epoch_that_the_limit_cut_goes_on_in_a_longer_run() -> None:
    first = epochs_of(4, 2, 6, 1)
    for hand in ((0, 1, 2, 3), (0, 1)):
        ledger = first.dealing(0.0)
        assert ledger is not None
        ledger.deal((4,), (1.0,))
        trained(first, ledger.epoch, 0, hand)
    assert [metrics.epoch for metrics in first.ended(9.0, 1, 6)] == [0, 1]
    assert (first.done, first.is_complete) == (2, True)
    done, planned, open_ = first.position(20.0)
    assert (done, planned, [(one.epoch, one.position) for one in open_]) == (1, 4, [(1, 2)])

    longer = epochs_of(4, 2, None, 1)
    longer.resume(Position(1, done, open_, 6, planned=planned))
    ledger = longer.dealing(0.0)
    assert ledger is not None
    assert ledger.deal((4,), (1.0,)) == ((2, 3),)
    trained(longer, 1, 0, (2, 3))
    [metrics] = longer.ended(1.0, 1, 8)
    assert metrics.per_rank[0].steps == 4

    # The same limit: the epoch is reported again, and nothing is trained.
    again = epochs_of(4, 2, 6, 1)
    again.resume(Position(1, done, open_, 6, planned=planned))
    assert again.dealing(0.0) is None
    assert len(again.ended(0.0, 1, 6)) == 1
    assert again.is_complete


def test_what_a_lost_rank_has_left_is_given_to_others() -> None:
    epochs = epochs_of(6, 1, None, 3)
    ledger = epochs.dealing(0.0)
    assert ledger is not None
    ledger.deal((2, 2, 2), (1.0,) * 3)
    for rank, hand in enumerate(((0, 3), (1, 4), (2, 5))):
        ledger.count_back(rank, hand, 0)
    epochs.reassign(1, (0, 2))
    assert ledger.left == [[0, 1, 3], [], [2, 4, 5]]


def exact_stream() -> CoordinatorConfig:
    return CoordinatorConfig(world_size=1, batches=None, epochs=2, global_batch=GlobalBatch(8, None))


def test_exact_deals_batches_of_unknown_number_when_they_were_read() -> None:
    epochs = Epochs(
        CoordinatorConfig(world_size=1, batches=None, epochs=2, global_batch=GlobalBatch(8, None))
    )
    assert epochs.dealing(0.0) is None
    epochs.read(BatchRead(0, 0, 8))
    epochs.read(BatchRead(0, 1, 3))
    ledger = epochs.dealing(0.0)
    assert ledger is not None
    assert ledger.deal_to(0, 9) == (0, 1)
    # The reader may be an epoch ahead; that is opened when this one has ended.
    epochs.end(DataEnded(0, 2))
    epochs.read(BatchRead(1, 0, 8))
    epochs.end(DataEnded(1, 1))
    later = epochs.dealing(0.0)
    assert later is not None
    assert (later.epoch, later.deal_to(0, 9)) == (1, (0,))
    trained(epochs, 0, 0, (0, 1))
    trained(epochs, 1, 0, (0,))
    assert [one.epoch for one in epochs.ended(9.0, 1, 3)] == [0, 1]
    assert epochs.is_complete


def test_no_epoch_is_opened_while_the_reader_is_in_the_one_before() -> None:
    epochs = Epochs(
        CoordinatorConfig(world_size=1, batches=None, epochs=2, global_batch=GlobalBatch(8, None))
    )
    epochs.read(BatchRead(0, 0, 8))
    ledger = epochs.dealing(0.0)
    assert ledger is not None
    assert ledger.deal_to(0, 9) == (0,)
    trained(epochs, 0, 0, (0,))
    assert epochs.dealing(0.0) is None
    assert epochs.ended(5.0, 1, 1) == []
    epochs.end(DataEnded(0, 1))
    assert [one.epoch for one in epochs.ended(9.0, 1, 1)] == [0]
