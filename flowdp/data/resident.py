"""A dataset of tensors that lies on the device as a whole: a batch is a gather there, and nothing is copied.

The gather is made where the batch is needed: by the step, on its stream, or by the graph of a captured one.
Of each epoch the order alone goes to the device, once, through pinned memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flowdp.data.moving import keep_for
from flowdp.data.source import Batch, Feed
from flowdp.data.tensor_source import TensorSource, outside
from flowdp.device.gathered import Gathered
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange

__all__ = ["ORDERS_KEPT", "ResidentData", "ResidentFeed"]

ORDERS_KEPT = 2
"""Epochs whose order lies on the device, for each rank: a rank stands in at most two."""


class ResidentData:
    """A dataset of tensors on one device, for all its ranks; those that are there already are not copied.

    Attributes:
        source: Source of the tensors.
        tensors: The tensors, on the device.
        copied: Recorded behind the copies, which the lane of one of the ranks there makes.

    Threads:
        The one that made the tensors, so that a copy from another device comes behind their creation.

    Raises:
        torch.OutOfMemoryError: The device has no room for them.
    """

    def __init__(self, source: TensorSource, lane: Lane) -> None:
        self.source = source
        self.tensors: list[Tensor] = []
        self.copied = lane.event()
        with torch.no_grad(), lane.on(lane.copy):
            for tensor in source.tensors:
                if tensor.device != lane.device:
                    with QUIET:
                        own = torch.empty_like(tensor, device=lane.device)
                    tensor = own.copy_(tensor, non_blocking=True)
                self.tensors.append(tensor)
            self.copied.record(lane.copy)

    @staticmethod
    def needed_bytes(source: TensorSource, device: torch.device, ranks: int) -> int:
        """Bytes to allocate on a device with this many ranks."""
        orders = ranks * ORDERS_KEPT * source.samples * torch.int64.itemsize
        return orders + sum(tensor.nbytes for tensor in source.tensors if tensor.device != device)


@dataclass(frozen=True, slots=True)
class _OrderOnDevice:
    """The order of an epoch on the device.

    Attributes:
        epoch: Index of the epoch.
        bounds: Start and stop of each batch in the order.
        staging: Pinned; kept until the copy out of it is over, long since. Shape [samples].
        index: On the device. Shape [samples].
    """

    epoch: int
    bounds: list[tuple[int, int]]
    staging: Tensor
    index: Tensor


class ResidentFeed(Feed):
    """A rank's batches as places in the order of an epoch on its device."""

    _source: TensorSource

    def __init__(self, data: ResidentData, rank: int, lane: Lane) -> None:
        super().__init__(data.source, rank)
        self._tensors = data.tensors
        self._lane = lane
        self._orders: list[_OrderOnDevice | None] = [None] * ORDERS_KEPT
        lane.await_caller()  # tensors that the user made there
        lane.compute.wait_event(data.copied)
        keep_for(lane.compute, data.tensors)

    def take(self, epoch: int, batch: int, part: SampleRange | None = None) -> Gathered:
        """A batch that is still to be gathered, on `compute`; always there. See `Feed.take`."""
        order = self._orders[epoch % ORDERS_KEPT]
        if order is None or order.epoch != epoch:
            self._orders[epoch % ORDERS_KEPT] = None  # its memory is that of the new one
            order = self._orders[epoch % ORDERS_KEPT] = self._upload(epoch)
        if not 0 <= batch < len(order.bounds):
            raise IndexError(f"batch {batch} of an epoch of {len(order.bounds)} batches")
        start, stop = order.bounds[batch]
        if part is not None:
            start, stop = start + part.start, start + part.stop
        return Gathered(order.index[start:stop], self._gather, stop - start)

    def close(self) -> bool:
        """Free the memory: a reference to an ended run must not keep it. See `Feed.close`."""
        self._tensors = []
        self._orders = [None] * ORDERS_KEPT
        return True

    def _gather(self, index: Tensor) -> Batch:
        return self._source.pack([tensor.index_select(0, index) for tensor in self._tensors])

    def _upload(self, epoch: int) -> _OrderOnDevice:
        """Bring an epoch's order to the device."""
        parts = [self._source.index(epoch, batch) for batch in range(self._source.batches)]
        bounds = list(pairwise(accumulate(map(len, parts), initial=0)))
        with QUIET:
            staging = self._lane.pinned((bounds[-1][1],), torch.int64)
        torch.cat(parts, out=staging)
        samples = len(self._tensors[0])
        if (wrong := outside(staging, samples)) is not None:
            raise DataError(
                f"the order of epoch {epoch + 1} holds index {wrong}, and the tensors have {samples} samples",
                epoch=epoch,
                indices=(wrong,),
            )
        index = torch.empty_like(staging, device=self._lane.device)
        return _OrderOnDevice(epoch, bounds, staging, index.copy_(staging, non_blocking=True))
