"""Tests of captured windows in a user's loop: equal to eager ones, on CPUs, fake streams and fake NCCL."""

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
from tests.collective.fake_nccl import FakeNccl
from tests.fakes import FakeCuda
from tests.wired import fake_link

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


def train(
    model: Callable[[], nn.Module], steps: int, devices: int = 2, capture: bool = False, **options: Any
) -> list[Tensor]:
    """Train; returns the losses, and the model's state."""
    torch.manual_seed(0)
    module, (x, y) = model(), data(model)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    losses = []
    if devices > 1:
        options["partition_ratios"] = [1 / devices] * devices
    with flowdp.setup(
        module, optimizer, devices=["cpu"] * devices, loss_fn=cross_entropy, capture=capture, **options
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


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("model", [mlp, cnn, gpt])
def test_captured_steps_have_the_bits_of_eager_ones(
    model: Callable[[], nn.Module], devices: int, runs: list[object]
) -> None:
    steps = 200
    eager = train(model, steps, devices)
    assert runs == []
    assert_same(eager, train(model, steps, devices, capture=True))
    assert len(runs) == devices * (steps - 3 - 8)  # three eager ones come first, and eight are compared


@pytest.fixture(params=["streams", "nccl"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """CPU devices as CUDA devices would run; at the end every access must have been ordered."""
    made = FakeCuda()
    monkeypatch.setattr(wrapper, "open_lanes", lambda devices: [StreamLane(d, made) for d in devices])
    reached: list[FakeNccl] = []
    if request.param == "nccl":
        link = fake_link(reached.append)
        monkeypatch.setattr(wrapper, "open_loop", lambda _, lanes, sizes: link(lanes, sizes))
    with made.stream(made.default):
        yield made
    assert not made.races
    assert made.captures.diverted == []
    for nccl in reached:
        assert all(is_quiet for is_quiet, _ in nccl.groups)


@pytest.mark.parametrize("buffers", ["broadcast", "average"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("model", [still_mlp, cnn])
def test_replays_are_the_eager_steps(
    model: Callable[[], nn.Module], devices: int, buffers: Any, cuda: FakeCuda, runs: list[object]
) -> None:
    eager = train(model, 40, devices, buffers=buffers)
    assert_same(eager, train(model, 40, devices, capture=True, buffers=buffers))
    assert len(runs) > 30 * devices
    assert cuda.captures.replays >= len(runs)


def test_gradients_that_a_replay_has_left_are_the_users(cuda: FakeCuda, runs: list[object]) -> None:
    """The user may keep them, and add to them."""
    x, y = data(still_mlp)
    ends = []
    for capture in (False, True):
        torch.manual_seed(0)
        module, kept = still_mlp(), []
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        options: dict[str, Any] = {"loss_fn": cross_entropy, "partition_ratios": [0.5, 0.5]}
        with flowdp.setup(module, optimizer, devices=["cpu"] * 2, capture=capture, **options) as dp:
            for number, window in enumerate(dp.epoch(list(zip(x.split(4), y.split(4), strict=True)))):
                with dp.no_sync():
                    dp.forward_batch(window)
                dp.forward_batch(window)
                kept += [one.grad for one in module.parameters() if one.grad is not None]
                optimizer.step()
                dp.zero_grad(set_to_none=number % 3 == 0)
        ends.append([*kept, *module.parameters()])
    assert_same(*ends)
    assert runs
