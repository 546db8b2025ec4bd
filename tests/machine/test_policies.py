"""Tests of the rounds chosen for a policy."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.cadence_rounds import CadenceRounds
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.epochs import Epochs
from flowdp.machine.exact_rounds import ExactRounds
from flowdp.machine.planned_rounds import SingleRounds, SyncRounds
from flowdp.machine.policies import ROUNDS, make_rounds
from flowdp.machine.rounds import Rounds
from flowdp.options import CadenceOptions, Policy

EXACT = {"policy": "exact", "global_batch": GlobalBatch(8, 30)}


def made(**given: Any) -> Rounds:
    config = CoordinatorConfig(**{"world_size": 2, "batches": 4, "epochs": 1, **given})
    return make_rounds(config, Epochs(config))


@pytest.mark.parametrize(
    ("given", "rounds", "has_cadence"),
    [
        ({"policy": "sync"}, SyncRounds, False),
        ({"policy": "cadence"}, CadenceRounds, True),
        ({"policy": "async"}, AsyncRounds, True),
        # No waits, or nothing to gain: rounds of single steps.
        ({"policy": "sync", "world_size": 1}, SingleRounds, False),
        ({"policy": "async", "world_size": 1}, SingleRounds, False),
        ({"policy": "cadence", "cadence": CadenceOptions(max_anchor=0)}, SyncRounds, False),
        ({"policy": "cadence", "cadence": CadenceOptions(max_batch_diff=0)}, SyncRounds, False),
        ({"policy": "async", "cadence": CadenceOptions(max_batch_diff=0)}, AsyncRounds, True),
        (EXACT, ExactRounds, False),
        ({**EXACT, "world_size": 1}, SingleRounds, False),
    ],
)
def test_the_class_of_a_run(given: dict[str, Any], rounds: type, has_cadence: bool) -> None:
    machine = made(**given)
    assert type(machine) is rounds
    assert (machine.cadence is not None) is has_cadence


def test_exact_needs_a_global_batch() -> None:
    with pytest.raises(ProtocolError, match="exact needs a global batch"):
        made(policy="exact")


@pytest.mark.parametrize("policy", get_args(Policy))
def test_each_policy_has_a_class_and_gets_it(policy: Policy) -> None:
    given = EXACT if policy == "exact" else {"policy": policy}
    assert type(made(**given)) is ROUNDS[policy]
