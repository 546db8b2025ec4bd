"""Datasets that are tensors in memory: batches are gathered from them, where and when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowdp.data.batches import Portion
from flowdp.data.epoch_order import ALL, BatchOrder, Stride
from flowdp.data.identity import Identity
from flowdp.data.source import Batch, Source
from flowdp.device.accelerator import device_module, is_accelerator
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange

__all__ = ["TensorSource", "outside"]


class TensorSource(Source):
    """Gathers batches from tensors in memory, in the thread that asks.

    Attributes:
        tensors: Equal in length. Each of shape [samples, ...].
        pack: Makes the batch of the gathered parts.
        is_sparse: Most rows of the tensors are no samples: those at `rows` are, int64; None: all are.
    """

    batch_size: int
    batches: int
    samples: int

    def __init__(
        self,
        tensors: Sequence[Tensor],
        pack: Callable[[list[Tensor]], Batch],
        order: BatchOrder,
        rows: Tensor | None = None,
        stride: Stride = ALL,
    ) -> None:
        super().__init__(order, stride)
        self.tensors = tuple(tensors)
        self.pack = pack
        self._rows = rows
        self.is_sparse = rows is not None and 2 * len(rows) < len(self.tensors[0])

    def on_host(self) -> TensorSource:
        """The same source with its tensors in the host's memory; itself where they lie there.

        Threads:
            The one that made the tensors: its enqueued work is waited for.
        """
        if all(tensor.device.type == "cpu" for tensor in self.tensors):
            return self
        tensors = [tensor.cpu() for tensor in self.tensors]
        return TensorSource(tensors, self.pack, self._order, self._rows, self.stride)

    def for_all_streams(self) -> TensorSource:
        """The same source for threads whose streams do not wait for the caller's: on one device, or the host.

        Threads:
            The one that made the tensors: its enqueued work is waited for.
        """
        device, *others = {tensor.device for tensor in self.tensors}
        if others or not is_accelerator(device):
            return self.on_host()
        device_module(device).current_stream(device).synchronize()
        return self

    def take(self, _rank: int, epoch: int, batch: int, part: SampleRange | None = None) -> Batch:
        """Gather a batch, for whatever rank; always there. See `Source.take`."""
        rows = self.gather(epoch, batch, part)
        return self.pack(rows) if part is None else Portion.gathered(rows, self.pack)

    def index(self, epoch: int, batch: int) -> Tensor:
        """The rows of a batch in the tensors, int64. Shape [samples_in(epoch, batch)].

        Threads:
            Any.

        Raises:
            DataError: The sampler failed.
            IndexError: An epoch has no such batch.
        """
        index = self._order.indices(epoch, batch)
        return index if self._rows is None else self._rows[index]

    def gather(
        self, epoch: int, batch: int, part: SampleRange | None = None, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """The batch's part of each tensor, in `out` if given.

        Each of shape [samples_in(epoch, batch) or part.samples, ...].

        Threads:
            Any.

        Raises:
            DataError: An index lies outside the tensors, or the sampler failed.
            IndexError: An epoch has no such batch.
        """
        index = self.index(epoch, batch)
        if part is not None:
            index = index[part.start : part.stop]
        try:
            if out is None:
                return [_rows(tensor, index) for tensor in self.tensors]
            return [torch.index_select(t, 0, index, out=to) for t, to in zip(self.tensors, out, strict=True)]
        except (IndexError, RuntimeError) as error:
            raise DataError(
                f"gathering batch {batch + 1} of epoch {epoch + 1} from tensors of {len(self.tensors[0])} "
                f"samples failed: {error}",
                epoch=epoch,
                indices=index.tolist(),
            ) from error

    def identity(self) -> Identity:
        """See `Source.identity`."""
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in self.tensors)
        return super().identity()._replace(tensors=shapes)


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor, on its device; the index lies on the host."""
    if not is_accelerator(tensor.device):
        return tensor.index_select(0, index)
    if (wrong := outside(index, len(tensor))) is not None:
        raise IndexError(f"index {wrong} is out of range")
    if bool((index.diff() == 1).all()):  # as in an evaluation: without a copy of the index, and a wait for it
        return tensor[int(index[0]) : int(index[-1]) + 1].clone()
    return tensor.index_select(0, index.to(tensor.device))


def outside(index: Tensor, length: int) -> int | None:
    """A row of an index on the host that tensors of a length do not have; None: they have all.

    Asked before a gather on a device, where a wrong index would end the process's use of it, and no error
    would name the index.
    """
    low, high = (int(bound) for bound in torch.aminmax(index))
    return low if low < 0 else high if high >= length else None
