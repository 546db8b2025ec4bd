"""Reports that machines send along with their gradients, so that those which no longer do the same fail."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch.optim import Optimizer

from flowdp.data.trees import tensors_of

__all__ = ["MachineReport", "batch_checksum", "difference_of", "message_of", "rate_of", "reports_in"]

SAMPLED = 4_096
"""Bytes of each tensor of a batch that are compared with other machines' batches."""


@dataclass(slots=True)
class MachineReport:
    """State of a machine at a sum of gradients; numbers that float64 holds exactly.

    Attributes:
        ended: 1: its epoch has ended, and it brings no gradients.
        layout: Checksum of the names and forms of the gradients.
        steps: Steps of its first optimizer.
        rate: Learning rate; 0: it is not known.
        batch: Checksum of the first batch; 0: none.
        samples: Weight of its gradients.
    """

    ended: float = 0
    layout: float = 0
    steps: float = 0
    rate: float = 0
    batch: float = 0
    samples: float = 0


WIDTH = len(fields(MachineReport))

DIFFERENCES = {
    "ended": "the epoch has ended on some machines (1), while others still train (0); give each machine as "
    "many batches, by a DistributedSampler, and drop_last=True",
    "steps": "they have taken different numbers of optimizer steps; each must step after the same backwards",
    "layout": "their gradients are of different parameters (a checksum); freeze and thaw the same on each",
    "rate": "the learning rates differ; a schedule must not depend on a value of one machine alone",
}


def message_of(report: MachineReport, index: int, count: int, flags: Sequence[bool]) -> torch.Tensor:
    """Message of a machine; the sum of all machines' has every report, and how many have each flag.

    Args:
        report: Its own.
        index: Number of this machine.
        count: Number of machines.
        flags: What each machine says of the same things.

    Returns:
        Shape (count * numbers of a report + flags,).
    """
    numbers = [0.0] * (count * WIDTH)
    numbers[index * WIDTH : (index + 1) * WIDTH] = astuple(report)
    return torch.tensor([*numbers, *flags], dtype=torch.float64)


def reports_in(message: torch.Tensor, count: int) -> tuple[list[MachineReport], list[bool]]:
    """The reports in a sum of messages, and whether any machine has set each flag."""
    numbers = message.tolist()
    reports = [MachineReport(*numbers[k * WIDTH : (k + 1) * WIDTH]) for k in range(count)]
    return reports, [number > 0 for number in numbers[count * WIDTH :]]


def difference_of(reports: Sequence[MachineReport], names: Sequence[str]) -> str:
    """The first thing that is wrong between machines, in words; "" where all do the same on other samples.

    Args:
        reports: Those of all machines.
        names: Names of the machines.
    """
    for field, text in DIFFERENCES.items():
        values = [getattr(report, field) for report in reports]
        if len(set(values)) > 1:
            of_each = ", ".join(f"{value:.12g} on {name}" for value, name in zip(values, names, strict=True))
            return f"the machines do not do the same: {text}: {of_each}"
    if reports[0].batch and all(report.batch == reports[0].batch for report in reports):
        return (
            "every machine has begun with the same batch, so all would train the same samples: give each "
            "its own, by a torch.utils.data.DistributedSampler, or a shard of the data; if it is meant, "
            "call the model in a loop over the loader"
        )
    return ""


def rate_of(optimizer: Optimizer | None) -> float:
    """The learning rate of an optimizer's first group; 0: it is not known."""
    rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
    return rate if isinstance(rate, (int, float)) else 0.0  # for a tensor the host would wait for a device


def batch_checksum(batch: Any) -> int:
    """A checksum of the beginning of each tensor of a batch; 0: there is none."""
    found = 0
    for leaf in tensors_of(batch):
        if leaf.layout is not torch.strided or leaf.is_quantized:
            continue
        values = leaf.detach().resolve_conj().resolve_neg().reshape(-1)[: SAMPLED // leaf.element_size()]
        found = zlib.crc32(bytes(values.cpu().contiguous().view(torch.uint8).tolist()), found)
    return found
