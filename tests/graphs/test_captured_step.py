"""Tests of the switch between eager and captured steps: when a graph runs, and its comparison with eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.device.draws import OwnDraws
from flowdp.device.streams import HostLane
from flowdp.graphs.base import Computed, Factors, Passed, shared
from flowdp.graphs.captured_step import Captured
from flowdp.options import CaptureOptions
from flowdp.replica.captured_steps import Capturing

CPU = torch.device("cpu")
X = torch.arange(6.0).reshape(2, 3)
HALF = Factors(0.5, 0)


class Rank:
    """A minimal captured step: a mean of squares, and further outputs."""

    has_stepped = True
    shares_generator = False
    casts = obstacle = None
    has_flat_gradients = False
    gives_gradients = True
    draws: OwnDraws | None = None

    def __init__(self, outputs: Callable[[Tensor], Any] = lambda made: None) -> None:
        self.module = nn.Linear(3, 2)
        self.lane = HostLane(CPU)
        self.outputs = outputs
        self.told: list[str] = []
        own = {"": self.module}
        self.captured: Captured = Capturing(CaptureOptions()).of(self, outputs, own, own)

    @property
    def trained(self) -> list[Tensor]:
        return list(self.module.parameters())

    def forward(self, batch: Any, worker: Any, share: float | Tensor, of: int | Tensor) -> Passed:
        made = self.module(batch)
        loss = made.square().mean()
        weighed = shared(loss, share) if isinstance(share, Tensor) else loss * share
        return Passed(weighed, outputs=self.outputs(made))

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def compute(self, batch: Any, worker: Any, factors: Factors) -> Computed:
        passed = self.forward(batch, worker, factors.share, factors.of)
        passed.loss.backward()  # type: ignore[no-untyped-call]
        return Computed(passed.loss.detach(), outputs=passed.outputs)

    def run(self, batch: Tensor = X) -> Computed:
        computed = self.captured.run(batch, None, HALF)
        return self.compute(batch, None, HALF) if computed is None else computed

    def until_captured(self) -> None:
        """Two eager steps, then comparisons at captured steps 1, 2 and 4; the next one has none."""
        for _ in range(7):
            self.clear()
            self.run()
        assert self.captured.is_running

    def clear(self) -> None:
        for parameter in self.trained:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self.trained if one.grad is not None]


def test_a_gradient_that_was_given_away_is_not_written_to() -> None:
    rank = Rank()
    rank.until_captured()
    kept = rank.gradients()
    values = [one.clone() for one in kept]
    for _ in range(2):
        rank.clear()
        rank.run(X + 1)
    assert all(map(torch.equal, kept, values))
    assert not any(one is other for one in kept for other in rank.gradients())


def test_gradients_that_are_there_are_added_to() -> None:
    rank = Rank()
    rank.until_captured()
    kept = rank.gradients()
    once = [one.clone() for one in kept]
    for _ in range(2):
        rank.captured.run(X, None, HALF)
    assert all(one is other for one, other in zip(kept, rank.gradients(), strict=True))
    torch.testing.assert_close(kept, [3 * one for one in once])


def test_results_are_the_tree_of_the_eager_step() -> None:
    rank = Rank(lambda made: {"made": made, "pair": (made.sum(), None), "name": "a", "none": []})
    rank.until_captured()
    computed = rank.run()
    assert rank.captured.is_running
    eager = rank.compute(X, None, HALF)
    assert list(computed.outputs) == list(eager.outputs)
    assert torch.equal(computed.outputs["made"], eager.outputs["made"])
    assert torch.equal(computed.outputs["pair"][0], eager.outputs["pair"][0])
    assert (computed.outputs["name"], computed.outputs["none"]) == ("a", [])
    before = computed.outputs["made"].clone()
    rank.run(X + 1)
    assert torch.equal(computed.outputs["made"], before)


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        (lambda made: {"a": made * random.random()}, r"the result['a'] differs by"),
        (lambda made: (made, random.random()), "the result[1] is"),
        (lambda made: [made] * random.choice(range(1, 50)), "it returns another structure"),
        (lambda made: {"a": object()}, "the model returns a object"),
    ],
)
def test_a_result_that_is_another_ends_it(outputs: Callable[[Tensor], Any], told: str) -> None:
    random.seed(0)
    rank = Rank(outputs)
    for _ in range(12):
        rank.clear()
        rank.run()
    assert rank.captured.ended is not None
    assert told in rank.captured.ended


def test_it_is_given_up_once(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    rank.captured.give_up("first")
    rank.captured.give_up("second")
    assert rank.captured.ended == "first"
    assert rank.captured.run(X, None, HALF) is None
    assert len(caplog.messages) == 1


def test_under_another_mode_it_gets_another_graph() -> None:
    rank = Rank()
    rank.until_captured()
    with OwnDraws(1):
        rank.run()
        assert not rank.captured.is_running
    rank.run()
    assert rank.captured.is_running


def test_two_parameters_with_one_gradient_get_memory_of_their_own() -> None:
    rank = Rank()
    rank.module.register_parameter("twin", nn.Parameter(torch.zeros(2)))

    def forward(batch: Any, worker: Any, share: float | Tensor, of: int | Tensor) -> Passed:
        made = rank.module(batch).sum(0) + rank.module.twin
        loss = made.sum()  # whose gradient is expanded
        return Passed(shared(loss, share) if isinstance(share, Tensor) else loss * share)

    rank.forward = forward  # type: ignore[method-assign]
    rank.until_captured()
    weight, bias, twin = rank.gradients()
    assert len({one.data_ptr() for one in (weight, bias, twin)}) == 3
    assert (bias.stride(), weight.stride()) == ((1,), (3, 1))
