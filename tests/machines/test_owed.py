"""An evaluation that a stop has taken on several machines is made up by all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machines.launch import Job, Record
from tests.machines.owed import EPOCHS, STOPPED

pytestmark = pytest.mark.posix

MACHINES = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job whose runs are stopped by each machine, and resumed."""
    with Job("tests.machines.owed", tmp_path_factory.mktemp("files"), processes=MACHINES) as done:
        done.ended()
        yield done


def of(job: Job, name: str) -> list[Record]:
    return job.wait_for("trained", MACHINES, lambda one: one["name"] == name)


@pytest.mark.parametrize("machine", range(MACHINES))
def test_the_resumed_run_is_the_one_without_a_stop(job: Job, machine: int) -> None:
    [whole, other] = of(job, "whole")
    assert whole["digest"] == other["digest"]
    assert all(evaluated and not owes for _, _, evaluated, owes in whole["history"])
    for one in of(job, f"stopped by {machine}"):
        assert one["interrupted"]
        assert [owes for *_, owes in one["history"]] == [False] * STOPPED + [True]
        assert not one["history"][-1][2]
    for one in of(job, f"resumed, {machine}"):
        assert not one["interrupted"]
        assert len(one["history"]) == EPOCHS
        assert (one["history"], one["digest"]) == (whole["history"], whole["digest"])
