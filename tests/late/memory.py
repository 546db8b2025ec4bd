"""Memory of emulated devices: its owner, its uses on other streams, and use behind its release.

Torch's allocator gives freed memory to the next allocation of the same stream at once, and knows nothing of
other streams that may still use it. Before the stream allocates again, it or the host must have waited for
them, or `record_stream` must have named them. A breach is a hazard, and the memory is overwritten behind the
work on its stream, as its next user would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.late.device import LateStream

__all__ = ["Memory", "MemoryTable", "poison"]

PURGE_EACH = 512
"""Allocations between two looks for memory that is gone."""


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with NaN, or zeros where its type has none: an index of 0 is in any range."""
    if tensor.numel():
        tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)


class Memory:
    """A storage of a device, which belongs to a stream.

    Attributes:
        stream: Its owner.
        name: Operation and shape that it was made for.
        held: References of queued operations.
        uses: Last use on each other stream: number and name of the operation.
        recorded: Streams that the allocator was told of.
    """

    __slots__ = ("_storage", "held", "name", "recorded", "stream", "uses")

    def __init__(self, tensor: Tensor, stream: LateStream, name: str) -> None:
        # Kept until a purge, so that no other storage gets its address; and Python's object of it counts as
        # one reference then, which depends on the version of torch else.
        self._storage = tensor.untyped_storage()
        self.stream = stream
        self.name = f"{name} {tuple(tensor.shape)}"
        self.held = 0
        self.uses: dict[LateStream, tuple[int, str]] = {}
        self.recorded: set[LateStream] = set()

    @property
    def key(self) -> int:
        """Address of torch's record of the storage."""
        return int(self._storage._cdata)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._storage.nbytes()

    @property
    def is_freed(self) -> bool:
        """Whether nothing refers to it but queued operations, of which torch's allocator knows nothing."""
        return self._references <= self.held

    @property
    def is_gone(self) -> bool:
        """Whether nothing refers to it, not even a queued operation."""
        return self._references <= 0

    @property
    def _references(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata)) - 1  # this object

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._storage.data_ptr()

    def elements(self, start: int = 0, count: int | None = None, dtype: torch.dtype = torch.uint8) -> Tensor:
        """So many elements from a byte on; all of it as bytes."""
        made = torch.empty(0, dtype=dtype)
        shape = (self.nbytes if count is None else count,)
        return made.set_(self._storage, start // dtype.itemsize, shape, (1,))


class MemoryTable:
    """All memory of the devices, and pinned memory of the host. The machine's lock guards it.

    Attributes:
        hazards: Descriptions of memory that was freed while a stream may still have used it.
    """

    def __init__(self) -> None:
        self.hazards: list[str] = []
        self._all: dict[int, Memory] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._reads: dict[int, int] = {}  # queued operations on pinned memory
        self._at_risk: dict[int, Memory] = {}
        self._news = 0

    def own(self, tensor: Tensor, stream: LateStream, name: str) -> None:
        """Let a stream own the memory of a new tensor."""
        memory = Memory(tensor, stream, name)
        self._all[memory.key] = memory
        self._news += 1
        if self._news % PURGE_EACH == 0:
            self.purge()

    def of(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor of a device; None for one of the host."""
        if tensor.layout is not torch.strided:
            return None
        try:
            return self._all.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # without storage, as a tensor of a functional transform
            return None

    def at(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements of a device's memory, from an address on."""
        for memory in self._all.values():
            start = address - memory.address
            if 0 <= start < memory.nbytes and not memory.is_gone:
                return memory.elements(start, count, dtype)
        raise ValueError("there is no memory at this address")

    def allocated(self, device: torch.device) -> int:
        """Bytes of a device that are in use."""
        self.purge()
        return sum(memory.nbytes for memory in self._all.values() if memory.stream.device == device)

    def purge(self) -> None:
        """Forget memory that is gone."""
        self._all = {key: memory for key, memory in self._all.items() if not memory.is_gone}
        self._pinned = {
            key: storage for key, storage in self._pinned.items() if torch._C._storage_Use_Count(key) > 1
        }

    # ------------------------------------------------------------ pinned memory
    def pin(self, tensor: Tensor) -> None:
        """Take memory of the host for pinned from now on."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether memory of the host is pinned."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._pinned

    def is_busy(self, pinned: Tensor) -> bool:
        """Whether a queued operation uses pinned memory."""
        return self._reads.get(pinned.untyped_storage()._cdata, 0) > 0

    # ------------------------------------------------------------ uses
    def hold(self, tensor: Tensor) -> Callable[[], None]:
        """Count a reference of a queued operation; returns a function that ends it."""
        memory = self.of(tensor)
        if memory is not None:
            memory.held += 1
            return memory_released(memory)
        if not self.is_pinned(tensor):
            return _nothing
        key = tensor.untyped_storage()._cdata
        self._reads[key] = self._reads.get(key, 0) + 1
        return lambda: self._reads.update({key: self._reads[key] - 1})

    def use(self, memory: Memory, stream: LateStream, name: str) -> None:
        """Note a use by the newest operation of a stream."""
        if stream is not memory.stream and stream not in memory.recorded:
            memory.uses[stream] = stream.time, name
            self._at_risk[memory.key] = memory

    def record(self, memory: Memory, stream: LateStream) -> None:
        """Tell the allocator of a use by a stream; see `torch.Tensor.record_stream`."""
        memory.recorded.add(stream)
        memory.uses.pop(stream, None)

    def allocate(
        self, stream: LateStream, is_over: Callable[[LateStream, LateStream, int], bool]
    ) -> list[Memory]:
        """Find memory that an allocation of a stream may be given, though others still use it.

        Args:
            stream: The stream.
            is_over: Whether a stream, or the host, has waited for an operation of another: owner, user and
                number of the operation.

        Returns:
            Memory found anew.
        """
        found = []
        for key, memory in list(self._at_risk.items()):
            for user, (time, _) in list(memory.uses.items()):
                if is_over(memory.stream, user, time):
                    del memory.uses[user]
            if memory.uses and memory.stream is stream and memory.is_freed:
                for user, (_, name) in memory.uses.items():
                    self.hazards.append(
                        f"{memory.name}, of {memory.stream}, was freed and may be allocated again, while "
                        f"{name} on {user} uses it"
                    )
                found.append(memory)
                memory.uses.clear()
            if not memory.uses:
                del self._at_risk[key]
        return found


def memory_released(memory: Memory) -> Callable[[], None]:
    """A function that ends a reference of a queued operation."""

    def release() -> None:
        memory.held -= 1

    return release


def _nothing() -> None: ...
