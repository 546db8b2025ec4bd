"""Training and evaluation modes of a module's parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["put_modes", "start_training"]


def start_training(module: nn.Module) -> None:
    """Set training mode, but keep the parts in eval mode of a module in training mode.

    `train()` is called in any case: models that override it freeze their BatchNorm there.
    """
    frozen = [part for part in module.modules() if not part.training] if module.training else []
    module.train()  # some override it without a result
    if frozen:
        eval_parts = set(frozen)
        put_modes([(part, part.training and part not in eval_parts) for part in module.modules()])


def put_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Give each part its mode; all parts of a module, in the order of `modules()`."""
    for part, mode in modes:
        if part.training != mode:
            part.train(mode)  # some modules undo the work of their `eval` here
    for part, mode in modes:
        part.training = mode
