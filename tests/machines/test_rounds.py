"""Each sample is trained and evaluated once, on whichever machine, and all end with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.machines.launch import Job, Record
from tests.machines.rounds import BATCH, CASES, EPOCHS, JUDGED, SAMPLES, STREAMED

pytestmark = pytest.mark.posix

DEVICES = (2, 1)
STEPS = EPOCHS * -(-SAMPLES // BATCH)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A job of two machines, with two devices and one, that has trained all cases."""
    with Job("tests.machines.rounds", ",".join(map(str, DEVICES)), *CASES) as job:
        job.ended()
        yield job


@pytest.fixture(scope="module")
def streamed() -> Iterator[Job]:
    """The same of an IterableDataset."""
    with Job("tests.machines.rounds", ",".join(map(str, DEVICES)), "streamed") as job:
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
    judge_end(job, case)


@pytest.mark.parametrize("case", STREAMED)
def test_every_sample_of_a_stream_is_trained_once_in_each_epoch(streamed: Job, case: str) -> None:
    for epoch in range(EPOCHS):
        first, second = sorted(
            streamed.wait_for("epoch", 2, partial(_is_of, case, epoch)), key=lambda one: one["machine"]
        )
        assert total([first["counts"], second["counts"]]) == [1] * SAMPLES
        if "parts" in case:
            assert first["counts"] == "".join("1" if index % 4 == 0 else "0" for index in range(SAMPLES))
        elif "processes" not in case:  # machine m has every second batch, from number m on
            assert first["counts"] == "".join(str(1 - index // BATCH % 2) for index in range(SAMPLES))


@pytest.mark.parametrize("case", STREAMED)
def test_all_machines_end_the_training_of_a_stream_alike(streamed: Job, case: str) -> None:
    judge_end(streamed, case)


def test_streams_of_different_lengths_are_refused_on_all_machines() -> None:
    with Job("tests.machines.rounds", "1,1", "unequal") as job:
        job.ended()
        for one in job.wait_for("refused", 2):
            assert "epoch 1 has " in one["text"]
            assert "batches on machine" in one["text"]
            assert "give its random numbers a seed" in one["text"]


def judge_end(job: Job, case: str) -> None:
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
