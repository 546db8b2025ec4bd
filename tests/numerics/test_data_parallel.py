"""Tests of a loop on several devices: equal to one device with the whole batch, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import flowdp
from flowdp.data_parallel import wrapper
from flowdp.device.streams import StreamLane
from tests.collective.fake_nccl import FakeNccl
from tests.fakes import FakeCuda, hide_modes
from tests.wired import fake_link

STEPS = 20
SIZES = (22, 9, 3, 2)  # of the batches, in turn; with four devices the last size leaves two of them empty
TOLERANCE = 1e-11

Batch = dict[str, Tensor]


class Network(nn.Module):
    """A layer used twice, a frozen one, and a norm over each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 12)
        self.frozen.requires_grad_(False)
        self.inner = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.frozen(x)))
        return self.out(self.norm(x + torch.tanh(self.inner(x))))


def network(kind: type[Network] = Network) -> Any:
    torch.manual_seed(2)
    return kind().double()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices have weight decay; the rest has none, and its own rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def batches(count: int, sizes: tuple[int, ...] = SIZES) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        samples = sizes[number % len(sizes)]
        x = torch.randn(samples, 6, generator=draw, dtype=torch.float64)
        made.append({"x": x, "y": (x.sin().sum(1) > 0).long() + (x[:, 0] > 1).long()})
    return made


class User:
    """The thread of the loop, whose work is recorded if streams are fakes."""

    def __init__(self, cuda: FakeCuda | None) -> None:
        self.cuda = cuda

    def setup(self, model: nn.Module, optimizer: Any, count: int, **options: Any) -> flowdp.DataParallel:
        dp = flowdp.setup(model, optimizer, devices=["cpu"] * count, **options)
        if self.cuda is not None:
            for rank, module in enumerate((dp.module, *dp.replicas)):
                self.cuda.watch(f"rank {rank}", *module.parameters())
        return dp

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.cuda is None else self.cuda.stream(self.cuda.default)


BOTH = pytest.mark.parametrize(
    ("lanes", "kind"),
    [("cpu", "sgd"), ("cpu", "adamw"), ("streams", "adamw"), ("nccl", "adamw")],
    indirect=["lanes"],
)


@pytest.fixture
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda | None]:
    """Plain CPU devices, and as CUDA devices would run: on fake streams, without and with NCCL."""
    if getattr(request, "param", "cpu") == "cpu":
        yield None
        return
    cuda = FakeCuda()
    hide_modes(monkeypatch.setattr)
    monkeypatch.setattr(wrapper, "open_lanes", lambda devices: [StreamLane(d, cuda) for d in devices])
    made: list[FakeNccl] = []
    if request.param == "nccl":
        link = fake_link(made.append)
        monkeypatch.setattr(wrapper, "open_loop", lambda _, lanes, sizes: link(lanes, sizes))
    yield cuda
    assert not cuda.races
    for nccl in made:
        assert "broadcast" in nccl.kinds
        assert all(is_quiet for is_quiet, _ in nccl.groups)


@pytest.fixture
def user(lanes: FakeCuda | None) -> Iterator[User]:
    user = User(lanes)
    with user.stream():
        yield user


def hinted(count: int, **options: Any) -> flowdp.CadenceOptions | None:
    """With the hint that the first device is 2.5 times slower."""
    return flowdp.CadenceOptions(speed_hint=(0, 2.5), **options) if count > 1 else None


def check_equal(model: nn.Module, twin: nn.Module) -> None:
    start = dict(network().named_parameters())
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE, msg=lambda t, n=name: f"{n}: {t}")
        assert mine.requires_grad is not torch.equal(mine, start[name]), name


def plain_loop(call: Callable[[Tensor], Tensor], model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    seen = []
    for batch in batches(STEPS):
        loss = F.cross_entropy(call(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


def rich_loop(call: Callable[[Tensor], Tensor], model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Accumulation over two batches of different size, clipping, a schedule per step."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=STEPS)
    todo, seen = iter(batches(2 * STEPS)), []
    for _ in range(STEPS):
        for batch in (next(todo), next(todo)):
            (F.cross_entropy(call(batch["x"]), batch["y"]) / 2).backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert min(seen) < 1.0 < max(seen)
    return seen


@BOTH
@pytest.mark.parametrize(("loop", "count"), [(rich_loop, 1), (rich_loop, 2), (plain_loop, 3), (rich_loop, 4)])
def test_a_loop_of_ones_own(user, count, kind, loop):
    model, twin = network(), network()
    optimizer, by_hand = (OPTIMIZERS[kind](groups(m)) for m in (model, twin))
    with user.setup(model, optimizer, count, cadence=hinted(count, max_anchor=0)) as dp:
        assert count == 1 or dp.chunk_ratios[0] < 0.5 * dp.chunk_ratios[1]
        seen = loop(dp, dp, optimizer)
        expected = loop(twin, twin, by_hand)
        torch.testing.assert_close(seen, expected, rtol=0, atol=TOLERANCE)
        assert dp.training_step == STEPS
        # Not of the last batch: that is small, and one device may have become the fastest by far.
        assert count == 1 or sum(map(bool, dp.throughput)) > 1
    check_equal(model, twin)


@BOTH
@pytest.mark.parametrize("count", [1, 3])
def test_one_sum_for_several_backwards(user, count, kind):
    model, twin = network(), network()
    by_hand = OPTIMIZERS[kind](groups(twin))
    optimizer = OPTIMIZERS[kind](groups(model))
    todo = iter(batches(3 * STEPS))
    cadence = hinted(count, max_anchor=0)
    with user.setup(model, optimizer, count, cadence=cadence, max_grad_norm=0.5) as dp:
        for _ in range(STEPS):
            three = [next(todo) for _ in range(3)]
            for batch in three:
                F.cross_entropy(twin(batch["x"]), batch["y"]).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            by_hand.step()
            by_hand.zero_grad()
            with dp.no_sync():
                for batch in three:
                    F.cross_entropy(dp(batch["x"]), batch["y"]).backward()
            dp.step()
    check_equal(model, twin)


class Critic(Network):
    """A critic of images with its gradient penalty."""

    def penalty(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("count", [1, 3])
def test_a_penalty_inside_the_module(user, count):
    model, twin = network(Critic), network(Critic)
    optimizer, by_hand = (OPTIMIZERS["adamw"](groups(m)) for m in (model, twin))
    with user.setup(model, optimizer, count, cadence=hinted(count, max_anchor=0)) as dp:
        for batch in batches(STEPS):
            for out, penalty, hooks in (
                (dp(batch["x"]), dp.call("penalty", batch["x"]), optimizer),
                (twin(batch["x"]), twin.penalty(batch["x"]), by_hand),
            ):
                (F.cross_entropy(out, batch["y"]) + 10 * penalty).backward()
                hooks.step()
                hooks.zero_grad()
    check_equal(model, twin)


class Epochs:
    """A dataset whose samples are their numbers."""

    def __init__(self) -> None:
        self.all = batches(1, (29 * 8 + 5,))[0]
        self.samples = len(self.all["y"])
        self.loader = [
            {"index": torch.arange(self.samples)[at : at + 8], **self.part(slice(at, at + 8))}
            for at in range(0, self.samples, 8)
        ]

    def part(self, which: Any) -> Batch:
        return {name: values[which] for name, values in self.all.items()}


def context_loss(context: flowdp.LossContext) -> Tensor:
    return F.cross_entropy(context.output, context.batch["y"])


@pytest.mark.parametrize(
    ("lanes", "kind", "cadence", "count", "has_loss"),
    [
        ("cpu", "adamw", True, 2, True),
        ("cpu", "adamw", True, 4, False),
        ("cpu", "adamw", False, 2, False),
        ("cpu", "adamw", "record", 1, True),
        ("cpu", "sgd", "record", 4, True),
        # Not True: with measured times, which fake streams distort, windows have hundreds of batches.
        ("streams", "adamw", False, 4, True),
        ("streams", "adamw", "record", 2, True),
        ("streams", "adamw", "record", 4, False),
        ("streams", "adamw", "record", 1, False),
    ],
    indirect=["lanes"],
)
def test_windows(user, count, kind, cadence, has_loss):
    data, model, twin = Epochs(), network(), network()
    optimizer, by_hand = (OPTIMIZERS[kind](groups(m)) for m in (model, twin))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 10, 0.7) for o in (optimizer, by_hand)]
    option = hinted(count, anchor=1, max_anchor=2) if cadence == "record" else cadence
    loss_fn = context_loss if has_loss else None
    windows = several = 0
    with user.setup(
        model, optimizer, count, cadence=option, loss_fn=loss_fn, inputs="x", tags="norm", max_grad_norm=0.5
    ) as dp:
        while dp.training_step < STEPS:
            order: list[int] = []
            for window in dp.epoch(data.loader):
                result = dp.forward_batch(window)
                if not has_loss:
                    F.cross_entropy(result.output, window["y"]).backward()
                indices = window["index"].tolist()
                batch = data.part(indices)
                expected = twin(batch["x"])
                loss = F.cross_entropy(expected, batch["y"])
                loss.backward()
                torch.testing.assert_close(result.output, expected, rtol=0, atol=TOLERANCE)
                assert len(result.tags["norm"]) == result.samples == len(indices)
                if has_loss:
                    torch.testing.assert_close(result.loss, loss, rtol=0, atol=TOLERANCE)
                order += indices
                several += len(window.pieces) > count
                windows += 1
                if windows % 5 == 0:  # the next one adds to it
                    continue
                nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
                by_hand.step()
                by_hand.zero_grad()
                dp.step()
                for schedule in schedules:
                    schedule.step()
            assert sorted(order) == list(range(data.samples))
    assert bool(several) == (count > 1 and cadence is not False)
    check_equal(model, twin)


def test_the_network_can_tell_a_batch_from_its_parts():
    """A mean over devices that ignores their numbers of samples would differ."""
    model, (batch,) = network(), batches(1)
    gradients = []
    for shares in ((22,), (6, 16)):
        twin = copy.deepcopy(model)
        for x, y in zip(batch["x"].split(shares), batch["y"].split(shares), strict=True):
            (F.cross_entropy(twin(x), y) / len(shares)).backward()
        gradients.append(twin.out.weight.grad)
    assert not torch.allclose(*gradients, rtol=0, atol=1e-3)
