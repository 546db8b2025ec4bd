"""Tests of a rank's state: captured, saved and restored, it continues bit for bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from flowdp.checkpoint.file import plain, read, write
from flowdp.device.streams import Lane, StreamLane
from flowdp.device.worker_context import CurrentWorker
from flowdp.errors import CheckpointError
from flowdp.protocol.position import Position
from flowdp.replica.factories import Optimizers, all_of
from flowdp.replica.learning_rate import LearningRate, SchedulerOptions
from flowdp.replica.rank_state import capture, capture_generator, of_rank, restore
from flowdp.replica.replica import Replica
from tests.fakes import FakeCuda
from tests.parts import parts_of

CPU = torch.device("cpu")


class Net(nn.Module):
    """Many kinds of tensors: channels_last, batch norm, tied, frozen, and a buffer not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.two(self.one(self.norm(self.conv(x)).mean((2, 3)))) + self.frozen
        return out


class Master(Optimizer):
    """An optimizer with float32 copies of its parameters, and state that torch's own loading changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(master=parameter.float(), name="abc", history=[torch.zeros(1)], steps=0)
                state["steps"] += 1
                state["history"][0] += 1e-9
                state["master"] -= group["lr"] * parameter.grad.float()
                parameter.copy_(state["master"])


def make(
    optimizer: Callable[[list[nn.Parameter]], Optimizers | Optimizer] = SGD,
    seed: int = 0,
    module: Callable[[], nn.Module] = Net,
    lane: Lane | None = None,
    scheduler: Any = None,
    **options: Any,
) -> Replica:
    torch.manual_seed(seed)
    net = module()
    made = optimizer([parameter for parameter in net.parameters() if parameter.requires_grad])
    optimizers = [made] if isinstance(made, Optimizer) else made
    rate = LearningRate(
        all_of(optimizers), SchedulerOptions(scheduler, unit=None if scheduler is None else "step")
    )
    return Replica(parts_of(net, optimizers, lane, learning_rate=rate, **options), mse)


def mse(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return F.mse_loss(out.float(), torch.ones_like(out, dtype=torch.float32))


def train(replica: Replica, first: int, last: int) -> None:
    dtype = next(replica.module.parameters()).dtype
    for number in range(first, last):
        batch = torch.randn(4, 2, 2, 2, generator=torch.Generator().manual_seed(number)).to(dtype)
        replica.learning_rate.advance(number, 0)
        replica.add(batch, CurrentWorker(0, CPU, replica.module, samples=4, sink=lambda *_: None))
        replica.step()


def through_a_file(folder: Path, ranks: list[Any]) -> dict[str, Any]:
    """The captured states after a round trip through a file; the first one has the model."""
    first, *rest = ranks
    shared = {name: first.pop(name) for name in ("model", "buffers", "ema", "outer")}
    about = {"version": 1, "epoch": 0, "global_step": 0, "position": Position(1), "history": ()}
    state = {**shared, **about, "ranks": [first, *rest], "fingerprint": {}, "best": None}
    write(folder / "a.pt", state)
    return read(folder / "a.pt")


def resume(replica: Replica, saved: dict[str, Any], rank: int = 0) -> None:
    restore(replica, of_rank(saved["ranks"], rank), saved["model"], saved["buffers"])


def bits(value: Any) -> Any:
    """A value that is equal if and only if all bits are."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), bytes(value.clone().untyped_storage())
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "sgd momentum": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: AdamW(p, 0.01, amsgrad=True),
    "adamw fused": lambda p: AdamW(p, 0.01, fused=True),
    "adam, rate in a tensor": lambda p: Adam(p, torch.tensor(0.01)),
    "adam, groups": lambda p: Adam([{"params": p[:2], "lr": 0.02}, {"params": p[2:]}], foreach=False),
    "adafactor": lambda p: Adafactor(p, 0.01),
    "master": Master,
    "sequence": lambda p: [SGD(p[:2], 0.1, momentum=0.5), AdamW(p[2:])],
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPTIMIZERS),
        *((name, torch.bfloat16) for name in ("adamw", "adafactor", "master", "adam, groups")),
    ],
)
def test_a_restored_rank_goes_on_bit_for_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    def net() -> nn.Module:
        return Net().to(dtype)

    def optimizer(p: list[nn.Parameter]) -> Any:
        made = OPTIMIZERS[name](p)
        return made[0] if isinstance(made, list) else made

    original = make(optimizer, module=net)
    train(original, 0, 3)
    taken = capture(original, shared=True)()
    at_once = bits(copy.deepcopy(taken))
    train(original, 3, 5)
    assert bits(taken) == at_once  # it shares no memory with the training
    saved = through_a_file(tmp_path, [taken])

    other = make(optimizer, seed=1, module=net)
    homes = [tensor.data_ptr() for tensor in other.module.state_dict().values()]
    groups = [id(group) for one in all_of(other.optimizers) for group in one.param_groups]
    resume(other, saved)
    assert bits({**capture(other, shared=True)()}) == at_once
    assert [tensor.data_ptr() for tensor in other.module.state_dict().values()] == homes
    assert [id(group) for one in all_of(other.optimizers) for group in one.param_groups] == groups
    train(other, 3, 5)
    assert bits(capture(other, shared=True)()) == bits(capture(original, shared=True)())


@pytest.mark.parametrize("name", ["sgd momentum", "adam, groups"])
@pytest.mark.parametrize("flat_first", [True, False])
def test_a_checkpoint_passes_between_flat_memory_and_parameters(
    tmp_path: Path, name: str, flat_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; a fused kernel on the CPU may compute a tensor's last elements differently."""

    def made(is_flat: bool, seed: int) -> Replica:
        monkeypatch.setattr(Replica, "may_be_flat", is_flat)
        replica = make(OPTIMIZERS[name], seed=seed)
        assert (replica.update.flat is not None) is is_flat
        return replica

    first, second, straight = made(flat_first, 0), made(not flat_first, 1), made(flat_first, 0)
    train(first, 0, 3)
    resume(second, through_a_file(tmp_path, [capture(first, shared=True)()]))
    assert bits(capture(second, shared=True)()) == bits(capture(first, shared=True)())
    train(second, 3, 6)
    resume(first, through_a_file(tmp_path, [capture(second, shared=True)()]))
    train(first, 6, 8)
    train(straight, 0, 8)
    assert bits(capture(first, shared=True)()) == bits(capture(straight, shared=True)())


@pytest.mark.parametrize("form", ["sequence", "mapping"])
def test_several_optimizers_keep_their_form(tmp_path: Path, form: str) -> None:
    def optimizers(p: list[nn.Parameter]) -> Any:
        one, two = SGD(p[:2], 0.1, momentum=0.9), AdamW(p[2:])
        return {"g": one, "d": two} if form == "mapping" else [one, two]

    original = make(optimizers)
    for number in range(3):
        train(original, number, number + 1)
        all_of(original.optimizers)[1].step()
    saved = through_a_file(tmp_path, [capture(original, shared=True)()])
    assert type(saved["ranks"][0]["optimizers"]) is (dict if form == "mapping" else list)
    other = make(optimizers, seed=1)
    resume(other, saved)
    assert bits(capture(other, shared=True)()) == bits(capture(original, shared=True)())


def test_the_scale_of_fp16_is_kept(tmp_path: Path) -> None:
    original = make(SGD, precision="fp16")
    train(original, 0, 3)
    assert original.update.scaler is not None
    original.update.scaler.update(2.0**7)
    saved = through_a_file(tmp_path, [capture(original, shared=True)()])
    other = make(SGD, seed=1, precision="fp16")
    resume(other, saved)
    train(other, 3, 5)
    train(original, 3, 5)
    assert other.update.scaler is not None
    assert other.update.scaler.state_dict() == original.update.scaler.state_dict()
    assert bits(other.module.state_dict()) == bits(original.module.state_dict())


def test_the_schedule_goes_on_in_the_groups_that_are_stepped(tmp_path: Path) -> None:
    def schedule(optimizer: Optimizer) -> Any:
        return OneCycleLR(optimizer, 0.5, total_steps=8)

    original = make(lambda p: SGD(p, 0.1, momentum=0.9), scheduler=schedule)
    train(original, 0, 4)
    original.learning_rate.advance(4, 0)
    original.learning_rate.set(0.3)
    saved = through_a_file(tmp_path, [capture(original, shared=True)()])
    other = make(lambda p: SGD(p, 0.1, momentum=0.9), seed=1, scheduler=schedule)
    resume(other, saved)
    for number in range(4, 8):
        train(original, number, number + 1)
        train(other, number, number + 1)
        [mine], [theirs] = (all_of(one.optimizers)[0].param_groups for one in (other, original))
        assert (mine["lr"], mine["momentum"]) == (theirs["lr"], theirs["momentum"])
    assert bits(other.module.state_dict()) == bits(original.module.state_dict())


def test_ranks_are_mapped_and_share_nothing(tmp_path: Path) -> None:
    ranks = [make(lambda p: SGD(p, 0.1, momentum=0.9), seed) for seed in range(2)]
    for number, rank in enumerate(ranks):
        train(rank, number, number + 2)
    saved = through_a_file(tmp_path, [capture(one, shared=not at)() for at, one in enumerate(ranks)])
    others = [make(lambda p: SGD(p, 0.1, momentum=0.9), 9) for _ in range(3)]
    for number, other in enumerate(others):
        resume(other, saved, number)
    moments = [bits(capture(one, shared=False)()["optimizers"]) for one in others]
    assert moments[0] == moments[2] != moments[1]
    assert [bits(one.module.state_dict()) for one in others] == [bits(ranks[0].module.state_dict())] * 3
    train(others[0], 0, 1)
    assert bits(capture(others[2], shared=False)()["optimizers"]) == moments[2]
    assert bits(saved["ranks"][0]["optimizers"]) == moments[2]


def test_only_saved_ranks_draw_on_from_their_random_numbers() -> None:
    ranks = [{"generator": 1, "a": 2}, {"generator": 3, "a": 4}]
    assert [of_rank(ranks, rank) for rank in range(3)] == [*ranks, {"generator": None, "a": 2}]


def test_tied_tensors_are_saved_once_and_views_without_the_rest() -> None:
    taken = capture(make(AdamW), shared=True)()
    model = taken["model"]
    assert model["one.weight"] is model["two.weight"]
    for tensor in model.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    assert model["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert list(taken["buffers"]) == ["calls"]
    assert "model" not in capture(make(AdamW), shared=False)()


# ---------------------------------------------------------------- on a device
class Lent(StreamLane):
    """A card on the CPU with watched pinned memory."""

    def __init__(self) -> None:
        super().__init__(CPU, FakeCuda())
        self.pinned_memory: list[Tensor] = []

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        host = super().pinned(shape, dtype)
        self.device_module.watch("host copy", host)
        self.pinned_memory.append(host)
        return host


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_waits_for_the_copies_and_not_before(waits: bool) -> None:
    lane = Lent()
    replica = make(lambda p: SGD(p, 0.1, momentum=0.9), lane=lane)
    with lane.on(lane.compute):
        train(replica, 0, 2)
        lane.device_module.watch("replica", *replica.flat.memories)
        expected = bits(replica.module.state_dict())
        gone = threading.Event()
        lane.event = lambda *, timing=False: _Held(lane, gone)  # type: ignore[method-assign]
        part = capture(replica, shared=True)  # would hang if it waited
        train(replica, 2, 3)
    gone.set()
    taken = part() if waits else {"model": dict(enumerate(lane.pinned_memory))}
    with lane.on(lane.copy):  # any stream but the copying one
        read = [tensor + 0 for tensor in taken["model"].values()]
    assert len(lane.pinned_memory) == 1, "in one piece"
    assert read
    assert bool(lane.device_module.races) is not waits
    if waits:
        assert bits(taken["model"]) == expected


class _Held:
    """An event that its device does not reach before the test says so."""

    def __init__(self, lane: StreamLane, gone: threading.Event) -> None:
        self._event = lane.device_module.Event()
        self._event.passed = gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


def test_a_device_is_restored_on_its_stream() -> None:
    original = make(lambda p: AdamW(p, 0.01))
    train(original, 0, 2)
    taken = plain(capture(original, shared=True)())
    lane = Lent()
    replica = make(lambda p: AdamW(p, 0.01), seed=1, lane=lane)
    lane.device_module.watch("replica", *replica.flat.memories)
    restore(replica, taken, taken["model"], taken["buffers"])
    with lane.on(lane.comm):  # no order needed: restoring has waited
        sums = [memory.sum() for memory in replica.flat.memories]
    assert sums
    assert lane.device_module.races == []
    assert bits(replica.module.state_dict()) == bits(original.module.state_dict())


# ---------------------------------------------------------------- states that do not fit
def test_another_model_is_named() -> None:
    taken = capture(make(module=lambda: nn.Linear(2, 3)), shared=True)()
    for other, said in (
        (nn.Linear(2, 4), r"'weight' is float32 \(3, 2\) in the checkpoint and float32 \(4, 2\) here"),
        (nn.Linear(2, 3, bias=False), r"'bias' is float32 \(3,\) in the checkpoint and missing here"),
        (nn.Linear(2, 3).double(), r"'weight' is float32 \(3, 2\) in the checkpoint and float64"),
        (nn.Sequential(*[nn.Linear(2, 3) for _ in range(4)]), r"'0.bias'.*; and 5 more"),
    ):
        replica = make(module=lambda other=other: other)  # type: ignore[misc]
        before = bits(replica.module.state_dict())
        with pytest.raises(CheckpointError, match=said):
            restore(replica, taken, taken["model"], taken["buffers"])
        assert bits(replica.module.state_dict()) == before


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda p: [SGD(p[:2]), SGD(p[2:])], r"optimizers \[0\], this run has \[0, 1\]"),
        (lambda p: {"a": SGD(p)}, r"has \['a'\]"),
        (lambda p: SGD([{"params": p[:1]}, {"params": p[1:]}]), "does not fit"),
        (lambda p: SGD(p[:2]), "does not fit"),
    ],
)
def test_other_optimizers_are_refused(optimizer: Any, said: str) -> None:
    taken = capture(make(), shared=True)()
    with pytest.raises(CheckpointError, match=said):
        restore(make(optimizer), taken, taken["model"], taken["buffers"])


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_generator_of_an_accelerator_is_the_ranks_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.get_device_module(kind), "default_generators", (generator,))
    replica = make(lambda p: SGD(p, 0.1))
    taken = plain(capture(replica, shared=True)())
    assert taken["generator"] is None  # of the CPU: it is the process's
    replica.lane.device = torch.device(kind, 0)
    before = capture_generator(replica)()["generator"]
    first = torch.rand(3, generator=generator)
    restore(replica, {**taken, "generator": before}, taken["model"], taken["buffers"])
    assert torch.equal(torch.rand(3, generator=generator), first)
