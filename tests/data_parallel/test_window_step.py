"""Tests of captured windows in a user's loop: the bits of eager ones, and changes that are noticed."""

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
from flowdp.data_parallel.windows import Piece, Window
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
        devices: int = 2,
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
        if devices > 1:
            options.setdefault("partition_ratios", [1 / devices] * devices)
        seen: list[Tensor] = []
        self.events.clear()
        self.runs = 0
        with flowdp.setup(
            net, optimizer, devices=["cpu"] * devices, capture=capture, progress=False, **options
        ) as dp:
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


DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])


@DEVICES
def test_captured_windows_have_the_bits_of_eager_ones(loop: Loop, devices: int) -> None:
    loop.both(devices=devices, steps=60, tags=("inner", "drop"))
    assert loop.events == []
    assert loop.uncaptured == ()
    assert loop.runs > 40 * devices


def pieces_of(world: int, number: int) -> Window:
    """Whole batches: two for the first rank, at times none for the last one."""
    ranks = [0, *range(world)][: world + (number % 3 > 0)]
    return Window([Piece(rank, batch(4, 10 * number + k), 4) for k, rank in enumerate(ranks)], CPU)


@DEVICES
@pytest.mark.parametrize("accumulate", [1, 3])
def test_windows_of_whole_batches(loop: Loop, devices: int, accumulate: int) -> None:
    def each(dp: flowdp.DataParallel, window: Window) -> Tensor:
        for k in range(accumulate):
            result = dp.forward_batch(pieces_of(dp.world_size, accumulate * loop.step + k))
        dp.step()
        assert result.loss is not None
        return torch.cat([result.loss.reshape(1), result.output.flatten()])

    if devices == 1:  # one device has one batch at a time
        accumulate = 1
        each = None  # type: ignore[assignment]
    loop.both(devices=devices, each=each, steps=40)
    assert loop.events == []
    assert loop.runs > 20 * devices


@DEVICES
@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_are_left_at_the_ranks(loop: Loop, devices: int, hooked: bool) -> None:
    def each(dp: flowdp.DataParallel, window: Window) -> Tensor:
        if loop.step == 0 and hooked:
            next(iter(dp.module.parameters())).register_hook(lambda gradient: gradient * 0.5)
        with dp.no_sync():
            dp.forward_batch(window)
        result = dp.forward_batch(window)
        dp.step()
        assert result.loss is not None
        return result.loss

    loop.both(devices=devices, each=each)
    assert (loop.events == []) is not hooked


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

    for devices in (1, 2):
        loop.both(devices=devices, each=each)
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


@DEVICES
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_takes_effect_in_its_step(
    loop: Loop, name: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, told = CHANGES[name]
    eager = loop.run(False, plant, devices=devices)
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    captured = loop.run(True, plant, devices=devices)
    assert {(step, kind) for step, kind, _ in loop.events} == {(PLANT, "_void")}
    assert all(told in text for _, _, text in loop.events)
    assert loop.runs > 12 * devices  # before and behind it
    assert_same(eager, captured)


@DEVICES
def test_another_loss_gets_graphs_of_its_own(loop: Loop, devices: int) -> None:
    loop.both(other_loss, devices=devices)
    assert loop.events == []
    assert loop.runs > 12 * devices


@DEVICES
def test_a_hook_on_a_parameter_runs_once_on_the_sum_or_ends_capture(loop: Loop, devices: int) -> None:
    loop.both(hook, devices=devices)
    if devices == 1:
        assert "has hooks" in loop.uncaptured[0]
    else:  # held back while the ranks compute
        assert loop.uncaptured == ()


@DEVICES
def test_a_ragged_batch_gets_a_graph_of_its_own_or_runs_eagerly(loop: Loop, devices: int) -> None:
    sizes = (9, 9, 9, 5)
    loop.both(devices=devices, sizes=sizes, steps=48)
    loop.both(devices=devices, sizes=sizes, steps=48, capture=flowdp.CaptureOptions(graphs=1))
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
        # Torch's cache of casts is per process: a weight used twice may be cast twice on two ranks.
        for devices, model in ((1, Net), (2, small)):
            loop.both(devices=devices, each=partial(each, dtypes=dtypes), model=model)
            assert loop.uncaptured == ()
            assert loop.runs


def test_a_model_in_half_precision(loop: Loop) -> None:
    def half(context: flowdp.LossContext) -> Tensor:
        return context.output.square().mean()

    loop.both(model=lambda: small().bfloat16(), inputs=lambda b: b[0].bfloat16(), loss_fn=half, devices=3)
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

    loop.both(each=each, devices=1)
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
        loop.run(True, loss_fn=loss, devices=1)
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

    loop.both(model=Several, loss_fn=loss, each=each, devices=1)
    assert loop.events == []
    assert loop.runs


def test_a_teacher_that_all_ranks_read(loop: Loop) -> None:
    """It is not captured while one of them records; a trainable one is no part of a graph."""
    torch.manual_seed(1)
    teacher = small().requires_grad_(False)

    def loss(context: flowdp.LossContext) -> Tensor:
        return F.mse_loss(context.output, teacher(context.batch[0]))

    for devices in (1, 2, 3):
        loop.both(loss_fn=loss, devices=devices)
        assert loop.events == []
        assert loop.runs > 12
    teacher.requires_grad_(True)
    loop.run(True, loss_fn=loss)
    assert "teacher.requires_grad_(False)" in loop.uncaptured[0]


def test_forwards_that_meet_are_not_captured(loop: Loop) -> None:
    def synchronised() -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(Net())

    loop.both(model=synchronised)
    assert loop.uncaptured == ("its forwards meet those of the other ranks (SyncBatchNorm)",)


def test_shares_by_measured_speed_and_a_generator_of_all(loop: Loop) -> None:
    loop.run(flowdp.CaptureOptions(compare_every=1), partition_ratios=None, cadence=False, steps=40)
    assert loop.uncaptured == ()


@pytest.mark.parametrize("buffers", ["broadcast", "average"])
def test_buffers_are_those_of_an_eager_loop(loop: Loop, buffers: Any) -> None:
    loop.both(buffers=buffers, devices=3, steps=40)
    assert loop.events == []


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
    with flowdp.setup(model, optimizer, devices=["cpu"] * 2, capture=True, loss_fn=cross_entropy) as dp:
        with pytest.raises(flowdp.OptionError, match="give loss_fn="):
            dp.set_loss_fn(None)
        assert dp.loss_fn is cross_entropy
        assert dp(batch()[0]).requires_grad  # a plain call stays as it is
