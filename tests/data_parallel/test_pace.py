"""Tests of the choice between cut batches and the first device alone, in loops."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import flowdp
from flowdp import DataParallel
from flowdp.data_parallel import pace
from flowdp.data_parallel.pace import Pace
from flowdp.policy.worth import BLOCK_STEPS, BLOCKS, WARM_STEPS
from tests.loops import assert_equal, mlp, numbers

pytestmark = pytest.mark.pace

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


def stepped(own: Pace, clock: Clock, steps: int, samples: int = 8) -> list[bool]:
    ways = []
    for _ in range(steps):
        ways.append(own.is_cut)
        own.note(samples)
        clock.now_s += clock.took_s[own.is_cut]
        own.step()
    return ways


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(*request.param)
    monkeypatch.setattr(pace, "perf_counter", made)
    return made


faster = pytest.mark.parametrize("clock", [(0.6, 1.0)], indirect=True)
slower = pytest.mark.parametrize("clock", [(1.5, 1.0)], indirect=True)


# ---------------------------------------------------------------- by itself
@slower
def test_the_first_device_alone(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    lanes: Any = [FakeLane(), FakeLane()]
    own = Pace(lanes, "Net")
    assert str(own) == "batches are cut, and not yet timed"
    ways = stepped(own, clock, SETTLED)
    assert ways == [True] * (TRIAL + 1) + [False] * TRIAL
    assert own.is_settled
    assert not own.is_cut
    assert str(own) == "a step takes 1.50 times as long when its batches are cut"
    stepped(own, clock, 2000)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith("calls of Net go to cpu alone: a step takes 1.50 times as long when")


@slower
def test_a_settled_way_is_tried_again(clock: Clock) -> None:
    own = Pace([], "Net")
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


@faster
def test_a_loop_stays_cut(setup: Any, clock: Clock) -> None:
    dp = setup(Counting())
    assert repr(dp) == "<DataParallel of Counting on cpu, cpu; batches are cut, and not yet timed>"
    ways = train(dp, clock, SETTLED + 20)
    assert ways == [True] * (TRIAL + 1) + [False] * TRIAL + [True] * 20
    assert "on cpu, cpu; a step takes 0.60 times as long" in repr(dp)


@slower
@pytest.mark.parametrize("options", [{"partition_ratios": (1.0, 1.0)}, {"cadence": True}])
def test_fixed_shares_and_windows_of_whole_batches_stay(
    setup: Any, clock: Clock, options: dict[str, Any]
) -> None:
    dp = setup(Counting(), **options)
    assert train(dp, clock, SETTLED + 5) == [True] * (SETTLED + 5)
    assert repr(dp) == "<DataParallel of Counting on cpu, cpu>"
