"""Tests of weighted means against float64, on every backend."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flowdp
from bench.gpu.checks import deviation
from bench.gpu.nccl import measure_one
from bench.gpu.part import Place, Skipped
from flowdp.collective.fused import kernels_on
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.mean import BlockMean
from flowdp.collective.nccl import NcclMean
from flowdp.device.flat_parameters import Flat


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("by_torch", [False, True])
def test_local(device, count, by_torch):
    assert deviation([device] * count, partial(DeviceMean, by_torch=by_torch)) < 1e-6


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("members", [2, 3, 4, 8])
@pytest.mark.parametrize(("count", "offset"), [(1, 0), (1021, 1), (3_000_001, 0)])
@pytest.mark.parametrize("bad", [None, 1])
def test_kernels_are_as_torch_to_rounding(dtype, members, count, offset, bad):
    pytest.importorskip("cupy")
    card = torch.device("cuda", 0)
    kernels = kernels_on(card, members)
    assert kernels is not None
    rows = [torch.randn(count + offset, device=card).to(dtype)[offset:] for _ in range(members)]
    samples = [2 * rank + 1 for rank in range(members)]
    weights = [number / sum(samples) for number in samples]
    flags = [torch.tensor(rank == bad, device=card) for rank in range(members)]
    if bad is not None:
        rows[bad].fill_(torch.nan)
        samples[bad] = 0
    after = [row.clone() for row in rows]
    ours = torch.empty(kernels.blocks(count), members + 1, dtype=torch.float64, device=card)
    stream = torch.cuda.Stream(card)
    stream.wait_stream(torch.cuda.current_stream(card))
    with torch.cuda.stream(stream):
        kernels.mean(after, after, weights, flags, ours)
    stream.synchronize()
    memories = [[row.clone()] for row in rows]
    theirs = BlockMean([Flat(memories[0][0], count)], memories, memories).reduce(samples, drift=True)
    eps = torch.finfo(dtype).eps
    for row, (memory,) in zip(after, memories, strict=True):
        torch.testing.assert_close(row, memory, rtol=2 * eps, atol=1e-6)
        assert torch.equal(row, after[0])
    torch.testing.assert_close(ours.sum(0), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [2, 3])
def test_through_the_host(ranks, count):
    assert deviation(ranks(count), lambda flats, lanes: HostMean(flats, lanes, lambda _: None)) < 1e-6


@pytest.mark.gpu(2)
@pytest.mark.parametrize("make", [DeviceMean, NcclMean])
def test_between_cards(make):
    assert deviation([torch.device("cuda", 0), torch.device("cuda", 1)], make) < 1e-6


@pytest.mark.gpu(1)
def test_nccl_with_one_rank():
    try:
        found = list(measure_one(Place(torch.device("cuda", 0))))
    except flowdp.CollectiveError as error:
        if "cannot be imported" not in str(error):
            raise
        pytest.skip(str(error))
    assert len(found) == 6


def test_a_part_for_cuda_says_so():
    with pytest.raises(Skipped, match="NCCL"):
        list(measure_one(Place(torch.device("cpu"))))
