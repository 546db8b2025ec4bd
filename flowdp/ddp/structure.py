"""Whether models of several ranks are the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flowdp.errors import OptionError

__all__ = ["check_alike", "check_apart", "structure"]


def structure(module: nn.Module) -> dict[str, str]:
    """What two replicas must agree on: each parameter and buffer in words, by name, in order.

    Raises:
        OptionError: A tensor has no shape yet (lazy modules).
    """
    words = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise OptionError(f"{name!r} has no shape yet; run one batch through the module first")
        kind = "buffer"
        if isinstance(tensor, nn.Parameter):
            kind = "parameter" if tensor.requires_grad else "frozen parameter"
        words[name] = f"a {kind} of shape {tuple(tensor.shape)}, {tensor.dtype}"
    return words


def check_alike(structures: Sequence[Mapping[str, str]]) -> None:
    """Check that models of all ranks have the same structure.

    Raises:
        OptionError: They differ; the message names the first tensor that does, the rank and both forms.
    """
    first = structures[0]
    for rank, other in enumerate(structures):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise OptionError(
                    f"the replicas differ: {name!r} is {first.get(name, 'missing')} on rank 0 and "
                    f"{other.get(name, 'missing')} on rank {rank}"
                )
        if list(first) != list(other):
            name = next(ours for ours, theirs in zip(first, other, strict=True) if ours != theirs)
            raise OptionError(
                f"the replicas of rank 0 and rank {rank} have the same tensors in another order, from "
                f"{name!r} on: submodules must be registered in the same order on every rank"
            )


def check_apart(models: Sequence[nn.Module]) -> None:
    """Check that no two models of this process share a tensor, or memory.

    Raises:
        OptionError: Two do; the message names the tensor and both.
    """
    owners: dict[tuple[torch.device, int], int] = {}
    for rank, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Not only the object: `load_state_dict(..., assign=True)` leaves two models with one memory.
            address = tensor.data_ptr() if tensor.layout is torch.strided else 0
            first = owners.setdefault((tensor.device, address or id(tensor)), rank)
            if first != rank:
                raise OptionError(
                    f"{name!r} is the same tensor in models {first} and {rank}: each rank needs a model of "
                    "its own, such as copy.deepcopy(model)"
                )
