"""Tests of unequal ranks on the CPU, where the second one sleeps."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import unequal
from bench.gpu.part import Place
from bench.gpu.unequal import POLICIES, open_unequal

CPU = Place(torch.device("cpu"))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_trains_on_both_ranks(name: str) -> None:
    ranks, _ = open_unequal(CPU)
    assert unequal.policy_rate(ranks, name, 0.1, 0.2) > 0


@pytest.mark.posix
def test_ddp_runs_in_two_processes() -> None:
    ranks, _ = open_unequal(CPU)
    first, second = unequal.ddp_rates(ranks, 0.2, limit_s=120)
    assert first.keys() == second.keys() == {"alone", "beside", "ddp"}
    assert min(*first.values(), *second.values()) > 0
