"""Tests of captured windows in a loop on one device: the bits of eager ones, and changes that are noticed."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.data_parallel.windows import Window
from flowdp.graphs.captured_step import Captured
from flowdp.graphs.cpu_graph import CpuGraph

CPU = torch.device("cpu")
PLANT, STEPS = 16, 40
SCALE = 1.0


class Net(nn.Module):
    """BatchNorm, dropout, a weight used twice, and attributes that a user may change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.3)
        self.inner = nn.Linear(48, 48)
        self.head = nn.Linear(48, 5)
        self.register_buffer("shift", torch.zeros(1))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x))).flatten(1) * self.gain + self.shift
        out: Tensor = self.head(self.drop(self.inner(torch.tanh(self.inner(y)))))
        return out


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 5))


def cross_entropy(context: flowdp.LossContext) -> Tensor:
    return F.cross_entropy(context.output, context.batch[1]) * SCALE


def batch(samples: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 1, 6, 6, generator=draw), torch.randint(5, (samples,), generator=draw)


class Loop:
    """A loop run eagerly and captured, with a change before step `PLANT`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[int, str, str]] = []
        self.runs = 0
        self.step = -1
        for name in ("_void", "_end"):
            monkeypatch.setattr(Captured, name, self._spied(name))
        run = CpuGraph.run

        def counted(graph: CpuGraph, *arguments: Any) -> Any:
            self.runs += 1
            return run(graph, *arguments)

        monkeypatch.setattr(CpuGraph, "run", counted)

    def _spied(self, name: str) -> Callable[..., None]:
        original = getattr(Captured, name)

        def spy(captured: Captured, text: str, **options: Any) -> None:
            self.events.append((self.step, name, text))
            original(captured, text, **options)

        return spy

    def run(
        self,
        capture: bool | flowdp.CaptureOptions,
        plant: Callable[[flowdp.DataParallel, Any], object] = lambda dp, optimizer: None,
        *,
        model: Callable[[], nn.Module] = Net,
        steps: int = STEPS,
        sizes: Sequence[int] = (8,),
        each: Callable[[flowdp.DataParallel, Window], Tensor] | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """Train; returns losses, outputs, parameters and buffers."""
        torch.manual_seed(5)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        options = {"loss_fn": cross_entropy, **options}
        seen: list[Tensor] = []
        self.events.clear()
        self.runs = 0
        with flowdp.setup(net, optimizer, devices=["cpu"], capture=capture, progress=False, **options) as dp:
            loader = [batch(sizes[k % len(sizes)], k) for k in range(steps)]
            for self.step, window in enumerate(dp.epoch(loader)):
                if self.step == PLANT:
                    plant(dp, optimizer)
                if each is not None:
                    seen.append(each(dp, window))
                    continue
                result = dp.forward_batch(window)
                seen += [result.loss, result.output]
                dp.step()
            self.uncaptured = dp.uncaptured
        return [*seen, *net.parameters(), *net.buffers()]

    def both(self, *arguments: Any, capture: bool | flowdp.CaptureOptions = True, **options: Any) -> None:
        """Run it both ways, and assert the same bits."""
        eager = self.run(False, *arguments, **options)
        assert (self.runs, self.events) == (0, [])
        assert_same(eager, self.run(capture, *arguments, **options))


def assert_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(mine, theirs), place


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    return Loop(monkeypatch)


def test_captured_windows_have_the_bits_of_eager_ones(loop: Loop) -> None:
    loop.both(steps=60, tags=("inner", "drop"))
    assert loop.events == []
    assert loop.uncaptured == ()
    assert loop.runs > 40


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_of_several_windows(loop: Loop, hooked: bool) -> None:
    def each(dp: flowdp.DataParallel, window: Window) -> Tensor:
        if loop.step == 0 and hooked:
            next(iter(dp.module.parameters())).register_hook(lambda gradient: gradient * 0.5)
        with dp.no_sync():
            dp.forward_batch(window)
        result = dp.forward_batch(window)
        dp.step()
        assert result.loss is not None
        return result.loss

    loop.both(each=each)
    assert (loop.events == []) is not hooked
    assert hooked or loop.runs


def test_gradients_that_the_user_keeps_are_not_written_to(loop: Loop) -> None:
    kept: list[tuple[list[Tensor], list[Tensor]]] = []

    def each(dp: flowdp.DataParallel, window: Window) -> Tensor:
        for none in (True, False):
            result = dp.forward_batch(window)
            gradients = [one.grad for one in dp.parameters() if one.grad is not None]
            if none:
                kept.append((gradients, [one.clone() for one in gradients]))
            for optimizer in dp.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=none)
        dp.zero_grad()
        assert result.loss is not None
        return result.loss

    loop.both(each=each)
    assert loop.events == []
    assert loop.runs
    for gradients, values in kept:
        assert_same(gradients, values)


def freeze(dp: flowdp.DataParallel, optimizer: Any) -> None:
    dp.module.inner.requires_grad_(False)


def rescale(dp: flowdp.DataParallel, optimizer: Any) -> None:
    globals()["SCALE"] = 2.0


def hook(dp: flowdp.DataParallel, optimizer: Any) -> None:
    dp.module.head.weight.register_hook(lambda gradient: gradient * 2)


def move(dp: flowdp.DataParallel, optimizer: Any) -> None:
    dp.module.head.weight.data = dp.module.head.weight.data.clone() * 0.5


def other_loss(dp: flowdp.DataParallel, optimizer: Any) -> None:
    dp.set_loss_fn(lambda context: cross_entropy(context) * 0.5)


CHANGES: dict[str, tuple[Callable[..., object], str]] = {
    "dropout": (lambda dp, _: setattr(dp.module.drop, "p", 0.6), "drop.p was 0.3, it is 0.6"),
    "attribute": (lambda dp, _: setattr(dp.module, "gain", 0.5), "gain was 1.0, it is 0.5"),
    "frozen layer": (freeze, "inner.weight.requires_grad was True"),
    "eval mode": (lambda dp, _: dp.eval(), "training was True, it is False"),
    "global": (rescale, "SCALE"),
    "moved": (move, "lies in other memory"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_takes_effect_in_its_step(loop: Loop, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, told = CHANGES[name]
    eager = loop.run(False, plant)
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    captured = loop.run(True, plant)
    assert {(step, kind) for step, kind, _ in loop.events} == {(PLANT, "_void")}
    assert all(told in text for _, _, text in loop.events)
    assert loop.runs > 12  # before and behind it
    assert_same(eager, captured)


def test_another_loss_gets_graphs_of_its_own(loop: Loop) -> None:
    loop.both(other_loss)
    assert loop.events == []
    assert loop.runs > 12


def test_a_hook_on_a_parameter_ends_capture(loop: Loop) -> None:
    loop.both(hook)
    assert "has hooks" in loop.uncaptured[0]


def test_a_ragged_batch_gets_a_graph_of_its_own_or_runs_eagerly(loop: Loop) -> None:
    sizes = (9, 9, 9, 5)
    loop.both(sizes=sizes, steps=48)
    loop.both(sizes=sizes, steps=48, capture=flowdp.CaptureOptions(graphs=1))
    assert loop.uncaptured == ()


def test_under_autocast(loop: Loop) -> None:
    """Entered around some of the windows, with several dtypes: a capture checks it each time."""

    def each(dp: flowdp.DataParallel, window: Window, dtypes: Sequence[Any]) -> Tensor:
        dtype = dtypes[loop.step // 6 % len(dtypes)]
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            result = dp.forward_batch(window)
        dp.step()
        assert result.loss is not None
        return result.loss

    for dtypes in ([torch.bfloat16], [None, torch.bfloat16, torch.float16]):
        loop.both(each=partial(each, dtypes=dtypes))
        assert loop.uncaptured == ()
        assert loop.runs


def test_a_model_in_half_precision(loop: Loop) -> None:
    def half(context: flowdp.LossContext) -> Tensor:
        return context.output.square().mean()

    loop.both(model=lambda: small().bfloat16(), inputs=lambda b: b[0].bfloat16(), loss_fn=half)
    assert loop.events == []


def test_without_gradients_it_is_not_captured(loop: Loop) -> None:
    def each(dp: flowdp.DataParallel, window: Window) -> Tensor:
        with torch.no_grad():
            result = dp.forward_batch(window)
        assert result.loss is not None
        return result.loss

    loop.both(each=each)
    assert (loop.events, loop.runs) == ([], 0)


def test_what_looks_at_graphs_runs_eagerly(loop: Loop) -> None:
    def each(dp: flowdp.DataParallel, window: Window) -> Tensor:
        if loop.step < PLANT:
            result = dp.forward_batch(window)
        elif loop.step % 2:
            with torch.autograd.set_detect_anomaly(True):
                result = dp.forward_batch(window)
        else:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                result = dp.forward_batch(window)
        dp.step()
        assert result.loss is not None
        return result.loss

    loop.both(each=each)
    assert loop.events == []
    assert 0 < loop.runs < PLANT


class Counted:
    calls = 0


def by_a_counter(context: flowdp.LossContext) -> Tensor:
    Counted.calls += 1
    return cross_entropy(context) * (2 if Counted.calls > PLANT else 1)


def by_random(context: flowdp.LossContext) -> Tensor:
    return cross_entropy(context) * (1 + random.random())


def by_item(context: flowdp.LossContext) -> Tensor:
    loss = cross_entropy(context)
    return loss if loss.item() > 0 else -loss


@pytest.mark.parametrize(
    ("loss", "told"),
    [(by_a_counter, "changes Python's state"), (by_random, "differs by"), (by_item, "a number out of a")],
)
def test_losses_that_cannot_be_captured_say_why_once(
    loop: Loop, caplog: pytest.LogCaptureFixture, loss: Any, told: str
) -> None:
    caplog.set_level(logging.WARNING, "flowdp")
    if loss is by_item:
        loop.both(loss_fn=loss)
    else:
        loop.run(True, loss_fn=loss)
    assert told in loop.uncaptured[0]
    assert len([line for line in caplog.messages if told in line]) == 1


def test_scaled_losses_run_eagerly(loop: Loop) -> None:
    def each(dp: flowdp.DataParallel, window: Window) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        result = dp.forward_batch(window, scaler)
        dp.step(scaler)
        assert result.loss is not None
        return result.loss

    loop.both(each=each)
    assert loop.uncaptured == ("a GradScaler scales its loss by Python",)
    assert loop.runs == 0


def test_outputs_that_are_inputs_numbers_and_nothing(loop: Loop) -> None:
    class Several(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return {
                "out": out,
                "x": x,
                "scale": self.head.bias,
                "count": 3,
                "none": None,
                "twice": (out, out),
            }

    def loss(context: flowdp.LossContext) -> Tensor:
        return F.cross_entropy(context.output["out"], context.batch[1])

    def each(dp: flowdp.DataParallel, window: Window) -> Tensor:
        result = dp.forward_batch(window)
        before = result.output["x"].clone()
        assert (result.output["count"], result.output["none"]) == (3, None)
        dp.step()
        assert torch.equal(result.output["x"], before)
        return torch.cat([result.output["twice"][1].flatten(), result.output["x"].flatten()])

    loop.both(model=Several, loss_fn=loss, each=each)
    assert loop.events == []
    assert loop.runs


def test_a_teacher(loop: Loop) -> None:
    """A trainable one is no part of a graph."""
    torch.manual_seed(1)
    teacher = small().requires_grad_(False)

    def loss(context: flowdp.LossContext) -> Tensor:
        return F.mse_loss(context.output, teacher(context.batch[0]))

    loop.both(loss_fn=loss)
    assert loop.events == []
    assert loop.runs > 12
    teacher.requires_grad_(True)
    sums = []
    for capture in (False, True):
        teacher.zero_grad()
        loop.run(capture, loss_fn=loss)
        sums.append([parameter.grad for parameter in teacher.parameters()])
    assert_same(*sums)
    assert "teacher.requires_grad_(False)" in loop.uncaptured[0]


def test_a_loss_with_parameters_of_its_own(loop: Loop) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, context: flowdp.LossContext) -> Tensor:
            return cross_entropy(context) * self.scale

    weighted = Weighted()
    loop.run(True, loss_fn=weighted)
    assert "is none of the model's" in loop.uncaptured[0]
    weighted.requires_grad_(False)
    loop.both(loss_fn=weighted)
    assert loop.uncaptured == ()
    assert loop.runs


def test_a_state_goes_on_with_capture_and_without(loop: Loop) -> None:
    kept: dict[str, Any] = {}

    def keep(dp: flowdp.DataParallel, optimizer: Any) -> None:
        kept["model"] = {name: value.clone() for name, value in dp.state_dict().items()}
        kept["optimizer"] = copy.deepcopy(optimizer.state_dict())

    def go_on(dp: flowdp.DataParallel, window: Window) -> Tensor:
        if loop.step == 0:
            dp.load_state_dict(kept["model"])
            dp.optimizers[0].load_state_dict(copy.deepcopy(kept["optimizer"]))
        loss = dp.forward_batch(window).loss
        dp.step()
        assert loss is not None
        return loss

    ends = []
    for first in (False, True):
        loop.run(first, keep, model=small, steps=PLANT + 1)
        ends += [loop.run(second, each=go_on, model=small) for second in (False, True)]
    for end in ends:
        assert_same(ends[0], end)


def test_a_loss_is_needed() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(flowdp.OptionError, match="give loss_fn="):
        flowdp.setup(model, optimizer, devices=["cpu"], capture=True)
    with pytest.raises(flowdp.OptionError, match="capture must be True, False or"):
        flowdp.setup(model, optimizer, devices=["cpu"], capture=1, loss_fn=cross_entropy)
    with flowdp.setup(model, optimizer, devices=["cpu"], capture=True, loss_fn=cross_entropy) as dp:
        with pytest.raises(flowdp.OptionError, match="give loss_fn="):
            dp.set_loss_fn(None)
        assert dp.loss_fn is cross_entropy
        assert dp(batch()[0]).requires_grad  # a plain call stays as it is


def test_several_devices_capture_nothing() -> None:
    with pytest.raises(
        flowdp.OptionError, match=r"the steps of one device, and there are 2: .*flowdp.Trainer"
    ):
        flowdp.setup(small(), devices=["cpu"] * 2, capture=True, loss_fn=cross_entropy)
