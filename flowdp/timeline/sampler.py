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

__all__ = ["EVERY_S", "GpuReading", "GpuSensor", "HostReading", "HostSensor", "Sampler"]

log = logging.getLogger("flowdp")

EVERY_S = 0.5
"""Time between two samples."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """Use of the host by this process.

    Attributes:
        cpu: Cores used since the last reading: 1.0 is one core.
        ram_bytes: Resident memory; NaN where it cannot be read.
    """

    cpu: float
    ram_bytes: float


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Use of a CUDA device by all processes.

    Attributes:
        utilisation: Fraction of the time in which a kernel ran; NaN where it cannot be read.
        memory_bytes: Memory in use; NaN where it cannot be read.
        total_bytes: All of its memory; NaN where it cannot be read.
    """

    utilisation: float
    memory_bytes: float
    total_bytes: float


UNKNOWN = GpuReading(math.nan, math.nan, math.nan)
"""Reading where NVML gives none; a 0 would say that the device is idle."""


class HostSensor:
    """Reads the use of the host."""

    def __init__(self) -> None:
        self._at_s, self._used_s = perf_counter(), process_time()
        self._resident = _resident_reader()

    def read(self) -> HostReading:
        """Read the use since the last call."""
        at_s, used_s = perf_counter(), process_time()
        cpu = (used_s - self._used_s) / max(at_s - self._at_s, 1e-9)
        self._at_s, self._used_s = at_s, used_s
        return HostReading(cpu, self._resident())


def _resident_reader() -> Callable[[], float]:
    """Reader of the resident memory: from /proc; NaN where there is none."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return lambda: math.nan
    page = mmap.PAGESIZE
    return lambda: float(statm.read_text().split()[1]) * page


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
        return GpuReading(rates.gpu / 100.0, float(memory.used), float(memory.total))

    def _open(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid.encode())
        self._nvml = pynvml


class Sampler:
    """Samples the machine until it is closed.

    Args:
        take: Called with each sample.
        uuids: UUIDs of the CUDA devices.
        every_s: Time between two samples.

    Threads:
        Its own calls `take`; started and closed by those of the engine.
    """

    def __init__(
        self,
        take: Callable[[HostReading, Sequence[GpuReading]], None],
        uuids: Sequence[str] = (),
        every_s: float = EVERY_S,
    ) -> None:
        self._take = take
        self._host = HostSensor()
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
        while not is_over:
            is_over = self._is_closing.wait(self._every_s)
            self._take(self._host.read(), [gpu.read() for gpu in self._gpus])
