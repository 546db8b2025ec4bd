"""Gains from the settings of `flowdp.device.process_tuning` on this machine's CPU.

Every measurement runs in its own process: the allocator's thresholds cannot be reset.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from bench.harness import Comparison, compare, options, report, step_ms
from flowdp.device.cores import pause_openmp, usable_cores
from flowdp.device.process_tuning import SWITCH_INTERVAL_S, keep_freed_memory

Measured = tuple[float, float]  # ms per step, page faults per step


def small_cnn_step() -> Callable[[], None]:
    """A training step of two convolutions on a batch of 64 x 1 x 28 x 28."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 10),
    )  # fmt: skip
    return training_step(model, torch.randn(64, 1, 28, 28))


def small_mlp_step() -> Callable[[], None]:
    """A training step of 784-256-10 on a batch of 32 x 784."""
    torch.manual_seed(0)
    return training_step(
        nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(32, 784)
    )


def training_step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    y = torch.randint(0, 10, (len(x),))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measured(step: Callable[[], None], *, steps: int) -> Measured:
    """Measure `steps` calls in the calling thread."""
    for _ in range(10):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ms = step_ms(step, steps=steps, warmup=0)
    return ms, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps


def in_threads(
    step_of: Callable[[], Callable[[], None]], *, workers: int, threads: int, steps: int
) -> Measured:
    """Measure in `workers` threads at once; returns the mean."""
    seen: list[Measured] = []
    start = threading.Barrier(workers)

    def work() -> None:
        torch.set_num_threads(threads)
        step = step_of()
        start.wait()
        seen.append(measured(step, steps=steps))

    running = [threading.Thread(target=work) for _ in range(workers)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(ms for ms, _ in seen) / workers, sum(faults for _, faults in seen) / workers


def malloc(tuned: bool) -> Measured:
    """The small CNN in one worker thread with one OpenMP thread."""
    if tuned:
        keep_freed_memory()
    return in_threads(small_cnn_step, workers=1, threads=1, steps=60)


def openmp(tuned: bool) -> Measured:
    """The small MLP in one worker thread with all cores, beside a main thread with a pool of its own."""
    torch.set_num_threads(usable_cores())
    torch.ones(1 << 22).add_(1)  # large enough for a parallel region: the pool exists now
    if tuned:
        pause_openmp()
    return in_threads(small_mlp_step, workers=1, threads=usable_cores(), steps=400)


def two_workers(tuned: bool) -> Measured:
    """The small MLP in two worker threads with one OpenMP thread each."""
    torch.set_num_threads(1)
    if tuned:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    return in_threads(small_mlp_step, workers=2, threads=1, steps=400)


def beside_python(tuned: bool) -> Measured:
    """The small MLP in one worker thread, beside a thread of pure Python: a dataset's `__getitem__`, say.

    The worker releases the interpreter in every kernel, and waits one switch interval to get it back.
    """
    torch.set_num_threads(1)
    if tuned:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            sum(i * i for i in range(2_000))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        return in_threads(small_mlp_step, workers=1, threads=1, steps=60)
    finally:
        done.set()
        reader.join()


def main() -> None:
    arguments = options(__doc__, pairs=9).parse_args()
    faults: dict[str, list[float]] = {"default": [], "tuned": []}
    results: list[Comparison] = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:

        def side(case: Callable[[bool], Measured], name: str) -> Callable[[], float]:
            def measure() -> float:
                ms, page_faults = fresh.submit(case, name == "tuned").result()
                if case is malloc:
                    faults[name].append(page_faults)
                return ms

            return measure

        for case, label in (
            (malloc, "malloc: small CNN"),
            (openmp, "openmp: small MLP"),
            (two_workers, "switch_interval: 2 x small MLP"),
            (beside_python, "switch_interval: small MLP, Python beside"),
        ):
            sides = {name: side(case, name) for name in ("default", "tuned")}
            results.append(compare(label, sides, pairs=arguments.pairs))
    figures = {f"{name}_page_faults_per_step": median(seen) for name, seen in faults.items()}
    report("process", results, figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
