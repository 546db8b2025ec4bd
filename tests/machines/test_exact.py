"""Machines that train exactly give the parameters of one device with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.machines.exact import CASES, EPOCHS, SAMPLES, on_one_machine
from tests.machines.launch import Job

pytestmark = pytest.mark.posix

JOBS = {2: CASES, 3: ("plain", "weights", "unlike")}
STEPS = EPOCHS * 16


@pytest.fixture(scope="module", params=JOBS, ids=lambda machines: f"{machines} machines")
def job(request: pytest.FixtureRequest) -> Iterator[tuple[int, Job, dict[tuple[str, int], Any]]]:
    """A job that has trained all of its cases, and what its machines saved."""
    machines: int = request.param
    with Job("tests.machines.exact", *JOBS[machines], processes=machines) as job:
        job.ended()
        saved = {
            (case, machine): torch.load(job.folder / f"{case}-{machine}.pt", weights_only=True)
            for case in JOBS[machines]
            for machine in range(machines)
        }
        yield machines, job, saved


@pytest.mark.parametrize("case", CASES)
def test_the_parameters_are_those_of_one_device(
    job: tuple[int, Job, dict[tuple[str, int], Any]], case: str, record_property: Any
) -> None:
    machines, done, saved = job
    if case not in JOBS[machines]:
        pytest.skip("trained by the smaller job")
    alone = on_one_machine(case)
    assert alone.global_step == STEPS
    for one in done.wait_for("trained", machines, lambda one: one["case"] == case):
        assert one["steps"] == STEPS
        assert one["samples"] == [sum(rank.samples for rank in epoch.per_rank) for epoch in alone.history]
        assert case == "sick" or one["samples"] == [SAMPLES] * EPOCHS
        assert len(one["ranks"]) == (4 if case == "unequal" else 2 * machines)
        assert min(one["ranks"]) > 0
        assert bool(one["waits"]) == (case == "rare")
        assert one["losses"] == pytest.approx([epoch.loss for epoch in alone.history], abs=1e-9)
    largest = 0.0
    for name, value in alone.state_dict.items():
        for machine in range(machines):
            mine = saved[case, machine]["model"][name]
            largest = max(largest, (mine - value).abs().max().item())
            if case not in ("unlike", "large"):
                assert torch.equal(mine, saved[case, 0]["model"][name])
    record_property("largest difference", largest)
    print(f"{case}, {machines} machines: largest difference {largest:.2e}")
    assert largest < 1e-6
    for number, moments in alone.optimizer_state["state"].items():
        for name, value in moments.items():
            mine = saved[case, machines - 1]["optimizer"]["state"][number][name]
            torch.testing.assert_close(mine, value, rtol=0, atol=1e-6)
