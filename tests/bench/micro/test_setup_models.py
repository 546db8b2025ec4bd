"""Tests of the bench of setup's models: each can take a step, sides take turns, and ratios are of pairs."""

from __future__ import annotations

import pytest
import torch

from bench.micro.setup_models import CASES, Loop


@pytest.mark.parametrize("name", CASES)
def test_each_model_takes_a_step(name: str) -> None:
    loop = Loop(name, "plain")
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    wall_ms, _ = loop.block(1)
    assert wall_ms > 0.0
    assert loop.decision() == ""
    moved = zip(before, loop.model.parameters(), strict=True)
    assert all(now.isfinite().all() and not torch.equal(was, now) for was, now in moved)
