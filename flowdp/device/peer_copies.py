"""Check by value that memory which is copied between two devices arrives there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from torch import Tensor

from flowdp.device.streams import QUIET
from flowdp.errors import OptionError

__all__ = ["check_copies"]

NUMBERS = 1 << 18
"""Numbers that are copied: 1 MiB, more than one packet of any link."""


def copy_across(numbers: Tensor, one: torch.device, other: torch.device) -> Tensor:
    """Copy numbers from the host to a device, from there to another one, and back to the host."""
    return numbers.to(one).to(other).cpu()


def check_copies(
    devices: Sequence[torch.device],
    copy: Callable[[Tensor, torch.device, torch.device], Tensor] = copy_across,
) -> None:
    """Check the copies between each two of these devices, in both directions; once per process.

    Where the driver promises peer access that the machine does not have (an IOMMU, or PCIe's access control,
    turns it away), copies between cards end elsewhere, without an error. Replicas would begin unequal, and
    means be wrong.

    Args:
        devices: Of the ranks. Those of the CPU are left out.
        copy: See `copy_across`; replaced in tests.

    Raises:
        OptionError: A copy arrived wrong.
    """
    cards = dict.fromkeys(device for device in devices if device.type != "cpu")
    with _checking:
        for one, other in permutations(cards, 2):
            if (one, other) in _fine:
                continue
            numbers = torch.arange(len(_fine), len(_fine) + NUMBERS, dtype=torch.int32, device="cpu")
            with QUIET:
                wrong = int((copy(numbers, one, other) != numbers).sum())
            if wrong:
                raise OptionError(
                    f"devices: of {NUMBERS:,} numbers copied from {one} to {other}, {wrong:,} arrive wrong: "
                    "the boards do not reach each other's memory as the driver claims. Switch the IOMMU (or "
                    "PCIe's ACS) off, or peer access in the driver; or train on one of them"
                )
            _fine.add((one, other))


_fine: set[tuple[torch.device, torch.device]] = set()
_checking = threading.Lock()
