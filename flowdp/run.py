"""A live run: read it, steer it, join it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from flowdp.engine.build import Optimizers
from flowdp.engine.launch import Engine
from flowdp.errors import FlowdpError, OptionError
from flowdp.machine.commands import RoundEnded
from flowdp.messages import Requested
from flowdp.policy.tally import EpochMetrics

__all__ = ["Run", "Status", "TrainedState"]

R = TypeVar("R", EpochMetrics, RoundEnded)


@dataclass(frozen=True)
class TrainedState:
    """What a run has made.

    Attributes:
        state_dict: Parameters and buffers by the module's own names, on the CPU.
        optimizer_state: `state_dict()` of rank 0's optimizer, on the CPU; of several a list or a mapping, as
            they were given.
        history: One record per complete epoch.
        global_step: Steps of all ranks.
        epochs_done: Complete epochs.
        interrupted: The run was stopped before its last step.
    """

    state_dict: Mapping[str, Tensor]
    optimizer_state: Mapping[str, Any]
    history: tuple[EpochMetrics, ...]
    global_step: int
    epochs_done: int
    interrupted: bool

    def load_into(self, module: nn.Module) -> nn.Module:
        """Copy the parameters and buffers into a module of the same structure, and return it."""
        module.load_state_dict(self.state_dict)
        return module


@dataclass(frozen=True)
class Status:
    """Where a run stands; prints as one line.

    Attributes:
        life: "running", "paused", "done", "stopped" or "failed".
        epochs_done: Complete epochs.
        global_step: Steps of all ranks in the rounds held so far.
        round: The last round, or None.
        local_steps: Steps per rank, those since the last round included. Shape (world_size,).
        throttled: Why a rank has no batches, per rank; None for one that has. Shape (world_size,).
    """

    life: str
    epochs_done: int
    global_step: int
    round: int | None
    local_steps: tuple[int, ...]
    throttled: tuple[str | None, ...]

    def __str__(self) -> str:
        steps = " ".join(map(str, self.local_steps))
        return f"{self.life} | {self.epochs_done} epochs | step {self.global_step:,} | steps per rank {steps}"


@dataclass
class _Ending:
    """The answer of a run, made once."""

    state: TrainedState | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Run:
    """A training run under way. Made by `Trainer.start()`.

    As a context manager, leaving it normally joins, leaving it by an exception stops; no thread outlives it.

    Threads:
        Any thread but the run's own; `join()` and `metrics()` raise there.

    Attributes:
        devices: One per rank.
    """

    def __init__(
        self, engine: Engine, module: nn.Module | None, watcher: threading.Thread | None = None
    ) -> None:
        self._engine = engine
        self._module = module
        self._watcher = watcher
        self._ending = _Ending()
        self._inside = ExitStack()
        self._polled = 0
        self.devices = tuple(replica.device for replica in engine.replicas)

    # ------------------------------------------------------------------ reading
    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.devices)

    @property
    def history(self) -> tuple[EpochMetrics, ...]:
        """The records of the epochs that are complete."""
        return tuple(self._engine.records.epochs)

    @property
    def done(self) -> bool:
        """Whether the run is over, however it ended."""
        return self._engine.records.is_ended

    @property
    def error(self) -> BaseException | None:
        """The first failure; None while there is none."""
        return self._engine.failures.first

    @property
    def state(self) -> TrainedState | None:
        """What the run has made; None while it goes on, and after a failure."""
        if not self._engine.records.is_over or self.error is not None:
            return None
        return self._collect()

    def status(self) -> Status:
        """Where the run stands; asks no thread."""
        records, last = self._engine.records, self._engine.records.last_round
        if records.is_ended:
            stopped = records.finish is not None and records.finish.stopped
            life = "failed" if self.error is not None else "stopped" if stopped else "done"
        else:
            life = "paused" if records.is_paused else "running"
        return Status(
            life=life,
            epochs_done=len(records.epochs),
            global_step=last.global_step if last else 0,
            round=last.round if last else None,
            local_steps=tuple(steps for steps, _ in self._engine.progress()),
            throttled=tuple(reason for _, reason in self._engine.progress()),
        )

    def dump(self, events: int = 50) -> str:
        """The status and the last events of the coordinator, as text: for a report of a run that hangs."""
        return "\n".join([str(self.status()), *self._engine.story.tail(events)])

    @overload
    def metrics(self, every: Literal["epoch"] = "epoch") -> Iterator[EpochMetrics]: ...
    @overload
    def metrics(self, every: Literal["round"] | int) -> Iterator[RoundEnded]: ...
    def metrics(self, every: Literal["epoch", "round"] | int = "epoch") -> Iterator[Any]:
        """The records of the run, from the first one, as they come.

        Every iterator sees all of them (of rounds, the last 4,096). It ends with the run, after `stop()` too,
        and raises the run's failure. Ctrl-C in it ends the run after its round, as in `join()`.

        Args:
            every: "epoch"; "round"; or n: the record of the round in which each further n steps of all
                ranks were completed.

        Raises:
            OptionError: `every` is something else, or the caller is a thread of the run.
        """
        self._check_caller("metrics")
        if every == "epoch":
            return self._guarded(self._engine.records.epoch_records)
        if every == "round":
            return self._guarded(self._engine.records.round_records)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise OptionError(
                f"every must be 'epoch', 'round' or a number of steps of at least 1, not {every!r}"
            )
        steps = every
        return self._guarded(lambda: _every(self._engine.records.round_records(), steps))

    def poll_metrics(self) -> list[EpochMetrics]:
        """The epoch records that have come since the last call; does not wait."""
        fresh = list(self._engine.records.epochs[self._polled :])
        self._polled += len(fresh)
        return fresh

    # ------------------------------------------------------------------ steering
    def stop(self) -> None:
        """End the run: a last round is held, and then `state` is there. Returns at once; twice is once."""
        self._engine.request(Requested("stop"))

    def pause(self) -> None:
        """Let all workers stand still after the round. Returns at once; see `paused()` for waiting."""
        self._engine.request(Requested("pause"))

    def unpause(self) -> None:
        """Go on after a pause."""
        self._engine.request(Requested("unpause"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still for the length of a `with` block, which is entered when all workers do.

        The devices are the caller's meanwhile: what it enqueues on its current stream comes before the next
        step.
        """
        self._check_caller("paused")
        wish = self._engine.request(Requested("pause"))
        try:
            self._engine.records.wait_for_pause(wish)
            yield
        finally:
            for replica in self._engine.replicas:
                replica.lane.adopt()
            self.unpause()

    def set_lr(self, lr: float) -> None:
        """Scale all parameter groups so that the first has this learning rate; a scheduler goes on from it.

        It takes effect for all ranks at the same round.

        Raises:
            OptionError: `lr` is not a number of at least 0.
        """
        if not isinstance(lr, (int, float)) or isinstance(lr, bool) or not 0 <= lr < float("inf"):
            raise OptionError(f"lr must be a number of at least 0, not {lr!r}")
        self._engine.request(Requested("set_lr", float(lr)))

    # ------------------------------------------------------------------ ending
    def join(self, timeout: float | None = None) -> TrainedState:
        """Wait for the end of the run.

        Called twice it gives the same answer, or raises the same error. Ctrl-C ends the run after its round,
        sets `state` (`interrupted=True`) and raises KeyboardInterrupt again; a second one does not wait.

        Args:
            timeout: Seconds to wait at most; None: until the end.

        Raises:
            TimeoutError: The time is up; the run goes on.
            FlowdpError: The run failed: the first failure, the others as notes.
            OptionError: The caller is a thread of the run.
        """
        self._check_caller("join")
        with self._engine.records.reader():
            try:
                if not self._engine.records.wait(timeout_s=timeout):
                    raise TimeoutError(f"the run goes on after {timeout} s: {self.status()}")
            except KeyboardInterrupt:
                self._interrupt()
                raise
        self._raise_failure()
        return self._collect()

    def __enter__(self) -> Run:
        self._inside.enter_context(self._engine.records.reader())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._inside.pop_all():
            if error is None:
                self.join()
                return
            self._interrupt()
            if self.error is not None and self.error is not error:
                error.add_note(f"The run had failed: {type(self.error).__name__}: {self.error}")

    def _interrupt(self) -> None:
        """End the run before its time, and keep what it has made."""
        self.stop()
        self._engine.records.wait()
        if self.error is None:
            self._collect()
        else:
            self._let_go()

    def _raise_failure(self) -> None:
        if self.error is not None:
            self._let_go()
            raise self.error
        if self._engine.records.finish is None:
            raise FlowdpError("the run ended without an answer: " + self.dump())

    def _collect(self) -> TrainedState:
        """Read the replicas, once, in the user's thread, and fill the user's module."""
        with self._ending.lock:
            if self._ending.state is None:
                self._join_threads()
                state = self._read()
                if self._module is not None:
                    state.load_into(self._module)
                self._ending.state = state  # a Ctrl-C before leaves it to the next one who asks
                self._engine.let_go()
            return self._ending.state

    def _let_go(self) -> None:
        """Join what can be joined, and free what a failed run holds on its devices."""
        self._join_threads()
        if self._engine.records.is_over:
            self._engine.let_go()
            cause = self.error.__cause__ if self.error is not None else None
            if isinstance(cause, torch.OutOfMemoryError):
                # The traceback keeps every frame's tensors, and with them the memory that was missing. Here,
                # for the frames of a thread that still runs cannot be cleared.
                traceback.clear_frames(cause.__traceback__)

    def _join_threads(self) -> None:
        self._engine.join()
        if self._watcher is not None:
            self._watcher.join()

    def _read(self) -> TrainedState:
        finish = self._engine.records.finish
        if finish is None:
            raise FlowdpError("the run has no answer yet")
        replica = self._engine.replicas[0]
        return TrainedState(
            state_dict={name: _on_cpu(value) for name, value in replica.module.state_dict().items()},
            optimizer_state=torch.utils._pytree.tree_map(_on_cpu, _optimizer_state(replica.optimizers)),
            history=self.history,
            global_step=finish.global_step,
            epochs_done=finish.epochs_done,
            interrupted=finish.stopped,
        )

    def _guarded(self, records: Callable[[], Iterator[R]]) -> Iterator[R]:
        with self._engine.records.reader():
            try:
                yield from records()
            except KeyboardInterrupt:
                self._interrupt()
                raise
        self._raise_failure()
        self._collect()

    def _check_caller(self, what: str) -> None:
        if self._engine.is_own_thread():
            raise OptionError(f"{what}() would wait for the thread that calls it: it is one of the run's own")


def _optimizer_state(optimizers: Optimizers) -> Any:
    """The state of the one optimizer, or of several in the form in which they were given."""
    if isinstance(optimizers, Mapping):
        return {name: one.state_dict() for name, one in optimizers.items()}
    states = [one.state_dict() for one in optimizers]
    return states[0] if len(states) == 1 else states


def _on_cpu(value: Any) -> Any:
    # A copy: a view would keep, and a file would hold, the whole flat memory.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _every(records: Iterator[RoundEnded], steps: int) -> Iterator[RoundEnded]:
    reached = 0
    for record in records:
        if record.global_step // steps > reached:
            reached = record.global_step // steps
            yield record
