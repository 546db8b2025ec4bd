"""Tests of shares in loops: they follow the measurements, and small models go to the first device alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import flowdp
from flowdp import DataParallel
from flowdp.data_parallel import balancer
from flowdp.data_parallel.balancer import STEPLESS, Balancer, Pace
from flowdp.data_parallel.loader import Epoch
from flowdp.data_parallel.optimizer_hooks import OptimizerHooks
from flowdp.device.cores import LentThreads
from flowdp.device.streams import HostLane
from flowdp.options import CadenceOptions
from flowdp.policy.worth import BLOCK_STEPS, BLOCKS, WARM_STEPS
from tests.loops import CPU, assert_equal, mlp, numbers

pytestmark = pytest.mark.pace


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
        modules=[model or nn.Linear(1, 1)] * world_size,
        watches=watches,
        summing=summing,
    )
    loop: Any = SimpleNamespace(cadence=CadenceOptions(**options), windows=windows, ratios=None)
    optimizers = OptimizerHooks(replicas.modules[0])
    optimizers.use(lambda parameters: SGD(parameters, 0.1), Watch().lap)
    made = Balancer(replicas.modules[0], loop, replicas, optimizers)  # type: ignore[arg-type]
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


def test_a_block_of_cut_steps_is_timed_with_shares_by_speed() -> None:
    made, watches, summing = paced()
    own = Pace([], "Net", Lent())
    sizes = []
    while own.is_cut:
        sizes.append(made.cut(7))
        made.note_work(sizes[-1])
        passed(watches, summing, (sizes[-1][0] / 2, sizes[-1][1] / 5))
        made.step()
        own.note(7, is_cut=True)
        own.step()
    assert sizes[-BLOCK_STEPS:] == [(2, 5)] * BLOCK_STEPS


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


TRIAL = WARM_STEPS + BLOCK_STEPS * BLOCKS
SETTLED = 2 * TRIAL + 1  # steps: the first has no step before it


class Clock:
    """The clock of a machine on which steps take a time by whether their batches are cut.

    Args:
        cut_s: Seconds of a step that is cut.
        alone_s: Seconds of one that is not.
    """

    def __init__(self, cut_s: float, alone_s: float) -> None:
        self.now_s = 0.0
        self.took_s = {True: cut_s, False: alone_s}

    def __call__(self) -> float:
        return self.now_s


class FakeLane:
    """A lane that counts how often the host waits for it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.drained = 0

    def drain(self) -> None:
        self.drained += 1


class Lent(LentThreads):
    """Threads that are lent and taken back by the test's word alone."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def lend(self) -> None:
        self.told.append("lend")

    def take_back(self) -> None:
        self.told.append("take back")


def stepped(own: Pace, clock: Clock, steps: int, samples: int = 8) -> list[bool]:
    ways = []
    for _ in range(steps):
        ways.append(own.is_cut)
        own.note(samples, is_cut=own.is_cut)
        clock.now_s += clock.took_s[own.is_cut]
        own.step()
    return ways


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(*request.param)
    monkeypatch.setattr(balancer, "perf_counter", made)
    return made


faster = pytest.mark.parametrize("clock", [(0.6, 1.0)], indirect=True)
slower = pytest.mark.parametrize("clock", [(1.5, 1.0)], indirect=True)


# ---------------------------------------------------------------- cut, or the first device alone
@slower
def test_the_first_device_alone(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    lanes: Any = [FakeLane(), FakeLane()]
    lent = Lent()
    own = Pace(lanes, "Net", lent)
    assert str(own) == "batches are cut, and not yet timed"
    ways = stepped(own, clock, SETTLED)
    assert ways == [True] * (TRIAL + 1) + [False] * TRIAL
    assert own.is_settled
    assert not own.is_cut
    assert lent.told == ["take back"]
    assert str(own) == "a step takes 1.50 times as long when its batches are cut"
    stepped(own, clock, 2000)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith("calls of Net go to cpu alone: a step takes 1.50 times as long when")


@slower
def test_a_settled_way_is_tried_again(clock: Clock) -> None:
    own = Pace([], "Net", Lent())
    own._told = True
    stepped(own, clock, SETTLED)
    clock.took_s = {True: 0.6, False: 1.0}
    ways = stepped(own, clock, 600)
    assert ways[0] is False
    assert ways[-1] is True
    assert own.is_cut
    assert not own.is_settled


# ---------------------------------------------------------------- in a loop
@pytest.fixture
def setup(clock: Clock) -> Iterator[Any]:
    """`flowdp.setup` of a model on two devices, closed at the end."""
    made: list[DataParallel] = []

    def setup(model: nn.Module, *, trains: bool = True, **options: Any) -> DataParallel:
        options = {"devices": ["cpu"] * 2, "cadence": False, "progress": False, "check": False} | options
        made.append(flowdp.setup(model, SGD(model.parameters(), 0.1) if trains else None, **options))
        return made[-1]

    yield setup
    for dp in made:
        dp.close()


class Notes:
    """What replicas have in common: containers they have of their own."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class Counting(nn.Module):
    """Notes the samples of its calls, those of all its replicas together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.notes = Notes()

    @property
    def seen(self) -> list[int]:
        return self.notes.seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        out: Tensor = self.inner(x)
        return out


def train(dp: DataParallel, clock: Clock, steps: int) -> list[bool]:
    """Whether each step was cut."""
    ways = []
    for step in range(steps):
        seen = len(dp.module.seen)
        dp(numbers(8, 6, seed=step)).square().mean().backward()
        ways.append(len(dp.module.seen) - seen == 2)
        clock.now_s += clock.took_s[ways[-1]]
        dp.step()
    return ways


@slower
def test_a_loop_goes_to_one_device_with_the_same_results(setup: Any, clock: Clock) -> None:
    model, twin = Counting(), mlp()
    dp = setup(model)
    optimizer = SGD(twin.parameters(), 0.1)
    ways = train(dp, clock, SETTLED + 20)
    for step in range(SETTLED + 20):
        twin(numbers(8, 6, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ways == [True] * (TRIAL + 1) + [False] * (TRIAL + 20)
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert dp.shard_sizes == (8, 0)
    assert repr(dp) == (
        "<DataParallel of Counting on cpu alone, of cpu, cpu; "
        "a step takes 1.50 times as long when its batches are cut>"
    )


@pytest.mark.parametrize("clock", [(0.09, 1.0)], indirect=True)
def test_no_gain_above_the_number_of_devices_is_told(clock: Clock) -> None:
    lanes: Any = [FakeLane(), FakeLane()]
    own = Pace(lanes, "Net", Lent())
    stepped(own, clock, SETTLED)
    assert str(own) == "a step takes less than 0.50 times as long when its batches are cut"


@faster
def test_a_loop_stays_cut(setup: Any, clock: Clock) -> None:
    dp = setup(Counting())
    assert repr(dp) == "<DataParallel of Counting on cpu, cpu; batches are cut, and not yet timed>"
    ways = train(dp, clock, SETTLED + 20)
    assert ways == [True] * (TRIAL + 1) + [False] * TRIAL + [True] * 20
    assert "on cpu, cpu; a step takes 0.60 times as long" in repr(dp)


@slower
@pytest.mark.parametrize("steps", [0, 3])
def test_a_loop_that_no_longer_steps_its_optimizer_is_timed_by_calls(
    setup: Any, clock: Clock, steps: int
) -> None:
    dp = setup(Counting())
    train(dp, clock, steps)
    other = SGD(dp.parameters(), 0.1)  # for the second phase of a fine-tuning
    for seed in range(STEPLESS + SETTLED + 1):
        seen = len(dp.module.seen)
        dp(numbers(8, 6, seed=seed)).sum().backward()
        clock.now_s += clock.took_s[len(dp.module.seen) - seen == 2]
        other.step()
        other.zero_grad()
    assert "on cpu alone" in repr(dp)
    left = dp._balancer.pace._worth._left
    dp.step()
    dp(numbers(8, 6)).sum().backward()
    assert dp._balancer.pace._worth._left == left - 1, "the optimizer's steps count again"


@faster
@pytest.mark.parametrize("way", ["one sample", "a method"])
def test_a_loop_that_cuts_nothing_goes_to_one_device(
    setup: Any, clock: Clock, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    dp = setup(Counting())
    for seed in range(SETTLED):
        out = dp(numbers(1, 6)) if way == "one sample" else dp.inner(numbers(8, 6, seed=seed))
        out.sum().backward()
        clock.now_s += clock.took_s[dp._balancer.pace.is_cut]
        dp.step()
    assert "on cpu alone, of cpu, cpu; no call had a batch to cut (other methods" in repr(dp)
    assert "calls of Counting go to cpu alone: no call had a batch to cut" in caplog.text


@slower
def test_without_an_optimizer_each_call_is_a_step(setup: Any, clock: Clock) -> None:
    dp = setup(Counting(), trains=False)
    for seed in range(SETTLED + 1):
        seen = len(dp.module.seen)
        dp(numbers(8, 6, seed=seed))
        clock.now_s += clock.took_s[len(dp.module.seen) - seen == 2]
    assert "on cpu alone" in repr(dp)


@slower
@pytest.mark.parametrize("options", [{"partition_ratios": (1.0, 1.0)}, {"cadence": True}])
def test_fixed_shares_and_windows_of_whole_batches_stay(
    setup: Any, clock: Clock, options: dict[str, Any]
) -> None:
    dp = setup(Counting(), **options)
    assert train(dp, clock, SETTLED + 5) == [True] * (SETTLED + 5)
    assert repr(dp) == "<DataParallel of Counting on cpu, cpu>"
