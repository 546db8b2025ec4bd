"""Checkpoints, snapshots and the best state of a run, from the states that ranks save at a barrier.

The ranks copy to the host and train on; one thread writes. Where the disk is slower than the run, only the
newest checkpoint and the best one are written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowdp.checkpoint.file import write
from flowdp.checkpoint.folder import CheckpointFolder
from flowdp.checkpoint.machine_states import StateCollector
from flowdp.checkpoint.weights import Weights, load_average
from flowdp.errors import CheckpointError, CollectiveError
from flowdp.policy.formats import format_error
from flowdp.policy.monitor import number_of
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import Save
from flowdp.protocol.position import Position
from flowdp.threads.inbox import LISTEN_S

__all__ = ["CapturedState", "Checkpoint", "Job", "Saver"]

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
        return f"<Checkpoint {self.version} at step {self.global_step}, {self.epoch} epochs complete{where}>"


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
        value: Value of the metric that `keep_best` names; None without one.
    """

    version: int
    capture: int
    captured: CapturedState
    best: Callable[[], Weights | None]
    value: float | None


class Saver:
    """Receives the ranks' saved states, and makes checkpoints and snapshots of them.

    Args:
        folder: The folder; None: there is none.
        describe: Fingerprint of the run.
        saved: Called with each checkpoint, on the writer's thread; None: no listener.
        failed: Called where none can ever be written, as the run's state is not plain.
        best: The best weights so far, where the run keeps it.
        evaluates: Whether the run has an evaluation.
        orders: Gives the checksums of the orders that a sampler drew for the epochs that are open at a
            position; None: they are not known.
        written: Called on the writer's thread with the number of each checkpoint that it is done with,
            written or not. One that is dropped for a newer one is not among them.
        keeps_ranks: Whether the states of all ranks of this machine are of use to it. Where all ranks have
            the same ones, that of the rank with the model is enough.
        keeps_generators: Whether the random numbers of this machine's ranks are, where nothing else is.
        collector: On machine 0, the states of the other machines; None: they are not needed.

    Attributes:
        problems: Failed writes, as text.
        orders: As given.
        thread: Thread of the writer; None without one.
        keeps_ranks: As given.
        keeps_generators: As given.
    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        describe: Mapping[str, Any],
        saved: Callable[[Checkpoint], object] | None,
        failed: Callable[[CheckpointError], object],
        best: Weights | None = None,
        evaluates: bool = False,
        orders: Callable[[Position], Mapping[int, int] | None] = lambda _: None,
        written: Callable[[int], object] = lambda _: None,
        *,
        keeps_ranks: bool = True,
        keeps_generators: bool = False,
        collector: StateCollector | None = None,
    ) -> None:
        self.problems: list[str] = []
        self.orders = orders
        self.keeps_ranks, self.keeps_generators = keeps_ranks, keeps_generators
        self._collector = collector
        self._folder = folder
        self._describe = describe
        self._saved = saved
        self._failed = failed
        self._written = written
        self._evaluates = evaluates
        self._best: Callable[[], Weights | None] = lambda: best
        self._is_warned = False  # of a metric that is not there
        self.thread: threading.Thread | None = None
        if self.writes:
            self.thread = threading.Thread(target=self._run, name="flowdp-checkpoint", daemon=True)

        self._changed = threading.Condition()  # guards everything below
        self._states: dict[int, PendingState] = {}
        self._pending: list[Job] = []
        self._is_writing = self._is_closed = self._is_over = False
        self._snapshot: CapturedState | None = None
        self._answered = 0

    def start(self) -> None:
        """Start the writer's thread, where there is anything to write or to tell.

        Threads:
            The one that starts the run.
        """
        if self.thread is not None:
            self.thread.start()

    @property
    def writes(self) -> bool:
        """Whether a checkpoint goes anywhere."""
        return self._folder is not None or self._saved is not None

    @property
    def has_folder(self) -> bool:
        """Whether checkpoints are written into a folder of this machine."""
        return self._folder is not None

    @property
    def is_busy(self) -> bool:
        """Whether something is being written, or waits to be."""
        with self._changed:
            return self._is_writing or bool(self._pending)

    @property
    def last(self) -> Path | None:
        """The newest file in the folder, of this run or of the one it continues; None while there is none."""
        there = [] if self._folder is None else self._folder.paths()
        return there[0] if there else None

    @property
    def best(self) -> Weights | None:
        """The weights of the best epoch, where the run keeps them and there was one."""
        return self._best()

    def put(self, rank: int, state: PendingState) -> None:
        """Take a rank's saved state.

        Threads:
            The worker of the rank, at a barrier.
        """
        with self._changed:
            self._states[rank] = state

    def save(self, command: Save, history: Sequence[EpochMetrics]) -> None:
        """Make the checkpoint or snapshot of a command, once all ranks have saved. Does not wait.

        Threads:
            The coordinator.
        """
        with self._changed:
            states, self._states = self._states, {}
            position = command.position
            # Now, for a writer that comes late may find that the sampler has long gone on.
            orders = self.orders(position)
            # A machine that follows has the best model alone, from its own first rank.
            is_own = command.model in states or not command.is_best
            model = command.model if is_own else min(states)
            captured = CapturedState(states, model, position, history[: position.done], orders)
            if command.is_best:
                self._best = lambda: captured.weights
            if command.snapshots > self._answered:
                self._snapshot, self._answered = captured, command.snapshots
            if command.version is not None and self.thread is not None:
                job = Job(command.version, command.capture, captured, self._best, self._value(captured))
                self._queue(job)
            self._changed.notify_all()

    def wait_for_snapshot(self, wish: int) -> CapturedState | None:
        """Answer to a request for a snapshot; None where the run ends before.

        Threads:
            The user's.
        """
        with self._changed:
            while self._answered < wish:
                if self._is_over:
                    return None
                self._changed.wait(LISTEN_S)
            return self._snapshot

    def end(self) -> None:
        """Note the end of the run: no snapshot is given any more.

        Threads:
            The coordinator.
        """
        if self._folder is not None:
            self._folder.lock.end()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Write pending checkpoints, and end the thread; False where it is not done in time.

        Threads:
            The coordinator, when no rank saves its state any more.
        """
        with self._changed:
            self._is_closed = True
            self._states.clear()
            self._changed.notify_all()
        if self.thread is None or self.thread.ident is None:
            return True
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def close_transfer(self) -> None:
        """Give the way of the states between machines back, where there is one; once, behind `close`.

        Threads:
            The coordinator's.
        """
        if self._collector is not None:
            self._collector.give_back()

    def give_back(self) -> None:
        """Let another run have the folder: this one writes no more."""
        if self._folder is not None:
            self._folder.lock.give_back()

    def let_go(self) -> None:
        """Drop the saved states of a run that is over, but for the best model and the answers given."""
        self._is_closed = self._is_over = True
        self._states, self._pending, self._snapshot, self._answered = {}, [], None, 0
        self.orders = lambda _: None
        self._saved = None
        self._failed = lambda _: None
        self._written = lambda _: None

    def _run(self) -> None:
        """The body of the writer's thread."""
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
            self._is_writing = False
            self._changed.wait_for(lambda: self._pending or self._is_closed)
            self._is_writing = bool(self._pending)
            return self._pending.pop(0) if self._pending else None

    def _queue(self, job: Job) -> None:
        """Queue a job; it replaces those that wait, but for the best."""
        waiting = [*self._pending, job]
        valued = [(other.value, other) for other in waiting]
        best = [] if self._folder is None else [other for _, other in self._folder.best_of(valued)]
        self._pending = [other for other in waiting if other is job or other in best]
        dropped = [other for other in waiting if other not in self._pending]
        for other in dropped:
            log.info("checkpoint %d is not written: a newer one is there", other.version)
        if self._collector is not None:
            self._collector.drop([other.capture for other in dropped])

    def _value(self, captured: CapturedState) -> float | None:
        """Value of the metric that `keep_best` names, at the end of an epoch."""
        keep_best = None if self._folder is None else self._folder.options.keep_best
        if keep_best is None or not captured.history or captured.position.open:
            return None
        last = captured.history[-1]
        value = number_of(keep_best[0], last, evaluates=self._evaluates)
        if value is None and (last.eval or not self._evaluates) and not self._is_warned:
            self._is_warned = True
            text = (
                f"keep_best: nothing in epoch {last.epoch} is called {keep_best[0]!r}, so there is no best.pt"
            )
            self.problems.append(text)
            log.warning("%s", text)
        return value

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
        if self._folder is not None:
            step = position.global_step
            path = self._folder.save(state, version=job.version, global_step=step, value=job.value)
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
