"""Tests of the mode in which nothing is random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp.modules.constant_draws import TF32, ConstantDraws
from tests.loops import CPU


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
