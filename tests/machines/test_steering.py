"""Requests act on all machines, from whichever they come, and an error ends all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.limits import HANG_S
from tests.machines.launch import Job, Record
from tests.machines.steering import BATCH, EPOCHS, FAULT_STEP, NEW_LR, SAMPLES, START

pytestmark = pytest.mark.posix

ACTS = ("pause", "set_lr", "stop", "fail")
STEPS = SAMPLES // BATCH
NOTICED_S = 2.0


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A job in which each machine does everything once."""
    with Job("tests.machines.steering", *(f"{act}@{machine}" for act in ACTS for machine in (0, 1))) as job:
        job.ended()
        yield job


def of(job: Job, what: str, act: str, machine: int) -> list[Record]:
    """Records of both machines of the run in which this one acted, which was the first or the second."""
    found = job.wait_for(what, 4, lambda one: one.get("act") == act)
    by_machine = [[one for one in found if one["machine"] == number][machine] for number in (0, 1)]
    assert len(found) == 4
    return by_machine


@pytest.mark.parametrize("machine", [0, 1])
def test_a_pause_stops_all_devices(job: Job, machine: int) -> None:
    first, second = of(job, "paused", "pause", machine)
    assert first["step"] == second["step"] == first["calls"] + second["calls"]
    assert STEPS < first["step"] < EPOCHS * STEPS


@pytest.mark.parametrize("machine", [0, 1])
@pytest.mark.parametrize("act", ["pause", "set_lr"])
def test_the_run_goes_on_to_its_end(job: Job, act: str, machine: int) -> None:
    first, second = of(job, "steered", act, machine)
    assert first["history"] == second["history"]
    assert first["steps"] == second["steps"] == EPOCHS * STEPS
    assert [sum(samples) for *_, samples in first["history"]] == [SAMPLES] * EPOCHS
    assert not first["interrupted"]
    rates = [rate for _, _, rate, _, _ in first["history"]]
    assert (rates[0], rates[-1]) == (START, NEW_LR if act == "set_lr" else START)


@pytest.mark.parametrize("machine", [0, 1])
def test_a_stop_ends_all_in_the_same_step(job: Job, machine: int) -> None:
    first, second = of(job, "steered", "stop", machine)
    assert first["interrupted"]
    assert second["interrupted"]
    assert STEPS < first["steps"] == second["steps"] < 10_000 * STEPS
    assert first["history"] == second["history"]


@pytest.mark.parametrize("machine", [0, 1])
def test_an_error_reaches_join_on_all_machines(job: Job, machine: int) -> None:
    rank = 2 * machine + 1
    (raised,) = job.wait_for("raising", 1, lambda one: one["rank"] == rank)
    failed = job.wait_for("failed", 4)
    assert len(failed) == 4
    both = [[one for one in failed if one["machine"] == number][machine] for number in (0, 1)]
    for one in both:
        print(
            f"machine {one['machine']} hears of it after {one['found'] - raised['at']:.3f} s: {one['text']}"
        )
        assert one["kind"] == "StepError"
        assert (one["rank"], one["step"]) == (rank, FAULT_STEP)
        assert f"of rank {rank}" in one["text"]
        assert one["found"] - raised["at"] < HANG_S / 2  # long before a silent machine is lost
    there = both[1 - machine]
    assert f"machine {machine} (" in there["text"]
    assert "FaultError" in there["trace"]
    assert "in loss" in there["trace"]
