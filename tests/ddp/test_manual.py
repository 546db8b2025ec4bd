"""Tests of manual control: the collectives in a user's own loop."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective import mean as mean_module
from flowdp.collective.nccl_loop import NcclLoop
from flowdp.ddp import manual as ddp_module
from flowdp.ddp.manual import Ddp
from flowdp.device.streams import Lane, StreamLane
from flowdp.errors import OptionError
from tests.accelerators import FakeXpu
from tests.collective.fake_nccl import FakeNccl
from tests.fakes import FakeCuda
from tests.limits import HANG_S
from tests.wired import fake_link

torch.manual_seed(0)
CPU = torch.device("cpu")
PLACES = [[CPU, CPU], [torch.device("cpu", 0), torch.device("cpu", 1)]]
"""Devices of two replicas: one device, and two names of it, between which tensors are copied."""

BASE = nn.Sequential(
    nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3)
).double()


@pytest.fixture(params=["alone", "nccl"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNccl]]:
    """The ways to average: in the calling thread; on a fake NCCL."""
    monkeypatch.setattr(mean_module, "BLOCK", 2)
    cuda, made = FakeCuda(), list[FakeNccl]()
    if request.param == "nccl":

        def open_loop(backend: str, lanes: Sequence[Lane], sizes: Any) -> NcclLoop | None:
            assert backend == "auto"
            return fake_link(made.append)([StreamLane(CPU, cuda) for _ in lanes], sizes)

        monkeypatch.setattr(ddp_module, "open_loop", open_loop)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with cuda.stream(cuda.default) if request.param == "nccl" else nullcontext():
        yield made
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    assert not cuda.races
    for nccl in made:
        assert all(is_quiet for is_quiet, _ in nccl.groups)


def replicas(size: int) -> list[nn.Sequential]:
    return [copy.deepcopy(BASE) for _ in range(size)]


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 2, 5, 5, generator=generator, dtype=torch.float64),
        torch.randn(count, 3, generator=generator, dtype=torch.float64),
    )


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def backward(rank: int, model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    loss_of(model, batch).backward()
    return len(batch[0])


# ---------------------------------------------------------------- exactness
SPLITS = {1: [12], 2: [9, 3], 3: [1, 7, 4], 4: [5, 0, 4, 3]}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}
STEPS = 8
PARTS = 2


def finish(optimizer: torch.optim.Optimizer, model: nn.Module, scheduler: Any) -> None:
    for parameter in model.parameters():
        parameter.grad /= PARTS
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "size", "devices"),
    [("sgd", 1, "one kind"), ("adamw", 2, "one kind"), ("adamw", 3, "different"), ("sgd", 4, "one kind")],
)
def test_unequal_batches_equal_one_device_with_the_big_batch(kind, size, devices):
    """With accumulation, clipping and a scheduler; also on devices that need copies (here two names of the
    CPU).
    """
    places = [torch.device("cpu", rank) if devices == "different" else CPU for rank in range(size)]

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    plain = copy.deepcopy(BASE)
    one = OPTIMIZERS[kind](plain.parameters())
    timetable = schedule(one)
    with Ddp(replicas(size), places) as ddp:
        many = [OPTIMIZERS[kind](model.parameters()) for model in ddp.models]
        timetables = [schedule(optimizer) for optimizer in many]
        for step in range(STEPS):
            for part in range(PARTS):
                batch = samples(12, PARTS * step + part)
                loss_of(plain, batch).backward()
                accumulated = [[p.grad for p in model.parameters()] for model in ddp.models]
                ddp.parallel(lambda rank, model: model.zero_grad())
                shards = list(zip(*(tensor.split(SPLITS[size]) for tensor in batch), strict=True))
                counts = ddp.parallel(lambda *args: backward(*args) if len(args[2][0]) else 0, shards)
                assert counts == SPLITS[size]
                ddp.weighted_all_reduce_gradients(counts)
                for before, model in zip(accumulated, ddp.models, strict=True):
                    for grad, parameter in zip(before, model.parameters(), strict=True):
                        parameter.grad += 0 if grad is None else grad
            finish(one, plain, timetable)
            for optimizer, model, own in zip(many, ddp.models, timetables, strict=True):
                finish(optimizer, model, own)
        for model in ddp.models:
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-8)
                assert not torch.equal(ours, BASE.state_dict()["0.weight"])


def test_the_plain_mean():
    with Ddp.wrap(replicas(3)) as ddp:
        ddp.parallel(backward, [samples(4, seed) for seed in range(3)])
        alone = [[p.grad.clone() for p in model.parameters()] for model in ddp.models]
        ddp.all_reduce_gradients()
        for index, parameters in enumerate(zip(*(m.parameters() for m in ddp.models), strict=True)):
            mean = sum(own[index] for own in alone) / 3
            assert torch.allclose(parameters[0].grad, mean, rtol=1e-12, atol=1e-15)
            assert all(torch.equal(p.grad, parameters[0].grad) for p in parameters)


@pytest.mark.parametrize("devices", PLACES)
def test_gradients_of_other_forms(devices):
    def make() -> nn.Module:
        module = nn.Module()
        module.image = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
        module.imaginary = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        module.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        module.turned = nn.Parameter(torch.ones(3, 4))
        return module

    def work(rank: int, model: Any) -> None:
        model.turned.grad = torch.full((4, 3), rank + 2.0).t()
        out = model.image.sum() + model.narrow.sum()
        ((rank + 1) * out + (model.imaginary * (rank + 1j)).real.sum()).backward()

    with Ddp([make(), make()], devices) as ddp:
        ddp.parallel(work)
        ddp.all_reduce_gradients()
        for model in ddp.models:
            assert model.image.grad.unique().tolist() == [1.5]
            assert model.narrow.grad.unique().tolist() == [1.5]
            assert model.turned.grad.unique().tolist() == [2.5]
            assert model.imaginary.grad.tolist() == [0.5 - 1j] * 3
        assert ddp.models[1].turned.grad.stride() == (1, 3)
        assert ddp.models[1].image.grad.is_contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------- missing gradients
@pytest.mark.parametrize("devices", PLACES)
def test_missing_gradients(devices):
    with Ddp(replicas(2), devices) as ddp:
        first, second = ddp.models
        first[5].bias.grad = torch.full((3,), 4.0, dtype=torch.float64)
        second[3].bias.grad = torch.full((6,), 2.0, dtype=torch.float64)
        for model in ddp.models:
            model[0].bias.requires_grad_(False)
            model[0].bias.grad = torch.ones(4, dtype=torch.float64)
        first[0].bias.grad.zero_()
        ddp.all_reduce_gradients()
        for rank, model in enumerate(ddp.models):
            assert model[5].bias.grad.tolist() == [2.0] * 3
            assert model[3].bias.grad.tolist() == [1.0] * 6
            assert model[5].weight.grad is None
            assert model[0].bias.grad.tolist() == [rank] * 4  # frozen
        ddp.weighted_all_reduce_gradients([1, 3])
        assert second[5].bias.grad.tolist() == [2.0] * 3
        assert second[5].weight.grad is None


def test_a_replica_without_weight_gives_nothing():
    with Ddp.wrap(replicas(2)) as ddp:
        for rank, model in enumerate(ddp.models):
            model[5].bias.grad = torch.full((3,), 4.0 if rank else torch.nan, dtype=torch.float64)
        ddp.weighted_all_reduce_gradients([0, 5])
        assert ddp.models[0][5].bias.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("counts", [[1, 2, 3], [0, 0], [2, -1], [1, float("nan")]])
def test_bad_counts(counts):
    with Ddp.wrap(replicas(2)) as ddp, pytest.raises(OptionError, match="batch_counts"):
        ddp.weighted_all_reduce_gradients(counts)


def test_sparse_gradients_are_refused():
    models = [nn.Embedding(4, 3, sparse=True) for _ in range(2)]
    with Ddp.wrap(models) as ddp:
        ddp.parallel(lambda rank, model: model(torch.tensor([rank])).sum().backward())
        with pytest.raises(OptionError, match="'weight' is sparse"):
            ddp.all_reduce_gradients()


# ---------------------------------------------------------------- values
@pytest.mark.parametrize("devices", PLACES)
def test_all_take_model_0s_values(devices):
    def make(value: int) -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        module.register_buffer("flags", torch.tensor([value == 0, True]))
        module[0].bias.requires_grad_(False)
        for tensor in module.state_dict().values():
            if tensor.dtype != torch.bool:
                tensor.fill_(value)
        return module

    with Ddp([make(0), make(1)], devices) as ddp:
        other = ddp.models[1]
        ddp.sync_buffers()
        assert (other[1].running_mean == 0).all()
        assert (other[0].weight == 1).all()
        assert other.flags[0]
        ddp.sync_params()
        assert all((t == 0).all() for name, t in other.state_dict().items() if name != "flags")
        assert other[0].weight.requires_grad


# ---------------------------------------------------------------- wrap
def test_where_models_lie():
    with Ddp.wrap(replicas(2)) as ddp:
        assert (ddp.devices, ddp.world_size) == ((torch.device("cpu"),) * 2, 2)
    assert Ddp.wrap([nn.Identity()]).devices == (torch.device("cpu"),)
    moved: list[torch.device] = []
    model = nn.Linear(2, 2)
    model.to = moved.append
    assert Ddp.wrap([model], ["cpu:0"]).devices == (CPU,)
    assert moved == [CPU]
    with pytest.raises(OptionError, match="'nowhere' is no device"):
        Ddp.wrap([model], ["nowhere"])
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(OptionError, match="model 0 is on cpu and meta"):
        Ddp.wrap([mixed])


def test_one_model_needs_no_threads():
    before = threading.active_count()
    ddp = Ddp.wrap(replicas(1))
    assert threading.active_count() == before
    assert ddp.parallel(backward, [samples(4, 0)]) == [4]
    wanted = [p.grad.clone() for p in ddp.models[0].parameters()]
    ddp.sync_params()
    ddp.sync_buffers()
    ddp.all_reduce_gradients()
    ddp.weighted_all_reduce_gradients([4])
    found = [p.grad for p in ddp.models[0].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    ddp.close()


# ---------------------------------------------------------------- parallel
def test_calls_run_at_once_and_answer_in_order():
    meeting = threading.Barrier(3)

    def work(rank: int, model: nn.Module, letter: str, number: int) -> tuple[Any, ...]:
        meeting.wait(HANG_S)
        return rank, model, letter, number, threading.current_thread().name

    with Ddp.wrap(replicas(3)) as ddp:
        answers = ddp.parallel(work, "abc", range(3))
        assert answers == [(r, ddp.models[r], "abc"[r], r, f"flowdp-ddp-{r}") for r in range(3)]
        with pytest.raises(OptionError, match="argument 1 of work needs one element for each of 3 replicas"):
            ddp.parallel(work, "abc", [1, 2])


def test_threads_take_over_the_callers_modes():
    def modes(rank: int, model: nn.Module) -> tuple[bool, bool, bool, torch.dtype]:
        out = model(torch.zeros(1, 2))
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), out.requires_grad, out.dtype

    with Ddp.wrap([nn.Linear(2, 2) for _ in range(2)]) as ddp:
        assert ddp.parallel(modes) == [(True, False, True, torch.float32)] * 2
        with torch.no_grad():
            assert ddp.parallel(modes) == [(False, False, False, torch.float32)] * 2
        with torch.inference_mode():
            assert ddp.parallel(modes) == [(False, True, False, torch.float32)] * 2
        with torch.autocast("cpu", torch.bfloat16):
            assert ddp.parallel(modes) == [(True, False, True, torch.bfloat16)] * 2


def test_the_first_error_is_raised_when_all_have_ended():
    ended: list[int] = []

    def work(rank: int, model: nn.Module) -> None:
        ended.append(rank)
        if rank:
            raise KeyError(rank)

    with Ddp.wrap(replicas(3)) as ddp:
        with pytest.raises(KeyError) as caught:
            ddp.parallel(work)
        assert sorted(ended) == [0, 1, 2]
        assert caught.value.args == (1,)
        assert "flowdp: on rank 1, cpu" in caught.value.__notes__
        assert ddp.parallel(lambda rank, model: rank) == [0, 1, 2]
        with pytest.raises(RuntimeError):
            ddp.parallel(lambda rank, model: ddp.all_reduce_gradients() or ddp.parallel(backward))


def test_threads_end_with_the_object():
    ddp = Ddp.wrap(replicas(2))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("flowdp-ddp")]
    assert len(threads) == 2
    del ddp
    gc.collect()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()


# ---------------------------------------------------------------- NCCL
on_nccl = pytest.mark.parametrize("way", ["nccl"], indirect=True)


@on_nccl
def test_each_call_is_one_of_nccl(way: list[FakeNccl]) -> None:
    with Ddp.wrap(replicas(3)) as ddp:
        (nccl,) = way
        ddp.sync_params()
        ddp.parallel(backward, [samples(4, seed) for seed in range(3)])
        ddp.all_reduce_gradients()
        ddp.weighted_all_reduce_gradients([1, 0, 2])
        ddp.sync_buffers()  # there are none
        assert nccl.kinds == ["broadcast", "allReduce", "allReduce"]
        assert [len(counts) for _, counts in nccl.groups] == [1, 1, 1]
    assert nccl.destroyed == [0, 1, 2]


@on_nccl
def test_jobs_that_an_interrupt_has_left_end_before_nccl_is_used(
    way: list[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[list[str]] = []
    with Ddp.wrap(replicas(2)) as ddp:
        monkeypatch.setattr(ddp._crew, "settle", lambda: kinds.append(list(way[0].kinds)))
        ddp.sync_params()
        ddp.parallel(backward, [samples(4, seed) for seed in range(2)])
        ddp.all_reduce_gradients()
    assert kinds == [[], ["broadcast"]]


@on_nccl
def test_gradients_stay_the_objects_that_they_were(way: list[FakeNccl]) -> None:
    with Ddp.wrap(replicas(2)) as ddp:
        ddp.parallel(backward, [samples(4, seed) for seed in range(2)])
        before = [p.grad for model in ddp.models for p in model.parameters()]
        ddp.all_reduce_gradients()
        after = [p.grad for model in ddp.models for p in model.parameters()]
        assert all(mine is other for mine, other in zip(before, after, strict=True))


@on_nccl
def test_narrow_gradients_are_added_in_float32_over_nccl(way: list[FakeNccl]) -> None:
    models = [nn.ParameterList([torch.zeros(3).bfloat16(), torch.zeros(2)]) for _ in range(3)]
    for model, value in zip(models, (256.0, 1.0, 1.0), strict=True):  # 256 + 1 is 256 in bfloat16
        for parameter in model:
            parameter.grad = torch.full_like(parameter, value)
    with Ddp.wrap(models) as ddp:
        ddp.all_reduce_gradients()
    assert way[0].kinds == ["allReduce"]
    assert all((p.grad == 86.0).all() for model in models for p in model)


@on_nccl
def test_tensors_of_any_dtype_are_sent_by_nccl_or_else_copied(way: list[FakeNccl]) -> None:
    kinds = [torch.bool, torch.uint8, torch.int64, torch.complex64, torch.float16, torch.float8_e4m3fn]
    models = []
    for rank in range(2):
        model = nn.Module()
        for number, dtype in enumerate(kinds):
            model.register_buffer(f"b{number}", torch.full((3,), 1.0 - rank).to(dtype))
        models.append(model)
    with Ddp.wrap(models) as ddp:
        ddp.sync_buffers()
    assert way[0].groups[-1][1] == [64] * 5  # bytes: each row begins a new cache line
    for buffer in models[1].buffers():
        assert (buffer.to(torch.complex64) == 1).all()


@pytest.mark.parametrize("way", ["alone"], indirect=True)
def test_nccl_that_is_asked_for_needs_cuda_devices(way: list[FakeNccl]) -> None:
    with pytest.raises(OptionError, match="backend='nccl' is for CUDA devices, not for cpu, cpu"):
        Ddp.wrap(replicas(2), backend="nccl")
    with pytest.raises(OptionError, match="backend must be one of"):
        Ddp.wrap(replicas(2), backend="cpu")  # type: ignore[arg-type]


def test_a_thread_works_on_the_callers_current_stream() -> None:
    xpu = FakeXpu()
    lane = StreamLane(torch.device("xpu", 0), xpu)
    own, seen = xpu.Stream(), []
    with xpu.stream(own):
        context = lane.on(lane.current())

    def work() -> None:
        with context:
            seen.append(xpu.current_stream())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [own]
