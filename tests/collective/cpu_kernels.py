"""The kernels of `fused.cu`, compiled by g++: each thread of a block is a thread of the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowdp.collective.fused import SOURCE, Kernels

__all__ = ["cpu_kernels", "cpu_library"]

SHIM = """
#include <barrier>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __syncthreads() meeting->arrive_and_wait()
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index blockDim = {THREADS}, gridDim;
static std::barrier<>* meeting;
#include "SOURCE"
template <typename Kernel, typename... Arguments>
static void launch(Kernel kernel, unsigned blocks, Arguments... arguments) {
    std::barrier<> barrier(THREADS);
    meeting = &barrier;
    gridDim.x = blocks;
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < THREADS; ++number)
        threads.emplace_back([=] {
            threadIdx.x = number;
            for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
                kernel(arguments...);
                __syncthreads();
            }
        });
    for (std::thread& thread : threads) thread.join();
}
#define DOORS(name, Element)                                                                 \\
    extern "C" void run_mean_##name(unsigned blocks, const Mean* mean) {                     \\
        launch(mean_##name, blocks, *mean);                                                  \\
    }                                                                                        \\
    extern "C" void run_scale_##name(unsigned blocks, Address at, Address count, Address by) { \\
        launch(scale_##name, blocks, (Element*)at, count, (const double*)by);                \\
    }
DOORS(float32, float)
DOORS(float64, double)
DOORS(bfloat16, Bfloat16)
DOORS(float16, Half)
extern "C" unsigned size_of_mean() { return sizeof(Mean); }
"""

THREADS = 4
"""Threads of a block: each is one of the machine."""

LOCK = threading.Lock()
"""One kernel at a time: the indices of blocks and threads are the library's."""


@cache
def cpu_library(members: int) -> Any:
    """The library for a number of members; skips the test without g++."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("the kernels run on the CPU where there is a g++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "fused.cpp"), Path(folder, "fused.so")
        source.write_text(SHIM.replace("SOURCE", str(SOURCE)), encoding="utf-8")
        names = f"-DMEMBERS={members}", f"-DTHREADS={THREADS}"
        options = "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas", *names
        done = subprocess.run([compiler, *options, source, "-o", library], capture_output=True, text=True)
        if "_Float16" in done.stderr or "barrier" in done.stderr:
            pytest.skip("this g++ has no _Float16 or no std::barrier")
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))


def cpu_kernels(members: int) -> Kernels:
    """The kernels for a number of members, on the CPU."""
    library = cpu_library(members)

    def launch(name: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        passed = [
            ctypes.c_void_p(one.ctypes.data) if isinstance(one, np.ndarray) else ctypes.c_uint64(int(one))
            for one in arguments
        ]
        with LOCK:
            getattr(library, f"run_{name}")(ctypes.c_uint(blocks), *passed)

    return Kernels(launch, processors=1)
