"""Tests of a converted model on several devices: equal to BatchNorm on one, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flowdp
from flowdp.data_parallel import wrapper
from flowdp.device.streams import StreamLane
from tests.collective.fake_world import in_threads
from tests.fakes import FakeCuda, hide_modes
from tests.limits import HANG_S
from tests.loops import assert_equal, gradients, numbers

STEPS = 8
SIZES = (22, 9, 3, 2)
TOLERANCE = 1e-10
convert = nn.SyncBatchNorm.convert_sync_batchnorm


class Network(nn.Module):
    """From images to three numbers; one norm is called twice, one has no momentum, one no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.early = nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 1)
        self.late = nn.BatchNorm1d(4, momentum=None)
        self.bare = nn.BatchNorm1d(4, affine=False)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(self.conv(x)).relu()
        x = self.early(self.again(x)).tanh().mean((2, 3))
        return self.out(self.bare(self.late(x)))


class Recomputed(Network):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


def network(kind: type[Network] = Network) -> Any:
    torch.manual_seed(2)
    return kind().double()


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(count):
        x = numbers(SIZES[number % len(SIZES)], 2, 3, 3, seed=number) + 5
        yield x, (x.mean((1, 2, 3)) > 5).long()


def train(call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    seen = []
    for x, y in batches():
        x.requires_grad_()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        seen += [loss.detach(), x.grad]
    return seen


def momentum(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def check_equal(model: nn.Module, twin: nn.Module) -> None:
    mine, theirs = model.state_dict(), twin.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.fixture
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda | None]:
    """Plain CPU devices, and as CUDA devices would run, on fake streams."""
    if getattr(request, "param", "cpu") == "cpu":
        yield None
        return
    cuda = FakeCuda()
    hide_modes(monkeypatch.setattr)
    monkeypatch.setattr(wrapper, "open_lanes", lambda devices: [StreamLane(d, cuda) for d in devices])
    yield cuda
    assert not cuda.races


BOTH = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)


# ---------------------------------------------------------------- setup
@BOTH
@pytest.mark.parametrize(
    ("buffers", "count", "fast"), [("broadcast", 1, 1), ("average", 2, 6), ("broadcast", 4, 1)]
)
def test_a_loop_of_ones_own(lanes: FakeCuda | None, buffers: Any, count: int, fast: float) -> None:
    twin = network()
    model = convert(network())
    optimizer = momentum(model.parameters())
    cadence = flowdp.CadenceOptions(max_anchor=0, speed_hint=(0, fast)) if count > 1 else False
    with (
        nullcontext() if lanes is None else lanes.stream(lanes.default),
        flowdp.setup(model, optimizer, devices=["cpu"] * count, cadence=cadence, buffers=buffers) as dp,
    ):
        assert_equal(train(dp, optimizer), train(twin, momentum(twin.parameters())))
        assert count == 1 or sum(map(bool, dp.shard_sizes)) > 1
        with torch.no_grad():  # statistics are updated without gradients, too
            assert_equal([dp(numbers(5, 2, 3, 3))], [twin(numbers(5, 2, 3, 3))])
        dp.eval()
        twin.eval()
        assert_equal([dp(numbers(5, 2, 3, 3))], [twin(numbers(5, 2, 3, 3))])
    check_equal(model, twin)
    assert type(model.early) is nn.SyncBatchNorm
    assert "forward" not in model.early.__dict__


def test_what_is_recomputed_in_backward_meets_again() -> None:
    model, twin = convert(network(Recomputed)), network(Recomputed)
    with flowdp.setup(model, momentum, devices=["cpu"] * 2) as dp:
        x, y = next(batches())
        for call in (dp, twin):
            F.cross_entropy(call(x), y).backward()
    assert_equal(gradients(model), gradients(twin))


def test_a_rank_that_fails_is_the_error_that_is_seen() -> None:
    class Fragile(Network):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 1000).any():
                raise KeyError("a thousand")
            return super().forward(x)

    model, twin = convert(network(Fragile)), network()
    x, y = next(batches())
    bad = x.clone()
    bad[-1] = 1000.0
    with flowdp.setup(model, momentum, devices=["cpu"] * 3) as dp:
        for _ in range(2):
            with pytest.raises(KeyError, match="a thousand") as found:
                dp(bad)
            assert any("rank 2" in note for note in found.value.__notes__)
        F.cross_entropy(dp(x), y).backward()  # and the next call works as before
        F.cross_entropy(twin(x), y).backward()
    assert_equal(gradients(model), gradients(twin))


# ---------------------------------------------------------------- manual control
def part(rank: int, step: int, size: int = 7) -> tuple[Tensor, Tensor]:
    x = numbers(size, 2, 3, 3, seed=10 * step + rank) + rank
    return x, (x.mean((1, 2, 3)) > 0.5).long()


def by_hand(world_size: int) -> nn.Module:
    """BatchNorm on one device with the same samples."""
    twin = network()
    optimizer = momentum(twin.parameters())
    for step in range(STEPS):
        x, y = (
            torch.cat(column)
            for column in zip(*(part(rank, step) for rank in range(world_size)), strict=True)
        )
        F.cross_entropy(twin(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return twin


@pytest.mark.parametrize("strategy", ["overlapped", "synchronous"])
def test_ranks_that_wrap_their_own_module(strategy: Any) -> None:
    groups = flowdp.local_groups(["cpu"] * 2, timeout=HANG_S)
    models = [convert(network()) for _ in groups]

    def train_rank(rank: int) -> nn.Module:
        model = flowdp.DistributedDataParallel(models[rank], groups[rank], strategy=strategy, bucket_bytes=64)
        optimizer = momentum(model.parameters())
        for step in range(STEPS):
            x, y = part(rank, step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.module

    for model in in_threads(range(2), train_rank):
        check_equal(model, by_hand(2))
        assert "forward" not in model.early.__dict__
