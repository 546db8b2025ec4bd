"""Tests of the bench of setup's models: each can take a step, sides take turns, and ratios are of pairs."""

from __future__ import annotations

import pytest
import torch

from bench.micro.setup_models import CASES, RATIOS, SIDES, Loop, measured


@pytest.mark.parametrize("name", CASES)
def test_each_model_takes_a_step(name: str) -> None:
    loop = Loop(name, "plain")
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    wall_ms, _ = loop.block(1)
    assert wall_ms > 0.0
    assert loop.decision() == ""
    moved = zip(before, loop.model.parameters(), strict=True)
    assert all(now.isfinite().all() and not torch.equal(was, now) for was, now in moved)


class FakeSide:
    """A side whose blocks take as long as it is told."""

    def __init__(self, name: str, ms: float, calls: list[tuple[str, int]]) -> None:
        self.name, self.ms, self.calls = name, ms, calls

    def block(self, steps: int) -> tuple[float, float]:
        self.calls.append((self.name, steps))
        return self.ms, 2 * self.ms


def test_sides_take_turns_after_a_warm_up_of_each() -> None:
    calls: list[tuple[str, int]] = []
    sides = {side: FakeSide(side, ms, calls) for side, ms in zip(SIDES, (2.0, 3.0, 4.0, 6.0), strict=True)}
    times = measured(sides, repeats=3, warm_up=70, block_ms=40.0)
    assert calls[:4] == [(side, 70) for side in SIDES]
    blocks = calls[5:]
    assert all(steps == 20 for _, steps in blocks)
    turns = [{side for side, _ in blocks[at : at + 4]} for at in range(0, 12, 4)]
    assert turns == [set(SIDES)] * 3
    ratios = {comparison.label: comparison.ratio for comparison in times.comparisons("m")}
    assert len(ratios) == 2 * len(RATIOS)
    assert ratios["m, wall, two / plain"] == 2.0
    assert ratios["m, CPU, fixed / two"] == 1.5
    assert times.cpu["plain"] == [4.0, 4.0, 4.0]
