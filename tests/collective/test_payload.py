"""What travels between machines: every payload has a pack, and what it changes."""

from __future__ import annotations

from typing import get_args

import torch

from flowdp.collective.payload import PACKS
from flowdp.options import Payload


def test_each_payload_has_a_pack() -> None:
    assert set(PACKS) == set(get_args(Payload))


def test_bf16_halves_float32_alone() -> None:
    single, double = torch.randn(5), torch.randn(5, dtype=torch.float64)
    assert torch.equal(PACKS["bf16"](single), single.bfloat16())
    assert PACKS["bf16"](double) is double
    assert PACKS["full"](single) is single
