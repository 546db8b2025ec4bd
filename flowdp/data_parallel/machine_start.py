"""Start of a loop on several machines: their models are compared, and machine 0's values go to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.collective.batch_norm import SharedStatistics
from flowdp.data.trees import tree_map
from flowdp.data_parallel.machine_memory import spread
from flowdp.device.structure import difference, structure
from flowdp.errors import OptionError
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
    """Check that a model has no layer that needs the batch of all machines, or whose gradients are sparse.

    Raises:
        OptionError: It has one.
    """
    if SharedStatistics(model):
        raise OptionError(
            "SyncBatchNorm takes the statistics of the devices of one machine, and this job has several "
            "machines: leave the model unconverted (each device normalises its part), or use GroupNorm"
        )
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise OptionError(
                f"{name!r} has sparse=True, and sparse gradients are not summed over machines: sparse=False"
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.scale_grad_by_freq:
            raise OptionError(
                f"{name!r} has scale_grad_by_freq=True, and each machine would count the indices of its own "
                "batch: scale_grad_by_freq=False"
            )


@dataclass(frozen=True, slots=True)
class _Start:
    """Model and arguments of a machine, which all compare before they train.

    Attributes:
        tensors: Parameters and buffers in words, by name.
        settings: Arguments of `setup` that must be the same everywhere.
    """

    tensors: dict[str, str]
    settings: dict[str, Any]


def share_start(machines: Machines, model: nn.Module, settings: dict[str, Any]) -> None:
    """Compare the models of all machines, and give them machine 0's parameters and buffers.

    Args:
        machines: All of them.
        model: On any devices; its tensors are written to in place.
        settings: Arguments that must be the same on all machines, by name.

    Raises:
        OptionError: The machines differ; every machine raises it, with the first difference.
        CollectiveError: A machine was lost, or does not come.
    """
    starts = machines.gather(_Start(structure(model, every_name=True), settings))
    first = starts[0]
    for name, other in zip(machines.names[1:], starts[1:], strict=True):
        here, there = f"on {name}", f"on {machines.names[0]}"
        if found := difference(other.tensors, first.tensors, here, there):
            raise OptionError(
                f"the models of the machines differ: {found}; every machine must build the same model"
            )
        for key, value in first.settings.items():
            if other.settings[key] != value:
                raise OptionError(
                    f"setup() was called with {key}={other.settings[key]!r} {here} and {key}={value!r} "
                    f"{there}: every machine must make the same call"
                )
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
    mine = [_described(optimizer, names) for optimizer in optimizers]
    gathered = machines.gather((mine, any(optimizer.state for optimizer in optimizers)))
    first, has_state = gathered[0]
    for name, (other, _) in zip(machines.names[1:], gathered[1:], strict=True):
        if found := _difference(other, first, f"on {name}", f"on {machines.names[0]}", has_state=has_state):
            raise OptionError(f"the optimizers of the machines differ: {found}; make the same on each")
    if any(has for _, has in gathered):
        states = machines.share([tree_map(_on_host, optimizer.state_dict()) for optimizer in optimizers])
        if not machines.leads:
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)


def _described(optimizer: Optimizer, names: dict[Any, str]) -> dict[str, str]:
    """Kind, parameters and numbers of an optimizer, in words."""
    found = {"kind": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        found[f"parameters of group {number}"] = ", ".join(names.get(one, "?") for one in group["params"])
        for key, value in group.items():
            if key != "params" and isinstance(value, (bool, int, float, str, tuple, Tensor, type(None))):
                plain = value.tolist() if isinstance(value, Tensor) else value
                found[f"{key} of group {number}"] = repr(plain)
    return found


def _difference(
    mine: Sequence[dict[str, str]],
    theirs: Sequence[dict[str, str]],
    here: str,
    there: str,
    *,
    has_state: bool,
) -> str:
    if len(mine) != len(theirs):
        return f"there are {len(mine)} {here} and {len(theirs)} {there}"
    for one, other in zip(mine, theirs, strict=True):
        for key in {**other, **one}:
            # The numbers of the groups come with the state.
            is_kept = not has_state or key == "kind" or key.startswith("parameters")
            if is_kept and one.get(key) != other.get(key):
                return f"{key} is {one.get(key, 'missing')} {here} and {other.get(key, 'missing')} {there}"
    return ""


def _on_host(leaf: Any) -> Any:
    return leaf.detach().to(HOST) if isinstance(leaf, Tensor) else leaf
