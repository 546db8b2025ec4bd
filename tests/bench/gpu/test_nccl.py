"""Tests of the NCCL parts on a fake NCCL: they finish, and find planted errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.gpu import averaging, checks, nccl
from bench.gpu.part import Figure, Place
from flowdp.collective import nccl as collective
from flowdp.device.streams import StreamLane
from flowdp.errors import CollectiveError
from tests.collective.fake_nccl import FakeNccl
from tests.fakes import FakeCuda

CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    cuda = FakeCuda()
    lanes = [StreamLane(CPU, cuda) for _ in range(4)]
    made = FakeNccl(cuda, lanes)
    monkeypatch.setattr(made, "get_version", lambda: nccl.SHARED_SINCE)
    for module in (nccl, collective):
        monkeypatch.setattr(module, "load", lambda: made)
    for module in (averaging, checks):
        monkeypatch.setattr(module, "lanes_of", lambda devices: lanes[: len(devices)])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(Place, "needs_cuda", lambda *_: None)
    return made


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The trainings requested; all of them succeed."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(nccl, "faults_of", lambda devices, **options: asked.append(options) or [])
    return asked


def test_one_rank(fake: FakeNccl) -> None:
    found = list(nccl.measure_one(Place(CPU)))
    assert len(found) == 6
    assert (fake.destroyed, fake.aborted) == ([0], [0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks(fake: FakeNccl, trainings: list[dict[str, Any]], ranks: int) -> None:
    found = list(nccl.measure_several(ranks, Place(CPU)))
    away = next(f for f in found if isinstance(f, Figure))
    assert away.name == f"NCCL, {ranks} ranks on one card: away from float64, millionths"
    assert 0 <= away.value < 1
    assert [(t["policy"], t["stall"], t.get("leaver")) for t in trainings] == [
        ("sync", None, None),
        ("cadence", "backward", None),
        ("cadence", "averaging", None),
        ("cadence", "averaging", 1),
    ]
    assert sorted(fake.aborted) == [*range(ranks)]  # those of the run that a rank leaves
    # For the means, for those of the remaining ranks, if several, and for the bandwidth.
    others = range(ranks - 1) if ranks > 2 else ()
    assert sorted(fake.destroyed) == sorted([*range(ranks), *others, *range(ranks), *range(ranks)])
    assert fake.abused == []


def test_wrong_sums_end_the_part(fake: FakeNccl, trainings: list[dict[str, Any]]) -> None:
    fake.broken = True
    with pytest.raises(CollectiveError, match="wrong sums"):
        list(nccl.measure_several(2, Place(CPU)))
    assert trainings == []


def test_means_that_are_off_end_the_part(
    fake: FakeNccl, trainings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "deviation", lambda *_: float("nan"))
    with pytest.raises(RuntimeError, match="from float64 by nan"):
        list(nccl.measure_several(2, Place(CPU)))
