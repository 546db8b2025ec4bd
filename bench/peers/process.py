"""A program as a process tree: its end, its error, its memory, and processes that it leaves."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

__all__ = ["Ended", "run"]

TOKEN = "FLOWDP_BENCH_TREE"  # in the environment of every process of a tree, in whatever session it is
PERIOD_S = 0.05
SETTLE_S, LINGER_S = 2.0, 20.0


@dataclass(frozen=True)
class Ended:
    """End of a program.

    Attributes:
        launched_s: Launch, on the monotonic clock, which all processes share.
        ended_s: Exit of the process that was launched.
        code: Its exit code; None: ended by the time limit.
        shown_s: When the awaited text was first read from its output; None: never.
        output: Standard output and error.
        peak_mb: Largest sum of the processes' proportional set sizes, in 1e6 bytes; 0 where not asked for.
        left: Processes of the tree that lived 2 seconds after the exit. Those of a program that failed are
            then killed, others after 20 seconds more.
    """

    launched_s: float
    ended_s: float
    code: int | None
    shown_s: float | None
    output: str
    peak_mb: float
    left: int


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    limit_s: float,
    awaited: str = "",
    memory: bool = False,
) -> Ended:
    """Run a program to its end.

    Args:
        command: Program and arguments.
        environment: Variables beside those of this process.
        limit_s: Time after which the tree is killed.
        awaited: Text whose first appearance in the output is timed.
        memory: Sample the memory; it costs the program some time.
    """
    token = uuid.uuid4().hex
    lines: list[tuple[float, str]] = []
    peaks = [0.0]
    late, over = threading.Event(), threading.Event()
    launched_s = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment, TOKEN: token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    pipe = process.stdout

    def read() -> None:
        with pipe:
            lines.extend((time.monotonic(), line) for line in pipe)

    def end() -> None:
        late.set()
        _kill(token)

    def sample() -> None:
        while not over.wait(PERIOD_S):
            peaks.append(_memory_mb(process.pid))

    reader = threading.Thread(target=read, daemon=True)
    sampler = threading.Thread(target=sample, daemon=True)
    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    for thread in (reader, timer, *([sampler] if memory else [])):
        thread.start()
    try:
        process.wait()
        ended_s = time.monotonic()
    finally:
        over.set()
        timer.cancel()
        left = _count(token)
        _kill(token, grace_s=0.0 if process.returncode else LINGER_S)
    reader.join(SETTLE_S)  # it ends with the last process that has the pipe
    shown = [at for at, line in list(lines) if awaited and awaited in line]
    return Ended(
        launched_s=launched_s,
        ended_s=ended_s,
        code=None if late.is_set() else process.returncode,
        shown_s=min(shown, default=None),
        output="".join(line for _, line in list(lines)),
        peak_mb=max(peaks),
        left=left,
    )


def _memory_mb(root: int) -> float:
    """Proportional set sizes of a process and its descendants: memory that several share counts once."""
    total = 0
    with suppress(psutil.Error):
        top = psutil.Process(root)
        for process in [top, *top.children(recursive=True)]:
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total / 1e6


def _tree(token: str) -> list[psutil.Process]:
    """Living processes with the token."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TOKEN) == token:
                found.append(process)
    return found


def _count(token: str) -> int:
    """Processes of a tree that still live after a moment."""
    return len(psutil.wait_procs(_tree(token), SETTLE_S)[1])


def _kill(token: str, grace_s: float = 0.0) -> None:
    """Kill the processes of a tree that do not end in time by themselves."""
    _, alive = psutil.wait_procs(_tree(token), grace_s)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
