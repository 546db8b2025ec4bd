"""The coordinator's thread: it obeys the machine's commands, and ends the run.

No other thread joins threads or closes the source, so that nothing is left of a run that is over, however it
ended.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from flowdp.collective.async_mean import SnapshotMean
from flowdp.engine.diagnostics import Diagnostics
from flowdp.engine.machine_links import Follower, FollowerLink, LeaderLink, Posts
from flowdp.engine.parts import MeetingPoint, Services
from flowdp.engine.worker_thread import Worker
from flowdp.errors import CollectiveError, FlowdpError, OptionError, ProtocolError
from flowdp.machine.coordinator import Coordinator, Phase
from flowdp.machine.event_log import EventLog
from flowdp.options import ProcessTuning
from flowdp.policy.formats import format_error
from flowdp.policy.shares import format_shares
from flowdp.policy.stall import StallWatch
from flowdp.protocol.commands import (
    AbortGate,
    Average,
    Command,
    CutEvaluation,
    EpochMetrics,
    EpochStarted,
    EvaluationEnded,
    Fail,
    Finish,
    LeaveGate,
    Paused,
    Quarantined,
    RoundEnded,
    Save,
    SavesPutOff,
    Send,
)
from flowdp.protocol.messages import Averaged, Directives, Exiting, Failed, Leave, Requested, Tick
from flowdp.threads.inbox import Inbox

__all__ = ["CoordinatorShell", "EngineParts"]

log = logging.getLogger("flowdp")

GRACE_MS = 1500.0
"""How long after a failure user code may keep a thread before the failure is reported without it."""

UNHEARD_MS = 500.0
"""Time that a failure waits for a thread to raise it in, before it is printed."""


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """All objects of a run's threads. They hold its memory until the engine lets go of them.

    Attributes:
        services: Objects that were there before.
        meeting: Averages the replicas.
        workers: Bodies of the worker threads.
        threads: The worker threads.
        machine: Decides; on a machine that follows, it passes facts on.
        event_log: Every fact, and the commands that answer it.
        posts: By rank, what takes an order to it.
        watch: Notices that nothing moves.
        diagnostics: Observer of the threads.
        link: Link to the other machines; None: there are none.
        tuning: Settings of the process while it trains.
        settings: Closed by the coordinator's thread at the end, when every other thread has ended.
    """

    services: Services
    meeting: MeetingPoint
    workers: Sequence[Worker]
    threads: Sequence[threading.Thread]
    machine: Coordinator | Follower
    event_log: EventLog
    posts: Posts
    watch: StallWatch
    diagnostics: Diagnostics
    link: LeaderLink | FollowerLink | None
    tuning: ProcessTuning
    settings: ExitStack

    def all_threads(self, coordinator: threading.Thread) -> list[threading.Thread]:
        """All threads of the run but the callbacks', those that read its datasets included."""
        services = self.services
        readers = [thread for source in services.sources for thread in source.threads()]
        writer = [] if services.saver.thread is None else [services.saver.thread]
        links = [] if services.channel is None else services.channel.threads()
        return [*self.threads, coordinator, *readers, *writer, *links]


class CoordinatorShell:
    """The body of the coordinator thread.

    After a failure the collective is aborted when ranks do not leave: one may hang in a kernel of it.
    With a link there are other machines: this is the thread of the one that leads, or of one that follows.
    """

    def __init__(self, parts: EngineParts) -> None:
        services = parts.services
        self._parts, self._machine, self._link = parts, parts.machine, parts.link
        self._inbox, self._gate = services.requests.inbox, parts.meeting.gate
        self._records, self._failures, self._saver = services.records, services.failures, services.saver
        self._jobs: Inbox[Average | None] = Inbox()
        self._helper: threading.Thread | None = None
        self._start_s = perf_counter()
        self._failing_ms: float | None = None
        self._finish: Finish | None = None
        self._is_reported = False

    def run(self) -> None:
        """Live until the run is over.

        Threads:
            The body of the coordinator's own thread.
        """
        try:
            if (snapshots := self._parts.meeting.snapshots) is not None:
                average = partial(self._average, snapshots)
                self._helper = threading.Thread(target=average, name="flowdp-average", daemon=True)
                self._helper.start()
            while self._machine.phase is not Phase.DONE:
                self._turn()
        except BaseException as error:
            self._give_up(error)
        finally:
            self._end()

    def _now_ms(self) -> float:
        return (perf_counter() - self._start_s) * 1e3

    def _turn(self) -> None:
        """Wait for a fact or the deadline, and obey the machine's commands."""
        due = (self._machine.deadline_ms(), self._failing_ms, self._parts.watch.deadline_ms())
        deadlines = [ms for ms in due if ms is not None]
        fact = self._inbox.get(min(deadlines) - self._now_ms() if deadlines else None)
        now_ms = self._now_ms()
        if (look_ms := self._parts.watch.deadline_ms()) is not None and now_ms >= look_ms:
            self._look(now_ms)
        if self._failing_ms is not None and now_ms >= self._failing_ms:
            self._failing_ms = None
            self._failures.note_stuck(self._parts.threads)
            self._conclude(over=False)
            self._parts.meeting.collective.abort()
        fact = fact or Tick()
        try:
            commands = self._machine.handle(fact, now_ms)
        except ProtocolError:
            # The fact that the protocol rules out is the one to see.
            self._parts.event_log.take(fact, now_ms, ())
            raise
        self._parts.event_log.take(fact, now_ms, commands)
        for command in commands:
            self._obey(command)
            if self._link is not None:
                self._link.relay(command)
            if (timeline := self._parts.services.timeline) is not None:
                timeline.note(command)
        if isinstance(fact, Requested):
            self._records.count_request()
        elif isinstance(fact, Exiting):
            self._failures.blame(fact.rank)  # unless it has been forgiven

    def _look(self, now_ms: float) -> None:
        """See whether anything has moved since the last look."""
        phase, sign = self._machine.phase, self._parts.diagnostics.all_signs()
        verdict = self._parts.watch.look(
            now_ms,
            (sign.moves, self._machine.global_step),
            all_started=sign.has_started,
            # A run that starts, fails or leaves has deadlines of its own, and a disk may be slow.
            may_idle=self._records.is_paused or phase is not Phase.RUNNING or self._failing_ms is not None,
            longest_ms=sign.longest_ms,
        )
        if verdict == "moves":
            return
        threads = self._parts.all_threads(threading.current_thread())
        error = self._parts.diagnostics.stall_error(self._parts.watch.still_ms / 1e3, threads)
        if verdict == "warn":
            self._warn(str(error), "stalled", str(error).partition("\n\n")[0].replace("\n ", ";"))
        else:
            self._inbox.post(Failed(self._failures.add(error)))

    def _warn(self, text: str, about: object, short: str = "") -> None:
        """Tell of something that does not end the run, and keep it, or a `short` text, with the records."""
        log.warning("%s", text)
        self._records.complain(short or text, about)

    def _obey(self, command: Command) -> None:
        match command:
            case Send():
                self._parts.posts[command.rank](command.order)
            case LeaveGate():
                self._failures.forgive(command.rank)
                self._gate.leave(command.rank)
            case CutEvaluation():
                if (evaluator := self._parts.services.evaluator) is not None:
                    evaluator.batches.cut()
            case Save():
                self._saver.save(command, self._records.epochs)
            case SavesPutOff():
                self._warn(str(command), "saves put off")
            case Quarantined():
                self._warn(self._parts.diagnostics.quarantined(command), ("quarantined", command.rank))
            case RoundEnded():
                self._records.add(command)
                if command.share:
                    shares = format_shares(command.share)
                    log.info("round %d: the shares are %s from now on", command.round, shares)
                    if idle := [rank for rank, share in enumerate(command.share) if not share]:
                        names = ", ".join(map(str, idle))
                        log.info("rank %s is left out for now: it would hold the others up", names)
                if command.reason:
                    log.debug("round %d: %s", command.round, command.reason)
            case EpochStarted():
                self._records.add(command)
            case EpochMetrics() | EvaluationEnded():
                self._records.add(command)
                log.info("%s", command)
            case Directives():
                self._direct(command)
            case AbortGate():
                self._gate.abort(command.reason)
                self._failing_ms = self._now_ms() + GRACE_MS
            case Average():
                self._jobs.post(command)
            case Paused():
                self._records.pause(command.value)
            case Fail():
                self._failures.add(self._error_of(command))
            case Finish():
                self._finish = command
                log.info("%s", command)
                if command.error is None and (waiting := self._direct(Directives())):
                    # A callback that sets the rate after each epoch does so after the last one, too.
                    log.log(
                        logging.INFO if command.is_planned else logging.WARNING,
                        "%s came after the last round and has no effect: the result has the rates from "
                        "before; call it again on the run that resumes",
                        ", ".join(dict.fromkeys(f"run.{wish.what}()" for wish in waiting)),
                    )

    def _direct(self, directives: Directives) -> tuple[Requested, ...]:
        return (self._gate if self._link is None else self._link).direct(directives)

    def _error_of(self, command: Fail) -> FlowdpError:
        """Error of a failure that the machine has found, for which no thread has an exception."""
        if command.kind == "option":
            return OptionError(command.error)
        if command.kind == "collective":
            return CollectiveError(command.error)
        last = self._saver.last
        kept = "no checkpoint was written" if last is None else f"the last checkpoint is {str(last)!r}"
        return FlowdpError(f"{command.error}; {kept}")

    def _average(self, snapshots: SnapshotMean) -> None:
        """The body of the averaging thread."""
        while (job := self._jobs.get()) is not None:
            try:
                sync_ms, drifts = snapshots.average(job.round, job.samples)
                self._inbox.post(Averaged(job.round, sync_ms, drifts, snapshots.norm))
            except BaseException as cause:
                error = CollectiveError(
                    f"averaging the snapshots of round {job.round} failed: {format_error(cause)}"
                )
                error.__cause__ = cause
                self._inbox.post(Failed(self._failures.add(error)))

    def _give_up(self, error: BaseException) -> None:
        """Free all threads after a failure of the machine or of this shell, without the machine."""
        if isinstance(error, ProtocolError) and not error.events:
            error = ProtocolError(str(error), events=self._parts.event_log.tail(50)).with_traceback(
                error.__traceback__
            )
        reason = self._failures.add(error)
        self._gate.abort(reason)
        if self._link is not None:
            self._link.give_up(reason)
        for post in self._parts.posts.values():
            post(Leave(reason))

    def _end(self) -> None:
        """Join every thread, then say that the run is over."""
        try:
            self._leave()
        except BaseException as error:
            self._failures.add(error)
        finally:
            self._saver.give_back()
            self._conclude(over=True)

    def _leave(self) -> None:
        deadline_s = perf_counter() + GRACE_MS / 1e3
        for thread in self._parts.threads:
            # Each has posted Exiting, except after a failure of this thread, when none is read.
            is_leaving = self._machine.phase is Phase.DONE
            thread.join(None if is_leaving else max(0.0, deadline_s - perf_counter()))
        if self._helper is not None:
            self._jobs.post(None)
            # After a failure it may wait for a device that never gets there.
            self._helper.join(None if self._failures.first is None else GRACE_MS / 1e3)
        self._gate.retire()
        self._close_saver()
        for source in reversed(self._parts.services.sources):
            if not source.close():
                log.warning("a dataset is still inside its own code; its thread ends with that call")
        self._failures.note_stuck(self._parts.threads)
        self._close()

    def _close_saver(self) -> None:
        """Finish writing checkpoints; a failure is reported before that, for a disk may be slow."""
        if self._failures.first is not None and self._saver.is_busy:
            self._conclude(over=False)
        self._saver.close()

    def _close(self) -> None:
        """Give everything back; after a failure without waiting for ever."""
        if self._failures.first is None and not self._failures.forgiven:
            self._parts.settings.close()
            return
        # A device may wait for a kernel that another one never launches, and no rank may be left to notice:
        # all may have failed, or left, with a collective's kernel still on its way.
        if self._failures.first is not None:
            self._parts.meeting.collective.abort()
        closer = threading.Thread(target=self._try_closing, name="flowdp-closing", daemon=True)
        closer.start()
        closer.join(GRACE_MS / 1e3)
        if closer.is_alive():
            log.warning("a device does not come to rest after the failure: its memory stays in use")

    def _try_closing(self) -> None:
        try:
            self._parts.settings.close()
        except BaseException as error:
            if self._failures.first is None:  # of a rank that the others went on without
                log.warning("a device that had failed cannot be given back: %s", error)
            else:
                self._failures.add(error)

    def _conclude(self, *, over: bool) -> None:
        """Publish the end of the run, and print a failure that no thread raises."""
        self._records.end(self._finish, over=over)
        self._saver.end()
        error = self._failures.first
        if over:
            self._failures.conclude()
        if error is None or self._is_reported:
            return
        self._is_reported = True
        if not self._records.wait_for_reader(UNHEARD_MS / 1e3):
            _print_unhandled(error)


def _print_unhandled(error: BaseException) -> None:
    """Print a failure that no thread raises as an unhandled exception of a thread."""
    thread = threading.current_thread()
    args = threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
    if sys.stderr is not None:
        threading.excepthook(args)
