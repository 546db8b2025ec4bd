"""Kernels of the mean on CUDA devices: one pass that reads every replica once and writes it once.

The source is CUDA C++ (`fused.cu`); cupy compiles it when a run starts, and keeps the result on disk. Where
that does not work, torch takes the mean, in several passes. Only here is cupy imported, at first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["MEAN", "MEMBERS", "SOURCE", "THREADS", "Kernels", "import_cupy", "kernels_on"]

SOURCE = Path(__file__).with_suffix(".cu")

MEMBERS = 8
"""Replicas of one mean, at most."""

THREADS = 256
"""Threads of a block."""

BLOCKS = 16
"""Blocks for each multiprocessor, at most. Two or three run at once, so the last ones end together."""

NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

MEAN = np.dtype(
    [
        ("sources", np.uint64, MEMBERS),
        ("targets", np.uint64, MEMBERS),
        ("bad", np.uint64, MEMBERS),
        ("weights", np.float64, MEMBERS),
        ("rows", np.uint64),
        ("count", np.uint64),
        ("written", np.uint64),
    ]
)
"""The argument `Mean` of the source."""

Launch = Callable[[str, int, tuple[Any, ...]], None]
"""Enqueue a kernel, by its name, with this number of blocks and these arguments."""

log = logging.getLogger("flowdp")


class Kernels:
    """The kernels, compiled for one number of members, on one device.

    Args:
        launch: Enqueues a kernel on the current stream of the device.
        processors: Multiprocessors of the device.

    Threads: any, one at a time.
    """

    def __init__(self, launch: Launch, processors: int) -> None:
        self._launch = launch
        self._most = processors * BLOCKS

    def take(self, tensors: Sequence[Tensor]) -> bool:
        """Whether there are kernels for these memories: all of one dtype."""
        return tensors[0].dtype in NAMES and all(tensor.dtype == tensors[0].dtype for tensor in tensors)

    def blocks(self, count: int) -> int:
        """Blocks that share this number of elements, and rows of squares that they write."""
        return min(self._most, -(-count // THREADS))

    def mean(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        weights: Sequence[float],
        bad: Sequence[Tensor | None] = (),
        rows: Tensor | None = None,
    ) -> None:
        """Enqueue a weighted mean, in float32 at least.

        Args:
            sources: One for each member, all on the device. Shape (elements,) each.
            targets: Memories that become the mean; they may be sources.
            weights: Weight of each member; a member with 0 is not read, whatever it holds.
            bad: Flag of each member on the device, which makes its weight 0; empty: there are none. If no
                member is left, the mean is NaN.
            rows: Becomes, for each block of the device, the sums of (source - mean)^2, 0 for a member with
                weight 0, and of mean^2. Float64, shape (blocks(elements), members + 1). None: they are not
                measured.

        Streams: on the current one of the device.
        """
        mean = np.zeros((), MEAN)
        mean["sources"][: len(sources)] = [source.data_ptr() for source in sources]
        mean["targets"][: len(targets)] = [target.data_ptr() for target in targets]
        mean["bad"][: len(bad)] = [0 if flag is None else flag.data_ptr() for flag in bad]
        mean["weights"][: len(weights)] = weights
        mean["rows"] = 0 if rows is None else rows.data_ptr()
        mean["count"] = sources[0].numel()
        mean["written"] = len(targets)
        self._launch(f"mean_{NAMES[sources[0].dtype]}", self.blocks(sources[0].numel()), (mean,))

    def scale(self, memory: Tensor, factor: Tensor) -> None:
        """Enqueue a multiplication. By 1 the memory is not touched; by 0 it becomes 0, whatever it holds.

        Args:
            memory: Shape (elements,).
            factor: Float64, shape [], on the device.

        Streams: on the current one of the device.
        """
        if memory.numel():
            arguments = np.uint64(memory.data_ptr()), np.uint64(memory.numel()), np.uint64(factor.data_ptr())
            self._launch(f"scale_{NAMES[memory.dtype]}", self.blocks(memory.numel()), arguments)


def import_cupy() -> Any:
    """The module `cupy`, whose `cuda.nccl` is imported, too.

    Raises:
        ImportError: It is not installed, or does not fit.
    """
    import cupy
    from cupy.cuda import nccl  # noqa: F401

    return cupy


def kernels_on(device: torch.device, members: int) -> Kernels | None:
    """The kernels for a number of members; None where torch has to do without, which is said once in the log.

    The first time it takes a second or two, or, where they are on disk already, some milliseconds.

    Threads: one at a time, which holds `QUIET`: a module is loaded onto the device.
    """
    if members > MEMBERS:
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        _say("this torch is not built for CUDA", logging.INFO)
        return None
    try:
        return _load(device, members)
    except Exception as error:  # whatever cupy, the compiler and the driver raise
        _say(f"{type(error).__name__}: {error}".splitlines()[0], logging.WARNING)
        return None


@cache
def _say(reason: str, level: int) -> None:
    log.log(
        level, "means are taken by torch's kernels alone, in several passes over the replicas: %s", reason
    )


@cache
def _load(device: torch.device, members: int) -> Kernels:
    cupy = import_cupy()
    options = (f"-DMEMBERS={members}", f"-DTHREADS={THREADS}", "-std=c++17")
    module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options)
    functions = {
        name: module.get_function(name)
        for dtype in NAMES.values()
        for name in (f"mean_{dtype}", f"scale_{dtype}")
    }

    def launch(name: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        stream = _Stream(torch.cuda.current_stream(device).cuda_stream)
        with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(stream):
            functions[name]((blocks,), (THREADS,), arguments)

    kernels = Kernels(launch, torch.cuda.get_device_properties(device).multi_processor_count)
    _check(kernels, device, members)
    return kernels


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of torch's, as cupy takes one."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _check(kernels: Kernels, device: torch.device, members: int) -> None:
    """Take a mean of known numbers: compiled and loaded is not yet right.

    Raises:
        RuntimeError: It is wrong.
    """
    rows = [torch.full((5,), 1.0 + 2.0 * member, device=device) for member in range(members)]
    squares = torch.empty(1, members + 1, dtype=torch.float64, device=device)
    kernels.mean(rows, rows, [1.0] * members, rows=squares)
    if not all(bool((row == members).all()) for row in rows) or squares[0, -1].item() != 5.0 * members**2:
        raise RuntimeError(f"a mean on {device} is wrong")
