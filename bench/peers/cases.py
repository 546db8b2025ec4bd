"""Sides of the comparison, and one measurement of each kind."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.peers.job import FAILURE, Order
from bench.peers.process import Ended, run
from bench.peers.tasks import TASKS

__all__ = ["KINDS", "SIDES", "SLOWDOWN", "Measured", "Side", "measure", "throughput", "wait_us"]

SLOWDOWN = 2.5
WARM_UP = 0.25  # of the samples of a run
FAILS_AT = 30
LIMIT_S = 120.0
KINDS = ("equal", "one", "unequal", "failure")
"""Two equal devices, one device, two at 1 : 2.5, an error on device 1."""

# The same for all: one thread a process or device, and the thresholds that flowdp sets otherwise.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


@dataclass(frozen=True)
class Side:
    """A library, and how its program is started.

    Attributes:
        label: Name in tables.
        module: Program in `bench.peers.sides`.
        torchrun: Started by torchrun, a process per device; Lightning and Fabric start theirs themselves.
        variant: Policy of the Trainer.
        devices: Devices that compute; 1 for those that use no second one on a CPU.
        ddp_maths: Step as that of DDP: one gradient of the whole batch.
        kinds: Measurements in which it takes part.
    """

    label: str
    module: str
    torchrun: bool = False
    variant: str = ""
    devices: int = 2
    ddp_maths: bool = True
    kinds: Sequence[str] = ("equal", "unequal", "failure")


SIDES = {
    "hand": Side("loop by hand, one device", "hand", devices=1, kinds=("one",)),
    "accelerate-1": Side("Accelerate, one device", "accelerate", devices=1, kinds=("one",)),
    "lightning-1": Side("Lightning, one device", "lightning", devices=1, kinds=("one",)),
    "setup-1": Side("flowdp setup, one device", "setup", devices=1, kinds=("one",)),
    "exact-1": Side("flowdp exact, one device", "trainer", variant="exact", devices=1, kinds=("one",)),
    "data_parallel": Side(
        "one plain process (nn.DataParallel)", "data_parallel", devices=1, kinds=("equal",)
    ),
    "ddp": Side("DistributedDataParallel", "ddp", torchrun=True),
    "accelerate": Side("Accelerate", "accelerate", torchrun=True),
    "lightning": Side("Lightning", "lightning"),
    "fabric": Side("Fabric", "fabric"),
    "setup": Side("flowdp setup", "setup"),
    "exact": Side("flowdp exact", "trainer", variant="exact"),
    "sync": Side("flowdp sync", "trainer", variant="sync", ddp_maths=False),
    "cadence": Side("flowdp cadence", "trainer", variant="cadence", ddp_maths=False),
    "async": Side("flowdp async", "trainer", variant="async", ddp_maths=False),
}
"""By the names of `--side`."""


@dataclass(frozen=True)
class Measured:
    """One run of a side.

    Attributes:
        turn: Round of the bench; ratios are taken inside a round.
        kind: One of `KINDS`.
        model: Name of the task.
        side: Name of the side.
        rate: Samples per second of all devices together, after the warm-up; 0 in a run that fails.
        first_step_s: From the launch of the program to the end of the first optimizer step; 0 as above.
        peak_mb: Memory of all processes; only of a run that fails, because sampling it takes time.
        shown_s: From the exception to its text in the output of the program; None: it was never there.
        exit_s: From the exception to the exit of the program; None: it had not ended after two minutes.
        left: Processes that lived 2 seconds after the exit.
        aborted: Whether the program ended with an error behind its last step.
    """

    turn: int
    kind: str
    model: str
    side: str
    rate: float = 0.0
    first_step_s: float = 0.0
    peak_mb: float = 0.0
    shown_s: float | None = None
    exit_s: float | None = None
    left: int = 0
    aborted: bool = False


Marks = dict[tuple[str, int], list[tuple[float, int]]]


def measure(turn: int, kind: str, model: str, name: str, *, wait: float = 0.0, part: float = 1.0) -> Measured:
    """Run a side once, in fresh processes.

    Args:
        turn: Round of the bench.
        kind: One of `KINDS`.
        model: Name of the task.
        name: Name of the side.
        wait: Wait of device 1 for a sample, in microseconds; used where the devices are unequal.
        part: Part of the task's steps.

    Raises:
        RuntimeError: The program failed, or did not in a run in which it should.
    """
    side, fails = SIDES[name], kind == "failure"
    with tempfile.TemporaryDirectory(prefix="flowdp-peers-") as folder:
        order = Order(
            model,
            # nn.DataParallel gets the batch of two devices, and computes it on one.
            devices=2 if name == "data_parallel" else side.devices,
            # A run that is to fail does not end before, however slow device 1 is.
            steps=TASKS[model].steps * 100 if fails else max(40, round(TASKS[model].steps * part)),
            folder=folder,
            wait_us=wait if kind == "unequal" else 0.0,
            fails_at=FAILS_AT if fails else 0,
            variant=side.variant,
        )
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"] if side.torchrun else []
        command = [
            sys.executable,
            *(["-m", *launcher] if launcher else []),
            "-m",
            f"bench.peers.sides.{side.module}",
        ]
        ended = run(
            command,
            {**ENVIRONMENT, **order.environment()},
            limit_s=LIMIT_S,
            awaited=FAILURE,
            memory=fails,
        )
        if fails:
            return _failed(turn, model, name, Path(folder), ended)
        marks = read_marks(Path(folder))
        # Gloo aborts now and then as a process ends; the steps were all taken by then.
        if ended.code != 0 and not all_taken(marks, side.devices, order.steps):
            raise RuntimeError(f"{name} on {model} ended with {ended.code}:\n{ended.output[-4000:]}")
        # One thread calls the loss of setup, and under "exact" one device may have trained all.
        if len(marks) != side.devices and name not in ("setup", "exact"):
            raise RuntimeError(f"{name} on {model}: {len(marks)} devices have told of their steps")
    first = max(times[1][0] for times in marks.values()) - ended.launched_s
    return Measured(
        turn,
        kind,
        model,
        name,
        rate=throughput(marks),
        first_step_s=first,
        left=ended.left,
        aborted=ended.code != 0,
    )


def _failed(turn: int, model: str, name: str, folder: Path, ended: Ended) -> Measured:
    raised = folder / "raised"
    if ended.code == 0 or not raised.exists():
        raise RuntimeError(
            f"{name} on {model} was to fail, and ended with {ended.code}:\n{ended.output[-4000:]}"
        )
    at = float(raised.read_text())
    return Measured(
        turn,
        "failure",
        model,
        name,
        peak_mb=ended.peak_mb,
        shown_s=None if ended.shown_s is None else ended.shown_s - at,
        exit_s=None if ended.code is None else ended.ended_s - at,
        left=ended.left,
    )


def read_marks(folder: Path) -> Marks:
    """Times and samples of the forwards of each thread of each process."""
    marks: Marks = defaultdict(list)
    for file in folder.glob("marks-*.json"):
        for thread, at, samples in json.loads(file.read_text()):
            marks[file.name, thread].append((at, samples))
    return {owner: times for owner, times in marks.items() if len(times) > 1}


def all_taken(marks: Marks, devices: int, steps: int) -> bool:
    """Whether each device has told of all its steps."""
    return len(marks) == devices and all(len(times) >= steps for times in marks.values())


def throughput(marks: Marks) -> float:
    """Samples per second of all devices together, between warm-up and the last step of the first to end.

    A device's samples between two of its steps are spread evenly over that time, so no step counts whole at
    an edge, and a device may be idle for as long as it likes: "exact" trains short windows on one alone.

    Args:
        marks: Time at the beginning of a forward and its samples, in order, for each device.
    """
    everything = sorted(mark for times in marks.values() for mark in times)
    total, seen, begin = sum(samples for _, samples in everything), 0, everything[0][0]
    for at, samples in everything:
        if seen >= WARM_UP * total:
            begin = at
            break
        seen += samples
    last = everything[-1][0]
    # Not the end of one that has been idle for long, nor the tail in which one device trains alone.
    end = min(times[-1][0] for times in marks.values() if times[-1][0] >= begin + 0.9 * (last - begin))
    trained = 0.0
    for times in marks.values():
        before = np.cumsum([0, *(samples for _, samples in times[:-1])])
        at_begin, at_end = np.interp([begin, end], [at for at, _ in times], before)
        trained += float(at_end - at_begin)
    return trained / (end - begin)


def wait_us(model: str, steps: int = 40) -> float:
    """Wait for a sample, in microseconds, that makes a device 2.5 times slower in forward and backward.

    Processor time of one thread, so that other programs do not lengthen it.
    """
    torch.set_num_threads(1)
    task = TASKS[model]
    network, dataset = task.model(), task.dataset()
    batch = torch.utils.data.default_collate([dataset[index] for index in range(task.batch_size)])
    took = []
    for _ in range(steps):
        began = time.thread_time()
        task.loss(network, batch).backward()
        took.append(time.thread_time() - began)
        network.zero_grad()
    return (SLOWDOWN - 1) * sorted(took)[steps // 2] / task.batch_size * 1e6


def as_record(measured: Measured) -> dict[str, Any]:
    """Measurement as JSON values, without those that its kind does not have."""
    return {key: value for key, value in asdict(measured).items() if value not in (0.0, None)} | {
        "turn": measured.turn
    }
