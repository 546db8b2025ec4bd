"""Sizes of OpenMP pools on a busy machine: fixed ones, and the one that a worker chooses.

    python -m bench.micro.busy                              # 0, 4 and 8 busy loops, under 4 minutes
    python -m bench.micro.busy --loops 8 --model mlp --pairs 3

Each size has its own process, for libgomp counts the threads of all pools of a process; the processes compute
in turns. The ratio is of samples per second, the best fixed size over the chosen one: 1.3 at most.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch.optim import SGD

from bench.harness import Comparison, options, report
from bench.models import MODELS, classify, images
from flowdp.device.cores import pool_sizes, set_own_threads, usable_cores
from flowdp.device.process_tuning import tuned_process
from flowdp.options import ProcessTuning
from flowdp.threads.crew import Crew

SIZES = (1, 2, 4)
CHOSEN = 0
SLICE_S = 0.5
WARM_S = 0.2
HOPELESS = 3.0
"""A fixed size that was this many times slower than another in the first turn is not measured again."""


def compute(pipe: Connection, model: str, workers: int, size: int) -> None:
    """Body of a process: trains for the requested time, and answers with samples per second."""
    torch.set_num_threads(usable_cores())
    crew = Crew([f"worker-{rank}" for rank in range(workers)])
    with tuned_process(ProcessTuning()), closing(crew):
        steps = [step_of(model) for _ in range(workers)]
        while (seconds := pipe.recv()) is not None:
            if seconds == 0:  # another load: new pools
                devices = [torch.device("cpu")] * workers
                chosen = pool_sizes(devices, ProcessTuning(), adapts=True)
                sizes = chosen if size == CHOSEN else [size] * workers
                seconds = WARM_S
            jobs = [partial(train, *job, MODELS[model][1], seconds) for job in zip(steps, sizes, strict=True)]
            pipe.send((sum(filter(None, crew.run(jobs))), sizes))


def step_of(model: str) -> Callable[[], None]:
    make, batch_size = MODELS[model]
    torch.manual_seed(0)
    module, batch = make(), images(batch_size)
    optimizer = SGD(module.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        classify(module, batch).backward()
        optimizer.step()

    return step


def train(step: Callable[[], None], threads: int, samples: int, seconds: float) -> float:
    """Train with a pool of so many threads; returns samples per second."""
    set_own_threads(threads)
    start = now = time.perf_counter()
    steps = 0
    while now - start < seconds:
        step()
        steps += 1
        now = time.perf_counter()
    return steps * samples / (now - start)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Other processes, each of which uses as much of a core as it gets."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def processes(model: str, workers: int) -> Iterator[dict[int, Connection]]:
    """One process per size, ready to compute."""
    context = get_context("spawn")
    with ExitStack() as stack:
        pipes: dict[int, Connection] = {}
        for size in (*SIZES, CHOSEN):
            pipes[size], other = context.Pipe()
            process = context.Process(target=compute, args=(other, model, workers, size))
            process.start()
            stack.callback(process.join)
            stack.callback(pipes[size].send, None)
        yield pipes


def ask(pipe: Connection, seconds: float) -> tuple[float, list[int]]:
    pipe.send(seconds)
    answer: tuple[float, list[int]] = pipe.recv()
    return answer


def measure(
    pipes: dict[int, Connection], turns: int, draw: random.Random
) -> tuple[dict[int, list[float]], list[int]]:
    """Samples per second of each size, turn by turn, and the sizes chosen at the end."""
    seen: dict[int, list[float]] = {size: [] for size in pipes}
    for pipe in pipes.values():
        _, chosen = ask(pipe, 0)
    for turn in range(turns):
        best = max(map(median, filter(None, seen.values())), default=0.0)
        sizes = [size for size in pipes if turn == 0 or size == CHOSEN or seen[size][0] * HOPELESS > best]
        for size in draw.sample(sizes, len(sizes)):
            rate, threads = ask(pipes[size], SLICE_S)
            seen[size].append(rate)
            if size == CHOSEN:
                chosen = threads
    return seen, chosen


def main() -> None:
    parser = options(__doc__, pairs=7)
    parser.add_argument("--loops", type=int, action="append", help="number of busy loops (may repeat)")
    parser.add_argument("--model", action="append", choices=["mlp", "cnn"], help="only this one")
    parser.add_argument("--workers", type=int, action="append", help="number of CPU devices (may repeat)")
    arguments = parser.parse_args()
    draw = random.Random(0)
    results: list[Comparison] = []
    figures: dict[str, float] = {}
    print(f"{'samples/s':<24}" + "".join(f"{f'{size} threads':>12}" for size in SIZES) + f"{'chosen':>12}")
    for model in arguments.model or ("mlp", "cnn"):
        for workers in arguments.workers or (1, 2):
            with processes(model, workers) as pipes:
                for loops in arguments.loops or (0, 4, 8):
                    label = f"{model}, {workers} x CPU, {loops} loops"
                    with busy_loops(loops):
                        seen, chosen = measure(pipes, arguments.pairs, draw)
                    results.append(compared(label, seen))
                    figures |= figures_of(label, seen)
                    print(line_of(label, seen, chosen), flush=True)
    report("busy", results, figures=figures, save=arguments.save)


def compared(label: str, seen: Mapping[int, Sequence[float]]) -> Comparison:
    measured = [size for size in SIZES if len(seen[size]) == len(seen[CHOSEN])]
    best = max(measured, key=lambda size: median(seen[size]))
    names = f"{best} threads", "chosen"
    return Comparison(label, "samples/s", names, tuple(seen[best]), tuple(seen[CHOSEN]))


def figures_of(label: str, seen: Mapping[int, Sequence[float]]) -> dict[str, float]:
    words = {size: f"{size} threads" for size in SIZES} | {CHOSEN: "chosen"}
    return {f"{label}, {words[size]}, samples/s": median(rates) for size, rates in seen.items()}


def line_of(label: str, seen: Mapping[int, Sequence[float]], chosen: Sequence[int]) -> str:
    rates = "".join(f"{median(seen[size]):>12,.0f}" for size in (*SIZES, CHOSEN))
    return f"{label:<24}{rates}  {chosen} threads each"


if __name__ == "__main__":
    main()
