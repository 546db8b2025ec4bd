"""The sampler: a thread that reads the use of processor, memory and GPUs, twice a second."""

from __future__ import annotations

import logging
import math
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

__all__ = ["EVERY_S", "GpuReading", "GpuSensor", "Sampler"]

log = logging.getLogger("flowdp")

EVERY_S = 0.5
"""Time between two samples."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Use of a CUDA device by all processes.

    Attributes:
        utilisation: Fraction of the time in which a kernel ran; NaN where it cannot be read.
        memory_bytes: Memory in use; NaN where it cannot be read.
    """

    utilisation: float
    memory_bytes: float


UNKNOWN = GpuReading(math.nan, math.nan)
"""Reading where NVML gives none; a 0 would say that the device is idle."""


def _resident_bytes() -> float:
    """Resident memory of this process; NaN where there is no /proc."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return math.nan


class GpuSensor:
    """Reads the use of one CUDA device through NVML.

    NVML counts the devices in another order than CUDA, so a device is named by its UUID.

    Args:
        uuid: UUID of the device, with "GPU-" or "MIG-".
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._nvml: Any = None
        self._handle: Any = None
        self._is_warned = False

    def read(self) -> GpuReading:
        """Read the use of the device; NaN where NVML does not say."""
        try:
            if self._nvml is None:
                self._open()
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except Exception as error:  # no package, no driver, no such reading on a part of a card
            if not self._is_warned:
                self._is_warned = True
                log.info("the use of %s is not sampled: %s", self._uuid, error)
            return UNKNOWN
        return GpuReading(rates.gpu / 100.0, float(memory.used))

    def _open(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid.encode())
        self._nvml = pynvml


class Sampler:
    """Samples the machine until it is closed.

    Args:
        take: Called with each sample: the cores that this process used since the last one (1.0 is one
            core), its resident memory, and the use of the GPUs.
        uuids: UUIDs of the CUDA devices.
        every_s: Time between two samples.

    Threads:
        Its own calls `take`; started and closed by those of the engine.
    """

    def __init__(
        self,
        take: Callable[[float, float, Sequence[GpuReading]], None],
        uuids: Sequence[str] = (),
        every_s: float = EVERY_S,
    ) -> None:
        self._take = take
        self._gpus = [GpuSensor(uuid) for uuid in uuids]
        self._every_s = every_s
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowdp-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Take a last sample, and end the thread. Of one that was not started nothing."""
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        is_over = False
        at_s, used_s = perf_counter(), process_time()
        while not is_over:
            is_over = self._is_closing.wait(self._every_s)
            before_s, used_before_s = at_s, used_s
            at_s, used_s = perf_counter(), process_time()
            cores = (used_s - used_before_s) / max(at_s - before_s, 1e-9)
            self._take(cores, _resident_bytes(), [gpu.read() for gpu in self._gpus])
