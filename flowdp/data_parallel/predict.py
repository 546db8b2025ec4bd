"""The outputs of a module for a whole dataset, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flowdp.data_parallel.cut import Arguments
from flowdp.data_parallel.join import join
from flowdp.data_parallel.layout import Callee, Layout, WeightFunction
from flowdp.data_parallel.loss_context import Inputs
from flowdp.device.trees import cut, tree_map
from flowdp.errors import DataError
from flowdp.validators import check_int

__all__ = ["batches_of", "predict"]

HOST = torch.device("cpu")


def batches_of(data: Any, batch_size: int | None, dim: int = 0) -> Iterable[Any]:
    """The batches of a loader, a dataset, a tensor or an array.

    Args:
        data: A loader or another iterable of batches; or a dataset, tensor or array to cut into batches.
        batch_size: Samples of a batch, for a dataset, tensor or array. None: a tensor or array is one batch,
            and a sample of a dataset.
        dim: Batch dimension of a tensor or array.

    Raises:
        OptionError: The batch size is wrong.
    """
    check_int("batch_size", batch_size, optional=True)
    if isinstance(data, Tensor | np.ndarray):
        samples = data.shape[dim]
        size = batch_size or samples
        return [cut(data, at, min(size, samples - at), dim) for at in range(0, samples, size)]
    if isinstance(data, Dataset) and hasattr(data, "__getitem__"):
        return DataLoader(data, batch_size or 1)
    batches: Iterable[Any] = data
    return batches


@torch.no_grad()
def predict(
    call: Callable[..., Any], batches: Iterable[Any], inputs: Inputs, layout: Layout, callee: Callee
) -> Any:
    """The outputs for all batches, joined in their order, on the CPU.

    Raises:
        DataError: There is no batch, or one without samples.
        FlowdpError: The outputs cannot be put together.
    """
    outputs: list[Any] = []
    samples: list[int] = []
    weights: list[Mapping[WeightFunction, Tensor]] = []
    for batch in batches:
        args, kwargs = inputs.of(batch)
        arguments = Arguments(layout, callee, args, kwargs)
        if not arguments.samples:
            raise DataError(f"a batch has no samples ({arguments.described()})")
        whole = arguments.whole()
        samples.append(whole.samples)
        weights.append(whole.weights)
        outputs.append(tree_map(_on_host, call(*args, **kwargs)))
    if not outputs:
        raise DataError("there is no batch to predict from")
    return join(outputs, samples, layout, arguments.dim, weights)


def _on_host(leaf: Any) -> Any:
    return leaf.detach().to(HOST) if isinstance(leaf, Tensor) else leaf
