"""Check of the loss under policy="exact": a mean over samples, or over the weight that it names.

The parts of a window count by their samples, or by the weight that the loss names. A loss that is a mean over
tokens or class weights, or a sum, and does not say so, trains something else than one big batch does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.device.compiled import Uncompiled, uses_compile
from flowdp.device.trees import tree_map
from flowdp.modules.comparison import ConstantDraws, is_close, still
from flowdp.policy.formats import format_error
from flowdp.replica.loss import Loss, unpack_loss
from flowdp.replica.model_copy import copy_module

__all__ = ["check_mean"]


@torch.no_grad()
def check_mean(
    module: nn.Module, loss: Loss, rows: Callable[[int, int], Any], samples: int, device: torch.device
) -> str:
    """Compare the loss of a micro-batch with those of its parts.

    Each is computed with a copy of the module, without draws, with the statistics that batch norms have.

    Args:
        module: A replica.
        loss: Function of (model, batch), as the user's.
        rows: The batch of samples [start, stop).
        samples: How many there are, at least two.
        device: The replica's.

    Returns:
        Why it cannot be compared; empty where it can.

    Raises:
        ValueError: The parts, weighted, do not give the loss of the whole.

    Threads:
        The rank's. Other threads may draw random numbers meanwhile, so torch's, numpy's and Python's
        generators are not put back.
    """
    draws = ConstantDraws()
    as_written = Uncompiled() if uses_compile(module, loss) else nullcontext()

    def of(start: int, stop: int, call: Loss = loss) -> tuple[Tensor, Tensor] | None:
        twin = copy_module(module, device)
        still(twin)
        given = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, rows(start, stop))
        with as_written, draws:
            found = _unpacked(call(twin, given), stop - start)
        twin.to("meta")  # a cycle in it would hold its memory for a while
        return found

    def is_same(value: Tensor, other: Tensor) -> bool:
        return is_close(value, other, draws.rounding(device))

    bounds = sorted({0, samples // 2, samples // 2 + samples // 3, samples})  # unlike parts: few coincidences
    try:
        whole = of(0, samples)
    except Exception as error:  # the step itself raises it, or it needs a graph
        return format_error(error)
    parts = [of(start, stop) for start, stop in pairwise(bounds)]
    known = [part for part in parts if part is not None]
    if whole is None or len(known) < len(parts):  # the step says what is wrong with it
        return ""
    counted = [(value, weight) for value, weight in known if weight > 0]
    if not counted:
        return ""
    total = torch.stack([weight for _, weight in counted]).sum()
    mean = torch.stack([value * (weight / total) for value, weight in counted]).sum().to(whole[0].dtype)
    if is_same(whole[0], mean):
        return ""
    again = of(0, samples)
    if again is None or not is_same(whole[0], again[0]):
        return "it differs from call to call"
    nudged = of(0, samples, partial(_nudged, loss))
    if nudged is not None and bool((whole[0] - mean).abs() <= 4 * (whole[0] - nudged[0]).abs()):
        return ""  # a small difference of large numbers, as a loss is at the end of a run
    of_parts = ", ".join(f"{float(value):.6g}" for value, _ in known)
    sizes = ", ".join(str(stop - start) for start, stop in pairwise(bounds))
    raise ValueError(
        f"under policy='exact' a loss counts by its samples, and that of {samples} samples "
        f"({float(whole[0]):.6g}) is not the mean of those of {sizes} of them ({of_parts}): divide a sum by "
        "the samples of its batch; if it is a mean over something else, tokens or class weights, name that: "
        "return {'loss': loss, 'weight': (labels != -100).sum()}; if it looks across the batch, as a "
        "contrastive loss does, no parts of a window give that of the whole. "
        "(FailureOptions(check_loss=False) leaves this out.)"
    )


def _nudged(loss: Loss, module: nn.Module, batch: Any) -> Any:
    """The loss with parameters that are off by some roundings."""
    for parameter in filter(Tensor.is_floating_point, module.parameters()):
        signs = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape) % 2 * 2 - 1
        parameter.mul_(1 + 8 * torch.finfo(parameter.dtype).eps * signs.to(parameter.dtype))
    return loss(module, batch)


def _unpacked(result: Any, samples: int) -> tuple[Tensor, Tensor] | None:
    """The loss and its weight, both of shape []; None where the loss is no number."""
    try:
        loss, named, _ = unpack_loss(result)
    except TypeError:
        return None
    weight = torch.as_tensor(samples if named is None else named, dtype=torch.float64, device=loss.device)
    return (loss.reshape(()), weight.reshape(())) if loss.numel() == weight.numel() == 1 else None
