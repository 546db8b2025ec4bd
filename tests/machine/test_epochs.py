"""The epochs of a run: what can be dealt, and which one is complete."""

from __future__ import annotations

import math

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.epochs import Epochs, mean_loss
from flowdp.messages import Work
from flowdp.policy.ledger import Ledger

PACE = (1.0, 1.0)


def dealt(epochs: Epochs, quotas: tuple[int, int] = (2, 2), now_ms: float = 0.0) -> Ledger:
    ledger = epochs.dealing(now_ms)
    assert ledger is not None
    ledger.deal(quotas, PACE)
    return ledger


def trained(epochs: Epochs, epoch: int, rank: int, batches: tuple[int, ...], loss: float = 1.0) -> None:
    epochs.of(epoch).settle(rank, batches, len(batches))
    samples = 8 * len(batches)
    epochs.record(rank, Work(epoch, len(batches), samples, losses=(loss * samples, samples)))


def test_an_epoch_is_complete_when_all_of_it_was_trained() -> None:
    epochs = Epochs(4, 1, None, 2)
    dealt(epochs, now_ms=10.0)
    trained(epochs, 0, 0, (0, 2), loss=1.0)
    # Half of it: nothing is complete.
    assert epochs.ended(20.0, 5, 2) == []
    assert not epochs.is_complete
    trained(epochs, 0, 1, (1, 3), loss=3.0)
    [event] = epochs.ended(110.0, 5, 4)
    metrics = event.metrics
    assert (metrics.epoch, metrics.loss, metrics.epoch_ms) == (0, 2.0, 100.0)
    assert (metrics.anchor, metrics.global_step, metrics.epochs) == (5, 4, 1)
    assert epochs.is_complete
    assert epochs.done == 1
    # It is told once.
    assert epochs.ended(120.0, 5, 4) == []


def test_the_next_epoch_is_dealt_while_the_one_before_runs() -> None:
    epochs = Epochs(4, 2, None, 2)
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
    assert [event.metrics.epoch for event in epochs.ended(6.0, 1, 8)] == [0, 1]
    assert epochs.is_complete


def test_an_epoch_begins_when_the_one_before_has_ended() -> None:
    epochs = Epochs(4, 2, None, 2)
    dealt(epochs, now_ms=0.0)
    dealt(epochs, now_ms=90.0)
    for epoch, now_ms in ((0, 100.0), (1, 250.0)):
        trained(epochs, epoch, 0, (0, 2))
        trained(epochs, epoch, 1, (1, 3))
        [event] = epochs.ended(now_ms, 1, 4)
        # Its first batches went out at 90 ms, but its time does not overlap the epoch before.
        assert event.metrics.epoch_ms == (100.0, 150.0)[epoch]


def test_what_comes_back_is_dealt_before_the_next_epoch() -> None:
    epochs = Epochs(4, 2, None, 2)
    first = dealt(epochs)
    dealt(epochs)
    # Rank 1 trained nothing of the first epoch.
    first.settle(1, (1, 3), 0)
    assert not epochs.is_exhausted
    assert epochs.dealing(0.0) is first


def test_a_scheduler_that_waits_for_the_loss_holds_the_next_epoch() -> None:
    epochs = Epochs(4, 2, None, 2, wait_for_metric=True)
    dealt(epochs)
    assert epochs.metric is None
    assert epochs.dealing(0.0) is None
    assert not epochs.is_exhausted
    trained(epochs, 0, 0, (0, 2), loss=0.5)
    trained(epochs, 0, 1, (1, 3), loss=0.5)
    epochs.ended(1.0, 1, 4)
    assert epochs.metric == 0.5
    assert dealt(epochs).epoch == 1


def test_no_scheduler_no_metric() -> None:
    epochs = Epochs(4, 2, None, 2)
    dealt(epochs)
    trained(epochs, 0, 0, (0, 2))
    trained(epochs, 0, 1, (1, 3))
    epochs.ended(1.0, 1, 4)
    assert epochs.metric is None


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
    run = Epochs(4, epochs, max_steps, 1)
    found = []
    while (ledger := run.dealing(0.0)) is not None:
        found.append(ledger.batches)
        ledger.deal((ledger.batches,), (1.0,))
    assert found == lengths


def test_max_steps_counts_steps_of_several_batches() -> None:
    run = Epochs(5, None, 5, 2, groups=(2, 2))  # an epoch is 2 + 2 + 1 batches: three steps
    first = run.dealing(0.0)
    assert first is not None
    assert first.batches == 5
    first.deal((2, 2), (1.0, 1.0))
    second = run.dealing(0.0)
    assert second is not None
    assert second.batches == 4
    second.deal((2, 2), (1.0, 1.0))
    assert run.dealing(0.0) is None


def test_work_without_steps_after_an_epoch_counts_for_nothing() -> None:
    epochs = Epochs(4, 1, None, 2)
    dealt(epochs)
    trained(epochs, 0, 0, (0, 2))
    trained(epochs, 0, 1, (1, 3))
    epochs.ended(1.0, 1, 4)
    # The last meeting of a run comes when all is counted.
    epochs.record(0, Work(0, 0, 0), wait_ms=5.0)
    epochs.close_round(0, 1.0, None, 1)
    with pytest.raises(ProtocolError, match="epoch 0 is not under way"):
        epochs.record(0, Work(0, 1, 8))


def test_rounds_count_towards_their_epoch() -> None:
    epochs = Epochs(4, 1, None, 2)
    dealt(epochs)
    epochs.close_round(0, 6.0, 0.25, 3)
    trained(epochs, 0, 0, (0, 2))
    trained(epochs, 0, 1, (1, 3))
    [event] = epochs.ended(1.0, 1, 4)
    assert (event.metrics.rounds, event.metrics.sync_ms, event.metrics.divergence) == (3, 6.0, 0.25)


def test_an_unknown_epoch_is_a_bug() -> None:
    with pytest.raises(ProtocolError, match=r"epoch 3 is not under way: \[\] are"):
        Epochs(4, 1, None, 2).of(3)


def test_the_ledgers_are_checked() -> None:
    epochs = Epochs(4, 1, None, 2)
    ledger = dealt(epochs)
    epochs.check()
    ledger.trained += 1
    with pytest.raises(ProtocolError, match="epoch 0: 1 batches trained"):
        epochs.check()
    ledger.trained -= 1
    ledger.epoch = 1
    with pytest.raises(ProtocolError, match="epoch 1 stands where 0 should"):
        epochs.check()


def test_fold_shortens_the_left_overs_of_all_epochs() -> None:
    epochs = Epochs(4, 2, None, 2)
    first, second = dealt(epochs), dealt(epochs)
    for ledger in (first, second):
        ledger.settle(0, (0, 2), 2)
        ledger.settle(1, (1, 3), 1)
    epochs.fold()
    assert [first.position, second.position] == [3, 3]
    assert first.left == [[], []]


def test_mean_loss() -> None:
    works = [Work(0, 1, 8, losses=(8.0, 8)), Work(0, 1, 2, losses=(12.0, 2))]
    assert mean_loss(works) == 2.0
    assert math.isnan(mean_loss([]))


# ---------------------------------------------------------------- epochs of unknown length
def test_an_epoch_of_unknown_length_ends_where_its_end_was_read() -> None:
    epochs = Epochs(None, 2, None, 2)
    assert dealt(epochs).remaining > 10**9
    assert not epochs.is_exhausted
    epochs.end(0, 3)  # batch 3, which rank 1 holds, never existed
    epochs.check()
    assert epochs.of(0).remaining == 0
    trained(epochs, 0, 0, (0, 2))
    trained(epochs, 0, 1, (1,))
    [event] = epochs.ended(5.0, 1, 3)
    assert sum(rank.steps for rank in event.metrics.per_rank) == 3
    assert not epochs.is_complete
    # The next one may be longer.
    assert dealt(epochs).epoch == 1
    epochs.end(1, 4)
    trained(epochs, 1, 0, (0, 2))
    trained(epochs, 1, 1, (1, 3))
    assert len(epochs.ended(9.0, 1, 7)) == 1
    assert epochs.is_complete
    assert epochs.is_exhausted


def test_the_end_of_an_epoch_that_has_not_begun_is_kept() -> None:
    epochs = Epochs(None, 2, None, 2)
    epochs.end(0, 1)
    epochs.end(1, 2)
    first = dealt(epochs)
    second = dealt(epochs)
    assert [(first.epoch, first.batches), (second.epoch, second.batches)] == [(0, 1), (1, 2)]
    assert epochs.dealing(0.0) is None
    assert epochs._ends == {}


def test_max_steps_counts_through_epochs_of_any_length() -> None:
    epochs = Epochs(None, None, 5, 2)
    assert dealt(epochs).batches == 5
    epochs.end(0, 3)
    # Two are left for the epoch behind it, however long that is.
    assert dealt(epochs).batches == 2
    epochs.end(1, 100)
    assert epochs.of(1).batches == 2
    assert epochs.dealing(0.0) is None
    for epoch, hands in ((0, ((0, 2), (1,))), (1, ((0,), (1,)))):
        for rank, hand in enumerate(hands):
            trained(epochs, epoch, rank, hand)
    assert len(epochs.ended(1.0, 1, 5)) == 2
    assert epochs.is_complete


def test_what_never_existed_may_come_back_when_its_epoch_is_over() -> None:
    epochs = Epochs(None, 1, None, 2)
    dealt(epochs, (1, 1))
    epochs.end(0, 1)
    trained(epochs, 0, 0, (0,))
    assert len(epochs.ended(1.0, 1, 1)) == 1
    epochs.settle(0, 1, (), 0)
    with pytest.raises(ProtocolError, match="epoch 0 is not under way"):
        epochs.settle(0, 1, (1,), 0)
