"""A machine that is killed, and the others, which train on as they are; one that fails; one that comes."""

from __future__ import annotations

import os
import random
import signal

import pytest

from tests.machines.elastic import ElasticJob, check_end, killed

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'flowdp[torchft]'")

pytestmark = [pytest.mark.posix, pytest.mark.linux]


@pytest.mark.parametrize(("policy", "leads"), [("exact", True), ("cadence", False)])
def test_the_others_train_on_when_a_machine_is_killed(policy: str, leads: bool) -> None:
    killed(leads, random.Random(f"elastic {leads}"), policy)


def test_a_machine_that_was_frozen_comes_back() -> None:
    with ElasticJob("frozen", waits=True) as job:
        begun = job.started(3, 0)
        job.wait_for("step", 3, lambda one: one["step"] >= 100)
        victim = next(one for one in begun.values() if one["rank"] == 1)
        os.kill(victim["pid"], signal.SIGSTOP)
        job.release()
        job.started(2, 1)
        os.kill(victim["pid"], signal.SIGCONT)
        # It takes part again, or where it is too late for that, finds that nothing is left to train.
        check_end(job.wait_for("trained", 3))
        assert not any(job.wait())


def test_the_last_of_three_trains_alone_to_the_end() -> None:
    with ElasticJob(waits=True) as job:
        begun = job.started(3, 0)
        job.wait_for("step", 3, lambda one: one["step"] >= 100)
        job.kill(begun.pop(2))
        job.started(2, 1)
        job.wait_for("step", 2, lambda one: one["life"] == 1)
        job.kill(begun.pop(1))
        job.release()
        job.started(1, 2)
        (trained,) = job.wait_for("trained")
        assert trained["pid"] == begun[0]["pid"]
        check_end([trained], lives=3)


def test_an_error_of_the_users_code_ends_all_machines_with_that_error() -> None:
    with ElasticJob("fails") as job:
        failed = job.wait_for("failed", 3)
        assert all(job.wait())
    for one in failed:
        assert (one["kind"], one["lives"]) == ("StepError", 1)
        assert "this sample is broken" in one["text"]


def test_a_machine_that_comes_later_takes_part() -> None:
    with ElasticJob("held", machines=2) as job:
        begun = job.started(2, 0)
        job.add({"RANK": "2"})
        job.wait_until(lambda: "which let it in behind a checkpoint" in job.output(), "one that waits")
        (job.folder / "gate").open("w").close()
        three = job.started(3)
        assert {one["pid"] for one in begun.values()} < {one["pid"] for one in three.values()}
        assert len({one["step"] for one in three.values()}) == 1
        assert three[0]["step"] > 0  # of the checkpoint that was made for it
        check_end(job.wait_for("trained", 3))
        assert not any(job.wait())
    assert (
        next(one for one in begun.values() if one["rank"] == 0)["machine"]
        == next(one for one in three.values() if one["rank"] == 0)["machine"]
    )
