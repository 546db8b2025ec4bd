"""Gradients of one dtype, one behind the other in flat memory, to be reduced by one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowdp.collective.process_group import ProcessGroup
from flowdp.errors import OptionError

__all__ = ["BUCKET_BYTES", "GradientBucket", "broadcast_all", "dense_strides"]

BUCKET_BYTES = 25 << 20
"""What torch's own DistributedDataParallel takes: large enough that a call's fixed cost is small beside it,
small enough that the first one starts early in the backward pass."""


class GradientBucket:
    """Flat memory that tensors are copied into, and shown again in their shapes.

    ::

        bucket = GradientBucket(25 << 20)
        bucket.add(gradient)                       # False: it does not fit any more
        group.all_reduce(bucket.data)
        for gradient in bucket.extract(): ...      # views of the bucket, in the order of `add`

    Args:
        capacity_bytes: How much fits. A larger tensor fits into an empty bucket alone, which grows for it,
            so no tensor is ever left out.
        dtype: Of everything in it.
        device: Where it lies.

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
        """Elements in it."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes in it."""
        return self._size * self._memory.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since it was made or cleared."""
        return not self._views

    @property
    def is_full(self) -> bool:
        """Whether not one element more fits."""
        return self.nbytes + self._memory.itemsize > self.capacity_bytes

    @property
    def data(self) -> Tensor:
        """The used part of the memory, which may be written to. Shape (size,)."""
        return self._memory[: self._size]

    def add(self, tensor: Tensor) -> bool:
        """Copy a tensor in, behind the others.

        Returns:
            Whether it fits; if not, the bucket is as it was.

        Raises:
            OptionError: It is of another dtype or device: that needs a bucket of its own, not an emptier one.
        """
        memory = self._memory
        if (tensor.dtype, tensor.device) != (memory.dtype, memory.device):
            raise OptionError(
                f"a bucket of {memory.dtype} on {memory.device} takes no tensor of {tensor.dtype} on "
                f"{tensor.device}"
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
        """What was added, in order and shape: views of the bucket, until it is cleared and filled anew."""
        return list(self._views)

    def clear(self) -> None:
        """Forget what was added."""
        self._views, self._size = [], 0


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor (channels_last stays), or contiguous ones where it overlaps or has gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def broadcast_all(
    group: ProcessGroup, tensors: Sequence[Tensor], src: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each tensor by that of rank `src`: one call for each bucket full.

    Raises:
        CollectiveError: As of `ProcessGroup.broadcast`.
    """
    for chunk in _chunks(tensors, bucket_bytes):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
        group.broadcast(flat, src)
        if group.rank == src:
            continue
        for tensor, values in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
            # Not a new version of it for autograd: a graph that is still to be run back may have seen it.
            tensor.data.copy_(values.view(tensor.shape))


def _chunks(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, at most `bucket_bytes` of them or a larger one alone; the same on every rank."""
    open_chunks: dict[torch.dtype, list[Tensor]] = {}
    room: dict[torch.dtype, int] = {}
    for tensor in tensors:
        chunk = open_chunks.setdefault(tensor.dtype, [])
        left = room.get(tensor.dtype, bucket_bytes) - tensor.nbytes
        if chunk and left < 0:
            yield chunk
            chunk = open_chunks[tensor.dtype] = []
            left = bucket_bytes - tensor.nbytes
        chunk.append(tensor)
        room[tensor.dtype] = left
    yield from open_chunks.values()
