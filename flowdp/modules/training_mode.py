"""Training and evaluation modes of a module's parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["kept_in_eval", "put_modes", "start_training"]


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


def kept_in_eval(module: nn.Module) -> list[str]:
    """The names of the largest parts in eval mode that have parts of their own and parameters to train.

    A frozen layer is meant so; such a part may come from its library in eval mode.
    """
    names: list[str] = []
    for name, part in module.named_modules():
        if (
            not part.training
            and not any(name.startswith(f"{above}.") for above in names)
            and any(part.children())
            and any(parameter.requires_grad for parameter in part.parameters())
        ):
            names.append(name)
    return names
