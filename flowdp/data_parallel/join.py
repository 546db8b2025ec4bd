"""Joining of the outputs of a call that several devices did.

Outputs are trees (`flowdp.device.trees`). Tensors are joined along their dim, numbers are reduced, and all
else is the same on all devices, or has an entry for each sample. All of it is in the caller's graph, so that
each part gets its share of the gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdp.data_parallel.layout import Layout, Reduction, WeightFunction
from flowdp.device.trees import column, concatenated, flatten, is_cut, is_same, unflatten
from flowdp.errors import FlowdpError

__all__ = ["join"]

Weights = Sequence[Mapping[WeightFunction, Tensor]]


class _Unjoinable(ValueError):
    """Leaves that cannot be put together."""


def join(
    trees: Sequence[Any],
    samples: Sequence[int],
    layout: Layout,
    dim: int = 0,
    weights: Weights = (),
) -> Any:
    """Put the outputs of all parts together, by the user's `join` if there is one.

    Tensors are concatenated along their dim, where their length is the part's samples or a multiple of it; a
    number in a tensor is reduced, by default to the mean weighted by samples. Arrays, and lists without
    tensors, are concatenated where each is as long as its part; everything else must be the same in all.

    Args:
        trees: Return values, in the order of the samples. Their tensors are on one device.
        samples: Samples of each part.
        layout: Layout of the outputs.
        dim: Batch dimension of the first argument that was cut.
        weights: Weights of each part by the functions in `reduce`.

    Raises:
        FlowdpError: The outputs cannot be put together.
    """
    if len(trees) == 1:
        return trees[0]
    if layout.join is not None:
        return layout.join(list(trees), tuple(samples))
    flat = [flatten(tree) for tree in trees]
    form = flat[0][1]
    for place, (_, other) in enumerate(flat, 1):
        if other != form:
            raise FlowdpError(f"the outputs cannot be gathered: part 1 returned {form}, part {place} {other}")
    joined: list[Any] = []
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    for path, name, pieces in zip(form.key_paths(), form.paths(), columns, strict=True):
        try:
            if not all(isinstance(piece, Tensor) for piece in pieces):
                joined.append(_same(pieces, samples))
            elif any(piece.dim() for piece in pieces):
                joined.append(_rows(pieces, samples, layout.output_dim(path, dim)))
            elif layout.reduction(path) == "sum" and pieces[0].dtype != torch.bool:
                joined.append(torch.stack(pieces).sum(0, dtype=pieces[0].dtype))
            else:
                joined.append(_number(pieces, samples, _counts(layout.reduction(path), weights)))
        except _Unjoinable as why:
            raise FlowdpError(f"output{name} cannot be gathered: {why}") from None
    return unflatten(joined, form)


def _counts(reduction: Reduction, weights: Weights) -> Tensor | None:
    """The weight of each part in a mean; None: its samples."""
    if not callable(reduction):
        return None
    counts = [part[reduction] for part in weights if reduction in part]
    if not counts or len(counts) < len(weights):
        names = ", ".join(inspect.signature(reduction).parameters)
        raise _Unjoinable(f"its weight is a function of {names}, and the call has no such arguments")
    return torch.stack(counts)


def _number(pieces: Sequence[Tensor], samples: Sequence[int], counts: Tensor | None) -> Tensor:
    """The mean of one number from each part."""
    first = pieces[0]
    if not (first.is_floating_point() or first.is_complex()):
        raise _Unjoinable(
            f"it is one number of {first.dtype} from each device, of which there is no mean; return a float, "
            "or one number for each sample, or say reduce='sum' in setup()"
        )
    if counts is not None and "cpu" not in (counts.device.type, first.device.type):
        return _masked_mean(pieces, counts.to(first.device), samples)
    # Nothing to count anywhere: the module's answer to that is the mean, as on one device.
    known = samples if counts is None or not counts.any() else counts.tolist()
    shares = [count / sum(known) for count in known]
    # A part that has nothing to count is left out: it may have divided by 0.
    return torch.stack([piece * share for piece, share in zip(pieces, shares, strict=True) if share]).sum(0)


def _masked_mean(pieces: Sequence[Tensor], counts: Tensor, samples: Sequence[int]) -> Tensor:
    """The same where the host does not know the counts, and need not wait for them."""
    counts = torch.where(counts.any(), counts, counts.new_tensor(samples))
    # Before the product, or the gradient of a number that is left out would be 0 times nan.
    numbers = torch.stack(list(pieces)).masked_fill(counts == 0, 0.0)
    return (numbers * (counts / counts.sum())).sum(0).to(pieces[0].dtype)


def _rows(pieces: Sequence[Tensor], samples: Sequence[int], dim: int) -> Tensor:
    if _are_rows(pieces, samples, dim):
        return torch.cat(list(pieces), dim)
    raise _Unjoinable(
        f"for {list(samples)} samples the devices returned shapes {[tuple(p.shape) for p in pieces]}; "
        f"dim {dim} must be the samples' or a multiple of it, and the rest equal (another one: "
        "dim={'return': its number} in setup()), or it must be one number, which is averaged: loss.mean(), "
        "loss.squeeze()"
    )


def _are_rows(pieces: Sequence[Tensor], samples: Sequence[int], dim: int) -> bool:
    """Whether pieces have rows for their samples along a dim, the same number for each sample."""
    shape = pieces[0].shape
    times = shape[dim] // samples[0] if len(shape) > dim else 0
    return times > 0 and all(
        piece.shape == (*shape[:dim], times * count, *shape[dim + 1 :])
        for piece, count in zip(pieces, samples, strict=True)
    )


def _same(pieces: Sequence[Any], samples: Sequence[int]) -> Any:
    """One leaf made of several that are not all tensors."""
    first = pieces[0]
    if isinstance(first, torch.device):  # that of a cache, for instance
        return first
    is_rows = all(isinstance(piece, np.ndarray) for piece in pieces) or all(map(column, pieces))
    if is_rows and all(is_cut(piece, count) for piece, count in zip(pieces, samples, strict=True)):
        return concatenated(pieces)
    if not all(is_same(piece, first) for piece in pieces[1:]):
        raise _Unjoinable(
            f"it is no tensor, and differs between the devices: {list(pieces)!r:.200}; return tensors, or "
            "lists and arrays with one entry for each sample, in tuples, lists, dicts or dataclasses"
        )
    return first
