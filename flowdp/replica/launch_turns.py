"""Turns to launch for the ranks of a run or a loop, and the notice of one that launching limits."""

from __future__ import annotations

import logging

from flowdp.threads.launch_turn import LaunchTurn

__all__ = ["describe_launching", "open_turns"]

log = logging.getLogger("flowdp")


def open_turns(ranks: int, *, meets: bool, captures: bool = False) -> LaunchTurn | None:
    """Turns to launch for all ranks; None where there is one rank, or forwards meet those of other ranks.

    Args:
        ranks: Number of ranks.
        meets: Whether forwards meet (SyncBatchNorm): then they cannot come one after another.
        captures: Whether steps are captured where they can be.
    """

    def tell(waiting: float) -> None:
        log.warning("%s", describe_launching(waiting, ranks, captures=captures))

    return None if ranks < 2 or meets else LaunchTurn(ranks, tell)


def describe_launching(waiting: float, ranks: int, *, captures: bool) -> str:
    """Launching as the limit of a run, in words.

    Args:
        waiting: Part of the ranks' time that they wait to launch.
        ranks: Number of ranks.
        captures: Whether steps are captured where they can be.
    """
    advice = (
        "captured steps launch nearly nothing, and run.status().capture says why these are not"
        if captures
        else "larger batches have fewer launches"
    )
    return (
        f"launching: {ranks} ranks spend {100 * waiting:.0f} % of their time waiting to launch, for Python "
        f"runs in one thread at a time; {advice} (docs/gil.md)"
    )
