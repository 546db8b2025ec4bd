"""Training time that checkpoints after every N steps cost, measured inside the runs that write them.

    python -m bench.micro.checkpoint_throughput
    python -m bench.micro.checkpoint_throughput --size small --policy sync --every 1 20 --pairs 2 --save
    python -m bench.micro.checkpoint_throughput --quick

Two CPU devices of one thread each train an MLP of eight square layers. The time of each step is noted in the
loss. A file's span begins 50 ms before the model's state is taken and ends 50 ms behind the written file. The
time lost by the file is its span, less the time that its samples take at the pace around it: that of half a
second (or the length of the span, if that is more) on each side, as far as it is free of other files. A side
of which less than half is free, or inside the measured time, leaves the file out. The cost is

    mean time lost by a file / mean time from one file to the next

over all runs of an interval; medians would not add up where files come at uneven times. The same is done with
spans of that length in the middle between two files: their loss should be 0, and its spread is the method's
error. A slowdown that lasts much longer than the writing slows the pace around it as well, so it is not seen;
nor is the file at the end of a run. With `--save` a record that the same commit has is continued, so a
measurement can be made in pieces.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import flowdp
from bench.harness import options, report, saved

Policy = Literal["exact", "sync"]
Span = tuple[float, float]
Marks = Sequence[tuple[float, int]]

EVERY = (1, 2, 5, 20, 100)
WARM_S = 1.0
MARGIN_S = 0.05
SIDE_S = 0.5


@dataclass(frozen=True)
class Size:
    """A model and the time of its runs.

    Attributes:
        width: Features of a layer.
        batch: Samples of a step of all devices.
        optimizer: Of the parameters.
        seconds: Measured time of a run, for several files.
    """

    width: int
    batch: int
    optimizer: Callable[..., Optimizer]
    seconds: float


SIZES = {
    "small": Size(36, 32, torch.optim.AdamW, 9.0),  # 0.01 M parameters, files of 0.25 MB
    "large": Size(1581, 4, torch.optim.SGD, 16.0),  # 20 M, 80 MB
    "large-adamw": Size(1581, 4, torch.optim.AdamW, 60.0),  # 20 M, 400 MB
}


@dataclass(frozen=True)
class Losses:
    """Times of one run.

    Attributes:
        every: Interval of the checkpoints, in steps.
        lost_ms: Time lost by each file that could be measured.
        idle_ms: The same of spans without a file, between two.
        apart_ms: Times from one file to the next.
    """

    every: int
    lost_ms: tuple[float, ...]
    idle_ms: tuple[float, ...]
    apart_ms: tuple[float, ...]


class Pace:
    """Samples trained until a time. Those of a step are spread evenly from its loss to the device's next one.

    Args:
        devices: For each device the time of each loss, in seconds, and its samples.
    """

    def __init__(self, devices: Iterable[Marks]) -> None:
        self._lines = []
        for marks in devices:
            times, samples = np.array(marks, dtype=float).T
            self._lines.append((times, np.cumsum(samples) - samples))

    def between(self, begin: float, end: float) -> float:
        """Samples trained from `begin` to `end`."""
        return sum(float(np.diff(np.interp((begin, end), *line))[0]) for line in self._lines)


def lost_s(pace: Pace, span: Span, free: Span) -> float | None:
    """Seconds lost in a span at the pace of its sides, which end with `free`; None where one is too short."""
    begin, end = span
    side = max(SIDE_S, end - begin)
    left, right = max(begin - side, free[0]), min(end + side, free[1])
    if min(begin - left, right - end) < side / 2:
        return None
    samples = pace.between(left, begin) + pace.between(end, right)
    return end - begin - pace.between(begin, end) * (begin - left + right - end) / samples


def losses(every: int, pace: Pace, files: Sequence[Span], measured: Span) -> Losses:
    """Times of a run.

    Args:
        every: Interval of the checkpoints, in steps.
        pace: Samples trained.
        files: Of each file the time when the state was taken and when it was written, in seconds.
        measured: Beginning and end of the measured time.
    """
    begin, end = measured
    spans = [(taken - MARGIN_S, written + MARGIN_S) for taken, written in files]
    edges = [(begin, begin), *(one for one in spans if one[1] > begin), (end, end)]
    lost, idle = list[float | None](), list[float | None]()
    for before, span, behind in zip(edges, edges[1:], edges[2:], strict=False):
        lost.append(lost_s(pace, span, (before[1], behind[0])))
        middle, half = (span[1] + behind[0]) / 2, (span[1] - span[0]) / 2
        if behind in spans:
            idle.append(lost_s(pace, (middle - half, middle + half), (span[1], behind[0])))
    return Losses(
        every,
        tuple(one * 1e3 for one in lost if one is not None),
        tuple(one * 1e3 for one in idle if one is not None),
        tuple((b - a) * 1e3 for (a, _), (b, _) in pairwise(files) if a > begin),
    )


def measure(size: Size, policy: Policy, every: int, seconds: float) -> Losses:
    """Times of a run of `seconds` behind its warm-up."""
    marks: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)  # of each thread
    taken, written = list[float](), list[float]()

    def note(model: nn.Module, batch: Tensor) -> Tensor:
        marks[threading.get_ident()].append((time.perf_counter(), len(batch)))
        loss: Tensor = model(batch).square().mean()
        return loss

    model = nn.Sequential(*(nn.Linear(size.width, size.width) for _ in range(8)))
    model.register_state_dict_pre_hook(lambda *_: taken.append(time.perf_counter()))
    with tempfile.TemporaryDirectory() as folder:
        run = flowdp.Trainer(
            model=model,
            optimizer=lambda params: size.optimizer(params, lr=1e-6),
            loss=note,
            dataset=torch.randn(4096, size.width),
            batch_size=size.batch,
            max_steps=10**9,
            devices=["cpu", "cpu"],
            policy=policy,
            checkpoint=flowdp.CheckpointOptions(folder, every=every, unit="step", keep_last=1),
            callbacks=[flowdp.OnCheckpoint(lambda _: written.append(time.perf_counter()))],
            progress=False,
        ).start()
        next(run.metrics("round"))
        time.sleep(WARM_S)
        begin = time.perf_counter()
        time.sleep(seconds)
        end = time.perf_counter()
        run.stop()
        run.join()
    gc.collect()
    files = [(max(one for one in taken if one < behind), behind) for behind in written]
    return losses(every, Pace(marks.values()), files, (begin, end))


def share(runs: Sequence[Losses]) -> float | None:
    """Part of the training time that checkpoints cost; None where no file, or no two, could be measured."""
    lost, apart = [ms for one in runs for ms in one.lost_ms], [ms for one in runs for ms in one.apart_ms]
    return fmean(lost) / fmean(apart) if lost and apart else None


def row(label: str, runs: Sequence[Losses]) -> str:
    """A line: medians with the least and the largest, numbers of figures, and the cost."""

    def spread(figures: Sequence[float]) -> str:
        if not figures:
            return "none"
        return f"{median(figures):.0f} ({min(figures):.0f} to {max(figures):.0f}, n={len(figures)})"

    columns = (
        [ms for one in runs for ms in getattr(one, name)] for name in ("lost_ms", "idle_ms", "apart_ms")
    )
    lost, idle, apart = map(spread, columns)
    part = share(runs)
    cost = "not known" if part is None else f"{part:.1%}"
    return f"{label}  lost {lost}  without a file {idle}  apart {apart} ms  cost {cost}"


def main() -> None:
    parser = options(__doc__, pairs=3)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--policy", nargs="+", choices=("exact", "sync"), default=["exact", "sync"])
    parser.add_argument("--every", nargs="+", type=int, default=list(EVERY), help="intervals, in steps")
    parser.add_argument("--seconds", type=float, help="measured time of each run")
    parser.add_argument("--quick", action="store_true", help="the small model once, four seconds a run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.pairs, arguments.seconds = ["small"], 1, arguments.seconds or 4.0
    torch.set_num_threads(1)
    logging.getLogger("flowdp").setLevel(logging.ERROR)  # that checkpoints are put off
    for size in arguments.size:
        for policy in arguments.policy:
            name = f"checkpoint_throughput_{size}_{policy}"
            path = saved(name)
            old = json.loads(path.read_text())["runs"] if arguments.save and path.exists() else []
            runs = [Losses(**one) for one in old]
            for _ in range(arguments.pairs):
                for every in random.sample(arguments.every, len(arguments.every)):
                    seconds = arguments.seconds or SIZES[size].seconds
                    runs.append(measure(SIZES[size], policy, every, seconds))
            figures = {}
            for every in sorted({one.every for one in runs}):
                mine = [one for one in runs if one.every == every]
                print(row(f"{size}, {policy}, every={every}", mine), flush=True)
                if (part := share(mine)) is not None:
                    figures[f"every={every}, part of the time"] = part
            report(
                name, [], figures=figures, save=arguments.save, more={"runs": [asdict(one) for one in runs]}
            )


if __name__ == "__main__":
    main()
