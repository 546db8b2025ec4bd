"""Values of metrics that have several elements, without torch: they stand in records and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["MetricArray"]


@dataclass(frozen=True, slots=True, repr=False)
class MetricArray:
    """Value of a metric that has several elements: a confusion matrix, one number per class.

    ::

        confusion = torch.tensor(metrics.eval_arrays["confusion"].tolist())

    Attributes:
        shape: Sizes of its dimensions.
        values: All elements, those of the last dimension beside each other. Shape (product of `shape`,).
    """

    shape: tuple[int, ...]
    values: tuple[float, ...]

    def tolist(self) -> list[Any]:
        """The elements as nested lists, as `torch.tensor` and `numpy.array` take them."""
        if not self.values:
            return []
        nested: list[Any] = list(self.values)
        for size in reversed(self.shape[1:]):
            nested = [nested[at : at + size] for at in range(0, len(nested), size)]
        return nested

    def __repr__(self) -> str:
        return f"<MetricArray {' x '.join(map(str, self.shape))}>"
