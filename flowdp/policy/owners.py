"""Owners of a model's parameters among the ranks: each parameter has one, which alone steps it.

Source: stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), here with whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["divide"]


def divide(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Divide parameters among ranks, in their order, so that each has about as many elements.

    Args:
        sizes: Elements of each parameter. Shape (parameters,).
        ranks: Number of ranks.

    Returns:
        The owner of each: neighbours have the same one, or the next that has any. Shape (parameters,).
    """
    total, before, owners = max(1, sum(sizes)), 0, []
    for size in sizes:
        # By its middle: a large one goes to the rank that would have most of it.
        owners.append(min(ranks - 1, (2 * before + size) * ranks // (2 * total)))
        before += size
    return tuple(owners)
