"""Consecutive samples of a batch, and several batches joined to one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from flowdp.data.moving import is_plain
from flowdp.device.streams import QUIET
from flowdp.device.trees import (
    concatenated,
    cut,
    described,
    flatten,
    is_cut,
    is_same,
    tree_map,
    unflatten,
)
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange

__all__ = ["Portion", "cloned", "cuts", "joined", "makes_new", "taken_apart"]

SAME_SIZE = "give all devices the same per_device_batch_size"


@dataclass(frozen=True, slots=True)
class Portion:
    """Some consecutive samples of a batch.

    Tensors, arrays and lists as long as the batch are cut along their first dimension; tensors and arrays are
    not copied. All other leaves go whole to every rank: on the CPU it is one object for all of them.

    Attributes:
        leaves: Leaves of the batch, after the cut.
        is_cut: Whether each leaf is cut. Shape (leaves,).
        build: Makes a batch of leaves.
        samples: Number of samples.
        whole: The batch; None where it is gathered, or was moved.
    """

    leaves: Sequence[Any]
    is_cut: Sequence[bool]
    build: Callable[[list[Any]], Any]
    samples: int
    whole: Any = None

    @classmethod
    def of(cls, batch: Any, samples: int, part: SampleRange | None = None) -> Portion:
        """A part of a batch of so many samples.

        Raises:
            DataError: Nothing in the batch is that long.
        """
        part = part or SampleRange(0, samples)
        leaves, tree = flatten(batch, samples)
        is_own = [is_cut(leaf, samples) for leaf in leaves]
        if not any(is_own):
            raise DataError(
                f"a batch of {samples} samples is cut along the first dimension of its tensors, and nothing "
                f"in this {type(batch).__name__} is {samples} long; let collate_fn return tensors, arrays or "
                "lists of the batch's length, in tuples, lists, dicts or dataclasses"
            )
        own = [
            cut(leaf, part.start, part.samples) if is_one else leaf
            for leaf, is_one in zip(leaves, is_own, strict=True)
        ]
        return cls(own, is_own, partial(unflatten, form=tree), part.samples, batch)

    @classmethod
    def gathered(cls, parts: Sequence[Tensor], pack: Callable[[list[Tensor]], Any]) -> Portion:
        """A batch gathered from tensors, sample by sample."""
        return cls(parts, [True] * len(parts), pack, len(parts[0]))

    def on(self, leaves: Sequence[Any]) -> Portion:
        """The same portion with its leaves on another device."""
        return replace(self, leaves=leaves, whole=None)

    def rows(self, start: int, stop: int) -> Any:
        """A batch of its samples [start, stop), in the same memory."""
        return self.build(
            [leaf[start:stop] if own else leaf for leaf, own in zip(self.leaves, self.is_cut, strict=True)]
        )


def makes_new(loader: object) -> bool:
    """Whether each batch of a loader lies in memory of its own.

    A dataset or a collate function may fill one buffer again and again: right where a batch is used before
    the next one is read, and wrong where batches are read ahead.
    """
    if not isinstance(loader, DataLoader):
        return False
    return (
        loader.num_workers > 0 or getattr(loader.collate_fn, "collate", loader.collate_fn) is default_collate
    )


def cloned(batch: Any) -> Any:
    """A copy of a batch; that of a pinned tensor is pinned, so that a device copies it from there."""
    return tree_map(_clone, batch)


def _clone(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | list):
        return copy.copy(leaf)
    if not is_plain(leaf) or leaf.requires_grad:
        return leaf
    if not leaf.is_pinned():
        return leaf.clone()
    with QUIET:
        own = torch.empty_like(leaf, pin_memory=True)
    return own.copy_(leaf)


def taken_apart(payload: Any) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a batch or a portion, and a function that rebuilds one from other leaves."""
    if isinstance(payload, Portion):
        return payload.leaves, payload.on
    leaves, tree = flatten(payload)
    return leaves, partial(unflatten, form=tree)


def joined(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One batch of several of these sizes, on their device.

    Tensors, arrays and lists as long as their batch are concatenated. All other leaves come
    from the first; where it is no tensor, it must be the same in all of them.

    Raises:
        TypeError: They differ in structure.
        ValueError: Tensors do not fit together; or nothing is as long as its batch, or a value differs, and
            samples would get lost.
    """
    rows, forms = zip(
        *(flatten(batch, size) for batch, size in zip(batches, sizes, strict=True)), strict=True
    )
    if any(form != forms[0] for form in forms):
        raise TypeError("batches of one step differ in structure, and cannot be put together")
    leaves: list[Any] = []
    is_joined = False
    for place, parts in enumerate(zip(*rows, strict=True)):
        if all(is_cut(part, size) for part, size in zip(parts, sizes, strict=True)):
            try:
                leaves.append(concatenated(parts))
            except (RuntimeError, ValueError):
                path = list(forms[0].paths())[place]
                raise ValueError(
                    f"batch{path} ({', '.join(map(described, parts))}) differs in shape between batches that "
                    f"make one step: let collate_fn pad to one length, or {SAME_SIZE}"
                ) from None
            is_joined = True
        elif isinstance(parts[0], Tensor) or all(is_same(part, parts[0]) for part in parts[1:]):
            leaves.append(parts[0])
        else:
            path = list(forms[0].paths())[place]
            raise ValueError(
                f"batch{path} ({', '.join(map(described, parts))}) is not as long as the batch ({sizes[0]} "
                "samples), and differs between batches that make one step: make it a list, array or tensor "
                f"with one entry for each sample, or {SAME_SIZE}"
            )
    if not is_joined:
        raise ValueError(
            f"nothing in the batch is as long as the batch ({sizes[0]} samples), so batches cannot be put "
            f"together to the batch_size of this device; {SAME_SIZE}"
        )
    return unflatten(leaves, forms[0])


def cuts(samples: int, count: int) -> Iterator[tuple[int, int]]:
    """Starts and stops of so many pieces of the samples; they are as equal as can be."""
    return pairwise(samples * at // count for at in range(count + 1))
