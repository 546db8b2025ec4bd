"""Parts that captured steps and captured calls share: forms of values, runs without a trace, differences."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from flowdp.graphs.base import PLAIN, NotCaptured

__all__ = [
    "Pair",
    "bound_of",
    "difference",
    "first_difference",
    "is_plain",
    "refusal_of",
    "spec_of",
    "without_trace",
]

BOUND, HALF_BOUND = 1e-3, 3e-2
"""Differences between captured and eager work, relative to the largest value, where kernels may add in
another order from one launch to the next (atomics); in half precision more."""

_LIBRARIES = str(Path(str(torch.__file__)).parent), str(Path(__file__).parents[1])


def spec_of(leaf: object, where: str) -> object:
    """The part that a leaf has in a form: equal specs run as one graph.

    Args:
        leaf: A leaf of a batch, or of the arguments of a call.
        where: The place where it lies, for the error.

    Raises:
        NotCaptured: It is neither a dense tensor nor a plain value, or a tuple of such.
    """
    if type(leaf) is Tensor and leaf.layout is torch.strided:
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    if is_plain(leaf):
        return type(leaf), leaf, repr(leaf) if isinstance(leaf, tuple) else ""  # (1,) equals (True,)
    raise NotCaptured(f"{where} holds a {type(leaf).__name__}, which is no tensor of a fixed shape")


def is_plain(leaf: object) -> bool:
    """Whether a leaf is a plain value, or a tuple of such."""
    return isinstance(leaf, PLAIN) or (isinstance(leaf, tuple) and all(map(is_plain, leaf)))


@contextmanager
def without_trace(changed: Sequence[Tensor], generator: torch.Generator | None) -> Iterator[None]:
    """Context for work that is to leave no trace: its end restores everything.

    Args:
        changed: Tensors that it may write to.
        generator: Generator that it may draw from; None: it draws from none, or from one of several ranks,
            which would draw the same numbers again.
    """
    # Detached: a copy with a graph would keep the nodes that end the graphs of all parameters, and these
    # belong to the stream on which they were made.
    kept = [one.detach().clone() for one in changed]
    random = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        for one, value in zip(changed, kept, strict=True):
            one.data.copy_(value)  # and no version tells of it
        if generator is not None and random is not None:
            generator.set_state(random)


Pair = tuple[str, Tensor | None, Tensor | None]
"""Name of a value, as a graph has computed it, and eagerly."""


def bound_of(*, is_half: bool) -> float:
    """Largest difference, relative to the largest value; 0.0 where torch was told to be deterministic."""
    if torch.are_deterministic_algorithms_enabled():
        return 0.0
    return HALF_BOUND if is_half else BOUND


def first_difference(pairs: Iterable[Pair], bound: float) -> str:
    """The first value that differs, in words; "" where none does."""
    found = (f"{name} {text}" for name, mine, theirs in pairs if (text := difference(mine, theirs, bound)))
    return next(found, "")


def difference(mine: Tensor | None, theirs: Tensor | None, bound: float) -> str:
    """Difference of a value from the eager one, as text; "" within the bound."""
    if mine is None or theirs is None:
        return "" if mine is theirs else "is there in one of them alone"
    mine, theirs = mine.detach(), theirs.detach()
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"is a {mine.dtype} {tuple(mine.shape)} instead of a {theirs.dtype} {tuple(theirs.shape)}"
    if bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all()):  # NaN is like NaN
        return ""
    wide = torch.complex128 if mine.is_complex() else torch.float64
    off = float((mine.to(wide) - theirs.to(wide)).abs().max())
    largest = float(theirs.to(wide).abs().max())
    return "" if off <= bound * largest else f"differs by {off:.3g}, where the largest value is {largest:.3g}"


def refusal_of(work: Callable[[], object]) -> str | None:
    """Do work with the user's code; returns the reason why it cannot be captured, if that is so."""
    try:
        work()
    except NotCaptured as refusal:
        return str(refusal)
    except Exception as error:
        return _reason_of(error)
    return None


def _reason_of(error: Exception) -> str:
    """An error as a sentence, with the place in the user's code; it does not keep the error's frames."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        text = "the device has no room for a second set of activations beside those of eager steps"
    elif "captur" in text:
        text += ". A captured step may not read a value on the host (.item(), print, if), nor copy from there"
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARIES, "<"))
    ]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text
