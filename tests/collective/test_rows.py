"""Tests of packed rows: tensors are aligned, keep their memory format, and come back unchanged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowdp.collective.nccl_loop import SUMMED
from flowdp.collective.rows import PackedRows
from flowdp.device.flat_parameters import ALIGNMENT
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
    rows = PackedRows(KINDS, SUMMED)
    packed = rows.pack(KINDS, CPU)
    assert [row.dtype for row in packed] == [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    assert [len(row) for row in packed] == list(rows.sizes.values())
    for view, tensor in zip(rows.views(packed), KINDS, strict=True):
        assert view is not None
        assert torch.equal(view, tensor)
        assert view.stride() == tensor.stride()
        assert (view.data_ptr() - packed[0].data_ptr()) % ALIGNMENT == 0 or view.dtype != torch.float32


def test_views_have_versions_of_their_own() -> None:
    rows = PackedRows(KINDS[:1] * 2, SUMMED)
    one, other = rows.views(rows.pack(KINDS[:1] * 2, CPU))
    assert one is not None
    assert other is not None
    before = other._version
    one.mul_(2)
    assert other._version == before
    assert not one._is_view()


def test_gaps_and_missing_tensors_are_zero() -> None:
    rows = PackedRows(KINDS, SUMMED)
    for _ in range(2):  # reused memory stays zero
        given: list[Tensor | None] = [None, *KINDS[1:]]
        first, second, *_ = rows.views(rows.pack(given, CPU))
        assert first is not None
        assert second is not None
        assert not first.any()
        assert torch.equal(second, KINDS[1])
        assert rows.pack(KINDS, CPU)[0].sum() == sum(
            float(torch.view_as_real(t).sum() if t.is_complex() else t.sum())
            for t in KINDS
            if t.dtype in (torch.float32, torch.complex64)
        )
    assert not any(row.any() for row in rows.pack([None] * len(KINDS), CPU))


def test_other_strides_and_conjugates_are_copied_into_form() -> None:
    rows = PackedRows(KINDS, SUMMED)
    given = list(KINDS)
    given[0] = torch.ones(1, 1).expand(2, 3)
    given[2] = KINDS[2].contiguous()
    given[3] = KINDS[3].conj()
    for view, tensor in zip(rows.views(rows.pack(given, CPU)), given, strict=True):
        assert view is not None
        assert torch.equal(view, tensor)


def test_what_has_no_place() -> None:
    class Special(nn.Parameter):
        pass

    sparse = torch.eye(2).to_sparse()
    odd = [sparse, torch.arange(3), torch.empty(0), torch.ones(2)]
    with torch.inference_mode():
        odd.append(torch.ones(2))
    rows = PackedRows(odd, SUMMED, [True, True, True, False, True])
    assert rows.places == [None] * 5
    assert rows.views(rows.pack(odd, CPU)) == [None] * 5
    (place,) = PackedRows([torch.ones(2, 2)], SUMMED).places
    assert place is not None
    assert place.fits(torch.zeros(2, 2))
    for other in (sparse, torch.ones(2, 2).half(), torch.ones(4), Special(torch.ones(2, 2))):
        assert not place.fits(other)


def test_a_strip_is_a_part_of_a_row() -> None:
    rows = PackedRows(KINDS, SUMMED)
    place = rows.places[2]
    assert place is not None
    (whole, *_) = rows.pack(KINDS, CPU)
    assert torch.equal(rows.strip([(place, KINDS[2])], CPU), whole[place.start : place.stop])
