"""A machine that is killed or frozen ends the others, and the job goes on from its checkpoint."""

from __future__ import annotations

import random
import signal

import pytest

from tests.machines.kills import FROZEN_TIMEOUT_S, POLICIES, killed, lost

pytestmark = [pytest.mark.posix, pytest.mark.linux]

NOTICED_S = 2.0
"""Seconds until a machine has ended after another was lost; on a busy host the interpreter's end is some."""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_killed_job_goes_on_and_trains_every_sample_once(policy: str) -> None:
    killed(policy, 2 if policy == "cadence" else 1, random.Random(f"{policy} 1"))


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_when_a_machine_is_killed(victim: int) -> None:
    assert lost(signal.SIGKILL, victim, 60) < NOTICED_S + 3


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_when_a_machine_is_frozen(victim: int) -> None:
    assert lost(signal.SIGSTOP, victim, 60) < FROZEN_TIMEOUT_S + NOTICED_S
