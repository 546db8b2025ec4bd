"""Tests of the answers common to all sources."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest

from flowdp.data.epoch_order import EpochOrder, SamplerOrder
from flowdp.data.source import Source
from flowdp.protocol.messages import SampleRange


class Plain(Source):
    """A source with only the base class's answers."""

    def take(self, rank: int, epoch: int, batch: int, part: SampleRange | None = None) -> Any: ...


def test_its_order_tells() -> None:
    source = Plain(EpochOrder(7, 3, 0, shuffle=False, drop_last=False))
    assert (source.batch_size, source.batches, source.samples) == (3, 3, 7)
    assert [source.samples_in(4, batch) for batch in range(3)] == [3, 3, 1]
    assert source.indices(4, 1) == (3, 4, 5)
    with pytest.raises(IndexError, match="batch 3 of an epoch of 3 batches"):
        source.samples_in(0, 3)


def test_the_checksum_is_that_of_its_sampler() -> None:
    source = Plain(SamplerOrder([2, 0, 1], 2, drop_last=False))
    assert source.checksum(0) is None
    source.indices(0, 0)
    assert source.checksum(0) == zlib.crc32(struct.pack("<3q", 2, 0, 1))
    assert Plain(None).checksum(0) is None


def test_without_an_order_nothing_is_known() -> None:
    source = Plain(None)
    assert (source.batch_size, source.batches, source.samples) == (None, None, None)
    assert source.can_resume_inside
    assert source.threads() == []
