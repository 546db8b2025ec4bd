"""The class of rounds for each policy. Other modules ask the class, and not for the name of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from flowdp.errors import ProtocolError
from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.cadence_rounds import CadenceRounds
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import Epochs
from flowdp.machine.exact_rounds import ExactRounds
from flowdp.machine.rounds import Rounds
from flowdp.machine.sync_rounds import SingleRounds, SyncRounds
from flowdp.options import CadenceOptions, Policy
from flowdp.policy.cadence import Cadence

__all__ = ["ROUNDS", "make_rounds", "rounds_class"]

ROUNDS: Mapping[Policy, type[Rounds]] = {
    "sync": SyncRounds,
    "cadence": CadenceRounds,
    "async": AsyncRounds,
    "exact": ExactRounds,
}
"""Each class names the unit that is dealt by speed (`shares`), and the averaged values (`averages`)."""


def rounds_class(policy: Policy, ranks: int, options: CadenceOptions) -> type[Rounds]:
    """Class of a run's rounds. One device, and a cadence of one step, need no cadence."""
    match policy:
        case _ if ranks == 1:
            return SingleRounds
        case "exact":
            return ExactRounds
        case "async":
            return AsyncRounds
        case "cadence" if options.windows:
            return CadenceRounds
        case "sync" | "cadence":
            return SyncRounds
    assert_never(policy)  # mypy finds a policy without a case


def make_rounds(config: CoordinatorConfig, epochs: Epochs) -> Rounds:
    """Make the rounds of a run.

    Raises:
        ProtocolError: The size of the global batches is missing.
    """
    ranks, options = config.world_size, config.cadence
    kind = rounds_class(config.policy, ranks, options)
    if kind is ExactRounds:
        if config.global_batch is None:
            raise ProtocolError(f"exact needs a global batch: {config}")
        return ExactRounds(epochs, ranks, config.global_batch, config.ratios, options.speed_hint)
    if kind is AsyncRounds:
        return AsyncRounds(epochs, Cadence(ranks, options, config.ratios), ranks)
    if kind is CadenceRounds:
        inner_rounds = config.inner_rounds if len(config.machines) > 1 else 1
        return CadenceRounds(epochs, Cadence(ranks, options, config.ratios), ranks, inner_rounds)
    return SingleRounds(epochs, ranks) if kind is SingleRounds else SyncRounds(epochs, ranks)
