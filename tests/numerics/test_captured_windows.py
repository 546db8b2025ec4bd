"""Tests of captured windows in a loop on one device: equal to eager ones, on a CPU and on fake streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.models import Gpt
from flowdp.data_parallel import wrapper
from flowdp.device.streams import StreamLane
from flowdp.graphs.cpu_graph import CpuGraph
from flowdp.graphs.cuda_graph import CudaStepGraph
from tests.fakes import FakeCuda, hide_modes

SAMPLES = 64


@pytest.fixture
def lanes() -> None:
    """Replaces the fixture of all numerics: this module has its own."""


def mlp(dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 5))


def still_mlp() -> nn.Module:
    return mlp(0.0)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def gpt() -> nn.Module:
    return Gpt(2, 16, 2, 6, 11)


def cross_entropy(context: flowdp.LossContext) -> Tensor:
    return F.cross_entropy(context.output.flatten(0, -2), context.batch[1].flatten())


def data(model: Callable[[], nn.Module]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    if model is gpt:
        text = torch.randint(11, (SAMPLES, 7), generator=draw)
        return text[:, :-1], text[:, 1:]
    return torch.randn(SAMPLES, 6, generator=draw), torch.randint(5, (SAMPLES,), generator=draw)


def train(model: Callable[[], nn.Module], steps: int, capture: bool = False, **options: Any) -> list[Tensor]:
    """Train; returns the losses, and the model's state."""
    torch.manual_seed(0)
    module, (x, y) = model(), data(model)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    losses = []
    with flowdp.setup(
        module, optimizer, devices=["cpu"], loss_fn=cross_entropy, capture=capture, **options
    ) as dp:
        while len(losses) < steps:
            for window in dp.epoch(list(zip(x.split(8), y.split(8), strict=True))):
                result = dp.forward_batch(window)
                assert result.loss is not None
                losses.append(result.loss)
                dp.step()
        assert dp.uncaptured == ()
    return [*losses, *module.state_dict().values()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(mine, theirs), place


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs, in the order of their runs."""
    seen: list[object] = []

    def counted(kind: type) -> None:
        own = kind.run  # type: ignore[attr-defined]

        def run(graph: Any, *arguments: Any) -> Any:
            seen.append(graph)
            return own(graph, *arguments)

        monkeypatch.setattr(kind, "run", run)

    counted(CpuGraph)
    counted(CudaStepGraph)
    return seen


@pytest.mark.parametrize("model", [mlp, cnn, gpt])
def test_captured_steps_have_the_bits_of_eager_ones(
    model: Callable[[], nn.Module], runs: list[object]
) -> None:
    steps = 200
    eager = train(model, steps)
    assert runs == []
    assert_same(eager, train(model, steps, capture=True))
    assert len(runs) == steps - 3 - 8  # three eager ones come first, and eight are compared


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A CPU device as a CUDA device would run; at the end every access must have been ordered."""
    made = FakeCuda()
    hide_modes(monkeypatch.setattr)
    monkeypatch.setattr(wrapper, "open_lanes", lambda devices: [StreamLane(d, made) for d in devices])
    with made.stream(made.default):
        yield made
    assert not made.races
    assert made.captures.diverted == []


@pytest.mark.parametrize("model", [still_mlp, cnn])
def test_replays_are_the_eager_steps(
    model: Callable[[], nn.Module], cuda: FakeCuda, runs: list[object]
) -> None:
    eager = train(model, 40)
    assert_same(eager, train(model, 40, capture=True))
    assert len(runs) > 30
    assert cuda.captures.replays >= len(runs)


def test_gradients_that_a_replay_has_left_are_the_users(cuda: FakeCuda, runs: list[object]) -> None:
    """The user may keep them, and add to them."""
    x, y = data(still_mlp)
    ends = []
    for capture in (False, True):
        torch.manual_seed(0)
        module, kept = still_mlp(), []
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        with flowdp.setup(module, optimizer, devices=["cpu"], capture=capture, loss_fn=cross_entropy) as dp:
            for number, window in enumerate(dp.epoch(list(zip(x.split(4), y.split(4), strict=True)))):
                for _ in range(2):
                    dp.forward_batch(window)
                kept += [one.grad for one in module.parameters() if one.grad is not None]
                optimizer.step()
                dp.zero_grad(set_to_none=number % 3 == 0)
        ends.append([*kept, *module.parameters()])
    assert_same(*ends)
    assert runs
