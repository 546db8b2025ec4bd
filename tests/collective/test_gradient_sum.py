"""Tests of sums of gradients over ranks."""

from __future__ import annotations

import torch
from torch import nn

from flowdp.collective.gradient_sum import accumulate, add_up, has_hooks, without_hooks
from tests.loops import assert_equal


def test_sums_leave_what_they_sum_alone() -> None:
    one, other, third = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    ranks = [[one, None, None], [other, other, None], [None, third, None]]
    assert_equal(add_up(ranks), [third, 5 * one, None])
    assert (one[0], other[0], third[0]) == (1, 2, 3)
    (shared,) = add_up([[one.expand(2)], [one.expand(2)]])
    assert shared is not None
    assert shared.tolist() == [2.0, 2.0]


def test_accumulating_is_what_a_backward_does() -> None:
    weight, other, idle = (nn.Parameter(torch.ones(2)) for _ in range(3))
    weight.grad = torch.ones(2)
    accumulate([weight, other, idle], [torch.full((2,), 2.0), torch.ones(2), None])
    assert_equal([weight.grad, other.grad, idle.grad], [torch.full((2,), 3.0), torch.ones(2), None])
    accumulate([idle], [None])
    accumulate([], [])
    assert idle.grad is None


def test_hooks_are_held_back_for_a_while() -> None:
    weight = nn.Parameter(torch.ones(2))
    seen: list[float] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    assert has_hooks([weight])
    with without_hooks([weight]):
        assert not has_hooks([weight])
        weight.sum().backward()
    weight.sum().backward()
    assert seen == [4.0]
