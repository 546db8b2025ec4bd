"""Faults for tiny runs: their kind, place, rank and step.

A `Fault` is built into every object that a user passes to a run (loss, optimizer, dataset, collate function,
callbacks, model factory, evaluation), and strikes at the place given by its `Case`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import flowdp
from bench.cadences import cadence_for
from flowdp.options import Backend, Policy

__all__ = ["ALL", "ANY", "EPOCHS", "SAMPLES", "STALL_TIMEOUT_S", "Case", "Fault", "Injected", "all_cases"]

SAMPLES, BATCH_SIZE, EPOCHS, EVALUATED = 94, 4, 2, 10  # so that the last part of no window is a single sample
STALL_TIMEOUT_S = 0.3
HELD_S = 60.0
"""A gate that is not opened opens by itself after this time."""

POLICIES: tuple[Policy, ...] = ("sync", "cadence", "async", "exact")
BACKENDS: tuple[Backend, ...] = ("local", "cpu")
IN_A_STEP = ("forward", "backward", "step")
WHENS = ("first", "middle", "last")
ANY, ALL = -1, -2


@dataclass(frozen=True)
class Case:
    """One fault in one run.

    Attributes:
        fault: "error", "exit" (SystemExit), "stall", "nan" or "oom".
        site: Place of the fault.
        policy: Policy of the run.
        devices: Number of devices.
        backend: Backend of the run.
        when: At the first, a middle or the last step, call or device.
        rank: Rank of the fault; ANY: the first to reach it; ALL: each, from there on.
        asked: "continue", "quarantine" or "raise", options of flowdp; "ends": the callback's error ends the
            run; "held": a callback does not return meanwhile.
    """

    fault: str
    site: str
    policy: Policy
    devices: int
    backend: Backend
    when: str
    rank: int = ANY
    asked: str = ""

    @property
    def name(self) -> str:
        """Name of the case, for `--case`."""
        rank = {ANY: "any", ALL: "all"}.get(self.rank, str(self.rank))
        words = (self.fault, self.site, self.policy, self.devices, self.backend, self.when, rank, self.asked)
        return "-".join(map(str, words)).rstrip("-")

    @property
    def waits(self) -> bool:
        """Whether it mostly waits, so that several can run side by side."""
        return self.fault == "stall" or self.asked == "held"


def all_cases() -> list[Case]:
    """Every fault at every place of every kind of run."""
    runs = product(POLICIES, (1, 2, 3, 4), BACKENDS)
    return [
        Case(fault, site, policy, devices, backend, *where)
        for policy, devices, backend in runs
        for fault, site, *where in _faults(policy, devices)
    ]


def _faults(policy: Policy, devices: int) -> Iterator[tuple[Any, ...]]:
    """Faults of one kind of run: the fields of the cases without those of the run."""
    goes_on = devices > 1 and policy in ("sync", "cadence")
    every_rank = [*product(("first", "middle"), range(devices)), ("last", ANY)]
    last_rank = [("first", devices - 1), ("middle", devices - 1), ("last", ANY)]
    for site in IN_A_STEP:
        each_rank, one_rank = every_rank, last_rank
        if policy == "exact" and site == "step":  # one optimizer steps, in the thread of any rank
            each_rank = one_rank = [(when, ANY) for when in WHENS]
        yield from (("error", site, *where) for where in each_rank)
        yield from (("error", site, *where, "held") for where in one_rank)
        yield from (("error", site, *where, "continue") for where in each_rank if goes_on)
        yield from (("oom", site, *where) for where in each_rank)
        yield from ((fault, site, *where) for fault in ("exit", "stall") for where in one_rank)
    for site, fault in product(("getitem", "collate", "eval"), ("error", "exit", "stall")):
        yield from ((fault, site, when) for when in WHENS)
    for when in WHENS:
        yield from (("stall", "callback", when),)
        yield from ((fault, "callback", when) for fault in ("error", "exit"))
        yield from ((fault, "callback", when, ANY, "ends") for fault in ("error", "exit"))
        yield from ((fault, "factory", when) for fault in ("error", "exit"))
    yield from product(("error", "exit", "stall"), ("on_checkpoint",), ("first", "last"))
    for asked in ("quarantine", "raise"):
        yield from (("nan", "forward", *where, asked) for where in every_rank)
    yield from (("nan", "forward", when, ALL, "quarantine") for when in ("first", "middle"))


class Injected(Exception):
    """The error raised by a fault."""


class Fault:
    """A case's fault, and its run.

    Args:
        case: The case.
        folder: Folder for checkpoints; None: the run writes none.

    Attributes:
        struck_s: Time of the fault (of several ranks, the last); None before.
        raised: The error that it raised.
        rank: Its rank, if it was in a rank's step.
        local_step: Steps of that rank before.
        epoch: Epoch of that rank's step.
        samples: Indices of the batch, if known.
        gate: Holds a stall, and a held callback.
    """

    def __init__(self, case: Case, folder: Path | None = None) -> None:
        self.case = case
        self.struck_s: float | None = None
        self.raised: BaseException | None = None
        self.rank: int | None = None
        self.local_step: int | None = None
        self.epoch: int | None = None
        self.samples: tuple[int, ...] = ()
        self.gate = threading.Event()
        self._folder = folder
        self._lock = threading.Lock()  # makes it strike once; guards the counts
        self._calls: Counter[str] = Counter()
        self._struck: set[int] = set()  # ranks
        self._batches: dict[int, tuple[int, ...]] = {}  # last batch of each rank

    def trainer(self) -> flowdp.Trainer:
        """A run of two epochs with this fault."""
        case = self.case
        callbacks: list[flowdp.Callback] = []
        if case.site == "callback" or case.asked == "held":
            callbacks.append((Ending if case.asked == "ends" else Watching)(self))
        torch.manual_seed(0)
        x = torch.randn(SAMPLES, 2)
        # If the run continues without a rank, its batches are gathered again, or were kept when
        # they were read.
        is_read = case.site in ("getitem", "collate") or (case.asked, case.backend) == ("continue", "cpu")
        if case.site == "on_checkpoint":
            callbacks.append(flowdp.OnCheckpoint(self._on_checkpoint))
        evaluated = (torch.arange(EVALUATED), x[:EVALUATED])
        is_evaluated = case.site == "eval"
        return flowdp.Trainer(
            self._model if case.site == "factory" else nn.Linear(2, 1),
            lambda params: Stepping(self, params),
            self._loss,
            dataset=Rows(self, x) if is_read else (torch.arange(SAMPLES), x),
            reading=flowdp.ReadingOptions(
                collate_fn=self._collate if case.site == "collate" else None, shuffle=False
            ),
            per_device_batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            devices=["cpu"] * case.devices,
            policy=case.policy,
            runtime=flowdp.RuntimeOptions(
                backend=case.backend,
                # By speed, a part might be a single sample, which cannot be halved.
                partition_ratios=[1 / case.devices] * case.devices if case.policy == "exact" else None,
                # These run side by side, and the settings are those of the process.
                tune_process=not case.waits,
            ),
            cadence=cadence_for(case.policy, anchor=2, max_anchor=3),
            evaluation=flowdp.EvaluationOptions(evaluated, step=self._evaluate, sanity_check=0)
            if is_evaluated
            else None,
            checkpoint=self._folder,
            callbacks=callbacks,
            failures=flowdp.FailureOptions(
                stall_timeout=STALL_TIMEOUT_S,
                on_failure="continue" if case.asked == "continue" else "raise",
                on_nan="raise" if case.asked == "raise" else "quarantine",
                check_loss=False,  # the faults are in steps
            ),
            progress=False,
        )

    # ---------------------------------------------------------------- places
    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        assert worker is not None
        numbers, x = batch
        self._batches[worker.rank] = tuple(numbers.tolist())
        is_bad = self.in_step("forward", worker)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        out: Tensor = Backward.apply(loss, self, worker)  # type: ignore[no-untyped-call]
        return out * float("nan") if is_bad else out

    def in_step(self, site: str, worker: Any) -> bool:
        """A place in a rank's step; returns whether its loss becomes NaN."""
        case, rank = self.case, worker.rank
        if case.site != site or case.rank not in (rank, ANY, ALL):
            return False
        if case.when == "first":
            # Under "exact" the optimizer steps at the gate, and the step is counted by then.
            is_there = worker.local_step == (case.policy == "exact" and site == "step")
        elif case.when == "middle":
            is_there = worker.epoch == EPOCHS // 2
        else:
            window = BATCH_SIZE * (case.devices if case.policy == "exact" else 1)
            begin = (SAMPLES - 1) // window * window
            is_there = worker.epoch == EPOCHS - 1 and max(self._batches[rank]) >= begin
        return (is_there or rank in self._struck) and self._strike(worker)

    def read(self, site: str, numbers: Sequence[int]) -> None:
        """A place in reading: these samples are read, in order."""
        first, last = 0 in numbers, SAMPLES - 1 in numbers
        epoch = self._count(f"{site} begins") if first else self._calls[f"{site} begins"] - 1
        places = {"first": first and epoch == 0, "middle": first, "last": last}
        if self.case.site == site and places[self.case.when] and (self.case.when == "first" or epoch == 1):
            self.samples = tuple(numbers)
            self._strike()

    def _collate(self, samples: list[Any]) -> Any:
        numbers, x = zip(*samples, strict=True)
        self.read("collate", numbers)
        return torch.tensor(numbers), torch.stack(x)

    def _evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        each = -(-EVALUATED // BATCH_SIZE)
        if self._count("eval") == {"first": 0, "middle": each, "last": EPOCHS * each - 1}[self.case.when]:
            self._batches = {}
            self._strike(flowdp.current_worker())
        return {"mean": model(batch[1]).mean()}

    def _model(self) -> nn.Module:
        devices = self.case.devices
        if (
            self._count("factory")
            == {"first": 0, "middle": devices // 2, "last": devices - 1}[self.case.when]
        ):
            self._strike()
        return nn.Linear(2, 1)

    def _on_checkpoint(self, _checkpoint: flowdp.Checkpoint) -> None:
        if self._count("on_checkpoint") == {"first": 0, "last": EPOCHS - 1}[self.case.when]:
            self._strike()

    def called_back(self, when: str) -> None:
        """A place in a callback."""
        if self.case.asked == "held":
            self.gate.wait(HELD_S)
        elif self.case.when == when:
            self._strike()

    # ---------------------------------------------------------------- striking
    def _count(self, what: str) -> int:
        """Number of earlier calls."""
        with self._lock:
            self._calls[what] += 1
            return self._calls[what] - 1

    def _strike(self, worker: Any = None) -> bool:
        """Strike, if not done yet; returns whether the loss becomes NaN."""
        case = self.case
        with self._lock:
            rank = ANY if worker is None else worker.rank
            if self.struck_s is not None and case.rank != ALL:
                return False
            if rank not in self._struck:
                self._struck.add(rank)
                self.struck_s = perf_counter()
        if worker is not None:
            self.rank, self.epoch, self.local_step = rank, worker.epoch, worker.local_step
            self.samples = self._batches.get(rank, ())
        if case.fault == "stall":
            self.gate.wait(HELD_S)
        elif case.fault != "nan":
            kinds = {"error": Injected, "exit": SystemExit, "oom": torch.OutOfMemoryError}
            self.raised = kinds[case.fault](f"injected by {case.name}")
            raise self.raised
        return case.fault == "nan"


# ---------------------------------------------------------------- the objects that hold it
class Backward(torch.autograd.Function):
    """A place in the backward of a loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, fault: Fault, worker: Any) -> Tensor:
        ctx.fault, ctx.worker = fault, worker
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.fault.in_step("backward", ctx.worker)
        return gradient, None, None


class Stepping(torch.optim.SGD):
    """A place in the optimizer's step."""

    def __init__(self, fault: Fault, params: Any) -> None:
        super().__init__(params, 0.05)
        self.fault = fault

    def step(self, closure: Any = None) -> Any:
        self.fault.in_step("step", flowdp.current_worker())
        return super().step(closure)


class Rows(Dataset[Any]):
    """A place in the dataset."""

    def __init__(self, fault: Fault, x: Tensor) -> None:
        self.fault, self.x = fault, x

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        self.fault.read("getitem", (number,))
        return number, self.x[number]


class Watching(flowdp.Callback):
    """Places in a callback."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_start(self, _run: Any) -> None:
        self.fault.called_back("first")

    def on_epoch_end(self, _metrics: flowdp.EpochMetrics) -> None:
        self.fault.called_back("middle")

    def on_train_end(self, _state: Any) -> None:
        self.fault.called_back("last")


class Ending(Watching):
    """A callback whose error ends the run."""

    ends_run: ClassVar[bool] = True
