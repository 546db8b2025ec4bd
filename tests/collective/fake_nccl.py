"""NCCL without a GPU: cupy's names, on CPU tensors.

A group really sums when it ends, on the raw addresses, and records each rank's part on the rank's stream.
Calls that would hang or be undefined raise: a rank missing in a group, calls of one group from two threads, a
call outside a group, and any torch operation between the start and the end of a group (it might allocate).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flowdp.device.dispatch import RankMode
from flowdp.device.streams import QUIET, Lane
from tests.fakes import FakeCuda
from tests.limits import HANG_S

DTYPES = {
    0: np.int8,
    1: np.uint8,
    2: np.int32,
    4: np.int64,
    6: np.float16,
    7: np.float32,
    8: np.float64,
    9: np.int16,  # bfloat16, for which numpy has no type
}


class NcclError(RuntimeError):
    """Like cupy's."""


class _NoTorch(RankMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} between groupStart and groupEnd")


class _Group:
    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.made: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []
        self.guard = _NoTorch()


class FakeNccl:
    """Stands for `cupy.cuda.nccl`.

    Attributes:
        groups: For each summing or sending group, whether `QUIET` was held, and the counts of rank 0's calls.
        kinds: Kinds of the same groups.
        aborted: Ranks whose communicators were aborted.
        destroyed: Ranks whose communicators were destroyed.
        abused: Forbidden calls: an abort while a thread is inside NCCL, a second abort, a sum after an abort.
        hangs: None, or the kind of group ("make" or "sum") that ends only by `wake`, which an abort sets.
        fails: Whether the hung call then fails.
        hanging: Set when a group hangs.
        deaf: Whether an abort has no effect, only `wake`.
        lost: Kinds of calls whose results do not arrive.
        broken: Whether the last rank's numbers do not reach the others.
    """

    available = True
    NCCL_SUM, NCCL_MAX = 0, 2
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT32, NCCL_FLOAT64 = 0, 1, 2, 4, 7, 8
    NCCL_FLOAT16, NCCL_BFLOAT16 = 6, 9
    NcclError = NcclError

    def __init__(self, cuda: FakeCuda, lanes: Sequence[Lane]) -> None:
        self.groups: list[tuple[bool, list[int]]] = []
        self.kinds: list[str] = []
        self.aborted: list[int] = []
        self.destroyed: list[int] = []
        self.abused: list[str] = []
        self.hangs: str | None = None
        self.fails = True
        self.deaf = False
        self.broken = False
        self.lost: set[str] = set()
        self.hanging = threading.Event()
        self.wake = threading.Event()
        self._cuda = cuda
        self._streams: dict[int, Any] = {getattr(lane.comm, "cuda_stream", 0): lane.comm for lane in lanes}
        self._group: _Group | None = None
        self._is_inside = False
        fake = self

        class NcclCommunicator:
            def __init__(self, ndev: int, name: bytes, rank: int) -> None:
                assert len(name) == 128
                self.ndev, self.rank, self.is_open = ndev, rank, True
                assert fake._group is not None, "one thread would wait for all others"
                fake._group.made.append(self)

            def allReduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
                self._put(send, recv, count, dtype, op, stream, "allReduce")

            def reduce(
                self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int
            ) -> None:
                assert root == 0
                self._put(send, recv, count, dtype, op, stream, "reduce")

            def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
                assert root == 0
                self._put(send, recv, count, dtype, None, stream, "broadcast")

            def reduceScatter(
                self, send: int, recv: int, count: int, dtype: int, op: int, stream: int
            ) -> None:
                assert recv == send + self.rank * count * np.dtype(DTYPES[dtype]).itemsize
                self._put(send, send, self.ndev * count, dtype, op, stream, "reduceScatter")

            def allGather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
                assert send == recv + self.rank * count * np.dtype(DTYPES[dtype]).itemsize
                self._put(recv, recv, self.ndev * count, dtype, None, stream, "allGather")

            def _put(
                self, send: int, recv: int, count: int, dtype: int, op: Any, stream: int, kind: str
            ) -> None:
                if not self.is_open:
                    fake.abused.append(f"a sum by rank {self.rank}, which was aborted")
                    raise NcclError("invalid argument")
                assert send == recv
                group = fake._group
                assert group is not None, "one thread would wait for all others"
                assert group.thread is threading.current_thread(), "a group is one thread's"
                group.calls.append((self, recv, count, dtype, op, stream, kind))

            def abort(self) -> None:
                if fake._is_inside:
                    fake.abused.append(f"rank {self.rank} aborted under a call")
                if not self.is_open:
                    fake.abused.append(f"rank {self.rank} aborted again")
                self.is_open = False
                fake.aborted.append(self.rank)
                if not fake.deaf:
                    fake.wake.set()
                fake.wake.wait(HANG_S)

            def destroy(self) -> None:
                if self.is_open:
                    self.is_open = False
                    fake.destroyed.append(self.rank)

        self.NcclCommunicator = NcclCommunicator

    def get_version(self) -> int:
        return 22809

    def get_unique_id(self) -> bytes:
        return b"n" * 128

    def groupStart(self) -> None:
        assert self._group is None
        self._group, self._is_inside = _Group(), True
        self._group.guard.__enter__()

    def groupEnd(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        assert group.thread is threading.current_thread(), "a group is one thread's"
        group.guard.__exit__(None, None, None)
        try:
            self._end(group)
        finally:
            self._is_inside = False

    def _end(self, group: _Group) -> None:
        if self.hangs == ("make" if group.made else "sum"):
            self.hanging.set()
            assert self.wake.wait(HANG_S)
            if self.fails:
                raise NcclError("aborted")
        if group.made:
            assert [comm.rank for comm in group.made] == self._ranks(group.made[0].ndev)
        if group.calls:
            self._sum(group)

    def _sum(self, group: _Group) -> None:
        by_rank: dict[int, list[tuple[Any, ...]]] = {}
        for call in group.calls:
            by_rank.setdefault(call[0].rank, []).append(call)
        ndev = group.calls[0][0].ndev
        assert sorted(by_rank) == self._ranks(ndev), f"only ranks {sorted(by_rank)} of {ndev}: the rest waits"
        self.groups.append((QUIET.locked(), [call[2] for call in by_rank[min(by_rank)]]))
        self.kinds.append(group.calls[0][-1])
        for calls in zip(*by_rank.values(), strict=True):
            assert len({(*call[2:5], call[-1]) for call in calls}) == 1, "the ranks sum different things"
            _, _, count, dtype, op, _, kind = calls[0]
            arrays, tensors = zip(*(_at(call[1], count, DTYPES[dtype]) for call in calls), strict=True)
            given = arrays[:-1] if self.broken else arrays
            span = count // ndev
            if kind == "broadcast":
                result = given[0].copy()
            elif kind == "allGather":
                result = np.concatenate([one[span * at : span * at + span] for at, one in enumerate(arrays)])
            else:
                result = self._across(self._reduced(given, dtype, op), dtype, op, ndev)
            for call, array, tensor in zip(calls, arrays, tensors, strict=True):
                rank = call[0].rank
                is_written = (
                    kind.startswith("all") or kind == "reduceScatter" or (rank == 0) == (kind == "reduce")
                )
                if is_written and not (self.broken and call is calls[-1]) and kind not in self.lost:
                    own = slice(span * rank, span * rank + span) if kind == "reduceScatter" else slice(None)
                    array[own] = result[own]
                touched = ([], [tensor]) if is_written else ([tensor], [])
                self._cuda.access(self._streams[call[5]], kind, *touched)

    def _ranks(self, ndev: int) -> list[int]:
        """Ranks of this process among as many."""
        return list(range(ndev))

    def _across(self, result: Any, dtype: int, op: int, ndev: int) -> Any:
        """The result of all processes that have ranks among as many."""
        return result

    def _reduced(self, given: Sequence[Any], dtype: int, op: int) -> Any:
        if dtype == self.NCCL_BFLOAT16:
            wide = [(one.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for one in given]
            return torch.from_numpy(np.sum(wide, axis=0)).bfloat16().view(torch.int16).numpy()
        with np.errstate(all="ignore"):
            return np.sum(given, axis=0) if op == self.NCCL_SUM else np.max(given, axis=0)


class FakeNcclOfMachines(FakeNccl):
    """The same with ranks of several processes, whose parts are summed by `torch.distributed`.

    Args:
        cuda: Fake of `torch.cuda`.
        lanes: Lanes of this process.
        ranks: Ranks of this process.
        size: Ranks of all.
    """

    def __init__(self, cuda: FakeCuda, lanes: Sequence[Lane], ranks: range, size: int) -> None:
        super().__init__(cuda, lanes)
        self._own, self._size = ranks, size

    def _ranks(self, ndev: int) -> list[int]:
        return list(self._own if ndev == self._size else range(ndev))

    def _across(self, result: Any, dtype: int, op: int, ndev: int) -> Any:
        if ndev != self._size:
            return result
        tensor = torch.from_numpy(np.ascontiguousarray(result).copy())
        how = dist.ReduceOp.SUM if op == self.NCCL_SUM else dist.ReduceOp.MAX
        dist.all_reduce(tensor.view(torch.bfloat16) if dtype == self.NCCL_BFLOAT16 else tensor, how)
        return tensor.numpy()


def _at(address: int, count: int, dtype: Any) -> tuple[Any, Tensor]:
    memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    array = np.frombuffer(memory, dtype)
    return array, torch.from_numpy(array)
