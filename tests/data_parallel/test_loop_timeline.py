"""Tests of a loop's timeline: lanes without gaps, their report, and shares that change."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import flowdp
from flowdp import DataParallel, OptionError
from flowdp.data_parallel.loop_timeline import whole_lane
from flowdp.policy.efficiency import PARTS, Activity
from tests.data_parallel.test_balancer import paced, passed

STEPS = 12
PARTS_OF_A_LOOP = ["training", "waiting for others", "averaging", "interpreter", "idle", "your code"]
FORWARD, BACKWARD, SUM = Activity.FORWARD, Activity.BACKWARD, Activity.SUM
GATE, IDLE, OWN, STEP = Activity.GATE, Activity.IDLE, Activity.OWN, Activity.STEP


def test_a_lane_has_no_gaps() -> None:
    busy = [(1.0, 4.0), (6.0, 9.0)]
    row = [(FORWARD, 1.5, 3.0), (BACKWARD, 6.0, 8.0), (SUM, 7.5, 9.0)]
    assert list(whole_lane(row, busy, 0.0, GATE)) == [
        (OWN, 0.0, 1.0),
        (GATE, 1.0, 1.5),
        (FORWARD, 1.5, 3.0),
        (GATE, 3.0, 4.0),
        (OWN, 4.0, 6.0),
        (BACKWARD, 6.0, 8.0),
        (SUM, 8.0, 9.0),  # what overlaps counts once
    ]
    assert list(whole_lane([], busy, 2.0, IDLE)) == [(IDLE, 2.0, 4.0), (OWN, 4.0, 6.0), (IDLE, 6.0, 9.0)]
    assert list(whole_lane(row, [], 0.0, GATE)) == []


def loop(devices: int, steps: int = STEPS, **options: Any) -> DataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = SGD(model.parameters(), 0.01)
    given = {"timeline": True, "progress": False, "partition_ratios": [1.0] * devices} | options
    dp = flowdp.setup(model, optimizer, devices=["cpu"] * devices, **given)
    if dp.cadence is not None:
        data = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(steps)]
        for window in dp.epoch(data):
            dp.forward_batch(window)
            dp.step()
        return dp
    for _ in range(steps):
        x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))
        F.cross_entropy(dp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dp


def judge(dp: DataParallel, samples: int) -> dict[int, Counter[Activity]]:
    """Lanes without gaps, and a report of the same times; returns how often each activity came."""
    spans = dp.timeline.spans
    counts: dict[int, Counter[Activity]] = {}
    report = dp.report()
    assert list(report.parts) == PARTS_OF_A_LOOP
    for rank, device in enumerate(report.devices):
        lane = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start_ms)
        assert all(one.end_ms == pytest.approx(two.start_ms, abs=1e-3) for one, two in pairwise(lane))
        assert lane[-1].end_ms == pytest.approx(report.wall_ms, abs=5.0)
        counts[rank] = Counter(span.activity for span in lane)
        for part in PARTS_OF_A_LOOP:
            spent_ms = sum(span.busy_ms for span in lane if span.activity in PARTS[part])
            assert device.parts[part] == pytest.approx(spent_ms / report.wall_ms, abs=0.02), part
        assert sum(device.parts.values()) == pytest.approx(1.0)
    assert sum(sum(done.samples) for done in dp.timeline.rounds) == samples
    assert report.reached == pytest.approx(1e3 * samples / report.wall_ms, rel=0.02)
    assert "your code" in str(report)
    return counts


def test_steps_that_are_cut() -> None:
    with loop(3) as dp:
        for counts in judge(dp, 12 * STEPS).values():
            assert counts[FORWARD] == counts[BACKWARD] == counts[SUM] == STEPS
            assert counts[STEP] == counts[IDLE] == 0
        assert [done.samples for done in dp.timeline.rounds] == [(4, 4, 4)] * STEPS


def test_one_device_has_steps_alone() -> None:
    with loop(1) as dp:
        counts = judge(dp, 12 * STEPS)
        assert counts[0][STEP] == STEPS
        assert counts[0].keys() <= {STEP, OWN}


def test_the_first_device_alone_leaves_the_others_idle() -> None:
    with loop(2) as dp:
        hook = dp.module.register_forward_hook(lambda *_: None)  # such calls are not cut
        x = torch.randn(12, 8)
        dp(x).sum().backward()
        dp.optimizers[0].step()
        hook.remove()
        assert judge(dp, 12 * STEPS + 12)[1][IDLE] == 1
        assert dp.timeline.rounds[-1].samples == (12, 0)


def cross_entropy(c: Any) -> Tensor:
    return F.cross_entropy(c.output, c.batch[1])


def test_windows() -> None:
    with loop(2, cadence=True, loss_fn=cross_entropy, partition_ratios=None) as dp:
        counts = judge(dp, 4 * STEPS)
        assert counts[0][STEP] == len(dp.timeline.rounds)
        assert dp.timeline.rounds[0].anchor == dp.cadence.anchor  # type: ignore[union-attr]


def test_a_path_is_written_at_the_end(tmp_path: Path) -> None:
    dp = loop(2, timeline=tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()
    dp.close()
    dp.close()
    assert '"gradient sum"' in (tmp_path / "run.html").read_text()
    lanes, loss, rate = dp.timeline.plot().axes
    assert [axes.get_visible() for axes in (lanes, loss, rate)] == [True, False, True]
    with pytest.raises(OptionError, match="there is no folder"):
        loop(2, timeline=tmp_path / "no" / "run.html")


def test_without_one_there_is_nothing_to_read() -> None:
    with loop(2, timeline=False) as dp:
        for read in (lambda: dp.timeline, dp.report):
            with pytest.raises(OptionError, match=r"give setup\(timeline=True\)"):
                read()
        assert all(watch.spans == [] and watch._base is None for watch in dp._replicas.watches)  # type: ignore[union-attr]


@pytest.mark.pace
def test_shares_that_change_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flowdp")
    made, watches, summing = paced()
    for step in range(65):
        made.note_work((5, 5))
        passed(watches, summing, (1.0, 1.0 if step < 20 else 4.0))
        made.step()
    assert [record.getMessage() for record in caplog.records] == [
        "step 0: the shares are 80 % 20 % from now on"  # nothing steps this optimizer
    ]


def test_shares_that_change_are_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowdp.policy.shares._CALIBRATION_STEPS", 1)

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(40 if len(x) == 6 else 1):  # both parts alike at first: the second is timed longer
                out = super().forward(x)
            return out

    model = Slow(8, 3)
    optimizer = SGD(model.parameters(), 0.01)
    hint = flowdp.CadenceOptions(speed_hint=(1, 5.0), max_anchor=0)
    with flowdp.setup(
        model, optimizer, devices=["cpu", "cpu"], cadence=hint, timeline=True, check=False, progress=False
    ) as dp:
        for _ in range(400):
            F.mse_loss(dp(torch.randn(12, 8)), torch.zeros(12, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if any(event.kind == "shares" for event in dp.timeline.events):
                break
        [event, *_] = [event for event in dp.timeline.events if event.kind == "shares"]
        assert event.text.startswith("shares ")
