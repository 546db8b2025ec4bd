"""Identity of a dataset and its order, by which the machines of a run find that they opened the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowdp.device.trees import flatten
from flowdp.errors import OptionError

__all__ = ["Identity", "check_identities", "content_checksum"]


class Identity(NamedTuple):
    """Properties of a source that machines compare.

    Attributes:
        samples: Samples of an epoch; None where unknown.
        batches: Batches of an epoch; None where unknown.
        batch_size: Samples of a batch; None where they differ.
        tensors: Shapes and dtypes of a dataset of tensors; "" of any other.
        order: Checksum of the order of the first epoch; None of an IterableDataset.
        first: Checksum of the first item of an IterableDataset; None of any other.
        part: The same of one that yields a part on each machine, where they differ; else None.
    """

    samples: int | None
    batches: int | None
    batch_size: int | None
    tensors: str = ""
    order: int | None = None
    first: int | None = None
    part: int | None = None


_WHOLE = (
    "give every machine the whole dataset, as flowdp deals it to the devices of all of them, the same "
    "batch_size and seed, and a sampler whose draws depend on its seed or the epoch alone"
)
_STREAM = (
    "an IterableDataset must be the same on every machine, which flowdp gives every n-th batch of it: it may "
    "neither split itself by rank (torch.distributed, RANK) nor draw random numbers without a seed; for "
    "training, MachineOptions(stream='part') says that it splits itself"
)


def check_identities(identities: Sequence[Identity], names: Sequence[str], dataset: str = "dataset") -> None:
    """Check that all machines have opened the same dataset in the same order.

    The contents of a map-style dataset are not compared.

    Args:
        identities: `Source.identity` of each machine. Shape (machines,).
        names: Their names for people. Shape (machines,).
        dataset: Name of the dataset in the error.

    Raises:
        OptionError: They differ.
    """
    first = identities[0]
    for name, other in zip(names[1:], identities[1:], strict=True):
        for field, mine, theirs in zip(Identity._fields, first, other, strict=True):
            if mine != theirs and field != "part":
                raise OptionError(
                    f"the machines of this run have opened the {dataset} differently: {field}: {mine} on "
                    f"{names[0]}, {theirs} on {name}; {_STREAM if field == 'first' else _WHOLE}"
                )
    owner: dict[int, str] = {}
    for identity, name in zip(identities, names, strict=True):
        if identity.part is not None and owner.setdefault(identity.part, name) != name:
            raise OptionError(
                f"the {dataset} yields the same first item on {owner[identity.part]} and {name}, and "
                "MachineOptions(stream='part') says that it splits itself by machine: split it by "
                "torch.distributed.get_rank(), or leave stream out, so that flowdp splits it"
            )


def content_checksum(item: Any, checksum: int = 0, most: int | None = None) -> int:
    """Checksum of an item: of its tensors, arrays, numbers and texts; of other objects their types alone.

    Args:
        item: A tree of them.
        checksum: Checksum of the items before it.
        most: Numbers of a tensor that count; None: all.
    """
    leaves, _ = flatten(item)
    for leaf in leaves:
        checksum = zlib.crc32(_bytes(leaf, most), checksum)
    return checksum


def _bytes(leaf: object, most: int | None) -> bytes:
    if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested:
        leaf = leaf.detach().flatten()[:most].cpu().contiguous().view(torch.uint8).numpy()
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.ravel()[:most].tobytes()
    if isinstance(leaf, bytes):
        return leaf
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | np.generic):
        return repr(leaf).encode()
    return type(leaf).__qualname__.encode()
