"""Checks that the models of several ranks are replicas: one structure, separate memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from flowdp.device.structure import check_same
from flowdp.errors import OptionError

__all__ = ["check_same_structure", "check_separate_memory"]


def check_same_structure(structures: Sequence[Mapping[str, str]]) -> None:
    """Check that the models of all ranks have the same structure.

    Raises:
        OptionError: They differ; the message names the first tensor that differs, the rank and both forms.
    """
    for rank, other in enumerate(structures):
        check_same(other, structures[0], f"on rank {rank}", "on rank 0", "all ranks need the same model")


def check_separate_memory(models: Sequence[nn.Module]) -> None:
    """Check that no two models share a tensor or its memory.

    Raises:
        OptionError: Two models share one; the message names the tensor and both models.
    """
    owners: dict[tuple[torch.device, int], int] = {}
    for rank, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # By address: after `load_state_dict(..., assign=True)` two tensors have one memory.
            address = tensor.data_ptr() if tensor.layout is torch.strided else 0
            first = owners.setdefault((tensor.device, address or id(tensor)), rank)
            if first != rank:
                raise OptionError(
                    f"{name!r} is the same tensor in models {first} and {rank}: each rank needs a model of "
                    "its own, such as copy.deepcopy(model)"
                )
