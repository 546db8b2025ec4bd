"""Tests of the balancer: shares follow the measurements, and mixed steps teach nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flowdp.data_parallel.balancer import Balancer
from flowdp.data_parallel.loader import Epoch
from flowdp.device.streams import HostLane
from flowdp.options import CadenceOptions
from tests.loops import CPU


class Watch:
    """A stopwatch with laps written by the test."""

    def __init__(self) -> None:
        self.laps = 0
        self.ms: list[float] = []

    @property
    def is_known(self) -> bool:
        return self.laps > 0 and bool(self.ms)

    def lap(self) -> None:
        self.laps += 1

    def take_ms(self) -> float:
        self.laps -= 1
        return self.ms.pop(0)


def paced(
    world_size: int = 2, *, windows: bool = False, model: nn.Module | None = None, **options: Any
) -> tuple[Balancer, tuple[Watch, ...], Watch]:
    watches, summing = tuple(Watch() for _ in range(world_size)), Watch()
    replicas = SimpleNamespace(
        modules=[model or nn.Identity()] * world_size,
        watches=watches,
        summing=summing,
    )
    made = Balancer(replicas.modules[0], replicas, CadenceOptions(**options), windows=windows)  # type: ignore[arg-type]
    return made, watches, summing


def passed(watches: tuple[Watch, ...], summing: Watch, ms: tuple[float, ...], sync_ms: float = 0.1) -> None:
    for watch, took_ms in zip((*watches, summing), (*ms, sync_ms), strict=True):
        watch.ms.append(took_ms)


def test_equal_until_measured_and_then_by_throughput() -> None:
    made, watches, summing = paced()
    assert made.ratios == (0.5, 0.5)
    for step in range(10):
        assert made.cut(10) == (5, 5)
        made.note_work((5, 5))
        passed(watches, summing, (2.5, 1.0))
        made.step()
        assert made.throughput == pytest.approx((2.0, 5.0)), step
    assert made.ratios == pytest.approx((2 / 7, 5 / 7))
    assert made.cut(14) == (4, 10)


def test_several_calls_of_a_step_are_one_measurement() -> None:
    made, watches, summing = paced()
    made.note_work((6, 2))
    made.note_work((2, 0))
    assert made.shard_sizes == (2, 0)
    passed(watches, summing, (4.0, 1.0))
    made.step()
    assert made.throughput == pytest.approx((2.0, 2.0))


def test_steps_that_the_devices_have_not_passed_are_learned_later_with_their_own_samples() -> None:
    made, watches, summing = paced()
    made.note_work((4, 4))
    made.step()
    made.note_work((8, 8))
    made.step()
    assert made.throughput == (0.0, 0.0)
    passed(watches, summing, (2.0, 1.0))
    passed(watches, summing, (2.0, 2.0))
    made.step()  # no part of it was computed
    made.note_work((1, 1))
    made.step()
    assert made.throughput == pytest.approx((0.7 * 2 + 0.3 * 4, 4.0))


# ---------------------------------------------------------------- windows
def test_whole_batches_by_speed() -> None:
    made, watches, summing = paced(windows=True, anchor=10)
    assert made.cadence is not None
    for _ in range(30):
        counts = made.cadence.quotas
        made.note_work([8 * count for count in counts], counts)
        passed(watches, summing, (3.0 * counts[0], 1.0 * counts[1]))
        made.step()
    assert counts[1] == pytest.approx(3 * counts[0], abs=1)
    assert made.cadence.el_che.ms_per_batch == pytest.approx((3.0, 1.0))


def test_a_device_that_was_slow_for_a_while_gets_batches_of_short_loaders_again() -> None:
    made, watches, summing = paced(windows=True)
    lanes = [HostLane(CPU), HostLane(CPU)]
    dealt = []
    for number in range(60):
        dealt.append(0)
        for window in Epoch([torch.zeros(8)] * 10, lanes, made.cadence):
            samples, batches = window.per_rank(2)
            made.note_work(samples, batches)
            slow = 100.0 if 3 <= number < 12 else 1.0
            passed(watches, summing, (20.0 * batches[0], slow * 20.0 * batches[1]))
            made.step()
            dealt[-1] += batches[1]
    assert 0 in dealt[3:12]  # far too slow for such a short loader
    assert dealt[-5:] == [5] * 5


def test_calls_alone_do_not_move_the_windows() -> None:
    made, watches, summing = paced(windows=True)
    assert made.cadence is not None
    before = made.cadence.quotas
    made.note_work((4, 4))
    passed(watches, summing, (100.0, 1.0))
    made.step()
    assert made.cadence.quotas == before
    assert made.throughput == pytest.approx((0.04, 4.0))
