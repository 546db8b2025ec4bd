"""Lives of a run: forked processes, each of which resumes after the one before was killed.

The run's model counts in an integer buffer how often each sample was trained in each epoch. The mean of
integers is their maximum, so no weights change the counts, and batches lost with a life are not in them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # an optimizer imports it at its first use; not in every life
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import flowdp
from bench.cadences import cadence_for
from flowdp.checkpoint.file import UNFINISHED
from flowdp.options import Policy

__all__ = ["BATCH_SIZE", "DEVICES", "EPOCHS", "SAMPLES", "Aim", "Plan", "live", "trainer"]

SAMPLES, BATCH_SIZE, EPOCHS, DEVICES = 90, 4, 3, 2  # the last batch of an epoch is short
STEP_S = 0.002
HANG_S = 30.0


@dataclass(frozen=True)
class Plan:
    """A run: its policy, how often it writes checkpoints, and how it reads."""

    policy: Policy
    every: float = 1
    unit: Any = "step"
    reads: str = "tensors"


@dataclass(frozen=True)
class Aim:
    """When a life is killed: after `after_s`, or at or after a point of write number `write`."""

    kind: str
    write: int = 0
    after_s: float = 0.0


# ---------------------------------------------------------------- model and trainer
class Counting(nn.Module):
    """A layer, and a count per sample and epoch, of shape (EPOCHS, SAMPLES)."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(EPOCHS, SAMPLES, dtype=torch.int64))

    def forward(self, numbers: Tensor, x: Tensor) -> Tensor:
        worker = flowdp.current_worker()
        assert worker is not None
        self.seen[worker.epoch, numbers] += 1
        out: Tensor = self.layer(x)
        return out


class Rows(Dataset[Any]):
    """The tensors, one sample at a time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return tuple(tensor[number] for tensor in self.tensors)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    time.sleep(STEP_S)
    numbers, x = batch
    return F.mse_loss(model(numbers, x), x.sum(1, keepdim=True))


def trainer(plan: Plan, folder: Path, **options: Any) -> flowdp.Trainer:
    """The trainer of each life."""
    torch.manual_seed(0)
    tensors = (torch.arange(SAMPLES), torch.randn(SAMPLES, 4))
    return flowdp.Trainer(
        Counting(),
        lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
        _loss,
        dataset=tensors if plan.reads == "tensors" else Rows(tensors),
        per_device_batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        devices=["cpu"] * DEVICES,
        policy=plan.policy,
        runtime=flowdp.RuntimeOptions(
            partition_ratios=[0.5] * DEVICES if plan.policy == "exact" else None,
            tune_process=False,  # a fork has no pool of the parent's main thread
        ),
        cadence=cadence_for(plan.policy, anchor=2, max_anchor=3),
        checkpoint=flowdp.CheckpointOptions(folder, every=plan.every, unit=plan.unit),
        resume=True,
        **options,
    )


# ---------------------------------------------------------------- one life
def _child(plan: Plan, folder: Path, aim: Aim, sink: int) -> NoReturn:
    """Train to the end, if not killed, and send the results."""

    def say(**what: Any) -> None:
        os.write(sink, json.dumps(what).encode() + b"\n")

    class Refusals(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(refused=record.getMessage())

    try:
        torch.set_num_threads(1)
        log = logging.getLogger("flowdp")
        log.addHandler(Refusals(logging.WARNING))
        log.propagate = False
        sys.addaudithook(_watch(folder, aim, say))
        job = trainer(
            plan,
            folder,
            callbacks=[flowdp.OnCheckpoint(lambda one: say(saved=[one.version, one.global_step]))],
        )
        run = job.start()
        start = run._engine.config.start
        say(start=[0, 0] if start is None else [start.versions, start.global_step])
        state = run.join()
        digest = hashlib.sha256()
        for name, value in sorted(state.state_dict.items()):
            digest.update(name.encode() + value.numpy().tobytes())
        samples = [sum(part.samples for part in epoch.per_rank) for epoch in state.history]
        seen = state.state_dict["seen"]
        say(end=[state.global_step, samples, [int(seen.min()), int(seen.max())], digest.hexdigest()])
    except BaseException as error:
        say(error=f"{type(error).__name__}: {str(error)[:500]}")
    os._exit(0)


def _watch(folder: Path, aim: Aim, say: Callable[..., None]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that reports the beginning of a write, and kills the process at a point of it."""
    writes = 0

    def point(event: str, args: tuple[Any, ...]) -> str:
        if event == "open":
            name, _, flags = args
            if str(name) == str(folder):
                return "sync folder"
            if str(name).endswith(UNFINISHED):
                return "open" if flags & os.O_CREAT else "read back"
        elif event == "os.rename" and str(args[0]).startswith(str(folder)):
            return "rename"
        elif event == "os.remove" and str(args[0]).startswith(str(folder)):
            return "clean up" if str(args[0]).endswith(UNFINISHED) else "remove old"
        return ""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal writes
        if event not in ("open", "os.rename", "os.remove"):
            return
        at = point(event, args)
        if at == "open":
            writes += 1
            say(writing=writes)
        if at and at == aim.kind and writes >= aim.write:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def live(plan: Plan, folder: Path, aim: Aim) -> tuple[bool, list[dict[str, Any]]]:
    """Fork a life and kill it where the aim says; returns whether it was killed, and its messages."""
    source, sink = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(source)
        _child(plan, folder, aim, sink)
    os.close(sink)
    began_s = time.perf_counter()
    due_s = began_s + (aim.after_s if aim.kind in ("any moment", "start") else HANG_S)
    said: list[dict[str, Any]] = []
    try:
        with os.fdopen(source, "rb", buffering=0) as pipe:
            rest = b""
            while select.select([pipe], [], [], max(0.0, due_s - time.perf_counter()))[0]:
                fresh = pipe.read(1 << 16)
                if not fresh:
                    break
                *lines, rest = (rest + fresh).split(b"\n")
                said += map(json.loads, lines)
                if aim.kind == "write" and any(one.get("writing", 0) >= aim.write for one in said):
                    due_s = time.perf_counter() + aim.after_s
                    aim = Aim("written")
            os.kill(child, signal.SIGKILL)
            while fresh := pipe.read(1 << 16):  # sent before it died
                *lines, rest = (rest + fresh).split(b"\n")
                said += map(json.loads, lines)
    finally:
        _, status = os.waitpid(child, 0)
    has_ended = any("end" in one or "error" in one for one in said)
    if not has_ended and time.perf_counter() - began_s >= HANG_S:
        said.append({"error": f"no end after {HANG_S:g} s"})
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        said.append({"error": f"died of {signal.Signals(os.WTERMSIG(status)).name}"})
    return os.WIFSIGNALED(status) and not has_ended, said
