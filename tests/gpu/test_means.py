"""Tests of weighted means against float64, on every backend."""

from __future__ import annotations

import pytest
import torch

import flowdp
from bench.gpu.checks import deviation
from bench.gpu.nccl import measure_one
from bench.gpu.part import Place, Skipped
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.nccl import NcclMean


@pytest.mark.parametrize("count", [2, 3, 4])
def test_local(device, count):
    assert deviation([device] * count, DeviceMean) < 1e-6


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
    assert len(found) == 5


def test_a_part_for_cuda_says_so():
    with pytest.raises(Skipped, match="NCCL"):
        list(measure_one(Place(torch.device("cpu"))))
