"""Start of a loop on several machines: their models are compared, and machine 0's values go to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.collective.batch_norm import SharedStatistics
from flowdp.data.trees import tree_map
from flowdp.data_parallel.machine_memory import spread
from flowdp.device.structure import difference, structure
from flowdp.errors import OptionError
from flowdp.modules.whole_batch import check_embeddings
from flowdp.network.machines import Machines, find_machines
from flowdp.options import MachineOptions, Payload
from flowdp.replica.factories import needs_closure

__all__ = [
    "TIMEOUT_S",
    "check_machines",
    "check_trainable",
    "check_windows",
    "open_machines",
    "share_optimizers",
    "share_start",
]

TIMEOUT_S = 600.0
"""Longest wait for another machine, with `machines=True`. Longer than the Trainer's: in a loop that the user
owns a machine may evaluate or save for minutes while the others wait for its gradients."""

HOST = torch.device("cpu")


def check_machines(option: object) -> tuple[bool, float, Payload]:
    """Whether other machines of the job are wanted, the longest wait for one, and the payload.

    Raises:
        OptionError: It is something else, or has options that a loop of the user's own cannot follow.
    """
    if isinstance(option, bool):
        return option, TIMEOUT_S, "full"
    if not isinstance(option, MachineOptions):
        raise OptionError(f"machines must be True, False or MachineOptions(...), not {option!r}")
    default = MachineOptions()
    summed = (
        "the rounds of a Trainer: setup() sums all machines' gradients in every backward outside no_sync()"
    )
    read = "the dataset of a Trainer: with setup() the loop reads its own loader"
    for name, reason in (("rounds", summed), ("overlap", summed), ("stream", read)):
        if (given := getattr(option, name)) != getattr(default, name):
            raise OptionError(f"machines.{name}={given!r} is for {reason}; leave {name} out")
    return True, option.timeout, option.payload


def open_machines(model: nn.Module, option: object) -> Machines | None:
    """The machines of this job, where the model has something to train; None: this process is alone.

    Raises:
        CollectiveError: Not all machines came here in time.
        OptionError: The option is wrong, or the process group cannot be made.
    """
    wanted, timeout_s, _ = check_machines(option)
    # A model that is used as it is, by one machine to evaluate for instance, needs no other.
    wanted = wanted and any(parameter.requires_grad for parameter in model.parameters())
    return find_machines(timeout_s=timeout_s, wanted=wanted)


def check_windows(cadence: object, *, windows: bool) -> None:
    """Check that windows of whole batches were not asked for.

    Raises:
        OptionError: They were.
    """
    if windows and cadence is not None:
        raise OptionError(
            f"cadence={cadence!r} sizes the windows by the speed of one machine's devices, so machines would "
            "take different numbers of steps: give cadence=False, which cuts each batch"
        )


def check_trainable(model: nn.Module) -> None:
    """Check that a model has no layer that needs the batch of all machines.

    Raises:
        OptionError: It has one.
    """
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
    _check_same(machines, machines.gather(words), "build the same model and make the same call of setup()")
    spread(machines, [*model.parameters(), *model.buffers()])


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
    names = {parameter: name for name, parameter in model.named_parameters()}
    kinds, numbers = {}, {}
    for number, optimizer in enumerate(optimizers):
        kinds[f"optimizer {number}"] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            which = f"of group {place} of optimizer {number}"
            kinds[f"parameters {which}"] = ", ".join(names.get(one, "?") for one in group["params"])
            for key, value in group.items():
                plain = value.tolist() if isinstance(value, Tensor) else value
                if isinstance(plain, (bool, int, float, str, tuple, type(None))):
                    numbers[f"{key} {which}"] = repr(plain)
    gathered = machines.gather((kinds, numbers, any(optimizer.state for optimizer in optimizers)))
    # With machine 0's state its numbers come, too.
    compared = [kinds if gathered[0][2] else {**kinds, **numbers} for kinds, numbers, _ in gathered]
    _check_same(machines, compared, "make the same optimizers")
    if any(has_state for *_, has_state in gathered):
        states = machines.share([tree_map(_on_host, optimizer.state_dict()) for optimizer in optimizers])
        if not machines.leads:
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)


def _check_same(machines: Machines, words: Sequence[Mapping[str, str]], remedy: str) -> None:
    """Check that all machines describe what they have in the same words.

    Raises:
        OptionError: They do not.
    """
    for name, other in zip(machines.names[1:], words[1:], strict=True):
        if found := difference(other, words[0], f"on {name}", f"on {machines.names[0]}"):
            raise OptionError(f"the machines differ: {found}; every machine must {remedy}")


def _on_host(leaf: Any) -> Any:
    return leaf.detach().to(HOST) if isinstance(leaf, Tensor) else leaf
