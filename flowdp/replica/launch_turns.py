"""Turns to launch for the ranks of a run, and the notice of a run that launching limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from flowdp.replica.replica import Replica
from flowdp.threads.launch_turn import LaunchTurn

__all__ = ["describe_launching", "open_turns", "turns_of"]

log = logging.getLogger("flowdp")


def open_turns(replicas: Sequence[Replica]) -> LaunchTurn | None:
    """Turns to launch for all replicas of a run; None where there is one rank, or forwards meet inside."""
    if len(replicas) < 2 or any(replica.meets for replica in replicas):
        return None
    captures = any(replica.captured is not None for replica in replicas)
    turn = LaunchTurn(len(replicas), partial(_tell, len(replicas), captures=captures))
    for replica, one in zip(replicas, turn.ranks, strict=True):
        replica.turn = one
    return turn


def turns_of(ranks: int) -> LaunchTurn:
    """Turns to launch for the ranks of a loop of one's own."""
    return LaunchTurn(ranks, partial(_tell, ranks))


def describe_launching(waiting: float, ranks: int, *, captures: bool) -> str:
    """Launching as the limit of a run, in words.

    Args:
        waiting: Part of the ranks' time that they wait to launch.
        ranks: Ranks of the run.
        captures: Whether steps are captured where they can be.
    """
    advice = "these are steps that are not captured" if captures else "capture=True takes it out of the step"
    return (
        f"launching: {ranks} ranks spend {100 * waiting:.0f} % of their time waiting to launch, for Python "
        f"runs in one thread at a time; {advice} (docs/gil.md)"
    )


def _tell(ranks: int, waiting: float, *, captures: bool = False) -> None:
    log.warning("%s", describe_launching(waiting, ranks, captures=captures))
