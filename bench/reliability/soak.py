"""Many runs in one process, steered, stopped, failed and dropped at random: nothing may be left of them.

::

    python -m bench.reliability.soak --seconds 600

After each run the threads and child processes must be those from before. Every 50 runs threads, open files,
memory and flowdp's objects are counted; after the first quarter, the warm-up, none of them may grow.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flowdp
from bench.harness import report as save_record
from bench.reliability.faults import POLICIES

__all__ = ["Report", "Sample", "soak"]

SAMPLES, BATCH_SIZE = 40, 4
PER_SAMPLE = 50
"""Runs between two samples."""

FLAT_MB = 1.0
"""Less growth of memory in 100 runs counts as none."""

LEAVE_S = 10.0
ENDINGS = ("join", "stop", "ctrl-c", "exception", "failure", "dropped", "dropped failure")
ENDLESS = {"stop", "ctrl-c", "exception", "failure", "dropped failure"}


@dataclass(frozen=True)
class Sample:
    """Counts after a number of runs.

    Attributes:
        runs: Runs so far.
        threads: Threads of the operating system.
        files: Open file descriptors.
        objects: Instances of flowdp's classes.
        memory_mb: Resident memory in MB.
    """

    runs: int
    threads: int
    files: int
    objects: int
    memory_mb: float


@dataclass(slots=True)
class Report:
    """Results of the runs.

    Attributes:
        endings: Number of runs by ending.
        actions: Number of calls by method.
        samples: Counts in order.
        faults: Errors, as text.
    """

    endings: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def slope_mb(self) -> float:
        """Growth of memory in 100 runs, in MB; NaN if there are too few samples."""
        settled = self._settled
        if len(settled) < 3:
            return math.nan
        runs, memory = [one.runs for one in settled], [one.memory_mb for one in settled]
        return 100.0 * linear_regression(runs, memory).slope

    @property
    def _settled(self) -> list[Sample]:
        return self.samples[len(self.samples) // 4 :]

    def verdict(self) -> list[str]:
        """Everything that has grown, as text."""
        settled, grown = self._settled, []
        for what in ("threads", "files", "objects"):
            counts = [getattr(one, what) for one in settled]
            half = len(counts) // 2
            if half and min(counts[half:]) > max(counts[:half]):
                grown.append(f"{what} have grown: {counts}")
        if self.slope_mb >= FLAT_MB:
            grown.append(f"memory grows by {self.slope_mb:.2f} MB in 100 runs")
        return grown


# ---------------------------------------------------------------- the runs
class Rows(Dataset[Tensor]):
    """The tensor, one sample at a time."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return torch.full((2,), number / SAMPLES)


class Listener(flowdp.Callback):
    """Receives everything and keeps nothing."""

    def on_round(self, record: flowdp.RoundEnded) -> None:
        assert record.round >= 0

    def on_epoch_end(self, metrics: flowdp.EpochMetrics) -> None:
        assert metrics.epoch >= 0

    def on_checkpoint(self, checkpoint: Any) -> None:
        assert checkpoint.state_dict


def _loss(fails_at: int | None) -> Callable[[nn.Module, Tensor], Tensor]:
    calls = 0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if fails_at is not None and calls >= fails_at:
            raise ValueError("injected")
        return F.mse_loss(model(batch), batch.sum(1, keepdim=True))

    return loss


def _trainer(draw: random.Random, ending: str, folders: Path | None) -> flowdp.Trainer:
    devices, policy = draw.randint(1, 4), draw.choice(POLICIES)
    reads = draw.choices(("tensor", "dataset", "processes"), (10, 10, 1))[0]
    dataset: Any = torch.rand(SAMPLES, 2) if reads == "tensor" else Rows()
    if reads == "processes":
        dataset = DataLoader(Rows(), batch_size=BATCH_SIZE, num_workers=1)
    is_endless = ending in ENDLESS
    return flowdp.Trainer(
        nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)),
        lambda params: torch.optim.AdamW(params, 1e-3),
        _loss(draw.randint(1, 300) if "failure" in ending else None),
        dataset=dataset,
        per_device_batch_size=None if reads == "processes" else BATCH_SIZE,
        epochs=None if is_endless else draw.randint(1, 12),
        max_steps=10**9 if is_endless else None,
        devices=["cpu"] * devices,
        policy=policy,
        runtime=flowdp.RuntimeOptions(backend=draw.choice(("auto", "local", "cpu"))),
        evaluation=torch.rand(10, 2) if draw.random() < 0.3 else None,
        checkpoint=None if folders is None else folders / policy,
        resume=folders is not None,
        callbacks=[Listener()] if draw.random() < 0.5 else [],
        progress=False,
    )


# ---------------------------------------------------------------- actions and endings
def _act(draw: random.Random, run: flowdp.Run, *, saves: bool) -> str:
    actions = ["set_lr", "snapshot", "status", "dump", "pause", "paused", "record", "poll", "wait"]
    action = draw.choice(actions + ["checkpoint"] * saves)
    match action:
        case "set_lr":
            run.set_lr(draw.uniform(1e-4, 1e-2))
        case "snapshot":
            run.snapshot().load_into(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
        case "status":
            str(run.status())
        case "dump":
            run.dump()
        case "pause":
            run.pause()
            run.unpause()
        case "paused":
            with run.paused():
                run.status()
        case "record":
            next(run.metrics("round"), None)
        case "poll":
            run.poll_metrics()
        case "wait":
            with suppress(TimeoutError):
                run.join(draw.uniform(0.0, 0.02))
        case "checkpoint":
            run.checkpoint()
    return action


def _end(draw: random.Random, run: flowdp.Run, ending: str) -> None:
    """End the run in the given way; raises an error if it does not end so."""
    if draw.random() < 0.3 and ending in ("stop", "ctrl-c", "exception"):
        run.pause()  # not unpaused
    match ending:
        case "join":
            assert run.join().global_step > 0
        case "stop":
            run.stop()
            assert run.join().interrupted
        case "ctrl-c":
            interrupter = threading.Timer(draw.uniform(0.0, 0.05), signal.raise_signal, (signal.SIGINT,))
            interrupter.daemon = True
            with suppress(KeyboardInterrupt):
                interrupter.start()
                run.join()
                interrupter.join()
                raise AssertionError("a Ctrl-C was ignored")
            if not run.done:  # it came before join()
                run.stop()
                run.join()
            assert run.state is not None
            assert run.state.interrupted
        case "exception":
            with suppress(ZeroDivisionError), run:
                _ = 1 / 0
            assert run.done
        case "failure":
            run.join()
            raise AssertionError("join() raised nothing")


def _one(draw: random.Random, report: Report, folders: Path) -> None:
    ending = draw.choice(ENDINGS)
    saves = draw.random() < 0.4
    report.endings[ending] += 1
    run = None
    try:
        run = _trainer(draw, ending, folders if saves else None).start()
        for _ in range(draw.randint(0, 4)):
            report.actions[_act(draw, run, saves=saves)] += 1
        _end(draw, run, ending)
    except flowdp.StepError as error:
        if "failure" not in ending:
            raise
        error.__traceback__ = None
    except (flowdp.OptionError, flowdp.CheckpointError) as error:
        # Another batch size inside an epoch, or fewer epochs than in the checkpoint.
        if run is not None or not re.search("inside an epoch it must stay|has begun", str(error)):
            raise
        report.endings["refused"] += 1
    finally:
        del run


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Keep logs and expected tracebacks off the terminal; other errors of threads are collected."""
    raised: list[str] = []

    def unhandled(args: Any) -> None:
        if not isinstance(args.exc_value, flowdp.StepError):
            raised.append(f"{args.thread}: {args.exc_value!r}")

    log, before = logging.getLogger("flowdp"), threading.excepthook
    level, handler = log.level, signal.getsignal(signal.SIGINT)
    log.setLevel(logging.CRITICAL)
    threading.excepthook = unhandled
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield raised
    finally:
        log.setLevel(level)
        threading.excepthook = before
        signal.signal(signal.SIGINT, handler)


# ---------------------------------------------------------------- leftovers
def _children() -> set[str]:
    """Process ids of this process's children."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found |= set((task / "children").read_text().split())
    return found


def _left(threads: set[threading.Thread], children: set[str]) -> list[str]:
    end_s = time.monotonic() + LEAVE_S
    for thread in set(threading.enumerate()) - threads:
        with suppress(RuntimeError):  # a Ctrl-C came during its start
            thread.join(max(0.0, end_s - time.monotonic()))
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    return left + [f"process {child}" for child in _children() - children]


def _count(runs: int) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        runs=runs,
        threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")),
        objects=sum(str(type(one).__module__).startswith("flowdp") for one in gc.get_objects()),
        memory_mb=pages * os.sysconf("SC_PAGESIZE") / 1e6,
    )


def soak(
    seconds: float = math.inf, runs: int | None = None, seed: int = 0, every: int = PER_SAMPLE
) -> Report:
    """Start runs until the time or their number is reached, and count the leftovers.

    Args:
        seconds: Time in which new runs begin.
        runs: Number of runs.
        seed: Seed of all draws.
        every: Runs between two samples.

    Threads:
        The main one: only it receives a Ctrl-C.
    """
    draw, report, end_s = random.Random(seed), Report(), time.monotonic() + seconds
    threads, children = set(threading.enumerate()), _children()
    with tempfile.TemporaryDirectory() as folder, _quiet() as raised:
        number = 0
        while time.monotonic() < end_s and (runs is None or number < runs):
            try:
                # Runs with checkpoints resume each other.
                _one(draw, report, Path(folder) / str(number // every))
            except BaseException as error:
                report.faults.append(f"run {number}: {type(error).__name__}: {str(error)[:500]}")
            if left := _left(threads, children):
                report.faults.append(f"run {number}: {left} are left")
                threads |= set(threading.enumerate())
                children |= _children()
            number += 1
            if number % every == 0:
                report.samples.append(_count(number))
        report.faults += raised
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, and print the table and the verdict; returns 1 if there was a fault or anything has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="time to begin new runs in (%(default)s)")
    parser.add_argument("--runs", type=int, help="at most this many")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write the record to bench/results")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    report = soak(options.seconds, options.runs, options.seed)
    took_s = time.perf_counter() - started
    print("  runs  threads  files  objects  memory MB")
    for one in report.samples:
        counts = f"{one.runs:>6,}{one.threads:>9,}{one.files:>7,}{one.objects:>9,}"
        print(f"{counts}{one.memory_mb:>11,.1f}")
    for title, counter in (("ended", report.endings), ("done", report.actions)):
        print(f"{title}: " + ", ".join(f"{what} {count:,}" for what, count in sorted(counter.items())))
    verdict = report.verdict() or [f"flat: memory {report.slope_mb:+.2f} MB in 100 runs"]
    print(f"{report.endings.total():,} runs in {took_s:.1f} s, {len(report.faults):,} faults; {verdict[0]}")
    for line in verdict[1:] + report.faults:
        print(line)
    if options.save:
        figures = {"runs": report.endings.total(), "faults": len(report.faults), "slope_mb": report.slope_mb}
        more = {"samples": [vars(one) for one in report.samples], "verdict": verdict}
        save_record("soak", [], figures=figures, save=True, more=more)
    return 1 if report.faults or report.verdict() else 0


if __name__ == "__main__":
    sys.exit(main())
