"""Tests of seeding: the same draws from each generator of the process, and none moved by what is kept."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from flowdp import seed_everything
from flowdp.device.seeding import generators_kept
from tests.accelerators import pretend


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_the_same_seed_gives_the_same_draws() -> None:
    with generators_kept():
        seed_everything(3)
        first, second = draws(), draws()
        seed_everything(3)
        assert draws() == first
        seed_everything(4)
        third = draws()
    assert all(len({a, b, c}) == 3 for a, b, c in zip(first, second, third, strict=True))


def test_kept_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    with generators_kept():
        seed_everything(5)
        first = draws()
        expected = draws()
        seed_everything(5)
        assert draws() == first
        with generators_kept():
            seed_everything(6)
            draws()
        assert draws() == expected


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize("is_named", [True, False])
def test_generators_of_devices_are_kept(is_named: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generators = tuple(torch.Generator().manual_seed(seed) for seed in range(2))
    module = pretend(monkeypatch, kind)
    monkeypatch.setattr(module, "default_generators", generators)
    monkeypatch.setattr(module, "is_initialized", lambda: True)
    before = [generator.get_state() for generator in generators]
    with generators_kept([torch.device(kind, 1)] if is_named else None):
        for generator in generators:
            torch.rand(3, generator=generator)
    is_kept = [torch.equal(own.get_state(), was) for own, was in zip(generators, before, strict=True)]
    assert is_kept == [not is_named, True]
