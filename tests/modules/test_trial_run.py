"""Tests of trials: they leave no trace in a module, and draw no random numbers."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp.modules import trial_run
from flowdp.modules.trial_run import Trials
from tests.loops import CPU, mlp, numbers


def trials(module: nn.Module, **options: Any) -> Trials:
    return Trials(module, CPU, **({"is_eval": False, "is_wide": True, "is_still": True} | options))


def run(module: nn.Module, x: Any, **options: Any) -> Any:
    return trials(module, **options).run(lambda module, given: module(given), x)


class Writing(nn.Module):
    """Writes wherever a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("made_anew", torch.zeros(2))
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.state: Any = torch.zeros(3)
        self.cache = [torch.zeros(2)]
        self.lists: Any = {"calls": [1], "seen": {1}, "last": deque([1])}
        self.calls = 0
        self.rng, self.generator = random.Random(1), np.random.default_rng(1)
        self.torch_generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        with torch.no_grad():
            self.inner[0].weight.mul_(2)
            self.frozen.data.add_(1)
            self.inner[2].weight.data = self.inner[2].weight.data + 1
        self.inner[0].bias.requires_grad_(False)
        self.count.add_(1)
        self.made_anew = torch.ones(5)
        self.state.add_(1)
        self.state = torch.ones(7)
        self.cache[0].add_(1)
        self.cache.append(torch.ones(1))
        self.lists["calls"].append(2)
        self.lists["seen"].add(2)
        self.lists["last"].popleft()
        self.lists["more"] = 1
        self.calls += 1
        self.more = 1
        self.register_buffer("late", torch.zeros(1))
        draws = [self.rng.random(), self.generator.random(), random.random(), np.random.rand()]
        torch.randn(1, generator=self.torch_generator)
        return self.inner(x) + sum(draws)


def trace(module: Any) -> Any:
    """All state of a module that can be compared."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors |= {"state": module.state, "cache": module.cache[0]}
    of_tensors = {
        name: (t.tolist(), t._version, t.data_ptr(), t.requires_grad) for name, t in tensors.items()
    }
    draws = (module.rng.getstate(), module.generator.bit_generator.state, random.getstate())
    states = [g.get_state().tolist() for g in (module.torch_generator, torch.default_generator)]
    attributes = (sorted(vars(module)), module.calls, copy.deepcopy(module.lists), len(module.cache))
    flags = [part.training for part in module.modules()]
    return of_tensors, draws, states, np.random.get_state()[1].tolist(), attributes, flags


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("is_eval", [True, False])
def test_everything_is_put_back(is_eval: bool, is_wide: bool) -> None:
    module = Writing()
    module.inner[1].eval()
    x = numbers(4, 6)
    before, given = trace(module), x.clone()
    made = trials(module, is_eval=is_eval, is_wide=is_wide)
    first = made.run(lambda module, x: module(x), x)
    assert trace(module) == before
    assert torch.equal(x, given)
    assert torch.equal(made.run(lambda module, x: module(x), x), first)
    made.run(lambda module, x: module(x), x, seed=3)
    assert trace(module) == before


def test_everything_is_put_back_behind_an_error() -> None:
    module = Writing()
    before = trace(module)
    with pytest.raises(RuntimeError, match="shapes"):
        run(module, numbers(4, 5))
    assert trace(module) == before


def test_parameters_of_16_bits_are_wide_and_come_back() -> None:
    module = nn.Linear(4, 3).bfloat16()
    before = [(p, p.data_ptr(), p._version, p.clone()) for p in module.parameters()]
    x = torch.randn(5, 4).bfloat16()
    made = trials(module)
    assert made.run(lambda module, x: module(x), x).dtype == torch.float32
    assert made.epsilon == torch.finfo(torch.float32).eps
    assert run(module, x, is_wide=False).dtype == torch.bfloat16
    for parameter, (same, address, version, values) in zip(module.parameters(), before, strict=True):
        assert parameter is same
        assert (parameter.data_ptr(), parameter._version) == (address, version)
        assert torch.equal(parameter, values)


def test_autocast_is_off_where_it_is_wide() -> None:
    module, x = nn.Linear(4, 3), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(module, x).dtype == torch.float32
        narrow = trials(module, is_wide=False)
        assert narrow.run(lambda module, x: module(x), x).dtype == torch.bfloat16
    assert narrow.epsilon == torch.finfo(torch.bfloat16).eps


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
        return (
            normal,
            words,
            chosen,
            noisy,
            dropped,
            drawn,
            attended,
            order,
            self.attention(x, x, x),
            self.rnn(x),
        )


@pytest.mark.parametrize("is_eval", [True, False])
def test_draws_are_the_same_in_every_row_and_run(is_eval: bool) -> None:
    module = Random()
    x = torch.randn(1, 3, 4).expand(20, 3, 4)
    made = trials(module, is_eval=is_eval)
    outputs = [made.run(lambda module, x: module(x), x, seed=seed) for seed in (None, 1)]
    torch.testing.assert_close(*outputs)
    normal, words, chosen, noisy, dropped, drawn, attended, order, *_ = outputs[0]
    for rows in (normal, words, chosen, *noisy, *dropped, *drawn, attended, order):
        torch.testing.assert_close(rows, rows[:1].expand_as(rows))
    assert 2 < noisy[2][0, 0] < 3
    assert attended.abs().sum() > 0
    again = [run(module, x, is_still=False) for _ in range(2)]
    assert torch.equal(again[0][0], again[1][0])  # each begins with the same states


@pytest.mark.parametrize("keeps", [True, False])
def test_a_batch_norm_uses_the_statistics_it_has(keeps: bool) -> None:
    module = nn.BatchNorm1d(3, track_running_stats=keeps)
    x = torch.randn(6, 3)
    assert torch.allclose(run(module, x)[:2], run(module, x[:2]))
    assert module.training
    assert (module.running_mean is not None) is keeps
    assert not keeps or module.num_batches_tracked == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_comes_back() -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Dropout()))
    x = torch.randn(5, 4)
    assert torch.allclose(run(module, x)[:2], run(module, x[:2]))
    assert module.training


@pytest.mark.parametrize("place", ["xpu:1", "xpu"])
def test_the_generator_of_an_accelerator_is_put_back(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generators = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.xpu, "default_generators", generators)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    assert trial_run._default_generators(torch.device(place)) == [generators[1]]
    assert trial_run._default_generators(torch.device("cpu")) == []
