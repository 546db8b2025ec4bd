"""Batches of a dataset that lies on the device, made where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Gathered", "made"]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Samples of a dataset that lies on the device; the batch is made where it is needed, by a graph, too.

    Attributes:
        index: Which samples, on the device. Shape [samples].
        make: Makes the batch of an index.
        samples: Number of samples.
    """

    index: Tensor
    make: Callable[[Tensor], Any]
    samples: int

    @property
    def batch(self) -> Any:
        """The batch, in new memory."""
        return self.make(self.index)

    def rows(self, start: int, stop: int) -> Gathered:
        """The samples [start, stop) of it."""
        whole = stop - start == self.samples
        return self if whole else Gathered(self.index[start:stop], self.make, stop - start)


def made(batch: Any) -> Any:
    """A batch as the user's code gets it."""
    return batch.batch if type(batch) is Gathered else batch
