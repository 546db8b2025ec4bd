"""Tests of a run's records: each reader at its own pace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from flowdp.checkpoint.writer import Checkpoint
from flowdp.observe.records import KEPT_CHECKPOINTS, KEPT_ROUNDS, Records
from flowdp.policy.tally import EpochMetrics, Tally
from flowdp.protocol.commands import Finish, RoundEnded
from tests.limits import HANG_S

FINISH = Finish(None, False, 10, 2)


def round_record(number: int) -> RoundEnded:
    none = (0.0,)
    return RoundEnded(number, 1, 0, number + 1, (1,), (1,), 0.0, 0.1, 1.0, none, none, none, 0.0, 1)


def epoch_record(number: int) -> EpochMetrics:
    return Tally(number, 1).result(1.0, 1, number, None)


def in_thread(function: Callable[[], object]) -> tuple[Future[object], threading.Event]:
    """Call a function in a thread; the event is set just before."""
    begun = threading.Event()

    def body() -> object:
        begun.set()
        return function()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(body)
    pool.shutdown(wait=False)
    assert begun.wait(HANG_S)
    return future, begun


def test_every_reader_sees_all_epochs_and_ends_with_the_run() -> None:
    records = Records()
    records.add(epoch_record(0))
    early = records.epoch_records()
    assert next(early).epoch == 0
    late, _ = in_thread(lambda: [record.epoch for record in records.epoch_records()])
    records.add(epoch_record(1))
    assert next(early).epoch == 1
    records.add(epoch_record(2))
    records.end(FINISH, over=True)
    assert [record.epoch for record in early] == [2]
    assert late.result(5) == [0, 1, 2]
    assert [record.epoch for record in records.epoch_records()] == [0, 1, 2]


def test_records_of_every_so_many_steps() -> None:
    records = Records()
    for number, step in enumerate((2, 3, 9, 10, 11, 12)):
        records.add(replace(round_record(number), global_step=step))
    records.end(FINISH, over=True)
    assert [record.global_step for record in records.step_records(3)] == [3, 9, 12]


def test_waiting_for_the_end_and_for_all_threads() -> None:
    records = Records()
    assert not records.wait(timeout_s=0)
    over, _ = in_thread(lambda: records.wait(over=True))
    records.end(None, over=False)
    assert records.wait(timeout_s=0)
    assert not records.wait(over=True, timeout_s=0)
    assert not over.done()
    records.end(FINISH, over=True)
    assert over.result(5) is True


def test_a_standstill_from_before_the_wish_does_not_count() -> None:
    records = Records()
    records.count_request()
    records.pause(True)
    records.wait_for_pause(1)
    second, _ = in_thread(lambda: records.wait_for_pause(3))
    records.count_request()  # to continue
    assert not second.done()
    records.pause(False)
    records.count_request()  # to pause again
    records.pause(True)
    assert second.result(5) is None


def test_waiting_for_a_standstill_ends_with_the_run() -> None:
    records = Records()
    waiting, _ = in_thread(lambda: records.wait_for_pause(1))
    records.end(FINISH, over=True)
    assert waiting.result(5) is None


@pytest.mark.parametrize("late", [True, False])
def test_whether_somebody_asks_for_the_failure(late: bool) -> None:
    records = Records()
    assert not records.wait_for_reader(0)
    if late:
        records.end(None, over=True)
        waiting, _ = in_thread(lambda: records.wait_for_reader(5))
        with records.reader():
            pass
        assert waiting.result(5) is True
    else:
        with records.reader():
            assert records.wait_for_reader(0)
            records.end(None, over=True)
    assert records.wait_for_reader(0)


@dataclass(frozen=True)
class Saved(Checkpoint):
    version: int


def test_a_feed_has_everything_in_order_and_ends_with_the_run() -> None:
    records = Records()
    feed = records.feed(rounds=True)
    came = [round_record(0), Saved(1), round_record(1), epoch_record(0), Saved(2), round_record(2)]
    for record in came:
        records.add(record)
    assert feed.take() == came
    records.add(came[0])
    records.end(FINISH, over=False)  # a failure is known
    records.end(FINISH, over=True)
    assert feed.take() == [came[0]]
    records.add(Saved(3))  # the writer was slower than the failure
    assert feed.take() == feed.take() == []
    assert [record.round for record in records.round_records()] == [0, 1, 2, 0]


def test_a_slow_reader_of_a_feed_loses_the_oldest_but_no_epoch() -> None:
    records = Records()
    feed = records.feed(rounds=True)
    for number in range(KEPT_CHECKPOINTS + 2):
        records.add(epoch_record(number))
        records.add(Saved(number))
    for number in range(KEPT_ROUNDS + 3):
        records.add(round_record(number))
    assert feed.dropped == 5
    fresh = feed.take()
    assert [one for one in fresh if isinstance(one, EpochMetrics)] == [
        epoch_record(number) for number in range(KEPT_CHECKPOINTS + 2)
    ]
    assert [one for one in fresh if isinstance(one, Saved)] == [
        Saved(number) for number in range(2, KEPT_CHECKPOINTS + 2)
    ]
    assert [one.round for one in fresh if isinstance(one, RoundEnded)] == [*range(3, KEPT_ROUNDS + 3)]
