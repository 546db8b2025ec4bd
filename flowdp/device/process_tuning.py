"""Settings of the whole process that a run on CPU devices needs.

Each has an off switch in `ProcessTuning`, leaves a choice of the user's alone, and is silently absent where
the platform lacks it. `python -m bench.micro.process` measures the gains; these are of 2 cores.

===============  ==============================================  ========================  ==================
setting          effect, and when                                way back                  gain
===============  ==============================================  ========================  ==================
openmp           the starting thread's OpenMP pool ends, at      its next parallel region  small MLP 3.0 x,
                 every start                                     builds it again           machine quiet
malloc           glibc keeps freed blocks up to 32 MiB, and up   none in this process      small CNN 1.35 x
                 to 256 MiB of free heap, once per process
switch_interval  the interpreter changes threads every 0.5 ms,   the end of the last run   small MLP 1-20 x,
                 not every 5 ms, while a run lives                         with Python beside
===============  ==============================================  ========================  ==================

A pool that has as many threads as there are cores spins at each barrier, which is fast until other programs
compete for those cores: then one thread a worker is faster (`flowdp.device.cores.pool_sizes`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

from flowdp.device.cores import pause_openmp
from flowdp.errors import OptionError
from flowdp.options import ProcessTuning

__all__ = ["as_tuning", "keep_freed_memory", "tuned_process"]

SWITCH_INTERVAL_S = 5e-4

# mallopt(3): parameter -> bytes. 32 MiB is the most that glibc takes as its mmap threshold on 64 bits.
MALLOC_LIMITS = {-3: 32 << 20, -1: 256 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def as_tuning(option: bool | ProcessTuning) -> ProcessTuning:
    """Read the option `tune_process`: all, none, or a choice.

    Raises:
        OptionError: It is neither a bool nor a `ProcessTuning`.
    """
    if isinstance(option, ProcessTuning):
        return option
    if not isinstance(option, bool):
        raise OptionError(f"tune_process must be True, False or a ProcessTuning, not {option!r}")
    return ProcessTuning(openmp=option, malloc=option, switch_interval=option)


@contextmanager
def tuned_process(tuning: ProcessTuning) -> Iterator[None]:
    """Hold the settings of `tuning` for the life of one run; several runs may hold them at once.

    Threads:
        Enter it in the thread that starts the workers, before they exist: an OpenMP pool can only be
        given back by its own thread. Leave it in any thread.
    """
    if tuning.malloc:
        keep_freed_memory()
    if tuning.openmp:
        pause_openmp()
    with _switch_interval if tuning.switch_interval else nullcontext():
        yield


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep big freed blocks instead of returning them to the kernel.

    A training step frees and allocates the same big blocks again and again. Those above glibc's mmap
    threshold go back to the kernel each time, and are faulted in, page by page, by the next step.
    Thresholds that the user chose, in the environment, stay. The call is for good: setting a threshold
    switches off glibc's own adjustment of it, and nothing switches that on again.

    Returns:
        Whether the thresholds are set; False on another C library or after a choice of the user's.
    """
    chosen = any(name in os.environ for name in MALLOC_VARIABLES)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(key, limit) == 1 for key, limit in MALLOC_LIMITS.items())


class _SwitchInterval:
    """A context in which the interpreter's switch interval is short; several runs may be inside.

    A worker spends most of a step in kernels that release the interpreter; to come back it waits until the
    thread that has it gives way, after one interval at worst. 5 ms are ten steps of a small model.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several runs may start and end at once
        self._inside = 0
        self._before_s: float | None = None  # None: the user's own is short enough, and stays

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0 and sys.getswitchinterval() > SWITCH_INTERVAL_S:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_INTERVAL_S)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside or self._before_s is None:
                return
            if sys.getswitchinterval() == SWITCH_INTERVAL_S:  # else the user changed it meanwhile
                sys.setswitchinterval(self._before_s)
            self._before_s = None


_switch_interval = _SwitchInterval()
