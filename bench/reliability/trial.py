"""One fault in one run: the expected outcome, and a check of it."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import flowdp
from bench.reliability.faults import ALL, EPOCHS, SAMPLES, STALL_TIMEOUT_S, Case, Fault

__all__ = ["LogCapture", "expected", "listening", "try_case"]

WITHIN_S = 2.0
HANG_S = 20.0
TRIES = 5
NOT_REACHED = "the fault was not reached"


# ---------------------------------------------------------------- the expected outcome
def expected(case: Case) -> type[Exception] | str:
    """The error that `join()` raises; or "start raises", "continues", "continues while held", "warns"."""
    match case.fault, case.site:
        case "stall", "callback" | "on_checkpoint":
            return "continues while held"
        case "stall", "getitem" | "collate" | "forward" | "backward" | "step" if case.when == "first":
            return "warns"
        case "stall", _:
            return flowdp.StallError
        case "nan", _:
            if case.asked == "raise":
                return flowdp.StepError
            is_alone = case.devices == 1 or case.rank == ALL
            return flowdp.FlowdpError if is_alone else "continues"
        case "oom", site:
            return flowdp.OutOfDeviceMemory if site == "step" else "continues"
        case _, "factory":
            return "start raises"
        case _, "getitem" | "collate":
            return flowdp.DataError
        case _, "callback" | "on_checkpoint":
            return flowdp.FlowdpError if case.asked == "ends" else "continues"
    return "continues" if case.asked == "continue" else flowdp.StepError


# ---------------------------------------------------------------- logs
class LogCapture(logging.Handler):
    """Warnings and errors of flowdp, by the thread that logged them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[tuple[int | None, str]] = []
        self.changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.records.append((record.thread, record.getMessage()))
            self.changed.notify_all()

    def of(self, idents: set[int | None], since: int) -> list[str]:
        """Messages of these threads."""
        return [text for ident, text in self.records[since:] if ident in idents]

    def wait_for(self, text: str, idents: set[int | None], since: int, timeout_s: float) -> bool:
        """Wait for a text in the messages of these threads; returns whether it came in time."""
        with self.changed:
            return self.changed.wait_for(
                lambda: any(text in line for line in self.of(idents, since)), timeout_s
            )


@contextmanager
def listening() -> Iterator[LogCapture]:
    """Collect flowdp's log and the tracebacks of threads, and keep them off the terminal."""
    logs, log, hook = LogCapture(), logging.getLogger("flowdp"), threading.excepthook

    def unhandled(args: Any) -> None:
        with logs.changed:
            logs.records.append((args.thread.ident, f"printed: {args.exc_value}"))

    level, propagate = log.level, log.propagate
    log.addHandler(logs)
    log.setLevel(logging.WARNING)
    log.propagate, threading.excepthook = False, unhandled
    try:
        yield logs
    finally:
        log.removeHandler(logs)
        log.setLevel(level)
        log.propagate, threading.excepthook = propagate, hook


# ---------------------------------------------------------------- one case
class Trial:
    """One case, tried once.

    Args:
        case: The case.
        logs: Collects the messages of the run's threads.

    Attributes:
        wrong: Errors found.
        took_s: Time from the fault to the error; 0 if there was none.
    """

    def __init__(self, case: Case, logs: LogCapture) -> None:
        self.case = case
        self.wrong: list[str] = []
        self.took_s = 0.0
        self._logs = logs
        self._since = len(logs.records)
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        """Try it."""
        keeps = self.case.fault == "nan" and self.case.when == "middle"
        with tempfile.TemporaryDirectory() as folder:
            self.fault = Fault(self.case, Path(folder) if keeps else None)
            try:
                self._try()
            finally:
                self.fault.gate.set()

    def _try(self) -> None:
        wanted, fault = expected(self.case), self.fault
        try:
            run = fault.trainer().start()
        except BaseException as error:
            self._check(wanted == "start raises" and error is fault.raised, f"start() raised {error!r}")
            return
        observer = [] if run._observer._thread is None else [run._observer._thread]
        self._threads = [*run._engine.threads(), *observer]
        self._workers = run._engine._parts.threads  # type: ignore[union-attr]
        if wanted == "continues while held":
            self._check(run._engine.records.wait(timeout_s=HANG_S), "the run waits for the held callback")
            with suppress(TimeoutError):
                run.join(0.01)
                self._check(False, "join() did not wait for the callback")
            fault.gate.set()
        elif wanted == "warns":
            limit_s = HANG_S + STALL_TIMEOUT_S
            is_heard = self._logs.wait_for("nothing has moved", self._idents, self._since, limit_s)
            self._check(is_heard or fault.struck_s is None, "no warning")
            fault.gate.set()
        if isinstance(wanted, str):
            self._goes_on(run)
        else:
            self._fails(run, wanted)
        self._listen(wanted)

    @property
    def _idents(self) -> set[int | None]:
        return {thread.ident for thread in self._threads}

    def _check(self, condition: bool, otherwise: str) -> None:
        if not condition:
            self.wrong.append(otherwise)

    # ------------------------------------------------------------ runs that continue
    def _goes_on(self, run: flowdp.Run) -> None:
        try:
            state = run.join(HANG_S)
        except BaseException as error:
            self._check(False, f"join() raised {_in_words(error)}")
            return
        self._check(self.fault.struck_s is not None, NOT_REACHED)
        samples = [sum(part.samples for part in epoch.per_rank) for epoch in state.history]
        self._check(samples == [SAMPLES] * EPOCHS, f"samples per epoch: {samples}")
        is_finite = all(bool(value.isfinite().all()) for value in state.state_dict.values())
        self._check(is_finite, "the final state is not finite")
        case, status = self.case, run.status()
        parts = self._problem
        self._check(
            len(status.problems) == bool(parts) and all(part in status.problems[0] for part in parts),
            str(status.problems),
        )
        if case.fault == "oom":
            pieces = [2 if rank == self.fault.rank else 1 for rank in range(case.devices)]
            self._check(list(status.pieces) == pieces, f"pieces {status.pieces}")

    @property
    def _problem(self) -> tuple[str, ...]:
        """Parts of the one problem in the status of a run that continues; empty: no problem."""
        case, rank = self.case, self.fault.rank
        injected = f"injected by {case.name}"
        if case.site in ("callback", "on_checkpoint"):
            return () if case.fault == "stall" else (injected,)
        if case.asked == "continue":
            return f"rank {rank} left", injected
        return {
            "oom": (f"rank {rank} ran out of memory",),
            "nan": (f"rank {rank} on cpu had NaN",),
            "stall": ("nothing has moved",),
        }.get(case.fault, ())

    # ------------------------------------------------------------ runs that fail
    def _fails(self, run: flowdp.Run, wanted: type[Exception]) -> None:
        fault, case = self.fault, self.case
        if case.asked == "held" and run._engine.records.wait(timeout_s=HANG_S) and fault.struck_s is None:
            self._check(False, NOT_REACHED)  # a slow rank may have taken no step there
            return
        try:
            run.join(HANG_S)
        except BaseException as error:
            found, ended_s = error, time.perf_counter()
        else:
            self._check(False, NOT_REACHED if fault.struck_s is None else "join() raised nothing")
            return
        if fault.struck_s is None:
            self._check(False, f"join() raised {_in_words(found)} before the fault")
            return
        self.took_s = ended_s - fault.struck_s
        still = re.match(r"nothing has moved for ([\d.]+) s", str(found))
        still_s = float(still[1]) if still else 0.0
        limit_s = WITHIN_S + still_s + min(1.0, still_s / 4)  # delay of the stall check
        self._check(self.took_s <= limit_s, f"it took {self.took_s:.2f} s")
        self._check(type(found) is wanted, f"join() raised {_in_words(found)}, not {wanted.__name__}")
        if case.fault == "nan":
            self._check_nan(found)
        elif isinstance(found, flowdp.StallError):
            self._check_stall(found)
        else:
            self._check_cause(found)
        held = [self._workers[fault.rank]] if case.fault == "stall" and fault.rank is not None else []
        alive = [thread.name for thread in self._workers if thread.is_alive() and thread not in held]
        self._check(not alive, f"{alive} had not left")
        fault.gate.set()
        self._check(run._engine.records.wait(over=True, timeout_s=HANG_S), "the run does not end")
        try:
            run.join(HANG_S)
        except BaseException as again:
            self._check(again is found, f"join() raised {_in_words(again)} the second time")

    def _check_cause(self, error: BaseException) -> None:
        fault, cause = self.fault, error.__cause__
        self._check(cause is fault.raised, f"the cause is {cause!r}")
        if cause is not None:
            text = "".join(traceback.format_exception(error)) + "".join(getattr(cause, "__notes__", ()))
            self._check("in _strike" in text, "the traceback of the cause does not show the place")
        if isinstance(error, flowdp.OutOfDeviceMemory):
            self._check(error.rank == fault.rank, f"rank {error.rank}, not {fault.rank}")
        if isinstance(error, flowdp.StepError):
            where: tuple[Any, ...] = (error.rank, error.device)
            there: tuple[Any, ...] = (fault.rank, "cpu")
            if self.case.site != "eval":
                where, there = (*where, error.step, error.epoch), (*there, fault.local_step, fault.epoch)
            self._check(where == there, f"rank, device, step, epoch {where}, not {there}")
        if isinstance(error, flowdp.StepError | flowdp.DataError):
            self._check({*fault.samples} <= {*error.indices}, f"indices {error.indices}, not {fault.samples}")

    def _check_stall(self, error: flowdp.StallError) -> None:
        fault = self.fault
        self._check(len(error.ranks) == self.case.devices, f"ranks {error.ranks}")
        self._check(any("in _strike" in stack for stack in error.stacks.values()), "no stack shows the place")
        if fault.rank is not None:
            doing = error.ranks[fault.rank]
            self._check("in a step" in doing or "evaluates" in doing, f"rank {fault.rank}: {doing!r}")

    def _check_nan(self, error: BaseException) -> None:
        if isinstance(error, flowdp.StepError):
            self._check(isinstance(error.__cause__, FloatingPointError), f"the cause is {error.__cause__!r}")
            if self.case.policy != "exact":  # with "exact" it is in the mean, so all see it
                self._check(error.rank == self.fault.rank, f"rank {error.rank}, not {self.fault.rank}")
        else:
            self._check("checkpoint" in str(error), f"no mention of a checkpoint: {error}")

    # ------------------------------------------------------------ messages
    def _listen(self, wanted: object) -> None:
        case, lines = self.case, self._logs.of(self._idents, self._since)
        self._check(len(lines) == len(set(lines)), f"logged twice: {lines}")
        printed = [line for line in lines if line.startswith("printed: ")]
        self._check(not printed, f"printed although join() was called: {printed}")
        is_logged = case.site in ("callback", "on_checkpoint") or case.asked == "continue"
        times = sum(f"injected by {self.case.name}" in line for line in lines)
        if case.fault in ("error", "exit"):
            self._check(times == is_logged, f"logged {times} times: {lines}")
        if wanted == "continues" and case.fault in ("oom", "nan"):
            self._check(len(lines) == 1 and f"rank {self.fault.rank} on cpu" in lines[0], f"logged: {lines}")


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def try_case(case: Case, logs: LogCapture) -> tuple[list[str], float]:
    """Try a case, again if its rank took no step there; returns its errors and the delay of the error.

    Threads:
        Any; cases that stall may run side by side.
    """
    for _ in range(TRIES):
        trial = Trial(case, logs)
        trial.run()
        if trial.wrong[:1] != [NOT_REACHED]:
            break
    return trial.wrong, trial.took_s
