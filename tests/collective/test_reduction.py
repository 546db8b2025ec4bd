from __future__ import annotations

import pytest
import torch

from flowdp.collective import reduction
from flowdp.collective.reduction import flat_view, reduce_all, split_equally


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
    monkeypatch.setattr(reduction, "BLOCK", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert len(split_equally([torch.empty(200, device=device)] * 2)) == pieces
