"""Start of a loop on several machines: their models are compared, and machine 0's values go to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.collective.batch_norm import SharedStatistics
from flowdp.data.trees import tree_map
from flowdp.device.structure import difference, structure
from flowdp.errors import OptionError
from flowdp.modules.whole_batch import check_embeddings
from flowdp.network.machines import Machines
from flowdp.options import MachineOptions
from flowdp.replica.factories import needs_closure

__all__ = ["TIMEOUT_S", "check_loop", "check_machines", "share_optimizers", "share_start"]

TIMEOUT_S = 600.0
"""Longest wait for another machine, with `machines=True`. Longer than the Trainer's: in a loop that the user
owns a machine may evaluate or save for minutes while the others wait for its gradients."""


def check_machines(option: object, model: nn.Module) -> MachineOptions | None:
    """Options for the other machines of the job; None: they are not wanted, or there is nothing to train.

    Raises:
        OptionError: It is something else, or has options that a loop of the user's own cannot follow.
    """
    if option is False:
        return None
    if option is True:
        option = MachineOptions(timeout=TIMEOUT_S)
    if not isinstance(option, MachineOptions):
        raise OptionError(f"machines must be True, False or MachineOptions(...), not {option!r}")
    if option != MachineOptions(timeout=option.timeout, payload=option.payload):
        raise OptionError(
            f"machines={option!r}: setup() takes timeout and payload, and sums all machines' gradients in "
            "every backward outside no_sync(); rounds, overlap and stream are for a Trainer: leave them out"
        )
    # A model that is used as it is, by one machine to evaluate for instance, needs no other.
    return option if any(parameter.requires_grad for parameter in model.parameters()) else None


def check_loop(model: nn.Module, cadence: object, *, windows: bool) -> None:
    """Check that nothing in a loop needs the batch of all machines, or goes by the speed of one.

    Raises:
        OptionError: Windows of whole batches were asked for, or a layer needs the whole batch.
    """
    if windows and cadence is not None:
        raise OptionError(
            f"cadence={cadence!r} sizes the windows by the speed of one machine's devices, so machines would "
            "take different numbers of steps: give cadence=False, which cuts each batch"
        )
    if SharedStatistics(model):
        raise OptionError(
            "SyncBatchNorm takes the statistics of the devices of one machine, and this job has several "
            "machines: leave the model unconverted (each device normalises its part), or use GroupNorm"
        )
    check_embeddings(model, "setup", is_shared=True)


def share_start(machines: Machines, model: nn.Module, settings: dict[str, Any]) -> None:
    """Compare the models of all machines, and give them machine 0's parameters and buffers.

    Args:
        machines: All of them.
        model: On any devices; its tensors are written to in place.
        settings: Arguments of `setup` that must be the same on all machines, by name.

    Raises:
        OptionError: The machines differ; every machine raises it, with the first difference.
        CollectiveError: A machine was lost, or does not come.
    """
    words = structure(model, every_name=True)
    words |= {f"setup(..., {name}=)": repr(value) for name, value in settings.items()}
    _check_same(machines, words, "build the same model and make the same call of setup()")
    own = [one.detach() for one in (*model.parameters(), *model.buffers()) if one.numel()]
    values = [one.cpu().contiguous() for one in own]
    machines.spread([one.view(-1).view(torch.uint8) for one in values])  # gloo does not know every dtype
    for one, value in zip(own, values, strict=True):
        one.copy_(value)


def share_optimizers(machines: Machines, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Compare the optimizers of all machines, and give them the state of machine 0's where any has one.

    Raises:
        OptionError: The machines differ, or an optimizer computes its loss again; every machine raises it.
        CollectiveError: A machine was lost, or does not come.
    """
    for optimizer in optimizers:
        if needs_closure(optimizer):
            raise OptionError(
                f"{type(optimizer).__name__} decides by the loss that its closure computes, which is of one "
                "machine's batch alone: on several machines use an optimizer without a closure"
            )
    # With its state come machine 0's numbers, too.
    has_state = any(machines.gather(any(optimizer.state for optimizer in optimizers)))
    names = {parameter: name for name, parameter in model.named_parameters()}
    words = {}
    for number, optimizer in enumerate(optimizers):
        words[f"optimizer {number}"] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            which = f"of group {place} of optimizer {number}"
            words[f"parameters {which}"] = ", ".join(names.get(one, "?") for one in group["params"])
            for key, value in group.items():
                plain = value.tolist() if isinstance(value, Tensor) else value
                if not has_state and isinstance(plain, (bool, int, float, str, tuple, type(None))):
                    words[f"{key} {which}"] = repr(plain)
    _check_same(machines, words, "make the same optimizers")
    if has_state:
        states = machines.share([tree_map(_on_host, optimizer.state_dict()) for optimizer in optimizers])
        if not machines.leads:
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)


def _check_same(machines: Machines, words: Mapping[str, str], remedy: str) -> None:
    """Check that all machines describe what they have in the same words.

    Raises:
        OptionError: They do not.
    """
    first, *others = machines.gather(words)
    for name, other in zip(machines.names[1:], others, strict=True):
        if found := difference(other, first, f"on {name}", f"on {machines.names[0]}"):
            raise OptionError(f"the machines differ: {found}; every machine must {remedy}")


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
