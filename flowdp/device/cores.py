"""The number of threads that may compute: the user's choice, within the limits of this process.

The user's choice is `torch.get_num_threads()`, which follows OMP_NUM_THREADS and `torch.set_num_threads`, and
is the number of physical cores without either. The machine grants the cores of the affinity mask, and no more
than the quota of the container that the process is in (`docker run --cpus`, Kubernetes limits).

An OpenMP pool belongs to the thread that computes with it. Between two parallel regions, and at the end of
each, its threads wait for each other: libgomp lets them spin for about a millisecond, unless the pools of the
process have more threads than there are cores. Where other programs want the cores, a thread that spins keeps
off the one that it waits for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

from flowdp.options import ProcessTuning

__all__ = [
    "LentThreads",
    "barrier_ms",
    "cpu_quota",
    "pause_openmp",
    "pool_sizes",
    "set_own_threads",
    "thread_budget",
    "threads_per_rank",
    "usable_cores",
]

log = logging.getLogger("flowdp")

CROWDED_MS = 1.0
"""Limit of a small parallel operation: a longer one waits for threads that have no core."""


def pool_sizes(
    devices: Sequence[torch.device], tuning: ProcessTuning, *, adapts: bool = False, tells: bool = True
) -> list[int]:
    """Sizes of the ranks' OpenMP pools.

    A size decides the order of sums, and so the bits of a result. Where other programs want the cores at the
    start, and bits are free, each pool is one thread, which waits for no other; where they are not, the log
    says what it costs.

    Args:
        devices: One per rank.
        tuning: Settings of the run. Without `openmp` each rank has as many threads as the caller.
        adapts: Whether nothing is promised about bits. `torch.use_deterministic_algorithms` promises them.
        tells: Whether the log says so.

    Returns:
        At least 1 each. Shape (world_size,).

    Threads:
        The user's.
    """
    if not tuning.openmp:
        return [torch.get_num_threads()] * len(devices)
    budget = thread_budget()
    sizes = threads_per_rank(devices, budget)
    if max(sizes) == 1 or (wait_ms := barrier_ms(budget)) <= CROWDED_MS:
        return sizes
    is_free = adapts and not torch.are_deterministic_algorithms_enabled()
    log.log(
        logging.WARNING if tells else logging.DEBUG,
        "other programs want the cores: %d threads take %.0f ms for a parallel operation of 0.02 ms, and a "
        "step has hundreds. %s",
        budget,
        wait_ms,
        "So each CPU worker of this run computes with one thread"
        if is_free
        else f"So that results repeat, each CPU worker of this run keeps its {max(sizes)} threads; with "
        "torch.set_num_threads(1) before the run none waits for another",
    )
    return [1] * len(sizes) if is_free else sizes


def thread_budget() -> int:
    """Threads that may compute at once, those of all CPU workers together; at least 1.

    Threads:
        The user's: the number is that of the calling thread, with those that it has lent.
    """
    return max(1, min(_lent.own or torch.get_num_threads(), usable_cores()))


def threads_per_rank(devices: Sequence[torch.device], budget: int) -> list[int]:
    """Size of each rank's OpenMP pool.

    CPU ranks share the budget. More threads in all pools together than cores makes libgomp sleep and wake at
    every parallel region. The thread of any other rank only launches kernels.

    Returns:
        At least 1 each. Shape (world_size,).
    """
    workers = sum(device.type == "cpu" for device in devices)
    return [max(1, budget // workers) if device.type == "cpu" else 1 for device in devices]


class LentThreads:
    """The threads of a loop's own thread, which are its CPU ranks' while these compute the batches.

    Behind each operation of its own, a loss or the optimizer's step, the threads of its pool spin for
    milliseconds, on the cores that the ranks want next. So it computes with as many threads as a rank.

    Args:
        devices: One per rank.
        tuning: Settings of the loop; without `openmp` nothing is lent.

    Threads: any; what one has lent is its own to take back.
    """

    def __init__(self, devices: Sequence[torch.device], tuning: ProcessTuning) -> None:
        self._count = threads_per_rank(devices, thread_budget())[0]
        self._may_lend = tuning.openmp and any(device.type == "cpu" for device in devices)

    def lend(self) -> None:
        """Lend those of the calling thread."""
        if self._may_lend:
            _lent.own = _lent.own or torch.get_num_threads()
            _lent.lenders.add(self)
            set_own_threads(min(lender._count for lender in _lent.lenders))

    def take_back(self) -> None:
        """Take them back, unless the user has set another number; other loops here may still lend them."""
        if self not in _lent.lenders:
            return
        is_set = torch.get_num_threads() != min(lender._count for lender in _lent.lenders)
        _lent.lenders.remove(self)
        if not is_set:
            set_own_threads(min((lender._count for lender in _lent.lenders), default=_lent.own))
        if not _lent.lenders:
            _lent.own = 0


class _Lent(threading.local):
    """The number of the calling thread's own threads, 0 where it lends none, and the loops that have them."""

    def __init__(self) -> None:
        self.own = 0
        # One that another thread collects cannot take anything back here.
        self.lenders: weakref.WeakSet[LentThreads] = weakref.WeakSet()


_lent = _Lent()


def usable_cores() -> int:
    """Cores that the calling thread may run on, within the quota of its container; at least 1."""
    has_mask = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
    quota = cpu_quota()
    # Half a core more is no core: a pool that is stopped in the middle of a period waits for its barrier.
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Cores' worth of time that this process's container may use; None: no limit is known.

    Args:
        limit: Quota and period of the control group that a container sees as its root, in version 2.
    """
    try:
        quota, period = limit.read_text(encoding="utf-8").split()
        return float(quota) / float(period)  # "max" is no number
    except (OSError, ValueError, ZeroDivisionError):
        return None


REGIONS, LIMIT_S = 200, 0.05
"""Parallel regions that tell how long the threads of a pool wait for each other, and seconds at most."""

GRAIN = 32_768
"""Elements below which torch does not hand work to a further thread (`at::internal::GRAIN_SIZE`)."""

_turn = threading.Lock()


def set_own_threads(count: int) -> None:
    """Size the OpenMP pool of the calling thread, and of no other.

    `torch.set_num_threads` also sets the number that threads get which start later, the user's among them;
    that number is put back.

    Args:
        count: Threads, the calling one included. With 1 the pool is given back.
    """
    if torch.get_num_threads() == count:
        return
    known, changed = threading.Event(), threading.Event()

    def keep() -> None:
        common = torch.get_num_threads()  # torch's setting for a thread that starts now
        known.set()
        changed.wait()
        torch.set_num_threads(common)

    keeper = threading.Thread(target=keep, name="flowdp-threads", daemon=True)
    with _turn:  # or the number that is put back could be another rank's
        try:
            keeper.start()
        except RuntimeError:  # no thread can be started, so none gets this number
            torch.set_num_threads(count)
        else:
            known.wait()
            torch.set_num_threads(count)
            changed.set()
            keeper.join()
    if count == 1:
        pause_openmp()  # idle threads would count against the other ranks' pools


def barrier_ms(count: int) -> float:
    """Milliseconds of a small parallel operation by so many threads, on average.

    Some 0.02 where each thread has a core. More than 1 where other programs have the cores: the threads wait
    until the scheduler brings back the last one.

    Args:
        count: Threads, of a pool that is built for it and ended.
    """
    own = torch.get_num_threads()
    set_own_threads(count)
    numbers = torch.zeros(count * GRAIN, device="cpu").add_(1)
    start = now = perf_counter()
    regions = 0
    while regions < REGIONS and now - start < LIMIT_S:
        numbers.add_(1)
        regions += 1
        now = perf_counter()
    pause_openmp()
    set_own_threads(own)
    return (now - start) / regions * 1e3


@cache
def _openmp_runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch computes with, reached through torch's own library.

    Other packages bring runtimes of their own (scikit-learn does); a symbol looked up in torch's library
    is found among the libraries linked to it.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        file = Path(torch.__file__).parent / "lib" / name
        if file.is_file():
            runtime = ctypes.CDLL(str(file))
            return runtime if hasattr(runtime, "omp_pause_resource_all") else None
    return None


def pause_openmp() -> bool:
    """Give the calling thread's OpenMP pool back; its next parallel region builds it again.

    A pool lives as long as its thread. While the pool of a thread that merely waits is alive, the workers'
    pools count as too many, and every parallel region of theirs pays for it.

    Returns:
        Whether it is given back; False where the runtime cannot (before OpenMP 5.0).

    Threads:
        The owner of the pool.
    """
    runtime = _openmp_runtime()
    return runtime is not None and runtime.omp_pause_resource_all(1) == 0  # 1: omp_pause_soft
