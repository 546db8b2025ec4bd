"""Buckets: tensors of one dtype in contiguous memory, reduced or sent by one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flowdp.collective.process_group import ProcessGroup
from flowdp.device.copies import dense_strides
from flowdp.errors import OptionError

__all__ = ["BUCKET_BYTES", "GradientBucket", "broadcast_all", "bucketed"]

T = TypeVar("T", bound=Tensor)

BUCKET_BYTES = 25 << 20
"""Bytes of a bucket, as in torch's DistributedDataParallel: large enough to hide the fixed cost of a call,
small enough that the first call starts early in the backward pass."""


class GradientBucket:
    """Contiguous memory for copies of tensors, which it gives back as views in their shapes.

    ::

        bucket = GradientBucket(25 << 20)
        bucket.add(gradient)                       # False: no room is left for it
        group.all_reduce(bucket.data)
        for gradient in bucket.extract(): ...      # views of the bucket, in the order of `add`

    Args:
        capacity_bytes: Size in bytes. An empty bucket grows for one larger tensor, so that every tensor
            fits somewhere.
        dtype: Dtype of its tensors.
        device: Device of the memory.

    Raises:
        OptionError: The capacity is not positive.
    """

    def __init__(
        self,
        capacity_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity_bytes <= 0:
            raise OptionError(f"capacity_bytes must be positive, not {capacity_bytes!r}")
        self.capacity_bytes = capacity_bytes
        self._memory = torch.zeros(capacity_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._views: list[Tensor] = []
        self._size = 0

    @property
    def size(self) -> int:
        """Number of elements in it."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Number of bytes in it."""
        return self._size * self._memory.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether no tensor was added since it was made or cleared."""
        return not self._views

    @property
    def is_full(self) -> bool:
        """Whether there is no room for one more element."""
        return self.nbytes + self._memory.itemsize > self.capacity_bytes

    @property
    def data(self) -> Tensor:
        """The used part of the memory, which may be written to. Shape (size,)."""
        return self._memory[: self._size]

    def add(self, tensor: Tensor) -> bool:
        """Copy a tensor to the end.

        Returns:
            Whether it fits; if not, the bucket is as it was.

        Raises:
            OptionError: The tensor has another dtype or device than the bucket.
        """
        memory = self._memory
        if (tensor.dtype, tensor.device) != (memory.dtype, memory.device):
            raise OptionError(
                f"a bucket of {memory.dtype} on {memory.device} cannot hold a tensor of {tensor.dtype} on "
                f"{tensor.device}; make one bucket for each dtype and device"
            )
        end = self._size + tensor.numel()
        if end * memory.itemsize > self.capacity_bytes and not self.is_empty:
            return False
        if end > len(memory):
            self._memory = memory.new_zeros(end)
        view = self._memory[self._size : end].as_strided(
            tensor.shape, dense_strides(tensor), self._memory.storage_offset() + self._size
        )
        view.copy_(tensor.detach())
        self._views.append(view)
        self._size = end
        return True

    def extract(self) -> list[Tensor]:
        """Views of the added tensors, in order and in their shapes, valid until the bucket is cleared."""
        return list(self._views)

    def clear(self) -> None:
        """Remove all tensors."""
        self._views, self._size = [], 0


def broadcast_all(
    group: ProcessGroup, tensors: Sequence[Tensor], src: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each tensor by that of rank `src`: one call for each bucket.

    Raises:
        CollectiveError: See `ProcessGroup.broadcast`.
    """
    for bucket in bucketed(tensors, bucket_bytes):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        group.broadcast(flat, src)
        if group.rank == src:
            continue
        for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            # Without a new version for autograd: a graph whose backward is still to run may have saved it.
            tensor.data.copy_(values.view(tensor.shape))


def bucketed(tensors: Iterable[T], bucket_bytes: int) -> list[list[T]]:
    """Split tensors into buckets of one dtype and device, in the order of their first tensors.

    A bucket has at most `bucket_bytes`, or one larger tensor. The split is the same on every rank.
    """
    buckets: list[list[T]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if tensor.nbytes > room.get(kind, -1):
            open_buckets[kind] = []
            buckets.append(open_buckets[kind])
            room[kind] = bucket_bytes
        open_buckets[kind].append(tensor)
        room[kind] -= tensor.nbytes
    return buckets
