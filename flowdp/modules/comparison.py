"""Comparison of two outputs of a module: computed without randomness, they may differ by rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from flowdp.device.compiled import take_out
from flowdp.device.dispatch import RankMode
from flowdp.device.trees import flatten

__all__ = ["ConstantDraws", "compare", "is_close", "still"]

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


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

TF32 = 2.0**-11
"""Rounding of float32 products on tensor cores."""

MOST_DRAWS = 2_000
"""A forward that draws more often waits for a number that it likes: from there on it gets random ones."""

DROPOUT = frozenset({"dropout_p", "dropout", "p"})
"""Arguments of other operations that draw: probabilities."""

BINARY = ("bernoulli", "geometric")
"""Beginnings of the names of draws that have a probability, too."""


class ConstantDraws(RankMode):
    """Torch mode in which random operations give constants, and dropout drops nothing.

    ::

        draws = ConstantDraws()
        with draws:
            output = model(x)

    Generators move on as they do without it. It may be entered several times, one after another.

    Attributes:
        epsilon: The coarsest rounding of the floats that operations gave: that of bfloat16, for instance.
        has_convolved: Whether a convolution or a recurrent layer ran.

    Threads: one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 0.0
        self.has_convolved = False
        self._draws = 0

    def __enter__(self) -> Self:
        self._draws = 0
        super().__enter__()
        return self

    def rounding(self, device: torch.device) -> float:
        """The coarsest rounding of what ran on this device, where CUDA may multiply float32 in TF32."""
        if device.type != "cuda" or self.epsilon < 1e-12:
            return self.epsilon
        try:
            is_exact = torch.get_float32_matmul_precision() == "highest"
        except RuntimeError:  # set by the newer interface, which does not mix with this one
            is_exact = False
        # In convolutions TF32 is on by default.
        return self.epsilon if is_exact and not self.has_convolved else max(self.epsilon, TF32)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation without its randomness."""
        schema = getattr(func, "_schema", None)
        if schema is None:  # an operator of a higher order
            return func(*args, **kwargs or {})
        names = [argument.name for argument in schema.arguments]
        name = schema.name.partition("::")[2]
        given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        self.has_convolved |= "conv" in name or "rnn" in name
        if torch.Tag.nondeterministic_seeded not in func.tags:
            output = func(*args, **kwargs or {})
        elif name.startswith(BINARY) or DROPOUT.isdisjoint(names):
            self._draws += 1
            drawn = func(*args, **kwargs or {})
            return drawn if self._draws > MOST_DRAWS else _fill(name, drawn, given)
        else:
            output = func(**{key: 0.0 if key in DROPOUT else value for key, value in given.items()})
        for leaf in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.epsilon = max(self.epsilon, torch.finfo(leaf.dtype).eps)
        return output


def still(module: nn.Module) -> None:
    """Let a module's batch norms use the statistics that they have, and its compiled parts run as written."""
    take_out(module)
    like = next(module.parameters(), torch.zeros(())).detach()
    for norm in module.modules():
        if isinstance(norm, BATCH_NORMS):
            norm.training = False
            if norm.running_mean is None:
                norm.running_mean = like.new_zeros(norm.num_features)
                norm.running_var = like.new_ones(norm.num_features)


def _fill(name: str, drawn: Tensor, given: Mapping[str, Any]) -> Tensor:
    """A draw's tensor, with a constant that may have been drawn."""
    if name == "randperm":
        return drawn.copy_(torch.arange(len(drawn), device=drawn.device))
    low = given.get("from", given.get("low", 0))
    if name.startswith(BINARY):
        return drawn.fill_(1)
    if name.startswith("uniform"):
        return drawn.fill_(0.5 * (low + given.get("to", 1.0)))
    return drawn.fill_(0.5 if drawn.is_floating_point() and "randint" not in name else low)
