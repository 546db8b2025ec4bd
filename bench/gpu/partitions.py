"""Parts of a card: green contexts, whose streams have some of its multiprocessors for themselves.

The driver splits the multiprocessors into two parts without a common one, and makes streams for each (CUDA
12.5 or later); work that torch puts on such a stream runs on its part, whatever context is current. Torch's
own `GreenContext` is the second choice: each is made from the whole card, so two may share multiprocessors,
and only newer versions hand out streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from flowdp.device.streams import Lane, StreamLane

__all__ = ["SPLITS", "Driver", "Partition", "PartitionedModule", "by_driver", "by_torch", "lanes_on"]

SM_RESOURCE, DEFAULT_STREAM, NON_BLOCKING = 1, 1, 1
RESOURCE_BYTES = 512
"""More than a `CUdevResource` has in any version."""

COUNT_OFFSET = 96
"""Where the number of multiprocessors stands in it: behind its type and padding."""

Resource = ctypes.Array[ctypes.c_uint8]


class Partition(Protocol):
    """Part of a card.

    Attributes:
        multiprocessors: How many it has.
    """

    multiprocessors: int

    def stream(self, priority: int) -> Any:
        """A stream whose work runs on this part."""
        ...


class Driver:
    """The calls of libcuda that make green contexts.

    Args:
        library: Replacement of the library, in tests.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            RuntimeError: This driver does not have it, or it failed.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise RuntimeError(f"this driver has no {name}") from None
        if status := function(*arguments):
            raise RuntimeError(f"{name} failed with error {status} of the driver")

    def split(self, index: int, multiprocessors: int) -> tuple[int, Resource, Resource]:
        """Handle of a device, a part of it with so many multiprocessors or a few more, and the rest."""
        device, groups = ctypes.c_int(), ctypes.c_uint(1)
        whole, part, rest = ((ctypes.c_uint8 * RESOURCE_BYTES)() for _ in range(3))
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDeviceGetDevResource", device, ctypes.byref(whole), SM_RESOURCE)
        self.call(
            "cuDevSmResourceSplitByCount",
            *(ctypes.byref(part), ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(rest)),
            *(ctypes.c_uint(0), ctypes.c_uint(multiprocessors)),
        )
        if groups.value != 1 or not count_of(rest):
            raise RuntimeError(f"{count_of(whole)} multiprocessors have no part of {multiprocessors}")
        return device.value, part, rest

    def context(self, device: int, resource: Resource) -> ctypes.c_void_p:
        """A green context; it lives as long as the process."""
        description, context = ctypes.c_void_p(), ctypes.c_void_p()
        self.call(
            "cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(resource), ctypes.c_uint(1)
        )
        self.call(
            "cuGreenCtxCreate", ctypes.byref(context), description, device, ctypes.c_uint(DEFAULT_STREAM)
        )
        return context

    def stream(self, context: ctypes.c_void_p, priority: int) -> int:
        """A stream of a green context."""
        stream = ctypes.c_void_p()
        self.call(
            "cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(NON_BLOCKING), priority
        )
        return stream.value or 0


def count_of(resource: Resource) -> int:
    """Number of multiprocessors of a resource."""
    return ctypes.c_uint.from_buffer(resource, COUNT_OFFSET).value


class DriverPartition:
    """A green context of the driver."""

    def __init__(self, driver: Driver, index: int, device: int, resource: Resource) -> None:
        self._driver, self._index = driver, index
        self._context = driver.context(device, resource)
        self.multiprocessors = count_of(resource)

    def stream(self, priority: int) -> Any:
        """See `Partition.stream`."""
        return torch.cuda.ExternalStream(self._driver.stream(self._context, priority), device=self._index)


class TorchPartition:
    """A green context of torch."""

    def __init__(self, index: int, multiprocessors: int) -> None:
        from torch.cuda.green_contexts import GreenContext  # not in the oldest torch

        self._context: Any = GreenContext.create(num_sms=multiprocessors, device_id=index)
        self.multiprocessors = multiprocessors
        if not hasattr(self._context, "Stream"):
            raise RuntimeError("a green context of this torch has no stream")

    def stream(self, _priority: int) -> Any:
        """See `Partition.stream`; torch chooses the priority."""
        return self._context.Stream()


def by_driver(device: torch.device, counts: Sequence[int], library: Any = None) -> list[Partition]:
    """A part with the first count of multiprocessors, and the rest of the card."""
    driver, index = Driver(library), device.index or 0
    handle, part, rest = driver.split(index, counts[0])
    return [DriverPartition(driver, index, handle, resource) for resource in (part, rest)]


def by_torch(device: torch.device, counts: Sequence[int]) -> list[Partition]:
    """Parts with these counts of multiprocessors, which may have some in common."""
    return [TorchPartition(device.index or 0, count) for count in counts]


SPLITS: dict[str, Callable[[torch.device, Sequence[int]], list[Partition]]] = {
    "green contexts of the driver": by_driver,
    "green contexts of torch, which may overlap": by_torch,
}
"""Ways to split a card, the best one first."""


class PartitionedModule:
    """`torch.cuda` whose new streams belong to a part of the card.

    Args:
        partition: The part.
        module: What everything else is taken from.

    Attributes:
        partition: The part.
    """

    def __init__(self, partition: Partition, module: Any = torch.cuda) -> None:
        self.partition, self._module = partition, module

    def Stream(self, *, priority: int = 0, **_device: Any) -> Any:
        """A stream of the part."""
        return self.partition.stream(priority)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def lanes_on(device: torch.device, partitions: Sequence[Partition], module: Any = torch.cuda) -> list[Lane]:
    """A lane per part of a device: all its streams, those for copies and means, too, are of that part."""
    return [StreamLane(device, PartitionedModule(partition, module)) for partition in partitions]
