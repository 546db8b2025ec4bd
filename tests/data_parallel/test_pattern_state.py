"""Loops as people write them: where forward runs, and what a model writes, keeps and reaches."""

from __future__ import annotations

import contextvars
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flowdp
from tests.data_parallel.pairs import (
    TOLERANCE,
    Shares,
    Side,
    check,
    draw,
    everywhere,
    mlp,
    plain,
    same,
    spread,
    square,
    train,
)
from tests.limits import HANG_S

CHECKED = 8  # calls, after which a rule that compares calls 1, 2, 4, 8 has seen what they do


# ---------------------------------------------------------------- the caller's context
scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
local = threading.local()


class InContext(nn.Module):
    def __init__(self, factor: Callable[[], float], is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.factor = factor
        self.is_checkpointed = is_checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) * self.factor())

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.inner, x, use_reentrant=False) if self.is_checkpointed else self.inner(x)
        return self.out(hidden) * self.factor()


@everywhere
def test_a_context_variable_that_is_read_again_in_the_backward(shares: Shares) -> None:
    def loop(side: Side) -> None:
        for value in (3.0, 0.5, 2.0):
            token = scale.set(value)
            square(side.model(draw())).backward()
            scale.reset(token)
            side.step()

    check(loop, shares, functools.partial(InContext, scale.get, is_checkpointed=True))


@pytest.mark.parametrize("since", [1, 5])
@everywhere
def test_a_thread_local_value(shares: Shares, since: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread but the caller's has it: a call that is compared with the whole batch must notice."""
    refusal = None
    with spread(functools.partial(InContext, lambda: getattr(local, "factor", 1.0)), shares) as side:
        for number in range(1, CHECKED + 1):
            if number == since:
                monkeypatch.setattr(local, "factor", 3.0, raising=False)
            try:
                y = side.model(draw(seed=number))
            except flowdp.FlowdpError as error:
                refusal = str(error).lower()
                break
        if refusal is None:
            torch.testing.assert_close(y, side.module(draw(seed=number)), rtol=0, atol=TOLERANCE)
        else:
            assert number >= since
            assert any(word in refusal for word in ("thread", "differ", "cut"))


# ---------------------------------------------------------------- a forward that writes to parameters
class Writing(nn.Module):
    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.write = write
        self.is_writing = True
        with torch.no_grad():
            self.layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_writing:
            self.write(self)
        return self.out(torch.tanh(self.layer(x)))


def clamp(model: Any) -> None:
    model.layer.weight.data.clamp_(-0.2, 0.2)


def replace_data(model: Any) -> None:
    model.layer.weight.data = model.layer.weight.data.clamp(-0.2, 0.2)


def shrink(model: Any) -> None:
    model.layer.weight.data.mul_(0.9)


def shrink_anew(model: Any) -> None:
    model.layer.weight.data = model.layer.weight.data * 0.9


WRITES = "gives another result when the batch is cut"


@pytest.mark.parametrize("write", [clamp, replace_data, shrink, shrink_anew])
@everywhere
def test_a_forward_that_writes_to_a_parameter(write: Callable[[Any], None], shares: Shares) -> None:
    check(train, shares, functools.partial(Writing, write), refused=WRITES)


class Momentum(nn.Module):
    """The key encoder follows the query encoder in forward, as momentum encoders do."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.query, self.key = mlp(), mlp()
        self.in_place = in_place
        self.key.requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                if self.in_place:
                    k.data.mul_(0.7).add_(q.data, alpha=0.3)
                else:
                    k.data = k.data * 0.7 + q.data * 0.3
            keys = self.key(b)
        return self.query(a), keys


@pytest.mark.parametrize("in_place", [False, True])
@everywhere
def test_a_momentum_encoder(shares: Shares, in_place: bool) -> None:
    def loop(side: Side) -> list[Any]:
        seen = []
        for step in range(6):
            query, key = side.model(draw(seed=step), draw(seed=step + 9))
            seen += [query, key]
            F.cross_entropy(query @ key.T, torch.arange(len(key))).backward()
            side.step()
        return seen

    check(loop, shares, functools.partial(Momentum, in_place), refused=WRITES)


# ---------------------------------------------------------------- what forward keeps in the module


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 5), nn.Linear(5, 2)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.out(hidden)


SAMPLES = 64  # so many that a small difference in speed moves a sample


@pytest.mark.parametrize("shares", [Shares(2), Shares(2, (2.0, 1.0))], ids=str)
def test_a_hidden_state_that_forward_keeps(shares: Shares) -> None:
    """Shares begin unequal, so that they move when the speed has been measured."""
    twin = plain(Stateful)
    options: dict[str, Any] = {}
    if shares.ratios is None:
        hint = flowdp.CadenceOptions(speed_hint=(0, 3.0), max_anchor=0)
        options = {"cadence": hint}
    refusal = None
    with spread(Stateful, shares, **options) as side:
        for number in range(1, 16):
            expected = twin.model(draw(SAMPLES, seed=number))
            square(expected).backward()
            try:
                y = side.model(draw(SAMPLES, seed=number))
                square(y).backward()
            except (flowdp.FlowdpError, RuntimeError) as error:
                refusal = str(error)
                break
            torch.testing.assert_close(y, expected, rtol=0, atol=TOLERANCE)
            side.step()
            twin.step()
        if refusal is None:
            same(side.all(), twin.all())
        else:
            assert "hidden" in refusal
            assert number <= CHECKED


# ---------------------------------------------------------------- threads
@pytest.mark.parametrize("what", ["model", "module"])
@everywhere
def test_a_second_thread_evaluates(shares: Shares, what: str) -> None:
    began, stop = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def evaluate(model: nn.Module) -> None:
        try:
            while not stop.is_set():
                with torch.no_grad():
                    assert model(draw(5, seed=3)).shape == (5, 3)
                began.set()
        except BaseException as error:
            errors.append(error)
            began.set()

    def loop(side: Side) -> list[Tensor]:
        began.clear()
        stop.clear()
        model: nn.Module = getattr(side, what)
        thread = threading.Thread(target=evaluate, args=(model,))
        thread.start()
        try:
            assert began.wait(HANG_S)
            return train(side, 20)
        finally:
            stop.set()
            thread.join(HANG_S)
            assert not thread.is_alive()

    check(loop, shares, mlp)
    assert errors == []


# ---------------------------------------------------------------- functions and containers as attributes


def _louder(self: Any, x: Tensor) -> Tensor:
    return self[2](torch.sin(self[0](x))) * 2


def _replaced(layer: str, way: str) -> nn.Module:
    model = mlp()
    module: Any = model.get_submodule(layer)
    before = module.forward
    if way == "method":
        module.forward = types.MethodType(_louder if layer == "" else _doubled, module)
    elif way == "lambda":
        module.forward = lambda x: 2 * type(module).forward(module, x)
    else:
        module.forward = functools.partial(_around, before)
    return model


def _doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * F.linear(x, self.weight, self.bias)


def _around(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return 3 * forward(x)


@pytest.mark.parametrize(
    ("way", "layer", "when"),
    [
        ("method", "", "before"),
        ("method", "0", "behind"),
        ("lambda", "0", "before"),
        ("partial", "", "before"),
    ],
)
@everywhere
def test_a_forward_that_is_replaced(way: str, layer: str, when: str, shares: Shares) -> None:
    """Before `setup`, and by the loop behind the first calls."""

    def loop(side: Side) -> list[Tensor]:
        seen = train(side, 3)
        if when == "behind":
            module: Any = side.module.get_submodule(layer)
            module.forward = types.MethodType(_louder if layer == "" else _doubled, module)
        return seen + train(side, 3)

    check(loop, shares, functools.partial(_replaced, layer, way) if when == "before" else mlp)


class Remembering(nn.Module):
    """A method as an attribute reads what forward has just set: each device has another part there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.skip: Any = None
        self.way = self._way

    def _way(self, y: Tensor) -> Tensor:
        return y + self.skip

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.skip = hidden.sin()
        hidden = self.way(torch.tanh(hidden))
        self.skip = None
        return self.out(hidden)


@everywhere
def test_a_method_that_reads_what_forward_has_set(shares: Shares) -> None:
    check(functools.partial(train, steps=12), shares, Remembering)
