"""Hooks around the steps of the optimizers, in a loop that the user owns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.data_parallel.arguments import OptimizerOption, check_optimizers
from flowdp.data_parallel.machine_sum import MachineSum
from flowdp.errors import FlowdpError, OptionError
from flowdp.replica.factories import needs_closure
from flowdp.replica.learning_rate import no_rate_to_scale

__all__ = ["OptimizerHooks"]


class OptimizerHooks:
    """The optimizers of a module, with hooks before and after each of their steps.

    Args:
        module: The user's.
        stepped: Called after each step of the first optimizer; a bound method, which is not kept alive.
        sums: Sums over the machines of the job; None: there is one.

    Attributes:
        optimizers: The user's optimizers.
        count: Steps of the first optimizer so far.

    Threads: the user's.
    """

    def __init__(
        self,
        module: nn.Module,
        stepped: Callable[[], None],
        sums: MachineSum | None = None,
    ) -> None:
        self.optimizers: tuple[Optimizer, ...] = ()
        self.count = 0
        self._module = module
        self._stepped = weakref.WeakMethod(stepped)
        self._sums = sums
        self._hooks: list[Any] = []
        self._held: list[float] = []  # rates before the last `set_lr`, which may have set them to 0

    def use(self, option: OptimizerOption) -> None:
        """Replace the optimizers.

        Raises:
            OptionError: They are none, or belong to another model. Those before remain then.
        """
        self.optimizers = check_optimizers(option, self._module)
        self._held = []
        if self._sums is not None:
            self._sums.optimizer = self.optimizers[0] if self.optimizers else None
        for hook in self._hooks:
            hook.remove()
        # An optimizer that outlives this must not keep it, and the replicas behind it.
        after = partial(_call, weakref.WeakMethod(self._after))
        self._hooks = [optimizer.register_step_post_hook(after) for optimizer in self.optimizers]
        if self._sums is not None and self.optimizers:
            before = partial(_call, weakref.WeakMethod(self._sums.check_step))
            self._hooks.append(self.optimizers[0].register_step_pre_hook(before))

    def step(self, scaler: torch.amp.GradScaler | None, max_norm: float | None) -> None:
        """Clip to a 2-norm, and step all optimizers; see `DataParallel.step`.

        Raises:
            FlowdpError: There is no optimizer, one needs a closure, or no parameter has a gradient.
        """
        if not self.optimizers:
            raise FlowdpError("step() has no optimizer: give one to setup() or set_optimizer()")
        for optimizer in self.optimizers:
            if needs_closure(optimizer):
                raise FlowdpError(
                    f"{type(optimizer).__name__} needs a closure: call optimizer.step(closure) instead of "
                    "step()"
                )
        self.collect()
        if all(parameter.grad is None for parameter in self._module.parameters()):
            raise FlowdpError("step() found no gradients: call backward() on a loss of the outputs first")
        if max_norm is not None:
            if scaler is not None:
                for optimizer in self.optimizers:
                    scaler.unscale_(optimizer)
            self.clip(max_norm, 2.0)
        for optimizer in self.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of all devices together; returns their norm. Shape []."""
        self.collect()
        return nn.utils.clip_grad_norm_(self._module.parameters(), max_norm, norm_type)

    def set_lr(self, lr: float) -> None:
        """Scale the learning rates of all groups so that the first one that is not 0 has `lr`; see `set_lr`.

        Raises:
            FlowdpError: There is no optimizer.
            OptionError: Several groups, and all at 0.
        """
        if not self.optimizers:
            raise FlowdpError("set_lr() has no optimizer: give one to setup() or set_optimizer()")
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = [float(group["lr"]) for group in groups]
        if not any(rates) and len(self._held) == len(groups):
            rates = self._held
        lead = next(filter(None, rates), 0.0)
        if not lead and len(groups) > 1:
            raise OptionError(no_rate_to_scale(len(groups)))
        self._held = rates
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = group["lr"] * 0 + (rate * (lr / lead) if lead else lr)  # a tensor stays one

    def collect(self) -> None:
        """Sum the gradients that backwards inside `no_sync` have left at the machines."""
        if self._sums is not None:
            self._sums.collect()

    def _after(self, optimizer: Optimizer) -> None:
        if optimizer is not self.optimizers[0]:
            return
        self.count += 1
        if self._sums is not None:
            self._sums.stepped()
        if (stepped := self._stepped()) is not None:
            stepped()


def _call(method: weakref.WeakMethod[Any], optimizer: Optimizer, *_: Any) -> None:
    if (alive := method()) is not None:
        alive(optimizer)
