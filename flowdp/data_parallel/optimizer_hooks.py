"""The optimizers of a loop that the user owns, and the hook behind their steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flowdp.errors import FlowdpError, OptionError
from flowdp.replica.learning_rate import no_rate_to_scale

__all__ = ["OptimizerHooks", "OptimizerOption", "check_optimizers"]

OptimizerOption = Optimizer | Sequence[Optimizer] | Callable[[list[nn.Parameter]], Any] | None


def check_optimizers(option: OptimizerOption, model: nn.Module) -> tuple[Optimizer, ...]:
    """The optimizers given, or made by a factory; () for None.

    Raises:
        OptionError: They are no optimizers, or have none of the model's parameters.
    """
    if option is None:
        return ()
    made: Any = option
    if not isinstance(option, (Optimizer, Sequence)) and callable(option):
        made = option([parameter for parameter in model.parameters() if parameter.requires_grad])
    optimizers = tuple(made) if isinstance(made, Sequence) else (made,)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise OptionError(
                f"optimizer must be a torch optimizer or a factory of one, not {optimizer!r}; of a wrapper, "
                "give the torch optimizer inside"
            )
    held = {one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    if optimizers and held.isdisjoint(model.parameters()):
        raise OptionError(
            "none of the optimizer's parameters is one of the model's: make the optimizer after the model, "
            "from this model's parameters()"
        )
    return optimizers


class OptimizerHooks:
    """The optimizers of a module, with a hook behind each step of the first.

    Args:
        module: The user's.

    Attributes:
        optimizers: The user's optimizers.
        steps: Steps of the first of them so far.

    Threads: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.optimizers: tuple[Optimizer, ...] = ()
        self.steps = 0
        self._module = module
        self._hook: Any = None

    def use(self, option: OptimizerOption, stepped: Callable[[], None]) -> None:
        """Replace the optimizers.

        Args:
            option: As `setup` takes them.
            stepped: Called after each step of the first optimizer; a bound method, which is not kept alive.

        Raises:
            OptionError: They are none, or belong to another model. Those before remain then.
        """
        self.optimizers = check_optimizers(option, self._module)
        if self._hook is not None:
            self._hook.remove()
        owner, method = weakref.ref(self), weakref.WeakMethod(stepped)

        def after(*_: object) -> None:
            hooks, learn = owner(), method()
            if hooks is not None and learn is not None:
                hooks.steps += 1
                learn()

        self._hook = self.optimizers[0].register_step_post_hook(after) if self.optimizers else None

    def step(self, scaler: torch.amp.GradScaler | None, max_norm: float | None) -> None:
        """Clip to a 2-norm, and step all optimizers; see `DataParallel.step`.

        Raises:
            FlowdpError: There is no optimizer.
        """
        if not self.optimizers:
            raise FlowdpError("step() has no optimizer: give one to setup() or set_optimizer()")
        if max_norm is not None:
            if scaler is not None:
                for optimizer in self.optimizers:
                    scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self._module.parameters(), max_norm)
        for optimizer in self.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()

    def set_lr(self, lr: float) -> None:
        """Scale the learning rates of all groups so that the first one that is not 0 has `lr`; see `set_lr`.

        Raises:
            OptionError: Several groups, and all at 0.
        """
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = [float(group["lr"]) for group in groups]
        lead = next(filter(None, rates), 0.0)
        if not lead and len(groups) > 1:
            raise OptionError(no_rate_to_scale(len(groups)))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = group["lr"] * 0 + (rate * (lr / lead) if lead else lr)  # a tensor stays one
