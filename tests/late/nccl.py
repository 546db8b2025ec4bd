"""NCCL of an emulated machine: `LateNccl` stands for `cupy.cuda.nccl`.

The calls of a group are one kernel on each rank's stream. It reads the rank's rows as soon as the stream has
come to it, and they are written when the streams of all ranks have. It works on the addresses that it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tests.late.device import LateCuda, LateStream

__all__ = ["LateNccl"]


class NcclError(RuntimeError):
    """An error of NCCL, by the name that cupy gives it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's part of a collective.

    Attributes:
        rank: The rank.
        memory: Its rows.
        stream: Its stream.
        kind: Name of the collective and of its operation: all ranks' are equal.
    """

    rank: int
    memory: Tensor
    stream: LateStream
    kind: tuple[str, int]


class LateNccl:
    """Stands for `cupy.cuda.nccl`, with communicators of one process.

    Args:
        cuda: The machine.

    Attributes:
        launches: Number of groups that summed or sent.
    """

    available = True
    NCCL_SUM, NCCL_MAX = 0, 2
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT32, NCCL_FLOAT64 = 0, 1, 2, 4, 7, 8
    NCCL_FLOAT16, NCCL_BFLOAT16 = 6, 9
    NcclError = NcclError

    def __init__(self, cuda: LateCuda) -> None:
        self.cuda = cuda
        self.launches = 0
        self._calls: list[Call] | None = None
        nccl = self

        class NcclCommunicator:
            """Communicator of a rank."""

            def __init__(self, size: int, name: bytes, rank: int) -> None:
                self.size, self.rank = size, rank
                self.is_open = True

            def allReduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
                self._put("allReduce", recv, count, dtype, op, stream)

            def reduceScatter(
                self, send: int, recv: int, count: int, dtype: int, op: int, stream: int
            ) -> None:
                assert recv == send + self._offset(count, dtype), "not in place"
                self._put("reduceScatter", send, self.size * count, dtype, op, stream)

            def allGather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
                assert send == recv + self._offset(count, dtype), "not in place"
                self._put("allGather", recv, self.size * count, dtype, nccl.NCCL_SUM, stream)

            def reduce(
                self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int
            ) -> None:
                self._put("reduce", recv, count, dtype, op, stream)

            def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
                self._put("broadcast", recv, count, dtype, nccl.NCCL_SUM, stream)

            def _put(self, kind: str, address: int, count: int, dtype: int, op: int, stream: int) -> None:
                assert nccl._calls is not None, "one thread would wait for all others"
                if not self.is_open:
                    raise NcclError("invalid argument")
                with nccl.cuda.lock:
                    memory = nccl.cuda.memory.at(address, count, DTYPES[dtype])
                nccl._calls.append(Call(self.rank, memory, nccl.cuda.stream_of(stream), (kind, op)))

            def _offset(self, count: int, dtype: int) -> int:
                return self.rank * count * DTYPES[dtype].itemsize

            def abort(self) -> None:
                self.is_open = False

            def destroy(self) -> None:
                self.is_open = False

        self.NcclCommunicator = NcclCommunicator

    def get_version(self) -> int:
        return 22809

    def get_unique_id(self) -> bytes:
        return b"n" * 128

    def groupStart(self) -> None:
        assert self._calls is None
        self._calls = []

    def groupEnd(self) -> None:
        calls, self._calls = self._calls, None
        assert calls is not None
        if calls:
            self.launches += 1
            with self.cuda.lock:
                self._launch(calls)

    def _launch(self, calls: Sequence[Call]) -> None:
        by_rank: dict[int, list[Call]] = {}
        for call in calls:
            by_rank.setdefault(call.rank, []).append(call)
        streams = [parts[0].stream for parts in by_rank.values()]
        sums = [Sum(parts) for parts in zip(*by_rank.values(), strict=True)]
        ends = [self.cuda.memory.hold(call.memory) for call in calls]
        first, *others = streams
        for place, (stream, parts) in enumerate(zip(streams, by_rank.values(), strict=True)):
            uses = [(memory, stream) for call in parts if (memory := self.cuda.memory.of(call.memory))]
            self.cuda.enqueue(stream, partial(_read, sums, place), "a kernel of NCCL", uses)
        for stream in others:
            self.cuda.wait(first, self.cuda.mark(stream))

        def write() -> None:
            while sums:
                sums.pop().write()
            for end in ends:
                end()

        self.cuda.enqueue(first, write, "a kernel of NCCL", [])
        for stream in others:
            self.cuda.wait(stream, self.cuda.mark(first))


class Sum:
    """One collective of a group.

    Args:
        calls: The ranks' parts, in order.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        ((self._name, self._op),) = {call.kind for call in calls}
        self._rows = [call.memory for call in calls]
        self._read: list[Tensor | None] = [None] * len(calls)

    def read(self, rank: int) -> None:
        """Read the rows of a rank."""
        self._read[rank] = self._rows[rank].clone()

    def write(self) -> None:
        """Write the result of all."""
        read = [rows for rows in self._read if rows is not None]
        if self._name == "allGather":
            spans = [rows.chunk(len(read))[rank] for rank, rows in enumerate(read)]
            for rows in self._rows:
                rows.copy_(torch.cat(spans))
            return
        total, *rest = read
        if total.dtype.itemsize < 4 and total.is_floating_point():
            total = total.float()
        for rows in rest if self._name != "broadcast" else ():
            if self._op == LateNccl.NCCL_SUM:
                total += rows
            else:
                torch.maximum(total, rows, out=total)
        if self._name == "reduceScatter":
            for rank, (rows, span) in enumerate(zip(self._rows, total.chunk(len(read)), strict=True)):
                rows.fill_(torch.nan)  # nothing may depend on what else is there
                rows.chunk(len(read))[rank].copy_(span)
            return
        for rows in self._rows[:1] if self._name == "reduce" else self._rows:
            rows.copy_(total)


def _read(sums: Sequence[Sum], rank: int) -> None:
    for each in sums:
        each.read(rank)


DTYPES = {
    LateNccl.NCCL_INT8: torch.int8,
    LateNccl.NCCL_UINT8: torch.uint8,
    LateNccl.NCCL_INT32: torch.int32,
    LateNccl.NCCL_INT64: torch.int64,
    LateNccl.NCCL_FLOAT16: torch.float16,
    LateNccl.NCCL_FLOAT32: torch.float32,
    LateNccl.NCCL_FLOAT64: torch.float64,
    LateNccl.NCCL_BFLOAT16: torch.bfloat16,
}
"""Torch's types of NCCL's numbers."""
