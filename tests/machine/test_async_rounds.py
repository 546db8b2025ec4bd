"""Tests of asynchronous rounds: when snapshots are requested, averaged and applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowdp.machine.async_rounds import AsyncRank, AsyncRounds
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import Epochs
from flowdp.options import CadenceOptions
from flowdp.protocol.commands import Average, Command, RoundEnded, Send
from flowdp.protocol.messages import (
    Averaged,
    DataEnded,
    Fact,
    Outcome,
    RequestParams,
    SnapshotReady,
    StartEpoch,
    StepsDone,
    SyncAck,
    Throttle,
    Update,
    Work,
)
from flowdp.protocol.position import Position
from tests.invariants import check
from tests.planned import sync_now


class Run:
    """Two ranks and the machine."""

    def __init__(
        self,
        batches: int | None = 100,
        *,
        epochs: int = 1,
        groups: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        config = CoordinatorConfig(
            world_size=2, batches=batches, epochs=epochs, groups=groups, cadence=CadenceOptions(**options)
        )
        self.machine = AsyncRounds(config, Epochs(config))
        self.out: list[list[StartEpoch]] = [[], []]
        self.now_ms = 0.0

    def decide(self, *, hold: bool = False, meet: bool = False) -> list[Command]:
        """The machine's commands except orders, which are kept in `out`."""
        commands = self.machine.decide(self.now_ms, hold=hold, meet=meet)
        check(self.machine)
        for command in commands:
            if isinstance(command, Send) and isinstance(command.order, StartEpoch):
                self.out[command.rank].append(command.order)
        return [c for c in commands if not (isinstance(c, Send) and isinstance(c.order, StartEpoch))]

    def take(self, fact: Fact) -> list[Command]:
        commands = self.machine.take(fact, self.now_ms)
        check(self.machine)
        return commands

    def trains(self, rank: int, pace_ms: float = 10.0, mean: int = -1) -> None:
        """The rank completes its oldest order, with the mean of this round."""
        order = self.out[rank].pop(0)
        steps = order.steps
        work = Work(order.epoch, steps, 8 * steps, pace_ms * steps, 0.0, pace_ms, (8.0 * steps, 8 * steps))
        assert self.take(StepsDone(rank, order.plan, work, mean=mean)) == []

    def fills(self) -> list[Command]:
        """Both ranks train until the machine requests snapshots."""
        for _ in range(100):
            if said := self.decide():
                return said
            for rank in (0, 1):
                if self.out[rank]:
                    self.trains(rank)
        raise AssertionError("no round was opened")

    def snapshots(self, round: int, steps: Sequence[int]) -> list[Command]:
        for rank, count in enumerate(steps):
            assert self.take(SnapshotReady(rank, round, count, 8 * count)) == []
        return self.decide()


def requests(round: int) -> list[Command]:
    return [Send(0, RequestParams(round)), Send(1, RequestParams(round))]


def trained(run: Run) -> list[int]:
    return [state.trained - state.snapshot for state in run.machine._ranks]


def test_batches_go_out_in_small_orders_two_for_each_rank() -> None:
    run = Run()
    assert run.decide() == []
    assert [[order.batches for order in orders] for orders in run.out] == [[(0,), (1,)], [(2,), (3,)]]
    assert all(order.sync is None and order.pace is not None for orders in run.out for order in orders)
    # One order is complete, one more is given.
    run.trains(1)
    run.decide()
    assert [order.batches for order in run.out[1]] == [(3,), (4,)]


def test_orders_and_counts_are_steps_of_several_batches() -> None:
    run = Run(groups=(2, 1))
    run.decide()
    assert [[order.batches for order in orders] for orders in run.out] == [[(0, 1), (2, 3)], [(4,), (5,)]]
    # Three steps each, of twice as many batches on rank 0.
    assert run.fills() == requests(0)
    assert trained(run) == [3, 3]
    assert run.machine.epochs.of(0).trained == 9


def test_a_round_ends_with_its_mean() -> None:
    run = Run()
    # Every rank has taken its probe of three steps: snapshots are requested.
    assert run.fills() == requests(0)
    assert trained(run) == [3, 3]
    # Both have arrived: they are averaged, with their samples as weights.
    assert run.snapshots(0, (3, 4)) == [Average(0, (24, 32))]
    # The mean is there: all apply it, and the schedule is at position seven.
    run.now_ms = 50.0
    *updates, record = run.take(Averaged(0, 2.0, (0.1, 0.2)))
    assert updates == [Send(0, Update(0, 7)), Send(1, Update(0, 7))]
    assert run.machine.global_step == 7
    assert isinstance(record, RoundEnded)
    assert (record.round, record.rounds, record.steps, record.samples) == (0, 1, (3, 4), (24, 32))
    assert (record.global_step, record.sync_ms, record.drift, record.loss) == (7, 2.0, 0.2, 1.0)
    assert record.busy_ms == (30.0, 30.0)


def test_ranks_train_on_while_a_round_is_under_way() -> None:
    run = Run()
    run.fills()
    assert run.snapshots(0, (3, 3)) == [Average(0, (24, 24))]
    for _ in range(5):
        run.trains(0)
        run.trains(1)
        # They get more orders, and no second round begins meanwhile.
        assert not any(isinstance(c, Send) and isinstance(c.order, RequestParams) for c in run.decide())
    assert trained(run) == [5, 5]


def test_who_is_too_far_ahead_gets_nothing_more() -> None:
    run = Run(max_batch_diff=1)
    run.decide()
    for _ in range(2):
        run.trains(0)
        said = run.decide()
    # Rank 1 has taken no step: rank 0 is two ahead, and the limit is one.
    assert said == [Send(0, Throttle(2, "the others are too far behind"))]
    # Sent once.
    assert run.decide() == []
    # Rank 1 continues, and so does rank 0.
    run.trains(1)
    run.decide()
    assert len(run.out[0]) == 1


def test_a_lead_counts_from_the_last_mean_that_both_ranks_have() -> None:
    run = Run(max_batch_diff=5)
    assert run.fills() == requests(0)
    run.trains(0)
    run.trains(0)
    assert [state.trained for state in run.machine._ranks] == [5, 3]
    assert run.machine._limits() == [3 + 6, 5 + 6]
    # Snapshots are no mean yet: rank 0 is two steps ahead, as before.
    assert run.snapshots(0, (5, 3)) == [Average(0, (40, 24))]
    assert run.machine._limits() == [3 + 6, 5 + 6]
    # The mean is on its way. A rank may still be without it, or have it: each limit holds.
    run.take(Averaged(0, 1.0))
    assert run.machine._limits() == [3 + 6, 3 + 6]
    # Rank 1 has taken a step with it: both begin anew at the mean.
    run.decide()
    run.trains(1, mean=0)
    assert run.machine._limits() == [5 + 1 + 6, 3 + 0 + 6]


def test_the_automatic_limit_is_the_count_and_a_few_steps() -> None:
    run = Run(batches=1000)
    run.decide()
    steps = 0
    while run.out[0]:
        run.trains(0)
        steps += 1
        run.decide()
    # Three of the probe, five of overshoot.
    assert steps == 3 + 5


def test_at_the_end_of_the_data_all_meet_at_the_gate() -> None:
    run = Run(batches=4)
    assert run.decide() == []
    # All is dealt: the last orders end with a blocking round.
    assert [orders[-1].sync is not None for orders in run.out] == [True, True]
    for rank in (0, 1):
        run.trains(rank)
        run.trains(rank)
    said = run.decide()
    assert said == []
    assert not run.machine.is_idle
    outcome = Outcome(0, 4, (0, 1), (2, 2), (16, 16))
    assert run.take(SyncAck(0, outcome, Work(0, 0, 0))) == []
    [record] = run.take(SyncAck(1, outcome, Work(0, 0, 0), sync_ms=3.0))
    assert isinstance(record, RoundEnded)
    assert (record.reason, record.steps, record.sync_ms) == ("all devices meet", (2, 2), 3.0)
    assert run.machine.is_idle
    assert run.machine.global_step == 4


def test_a_wish_calls_a_hurried_meeting_and_deals_anew_what_it_cuts() -> None:
    run = Run()
    run.decide()
    run.trains(0)
    run.decide()
    # A pause: no new batches, but a blocking round at once.
    assert run.decide(hold=True) == sync_now(0)
    assert [orders[-1].sync is not None for orders in run.out] == [True, True]
    # No further commands while it is under way.
    assert run.decide(hold=True) == []
    # Rank 0 was cut in its second order, rank 1 in its first.
    outcome = Outcome(0, 1, (0, 1), (1, 0), (8, 0), pause=True, hurried=True)
    run.take(SyncAck(0, outcome, Work(0, 0, 0)))
    [record] = run.take(SyncAck(1, outcome, Work(0, 0, 0)))
    assert isinstance(record, RoundEnded)
    assert record.reason == "a pause begins"
    assert run.machine.is_idle
    # The ledger has all but batch 0 back; the next orders are a new plan.
    ledger = run.machine.epochs.of(0)
    assert (ledger.position, ledger.left, ledger.trained) == (1, [[], []], 1)
    run.out = [[], []]
    run.decide()
    assert run.out[0][0].plan == 1
    assert run.out[0][0].batches == (1,)


def test_a_meeting_credits_the_order_it_cut() -> None:
    run = Run(anchor=40, speed_hint=(0, 1.5))
    run.decide()
    assert len(run.out[0][0].batches) > 2
    run.decide(meet=True)
    outcome = Outcome(0, 2, (0, 1), (2, 0), (16, 0), hurried=True)
    # Rank 0 did two batches of its first order.
    run.take(SyncAck(0, outcome, Work(0, 2, 16, 20.0, 0.0, 10.0)))
    run.take(SyncAck(1, outcome, Work(0, 0, 0)))
    assert run.machine.epochs.of(0).trained == 2
    assert run.machine.global_step == 2


def test_an_answer_to_a_round_that_was_given_up_is_ignored() -> None:
    run = Run(batches=1000)
    run.fills()
    run.take(SnapshotReady(0, 0, 3, 24))
    assert run.decide(meet=True) == sync_now(1)
    assert run.take(SnapshotReady(1, 0, 3, 24)) == []
    assert run.decide() == []


def test_a_fast_rank_gets_more_once_it_was_measured() -> None:
    run = Run(batches=1000)
    run.decide()
    while not any(isinstance(c, Send) for c in run.decide()):
        for rank, pace_ms in ((0, 10.0), (1, 30.0)):
            if run.out[rank]:
                run.trains(rank, pace_ms)
    steps = trained(run)
    run.snapshots(0, steps)
    run.take(Averaged(0, 1.0))
    assert run.machine.cadence.quotas[0] == 3 * run.machine.cadence.quotas[1]


# ---------------------------------------------------------------- epochs of unknown length
def ends(run: Run, batches: int, epoch: int = 0) -> list[Command]:
    """The end of the epoch is read; the ranks drop batches that never existed."""
    end = DataEnded(epoch, batches)
    run.machine.epochs.end(end)
    commands = run.machine.end(end)
    check(run.machine)
    for command in commands:
        assert isinstance(command, Send)
        assert command.order == end
        run.out[command.rank] = [order.until(end) for order in run.out[command.rank]]
    return commands


def test_the_end_of_the_data_shortens_orders_that_are_out() -> None:
    run = Run(None)
    run.decide()
    assert [[order.batches for order in orders] for orders in run.out] == [[(0,), (1,)], [(2,), (3,)]]
    assert ends(run, 3) == [Send(1, DataEnded(0, 3))]
    # All is dealt, so all meet for the last time afterwards.
    assert run.decide() == []
    meeting = [orders.pop() for orders in run.out]
    assert all(order.sync is not None for order in meeting)
    for rank in (0, 0, 1, 1):  # rank 1 answers its empty order, too
        run.trains(rank)
    assert run.machine.epochs.of(0).is_complete


def test_a_stop_hurries_the_last_meeting() -> None:
    run = Run(4)
    run.decide()
    assert run.machine.epochs.is_exhausted
    assert run.decide() == []
    # The meeting waits for the dealt batches; a stop does not, and is sent once.
    assert run.decide(hold=True) == sync_now(0)
    assert run.decide(hold=True) == []


# ---------------------------------------------------------------- NaN or inf parameters, resume
def test_a_bad_replica_asks_for_a_meeting() -> None:
    run = Run()
    run.decide()
    order = run.out[0].pop(0)
    run.take(StepsDone(0, order.plan, Work(0, 1, 8, bad=(0, 0))))
    assert run.machine.wants_meeting
    assert run.decide(hold=True) == sync_now(0)
    outcome = Outcome(0, 2, (0, 1), (1, 1), (0, 8), halt=True, bad=(0,))
    assert run.take(SyncAck(0, outcome, Work(0, 0, 0))) == []
    [record] = run.take(SyncAck(1, outcome, Work(0, 1, 8)))
    assert isinstance(record, RoundEnded)
    assert record.reason == "rank 0 had NaN or inf parameters"
    assert run.machine.pop_bad() == {0: (0, 0)}
    assert not run.machine.wants_meeting
    assert run.machine.is_idle


def test_a_bad_snapshot_is_not_averaged() -> None:
    run = Run()
    assert run.fills() == requests(0)
    run.take(SnapshotReady(0, 0, 3, 0, bad=True))
    run.take(SnapshotReady(1, 0, 3, 24))
    assert run.decide() == []
    assert run.machine.wants_meeting
    assert run.decide(hold=True) == sync_now(1)


def test_what_was_measured_goes_on() -> None:
    run = Run()
    run.machine.resume(Position(2, global_step=40, round=7, anchor=20, pace_ms=(5.0, 10.0)))
    assert (run.machine.global_step, run.machine.next_round) == (40, 7)
    assert run.machine.pace_ms == (5.0, 10.0)
    assert run.machine.cadence.quotas == (40, 20)
    other = Run()
    other.machine.resume(Position(3, global_step=40, round=7, anchor=20, pace_ms=(5.0, 10.0, 10.0)))
    assert other.machine.global_step == 40
    assert other.machine.pace_ms == (0.0, 0.0)


def test_an_order_is_reported_in_parts_and_the_rest_is_dealt_anew() -> None:
    rank = AsyncRank()
    rank.give(StartEpoch(0, 0, (0, 1, 2, 3, 4), group=2))
    assert rank.report(StepsDone(0, 0, Work(0, 1, 16), is_last=False)) == (0, 1)
    assert (rank.trained, rank.dealt) == (1, 3)
    assert rank.report(StepsDone(0, 0, Work(0, 1, 16))) == (2, 3, 4)
    assert (rank.trained, rank.dealt, rank.reported) == (2, 2, 0)
