"""The class of rounds for each policy. Other modules ask the class, and not for the name of a policy."""

from __future__ import annotations

from collections.abc import Mapping

from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.cadence_rounds import CadenceRounds
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import Epochs
from flowdp.machine.exact_rounds import ExactRounds
from flowdp.machine.planned_rounds import SingleRounds, SyncRounds
from flowdp.machine.rounds import Rounds
from flowdp.options import CadenceOptions, Policy

__all__ = ["ROUNDS", "make_rounds", "rounds_class"]

ROUNDS: Mapping[Policy, type[Rounds]] = {
    "sync": SyncRounds,
    "cadence": CadenceRounds,
    "async": AsyncRounds,
    "exact": ExactRounds,
}
"""Each class names the unit that is dealt by speed (`shares`) and the averaged values (`averages`)."""


def rounds_class(policy: Policy, ranks: int, options: CadenceOptions) -> type[Rounds]:
    """Class of a run's rounds. One device, and a cadence of one step, need no cadence."""
    if ranks == 1:
        return SingleRounds
    kind = ROUNDS[policy]
    return SyncRounds if kind is CadenceRounds and not options.windows else kind


def make_rounds(config: CoordinatorConfig, epochs: Epochs) -> Rounds:
    """Make the rounds of a run."""
    return rounds_class(config.policy, config.world_size, config.cadence)(config, epochs)
