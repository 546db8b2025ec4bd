"""The kernels' arithmetic, on the CPU: the source that a card runs, compiled by g++."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.collective import async_mean, fused, local, on_streams
from flowdp.collective import mean as mean_module
from flowdp.collective.fused import MEAN, MEMBERS, THREADS, kernels_on
from flowdp.collective.local import DeviceMean
from flowdp.collective.mean import BlockMean, arithmetic
from flowdp.device.flat_parameters import Flat
from tests.collective.cpu_kernels import cpu_kernels, cpu_library
from tests.collective.fake_world import FakeWorld, device_mean

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def replicas(members: int, count: int, dtype: torch.dtype, offset: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(members * 1000 + count)
    rows = [torch.randn(offset + count, generator=draw).to(dtype) for _ in range(members)]
    return [row[offset:] for row in rows]


def taken(
    rows: list[Tensor], weights: list[float], bad: list[Tensor | None] | None = None
) -> tuple[list[Tensor], list[float]]:
    """The memories after the mean, in place, and the sums of squares."""
    kernels = cpu_kernels(len(rows))
    after = [row.clone() for row in rows]
    squares = torch.full((kernels.blocks(len(rows[0])), len(rows) + 1), math.inf, dtype=torch.float64)
    kernels.mean(after, after, weights, bad or [], squares)
    return after, squares.sum(0).tolist()


def weights_of(members: int, kind: str) -> list[int]:
    if kind == "equal":
        return [8] * members
    weights = [(7 * member + 3) % 11 for member in range(members)]
    return [0 if kind == "one left out" and member == members // 2 else n for member, n in enumerate(weights)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("members", "kind", "count", "offset"),
    [
        (2, "equal", 1, 0),
        (2, "unequal", 3, 1),
        (3, "one left out", 64, 0),
        (3, "unequal", 1021, 3),
        (MEMBERS, "equal", 1021, 0),
        (MEMBERS, "one left out", 20_000, 0),
    ],
)
def test_as_torch_to_rounding(dtype, members, kind, count, offset):
    """The kernel and torch are as near to float64 as each other, and agree on the squares."""
    rows, samples = replicas(members, count, dtype, offset), weights_of(members, kind)
    total = sum(samples)
    weights = [number / total for number in samples]
    after, squares = taken(rows, weights)
    exact = sum(weight * row.double() for weight, row in zip(weights, rows, strict=True))
    size = sum(weight * row.double().abs() for weight, row in zip(weights, rows, strict=True))
    bound = torch.finfo(dtype).eps * size * (1.01 if dtype.itemsize == 2 else members)
    # A subnormal of float16 is rounded to a multiple of the smallest one.
    assert bool(((after[0].double() - exact).abs() <= bound + torch.finfo(dtype).smallest_normal).all())
    assert all(torch.equal(row, after[0]) for row in after)
    by_torch = [[row.clone()] for row in rows]
    wanted = BlockMean([Flat(by_torch[0][0], count)], by_torch, by_torch).reduce(samples, drift=True)
    assert squares == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-9 if dtype.itemsize >= 4 else 1e-5)
    assert torch.allclose(
        after[0].double(), by_torch[0][0].double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("members", [3, 8])
def test_equal_replicas_stay_equal_to_the_bit(dtype, members):
    (row,) = replicas(1, 777, dtype)
    after, squares = taken([row] * members, [1 / (2 + member) for member in range(members)])
    assert all(torch.equal(one, row) for one in after)
    assert squares[:-1] == [0.0] * members


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_narrow_number_comes_out_as_it_went_in(dtype):
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    (after, _), _ = taken([numbers, torch.zeros_like(numbers)], [1.0, 0.0])
    assert torch.equal(after.isnan(), numbers.isnan())
    assert torch.equal(after[~after.isnan()].view(torch.int16), numbers[~numbers.isnan()].view(torch.int16))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_member_without_weight_is_not_read(value):
    rows = replicas(3, 100, torch.float32)
    rows[1].fill_(value)
    after, squares = taken(rows, [0.25, 0.0, 0.75])
    assert torch.allclose(after[1], 0.25 * rows[0] + 0.75 * rows[2], atol=1e-6)
    assert squares[1] == 0.0
    assert all(map(math.isfinite, squares))
    after, squares = taken(rows, [0.25, 0.5, 0.25])
    assert not bool(after[0].isfinite().any())
    assert not any(map(math.isfinite, squares))


@pytest.mark.parametrize("bad", [(1,), (0, 1)])
def test_a_flag_of_the_device_leaves_a_member_out(bad):
    rows = replicas(3, 100, torch.float32)
    for member in bad:
        rows[member].fill_(math.nan)
    flags = [torch.tensor(member in bad) for member in range(3)]
    left = [0.0 if member in bad else weight for member, weight in enumerate([0.2, 0.3, 0.5])]
    assert taken(rows, [0.2, 0.3, 0.5], flags)[1] == taken(rows, left)[1]
    for one, other in zip(taken(rows, [0.2, 0.3, 0.5], flags)[0], taken(rows, left)[0], strict=True):
        assert torch.equal(one, other)


def test_the_mean_of_none_is_none():
    after, squares = taken(replicas(2, 33, torch.float32), [0.5, 0.5], [torch.tensor(True)] * 2)
    assert all(bool(row.isnan().all()) for row in after)
    assert math.isnan(squares[-1])


def test_the_mean_goes_elsewhere():
    rows = replicas(2, 1000, torch.float32)
    before, targets = [row.clone() for row in rows], [torch.empty(1000), torch.empty(1000)]
    cpu_kernels(2).mean(rows, targets, [0.25, 0.75])
    assert all(torch.equal(row, old) for row, old in zip(rows, before, strict=True))
    assert all(torch.allclose(one, rows[0] * 0.25 + rows[1] * 0.75, atol=1e-6) for one in targets)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(dtype):
    (row,) = replicas(1, 333, dtype)
    row[5] = math.nan
    for factor in (1.0, 0.0, 2.0, 0.3):
        after = row.clone()
        cpu_kernels(2).scale(after, torch.tensor(factor, dtype=torch.float64))
        wide = row.to(arithmetic(dtype)) * factor
        wanted = torch.zeros_like(row) if factor == 0.0 else wide.to(dtype)
        torch.testing.assert_close(after, wanted, equal_nan=True, rtol=0, atol=0)


def test_the_argument_is_that_of_the_source():
    assert cpu_library(2).size_of_mean() == MEAN.itemsize


# The means that use them.


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_module, "BLOCK", 256)
    for module in (on_streams, local, async_mean):
        monkeypatch.setattr(module, "kernels_on", lambda device, members: cpu_kernels(members))


@pytest.mark.parametrize(
    ("cards", "samples", "bad"),
    [
        ((0, 0), [3, 3], ()),
        ((0, 0), [1, 2], (0,)),
        ((0, 0, 0), [1, 2, 5], ()),
        ((0, 1, 0), [3, 3, 3], (1,)),
        ((0, 1, 2), [4, 0, 3], (0,)),
    ],
)
def test_a_mean_by_kernels_is_that_of_torch(compiled, cards, samples, bad):
    ours = FakeWorld(device_mean, cards)
    results = ours.read(ours.hold(samples, drift=True, bad=bad))
    theirs = FakeWorld(lambda world: DeviceMean(world.replicas, world.lanes, by_torch=True), cards)
    wanted = theirs.read(theirs.hold(samples, drift=True, bad=bad))
    for mine, other in zip(ours.states(), theirs.states(), strict=True):
        for name, tensor in other.items():
            rtol = 1e-2 if tensor.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(mine[name], tensor, rtol=rtol, atol=1e-6, equal_nan=True)
            assert torch.equal(mine[name], ours.states()[0][name]) or tensor.isnan().any()
    for rank, (mine, other) in enumerate(zip(results, wanted, strict=True)):
        assert (mine.drift is None) == (other.drift is None)
        # Of two replicas torch takes the distance of one for that of both, also where one is left out.
        if mine.drift is not None and rank not in bad and len(cards) - len(bad) > 1:
            assert mine.drift == pytest.approx(other.drift, rel=1e-4, abs=1e-6)
            assert mine.norm == pytest.approx(other.norm, rel=1e-5)
    assert ours.cuda.races == []


# How a card gets them.


class FakeCupy:
    """Stands for cupy, and for what it compiles."""

    def __init__(self, works: bool) -> None:
        self.options: list[tuple[str, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.entered: list[Any] = []
        stream = SimpleNamespace(from_external=self._entered)
        self.cuda = SimpleNamespace(Device=self._entered, Stream=stream)
        self.works = works

    def _entered(self, what: Any) -> Any:
        world = self

        class Context:
            def __enter__(self) -> None:
                world.entered.append(what if isinstance(what, int) else what.__cuda_stream__())

            def __exit__(self, *_: object) -> None:
                world.entered.pop()

        return Context()

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:
        if not self.works:
            raise RuntimeError("nvrtc: no such thing\nand more lines")
        assert "__global__" in code
        self.options.append(options)

        def get_function(name: str) -> Any:
            return lambda *arguments: self.launched.append((name, *arguments, tuple(self.entered)))

        return SimpleNamespace(get_function=get_function)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    properties = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for function in (fused._load, fused._say):
        function.cache_clear()
        monkeypatch.setattr(fused, function.__name__, function)
    return torch.device("cuda", 1)


def use(monkeypatch: pytest.MonkeyPatch, *, works: bool = True) -> FakeCupy:
    cupy = FakeCupy(works)
    monkeypatch.setattr(fused, "import_cupy", lambda: cupy)
    return cupy


def test_kernels_are_launched_on_torchs_current_stream(card, monkeypatch):
    cupy = use(monkeypatch)
    monkeypatch.setattr(fused, "_check", lambda *_: None)
    kernels = kernels_on(card, 2)
    assert kernels is kernels_on(card, 2)
    assert cupy.options == [("-DMEMBERS=2", f"-DTHREADS={THREADS}", "-std=c++17")]
    rows = [torch.ones(1000), torch.ones(1000)]
    kernels.mean(rows, rows, [0.5, 0.5])
    name, grid, block, (mean,), entered = cupy.launched[-1]
    assert (name, grid, block, entered) == ("mean_float32", (4,), (THREADS,), (1, (0, 77)))
    assert mean["sources"][:2].tolist() == [row.data_ptr() for row in rows]
    assert (mean.size, mean["count"], mean["written"], mean["rows"]) == (1, 1000, 2, 0)
    assert kernels.blocks(10**9) == 3 * fused.BLOCKS


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_without_a_compiler_torch_goes_on_and_says_so_once(card, monkeypatch, caplog):
    use(monkeypatch, works=False)
    assert kernels_on(card, 2) is None
    assert kernels_on(card, 3) is None
    (line,) = warnings_of(caplog)
    assert line.endswith("RuntimeError: nvrtc: no such thing")


@pytest.mark.parametrize("device", [torch.device("xpu", 0), torch.device("cuda", 0)])
def test_other_platforms(card, monkeypatch, caplog, device):
    monkeypatch.setattr(torch.version, "cuda", None)
    caplog.set_level(logging.INFO, "flowdp")
    assert [kernels_on(device, members) for members in (2, 3)] == [None, None]
    assert "this torch is not built for CUDA" in caplog.text
    assert not warnings_of(caplog)


@pytest.mark.parametrize("members", [2, 3, MEMBERS])
def test_the_check_of_a_new_kernel(members):
    fused._check(cpu_kernels(members), torch.device("cpu"), members)


def test_a_kernel_that_does_nothing_is_found():
    with pytest.raises(RuntimeError, match="is wrong"):
        fused._check(fused.Kernels(lambda *_: None, 1), torch.device("cpu"), 2)


def test_dtypes_without_a_kernel_are_left_to_torch():
    kernels = cpu_kernels(2)
    assert kernels.take([torch.ones(2)] * 2)
    assert not kernels.take([torch.ones(2), torch.ones(2, dtype=torch.float64)])
    assert not kernels.take([torch.ones(2, dtype=torch.int64)] * 2)
