"""Advice for a call that gives another result when it is cut: an option with which it gives the same.

What real models have needed: the batch along another dim, and losses that are no mean over samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from torch import Tensor

from flowdp.data.trees import flatten, tensors_of
from flowdp.data_parallel.comparison import Result, Trial
from flowdp.data_parallel.layout import RETURN, Layout, output_name

__all__ = ["advice"]

COUNTED = ("!= -100", "!= 0")
"""Conditions on integers by which losses count tokens: the index that cross_entropy ignores, and padding."""


def advice(trial: Trial, whole: Result) -> str | None:
    """The option of `setup` with which the parts give the outputs of the whole batch; None without one."""
    layout = trial.call.layout
    if layout.split is not None or layout.join is not None:
        return None
    options = chain(_other_dims(trial, whole), _less_cut(trial), _other_reductions(trial, whole))
    for option, text in options:
        if not trial.differences(whole, trial.parts(option)):
            return text
    return None


def _other_dims(trial: Trial, whole: Result) -> Iterator[tuple[Layout, str]]:
    """Layouts with the batch along another dim of the first argument, in order."""
    call = trial.call
    named = [(name, list(tensors_of(value))) for name, value in call.arguments.named]
    first = next((leaf for _, leaves in named for leaf in leaves if leaf.dim()), None)
    if first is None:
        return
    for dim in range(min(first.dim(), 3)):
        samples = first.shape[dim]
        option = {
            name: _dim_of([leaf.shape for leaf in leaves if leaf.dim()], dim, samples)
            for name, leaves in named
            if any(leaf.dim() for leaf in leaves)
        }
        outputs = {
            name: _dim_of([leaf.shape], dim, samples) or 0
            for name, leaf in _named_tensors(whole.output)
            if leaf.dim()
        }
        dims = set(outputs.values()) or {dim}
        full = {**option, RETURN: outputs if len(dims) > 1 else dims.pop()}
        if samples < 2 or all(one in (0, {}) for one in full.values()):
            continue
        if all(one == dim for one in full.values()):
            said, after = repr(dim), ", or batch_first=True in the layers"
        else:
            said, after = repr(_without_zeros(full)), ""
        text = f"Cut along dim {dim} it gives the same: say dim={said} in setup(){after}."
        yield replace(call.layout, dim=full), text


def _less_cut(trial: Trial) -> Iterator[tuple[Layout, str]]:
    """Layouts that give one or two of the arguments whole: a mask (steps, steps) is cut by chance."""
    call = trial.call
    names = [name for name, _ in call.arguments.named]
    cut = dict.fromkeys(path[0] for path in call.arguments.cut_paths)
    for chosen in chain(combinations(cut, 1), combinations(cut, 2)):
        option = call.layout.dims_with(names, dict.fromkeys(chosen))
        own = " and ".join(map(repr, chosen))
        text = (
            f"With the whole of {own} on each device it gives the same: if that is no part of the batch and "
            f"has its length by chance, say dim={option!r} in setup()."
        )
        yield replace(call.layout, dim=option), text


def _other_reductions(trial: Trial, whole: Result) -> Iterator[tuple[Layout, str]]:
    """Layouts with other reductions of the numbers that the module returns."""
    call = trial.call
    names = [name for name, leaf in _named_tensors(whole.output) if leaf.dim() == 0]
    if not names:
        return
    reductions: list[tuple[Any, str]] = [("sum", "'sum'")]
    for condition in COUNTED:
        for name, value in call.arguments.named:
            if isinstance(name, str) and isinstance(value, Tensor) and not value.is_floating_point():
                for rows in ("[:, 1:]", "") if value.dim() > 1 else ("",):
                    text = f"lambda {name}: ({name}{rows} {condition}).sum()"
                    reductions.append((eval(text, {}), text))
    for reduction, text in reductions if names else ():
        for chosen in [names, *([name] for name in names if len(names) > 1)]:
            is_all = len(chosen) == len(names)
            said = text if is_all else f"{{{chosen[0]!r}: {text}}}"
            option = reduction if is_all else {chosen[0]: reduction}
            yield replace(call.layout, reduce=option), f"With reduce={said} in setup() it gives the same."


def _dim_of(shapes: Sequence[Sequence[int]], dim: int, samples: int) -> int | None:
    """The dim along which all have so many samples; the second of states, (layers, samples, hidden), too."""
    dims = (dim, 0, 1) if min(map(len, shapes)) > 2 else (dim, 0)
    fits = (own for own in dims if all(len(shape) > own and shape[own] == samples for shape in shapes))
    return next(fits, None)


def _without_zeros(option: Mapping[Any, Any]) -> dict[Any, Any]:
    """A mapping of dims without those that need not be said."""
    dims = ((name, _without_zeros(dim) if isinstance(dim, Mapping) else dim) for name, dim in option.items())
    return {name: dim for name, dim in dims if dim not in (0, {})}


def _named_tensors(tree: Any) -> list[tuple[str, Tensor]]:
    leaves, form = flatten(tree)
    named = zip(form.key_paths(), leaves, strict=True)
    return [(output_name(path), leaf) for path, leaf in named if isinstance(leaf, Tensor)]
