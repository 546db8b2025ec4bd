"""Tests of the tables of a run."""

from __future__ import annotations

from flowdp.observe.tables import device_table, epoch_table
from flowdp.policy.efficiency import Activity, RankTimes, efficiency_of
from flowdp.policy.tally import EpochMetrics, Tally, Work


def epoch(number: int, **scalars: tuple[float, float]) -> EpochMetrics:
    tally = Tally(number, 1)
    tally.add(0, Work(number, 2, 8, 5.0, losses=(16.0, 8), scalars=scalars))
    return tally.result(1000.0, 1, 2, 3)


def test_epochs_with_the_names_of_any_of_them() -> None:
    table = epoch_table([epoch(0), epoch(1, acc=(3.0, 4.0)), epoch(2)], newest=2)
    assert table.header == ("epoch", "loss", "acc", "samples/s", "time")
    assert table.rows == (("2", "2.0000", "0.7500", "8", "1.0s"), ("3", "2.0000", "", "8", "1.0s"))
    assert str(table).splitlines()[1] == "2      2.0000  0.7500          8  1.0s"


def test_devices_with_their_largest_losses() -> None:
    spent = {Activity.STEP: 400.0, Activity.GATE: 300.0, Activity.DATA: 200.0, Activity.SAVE: 90.0}
    report = efficiency_of(
        [RankTimes(spent, 60, 6, 1000.0), RankTimes({Activity.STEP: 1e3}, 40, 4, 1e3)], "ab"
    )
    assert device_table(report).rows == (
        ("a", "60", "60 %", "40 %", "waiting for others 30 %, data 20 %"),
        ("b", "40", "40 %", "100 %", ""),
    )
