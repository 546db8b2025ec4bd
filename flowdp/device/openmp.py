"""OpenMP pools: their sizes, and their end.

A pool belongs to the thread that computes with it. Between two parallel regions, and at the end of each, its
threads wait for each other: libgomp lets them spin for about a millisecond, unless the pools of the process
have more threads than there are cores. Where other programs want the cores, a thread that spins keeps off the
one that it waits for.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

__all__ = ["barrier_ms", "pause_openmp", "set_own_threads"]

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
