"""Tests of windows: the gradient of one batch of all samples."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.data_parallel.loss_context import BatchPlan, Inputs, LossContext
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.windows import Piece, Window, WindowResult, run_window
from flowdp.errors import FlowdpError
from tests.loops import CPU, assert_equal, gradients, mlp, numbers, replicas_of
from tests.wired import wired


def batch(samples: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    x = numbers(samples, 6, seed=seed)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def window_of(*pieces: tuple[int, int]) -> Window:
    """A window of batches (rank, samples)."""
    return Window([Piece(rank, batch(n, seed), n) for seed, (rank, n) in enumerate(pieces)], CPU)


def cross_entropy(context: LossContext) -> Tensor:
    return F.cross_entropy(context.output, context.batch[1])


def plan_of(module: nn.Module, loss: Any = cross_entropy, tags: tuple[str, ...] = ()) -> BatchPlan:
    return BatchPlan(Inputs(None, module), tags, loss)


class World:
    """A model on some devices, and its copy on one."""

    def __init__(self, module: nn.Module, replicas: Replicas) -> None:
        self.module: Any = module
        self.replicas = replicas
        self.twin: Any = copy.deepcopy(module)
        self.plan = plan_of(module, tags=("0", "2"))

    def run(self, window: Window, *, scale: Any = None, **changes: Any) -> WindowResult:
        return run_window(window, replace(self.plan, **changes), self.replicas, scale=scale)

    def check(self) -> None:
        assert_equal(gradients(self.module), gradients(self.twin))


@pytest.fixture(params=["3", "2 on nccl"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    module = mlp()
    count, _, on_nccl = request.param.partition(" on ")
    with wired(module, int(count)) if on_nccl else replicas_of(module, int(count)) as replicas:
        yield World(module, replicas)


def ragged() -> Window:
    """Batches of different lengths; with three devices the last one has none."""
    return window_of((0, 4), (1, 6), (0, 4), (1, 3))


# ---------------------------------------------------------------- results
def test_gradients_loss_and_outputs_are_those_of_one_big_batch(world: World) -> None:
    window = ragged()
    result = world.run(window)
    x, y = window  # a window unpacks like a batch
    out = world.twin(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    world.check()
    assert result.loss is not None
    assert_equal(
        [result.loss, result.output, result.tags["2"], result.traces["0"][0]],
        [loss.detach(), out.detach(), out.detach(), world.twin[0](x).detach()],
    )
    assert result.samples == window.samples == len(x)
    assert not any(t.requires_grad for t in (result.loss, result.output, result.tags["0"]))


def test_the_loss_function_sees_its_batch_with_graph_tags_and_traces(world: World) -> None:
    seen: list[LossContext] = []

    def loss(context: LossContext) -> Tensor:
        seen.append(context)
        return cross_entropy(context) + 0.1 * context.tags["0"].square().mean()

    window = ragged()
    world.run(window, loss=loss)
    assert sorted(len(c.output) for c in seen) == sorted(piece.samples for piece in window.pieces)
    assert all(c.tags["0"] is c.traces["0"][-1] for c in seen)
    hidden = world.twin[0](window[0])
    (F.cross_entropy(world.twin[2](hidden.tanh()), window[1]) + 0.1 * hidden.square().mean()).backward()
    world.check()


# ---------------------------------------------------------------- memory
def test_each_device_has_one_graph_at_a_time() -> None:
    alive: dict[str, weakref.WeakSet[Tensor]] = {}
    most: dict[str, int] = {}

    class Mark(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            name = threading.current_thread().name
            hidden = self.inner(x)
            mine = alive.setdefault(name, weakref.WeakSet())
            mine.add(hidden)
            most[name] = max(most.get(name, 0), len(mine))
            out: Tensor = hidden.sin()
            return out

    module = Mark()
    with replicas_of(module) as replicas:
        result = run_window(window_of(*[(0, 2), (1, 2)] * 4), plan_of(module), replicas)
        gc.collect()
        assert most == {"flowdp-replica-0": 1, "flowdp-replica-1": 1}
        assert not any(map(len, alive.values()))
        assert len(result.output) == 16


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda c: c.output.sum(1), r"one number.*not of shape \("),
        (lambda c: None, "not NoneType"),
        (lambda c: c.output.detach().sum(), "depends on no parameter"),
    ],
)
def test_a_loss_that_is_none(world: World, loss: Any, message: str) -> None:
    with pytest.raises(FlowdpError, match=message):
        world.run(ragged(), loss=loss)
    assert world.run(ragged()).loss is not None


def test_after_an_error_nothing_of_it_is_left() -> None:
    """The last batch of the second device fails when its first one has gone through its backward."""

    def loss(context: LossContext) -> Tensor:
        if len(context.output) == 3:
            raise KeyError("mine")
        return cross_entropy(context)

    module = mlp()
    with replicas_of(module) as replicas:
        world = World(module, replicas)
        window = ragged()
        with pytest.raises(KeyError, match="mine") as caught:
            world.run(window, loss=loss)
        assert caught.value.__notes__ == ["flowdp: on rank 1, cpu"]
        assert not any(gradient is not None for gradient in gradients(module))
        world.run(window)
        F.cross_entropy(world.twin(window[0]), window[1]).backward()
        world.check()


# ---------------------------------------------------------------- a window
def test_fields_of_a_window_are_joined_in_order() -> None:
    window = Window([Piece(r, {"n": torch.arange(n), "s": "k"}, n) for r, n in ((1, 2), (0, 3))], CPU)
    assert window["n"].tolist() == [0, 1, 0, 1, 2]
    assert window["s"] == "k"
    assert window.per_rank(3) == ([3, 2, 0], [1, 1, 0])
    with pytest.raises(KeyError):
        window["m"]


def test_batches_arrive_before_they_are_used() -> None:
    arrived: list[int] = []
    pieces = [Piece(r, batch(2), 2, lambda r=r: arrived.append(r)) for r in (0, 1)]  # type: ignore[misc]
    module = mlp()
    with replicas_of(module) as replicas:
        for loss in (cross_entropy, None):
            run_window(Window(pieces, CPU), plan_of(module, loss), replicas)
            assert sorted(arrived) == [0, 1]
            arrived.clear()
    _ = Window(pieces, CPU)[0]
    assert sorted(arrived) == [0, 1]


@pytest.mark.parametrize(("devices", "check"), [(1, True), (2, False), (2, True)])
def test_parameters_of_the_loss_are_refused(devices: int, check: bool) -> None:
    """Their gradient would be lost; on one device they get it."""
    scale = nn.Parameter(torch.ones(()).double())
    dp = flowdp.setup(
        mlp(),
        loss_fn=lambda context: (context.output * scale).square().mean(),
        devices=[CPU] * devices,
        cadence=True,
        check=check,
        progress=False,
    )
    window = next(iter(dp.epoch([numbers(4, 6)] * 2)))
    told = r"the loss of a window uses a tensor of shape \(\).* compute the loss of result.output"
    with pytest.raises(FlowdpError, match=told) if devices == 2 and check else nullcontext():
        dp.forward_batch(window)
    assert (scale.grad is None) is (devices == 2)
    dp.close()


@pytest.mark.parametrize("cadence", [True, False])
def test_a_loss_with_a_gradient_penalty(cadence: bool) -> None:
    def loss(context: LossContext) -> Tensor:
        (slope,) = torch.autograd.grad(context.output.sum(), context.batch, create_graph=True)
        own = torch.ones(()).double().requires_grad_()  # a leaf of one loss alone
        return (context.output * own).square().mean() + slope.square().mean()

    found = []
    for devices in (1, 2):
        model = mlp()
        dp = flowdp.setup(
            model, loss_fn=loss, devices=[CPU] * devices, cadence=cadence and devices > 1, progress=False
        )
        for batch in dp.epoch([numbers(4, 6).requires_grad_() for _ in range(4)]):
            dp.forward_batch(batch)
            found.append(gradients(model))
            break
        dp.close()
    assert_equal(*found)
