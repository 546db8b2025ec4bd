"""Modules whose training forward needs the whole batch: embeddings that count or shorten rows, and writes.

A forward of a part of the batch does something else than a forward of all of it, without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import Tensor, nn

from flowdp.device.frozen_parameters import FrozenParameters
from flowdp.device.streams import Lane
from flowdp.errors import OptionError

__all__ = ["BATCH_NORMS", "Written", "check_embeddings"]

log = logging.getLogger("flowdp")

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
                "and a forward has a part of the batch alone"
            )
        if is_shared and part.max_norm is not None:
            raise OptionError(
                f"{which} has max_norm={part.max_norm}: its forward writes to the rows of its weight that "
                "the device's part of the batch uses, and the devices would come to have different weights: "
                "normalise its output"
            )


class Written:
    """The state that the forwards of a window write to.

    Buffers by torch's counts, without those of batch norms; parameters by their bits, trained ones on the CPU
    alone.

    Args:
        module: The model.
        lane: Lane of its device.

    Streams:
        As `FrozenParameters`.
    """

    def __init__(self, module: nn.Module, lane: Lane) -> None:
        self._module = module
        self._before: dict[str, tuple[int, int]] = {}
        # On cards replicas that were written to differ at the epoch's end, and a look waits for the device.
        self._parameters = FrozenParameters(module, lane, trained=not lane.is_async)
        self._logged: set[str] = set()

    def begin(self) -> None:
        """Note the state before the forwards."""
        self._before = {name: _state(buffer) for name, _, buffer in _buffers(self._module)}
        self._parameters.note()

    def tell(self, *, is_shared: bool) -> None:
        """Log the names of what was written, once each: it changes once per micro-batch.

        Args:
            is_shared: Whether several devices have parts of a window.

        Raises:
            ValueError: It is a frozen parameter, and several have: one without a part does not write to it.
        """
        changed = self._parameters.changed()
        frozen = [name for name in changed if not self._module.get_parameter(name).requires_grad]
        if frozen and is_shared:
            raise ValueError(
                f"frozen parameter {frozen[0]!r} was written to by the loss or the model's forward: under "
                "policy='exact' that is once per micro-batch, and not at all on a device that has no part of "
                "a window, so the devices would come to have different ones. Write to it in "
                "Callback.on_step, which is called on every device after every step"
            )
        kinds = {False: "the frozen parameter", True: "the parameter"}
        found = {
            name: f"{kinds[self._module.get_parameter(name).requires_grad]} {name!r}" for name in changed
        }
        for name, kind, buffer in _buffers(self._module):
            if self._before.get(name) != _state(buffer):
                found[name] = f"buffer {name!r} of {kind}"
        new = [text for name, text in found.items() if name not in self._logged]
        self._logged |= found.keys()
        if new:
            log.warning(
                "policy='exact': forward writes to %s%s: that changes once per micro-batch, not once per "
                "window, so this run is not that of one device; Callback.on_step is called once per window",
                ", ".join(new[:4]),
                f" and {len(new) - 4} more" if len(new) > 4 else "",
            )


def _state(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version


def _buffers(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for prefix, part in module.named_modules():
        if not isinstance(part, BATCH_NORMS):
            for name, buffer in part.named_buffers(prefix, recurse=False):
                yield name, type(part).__name__, buffer
