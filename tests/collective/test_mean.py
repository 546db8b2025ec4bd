import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flowdp.collective import mean as mean_module
from flowdp.collective.base import is_held
from flowdp.collective.mean import (
    BlockMean,
    Part,
    Site,
    arithmetic,
    flat_view,
    reduce_all,
    relative_drift,
    shift,
    split_equally,
)
from flowdp.device.flat_parameters import Flat
from flowdp.errors import ProtocolError
from flowdp.protocol.messages import Outcome

SPLIT, LENGTH = 1600, 1920


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so short that every memory has several, the last one shorter."""
    monkeypatch.setattr(mean_module, "BLOCK", 384)


def memories(members: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randn(LENGTH, generator=draw).to(dtype)] for _ in range(members)]


def copies(sources: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in column] for column in sources]


def reference(sources: list[list[torch.Tensor]], samples: list[int]) -> torch.Tensor:
    """The mean in float64."""
    given = [(count, column[0].double()) for count, column in zip(samples, sources, strict=True) if count]
    return sum(count * tensor for count, tensor in given) / sum(samples)


def averaged(sources, samples, *, split=SPLIT, parts=1, drift=False):
    """Average in place, part after part; returns the memories, and the sums of squares of all parts."""
    ours = copies(sources)
    flats = [Flat(ours[0][0], split)]
    sums = [
        BlockMean(flats, ours, ours, part=Part(index, parts)).reduce(samples, drift=drift)
        for index in range(parts)
    ]
    squares = sum(part.double() for part in sums).tolist() if drift else sums[0]
    return [column[0] for column in ours], squares


SAMPLES = [
    [3],
    [320, 192],
    [0, 64],
    [5, 3, 9],
    [5, 0, 9],
    [7, 1, 1, 30],
]


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2**-8)]
)
def test_the_mean_is_that_of_float64(samples, drift, dtype, tolerance):
    sources = memories(len(samples), dtype)
    wanted = reference(sources, samples)
    after, _ = averaged(sources, samples, drift=drift)
    size = reference([[column[0].abs()] for column in sources], samples)  # of the terms, which may cancel
    for memory in after:
        assert float(((memory.double() - wanted).abs() / size).max()) <= tolerance
        assert torch.equal(memory, after[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_rounded_once(dtype):
    sources = memories(5, dtype)
    samples = [3, 1, 4, 1, 5]
    after, _ = averaged(sources, samples)
    wanted = reference(sources, samples)[:SPLIT]
    rounded = wanted.to(dtype)
    different = after[0][:SPLIT] != rounded
    # A sum in `dtype` itself would round five times, and be wrong for about half of them.
    assert float(different.float().mean()) < 0.01


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=5).filter(any), st.integers(1, 9), st.booleans())
def test_parts_change_no_bit(samples, parts, drift):
    sources = memories(len(samples), seed=sum(samples))
    whole, sums = averaged(sources, samples, drift=drift)
    divided, sums_divided = averaged(sources, samples, parts=parts, drift=drift)
    assert all(torch.equal(one, other) for one, other in zip(whole, divided, strict=True))
    assert not drift or sums_divided == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("samples", SAMPLES)
def test_measuring_the_drift_changes_no_bit(samples):
    sources = memories(len(samples))
    bare, none = averaged(sources, samples)
    measured, squares = averaged(sources, samples, drift=True)
    assert all(torch.equal(one, other) for one, other in zip(bare, measured, strict=True))
    assert none is None
    mean = measured[0][:SPLIT].double()
    wanted = [
        float((column[0][:SPLIT].double() - mean).square().sum()) if count else 0.0
        for column, count in zip(sources, samples, strict=True)
    ]
    assert squares == pytest.approx([*wanted, float(mean.square().sum())], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("samples", [[1, 10_000], [10_000, 1]])
def test_distances_keep_their_digits_at_unequal_weights(samples):
    """The heavy replica is so close to the mean that their difference is one rounding error."""
    (first,), (away,) = memories(2)
    sources = [[first + 10.0], [first + 10.0 + away * 1e-3]]
    _, squares = averaged(sources, samples, drift=True)
    mean = reference(sources, samples)
    wanted = [float((column[0].double() - mean)[:SPLIT].square().sum()) for column in sources]
    assert squares[:2] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    ("samples", "dtype"),
    [([1, 200], torch.float32), ([320, 192], torch.bfloat16), ([5, 3, 9], torch.bfloat16)],
)
def test_sources_stay_whole_where_the_mean_goes_elsewhere(samples, dtype):
    sources = memories(len(samples), dtype)
    before = copies(sources)
    target = [torch.empty(LENGTH, dtype=arithmetic(dtype))]
    flats = [Flat(sources[0][0], SPLIT)]
    squares = BlockMean(flats, sources, [target]).reduce(samples, drift=True).tolist()
    assert all(torch.equal(one[0], other[0]) for one, other in zip(sources, before, strict=True))
    wanted = reference(sources, samples)
    assert torch.allclose(target[0].double(), wanted, rtol=1e-6, atol=1e-6)
    assert squares[-1] == pytest.approx(float(wanted[:SPLIT].square().sum()), rel=1e-5)
    assert squares[0] == pytest.approx(
        float((sources[0][0].double() - wanted)[:SPLIT].square().sum()), rel=1e-4
    )


@pytest.mark.parametrize("samples", [[1, 2], [3, 7, 11, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_replicas_stay_equal_to_the_bit(samples, dtype):
    (same,) = memories(1, dtype)
    after, squares = averaged([same] * len(samples), samples, drift=True)
    assert all(torch.equal(memory, same[0]) for memory in after)
    assert squares[:-1] == [0.0] * len(samples)


def test_infinities_in_buffers_stay():
    sources = memories(2)
    for (memory,) in sources:
        memory[SPLIT : SPLIT + 20] = -math.inf  # an attention mask
    after, _ = averaged(sources, [1, 2])
    assert bool((after[1][SPLIT : SPLIT + 20] == -math.inf).all())
    assert bool(after[1][SPLIT + 20 :].isfinite().all())


@pytest.mark.parametrize("samples", [[0, 4], [2, 0, 3]])
def test_a_rank_without_samples_gives_nothing(samples):
    sources = memories(len(samples))
    silent = samples.index(0)
    sources[silent][0].fill_(math.nan)
    after, squares = averaged(sources, samples, drift=True)
    assert torch.allclose(after[silent].double(), reference(sources, samples), atol=1e-6)
    assert squares[silent] == 0.0
    assert all(map(math.isfinite, squares))


@pytest.mark.parametrize(("dtype", "members"), [(torch.int64, 3), (torch.uint8, 2)])
def test_integers_take_the_maximum(dtype, members):
    draw = torch.Generator().manual_seed(0)
    sources = [[torch.randint(0, 100, (LENGTH,), generator=draw).to(dtype)] for _ in range(members)]
    wanted = torch.stack([column[0] for column in sources]).amax(0)
    after, _ = averaged(sources, [1] * members, split=0, parts=2)
    assert all(torch.equal(memory, wanted) for memory in after)


def test_a_round_without_samples_is_a_bug():
    with pytest.raises(ProtocolError, match="has trained a sample"):
        averaged(memories(2), [0, 0])


@pytest.mark.parametrize(
    ("square", "mean_square", "drift"),
    [(0.04, 4.0, 0.1), (0.0, 4.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1e-20, 0.0), (1e-18, 1e-18, 1.0)],
)
def test_relative_drift(square, mean_square, drift):
    assert relative_drift(square, mean_square) == pytest.approx(drift)


@pytest.mark.parametrize(("square", "mean_square"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)])
def test_relative_drift_shows_what_is_not_a_number(square, mean_square):
    assert math.isnan(relative_drift(square, mean_square))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shift_adds_the_difference_to_parameters_alone(dtype):
    (ours,), (snapshot,) = memories(2, dtype)
    mean = torch.randn(LENGTH, dtype=arithmetic(dtype))
    before = ours.clone()
    shift(Flat(ours, SPLIT), mean, snapshot)
    wanted = (before.double() + (mean.double() - snapshot.double()))[:SPLIT]
    # The result is rounded to its dtype; the difference is as exact as the arithmetic.
    rounding = torch.finfo(dtype).eps / 2 * wanted.abs()
    operands = (before.double().abs() + mean.double().abs() + snapshot.double().abs())[:SPLIT]
    bound = 1.01 * rounding + torch.finfo(arithmetic(dtype)).eps * operands
    assert bool(((ours[:SPLIT].double() - wanted).abs() <= bound).all())
    assert torch.equal(ours[SPLIT:], before[SPLIT:])


@pytest.mark.parametrize(
    ("samples", "far", "dtype"),
    [([3, 5], [0], torch.float32), ([5, 0, 9], [1], torch.bfloat16), ([0, 2, 1], [0, 1], torch.float32)],
)
def test_what_lies_far_is_brought_near_first(samples, far, dtype, monkeypatch):
    """Arithmetic uses only scratch and near memory; all else is copied."""
    sources = memories(len(samples), dtype)
    ours = copies(sources)
    flats = [Flat(ours[0][0], SPLIT)]
    there = [ours[member][0] for member in far]
    touched = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not torch.ops.aten.copy_.default:
                for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
                    if isinstance(tensor, torch.Tensor):
                        address = tensor.untyped_storage().data_ptr()
                        touched.append(any(t.untyped_storage().data_ptr() == address for t in there))
            return func(*args, **(kwargs or {}))

    mean = BlockMean(flats, ours, ours, site=Site(far=far))
    with Watch():
        squares = mean.reduce(samples, drift=True)
    assert touched
    assert not any(touched)
    wanted, sums = averaged(sources, samples, drift=True)
    for (memory,), near in zip(ours, wanted, strict=True):
        assert torch.allclose(memory.double(), near.double(), rtol=2**-8 if dtype != torch.float32 else 1e-6)
        assert torch.equal(memory, ours[0][0])
    assert squares.tolist() == pytest.approx(sums, rel=1e-4)


def test_a_mean_of_all_machines_is_held_where_only_inner_rounds_have_samples() -> None:
    called_away = Outcome(3, 40, (0, 1), (0, 0), (0, 0), hurried=True, earlier=(80, 40))
    assert is_held(called_away)
    assert not is_held(Outcome(3, 40, (0, 1), (0, 0), (0, 0)))
    assert not is_held(Outcome(3, 40, (0, 1), (0, 0), (0, 0), inner=True))
    assert not is_held(Outcome(3, 40, (0,), (1,), (8,)))


# ---------------------------------------------------------------- reductions of tensors of one shape
def tensors(count: int, dtype: torch.dtype = torch.float32, size: int = 101) -> list[torch.Tensor]:
    torch.manual_seed(count)
    return [(torch.randn(size) * 8).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_every_tensor_becomes_the_reduction(count, op):
    given = tensors(count)
    stack = torch.stack(given).double()
    wanted = {"sum": stack.sum(0), "mean": stack.mean(0), "max": stack.amax(0), "min": stack.amin(0)}[op]
    reduce_all(given, op)
    assert torch.allclose(given[0].double(), wanted, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(tensor, given[0]) for tensor in given)


def test_terms_are_added_in_the_order_of_the_tensors():
    given = [torch.tensor([value]) for value in (2.0**24, 1.0, 1.0)]
    reduce_all(given, "sum")
    assert given[2].item() == 2.0**24  # each 1.0 is lost; in the other order they would count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_added_in_float32(dtype):
    given = [torch.full((40,), value, dtype=dtype) for value in [1.0] + 8 * [2.0**-9]]
    reduce_all(given, "sum")
    assert given[0][0].item() == torch.tensor(1.0 + 8 * 2.0**-9).to(dtype).item() > 1.0
    largest = [torch.full((40,), 60_000.0, dtype=dtype) for _ in range(2)]
    reduce_all(largest, "mean")
    assert torch.isfinite(largest[1]).all()


def test_integers_stay_integers():
    given = [torch.tensor([2**62 + 1, 5]), torch.tensor([0, -7])]
    reduce_all(given, "sum")
    assert given[1].tolist() == [2**62 + 1, -2]


def test_shares():
    given = tensors(3)
    wanted = given[0] * 0.25 + given[2] * 0.75
    given[1].fill_(torch.nan)
    reduce_all(given, "sum", [0.25, 0.0, 0.75])
    assert all(torch.allclose(tensor, wanted) for tensor in given)
    last = tensors(3)
    wanted = last[2].clone()
    reduce_all(last, "sum", [0.0, 0.0, 1.0])
    assert all(torch.equal(tensor, wanted) for tensor in last)


def test_flat_view_shares_memory_where_it_can():
    dense = torch.zeros(2, 3)
    flat_view(dense)[4] = 1.0
    assert dense[1, 1] == 1.0
    assert flat_view(torch.zeros(2, dtype=torch.complex64)).shape == (4,)
    turned = torch.arange(6).view(2, 3).t()
    assert flat_view(turned).tolist() == turned.flatten().tolist()
    assert not flat_view(torch.zeros(2, requires_grad=True)).requires_grad


@pytest.mark.parametrize(("device", "pieces"), [("cpu", 7), ("meta", 1)])
def test_the_cpu_alone_has_small_pieces(device: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_module, "BLOCK", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert len(split_equally([torch.empty(200, device=device)] * 2)) == pieces
