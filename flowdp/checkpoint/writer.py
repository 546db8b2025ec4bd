"""The writer of checkpoints, from the states that ranks have saved at a barrier."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowdp.checkpoint.file import write
from flowdp.checkpoint.folder import CheckpointFolder
from flowdp.checkpoint.machine_states import StateCollector
from flowdp.checkpoint.weights import Weights, load_average
from flowdp.errors import CheckpointError, CollectiveError
from flowdp.policy.formats import format_epochs, format_error
from flowdp.policy.monitor import number_of
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.position import Position

__all__ = ["CapturedState", "Checkpoint", "Job", "Outlet", "PendingState", "Writer"]

log = logging.getLogger("flowdp")

PendingState = Callable[[], dict[str, Any]]
"""Returns a rank's saved state, once its device has come that far."""

SHARED = ("model", "buffers", "ema", "outer")
"""Parts of a saved state that one rank has for all."""


class CapturedState:
    """States saved at one barrier.

    Args:
        states: States of the ranks of this machine that were there.
        model: The rank whose state holds the model; one of another machine: the model is not kept here.
        position: Position of the run.
        history: Records of the epochs that were complete.
        orders: Checksums of a sampler's draws for the open epochs; None: unknown.

    Threads:
        Any. The first one that asks waits for the devices.
    """

    def __init__(
        self,
        states: Mapping[int, PendingState],
        model: int,
        position: Position,
        history: Sequence[EpochMetrics],
        orders: Mapping[int, int] | None = None,
    ) -> None:
        self.position = position
        self.history = tuple(history)
        self.orders = orders
        self._states = dict(states)
        self._first = model
        self._lock = threading.Lock()  # serialises the first reading
        self._read: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        """Arguments of `file.write`, but for the run's descriptions; "ranks" are those of this machine."""
        with self._lock:
            if self._read is None:
                ranks = {rank: state() for rank, state in sorted(self._states.items())}
                holder = ranks.get(self._first)
                shared = {} if holder is None else {name: holder.pop(name) for name in SHARED}
                # Where all ranks have the same optimizer states, the others have saved their own part alone.
                whole = [{**(holder or {}), **state} for state in ranks.values()]
                self._read = {**shared, "ranks": whole}
                self._states = {}
            return self._read

    @property
    def weights(self) -> Weights:
        """The weights, on the CPU."""
        read = self.read()
        return Weights(read["model"], read["ema"])


class Checkpoint:
    """The state of a run at the end of a round, as `on_checkpoint` gets it.

    Attributes:
        version: Number of the checkpoint in its run, from 1; a resumed run counts on.
        epoch: Complete epochs.
        global_step: Steps of all ranks.
        path: The file; None where the run has no checkpoint folder.

    Threads:
        Any.
    """

    def __init__(self, state: Mapping[str, Any], path: Path | None) -> None:
        self._state = state
        self.version: int = state["version"]
        self.epoch: int = state["epoch"]
        self.global_step: int = state["global_step"]
        self.path = path

    @cached_property
    def state_dict(self) -> Mapping[str, Tensor]:
        """Parameters and buffers, averaged over the ranks, by the module's own names, on the CPU.

        A copy: a change of it changes no file, nor the best model.
        """
        return _copied(self._state["model"])

    @cached_property
    def ema(self) -> Mapping[str, Tensor] | None:
        """The same with the moving average of `flowdp.EMA` in place of the parameters; None without it."""
        average = Weights(self._state["model"], self._state["ema"]).average
        return None if average is None else _copied(average)

    def load_into(self, module: nn.Module) -> nn.Module:
        """Copy the parameters and buffers into a module of the same structure, and return it."""
        module.load_state_dict(self.state_dict)
        return module

    def load_ema_into(self, module: nn.Module) -> nn.Module:
        """Copy `ema` into a module of the same structure, and return it.

        Raises:
            OptionError: There is none.
        """
        return load_average(self.ema, module)

    def save(self, path: str | Path) -> None:
        """Write it to another place, from where `resume=` takes it.

        Raises:
            CheckpointError: It could not be written.
        """
        write(path, self._state)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" in {str(self.path)!r}"
        epochs = format_epochs(self.epoch)
        return f"<Checkpoint {self.version} at step {self.global_step}, {epochs} complete{where}>"


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in weights.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A checkpoint to write.

    Attributes:
        version: Number of the checkpoint.
        capture: Number of the capture.
        captured: Contents of the checkpoint, as far as this machine has them.
        best: Reads the best model at that moment; None where there is none.
        value: Value of the metric that `keep_best` names, set by the writer; None without one.
        is_between: The next checkpoint replaces it.
    """

    version: int
    capture: int
    captured: CapturedState
    best: Callable[[], Weights | None]
    value: float | None = None
    is_between: bool = False


class Outlet(ABC):
    """The way of checkpoints out of this machine: jobs that wait, and one thread that takes them.

    Attributes:
        folder: Folder that they are written to; None: there is none.
        problems: Failed writes, as text.
        thread: The thread.
    """

    folder: CheckpointFolder | None = None

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.thread = threading.Thread(target=self._run, name="flowdp-checkpoint", daemon=True)
        self._changed = threading.Condition()  # guards what follows
        self._pending: list[Job] = []
        self._is_at_work = self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a job is being done, or waits to be."""
        with self._changed:
            return self._is_at_work or bool(self._pending)

    @abstractmethod
    def queue(self, job: Job) -> None:
        """Take a job. Does not wait.

        Threads:
            The coordinator.
        """

    def close(self, timeout_s: float | None = None) -> bool:
        """Do the jobs that wait, and end the thread; False where it is not done in time.

        Threads:
            The coordinator, when no job comes any more.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self.thread.ident is None:
            return True
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    @abstractmethod
    def close_transfer(self) -> None:
        """Give the way of the states between machines back, where there is one; once, behind `close`.

        Threads:
            The coordinator's.
        """

    def let_go(self) -> None:
        """Drop what a run that is over has left."""
        self._is_closed, self._pending = True, []

    @abstractmethod
    def _run(self) -> None:
        """The body of the thread."""


class Writer(Outlet):
    """Writes checkpoints to the run's folder, and tells of them.

    Where the disk is slower than the run, only the newest and the best of those that wait are written.

    Args:
        folder: The folder; None: they are told of alone.
        describe: Fingerprint of the run.
        saved: Called with each checkpoint, on this thread; None: no listener.
        failed: Called where none can ever be written, as the run's state is not plain.
        written: Called on this thread with the number of each checkpoint that it is done with, written or
            not. One that is dropped for a newer one is not among them.
        evaluates: Whether the run has an evaluation.
        collector: On machine 0, the states of the other machines; None: they are not needed.
    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        describe: Mapping[str, Any],
        saved: Callable[[Checkpoint], object] | None,
        failed: Callable[[CheckpointError], object],
        written: Callable[[int], object] = lambda _: None,
        *,
        evaluates: bool = False,
        collector: StateCollector | None = None,
    ) -> None:
        super().__init__()
        self.folder = folder
        self._describe = describe
        self._saved, self._failed, self._written = saved, failed, written
        self._evaluates = evaluates
        self._collector = collector

    def queue(self, job: Job) -> None:
        """Take a checkpoint; it replaces those that wait, but for the best. See `Outlet.queue`."""
        job = replace(job, value=self._value(job.captured))
        with self._changed:
            waiting = [*self._pending, job]
            valued = [(other.value, other) for other in waiting]
            best = [] if self.folder is None else [other for _, other in self.folder.best_of(valued)]
            self._pending = [other for other in waiting if other is job or other in best]
            dropped = [other for other in waiting if other not in self._pending]
            self._changed.notify_all()
        for other in dropped:
            log.info("checkpoint %d is not written: a newer one is there", other.version)
        if self._collector is not None:
            self._collector.drop([other.capture for other in dropped])

    def close_transfer(self) -> None:
        """See `Outlet.close_transfer`."""
        if self._collector is not None:
            self._collector.give_back()

    def let_go(self) -> None:
        """See `Outlet.let_go`."""
        super().let_go()
        self._saved, self._failed, self._written = None, lambda _: None, lambda _: None

    def _run(self) -> None:
        """See `Outlet`."""
        while (job := self._next()) is not None:
            try:
                self._write(job)
            except CheckpointError as error:
                is_passing = isinstance(error.__cause__, OSError | CollectiveError)
                self._complain(error, is_final=error.path is None and not is_passing)
            except BaseException as cause:
                text = f"checkpoint {job.version} failed: {format_error(cause)}"
                failure = CheckpointError(text, version=job.version)
                failure.__cause__ = cause
                self._complain(failure, is_final=True)
            self._written(job.version)

    def _next(self) -> Job | None:
        with self._changed:
            self._is_at_work = False
            self._changed.wait_for(lambda: self._pending or self._is_closed)
            self._is_at_work = bool(self._pending)
            return self._pending.pop(0) if self._pending else None

    def _value(self, captured: CapturedState) -> float | None:
        """Value of the metric that `keep_best` names, at the end of an epoch."""
        keep_best = None if self.folder is None else self.folder.options.keep_best
        if keep_best is None or not captured.history or captured.position.open:
            return None
        return number_of(keep_best[0], captured.history[-1], evaluates=self._evaluates)

    def _write(self, job: Job) -> None:
        position, history = job.captured.position, job.captured.history
        # First, as the other machines keep theirs until then.
        others = [] if self._collector is None else self._collector.collect(job.capture)
        best = job.best() or Weights({})
        own = job.captured.read()
        state = {
            **own,
            # Where all have the same optimizers, the others have sent the rest alone.
            "ranks": [*own["ranks"], *({**own["ranks"][0], **other} for other in others)],
            "version": job.version,
            "epoch": position.done,
            "global_step": position.global_step,
            "position": position,
            "history": history,
            "fingerprint": self._describe,
            "orders": job.captured.orders,
            "best": None,
            "best_model": best.model,
            "best_ema": best.ema,
            "top": [],
        }
        path = None
        if self.folder is not None:
            step = position.global_step
            path = self.folder.save(
                state, version=job.version, global_step=step, value=job.value, is_between=job.is_between
            )
            log.info("checkpoint %d: %s", job.version, path)
        if self._saved is not None:
            self._saved(Checkpoint(state, path))

    def _complain(self, error: CheckpointError, *, is_final: bool) -> None:
        """Report a failed write; with `is_final` no later one can succeed, as the state is not plain."""
        self.problems.append(str(error))
        if is_final:
            self._failed(error)
        else:
            log.error("%s; the run goes on, and tries again when the next one is due", error)
