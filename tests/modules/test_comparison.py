"""Tests of comparing outputs: equal up to rounding, or a message with the difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp.modules.comparison import TF32, ConstantDraws, compare, is_close
from tests.loops import CPU, numbers

SINGLE = torch.finfo(torch.float32).eps
HALF = torch.finfo(torch.bfloat16).eps
DOUBLE = torch.finfo(torch.float64).eps

x = numbers(8, 4)
strange = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])


@pytest.mark.parametrize(
    ("whole", "joined", "epsilon"),
    [
        (x, x * (1 + 1e-12), DOUBLE),
        (x.float(), x.float() * (1 + 1e-5), SINGLE),
        (x.bfloat16(), (x * 1.01).bfloat16(), HALF),
        (torch.tensor(2.0), torch.tensor(2.000002), SINGLE),
        (torch.tensor(1e-9), torch.tensor(-1e-9), SINGLE),  # a sum that cancels
        (strange, strange.clone(), SINGLE),
        (torch.arange(100), torch.arange(100).index_fill(0, torch.tensor(7), 3), SINGLE),  # a tie
        (torch.tensor(40), torch.tensor(41), SINGLE),
        ({"n": 3, "t": "text", "f": float("nan")}, {"n": 3, "t": "text", "f": float("nan")}, SINGLE),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), SINGLE),
        (x.to(torch.complex128), x * (1 + 1e-12), DOUBLE),
    ],
)
def test_rounding_is_no_difference(whole: Any, joined: Any, epsilon: float) -> None:
    assert compare(whole, joined, epsilon) == []


@pytest.mark.parametrize(
    ("whole", "joined", "epsilon", "text"),
    [
        (x, x * (1 + 1e-6), DOUBLE, "differs by up to"),
        (x.float(), x.float() * 1.001, SINGLE, "differs by up to"),
        (x.bfloat16(), (x * 1.3).bfloat16(), HALF, "differs by up to"),
        (
            torch.tensor(2.0),
            torch.tensor(2.0001),
            SINGLE,
            "is 2 for the whole batch, and 2.0001 for its parts",
        ),
        (strange, strange.flip(0), SINGLE, "is finite at other places"),
        (torch.ones(8), torch.ones(8, 1), SINGLE, r"has shape (8,) for the whole batch, and (8, 1)"),
        (torch.arange(100), torch.arange(100).flip(0), SINGLE, "differs at 100 of 100 places"),
        (torch.tensor(40), torch.tensor(20), SINGLE, "is 40 for the whole batch, and 20 for its parts"),
        (8, 4, SINGLE, "output is 8 for the whole batch, and 4 for its parts"),
        ([x, x], [x], SINGLE, "the whole batch gives list(*, *), its parts list(*)"),
        (np.arange(3), np.arange(2), SINGLE, "for the whole batch, and"),
    ],
)
def test_differences_have_words(whole: Any, joined: Any, epsilon: float, text: str) -> None:
    (found,) = compare(whole, joined, epsilon)
    assert text in found


def test_differences_have_a_place() -> None:
    whole = {"loss": torch.tensor(1.0), "rows": x, "n": torch.tensor(9)}
    joined = {"loss": torch.tensor(2.0), "rows": x + 1, "n": torch.tensor(3)}
    found = compare(whole, joined, SINGLE)
    assert [text.split()[0] for text in found] == ["output['loss']", "output['rows']", "output['n']"]
    assert is_close(torch.tensor(1.0), torch.tensor(1.000001), SINGLE)


class Random(nn.Module):
    """Draws random numbers in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.rnn = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        mean = x.mean(1)
        normal = torch.distributions.Normal(mean, 1.0).rsample()
        words = torch.distributions.Categorical(logits=mean).sample()
        chosen = mean.gather(1, torch.randint(1, 4, (len(x), 1)))
        noisy = [mean + torch.rand_like(mean), mean + torch.randn(mean.shape), mean.clone().uniform_(2, 3)]
        dropped = [F.dropout(mean), F.alpha_dropout(mean, training=True), torch.bernoulli(mean.sigmoid())]
        drawn = [torch.poisson(mean.exp()), mean.clone().exponential_(), mean.clone().random_(0, 9)]
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        order = mean[:, torch.randperm(4)]
        rows = [normal, words, chosen, *noisy, *dropped, *drawn, attended, order]
        return rows, self.attention(x, x, x), self.rnn(x)


@pytest.mark.parametrize("has_grad", [True, False])
def test_draws_are_the_same_in_every_row_and_run(has_grad: bool) -> None:
    module, draws = Random(), ConstantDraws()
    x = torch.randn(1, 3, 4).expand(20, 3, 4)
    with torch.set_grad_enabled(has_grad), draws:
        first = module(x)
    with torch.set_grad_enabled(has_grad), draws:
        again = module(x)
    torch.testing.assert_close(first, again)
    for rows in first[0]:
        torch.testing.assert_close(rows, rows[:1].expand_as(rows))
    uniform, attended = first[0][5], first[0][12]
    assert 2 < uniform[0, 0] < 3
    assert attended.abs().sum() > 0


def test_the_coarsest_rounding_is_noted() -> None:
    draws = ConstantDraws()
    with draws:
        torch.ones(2, dtype=torch.float64) * 2
    assert draws.epsilon == torch.finfo(torch.float64).eps == draws.rounding(torch.device("cuda"))
    with draws, torch.autocast("cpu", torch.bfloat16):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert draws.epsilon == torch.finfo(torch.bfloat16).eps
    assert not draws.has_convolved


def test_products_on_cuda_may_be_coarser() -> None:
    draws, fine = ConstantDraws(), torch.finfo(torch.float32).eps
    before = torch.get_float32_matmul_precision()
    try:
        with draws:
            nn.Linear(2, 2)(torch.ones(1, 2))
        for precision, wanted in (("high", TF32), ("highest", fine)):
            torch.set_float32_matmul_precision(precision)
            assert draws.rounding(torch.device("cuda")) == wanted
        assert draws.rounding(CPU) == fine
        with draws:
            nn.Conv1d(2, 2, 1)(torch.ones(1, 2, 2))
        assert draws.has_convolved
        assert draws.rounding(torch.device("cuda")) == TF32
    finally:
        torch.set_float32_matmul_precision(before)
