"""Tests of a record's numbers: each field once, under a name that no recorded scalar can take."""

from __future__ import annotations

from dataclasses import replace

from flowdp.observe.loggers.numbers import numbers_of
from flowdp.policy.tally import EpochMetrics, Tally, Work
from flowdp.protocol.commands import RoundEnded

ROUND = RoundEnded(
    7, 2, 1, 30, (3, 2), (24, 16), 0.5, 1e-3, 9.0, (4.0, 5.0), (0.5, 0.25), (0.1, 0.2), 0.3, 10
)


def epoch(scalars: dict[str, float], **changes: object) -> EpochMetrics:
    tally = Tally(2, 2)
    for rank in (0, 1):
        recorded = {name: (value * 8, 8.0) for name, value in scalars.items()}
        tally.add(rank, Work(2, 1, 8, 3.0, losses=(4.0 + rank * 8, 8), scalars=recorded, lr=0.1))
    return replace(tally.result(1000.0, 10, 64, 3), **changes)


def test_an_epoch() -> None:
    numbers = numbers_of(epoch({"top1": 0.75}, eval={"accuracy": 0.5}, grad_norm=2.0))
    assert numbers["epoch"] == 2
    assert numbers["lr"] == 0.1
    assert numbers["train/loss"] == 1.0
    assert numbers["train/grad_norm"] == 2.0
    assert numbers["train/top1"] == 0.75
    assert numbers["eval/accuracy"] == 0.5
    assert numbers["run/samples_per_s"] == 16.0
    assert (numbers["rank0/loss"], numbers["rank1/loss"]) == (0.5, 1.5)
    assert numbers["rank1/top1"] == 0.75
    assert numbers["rank1/share"] == 0.5
    assert "run/divergence" not in numbers  # not measured
    assert "is_complete" not in numbers
    assert numbers_of(epoch({}, is_complete=False))["is_complete"] == 0
    assert "is_evaluated" not in numbers
    assert numbers_of(epoch({}, owes_evaluation=True))["is_evaluated"] == 0


def test_a_round() -> None:
    numbers = numbers_of(ROUND)
    assert numbers["round/number"] == 7
    assert numbers["round/loss"] == 0.5
    assert numbers["round_rank1/samples"] == 16
    assert numbers["round_rank1/data_wait_ms"] == 0.25
    assert "round/drift" not in numbers
    assert all(isinstance(value, int | float) for value in numbers.values())


def test_a_recorded_scalar_takes_no_name_of_another_number() -> None:
    without, both = numbers_of(epoch({})), numbers_of(epoch({"loss": 43.0, "a/b": 44.0}))
    assert both.items() >= without.items()
    assert [both[f"{of}/scalars/loss"] for of in ("train", "rank0", "rank1")] == [43.0] * 3
    assert both["train/a/b"] == 44.0
