"""Batches that are read ahead of their training, each in memory of its own.

A dataset or a collate function may fill one buffer again and again: it is right where each batch is trained
before the next one is read, and wrong here. Copying every batch would be dear, so the first ones are copied,
and tell whether the others must be.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdp.data.slots import is_plain
from flowdp.data.trees import flatten, tensors_of, unflatten
from flowdp.errors import DataError

__all__ = ["OwnMemory"]

HELD_BATCHES = 3
"""Batches that the next one is compared with: rings of two and three buffers exist."""

SAMPLED = 1 << 14
"""Elements of a large array that its checksum is taken of: new contents differ nearly everywhere."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_CONTAINERS = frozenset({dict, list, tuple})


class OwnMemory:
    """Gives each batch of one reader containers of its own, and memory of its own where that is needed.

    The first batches are copied, so that no other code writes their memory: if it changes while later ones
    are read, the dataset fills its buffers anew, and every batch is copied from then on. Later batches go on
    as they are. One whose memory is also that of a batch just before it is right while no code writes there,
    as in views of one large tensor, or a mask that is the same in all batches. Its checksum is taken, and a
    change seen when it is shared once more is an error, because batches that were handed out may hold it.

    The last batches are kept alive, so that memory that was freed and allocated again is never mistaken for
    memory that is shared.
    """

    def __init__(self) -> None:
        self._held: deque[list[_Memory]] = deque(maxlen=HELD_BATCHES)
        self._first = HELD_BATCHES  # batches that are still copied to find out
        self._copies = False

    def own(self, batch: Any, name: str, epoch: int | None = None) -> Any:
        """The batch, in containers of its own; its arrays are copied where later batches would write them.

        `name` and `epoch` are for the error.

        Raises:
            DataError: A batch before it, which was handed out as it is and has the same memory, has been
                written since.
        """
        leaves, form = flatten(batch)
        if not self._copies and self._is_written(leaves):
            raise DataError(
                f"{name} lies in the memory of a batch before it, which has been written since. Batches are "
                "read ahead of their training, so each needs memory of its own: let the dataset or "
                "collate_fn return new tensors (`.clone()`, of an array `.copy()`) in place of one buffer "
                "that it fills again; or, if the loss writes into its batch, let it write into a copy",
                epoch=epoch,
            )
        is_copied = self._copies or self._first > 0
        self._first -= self._first > 0
        return unflatten([_copy(leaf) if is_copied else _container(leaf) for leaf in leaves], form)

    def _is_written(self, leaves: list[Any]) -> bool:
        """Whether a batch that was handed out lies in the same memory as this one, and has changed."""
        batch = [_Memory(array, self._first == 0 or not is_own) for array, is_own in _arrays(leaves)]
        for memory in batch:
            shared = [old for held in self._held for old in held if memory.meets(old)]
            written = [old for old in shared if old.is_written()]
            if any(old.is_lent for old in written):
                return True
            self._copies |= bool(written)
            if shared or self._first:
                memory.note()
        self._held.append(batch)
        if self._copies:
            self._held.clear()
        return False


class _Memory:
    """An array of a batch.

    Attributes:
        is_lent: Whether a device trains in it, and may write there.
    """

    __slots__ = ("_array", "_checksum", "is_lent")

    def __init__(self, array: np.ndarray[Any, Any], is_lent: bool) -> None:
        self._array = array
        self._checksum: int | None = None
        self.is_lent = is_lent

    def meets(self, other: _Memory) -> bool:
        """Whether both are, in part, the same memory."""
        return np.may_share_memory(self._array, other._array)

    def note(self) -> None:
        """Note its contents, for `is_written`."""
        self._checksum = _checksum(self._array)

    def is_written(self) -> bool:
        """Whether its contents differ from the noted ones; False where none were noted."""
        return self._checksum is not None and self._checksum != _checksum(self._array)


def _arrays(leaves: list[Any]) -> Iterator[tuple[np.ndarray[Any, Any], bool]]:
    """The memory of leaves on the host, and whether it can be copied; else it is an object's."""
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            if leaf.size and not leaf.dtype.hasobject:
                yield leaf, True
            continue
        for tensor in tensors_of(leaf):
            array = _array(tensor)
            if array is not None:
                yield array, tensor is leaf and not tensor.requires_grad


def _array(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    if not is_plain(tensor) or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return None
    bare = tensor.detach()
    integer = _INTEGERS.get(bare.element_size())  # numpy does not know all types
    return (bare if integer is None else bare.view(integer)).numpy()


def _checksum(array: np.ndarray[Any, Any]) -> int:
    if array.size > SAMPLED:
        # At random: steps of equal size could all meet the same column.
        array = array.flat[np.random.default_rng(0).integers(array.size, size=SAMPLED)]
    return zlib.crc32(array.tobytes())


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return leaf.clone() if is_plain(leaf) and not leaf.requires_grad else _container(leaf)


def _container(leaf: Any) -> Any:
    """A leaf, with lists and dicts of its own: texts, for instance."""
    cls = type(leaf)
    if cls is dict:
        return {key: _container(value) for key, value in leaf.items()}
    if cls not in _CONTAINERS:
        return leaf
    return cls([_container(item) if type(item) in _CONTAINERS else item for item in leaf])
