"""Records of options, checked when they are made.

Bad values raise `OptionError` here, before a thread starts; nothing below this layer checks them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from flowdp.errors import OptionError
from flowdp.validators import (
    check_flag,
    check_fraction,
    check_function,
    check_int,
    check_number,
    is_int,
    is_number,
    one_of,
)

__all__ = [
    "Backend",
    "Buffers",
    "CadenceOptions",
    "CaptureOptions",
    "CheckpointOptions",
    "CheckpointUnit",
    "FailureOptions",
    "LoopBackend",
    "MachineOptions",
    "OnFailure",
    "OnNan",
    "OuterOptions",
    "Payload",
    "Policy",
    "Precision",
    "ProcessTuning",
    "ReadingOptions",
    "RuntimeOptions",
    "SchedulerUnit",
    "StreamPart",
]

Policy = Literal["sync", "cadence", "async", "exact"]
Backend = Literal["auto", "nccl", "local", "cpu"]
LoopBackend = Literal["auto", "nccl", "local"]
Precision = Literal["32", "bf16", "fp16"]
SchedulerUnit = Literal["step", "epoch"]
OnFailure = Literal["raise", "continue"]
OnNan = Literal["quarantine", "raise"]
Buffers = Literal["broadcast", "average"]
Payload = Literal["full", "bf16"]
StreamPart = Literal["whole", "part"]
CheckpointUnit = Literal["epoch", "step", "minute"]


@dataclass(frozen=True, kw_only=True)
class CadenceOptions:
    """Options of the cadence: how often the replicas are averaged.

    ::

        CadenceOptions()                           # anchor 10, averaging kept below 10 % of compute
        CadenceOptions(anchor=4, max_anchor=4)     # the slowest rank always takes 4 steps a round
        CadenceOptions(max_batch_diff=0)           # lockstep: one step of every rank, then the mean
        CadenceOptions(speed_hint=(1, 2.5))        # rank 1 is the slow one, the others 2.5 times faster

    Attributes:
        anchor: Steps of the slowest rank in a round, at first and at least.
        overhead_target: Averaging time over compute time to stay below, 0.01 to 0.5.
        max_anchor: Most steps of the slowest rank in a round. None is 200; 0 switches windows off: every
            step is averaged, as under `policy="sync"`.
        max_batch_diff: Most steps by which a rank that begins one may lead the slowest that can still move,
            counted from the last mean that both have. 0 is lockstep; None is no limit in planned rounds and
            the automatic overshoot limit under `policy="async"`.
        speed_hint: (slow rank, ratio >= 1): how many times faster the other ranks are, until measured.
        divergence_threshold: Relative distance of a replica from the mean above which three rising
            values in a row hold the anchor; above twice this value they halve it.
        divergence_guard: False switches the guard off.
    """

    anchor: int = 10
    overhead_target: float = 0.10
    max_anchor: int | None = None
    max_batch_diff: int | None = None
    speed_hint: tuple[int, float] | None = None
    divergence_threshold: float = 0.05
    divergence_guard: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        check_int("cadence.anchor", self.anchor)
        if not is_number(self.overhead_target) or not 0.01 <= self.overhead_target <= 0.50:
            raise OptionError(f"cadence.overhead_target must lie in 0.01..0.50, not {self.overhead_target!r}")
        check_int("cadence.max_anchor", self.max_anchor, least=0, optional=True)
        check_int("cadence.max_batch_diff", self.max_batch_diff, least=0, optional=True)
        check_number("cadence.divergence_threshold", self.divergence_threshold, above=True)
        check_flag("cadence.divergence_guard", self.divergence_guard)
        if self.speed_hint is not None:
            self._check_hint(self.speed_hint)

    @staticmethod
    def _check_hint(hint: object) -> None:
        if not isinstance(hint, tuple) or len(hint) != 2 or not is_int(hint[0]) or hint[0] < 0:
            raise OptionError(f"cadence.speed_hint must be (slow_rank, ratio), not {hint!r}")
        if not is_number(hint[1]) or hint[1] < 1:
            raise OptionError(
                f"cadence.speed_hint ratio says how many times faster the others are and must be >= 1, "
                f"not {hint[1]!r}"
            )

    @property
    def windows(self) -> bool:
        """Whether rounds of several steps are wanted at all."""
        return self.max_anchor != 0 and self.max_batch_diff != 0


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Options of captured steps.

    ::

        CaptureOptions()                     # compared at captured steps 1, 2, 4, 8, ..., and every 500
        CaptureOptions(compare_every=50)     # at least every 50

    Attributes:
        compare_every: Captured steps after which one is run eagerly beside and compared, at the latest.
        graphs: Forms of a micro-batch (structure, shapes, dtypes) that get a graph; others run eagerly.
    """

    compare_every: int = 500
    graphs: int = 4

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        check_int("capture.compare_every", self.compare_every)
        check_int("capture.graphs", self.graphs)


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of checkpoints: folder, frequency, and how many are kept.

    ::

        CheckpointOptions("runs/a")                             # after every epoch, and every 10 minutes
        CheckpointOptions("runs/a", every=500, unit="step")     # after the first round that ends 500 steps on
        CheckpointOptions("runs/a", keep_best=("loss", "min"))  # the best one stays, too, as best.pt
        CheckpointOptions("runs/a", keep_best=("accuracy", "max"), top_k=3)  # and the two after it

    Attributes:
        dir: Folder of this run alone; made where it is not there.
        every: How many units lie between two checkpoints: an int, or of minutes any positive number.
        unit: What `every` counts: epochs, steps of all ranks, or minutes.
        keep_last: How many of the newest stay.
        keep_best: (monitor, "min" or "max"): the one with the best value of this metric at an epoch's end
            stays besides, and is also called best.pt.
        top_k: How many with the best values stay; of equal ones the earlier. NaN and infinities never do.
        max_minutes: Most minutes of training from one checkpoint to the next: then one is written inside an
            epoch, too, which the next one replaces. So a kill loses minutes, whatever `every` is. None: by
            `every` alone, as with unit="minute", and where no run can go on inside an epoch.
    """

    dir: str | Path
    _: KW_ONLY
    every: float = 1
    unit: CheckpointUnit = "epoch"
    keep_last: int = 3
    keep_best: tuple[str, Literal["min", "max"]] | None = None
    top_k: int = 1
    max_minutes: float | None = 10.0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        if not isinstance(self.dir, (str, Path)) or not str(self.dir):
            raise OptionError(f"checkpoint.dir must be the path of a folder, not {self.dir!r}")
        one_of("checkpoint.unit", self.unit, CheckpointUnit)
        if self.unit == "minute":
            if not is_number(self.every) or not self.every > 0:
                raise OptionError(
                    f"checkpoint.every must be a positive number of minutes, not {self.every!r}"
                )
        elif not is_int(self.every) or self.every < 1:
            raise OptionError(
                f"checkpoint.every must be an int of at least 1 with unit={self.unit!r}, not {self.every!r}"
            )
        check_int("checkpoint.keep_last", self.keep_last)
        check_number("checkpoint.max_minutes", self.max_minutes, above=True, optional=True)
        best = self.keep_best
        if best is not None and not (
            isinstance(best, tuple)
            and len(best) == 2
            and isinstance(best[0], str)
            and best[0]
            and best[1] in ("min", "max")
        ):
            raise OptionError(f"checkpoint.keep_best must be (monitor, 'min' or 'max'), not {best!r}")
        if best is not None and self.unit != "epoch":
            raise OptionError(
                f"checkpoint.keep_best={best!r} compares checkpoints of epochs' ends, and with "
                f"unit={self.unit!r} few or none are written there: use unit='epoch'"
            )
        check_int("checkpoint.top_k", self.top_k)
        if self.top_k > 1 and best is None:
            raise OptionError(
                f"checkpoint.top_k={self.top_k} needs keep_best=(monitor, 'min' or 'max') to compare by"
            )


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """Options of the outer step: a momentum on the difference between two means of the parameters.

    ::

        OuterOptions()                                         # as in SlowMo; for batch_size as the total
        OuterOptions(lr=0.7, momentum=0.9, nesterov=True)      # as in DiLoCo, for rounds of hundreds of steps

    With d = last mean - new mean and m = momentum * m + d, all replicas go on from last mean - lr * m (with
    nesterov, last mean - lr * (d + momentum * m)), which is the last mean of the next round. lr=1 and
    momentum=0 is the plain mean. Buffers and `flowdp.EMA` keep their plain means.

    Attributes:
        lr: Rate of the step, above 0. It is not the optimizer's, and no schedule changes it.
        momentum: Part of the momentum that stays from one mean to the next, at least 0 and below 1.
        nesterov: Step with Nesterov's momentum.
    """

    lr: float = 1.0
    momentum: float = 0.5
    nesterov: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        check_number("outer.lr", self.lr, above=True)
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise OptionError(f"outer.momentum must be at least 0 and below 1, not {self.momentum!r}")
        check_flag("outer.nesterov", self.nesterov)

    @property
    def is_plain(self) -> bool:
        """Whether it is the plain mean."""
        return self.lr == 1 and self.momentum == 0


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Options of reading a dataset in batches. A DataLoader has its own and refuses these.

    ::

        ReadingOptions(shuffle=False)
        ReadingOptions(num_workers=4, collate_fn=pad, drop_last=True)

    Attributes:
        shuffle: Draw an order for each epoch. None is True; an IterableDataset has its own order.
        drop_last: Leave out an epoch's last batch where it is not full. None is False.
        collate_fn: Makes a batch of a list of samples. None is torch's.
        num_workers: Processes that read the dataset. None is 0: a thread reads, in turn with the evaluation
            and other runs whose datasets have an object in an attribute in common, as an open file. It
            cannot see other readers: a loop of your own over the same dataset while the run goes on needs
            processes here or there. Processes live through all epochs, so that a change of the dataset
            between two epochs does not reach them; a warning names a number, text or flag of the dataset that
            was changed.
    """

    shuffle: bool | None = None
    drop_last: bool | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        check_flag("reading.shuffle", self.shuffle, optional=True)
        check_flag("reading.drop_last", self.drop_last, optional=True)
        check_function("reading.collate_fn", self.collate_fn, "a list of samples", 1)
        check_int("reading.num_workers", self.num_workers, least=0, optional=True)


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """Errors and stalls of a run: which end it, and which it survives.

    ::

        FailureOptions(on_failure="continue")       # the other devices go on without one that fails
        FailureOptions(stall_timeout=None)          # never end a run that stands still

    Attributes:
        on_failure: "raise": the run fails where a device fails. "continue": the others go on, and train the
            batches that it had not brought to a mean ("sync" and "cadence"). Batches that are read from a
            dataset, and not gathered from tensors, are kept in the host's memory for that, all between two
            means at most; a loss must leave its batch as it is.
        on_nan: "quarantine": a replica with NaN or infinite parameters is left out of the mean and copies a
            healthy one. "raise": it ends the run. CUDA devices leave it out themselves, and the host hears of
            it one round later.
        stall_timeout: Seconds without progress, or 10 longest steps where that is more, after which the run
            fails with a StallError. Until every device has ended its first step, and while paused, it is a
            warning. None: never.
        check_loss: Under "exact", compare the loss of the first micro-batch with those of its parts: one that
            is neither a mean over samples nor names its weight is an error.
    """

    on_failure: OnFailure = "raise"
    on_nan: OnNan = "quarantine"
    stall_timeout: float | None = 60.0
    check_loss: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        one_of("failures.on_failure", self.on_failure, OnFailure)
        one_of("failures.on_nan", self.on_nan, OnNan)
        check_number("failures.stall_timeout", self.stall_timeout, above=True, optional=True)
        check_flag("failures.check_loss", self.check_loss)


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options of a run on several machines: one process on each, in a group of `torch.distributed`.

    ::

        Trainer(..., policy="cadence", machines=MachineOptions(rounds=50))
        Trainer(..., machines=MachineOptions(timeout=10))

    Attributes:
        rounds: Rounds of "cadence" from one mean of all machines to the next; the means between are of the
            devices of one machine. Under the other policies every mean is of all machines.
        overlap: The machines train their next rounds while a mean of all travels, and add it when it is there
            ("cadence"). False: they wait for it.
        payload: Numbers on their way between machines: "full" as they are, "bf16" in half the bytes of
            float32.
        stream: An IterableDataset yields "whole", the same on each machine, which reads all of it and trains
            every n-th batch; or "part": it splits itself by machine (`torch.distributed.get_rank()`), and
            each trains all that it reads.
        timeout: Seconds without a sign of life after which a machine counts as lost, and the run fails.
    """

    rounds: int = 1
    overlap: bool = True
    payload: Payload = "full"
    stream: StreamPart = "whole"
    timeout: float = 30.0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        check_int("machines.rounds", self.rounds)
        check_flag("machines.overlap", self.overlap)
        one_of("machines.payload", self.payload, Payload)
        one_of("machines.stream", self.stream, StreamPart)
        check_number("machines.timeout", self.timeout, above=True)


@dataclass(frozen=True, kw_only=True)
class ProcessTuning:
    """Process-wide settings that a run may change.

    ::

        RuntimeOptions(tune_process=False)                          # none
        RuntimeOptions(tune_process=ProcessTuning(malloc=False))    # all but the allocator's

    Attributes:
        openmp: Give the starting thread's OpenMP pool back before the workers build theirs, each of which has
            its share of `torch.get_num_threads()`; in a loop of `setup` the calling thread has such a share,
            too, while CPU devices share batches. False: each has all of that number, and the pool stays.
        malloc: Let glibc keep big freed blocks. It lasts until the process ends.
        switch_interval: Let the interpreter switch between threads every 0.5 ms.
    """

    openmp: bool = True
    malloc: bool = True
    switch_interval: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: One is neither True nor False.
        """
        for name, value in vars(self).items():
            check_flag(f"tune_process.{name}", value)


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Options of a run's use of devices and process.

    ::

        RuntimeOptions(backend="cpu")
        RuntimeOptions(handle_sigterm=True, prefetch_depth=4)

    Attributes:
        backend: How the bytes move: "nccl" (cupy; CUDA devices, one rank each), "local" (within this process:
            CPU, or CUDA devices that reach each other), "cpu" (through host memory); "auto" takes the first
            of these that works here. "async" has no "nccl". Between machines "nccl" or "cpu": "auto" takes
            NCCL where means are waited for and travel as they are, and it works on every machine.
        partition_ratios: Fixed shares of the work, one per device; None: by measured speed.
        capture: Record the step as CUDA graphs, which launch all of its kernels by two calls. "auto": where
            the first 50 steps show that a CUDA device waits for launches. Changes of the recorded code and
            tensors are looked for at each step, and now and then a step is run eagerly beside and compared;
            a step that cannot be captured runs eagerly, and the log says why. True, or `CaptureOptions` for
            how often: in any case. False: never.
        memory_fraction: Part of a CUDA device that training, its batches ahead and other programs may use
            together, above 0 and at most 1. Batches ahead give way to the others; training is not limited.
        prefetch_depth: Batches that are copied to a CUDA device ahead of their use, at most; 0: none. None:
            up to 16, as its memory allows.
        launch_limit: Ranks that may be in their loss at once; None: all. Ranks whose steps are many small
            kernels fight for Python's lock: four of them do more with 1 (docs/performance.md has figures).
        tune_process: Process-wide settings while a run lives (see `ProcessTuning`); False leaves all alone.
        handle_sigterm: SIGTERM stops the run as `stop()` does; a second one ends the process.
    """

    backend: Backend = "auto"
    partition_ratios: Sequence[float] | None = None
    capture: bool | CaptureOptions | Literal["auto"] = "auto"
    memory_fraction: float = 0.90
    prefetch_depth: int | None = None
    launch_limit: int | None = None
    tune_process: bool | ProcessTuning = True
    handle_sigterm: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        one_of("runtime.backend", self.backend, Backend)
        if self.capture != "auto" and not isinstance(self.capture, bool | CaptureOptions):
            raise OptionError(
                f"runtime.capture must be 'auto', True, False or CaptureOptions(...), not {self.capture!r}"
            )
        check_fraction("runtime.memory_fraction", self.memory_fraction)
        check_int("runtime.prefetch_depth", self.prefetch_depth, least=0, optional=True)
        check_int("runtime.launch_limit", self.launch_limit, optional=True)
        if not isinstance(self.tune_process, bool | ProcessTuning):
            raise OptionError(
                f"runtime.tune_process must be True, False or a ProcessTuning, not {self.tune_process!r}"
            )
        check_flag("runtime.handle_sigterm", self.handle_sigterm)
