"""Throughput of a run with checkpoints after every N steps, against the same run without.

    python -m bench.micro.checkpoint_throughput
    python -m bench.micro.checkpoint_throughput --size small --policy sync --every 1 20 --pairs 2 --save
    python -m bench.micro.checkpoint_throughput --quick

Two CPU devices of one thread each train an MLP of eight square layers. A turn measures each N once, in random
order, with a run without checkpoints before the first and behind each: the ratio is that to the mean of the
two neighbours. Samples are counted in the loss from a second behind the first round to the end of the time:
what is cut off is the last checkpoint, of the end of the run. With `--save` a record that the same commit has
is continued, so a measurement can be made in pieces.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import flowdp
from bench.harness import Comparison, options, report, saved

Policy = Literal["exact", "sync"]
Turn = dict[str, float]

EVERY = (1, 2, 5, 20, 100)
WARM_S = 1.0


@dataclass(frozen=True)
class Size:
    """A model and the times of its runs.

    Attributes:
        width: Features of a layer.
        batch: Samples of a step of all devices.
        optimizer: Of the parameters.
        seconds: Time of a run with checkpoints; the first one has to be paid for in it.
        without_s: Time of a run without.
    """

    width: int
    batch: int
    optimizer: Callable[..., Optimizer]
    seconds: float
    without_s: float


SIZES = {
    "small": Size(36, 32, torch.optim.AdamW, 4.0, 4.0),  # 0.01 M parameters, files of 0.25 MB
    "large": Size(1581, 4, torch.optim.SGD, 15.0, 6.0),  # 20 M, 80 MB
    "large-adamw": Size(1581, 4, torch.optim.AdamW, 60.0, 8.0),  # 20 M, 400 MB
}


def measure(size: Size, policy: Policy, every: int | None, seconds: float) -> tuple[float, int]:
    """Samples per second of a run, and its files before the last one."""
    counts: Counter[int] = Counter()  # a key of each thread

    def count(model: nn.Module, batch: Tensor) -> Tensor:
        counts[threading.get_ident()] += len(batch)
        loss: Tensor = model(batch).square().mean()
        return loss

    with tempfile.TemporaryDirectory() as folder:
        saves, files = None, list[int]()
        if every is not None:
            saves = flowdp.CheckpointOptions(folder, every=every, unit="step", keep_last=1)
        run = flowdp.Trainer(
            model=nn.Sequential(*(nn.Linear(size.width, size.width) for _ in range(8))),
            optimizer=lambda params: size.optimizer(params, lr=1e-6),
            loss=count,
            dataset=torch.randn(4096, size.width),
            batch_size=size.batch,
            max_steps=10**9,
            devices=["cpu", "cpu"],
            policy=policy,
            checkpoint=saves,
            callbacks=[flowdp.OnCheckpoint(lambda one: files.append(one.version))] if saves else [],
            progress=False,
        ).start()
        next(run.metrics("round"))
        time.sleep(WARM_S)
        start, before = time.perf_counter(), sum(counts.values())
        time.sleep(seconds)
        rate, written = (sum(counts.values()) - before) / (time.perf_counter() - start), len(files)
        run.stop()
        run.join()
    gc.collect()
    return rate, written


def turn(size: Size, policy: Policy, every: Sequence[int], seconds: float | None) -> list[Turn]:
    """Each interval once, between runs without checkpoints."""
    made, without_s = [], seconds or size.without_s
    before, _ = measure(size, policy, None, without_s)
    for number in random.sample(every, len(every)):
        rate, files = measure(size, policy, number, seconds or size.seconds)
        behind, _ = measure(size, policy, None, without_s)
        made.append({"every": number, "with": rate, "without": (before + behind) / 2, "files": files})
        print(f"every={number}  {rate / made[-1]['without']:.3f}  {files} files", flush=True)
        before = behind
    return made


def comparisons(label: str, turns: Sequence[Turn]) -> list[Comparison]:
    """A comparison for each interval."""
    made = []
    for number in sorted({one["every"] for one in turns}):
        mine = [one for one in turns if one["every"] == number]
        sides = tuple(one["with"] for one in mine), tuple(one["without"] for one in mine)
        made.append(Comparison(f"{label}, every={number:g}", "samples/s", ("with", "without"), *sides))
    return made


def main() -> None:
    parser = options(__doc__, pairs=5)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--policy", nargs="+", choices=("exact", "sync"), default=["exact", "sync"])
    parser.add_argument("--every", nargs="+", type=int, default=list(EVERY), help="intervals, in steps")
    parser.add_argument("--seconds", type=float, help="time of each run")
    parser.add_argument("--quick", action="store_true", help="the small model once, a second a run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.pairs, arguments.seconds = ["small"], 1, arguments.seconds or 1.0
    torch.set_num_threads(1)
    logging.getLogger("flowdp").setLevel(logging.ERROR)  # that checkpoints are put off
    for size in arguments.size:
        for policy in arguments.policy:
            name = f"checkpoint_throughput_{size}_{policy}"
            path = saved(name)
            turns = json.loads(path.read_text())["turns"] if arguments.save and path.exists() else []
            for _ in range(arguments.pairs):
                turns += turn(SIZES[size], policy, arguments.every, arguments.seconds)
            results = comparisons(f"{size}, {policy}", turns)
            report(name, results, save=arguments.save, more={"turns": turns})


if __name__ == "__main__":
    main()
