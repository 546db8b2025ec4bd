"""OpenMP pools: of how many threads, how they end, and how they wait.

A pool belongs to the thread that computes with it. Between two parallel regions, and at the end of each, its
threads wait for each other: libgomp lets them spin for about a millisecond, unless the pools of the process
have more threads than there are cores. Where other programs want the cores, a thread that spins keeps off the
one that it waits for. So while there is a crowd, one more pool exists that does nothing but count, and all
others sleep where they would spin. That changes no bit of a result.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from pathlib import Path

import torch

from flowdp.policy.crowd import LOOK_S, Crowd

__all__ = ["Barriers", "barriers", "pause_openmp", "running_threads", "set_own_threads"]

GRAIN = 1 << 15
"""Elements that torch gives to a thread of a pool at least."""

GRACE_S = 1.0

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
        common = torch.get_num_threads()  # what torch gives to a thread that starts now
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


@cache
def _openmp_runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch computes with, reached through torch's own library.

    Other packages bring runtimes of their own (scikit-learn does); a symbol looked up in torch's library
    is found among what that library was linked to.
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


def running_threads() -> int | None:
    """Threads of all programs that run now or want to; None where the system does not tell.

    Source:
        proc_loadavg(5).
    """
    try:
        return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None


class Barriers:
    """Lets the threads of all pools sleep at their barriers while the machine is crowded.

    Threads:
        `hold` and `release` by any; the looks are a thread's own, which lives while anybody holds.
    """

    def __init__(self) -> None:
        # Serialises what follows. A run that is collected releases in whatever thread the collector runs,
        # which may be in here: so the lock may be taken again, and is held over nothing that waits.
        self._lock = threading.RLock()
        self._holders = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self) -> None:
        """Look at the machine from now on; the first look is taken before this returns."""
        running = running_threads()
        is_told = running is not None and _openmp_runtime() is not None
        over, ready = threading.Event(), threading.Event()
        crowd = Crowd(os.cpu_count() or 1, running or 0)
        thread = threading.Thread(
            target=_watch, args=(crowd, over, ready), name="flowdp-barriers", daemon=True
        )
        with self._lock:
            self._holders += 1
            if self._thread is not None or not is_told:
                return
            self._over, self._thread = over, thread
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: the barriers stay as they are
            with self._lock:
                self._thread = None
            return
        ready.wait()

    def release(self) -> None:
        """Look no more, if this was the last to hold."""
        with self._lock:
            self._holders -= 1
            thread = self._thread
            if self._holders or thread is None:
                return
            self._thread = None
            self._over.set()
        if thread is not threading.current_thread():
            thread.join(GRACE_S)  # not for ever: the collector may run where that thread waits for this one


def _watch(crowd: Crowd, over: threading.Event, ready: threading.Event) -> None:
    is_counted = False
    while True:
        if crowd.is_there is not is_counted:
            is_counted = crowd.is_there
            if is_counted:
                _count_one_more_pool()
            else:
                set_own_threads(1)
        ready.set()
        if over.wait(LOOK_S):
            break
        crowd.look(running_threads() or 0)
    set_own_threads(1)


def _count_one_more_pool() -> None:
    """Make a pool of the calling thread that has more threads than libgomp knows of cores."""
    count = (os.cpu_count() or 1) + 1
    set_own_threads(count)
    torch.zeros(count * GRAIN, dtype=torch.uint8).add_(1)


barriers = Barriers()
"""Of this process."""
