"""A rank's part of a batch that all ranks share: what of it is cut, and how a batch is made of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from flowdp.errors import DataError
from flowdp.messages import Part

__all__ = ["Portion", "moves_itself", "taken_apart"]


def moves_itself(node: object) -> bool:
    """Whether a node of a batch is moved as one: a PackedSequence is a tuple that keeps a part on the CPU."""
    return hasattr(node, "to")


@dataclass(frozen=True, slots=True)
class Portion:
    """Some consecutive samples of a batch.

    Tensors and arrays as long as the batch are cut along their first dimension, and nothing is copied. What
    else there is goes whole to every rank: on the CPU it is one object for all of them.

    Attributes:
        leaves: Of the batch, those that are cut already so.
        is_cut: Which are. Shape (leaves,).
        build: Makes a batch of leaves.
        samples: How many.
        tree: The form of the batch; None where it is gathered from tensors.
        whole: The batch; None where it is gathered.
    """

    leaves: Sequence[Any]
    is_cut: Sequence[bool]
    build: Callable[[list[Any]], Any]
    samples: int
    tree: TreeSpec | None = None
    whole: Any = None

    @classmethod
    def of(cls, batch: Any, samples: int, part: Part) -> Portion:
        """A part of a batch of so many samples.

        Raises:
            DataError: Nothing in the batch is that long, or cannot be cut.
        """
        leaves, tree = tree_flatten(batch, is_leaf=moves_itself)
        is_cut = [_is_cut(leaf, samples) for leaf in leaves]
        if not any(is_cut):
            raise DataError(
                f"policy='exact' splits each batch of {samples} samples along the first dimension of its "
                f"tensors, and no tensor in this {type(batch).__name__} is {samples} long; let collate_fn "
                "return tensors of the batch's length, in tuples, lists or dicts"
            )
        cut = [
            leaf[part.start : part.stop] if own else leaf for leaf, own in zip(leaves, is_cut, strict=True)
        ]
        return cls(cut, is_cut, partial(tree_unflatten, treespec=tree), part.samples, tree, batch)

    @classmethod
    def gathered(cls, parts: Sequence[Tensor], pack: Callable[[list[Tensor]], Any]) -> Portion:
        """What was gathered from tensors, sample by sample."""
        return cls(parts, [True] * len(parts), pack, len(parts[0]))

    def first(self, samples: int) -> list[Any]:
        """The leaves of the whole batch's first samples; where it was gathered, the portion's own."""
        leaves = self.leaves if self.tree is None else tree_leaves(self.whole, is_leaf=moves_itself)
        return [leaf[:samples] if own else leaf for leaf, own in zip(leaves, self.is_cut, strict=True)]

    def on(self, leaves: Sequence[Any]) -> Portion:
        """The same portion elsewhere."""
        return replace(self, leaves=leaves, whole=None)

    def rows(self, start: int, stop: int) -> Any:
        """A batch of its samples [start, stop), in the same memory."""
        return self.build(
            [leaf[start:stop] if own else leaf for leaf, own in zip(self.leaves, self.is_cut, strict=True)]
        )


def taken_apart(payload: Any) -> tuple[Sequence[Any], TreeSpec | None, Callable[[list[Any]], Any]]:
    """The leaves of a batch or a portion, its form, and what makes such a one of leaves elsewhere."""
    if isinstance(payload, Portion):
        return payload.leaves, payload.tree, payload.on
    leaves, tree = tree_flatten(payload, is_leaf=moves_itself)
    return leaves, tree, partial(tree_unflatten, treespec=tree)


def _is_cut(leaf: object, samples: int) -> bool:
    if not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim == 0 or leaf.shape[0] != samples:
        return False
    if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
        raise DataError(
            f"policy='exact' cannot split a tensor of layout {leaf.layout}: let collate_fn make it dense"
        )
    return True
