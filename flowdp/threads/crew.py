"""A crew: one thread per device that runs the jobs it is handed, for loops that the user owns."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from flowdp.errors import CollectiveAborted
from flowdp.policy.formats import format_error
from flowdp.threads.inbox import LISTEN_S
from flowdp.threads.stacks import folded

__all__ = ["Crew"]

T = TypeVar("T")


class Crew:
    """Threads that wait for jobs.

    They are daemons, hold no reference to the crew, and end with `close` or when the crew is collected.

    Args:
        names: One per place; None where the thread that calls `run` does the place's jobs.
        around: For each thread, makes the context in which it lives; none without it. Entered and left in
            the thread itself.

    Threads:
        `run` may be called by any thread but the crew's own, one call at a time.
    """

    def __init__(
        self,
        names: Sequence[str | None],
        around: Callable[[int], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._boxes = [None if name is None else _Box() for name in names]
        self._running: list[_Job[Any]] = []
        self._turn = threading.Lock()  # one call of `run` at a time
        self._caller: threading.Thread | None = None  # the thread whose turn it is
        self._threads = [
            threading.Thread(
                # Settings may belong to the context of a thread, as those of torch.compile do.
                target=copy_context().run,
                args=(_live, box, around(place) if around else nullcontext()),
                name=name,
                daemon=True,
            )
            for place, (name, box) in enumerate(zip(names, self._boxes, strict=True))
            if box is not None
        ]
        self._close = weakref.finalize(self, _dismiss, self._boxes)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Sequence[Callable[[], T] | None]) -> list[T | None]:
        """Do all jobs at once and wait for them.

        An interrupt of the wait (Ctrl-C) leaves jobs that have begun running; the next call waits for them
        first. The others are given up.

        Args:
            jobs: `jobs[i]` for place i; None for nothing.

        Returns:
            Their return values, None for no job. Shape (places,).

        Raises:
            BaseException: The error of the first thread that failed, in order, when all have ended, but one
                that another's failure has caused; those of others are told in its notes.
            RuntimeError: The crew is closed, one of its jobs asks, or a process that was forked since.
        """
        with self._own_turn():
            self._check()
            self._settle()
            handed = [None if do is None else _Job(do) for do in jobs]
            given = [(box, job) for box, job in zip(self._boxes, handed, strict=True) if job is not None]
            done = [job for _, job in given]
            try:
                self._running = done
                for box, job in given:
                    if box is not None:
                        box.put(job)
                for box, job in given:
                    if box is None:
                        job()
                for job in done:
                    job.wait()
            except BaseException:
                for job in done:
                    job.cancel()  # or the next call would wait for one that never came into its box
                raise
            self._running = []
        _raise_first(done)
        return [None if job is None else job.result for job in handed]

    def settle(self) -> None:
        """Wait for the jobs that an interrupted `run` left running.

        Raises:
            RuntimeError: As `run`.
        """
        with self._own_turn():
            self._check()
            self._settle()

    def _check(self) -> None:
        if not self._close.alive:
            raise RuntimeError(
                "the threads of the devices have been closed: make them anew, by setup() or Ddp.wrap()"
            )
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the threads of the devices are in the process that this one was forked from: call them "
                "there, or make them here"
            )

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        me = threading.current_thread()
        if me in self._threads or self._caller is me:
            raise RuntimeError(f"{me.name} cannot hand work to its own crew and wait, in the middle of a job")
        with self._turn:
            try:
                self._caller = me
                yield
            finally:
                self._caller = None

    def _settle(self) -> None:
        for left in self._running:
            left.wait()

    def close(self) -> None:
        """End the threads when their jobs are done, and wait for them; a second time does nothing."""
        self._close()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()


class _Job(Generic[T]):
    """One job and its result."""

    def __init__(self, do: Callable[[], T]) -> None:
        self._todo = [do]  # the thread that takes it out does it, or gives it up
        self.result: T
        self.error: BaseException | None = None
        self._is_done = False
        self._end = threading.Lock()  # cheaper than an Event: one acquire, one release
        self._end.acquire()

    def __call__(self) -> None:
        try:
            do = self._todo.pop()
        except IndexError:
            return
        try:
            self.result = do()
        except BaseException as error:
            self.error = error
        finally:
            del do  # before the caller goes on: it may hold the owner of this crew
            self._is_done = True
            self._end.release()

    def cancel(self) -> None:
        with suppress(IndexError):
            self._todo.pop()
            self._is_done = True

    def wait(self) -> None:
        # The flag, not the lock, is the answer: a thread that is interrupted behind `acquire` asks again.
        while not self._is_done:
            self._end.acquire(timeout=LISTEN_S)


def _raise_first(jobs: Sequence[_Job[Any]]) -> None:
    errors = [job.error for job in jobs if job.error is not None]
    errors.sort(key=lambda error: isinstance(error, CollectiveAborted))
    if not errors:
        return
    said = {format_error(errors[0])}
    for other in errors[1:]:
        words = format_error(other)
        if words in said:  # told once; the notes say where it was
            words = "; ".join(["the same", *getattr(other, "__notes__", ())])
        said.add(words)
        errors[0].add_note(f"at the same time: {words}")
    try:
        raise folded(errors[0])
    finally:
        del errors  # it holds this frame, by its traceback


_Box = SimpleQueue[_Job[Any] | None]


def _live(box: _Box, around: AbstractContextManager[Any]) -> None:
    with around:
        while (job := box.get()) is not None:
            job()
            del job  # it may hold memory of a device


def _dismiss(boxes: Sequence[_Box | None]) -> None:
    for box in boxes:
        if box is not None:
            box.put(None)
