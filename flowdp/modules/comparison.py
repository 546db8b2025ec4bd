"""Comparison of two outputs of a module, which may differ by rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdp.data.trees import flatten

__all__ = ["Difference", "compare", "is_close"]

LIMITS = (
    (1e-12, 1e-9, 1e-9),  # float64
    (3e-7, 2e-4, 5e-6),  # float32
    (2e-3, 2e-2, 2e-3),  # TF32, float16
    (1.0, 1e-1, 1e-2),  # bfloat16 and coarser
)
"""(coarsest rounding, relative difference of a tensor, of one number) that is no more than rounding."""

FLIPS = 0.02
"""Fraction of a tensor that may differ where ties are common: integers, and floats of 16 bits."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One output that differs.

    Attributes:
        path: The keys, names and positions that lead to it.
        text: The difference in words, for a message.
        mine: Value for the whole batch; None where it is no tensor, or the trees differ.
        other: Value for the parts.
    """

    path: tuple[Any, ...]
    text: str
    mine: Tensor | None = None
    other: Tensor | None = None

    @property
    def is_number(self) -> bool:
        """Whether it is between two floats of shape []."""
        both = (self.mine, self.other)
        return all(one is not None and one.dim() == 0 and one.is_floating_point() for one in both)


def compare(whole: Any, joined: Any, epsilon: float) -> list[Difference]:
    """The differences between the outputs of the whole batch and those of its parts, joined: any pytrees.

    `epsilon` is the coarsest rounding in their computation.
    """
    mine, form = flatten(whole)
    others, other_form = flatten(joined)
    if form != other_form:
        return [Difference((), f"the whole batch gives {_short(form)}, its parts {_short(other_form)}")]
    found = []
    for path, name, own, other in zip(form.key_paths(), form.paths(), mine, others, strict=True):
        text = _difference(own, other, epsilon)
        if text is not None:
            is_tensor = isinstance(own, Tensor) and isinstance(other, Tensor)
            pair = (own, other) if is_tensor else (None, None)
            found.append(Difference(path, f"output{name} {text}", *pair))
    return found


def is_close(mine: Tensor, other: Tensor, epsilon: float) -> bool:
    """Whether two numbers are the same but for rounding. Both of shape []."""
    return _difference(mine, other, epsilon) is None


def _difference(mine: Any, other: Any, epsilon: float) -> str | None:
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return (
            None
            if _is_same(mine, other)
            else f"is {mine!r:.80} for the whole batch, and {other!r:.80} for its parts"
        )
    if mine.shape != other.shape:
        return f"has shape {tuple(mine.shape)} for the whole batch, and {tuple(other.shape)} for its parts"
    if not mine.numel() or mine.layout is not torch.strided or mine.is_nested:
        return None
    if not mine.is_floating_point() and not mine.is_complex():
        return _integers(mine, other)
    wide = torch.complex128 if mine.is_complex() else torch.float64 if epsilon < 1e-12 else torch.float32
    mine, other = mine.to(wide), other.to(wide)
    finite = mine.isfinite() & other.isfinite()
    strange = (~finite & ~torch.isclose(mine, other, equal_nan=True)).any()
    gap = torch.where(finite, (mine - other).abs(), 0)
    scale = torch.where(finite, torch.maximum(mine.abs(), other.abs()), 0).max()
    _, of_tensor, of_number = next(limits for limits in LIMITS if epsilon <= limits[0])
    allowed = scale * (of_tensor if mine.dim() else of_number) + 4 * epsilon
    beyond = (gap > allowed).double().mean()
    if not bool(strange) and float(beyond) <= (FLIPS if epsilon > 3e-7 and mine.dim() else 0.0):
        return None
    if not mine.dim():
        return f"is {mine.item():.6g} for the whole batch, and {other.item():.6g} for its parts"
    if bool(strange):
        return "is finite at other places"
    return f"differs by up to {gap.max().item():.3g}, with values up to {scale.item():.3g}"


def _integers(mine: Tensor, other: Tensor) -> str | None:
    if not mine.dim():
        # A count of hits may be one more, by a tie that rounding broke.
        gap = abs(int(mine) - int(other))
        return f"is {mine.item()} for the whole batch, and {other.item()} for its parts" if gap > 1 else None
    places = int((mine != other).sum())
    if places <= max(1, FLIPS * mine.numel()):
        return None
    return f"differs at {places} of {mine.numel()} places"


def _is_same(mine: Any, other: Any) -> bool:
    if isinstance(mine, np.ndarray):
        return np.array_equal(mine, other, equal_nan=mine.dtype.kind in "fc")
    try:
        return mine is other or (type(mine) is type(other) and bool(mine == other or mine != mine))
    except Exception:  # no one answer: join has compared the parts
        return True


def _short(form: object) -> str:
    text = str(form)
    return text if len(text) <= 120 else text[:117] + "..."
