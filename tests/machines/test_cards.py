"""Machines with CUDA devices, on fake streams: the same results as on the CPU, by either path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.machines import exact
from tests.machines.cards import EXACT, ROUNDS
from tests.machines.launch import Job
from tests.machines.rounds import EPOCHS, SAMPLES
from tests.machines.test_rounds import judge_end, total

pytestmark = pytest.mark.posix

COLLECTIVES = {"auto": "HostMean", "nccl": "NcclMean"}


@pytest.fixture(scope="module", params=COLLECTIVES)
def job(request: pytest.FixtureRequest) -> Iterator[tuple[str, Job]]:
    """A job of two machines that has trained all cases of a backend."""
    with Job("tests.machines.cards", request.param) as job:
        job.ended()
        yield request.param, job


def test_streams_wait_for_each_other(job: tuple[str, Job]) -> None:
    backend, done = job
    for one in done.wait_for("over", 2):
        # The detector takes the hosts' memory for a card's: tests of the collective look there.
        assert backend == "auto" or one["races"] == []
        assert one["collectives"] == [COLLECTIVES[backend]] * (len(EXACT) + len(ROUNDS[backend]))


@pytest.mark.parametrize("case", EXACT)
def test_exact_is_one_machine(job: tuple[str, Job], case: str) -> None:
    alone = exact.on_one_machine(case)
    first, second = (
        torch.load(job[1].folder / f"{case}-{machine}.pt", weights_only=True)["model"] for machine in (0, 1)
    )
    assert [one["waits"] for one in job[1].wait_for("trained", 2, lambda one: one["case"] == case)] == [0, 0]
    for name, value in alone.state_dict.items():
        assert torch.equal(first[name], second[name])
        assert (first[name] - value).abs().max() < 1e-6


@pytest.mark.parametrize("case", ROUNDS["auto"])
def test_every_sample_is_trained_once_and_all_machines_end_alike(job: tuple[str, Job], case: str) -> None:
    backend, done = job
    if case not in ROUNDS[backend]:
        pytest.skip("refused by NCCL, which sends numbers as they are and is waited for")
    for epoch in range(EPOCHS):
        parts = done.wait_for("epoch", 2, lambda one, at=epoch: (one["case"], one["epoch"]) == (case, at))
        assert total([one["counts"] for one in parts]) == [1] * SAMPLES
    judge_end(done, case)
