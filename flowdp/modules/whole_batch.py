"""Modules whose training forward needs the whole batch: embeddings that count or shorten rows, and buffers.

A forward of a part of the batch does something else than a forward of all of it, without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer, SparseAdam

from flowdp.errors import OptionError

__all__ = ["Written", "check_dense", "check_embeddings"]

log = logging.getLogger("flowdp")


def check_embeddings(module: nn.Module, owner: str, *, is_shared: bool) -> None:
    """Check that no embedding that is trained needs the indices of the whole batch.

    Args:
        module: The model.
        owner: Function or option that cuts the batches, for the message.
        is_shared: Whether several devices have parts of a batch.

    Raises:
        OptionError: An embedding scales its gradients by how often an index occurs, or, among several
            devices, shortens the rows that its part uses.
    """
    for name, part in module.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or not part.weight.requires_grad:
            continue
        which = f"{owner}: {type(part).__name__} {name!r}" if name else f"{owner}: the {type(part).__name__}"
        if part.scale_grad_by_freq:
            raise OptionError(
                f"{which} has scale_grad_by_freq=True, which counts how often an index occurs in a forward, "
                "and a forward has a part of the batch alone: make it with scale_grad_by_freq=False"
            )
        if is_shared and part.max_norm is not None:
            raise OptionError(
                f"{which} has max_norm={part.max_norm}: its forward writes to the rows of its weight that "
                "the device's part of the batch uses, and the devices would come to have different weights: "
                "make it with max_norm=None, and normalise its output, or the rows in the model's forward "
                "without writing to them"
            )


def check_dense(optimizer: Optimizer) -> None:
    """Check that an optimizer takes dense gradients, which those of policy="exact" are.

    Raises:
        OptionError: It takes sparse ones alone.
    """
    if isinstance(optimizer, SparseAdam):
        raise OptionError(
            "optimizer: under policy='exact' gradients are dense, those of nn.Embedding(sparse=True) too, "
            "and SparseAdam takes sparse ones alone: use Adam, or policy='sync'"
        )


class Written:
    """The buffers written by training forwards from now on, by torch's counts; batch norms are left out."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: _state(buffer) for name, _, buffer in _buffers(module)}

    def tell(self) -> None:
        """Log the names of the buffers that were written: they change once per micro-batch."""
        found = [
            f"{name!r} of {kind}"
            for name, kind, buffer in _buffers(self._module)
            if self._before.get(name) != _state(buffer)
        ]
        if found:
            log.warning(
                "policy='exact': forward writes to buffer %s%s: its buffers change once per micro-batch, not "
                "once per window, so this run is not that of one device",
                ", ".join(found[:4]),
                f" and {len(found) - 4} more" if len(found) > 4 else "",
            )


def _state(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version


def _buffers(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for prefix, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            for name, buffer in part.named_buffers(prefix, recurse=False):
                yield name, type(part).__name__, buffer
