from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowdp import seed_everything
from flowdp.device.draws import OwnDraws, SeededCalls, draw_seed, generators_kept
from flowdp.errors import FlowdpError
from tests.accelerators import pretend

X = torch.ones(4, 6)
HEADS = torch.ones(1, 2, 4, 8)
STACKED = nn.LSTM(6, 6, 2, dropout=0.5)


def FIXED() -> torch.Generator:
    return torch.Generator().manual_seed(1)


DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X),
    "feature dropout": lambda: F.dropout1d(X),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.5, True),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "attention": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, dropout_p=0.5),
    "rand": lambda: torch.rand(9),
    "randn": lambda: torch.randn(3, 3, dtype=torch.float64),
    "randint": lambda: torch.randint(100, (9,)),
    "randperm": lambda: torch.randperm(50),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 100),
    "normal": lambda: torch.normal(0.0, 1.0, (9,)),
    "multinomial": lambda: torch.multinomial(X, 3),
    "bernoulli": lambda: torch.bernoulli(X / 2),
    "gumbel": lambda: F.gumbel_softmax(X),
    "gamma": lambda: torch.distributions.Gamma(X, X).sample(),
    "in place": lambda: torch.empty(9).exponential_(),
    "recurrent": lambda: STACKED(X)[0],
    "method": lambda: torch.empty(9).normal_(),
    "channels": lambda: nn.Dropout2d()(X[None, None].expand(4, 8, 4, 6)),
    "fractional": lambda: nn.FractionalMaxPool2d(2, output_size=3)(torch.randn(2, 9, 9, generator=FIXED())),
    "svd": lambda: torch.svd_lowrank(torch.arange(48.0).reshape(6, 8).sin(), 2)[0],
    "fractional in 3d": lambda: F.fractional_max_pool3d(
        torch.randn(2, 9, 9, 9, generator=FIXED()), 2, output_size=3
    ),
    "eigenvectors": lambda: torch.lobpcg(torch.diag(torch.arange(1.0, 13.0)), niter=1)[1],
    "layer": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5)(X[None]),
}


Mode = Callable[[OwnDraws], AbstractContextManager[Any]]


def drawn(draw: Callable[[], Tensor], seed: int, rank: int, mode: Mode = lambda draws: draws) -> Tensor:
    with mode(OwnDraws(seed, rank)):
        return draw()


@pytest.mark.parametrize("mode", [lambda draws: draws, SeededCalls], ids=["operations", "functions"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_rank_draws_from_its_own_generator(name: str, mode: Mode) -> None:
    if name.endswith("_like") and torch.__version__ < "2.13":
        pytest.skip("older torch has no generator for it: an error says so")
    draw = DRAWS[name]
    before = torch.get_rng_state()
    first = drawn(draw, 7, 0, mode)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)  # draws of others do not matter
    assert torch.equal(drawn(draw, 7, 0, mode), first)
    assert not torch.equal(drawn(draw, 7, 1, mode), first)
    assert not torch.equal(drawn(draw, 8, 0, mode), first)


def test_functions_that_draw_nothing_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = OwnDraws.__torch_dispatch__

    def dispatch(self: OwnDraws, func: Any, *args: Any) -> Any:
        seen.append(str(func))
        return real(self, func, *args)

    monkeypatch.setattr(OwnDraws, "__torch_dispatch__", dispatch)
    with SeededCalls(OwnDraws(7, 0)):
        (F.linear(X, torch.ones(3, 6)).relu() + 1).sum()
        assert seen == []
        F.dropout(X)
        assert seen != []


def test_a_generator_of_the_users_own_stays() -> None:
    mine = torch.Generator().manual_seed(3)
    wanted = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn(lambda: torch.rand(4, generator=mine), 7, 0), wanted)


def test_what_is_computed_again_in_a_backward_is_refused() -> None:
    x = torch.ones(4, 6, requires_grad=True)
    with OwnDraws(7, 0):
        loss = checkpoint(F.dropout, x, use_reentrant=False).sum()
        with pytest.raises(FlowdpError, match="that a backward computes again"):
            loss.backward()


def test_seeds_follow_torchs_own() -> None:
    torch.manual_seed(5)
    first = [draw_seed(), draw_seed()]
    assert first[0] != first[1]
    torch.manual_seed(5)
    assert [draw_seed(), draw_seed()] == first


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_the_same_seed_gives_the_same_draws() -> None:
    with generators_kept():
        seed_everything(3)
        first, second = draws(), draws()
        seed_everything(3)
        assert draws() == first
        seed_everything(4)
        third = draws()
    assert all(len({a, b, c}) == 3 for a, b, c in zip(first, second, third, strict=True))


def test_kept_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    with generators_kept():
        seed_everything(5)
        first = draws()
        expected = draws()
        seed_everything(5)
        assert draws() == first
        with generators_kept():
            seed_everything(6)
            draws()
        assert draws() == expected


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_devices_are_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generators = tuple(torch.Generator().manual_seed(seed) for seed in range(2))
    module = pretend(monkeypatch, kind)
    monkeypatch.setattr(module, "default_generators", generators)
    monkeypatch.setattr(module, "is_initialized", lambda: True)
    before = [generator.get_state() for generator in generators]
    with generators_kept():
        for generator in generators:
            torch.rand(3, generator=generator)
    assert all(torch.equal(own.get_state(), was) for own, was in zip(generators, before, strict=True))
