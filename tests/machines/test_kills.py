"""A machine that is killed or frozen ends the others, and the job goes on from its checkpoint."""

from __future__ import annotations

import random
import signal

import pytest

from tests.machines.kills import LOOP, killed, lost, resized

pytestmark = [pytest.mark.posix, pytest.mark.linux]


# Of sync is the job that shrinks and grows.
@pytest.mark.parametrize("policy", ["exact", "cadence"])
def test_a_killed_job_goes_on_and_trains_every_sample_once(policy: str) -> None:
    killed(policy, 2 if policy == "cadence" else 1, random.Random(f"{policy} 1"))


def test_torchrun_shrinks_and_grows_a_job_that_goes_on() -> None:
    resized("sync")


@pytest.mark.parametrize(("worker", "victim"), [("sync", 0), (LOOP, 1)])
def test_the_others_end_when_a_machine_is_killed(victim: int, worker: str) -> None:
    lost(signal.SIGKILL, victim, 60, worker)


@pytest.mark.parametrize(("worker", "victim"), [("sync", 1), (LOOP, 0)])
def test_the_others_end_when_a_machine_is_frozen(victim: int, worker: str) -> None:
    # Machine 0 keeps the store of torch.distributed, which then answers no question.
    lost(signal.SIGSTOP, victim, 60, worker)
