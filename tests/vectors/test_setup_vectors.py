"""The vectors of shard sizes and rebalancing, through `setup`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import flowdp
from tests.vectors.book import ALL, Vector

Setup = Callable[[Sequence[float]], flowdp.DataParallel]


@pytest.fixture
def spread() -> Iterator[Setup]:
    """`spread(ratios)`: a model on as many devices, with batches split by these ratios at first."""
    made: list[flowdp.DataParallel] = []

    def make(ratios: Sequence[float]) -> flowdp.DataParallel:
        slow = min(range(len(ratios)), key=ratios.__getitem__)
        options = flowdp.CadenceOptions(max_anchor=0, speed_hint=(slow, max(ratios) / ratios[slow]))
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        made.append(flowdp.setup(model, optimizer, devices=["cpu"] * len(ratios), cadence=options))
        return made[-1]

    yield make
    for dp in made:
        dp.close()


def take_steps(
    dp: flowdp.DataParallel, throughput: Sequence[float], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of devices with this many samples per millisecond; 0 is a device that is not measured."""
    assert dp._replicas is not None
    for _ in range(steps):
        dp(torch.ones(1000, 1)).mean().backward()
        for watch, samples, speed in zip(dp._replicas.watches, dp.shard_sizes, throughput, strict=True):
            took_ms = samples / speed if speed else 0.0
            monkeypatch.setattr(watch, "take_ms", lambda w=watch, ms=took_ms: (w._laps.popleft(), ms)[1])
        dp.step()


def shards_of(dp: flowdp.DataParallel, samples: int) -> list[int]:
    with torch.no_grad():
        dp(torch.ones(samples, 1))
    return list(dp.shard_sizes)


@pytest.mark.parametrize("name", ["SH-001", "SH-003", "SH-005"])
def test_shards_of_given_ratios(name: str, spread: Setup) -> None:
    vector: Vector = ALL[name]
    ratios = vector["setup"]["chunk_ratios"]
    dp = spread(ratios)
    assert dp.chunk_ratios == pytest.approx(ratios)
    assert shards_of(dp, vector["input"]["batch_size"]) == vector["expected"]["sizes"]


def test_shards_after_rebalancing(spread: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = ALL["SH-007"]
    dp = spread([0.5, 0.5])
    take_steps(dp, vector["setup"]["ema_throughput"], 10, monkeypatch)
    assert shards_of(dp, vector["input"]["batch_size"]) == vector["expected"]["sizes"]


@pytest.mark.parametrize("name", ["RB-002", "RB-004"])
def test_ratios_of_the_throughput(name: str, spread: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = ALL[name]
    dp = spread(vector["setup"]["old"])
    throughput = vector["input"]["ema_throughput"]
    take_steps(dp, throughput, 10, monkeypatch)
    assert dp.throughput == pytest.approx([1000 * samples for samples in throughput])
    assert dp.chunk_ratios == pytest.approx(vector["expected"]["ratios"], abs=0.01)


def test_ratios_are_computed_anew_every_fifty_steps(spread: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = ALL["RB-006"]
    dp = spread([0.5, 0.5])
    take_steps(dp, (3, 1), vector["setup"]["step_count"], monkeypatch)
    before = dp.chunk_ratios
    assert before == pytest.approx((0.75, 0.25))
    take_steps(dp, (1, 1), 49, monkeypatch)
    assert dp.chunk_ratios == before
    take_steps(dp, (1, 1), 1, monkeypatch)
    assert dp.training_step == vector["expected"]["rebalanced_at_step"]
    assert dp.chunk_ratios == pytest.approx((0.5, 0.5), abs=1e-3)


def test_the_first_measurement_is_taken_whole(spread: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = ALL["RB-008"]
    dp = spread([0.5, 0.5])
    take_steps(dp, (vector["input"]["first_measurement_rank0"], 0), 1, monkeypatch)
    assert dp.throughput == pytest.approx((1000 * vector["expected"]["ema_rank0"], 0))


@pytest.mark.parametrize("name", ["LR-006", "LR-008"])
def test_the_learning_rate_is_the_schedulers(name: str, spread: Setup) -> None:
    vector: Vector = ALL[name]
    expected = vector["expected"]
    dp = spread([0.5, 0.5])
    [optimizer] = dp.optimizers
    scheduled = vector["setup"]["scheduler"] is not None
    for group in optimizer.param_groups:
        group["lr"] = 1.0 if scheduled else vector["setup"]["initial_lr"]
    scheduler = LambdaLR(optimizer, lambda step: 0.1 * step) if scheduled else None
    rates, steps = [], []
    for _ in range(vector["input"]["steps"]):
        dp(torch.ones(4, 1)).mean().backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        steps.append(dp.training_step)
    if scheduled:
        assert rates == pytest.approx(expected["lr_after_each"])
        assert steps == expected["training_step_after_each"]
    else:
        assert (rates, steps) == ([expected["lr"]], [expected["training_step"]])
