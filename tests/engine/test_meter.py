"""Tests of a meter with either clock on the same steps, and of the host's clock."""

from __future__ import annotations

import math
from itertools import pairwise
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowdp.collective.base import Averaging
from flowdp.device.streams import HostLane, StreamLane
from flowdp.engine import clocks
from flowdp.engine import meter as module
from flowdp.engine.clocks import PAGE
from flowdp.engine.meter import Meter, OrderSums, RankActivity
from flowdp.machine.worker import Done, Step
from flowdp.policy.efficiency import Activity
from flowdp.protocol.messages import StartEpoch
from flowdp.timeline.spans import RankSpans

CPU = torch.device("cpu")
STEP = Step(3, (5,), 0)


@pytest.fixture(params=["host", "device"])
def meter(request: pytest.FixtureRequest, lane: StreamLane) -> Meter:
    return Meter(HostLane(CPU) if request.param == "host" else lane)


def steps(meter: Meter, *losses: float, samples: int = 4) -> None:
    for loss in losses:
        meter.begin(perf_counter())
        meter.end(torch.tensor(loss), samples, STEP)


def closed(meter: Meter, count: int) -> Any:
    reports: list[OrderSums] = []
    meter.close(reports.append)
    meter.settle()
    (sums,) = reports
    work = sums.work(Done(0, 3, count), 0.1, {"a": 0.1})
    return SimpleNamespace(work=work, wait_ms=sums.wait_ms, averaging=sums.averaging)


def test_losses_and_scalars_are_summed_by_samples_and_weights(meter: Meter) -> None:
    meter.begin(0.0)
    meter.scalar("accuracy", torch.tensor(0.5), 4.0)
    meter.scalar("host", 3.0, 2.0)
    meter.end(torch.tensor(2.0), 4, STEP)
    meter.begin(0.0)
    meter.scalar("accuracy", torch.tensor([1], dtype=torch.int32), 1.0)
    meter.scalar("host", 1.0, 1.0)
    meter.end(torch.tensor(1.0), 1, STEP)
    work = closed(meter, 2).work
    assert work.losses == (9.0, 5)
    assert work.scalars == {"accuracy": (3.0, 5.0), "host": (7.0, 3.0)}
    assert (work.epoch, work.steps, work.samples, work.lr) == (3, 2, 5, 0.1)


def test_a_loss_that_names_a_weight_counts_for_that(meter: Meter) -> None:
    """A part without weights counts for nothing."""
    for number in range(PAGE + 1):  # an odd number of cells before them: a pair is split over two pages
        meter.begin(0.0)
        meter.end(torch.tensor(1.0), 1, STEP, [torch.tensor(2.0)] if number == 0 else ())
    for loss, weight in ((2.0, 1.5), (0.0, 0.0)) * PAGE:
        meter.begin(0.0)
        meter.end(torch.tensor(loss), 4, STEP, weight=torch.tensor(weight, dtype=torch.float64))
    meter.begin(0.0)
    meter.end(torch.tensor(7.0), 2, STEP)
    work = closed(meter, 3 * PAGE + 2).work
    assert work.losses == (PAGE + 1 + 12.0 * PAGE + 14.0, PAGE + 1 + 6.0 * PAGE + 2)
    assert work.norms == (2.0, 2.0, 1)


def test_orders_do_not_mix(meter: Meter) -> None:
    reports: list[OrderSums] = []
    for order in range(5):
        steps(meter, *[float(order)] * 2)
        meter.close(reports.append)
    meter.settle()
    assert [(report.loss, report.losses) for report in reports] == [(8.0 * order, 8) for order in range(5)]


def test_facts_keep_their_order(meter: Meter) -> None:
    told: list[str] = []
    steps(meter, 1.0)
    meter.close(lambda report: told.append("first order"))
    meter.then(lambda: told.append("snapshot"))
    steps(meter, 1.0)
    meter.close(lambda report: told.append("second order"))
    meter.settle()
    assert told == ["first order", "snapshot", "second order"]


def test_waits_for_data_are_told_apart_on_the_host() -> None:
    meter = Meter(HostLane(CPU))
    meter.waited(0.5)
    meter.waited(0.25)
    steps(meter, 1.0)
    assert closed(meter, 1).work.data_ms == pytest.approx(750.0)


def test_a_wait_inside_a_step_is_not_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (clocks, module):
        monkeypatch.setattr(place, "perf_counter", lambda: 10.75)
    meter = Meter(HostLane(CPU))
    meter.begin(10.0)
    meter.waited(0.5)
    meter.end(torch.tensor(1.0), 4, STEP)
    work = closed(meter, 1).work
    assert work.data_ms == pytest.approx(500.0)
    assert work.busy_ms == pytest.approx(250.0)


def test_the_step_behind_a_mean_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [10.0]
    for place in (clocks, module):
        monkeypatch.setattr(place, "perf_counter", lambda: now_s[0])
    meter = Meter(HostLane(CPU))
    meter.meet()
    now_s[0] += 0.5
    meter.met(lambda: Averaging(100.0, None))
    now_s[0] += 0.25
    meter.stepped()
    report = closed(meter, 0)
    assert report.work.busy_ms == pytest.approx(250.0)
    assert report.wait_ms == pytest.approx(400.0)


def test_steps_without_a_loss_count_for_none(meter: Meter) -> None:
    meter.begin(0.0)
    meter.end(None, 4, STEP)
    steps(meter, 3.0, samples=2)
    work = closed(meter, 2).work
    assert (work.samples, work.losses) == (6, (6.0, 2))


# ---------------------------------------------------------------- retried steps, and NaN losses
def test_what_was_recorded_is_discarded_where_the_step_begins_again(meter: Meter) -> None:
    meter.begin(0.0)
    meter.scalar("device", torch.tensor(0.5), 4.0)
    meter.scalar("host", 3.0, 2.0)
    meter.end(torch.tensor(2.0), 4, STEP)
    meter.scalar("host", 1.0, 1.0)  # between two steps: of no attempt
    meter.begin(0.0)
    for _ in range(3):
        meter.discard()
        meter.scalar("device", torch.tensor(8.0), 1.0)
        meter.scalar("host", 16.0, 1.0)
        meter.scalar("new", torch.tensor(32.0), 1.0)
    meter.end(torch.tensor(1.0), 4, STEP)
    work = closed(meter, 2).work
    assert work.losses == (12.0, 8)
    assert work.scalars == {"device": (10.0, 5.0), "host": (23.0, 4.0), "new": (32.0, 1.0)}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_loss_gone_bad_is_remembered_and_not_counted(meter: Meter, bad: float) -> None:
    steps_taken = [Step(0, (number,), number) for number in range(4)]
    for step, loss in zip(steps_taken, (1.0, bad, 3.0, bad), strict=True):
        meter.begin(0.0)
        meter.end(torch.tensor(loss), 2, step)
    meter.look()
    assert meter.bad == {0: steps_taken[1]}
    assert closed(meter, 4).work.losses == (8.0, 4)


def test_a_loss_gone_bad_stays_for_a_verdict_that_is_awaited(meter: Meter) -> None:
    steps(meter, math.nan)
    meter.look()
    meter.end_round(0)
    assert (meter.round, meter.bad) == (1, {0: STEP})
    meter.end_round(None)
    assert (meter.round, meter.bad) == (2, {})


def test_norms_of_gradients_are_summed_but_those_of_a_scaled_loss_that_overflowed() -> None:
    sums = OrderSums()
    for value in (3.0, math.inf, 5.0, math.nan):
        sums.norm(value)
    assert sums.norms == (8.0, 5.0, 2)


def test_a_planned_wait_is_at_most_the_wait() -> None:
    activity = RankActivity(None)
    for guarded, wait_ms in ((False, 8.0), (False, 2.0), (True, 9.0)):
        order = StartEpoch(0, 0, (), slack_ms=3.0, guarded=guarded)
        activity.count(OrderSums(samples=4, wait_ms=wait_ms), order)
    activity.count(OrderSums(samples=4, wait_ms=1.0))
    spent = activity.times().ms
    waits = {use: spent[use] for use in (Activity.GATE, Activity.ROUNDING, Activity.GUARD)}
    assert waits == {Activity.GATE: 12.0, Activity.ROUNDING: 5.0, Activity.GUARD: 3.0}


# ---------------------------------------------------------------- spans
def test_spans_are_the_sums_in_their_places(meter: Meter) -> None:
    meter._spans = RankSpans()
    steps(meter, 1.0, 2.0)
    meter.meet()
    meter.met(lambda: Averaging(0.0, None))
    meter.stepped()
    meter.averaged(perf_counter())
    report = closed(meter, 2)
    rows = {activity: meter._spans.read(activity) for activity in Activity}
    assert rows[Activity.STEP][:, 3].tolist() == [1, 1, 0]
    assert rows[Activity.STEP][:, 2].sum() * 1e3 == pytest.approx(report.work.busy_ms)
    assert rows[Activity.GATE][:, 2].sum() * 1e3 == pytest.approx(report.wait_ms, abs=1e-6)
    assert len(rows[Activity.AVERAGE]) >= 1
    everything = sorted(row for table in rows.values() for row in table[:, :2].tolist())
    assert all(one[1] <= two[0] + 1e-6 for one, two in pairwise(everything))


def test_a_rank_without_samples_is_left_out_and_waits_for_no_slower_one(meter: Meter) -> None:
    meter._spans, activity = RankSpans(), RankActivity(None)
    ended: list[OrderSums] = []
    for samples in (4, 0):
        meter.begin(perf_counter())
        meter.end(torch.tensor(1.0), samples, STEP)
        meter.meet()
        meter.met(lambda: Averaging(0.0, None))
        meter.close(ended.append)
        meter.settle()
    for sums in ended:
        activity.count(sums)
    times = activity.times().ms
    assert [times[name] for name in (Activity.GATE, Activity.LEFT_OUT)] == [sums.wait_ms for sums in ended]
    assert [len(meter._spans.read(name)) for name in (Activity.GATE, Activity.LEFT_OUT)] == [1, 1]


def test_averaging_beside_the_training_is_no_work(meter: Meter) -> None:
    steps(meter, 1.0)
    begun = perf_counter()
    meter.averaged(begun)
    reports: list[OrderSums] = []
    meter.close(reports.append)
    meter.settle()
    assert 0.0 < reports[0].sync_ms < 1e3 * (perf_counter() - begun) + 50.0
