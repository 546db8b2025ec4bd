"""Each sample is trained and evaluated once, on whichever machine, and all end with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.machines.launch import Job, Record
from tests.machines.rounds import BATCH, CASES, EPOCHS, JUDGED, SAMPLES

pytestmark = pytest.mark.posix

DEVICES = (2, 1)
STEPS = EPOCHS * -(-SAMPLES // BATCH)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A job of two machines, with two devices and one, that has trained all cases."""
    with Job("tests.machines.rounds", ",".join(map(str, DEVICES)), *CASES) as job:
        job.ended()
        yield job


def _is_of(case: str, epoch: int, one: Record) -> bool:
    return (one["case"], one["epoch"]) == (case, epoch)


def total(parts: list[str]) -> list[int]:
    return [sum(map(int, digits)) for digits in zip(*parts, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_every_sample_is_trained_once_in_each_epoch(job: Job, case: str) -> None:
    for epoch in range(EPOCHS):
        parts = job.wait_for("epoch", 2, partial(_is_of, case, epoch))
        assert total([one["counts"] for one in parts]) == [1] * SAMPLES
        assert all("1" in one["counts"] for one in parts), "a machine has trained nothing"


@pytest.mark.parametrize("case", CASES)
def test_every_sample_is_evaluated_once_after_each_epoch(job: Job, case: str) -> None:
    parts = job.wait_for("evaluated", 2, lambda one: one["case"] == case)
    assert total([one["counts"] for one in parts]) == [EPOCHS] * JUDGED
    assert all(any(map(int, one["counts"])) for one in parts), "a machine has evaluated nothing"


@pytest.mark.parametrize("case", CASES)
def test_all_machines_end_with_the_same_bits_and_records(job: Job, case: str) -> None:
    first, second = job.wait_for("trained", 2, lambda one: one["case"] == case)
    assert first["digest"] == second["digest"]
    assert first["finite"]
    assert first["history"] == second["history"]
    assert first["steps"] == second["steps"] == STEPS
    for one in (first, second):
        assert [sum(ranks) for ranks in one["samples"]] == [SAMPLES] * EPOCHS
        assert [len(ranks) for ranks in one["samples"]] == [sum(DEVICES)] * EPOCHS
    losses = [loss for _, loss, _, _ in first["history"]]
    assert losses[-1] < 0.85 * losses[0]
    assert all(eval["index"] == pytest.approx((JUDGED - 1) / 2) for *_, eval in first["history"])
