"""Loops as people write them: several models, several backwards, gradients of gradients, kinds of layers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import flowdp
from tests.data_parallel.pairs import (
    Make,
    Shares,
    Side,
    check,
    draw,
    everywhere,
    mlp,
    repeated,
    spread,
    square,
    train,
)

STEPS = 4


# ---------------------------------------------------------------- several models
def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))


def gan_of_two_backwards(g: Side, d: Side) -> None:
    for step in range(STEPS):
        fake = g.model(draw(8, 4, seed=step))
        (
            F.softplus(d.model(fake.detach())).mean() + F.softplus(-d.model(draw(8, seed=step))).mean()
        ).backward()
        d.step()
        F.softplus(-d.model(fake)).mean().backward()
        d.optimizer.zero_grad()
        g.step()


def gan_of_one_backward(g: Side, d: Side) -> None:
    """Both losses in one graph: the critic is frozen for the generator's."""
    for step in range(STEPS):
        fake = g.model(draw(8, 4, seed=step))
        on_d = F.softplus(d.model(fake.detach())).mean() + F.softplus(-d.model(draw(8, seed=step))).mean()
        d.model.requires_grad_(False)
        on_g = F.softplus(-d.model(fake)).mean()
        d.model.requires_grad_(True)
        (on_d + on_g).backward()
        d.step()
        g.step()


def wgan_gp(g: Side, d: Side) -> None:
    for step in range(STEPS):
        real, fake = draw(8, seed=step), g.model(draw(8, 4, seed=step))
        mix = (0.3 * real + 0.7 * fake).detach().requires_grad_()
        (slope,) = torch.autograd.grad(d.model(mix).sum(), mix, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        (d.model(fake.detach()).mean() - d.model(real).mean() + 10 * penalty).backward()
        d.step()
        (-d.model(fake).mean()).backward()
        d.optimizer.zero_grad()
        g.step()


def one_inside_the_other(g: Side, d: Side) -> None:
    """A module of the loop's own that calls both."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = g.model, d.model

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.second(self.first(x)))

    both = Both()
    for step in range(STEPS):
        square(both(draw(7, 4, seed=step)) - 0.5).backward()
        g.step()
        d.step()


def cycle(g: Side, d: Side) -> None:
    """Each model is called twice, on what the other has made of it."""
    lift = draw(1, 1, 4, seed=9)[0]
    for step in range(STEPS):
        z = draw(8, 4, seed=step)
        again = g.model(d.model(g.model(z)) @ lift)
        (square(again - g.model(z)) + square(d.model(again))).backward()
        g.step()
        d.step()


@pytest.mark.parametrize(
    "loop",
    [
        gan_of_two_backwards,
        gan_of_one_backward,
        wgan_gp,
        one_inside_the_other,
        cycle,
    ],
)
@everywhere
def test_two_models(loop: Callable[[Side, Side], None], shares: Shares) -> None:
    check(loop, shares, generator, critic)


# ---------------------------------------------------------------- backwards


def attack(side: Side) -> Tensor:
    """Steps along the gradient of the input, then training on the result."""
    x = draw()
    for _ in range(3):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(square(side.model(x)), x)
        x = x + 0.1 * slope.sign()
    square(side.model(x.detach()) - 1).backward()
    return x


def third_order(side: Side) -> tuple[Tensor, ...]:
    x = draw().requires_grad_()
    y = side.model(x).sin().sum()
    for _ in range(2):
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        y = slope.square().sum()
    return torch.autograd.grad(y, list(side.module.parameters()), materialize_grads=True)


def several_roots(side: Side) -> None:
    first, second = side.model(draw()), side.model(draw(5, seed=1))
    torch.autograd.backward([square(first), second], [None, torch.ones_like(second)])


def output_changed_in_place(side: Side) -> Tensor:
    y = side.model(draw())
    y += 1
    y[:, 0] = 0
    y.relu_()
    square(y).backward()
    return y


def part_of_the_output(side: Side) -> None:
    """No gradient comes to the rows of some devices."""
    square(side.model(draw())[:1]).backward()


def output_thrown_away(side: Side) -> None:
    side.model(draw(seed=2))
    y = side.model(draw())
    del y
    square(side.model(draw(6))).backward()


def sharpness_aware(side: Side) -> None:
    square(side.model(draw())).backward()
    moves = []
    with torch.no_grad():
        for parameter in side.module.parameters():
            assert parameter.grad is not None
            move = 0.1 * parameter.grad / (parameter.grad.norm() + 1e-12)
            parameter.add_(move)
            moves.append(move)
    side.model.zero_grad()
    square(side.model(draw())).backward()
    with torch.no_grad():
        for parameter, move in zip(side.module.parameters(), moves, strict=True):
            parameter.sub_(move)


@pytest.mark.parametrize(
    "way",
    [
        attack,
        third_order,
        several_roots,
        output_changed_in_place,
        part_of_the_output,
        output_thrown_away,
        sharpness_aware,
    ],
)
@everywhere
def test_backwards(way: Callable[[Side], Any], shares: Shares) -> None:
    check(repeated(way), shares, mlp)


@everywhere
def test_a_second_backward_without_a_kept_graph_is_torchs_error(shares: Shares) -> None:
    with spread(mlp, shares) as side:
        y = square(side.model(draw()))
        y.backward()
        with pytest.raises((RuntimeError, flowdp.FlowdpError), match="second time"):
            y.backward()
        side.step()
        train(side, 2)


@everywhere
def test_writes_of_the_loop_between_steps(shares: Shares) -> None:
    """A saved state loaded, weights swapped for an average, a vector of all parameters, weights clipped."""

    def loop(side: Side) -> list[Tensor]:
        state = copy.deepcopy(side.model.state_dict())
        seen = train(side, 2)
        parameters = list(side.module.parameters())
        kept = [p.data.clone() for p in parameters]
        for p in parameters:
            p.data.mul_(0.5)
        with torch.no_grad():
            seen.append(side.model(draw()))
        for p, data in zip(parameters, kept, strict=True):
            p.data = data
        seen += train(side, 2)
        vector = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(vector * 0.9, parameters)
        seen += train(side, 2)
        side.model.load_state_dict(state)
        seen += train(side, 2)
        for p in parameters:
            p.data.clamp_(-0.3, 0.3)
        return seen + train(side, 2)

    check(loop, shares, mlp)


@everywhere
def test_a_target_network(shares: Shares) -> None:
    """A copy of the module, after calls, is a plain module that follows it slowly."""

    def loop(side: Side) -> list[Tensor]:
        seen = train(side, 2)
        target = copy.deepcopy(side.module)
        for step in range(STEPS):
            with torch.no_grad():
                wanted = target(draw(seed=step))
            square(side.model(draw(seed=step)) - wanted - 1).backward()
            side.step()
            for slow, fast in zip(target.parameters(), side.module.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)
        return [*seen, *target.parameters()]

    check(loop, shares, mlp)


# ---------------------------------------------------------------- kinds of models
class Tied(nn.Module):
    """A weight under two names, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)
        self.again = nn.Linear(6, 4)
        self.again.weight = self.first.weight
        self.same = self.inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.same(torch.tanh(self.inner(torch.tanh(self.first(x)))))
        return self.last(y) + self.again(x).sin() @ self.first.weight


class Sequence(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cells = nn.LSTMCell(3, 4) if kind == "cells" else None
        self.layers = nn.LSTM(3, 4, num_layers=2, batch_first=True) if kind == "lstm" else None
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), -1, 3)
        if self.layers is not None:
            return self.out(self.layers(x)[0])
        assert self.cells is not None
        state = None
        for step in range(x.shape[1]):
            state = self.cells(x[:, step], state)
        assert state is not None
        return self.out(state[0])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x.view(len(x), -1, 6).expand(-1, 3, -1)))


class Partial(nn.Module):
    """A frozen layer, one that is never used, and one under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused, self.blind = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)
        self.unused.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hint = self.blind(x)
        return self.out(torch.tanh(self.frozen(x)) + hint)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), mlp()
        self.register_buffer("std", torch.rand(6) + 1)
        self.std: Tensor

    def _run(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(x) / self.std)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self._run, self.first(x), use_reentrant=False)
        assert isinstance(y, Tensor)
        return y


def with_weight_norm() -> nn.Module:
    model = mlp()
    parametrizations.weight_norm(model.get_submodule("0"))
    return model


def with_spectral_norm() -> nn.Module:
    model = mlp()
    parametrizations.spectral_norm(model.get_submodule("0"))
    return model


def with_old_weight_norm() -> nn.Module:
    model = mlp()
    nn.utils.weight_norm(model.get_submodule("0"))
    return model


MODELS: dict[str, Make] = {
    "tied": Tied,
    **{kind: functools.partial(Sequence, kind) for kind in ("lstm", "cells")},
    "transformer": Transformer,
    "partly trained": Partial,
    "checkpointed": Checkpointed,
    "weight norm": with_weight_norm,
    "spectral norm": with_spectral_norm,
    "old weight norm": with_old_weight_norm,
}


def two_calls(side: Side) -> list[Tensor]:
    seen = train(side, 2)
    for step in range(2):
        (square(side.model(draw(seed=step))) + side.model(draw(5, seed=step + 4)).abs().mean()).backward()
        side.step()
    side.model.eval()
    with torch.no_grad():
        seen.append(side.model(draw()))
    side.model.train()
    return seen + train(side, 1)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
@everywhere
def test_kinds_of_models(kind: str, shares: Shares) -> None:
    check(two_calls, shares, MODELS[kind])


@everywhere
def test_autocast(shares: Shares) -> None:
    """Parts of 16 bits round otherwise than the whole: gradients agree in the digits that they have."""

    def loop(side: Side) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        seen = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                y = side.model(draw(seed=step).float())
                again = side.model(draw(seed=step + 5).float())
            assert y.dtype == torch.bfloat16
            scaler.scale(y.float().square().mean() + again.float().mean()).backward()
            scaler.unscale_(side.optimizer)
            seen += [y.float(), again.float(), *(p.grad.clone() for p in side.module.parameters())]
            scaler.step(side.optimizer)
            scaler.update()
            side.optimizer.zero_grad()
        return seen

    check(loop, shares, mlp, atol=0.03, dtype=torch.float32)
