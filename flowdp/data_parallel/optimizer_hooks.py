"""Hooks around the steps of the optimizers, in a loop that the user owns."""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.data_parallel.arguments import OptimizerOption, check_optimizers
from flowdp.data_parallel.balancer import Balancer, SingleDevice
from flowdp.data_parallel.buffer_mean import average_buffers
from flowdp.data_parallel.machine_sum import MachineSum
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.sharded_call import collect_gradients
from flowdp.errors import FlowdpError, OptionError
from flowdp.replica.factories import needs_closure
from flowdp.replica.learning_rate import no_rate_to_scale

__all__ = ["OptimizerHooks"]


class OptimizerHooks:
    """The optimizers of a module, with hooks before and after each of their steps.

    Args:
        module: The user's.
        replicas: The replicas, which hold gradients, too; None for one device.
        balancer: Learns from each step.
        averages: Whether each step takes the mean of all ranks' buffers.
        sums: Sums over the machines of the job; None: there is one.

    Attributes:
        optimizers: The user's optimizers.
        count: Steps of the first optimizer so far.

    Threads: the user's.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: Replicas | None,
        balancer: Balancer | SingleDevice,
        *,
        averages: bool,
        sums: MachineSum | None = None,
    ) -> None:
        self.optimizers: tuple[Optimizer, ...] = ()
        self.count = 0
        self._module = module
        self._replicas = replicas
        self._balancer = balancer
        self._averages = averages
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
            self._sums.lead_by(self.optimizers[0] if self.optimizers else None)
        for hook in self._hooks:
            hook.remove()
        # An optimizer that outlives this must not keep it, and the replicas behind it.
        before, after = (partial(_call, weakref.WeakMethod(one)) for one in (self._before, self._after))
        self._hooks = [optimizer.register_step_post_hook(after) for optimizer in self.optimizers]
        if self._replicas is not None or self._sums is not None:
            self._hooks += [optimizer.register_step_pre_hook(before) for optimizer in self.optimizers]

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
        """Add gradients that backwards without a sum have left at replicas and machines to the user's."""
        sums = self._sums
        is_due = sums is not None and sums.is_due()
        if self._replicas is not None:
            with nullcontext() if sums is None else sums.held():
                collect_gradients(self._replicas)
        if sums is not None and is_due:
            sums.reduce()

    def _before(self, optimizer: Optimizer) -> None:
        self._collect_before_a_step()
        if self._sums is not None:
            self._sums.check_step(optimizer)

    def _collect_before_a_step(self) -> None:
        replicas = self._replicas
        has_unsummed = replicas is not None and any(map(replicas.has_unsummed, range(len(replicas.modules))))
        if not has_unsummed and (self._sums is None or not self._sums.is_due()):
            return
        if _is_in_a_scalers_step():
            raise FlowdpError(
                "the scaler has unscaled the gradients of the first device alone, because no_sync() has left "
                "those of the others there: step by dp.step(scaler), or let the last backward be outside"
            )
        self.collect()

    def _after(self, optimizer: Optimizer) -> None:
        if self._replicas is not None:
            written = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            # Fused steps, and kernels of other libraries, do not count their writes.
            torch.autograd.graph.increment_version(written)
        if optimizer is not self.optimizers[0]:
            return
        self.count += 1
        if self._replicas is not None and self._averages:
            average_buffers(self._replicas, self._balancer.samples)
        if self._sums is not None:
            self._sums.stepped()
        self._balancer.step()


def _call(method: weakref.WeakMethod[Any], optimizer: Optimizer, *_: Any) -> None:
    if (alive := method()) is not None:
        alive(optimizer)


def _is_in_a_scalers_step() -> bool:
    # The scaler does not say so, and unscaled gradients cannot be told from scaled ones.
    frame = sys._getframe()
    while (above := frame.f_back) is not None:
        frame = above
        scaler = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(scaler, torch.amp.GradScaler):
            return scaler.is_enabled()
    return False
