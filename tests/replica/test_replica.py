"""Tests of one training step: loss, gradients, records, and retries."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import Semaphore
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp.device.streams import HostLane, StreamLane
from flowdp.device.worker_context import CurrentWorker
from flowdp.replica.loss import loss_function
from flowdp.replica.replica import Replica
from tests.fakes import FakeCuda
from tests.parts import parts_of

CPU = torch.device("cpu")
BATCH = (torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[1.0], [0.0]]))


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def replica(loss: Callable[..., Any] = mse, module: nn.Module | None = None, **options: Any) -> Replica:
    module = module or nn.Linear(2, 1)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    return Replica(parts_of(module, optimizer, **options), loss_function(loss, CPU))


Recorded = dict[str, tuple[float, float]]


def step(replica: Replica, batch: Any = BATCH) -> tuple[float, Recorded]:
    """Take a step; returns the loss, and its records."""
    recorded: Recorded = {}

    def sink(name: str, value: float | Tensor, weight: float) -> None:
        recorded[name] = float(value), weight

    worker = CurrentWorker(0, CPU, replica.module, samples=2, sink=sink)
    replica.add(batch, worker)
    loss = replica.step()
    assert loss is not None
    assert not loss.requires_grad
    return loss.item(), recorded


def test_a_step_is_that_of_plain_torch() -> None:
    torch.manual_seed(0)
    module = nn.Linear(2, 1)
    twin = nn.Linear(2, 1)
    twin.load_state_dict(module.state_dict())
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    mine = replica(module=module)
    for _ in range(3):
        loss = mse(twin, BATCH)
        loss.backward()
        plain.step()
        plain.zero_grad()
        assert step(mine)[0] == loss.item()
    assert torch.equal(module.weight, twin.weight)
    assert module.weight.grad is not None
    assert not module.weight.grad.any()


@pytest.mark.parametrize(
    ("loss", "scalars"),
    [
        (lambda model, batch: (mse(model, batch), {"a": 2.0}), {"a": (2.0, 2.0)}),
        (lambda model, batch: {"loss": mse(model, batch), "b": torch.ones(1)}, {"b": (1.0, 2.0)}),
        (lambda model, batch: mse(model, batch).reshape(1, 1), {}),
    ],
)
def test_forms_of_a_loss(loss: Callable[..., Any], scalars: dict[str, tuple[float, float]]) -> None:
    torch.manual_seed(0)
    value, recorded = step(replica(loss))
    torch.manual_seed(0)
    assert value == step(replica())[0]
    assert recorded == scalars


ELSEWHERE = nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("loss", "error", "match"),
    [
        (lambda model, batch: model(batch[0]), ValueError, r"not a tensor of shape \(2, 1\); add .mean\(\)"),
        (
            lambda model, batch: mse(model, batch).item(),
            TypeError,
            r"not float: leave .item\(\) out",
        ),
        (lambda model, batch: {"a": 1}, TypeError, "a mapping with 'a'"),
        (lambda model, batch: {}, TypeError, "a mapping with nothing"),
        (lambda model, batch: (mse(model, batch), 3), TypeError, "not tuple"),
        (lambda model, batch: None, TypeError, "not NoneType: end it with `return loss`"),
        (lambda model, batch: batch[0].mean(), ValueError, "does not depend on a parameter"),
        (lambda model, batch: mse(ELSEWHERE, batch), ValueError, "use the model that is passed in"),
    ],
)
def test_what_is_no_loss(loss: Callable[..., Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        step(replica(loss))


def test_a_criterion_is_copied_for_each_replica() -> None:
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))
    first, second = loss_function(criterion, CPU), loss_function(criterion, CPU)
    model = nn.Linear(2, 1)
    expected = criterion(model(BATCH[0]), BATCH[1])
    criterion.pos_weight.zero_()
    assert first(model, BATCH) == second(model, BATCH) == expected


def test_gradients_are_clipped_before_the_step() -> None:
    module = nn.Linear(2, 1)
    before = module.weight.detach().clone(), module.bias.detach().clone()
    step(replica(lambda model, batch: 100 * mse(model, batch), module, max_grad_norm=0.5))
    moved = [
        (new - old).square().sum() for new, old in zip((module.weight, module.bias), before, strict=True)
    ]
    assert sum(moved).sqrt().item() == pytest.approx(0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("precision", "inside"), [("32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_precision(precision: Any, inside: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(y.dtype)
            return y

    module = Watched(2, 1)
    step(replica(lambda model, batch: model(batch[0]).float().mean(), module, precision=precision))
    assert seen == [inside]
    assert module.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_an_overflow_in_fp16_leaves_the_parameters_alone_and_lowers_the_scale() -> None:
    module = nn.Linear(2, 1)
    mine = replica(lambda model, batch: model(batch[0]).float().mean() * 1e30, module, precision="fp16")
    before = module.weight.detach().clone()
    step(mine)
    assert torch.equal(module.weight, before)
    assert mine.update.scaler is not None
    assert mine.update.scaler.get_scale() == 2.0**15
    for _ in range(15):
        step(mine)
    assert mine.update.scaler.get_scale() == 1.0


# ---------------------------------------------------------------- retried steps
def test_a_micro_batch_in_pieces_has_the_gradient_of_the_whole() -> None:
    seen: list[tuple[int, int]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append((len(batch[0]), worker.samples))
        return mse(model, batch)

    x, y = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    mine = replica(loss, nn.Linear(2, 1).double())
    worker = CurrentWorker(0, CPU, mine.module, samples=7, sink=lambda *_: None)
    expected = torch.autograd.grad(mse(mine.module, (x, y)) * 0.5, list(mine.module.parameters()))
    mine.pieces = 4
    mine.add((x, y), worker, 0.5)
    assert seen == [(1, 1), (2, 2), (2, 2), (2, 2)]
    assert worker.samples == 7
    for parameter, gradient in zip(mine.module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------- one flat parameter
class TwoHeads(nn.Module):
    """A trunk and two heads, of which a batch may leave one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])


def heads(model: nn.Module, batch: tuple[Tensor, Sequence[int]]) -> Tensor:
    hidden = torch.relu(model.trunk(batch[0]))  # type: ignore[operator]
    losses = [model.heads[at](hidden).square().mean() for at in batch[1]]  # type: ignore[index]
    return torch.stack(losses).sum()


@pytest.mark.parametrize("clips", [{}, {"max_grad_norm": 0.05}, {"max_grad_value": 0.001}], ids=str)
@pytest.mark.parametrize("precision", ["32", "fp16"])
@pytest.mark.parametrize("is_flat", [True, False])
def test_a_head_that_a_batch_leaves_out_is_not_stepped(
    clips: dict[str, float], precision: str, is_flat: bool
) -> None:
    torch.manual_seed(0)
    module, twin = TwoHeads(), TwoHeads()
    twin.load_state_dict(module.state_dict())
    made, plain = (torch.optim.AdamW(one.parameters(), 0.1, fused=True) for one in (module, twin))
    if not is_flat:
        made.register_step_post_hook(lambda *_: None)
    mine = Replica(parts_of(module, made, precision=precision, **clips), heads)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    worker = CurrentWorker(0, CPU, module, samples=3, sink=lambda *_: None)
    for number in range(12):
        batch = torch.randn(3, 4), ([0, 1], [0], [1])[number % 3]
        mine.add(batch, worker)
        mine.step()
        with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
            loss = heads(twin, batch)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(plain)
        if "max_grad_norm" in clips:
            nn.utils.clip_grad_norm_(twin.parameters(), clips["max_grad_norm"])
        if "max_grad_value" in clips:
            nn.utils.clip_grad_value_(twin.parameters(), clips["max_grad_value"])
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
    assert (mine.update.flat is not None) is is_flat
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    for key, state in plain.state_dict()["state"].items():
        assert made.state_dict()["state"][key]["step"] == state["step"]


@pytest.mark.parametrize("is_flat", [True, False])
def test_each_element_is_clipped_by_value(is_flat: bool) -> None:
    module = nn.Linear(2, 2, bias=False)
    before = module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    if not is_flat:
        optimizer.register_step_post_hook(lambda *_: None)
    mine = Replica(parts_of(module, optimizer, max_grad_value=0.5), lambda model, x: (model.weight * x).sum())
    gradient = torch.tensor([[3.0, -2.0], [0.25, -0.5]])
    mine.add(gradient, CurrentWorker(0, CPU, module, samples=2, sink=lambda *_: None))
    mine.step()
    assert (mine.update.flat is not None) is is_flat
    torch.testing.assert_close(before - module.weight, torch.tensor([[0.5, -0.5], [0.25, -0.5]]))
    assert mine.update.take_norms() == ()


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_norm_is_of_the_gradients_of_one_step(is_flat: bool) -> None:
    """Also where the optimizer has not all parameters, and so does not clear all gradients."""
    module = TwoHeads()
    optimizer = torch.optim.SGD(module.heads[0].parameters(), 0.0)  # type: ignore[union-attr]
    if not is_flat:
        optimizer.register_step_post_hook(lambda *_: None)
    mine = Replica(parts_of(module, optimizer, max_grad_norm=1.0), heads)
    for _ in range(3):
        mine.add((torch.ones(3, 4), [0, 1]), CurrentWorker(0, CPU, module, samples=3, sink=lambda *_: None))
        mine.step()
    first, *others = mine.update.take_norms()
    assert (mine.update.flat is not None) is is_flat
    assert [float(norm) for norm in others] == [float(first)] * 2


def test_what_is_undone_has_touched_nothing() -> None:
    module = TwoHeads()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, weight_decay=0.5)
    mine = Replica(parts_of(module, optimizer), heads)
    worker = CurrentWorker(0, CPU, module, samples=3, sink=lambda *_: None)
    before = module.heads[1].weight.detach().clone()  # type: ignore[union-attr, operator]
    mine.add((torch.ones(3, 4), [0, 1]), worker)
    mine.undo()
    mine.add((torch.ones(3, 4), [0]), worker)
    mine.step()
    assert torch.equal(module.heads[1].weight, before)  # type: ignore[arg-type]


# ---------------------------------------------------------------- copies of a replica
def adam(seed: int, steps: int, lane: Any = None, **options: Any) -> Replica:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    module[1].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 0.1 * seed)
    lane = lane or HostLane(CPU)
    mine = Replica(parts_of(module, optimizer, lane, **options), mse)
    with lane.on(lane.compute):
        for _ in range(steps):
            step(mine)
    return mine


def test_a_copy_steps_as_its_donor() -> None:
    donor, mine = adam(1, 3), adam(2, 1)
    mine.module[1].weight.data.fill_(float("nan"))  # type: ignore[index, union-attr]
    step(mine)
    mine.add(BATCH, CurrentWorker(0, CPU, mine.module, samples=2, sink=lambda *_: None))
    mine.copy_from(donor)
    assert mine.gradients is not None
    assert not mine.gradients.is_touched
    assert mine.gradients.norm() == 0
    [own], [other] = mine.optimizers, donor.optimizers
    assert own.param_groups[0]["lr"] == 0.2
    own.param_groups[0]["lr"] = other.param_groups[0]["lr"]
    for _ in range(2):
        for name, tensor in donor.module.state_dict().items():
            assert torch.equal(mine.module.state_dict()[name], tensor), name
        step(mine)
        step(donor)


@pytest.mark.parametrize("side", ["donor", "copying"])
def test_both_streams_are_in_order(side: str) -> None:
    cuda = FakeCuda()
    lanes = [StreamLane(CPU, cuda), StreamLane(CPU, cuda)]
    donor, mine = adam(1, 1, lanes[0]), adam(2, 1, lanes[1])
    if side == "donor":
        cuda.watch("the donor", *donor.flat.memories)
    else:
        cuda.watch("the copy", *mine.flat.memories)
    for one, lane in ((donor, lanes[0]), (mine, lanes[1])):
        with lane.on(lane.compute):
            one.module[1].weight.data.mul_(2)  # type: ignore[index, union-attr]
    mine.copy_from(donor)
    for one, lane in ((donor, lanes[0]), (mine, lanes[1])):
        with lane.on(lane.compute):
            one.module[1].weight.data.mul_(2)  # type: ignore[index, union-attr]
    assert not cuda.races


class Freed(torch.autograd.Function):
    """A step of a graph that reports when the graph is freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, told: list[str]) -> Tensor:
        ctx.told, ctx.freed = told, weakref.finalize(ctx, told.append, "freed")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.told.append("backward")
        return gradient, None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("limit", [None, 1])
def test_a_graph_is_kept_until_the_backward_is_over_where_ranks_launch_in_turn(
    limit: int | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    backward = Tensor.backward

    def listen(loss: Tensor, **options: Any) -> None:
        asked.append(options)
        backward(loss, **options)

    told: list[str] = []
    mine = replica(lambda model, batch: Freed.apply(mse(model, batch), told))  # type: ignore[no-untyped-call]
    mine.launching = None if limit is None else Semaphore(limit)
    monkeypatch.setattr(Tensor, "backward", listen)
    monkeypatch.setattr("flowdp.device.compiled.has_compiled", lambda: compiled)
    step(mine)
    kept = limit is not None and not compiled
    assert asked == [{"retain_graph": True} if kept else {}]
    assert told == ["backward", "freed"]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_step_that_is_repeated_draws_the_same_on_an_accelerator(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator()
    monkeypatch.setattr(torch.get_device_module(kind), "default_generators", (generator,))
    lane = StreamLane(CPU, FakeCuda())
    lane.device = torch.device(kind, 0)
    own = adam(1, 1, lane)
    own.mark()
    first = torch.rand(3, generator=generator)
    own.undo()
    assert torch.equal(torch.rand(3, generator=generator), first)
