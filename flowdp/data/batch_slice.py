"""A rank's part of a batch that all ranks share: the leaves that are cut, and the batch made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowdp.data.trees import Form, Uncuttable, cut, flatten, is_cut, unflatten
from flowdp.errors import DataError
from flowdp.protocol.messages import Part

__all__ = ["Portion", "taken_apart"]


@dataclass(frozen=True, slots=True)
class Portion:
    """Some consecutive samples of a batch.

    Tensors, arrays and lists as long as the batch are cut along their first dimension; tensors and arrays are
    not copied. All other leaves go whole to every rank: on the CPU it is one object for all of them.

    Attributes:
        leaves: Leaves of the batch, those that are cut already so.
        is_cut: Which are. Shape (leaves,).
        build: Makes a batch of leaves.
        samples: How many.
        tree: The form of the batch; None where it is gathered from tensors.
        whole: The batch; None where it is gathered.
        uncut: Its leaves; None where it is gathered, or elsewhere.
    """

    leaves: Sequence[Any]
    is_cut: Sequence[bool]
    build: Callable[[list[Any]], Any]
    samples: int
    tree: Form | None = None
    whole: Any = None
    uncut: Sequence[Any] | None = None

    @classmethod
    def of(cls, batch: Any, samples: int, part: Part) -> Portion:
        """A part of a batch of so many samples.

        Raises:
            DataError: Nothing in the batch is that long, or cannot be cut.
        """
        leaves, tree = flatten(batch, samples)
        is_own = [_is_own(leaf, samples) for leaf in leaves]
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
        return cls(own, is_own, partial(unflatten, form=tree), part.samples, tree, batch, leaves)

    @classmethod
    def gathered(cls, parts: Sequence[Tensor], pack: Callable[[list[Tensor]], Any]) -> Portion:
        """A batch gathered from tensors, sample by sample."""
        return cls(parts, [True] * len(parts), pack, len(parts[0]))

    def first(self, samples: int) -> list[Any]:
        """The leaves of the whole batch's first samples; where it was gathered, the portion's own."""
        leaves = self.leaves if self.uncut is None else self.uncut
        return [leaf[:samples] if own else leaf for leaf, own in zip(leaves, self.is_cut, strict=True)]

    def on(self, leaves: Sequence[Any]) -> Portion:
        """The same portion elsewhere."""
        return replace(self, leaves=leaves, whole=None, uncut=None)

    def rows(self, start: int, stop: int) -> Any:
        """A batch of its samples [start, stop), in the same memory."""
        return self.build(
            [leaf[start:stop] if own else leaf for leaf, own in zip(self.leaves, self.is_cut, strict=True)]
        )


def taken_apart(payload: Any) -> tuple[Sequence[Any], Form | None, Callable[[list[Any]], Any]]:
    """The leaves of a batch or a portion, its form, and what makes such a one of leaves elsewhere."""
    if isinstance(payload, Portion):
        return payload.leaves, payload.tree, payload.on
    leaves, tree = flatten(payload)
    return leaves, tree, partial(unflatten, form=tree)


def _is_own(leaf: Any, samples: int) -> bool:
    try:
        is_own = is_cut(leaf, samples)
    except Uncuttable as error:
        raise DataError(f"a batch of {samples} samples cannot be cut: {error}") from None
    if is_own and isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
        raise DataError(f"a tensor of layout {leaf.layout} cannot be cut: let collate_fn make it dense")
    return is_own
