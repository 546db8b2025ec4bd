"""The outer step: a momentum on the difference between two means (SlowMo, DiLoCo).

With `last`, the parameters that all replicas had after the last mean, and `mean`, that of now::

    difference = last - mean
    momentum   = outer.momentum * momentum + difference
    step       = momentum, or difference + outer.momentum * momentum with nesterov
    parameters = last - outer.lr * step

These are the parameters of all replicas, and the next `last`. Buffers and moving averages of the weights keep
their plain means.

Source: SlowMo (Wang et al. 2019, arXiv:1910.00643) and DiLoCo (Douillard et al. 2023, arXiv:2311.08105).
SlowMo divides the difference by the learning rate; here, as in DiLoCo, the momentum falls with the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from flowdp.device.flat_parameters import Flat
from flowdp.options import OuterOptions

__all__ = ["Move", "OuterMomentum"]

NARROW_BLOCK = 1 << 23
"""Elements of bfloat16 or float16 that are moved at once: the scratch in float32 has 32 MB."""

Move = Callable[[Tensor], None]
"""Outer step of a block: replaces the mean in it by the new parameters."""


class OuterMomentum:
    """The momentum and the parameters after the last mean, as flat memory, and the step that they take.

    Memory: the parameters once more, and their momentum (in float32 for bfloat16 and float16).

    Args:
        options: Rate and momentum.
        flats: Flat memory of a replica, whose parameters are those of all ranks.
        device: Where the state lies; None: on the device of the flats.

    Attributes:
        momentum: One memory for each dtype, as `FlatTensors.trained`.

    Threads: one at a time for each element; see the collectives.
    Streams: all is enqueued on the current one.
    """

    def __init__(
        self, options: OuterOptions, flats: Sequence[Flat], device: torch.device | None = None
    ) -> None:
        self._options = options
        self._last: dict[int, Tensor] = {}  # by the number of the flat
        self._momentum: dict[int, Tensor] = {}
        for number, flat in enumerate(flats):
            if not (flat.is_measured and flat.split):  # a moving average of the weights, or buffers alone
                continue
            last = flat.memory[: flat.split].to(device or flat.memory.device, copy=True)
            wide = last.dtype if last.dtype.itemsize >= 4 else torch.float32
            self._last[number] = last
            self._momentum[number] = torch.zeros_like(last, dtype=wide)

    @property
    def momentum(self) -> list[Tensor]:
        """See the class."""
        return list(self._momentum.values())

    def state(self, number: int) -> tuple[Tensor, ...]:
        """Last parameters and momentum of a flat. Shape (split,) each. Empty for one that is not stepped."""
        return (self._last[number], self._momentum[number]) if number in self._last else ()

    def move(self, last: Tensor, momentum: Tensor) -> Move:
        """The step of a block of this state: the mean is given in the dtype of the momentum."""
        return partial(_step, self._options, last, momentum)

    def step(self, memories: Sequence[Tensor]) -> None:
        """Take the step of all parameters; the means, in the memories of the flats, become the new ones."""
        for number, last in self._last.items():
            momentum, parameters = self._momentum[number], memories[number][: len(last)]
            if parameters.dtype == momentum.dtype:
                _step(self._options, last, momentum, parameters)
                continue
            blocks = (tensor.split(NARROW_BLOCK) for tensor in (last, momentum, parameters))
            for then, moving, block in zip(*blocks, strict=True):
                wide = block.to(moving.dtype)
                _step(self._options, then, moving, wide)
                block.copy_(wide)


def _step(options: OuterOptions, last: Tensor, momentum: Tensor, mean: Tensor) -> None:
    """Replace a mean by the new parameters, in place; `last` becomes the same."""
    difference = torch.sub(last, mean, out=mean)
    torch.add(difference, momentum, alpha=options.momentum, out=momentum)
    step = difference.add_(momentum, alpha=options.momentum) if options.nesterov else momentum
    last.copy_(torch.sub(last, step, alpha=options.lr, out=mean))
