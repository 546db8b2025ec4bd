"""State of one rank in a checkpoint: copied to the host at a barrier, and restored before a run.

All ranks have the same parameters then, so one of them gives the model for all. Optimizers, scale of the
loss, random numbers and learning rates are each rank's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flowdp.checkpoint.fingerprint import SHOWN
from flowdp.checkpoint.host_copies import HostCopies, PinnedBlocks
from flowdp.collective.outer import OuterMomentum
from flowdp.device.accelerator import device_generator, is_accelerator
from flowdp.device.flat_parameters import memory_key
from flowdp.device.streams import Lane
from flowdp.device.structure import difference, tensor_form
from flowdp.errors import CheckpointError
from flowdp.policy.formats import format_error
from flowdp.replica.factories import all_of
from flowdp.replica.optimizer_copy import load_state
from flowdp.replica.replica import Replica

__all__ = [
    "capture",
    "capture_generator",
    "named_momentum",
    "of_rank",
    "restore",
    "restore_model",
    "restore_momentum",
]


def capture(
    replica: Replica,
    *,
    shared: bool,
    outer: OuterMomentum | None = None,
    blocks: PinnedBlocks | None = None,
) -> Callable[[], dict[str, Any]]:
    """Copy a rank's state to the host for a checkpoint.

    Args:
        replica: Replica of the rank.
        shared: Also "model", the module's state_dict by its own names, "buffers", those that are not in it,
            "ema", the moving average of its parameters, and "outer", the momentum of the means' outer step.
            One rank does so for all.
        outer: That momentum; None: there is none.
        blocks: Pinned memory of the rank's captures; None: of this one alone.

    Returns:
        Function that waits for the copies and returns them: a dict of "optimizers" (in the form in which the
        user gave them), "scaler", "generator" (both None where there is none), "learning_rate". No tensor in
        it shares memory with the replica; those that are one there are one here.

    Threads:
        The rank's worker, while all ranks stand still. The result: any, once.

    Streams:
        On `compute`, which must be the current one. The host goes on at once, but for the scale of "fp16",
        and for what is more than a block holds.
    """
    scaler = replica.update.scaler
    state: dict[str, Any] = {
        "optimizers": replica.optimizer_states(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "generator": _generator_state(replica.device),
        "learning_rate": replica.learning_rate.state_dict(),
    }
    if shared:
        module = replica.module
        state["model"] = dict(module.state_dict())
        state["buffers"] = _hidden_buffers(module)
        state["ema"] = {} if replica.average is None else replica.average.named()
        state["outer"] = named_momentum(replica, outer)
    leaves, form = tree_flatten(state)
    copies, arrived = _to_host(leaves, replica.lane, blocks)

    def wait() -> dict[str, Any]:
        arrived()
        made: dict[str, Any] = tree_unflatten(copies, form)
        return made

    return wait


def capture_generator(replica: Replica) -> Callable[[], dict[str, Any]]:
    """Copy what a rank has for itself where all ranks have the same optimizers: its random numbers.

    Args:
        replica: Replica of the rank.

    Returns:
        Function that returns a part of what the one of `capture` does: "generator" alone.

    Threads:
        As of `capture`.
    """
    state = {"generator": _generator_state(replica.device)}
    return lambda: state


def named_momentum(replica: Replica, outer: OuterMomentum | None) -> dict[str, Tensor]:
    """Momentum of the means' outer step by the names of a replica's module; empty where there is none."""
    return {} if outer is None else replica.flat.named(outer.momentum)


def of_rank(ranks: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """State of a rank from a checkpoint of any number of ranks: that of rank `rank % len(ranks)`.

    A rank beyond the saved ones keeps the random numbers it was seeded with: two devices must not draw the
    same ones.
    """
    state = dict(ranks[rank % len(ranks)])
    return state if rank < len(ranks) else {**state, "generator": None}


@torch.no_grad()
def restore(
    replica: Replica,
    state: Mapping[str, Any],
    model: Mapping[str, Any],
    buffers: Mapping[str, Tensor] | None,
    ema: Mapping[str, Tensor] | None = None,
) -> None:
    """Restore a replica from a saved state: the same bits, in the memory it has.

    Args:
        replica: Newly built.
        state: State of its rank; see `of_rank`. It may be given to several ranks. All but "optimizers" may be
            None.
        model: Model of the checkpoint.
        buffers: Buffers of the checkpoint; None: unknown, so those of the replica stay.
        ema: Moving average in the checkpoint; without one, that of the replica begins at the model.

    Raises:
        CheckpointError: Model, optimizers or schedulers are others than those of the checkpoint.

    Threads:
        The one that builds, before the workers run.

    Streams:
        On `compute`; all of it is done on return.
    """
    lane = replica.lane
    try:
        with lane.on(lane.compute):
            restore_model(replica.module, model, buffers)
            if replica.average is not None:
                replica.average.restore(ema or {})
            _restore_optimizers(replica, state["optimizers"])
            if replica.update.scaler is not None and state["scaler"] is not None:
                replica.update.scaler.load_state_dict(state["scaler"])
            replica.learning_rate.load_state_dict(state["learning_rate"])
        if state["generator"] is not None and is_accelerator(replica.device):
            device_generator(replica.device).set_state(state["generator"])
    except CheckpointError:
        raise
    except Exception as error:  # of a file whose contents do not fit the replica
        raise CheckpointError(
            f"the checkpoint does not fit this run ({format_error(error)}): resume with the model, "
            f"optimizer and scheduler that were trained"
        ) from error
    finally:
        lane.drain()


# ---------------------------------------------------------------- to the host
def _to_host(
    leaves: Sequence[Any], lane: Lane, blocks: PinnedBlocks | None
) -> tuple[list[Any], Callable[[], None]]:
    """Copies of the leaves, tensors on the host, and a function that waits for them."""
    tensors = {memory_key(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)}
    # Tensors on the host may be changed at once: they are copied now. So are those of another device, which
    # owns parameters and stands still.
    far = [
        key
        for key, tensor in tensors.items()
        if lane.is_async and tensor.device == lane.device and tensor.layout is torch.strided
    ]
    copies = HostCopies(blocks or PinnedBlocks(lane), [tensors[key] for key in far])
    made = dict(zip(far, copies.tensors, strict=True))
    made |= {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items() if key not in made}
    copied = [made[memory_key(leaf)] if isinstance(leaf, Tensor) else _copied_object(leaf) for leaf in leaves]
    return copied, copies.wait


def _copied_object(leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception:  # an object that cannot be copied is not plain: the writer names its place
        return leaf


def _generator_state(device: torch.device) -> Tensor | None:
    """Generator state of an accelerator; that of the CPU belongs to the process, and the user."""
    return device_generator(device).get_state() if is_accelerator(device) else None


def _hidden_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that the state_dict leaves out."""
    shown = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in shown}


# ---------------------------------------------------------------- and back
@torch.no_grad()
def restore_model(module: nn.Module, model: Mapping[str, Any], buffers: Mapping[str, Tensor] | None) -> None:
    """Restore a module from a saved one, in the memory it has.

    Args:
        module: Module of the same structure.
        model: The saved state_dict.
        buffers: Buffers that are not in that; None: unknown, so those of the module stay.

    Raises:
        CheckpointError: It is of another structure.
    """
    own, hidden = module.state_dict(), _hidden_buffers(module)
    if buffers is None:
        buffers, hidden = {}, {}
    if found := _difference({**model, **buffers}, {**own, **hidden}):
        raise CheckpointError(
            f"the checkpoint is of another model: {found}; build the model that was trained, or start anew "
            f"with resume=False"
        )
    own.update(model)  # it has the versions of the layers, by which some of them read
    module.load_state_dict(own)
    for name, tensor in buffers.items():
        hidden[name].copy_(tensor)


@torch.no_grad()
def restore_momentum(replica: Replica, outer: OuterMomentum, saved: Mapping[str, Tensor]) -> None:
    """Restore the momentum of the means' outer step, in the memory it has.

    The parameters after the last mean need no state of their own: those of the model are.

    Args:
        replica: Newly built; its model is restored.
        outer: The momentum that its means have.
        saved: The saved one, by the module's names.

    Raises:
        CheckpointError: It is of other parameters.

    Threads:
        The one that builds, before the workers run.

    Streams:
        On `compute`; all of it is done on return.
    """
    own, lane = named_momentum(replica, outer), replica.lane
    if found := _difference(saved, own):
        raise CheckpointError(
            f"the outer momentum in the checkpoint is of other parameters: {found}; train those that were "
            "trained then, or leave outer out"
        )
    with lane.on(lane.compute):
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    lane.drain()


def _difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The first differences, in words, between the tensors of a checkpoint and a replica's."""
    then, now = (
        {
            name: tensor_form(value.dtype, value.shape) if isinstance(value, Tensor) else "no tensor"
            for name, value in table.items()
        }
        for table in (saved, own)
    )
    return difference(then, now, "in the checkpoint", "here", SHOWN)


def _restore_optimizers(replica: Replica, saved: Any) -> None:
    mine = replica.optimizers
    if _names(mine) != _names(saved):
        raise CheckpointError(
            f"the checkpoint has the optimizers {_names(saved)}, this run has {_names(mine)}: resume with "
            f"the same ones"
        )
    states = saved.values() if isinstance(saved, Mapping) else saved
    for optimizer, state in zip(all_of(mine), states, strict=True):
        load_state(optimizer, state, with_groups=True)


def _names(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, Mapping) else list(range(len(optimizers)))
