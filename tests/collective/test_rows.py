"""Tests of packed rows: tensors are aligned, keep their memory format, and come back unchanged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowdp.collective.nccl_loop import SUMMED
from flowdp.collective.rows import rows_like
from flowdp.device.copies import ALIGNMENT
from tests.loops import CPU

KINDS: list[Tensor] = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(5.0).double(),
    torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    torch.complex(torch.arange(3.0), -torch.arange(3.0)),
    torch.tensor(7.0),
    torch.arange(4.0).bfloat16(),
    torch.arange(4.0).half(),
]


def test_what_is_packed_comes_back_with_its_strides() -> None:
    first, second = rows_like(KINDS, SUMMED, [CPU, CPU])
    assert first.fill(KINDS) == [True] * len(KINDS)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    assert [row.dtype for row in first.memories] == [row.dtype for row in second.memories] == dtypes
    for view, tensor in zip(first.views, KINDS, strict=True):
        assert view is not None
        assert torch.equal(view, tensor)
        assert view.stride() == tensor.stride()
        assert (
            view.data_ptr() - first.memories[0].data_ptr()
        ) % ALIGNMENT == 0 or view.dtype != torch.float32


def test_missing_tensors_are_zero() -> None:
    (rows,) = rows_like(KINDS, SUMMED, [CPU])
    rows.fill(KINDS)
    assert rows.fill([None, *KINDS[1:]]) == [False] + [True] * (len(KINDS) - 1)
    first, second, *_ = rows.views
    assert first is not None
    assert second is not None
    assert not first.any()
    assert torch.equal(second, KINDS[1])


def test_other_strides_and_conjugates_are_copied_into_form() -> None:
    (rows,) = rows_like(KINDS, SUMMED, [CPU])
    given = list(KINDS)
    given[0] = torch.ones(1, 1).expand(2, 3)
    given[2] = KINDS[2].contiguous()
    given[3] = KINDS[3].conj()
    rows.fill(given)
    for view, tensor in zip(rows.views, given, strict=True):
        assert view is not None
        assert torch.equal(view, tensor)


def test_what_has_no_place() -> None:
    class Special(nn.Parameter):
        pass

    odd = [torch.eye(2).to_sparse(), torch.arange(3), torch.empty(0), Special(torch.ones(2))]
    with torch.inference_mode():
        odd.append(torch.ones(2))
    (rows,) = rows_like(odd, SUMMED, [CPU])
    assert rows.views == [None] * 5
    assert rows.memories == []
    assert rows.fill(odd) == [False] * 5
    (rows,) = rows_like([torch.ones(2, 2)], SUMMED, [CPU])
    for other in (odd[0], torch.ones(4), Special(torch.ones(2, 2))):
        assert rows.fill([other]) == [False]
