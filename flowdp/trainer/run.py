"""A live run: read it, steer it, join it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from flowdp.engine import active_runs
from flowdp.engine.engine import Engine
from flowdp.engine.signals import hearing_interrupts
from flowdp.errors import FlowdpError, OptionError, StateError
from flowdp.observe.loggers.log import Setting
from flowdp.observe.notebook import display_live, run_dashboard
from flowdp.observe.observer import Observer
from flowdp.observe.run_html import RunView, run_html
from flowdp.policy.efficiency import EfficiencyReport
from flowdp.policy.formats import format_error, format_text
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import EvaluationEnded, RoundEnded
from flowdp.protocol.messages import Requested
from flowdp.replica.learning_rate import SchedulerOptions, check_scheduler
from flowdp.threads.stacks import Folding
from flowdp.timeline.timeline import Timeline
from flowdp.trainer.result import Results, Status, TrainedState
from flowdp.validators import check_number, is_int

if TYPE_CHECKING:
    from ipywidgets import Widget

__all__ = ["Run", "runs"]

R = TypeVar("R", EpochMetrics, RoundEnded)


class Run:
    """A training run under way. Made by `Trainer.start()`.

    As a context manager, leaving it normally joins, leaving it by an exception stops; no thread outlives it.

    Commands do not wait, and return whether the run takes them: `stop`, `pause`, `unpause`, `set_lr`,
    `scale_lr`, `set_scheduler`, `checkpoint`. False: it is over, nothing changes, and `status().reason` says
    why it has ended.

    Threads:
        Any thread but the run's own; `join()` and `metrics()` raise there.

    Args:
        engine: Its threads.
        observer: Calls its callbacks.
        results: Makes its results.
        settings: Plain values for logs.
        aside: Makes room on the terminal for what a loop over its records prints.
        total_steps: Steps of all ranks in it; None where unknown.
        timeline: Its timeline; None: it records none.
    """

    def __init__(
        self,
        engine: Engine,
        observer: Observer,
        results: Results,
        *,
        settings: Mapping[str, Setting],
        aside: Callable[[], AbstractContextManager[None]],
        total_steps: int | None,
        timeline: Timeline | None,
    ) -> None:
        self._engine, self._observer, self._results = engine, observer, results
        self._settings = dict(settings)
        self._aside = aside
        self._total_steps = total_steps
        self._timeline = timeline
        self._blocks = 0  # of `paused`, that are open
        self._pausing = threading.Lock()  # serialises their count, and with it the requests
        self._is_interrupted = False
        self._inside = ExitStack()
        self._polled = engine.records.before
        self._polling = threading.Lock()  # each record goes to one thread, and to one only

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.devices))
        return f"<Run on {devices}: {self.status()}>"

    def _repr_html_(self) -> str:
        status, records = self.status(), self._engine.records
        return run_html(
            RunView(
                phase=status.phase,
                global_step=status.global_step,
                total_steps=self._total_steps,
                history=self.history,
                rounds=records.rounds,
                report=self.report(),
                problems=status.problems,
                error="" if self.error is None else format_error(self.error),
            )
        )

    def _ipython_display_(self) -> None:
        """Display the run in a cell; it updates in place until the run is over."""
        display_live(self._repr_html_, self.__repr__, self._is_over_in)

    def dashboard(self) -> Widget:
        """Make widgets that show the run and steer it: pause, stop, learning rate.

        The cell returns at once, and the run trains on. Jupyter hears a button when no cell runs: in a cell
        that waits, as in `join()`, Ctrl-C (the kernel's interrupt) stops the run.

        Raises:
            OptionError: ipywidgets is not installed.
        """
        return run_dashboard(self, self._repr_html_, self._is_over_in, self.lr)

    def _is_over_in(self, seconds: float) -> bool:
        return self._engine.records.wait(over=True, timeout_s=seconds)

    # ------------------------------------------------------------------ reading
    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of this machine, one for each of its ranks."""
        return self._engine.devices

    @property
    def world_size(self) -> int:
        """Ranks of all machines."""
        return self._engine.config.world_size

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Settings of the run by dotted names, such as "policy" and "optimizer.lr": plain values for logs."""
        return dict(self._settings)

    @property
    def start_step(self) -> int:
        """Steps of all ranks before this run: those of the checkpoint that it continues, else 0."""
        start = self._engine.config.start
        return 0 if start is None else start.global_step

    @property
    def lr(self) -> float:
        """Learning rate of the first group in the last round, or of the first step; 0.0 without both.

        Those of all groups, by name, are `group_lrs` of a round's or an epoch's record.
        """
        last, replicas = self._engine.records.last_round, self._engine.replicas
        if last is not None:
            return last.lr
        return replicas[0].learning_rate.value if replicas else 0.0

    @property
    def history(self) -> tuple[EpochMetrics, ...]:
        """Records of the epochs so far, with those from before a resume.

        Where `max_steps` ended the run inside an epoch, the last record is of a part of it: `is_complete` is
        False. A resumed run has the record of an epoch that `owes_evaluation` when it has evaluated it.
        """
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
        """Result of the run; None while it trains, and after a failure."""
        if not self._engine.records.is_over or self.error is not None:
            return None
        return self._results.answer() if self._is_called_back() else self._fill()

    def status(self) -> Status:
        """Status of the run; does not wait for a thread."""
        records, last = self._engine.records, self._engine.records.last_round
        reason = ""
        if self.error is not None:
            phase, reason = "failed", format_error(self.error)
        elif records.is_ended:
            finish = records.finish
            phase = "stopped" if finish is not None and finish.stopped else "done"
            reason = "" if finish is None else finish.reason
        else:
            phase = "paused" if records.is_paused else "running"
        progress = self._engine.progress()
        return Status(
            phase=phase,
            epochs_done=sum(epoch.is_complete for epoch in records.epochs.copy()),
            global_step=last.global_step if last else self.start_step,
            round=last.round if last else None,
            local_steps=tuple(rank.steps for rank in progress),
            throttled=tuple(rank.throttled for rank in progress),
            pieces=tuple(rank.pieces for rank in progress),
            problems=self._problems(),
            capture=tuple(rank.capture for rank in progress),
            reason=reason,
        )

    def _problems(self) -> tuple[str, ...]:
        engine, progress = self._engine, self._engine.progress()
        forgiven = sorted(engine.failures.forgiven.items())
        left = [f"rank {rank} left: {format_text(error)}" for rank, error in forgiven]
        smaller = [
            f"rank {rank} ran out of memory, and takes its steps in {place.pieces} pieces"
            for rank, place in enumerate(progress)
            if place.pieces > 1
        ]
        eager = dict.fromkeys(place.uncaptured for place in progress if place.uncaptured is not None)
        uncaptured = [f"steps are not captured: {reason}" for reason in eager]
        return (
            *left,
            *engine.records.problems,
            *smaller,
            *uncaptured,
            *engine.saver.problems,
            *self._observer.complaints,
        )

    @property
    def timeline(self) -> Timeline:
        """Spans of all devices, rounds, events and samples, so far.

        Raises:
            OptionError: The run records none.
        """
        if self._timeline is None:
            raise OptionError(
                "this run records no timeline: give Trainer(timeline=True), or the path of a file"
            )
        return self._timeline

    def report(self) -> EfficiencyReport:
        """Attribute the time of all devices so far: their own throughput, the one reached, and the losses.

        Prints as a table; in a notebook it is one.
        """
        return self._engine.efficiency()

    def dump(self, events: int = 50) -> str:
        """Describe ranks, the stacks of all threads, and the last events: of a run that hangs, say.

        Args:
            events: Number of events.
        """
        report = self._engine.report(str(self.status()), events)
        if not self._observer.inside:
            return report
        return f"{report}\n\n{self._observer.inside} is here:\n{self._observer.stack.rstrip()}"

    @overload
    def metrics(self, every: Literal["epoch"] = "epoch") -> Iterator[EpochMetrics]: ...
    @overload
    def metrics(self, every: Literal["evaluation"]) -> Iterator[EvaluationEnded]: ...
    @overload
    def metrics(self, every: Literal["round"] | int) -> Iterator[RoundEnded]: ...
    def metrics(self, every: Literal["epoch", "evaluation", "round"] | int = "epoch") -> Iterator[Any]:
        """Iterate over the records of the run as they come; `history` has those from before a resume.

        Every iterator yields all of them from the first (of rounds, the last 4,096). It ends with the run,
        also after `stop()`, and raises the run's failure. Ctrl-C in it, or in the body of the loop over it,
        ends the run after its round, as in `join()`; a `break` does not.

        Args:
            every: "epoch"; "evaluation", for those by steps; "round"; or n: the record of the round in which
                each further n steps of all ranks were completed.

        Raises:
            OptionError: `every` is something else, or the caller is a thread of the run.
        """
        self._check_caller("metrics")
        if every == "epoch":
            return self._guarded(self._engine.records.epoch_records)
        if every == "evaluation":
            return self._guarded(self._engine.records.evaluation_records)
        if every == "round":
            return self._guarded(self._engine.records.round_records)
        if not is_int(every) or every < 1:
            raise OptionError(
                "every must be 'epoch', 'evaluation', 'round' or a number of steps of at least 1, not "
                f"{every!r}"
            )
        steps = every
        return self._guarded(lambda: self._engine.records.step_records(steps))

    def poll_metrics(self) -> list[EpochMetrics]:
        """Epoch records that are new since the last call; does not wait."""
        with self._polling:
            fresh = list(self._engine.records.epochs[self._polled :])
            self._polled += len(fresh)
        return fresh

    # ------------------------------------------------------------------ steering
    def _send(self, command: Requested) -> bool:
        return self._engine.request(command) > 0

    def stop(self) -> bool:
        """End the run after a last round; then `state` is there. Returns at once; may be called again."""
        return self._send(Requested("stop"))

    def pause(self) -> bool:
        """Pause all workers after the round. Returns at once; `paused()` waits."""
        return self._send(Requested("pause"))

    def unpause(self) -> bool:
        """Continue after a pause; False inside of `paused()`, where the last block's end does that."""
        with self._pausing:
            return not self._blocks and self._send(Requested("unpause"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause for the length of a `with` block, which is entered when all workers have paused.

        The devices are the caller's meanwhile: work on its current stream runs before the next step. In a run
        that is over the block is entered at once.

        Raises:
            FlowdpError: The run has failed: its workers may be in any state.
            OptionError: The caller is a thread of the run.
        """
        self._check_caller("paused")
        with self._pausing:
            self._blocks += 1
            request = self._engine.request(Requested("pause"))
        try:
            with self._engine.records.reader():
                self._engine.records.wait_for_pause(request)
            if self.error is not None:
                self._raise_failure()
            yield
        finally:
            for replica in self._engine.replicas:
                replica.lane.await_caller()
            with self._pausing:
                self._blocks -= 1
            self.unpause()

    def set_lr(self, lr: float) -> bool:
        """Scale all parameter groups so that the first has this learning rate; a scheduler continues from it.

        The first is the first whose rate is not 0: groups at 0 stay there. It takes effect for all ranks at
        the same round. Where none is left, as when a pause ends with `stop`, the log says so at the end.

        Raises:
            OptionError: `lr` is not a number of at least 0; or several groups are all at 0.
        """
        check_number("lr", lr, above=False)
        for replica in self._engine.replicas:
            replica.learning_rate.check_set()
        return self._send(Requested("set_lr", float(lr)))

    def scale_lr(self, factor: float) -> bool:
        """Multiply the learning rates of all groups; a scheduler continues from there.

        It takes effect for all ranks at the same round, and two calls multiply twice.

        Raises:
            OptionError: `factor` is not a number above 0.
        """
        check_number("factor", factor, above=True)
        return self._send(Requested("scale_lr", float(factor)))

    def set_scheduler(self, scheduler: SchedulerOptions | None) -> bool:
        """Replace the scheduler of the learning rate, for all ranks at the same round.

        ::

            run.set_scheduler(SchedulerOptions(lambda opt: CosineAnnealingLR(opt, 1000), unit="step"))

        The new one begins there, at the rates of its groups without the factor of `set_lr` and `scale_lr`,
        which goes on multiplying them. An `lr_lambda` is a function of the run's steps, as from the start.
        Checkpoints hold its state: resume with it as the Trainer's scheduler.

        Args:
            scheduler: With a factory, which is called for each rank, or an `lr_lambda`. None: the rates stay
                as they are.

        Raises:
            OptionError: The options are wrong; have what belongs to a run's start (`lr_scaling`,
                `warmup_steps`, a scheduler instance, one that watches the loss); count epochs under "async",
                whose ranks are in different ones; or the run has several machines.
        """
        engine, options = self._engine, check_scheduler(scheduler, None, grows=True)
        if self.world_size > len(self.devices):
            raise OptionError(
                "set_scheduler() reaches one machine, and this run has several: stop(), and resume with "
                "Trainer(scheduler=...)"
            )
        if options.lr_scaling or options.warmup_steps:
            raise OptionError(
                "set_scheduler(): lr_scaling and warmup_steps are of a run's start; scale_lr(factor) "
                "multiplies the rates"
            )
        if options.unit == "epoch" and engine.config.policy == "async":
            raise OptionError("set_scheduler(): under 'async' ranks are in different epochs: unit='step'")
        watches = [replica.learning_rate.check_scheduler(options) for replica in engine.replicas]
        if any(watches) and not engine.config.wait_for_metric:
            raise OptionError(
                "set_scheduler(): a scheduler that watches the loss needs a run that waits for it: give "
                "Trainer(scheduler=...) one"
            )
        return self._send(Requested("set_scheduler", options))

    # ------------------------------------------------------------------ keeping
    def checkpoint(self) -> bool:
        """Request a checkpoint at the end of this round. Returns at once; callbacks are called with it.

        Raises:
            OptionError: The Trainer has neither `checkpoint` nor a callback for checkpoints.
        """
        if self.done:
            return False
        if not self._engine.config.tasks.inside:
            raise OptionError(
                "a sampler without a seed, or an IterableDataset on several machines, is resumed at the end "
                "of an epoch alone: use run.snapshot()"
            )
        if not self._engine.config.tasks.save:
            raise OptionError("there is nowhere to write a checkpoint: give Trainer(checkpoint='a folder')")
        return self._send(Requested("checkpoint"))

    def snapshot(self) -> TrainedState:
        """Take the averaged state at the end of this round; training continues meanwhile.

        After the run has ended, returns its final state. A callback is called late, so a snapshot there is
        later than its event; `on_checkpoint` has the weights of the event itself.

        Raises:
            FlowdpError: The run has failed.
            OptionError: The caller is one of the run's threads, which the snapshot would wait for; or this
                machine is not the first of several, which has the run's state.
        """
        is_called_back = self._is_called_back()
        if not is_called_back:
            self._check_caller("snapshot")
        snapshot = self._results.snapshot()
        if snapshot is not None:
            return snapshot
        if is_called_back:
            return self._final()
        with suppress(StateError):  # of interest only where the module is to be filled
            self.join()
        return self._fill()

    def _final(self) -> TrainedState:
        """Result of a run that ends, for the observer's thread: join() would wait for that thread."""
        state = self._results.answer()
        if state is None:
            assert self.error is not None
            raise self.error
        return state

    # ------------------------------------------------------------------ ending
    def join(self, timeout: float | None = None) -> TrainedState:
        """Wait for the end of the run.

        A second call returns the same result, or raises the same error. Ctrl-C ends the run after its round,
        sets `state` (`interrupted=True`) and raises KeyboardInterrupt again; a second Ctrl-C does not wait.

        Args:
            timeout: Seconds to wait at most; None: until the end.

        Raises:
            TimeoutError: The time is up; the run continues, or a callback has not returned.
            FlowdpError: The run failed: the first failure, the others as notes.
            OptionError: The caller is a thread of the run.
            StateError: The run ended without a failure, but the model does not take its weights; the error
                has the state.
        """
        self._check_caller("join")
        with Folding(KeyboardInterrupt):
            with self._engine.records.reader():
                try:
                    if not self._engine.wait(timeout):
                        raise TimeoutError(self._unfinished(timeout))
                except KeyboardInterrupt:
                    self._interrupt("Ctrl-C")
                    raise
            return self._collect()

    def _unfinished(self, timeout: float | None) -> str:
        inside = self._observer.inside
        if self.done and inside:
            return f"the run is over, and {inside} has not returned after {timeout} s: {self.status()}"
        return f"the run continues after {timeout} s: {self.status()}"

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
            self._interrupt("Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
            if self.error is not None and self.error is not error:
                error.add_note(f"The run had failed: {format_error(self.error)}")

    def _interrupt(self, cause: str) -> None:
        """Stop the run and keep its result; a second call does not wait."""
        if self._is_interrupted:
            return
        self._is_interrupted = True
        self._send(Requested("stop", cause))
        try:
            self._engine.records.wait()
            self._join_threads()
        except KeyboardInterrupt:
            self._engine.is_abandoned = True
            raise
        if self.error is None:
            self._fill()
        else:
            self._let_go()

    def _raise_failure(self) -> None:
        if self.error is not None:
            self._let_go()
            raise self.error
        if self._engine.records.finish is None:
            raise FlowdpError("the run ended without a result: " + self.dump())

    def _collect(self) -> TrainedState:
        """The state, with the user's module filled from it."""
        state = self._fill()
        if self._results.misfit is not None:
            raise self._results.misfit
        return state

    def _fill(self) -> TrainedState:
        """Read the replicas and fill the user's module, once, in the user's thread."""
        self._join_threads()
        self._raise_failure()  # a callback may have failed after the end
        self._engine.tell_end()
        return self._results.fill()

    def _let_go(self) -> None:
        """Join the threads that end, and free the memory of a failed run."""
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
        self._engine.join_callbacks()
        self._engine.close()

    def _guarded(self, records: Callable[[], Iterator[R]]) -> Iterator[R]:
        with Folding(KeyboardInterrupt), self._engine.records.reader(), hearing_interrupts() as interrupts:
            before = None
            try:
                for record in records():
                    before = interrupts()
                    with self._aside():  # for what the loop prints
                        yield record
            except KeyboardInterrupt:
                self._interrupt("Ctrl-C")
                raise
            except GeneratorExit:  # the loop was left
                if before is not None and interrupts() > before:
                    self._interrupt("Ctrl-C")
                raise
        with Folding():
            self._collect()

    def _is_called_back(self) -> bool:
        return self._observer.is_own_thread()

    def _check_caller(self, method: str) -> None:
        if self._engine.is_own_thread() or self._is_called_back():
            raise OptionError(
                f"{method}() cannot be called from a loss, a dataset or a callback: it would wait for the "
                "run's own thread that calls it"
            )


def runs() -> tuple[Run, ...]:
    """The live runs of this process, the oldest first: those that train, are paused, or are just ending.

    A way to a run without its handle, in a notebook whose cell was run twice, say::

        for run in flowdp.runs():
            run.stop()
            run.join()

    Threads:
        Any. A forked child has none.
    """
    handles = [engine.handle for engine in active_runs.runs()]
    return tuple(handle for handle in handles if handle is not None)
