"""Comparison of two outputs of a module, which may differ by rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdp.device.trees import flatten

__all__ = ["compare", "is_close"]

FINEST = 1e-14
"""The finest rounding that is told from a difference: sums in float64 have many."""

FLIPS = 0.02
"""Fraction of a tensor that may differ where ties are common: integers, and floats of 16 bits."""


def compare(whole: Any, joined: Any, epsilon: float, what: str = "output") -> list[str]:
    """The differences, in words, between outputs of the whole batch and those of its parts: any pytrees.

    Args:
        whole: Outputs of the whole batch.
        joined: Those of the parts.
        epsilon: The coarsest rounding in their computation.
        what: Their name, for a message.
    """
    mine, form = flatten(whole)
    others, other_form = flatten(joined)
    if form != other_form:
        return [f"the whole batch gives {form!s:.120}, its parts {other_form!s:.120}"]
    leaves = zip(form.paths(), mine, others, strict=True)
    found = [(name, _difference(own, other, epsilon)) for name, own, other in leaves]
    return [f"{what}{name} {text}" for name, text in found if text is not None]


def is_close(mine: Tensor, other: Tensor, epsilon: float) -> bool:
    """Whether two numbers are the same but for rounding. Both of shape []."""
    return _difference(mine, other, epsilon) is None


def _difference(mine: Any, other: Any, epsilon: float) -> str | None:
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return None if _is_same(mine, other) else _both(_shown(mine), _shown(other))
    if mine.shape != other.shape:
        return f"has shape {tuple(mine.shape)} for the whole batch, and {tuple(other.shape)} for its parts"
    if not mine.numel() or mine.layout is not torch.strided or mine.is_nested:
        return None
    if not mine.is_floating_point() and not mine.is_complex():
        places = int((mine != other).sum())
        if not mine.dim():  # a count of hits may be one more, by a tie that rounding broke
            return _both(mine.item(), other.item()) if abs(int(mine) - int(other)) > 1 else None
        return f"differs at {places} of {mine.numel()} places" if places > 1 + FLIPS * mine.numel() else None
    wide = torch.complex128 if mine.is_complex() else torch.float64 if epsilon < 1e-12 else torch.float32
    mine, other = mine.to(wide), other.to(wide)
    finite = mine.isfinite() & other.isfinite()
    if not torch.isclose(mine, other, rtol=0.0, atol=0.0, equal_nan=True)[~finite].all():
        return "is finite at other places"
    gap = torch.where(finite, (mine - other).abs(), 0)
    scale = torch.where(finite, torch.maximum(mine.abs(), other.abs()), 0).max()
    # Rounding adds up in a tensor, and is averaged out in the mean of one.
    allowed = scale * max(epsilon, FINEST) ** (0.5 if mine.dim() else 0.75) + 4 * epsilon
    if (gap > allowed).double().mean() <= (FLIPS if epsilon > 3e-7 and mine.dim() else 0.0):
        return None
    if not mine.dim():
        return _both(f"{mine.item():.6g}", f"{other.item():.6g}")
    return f"differs by up to {gap.max().item():.3g}, with values up to {scale.item():.3g}"


def _both(mine: object, other: object) -> str:
    return f"is {mine} for the whole batch, and {other} for its parts"


def _shown(one: object) -> str:
    return "a tensor" if isinstance(one, Tensor) else f"{one!r:.80}"


def _is_same(mine: Any, other: Any) -> bool:
    if isinstance(mine, np.ndarray):
        return np.array_equal(mine, other, equal_nan=mine.dtype.kind in "fc")
    try:
        return mine is other or (type(mine) is type(other) and bool(mine == other or mine != mine))
    except Exception:  # no one answer: join has compared the parts
        return True
