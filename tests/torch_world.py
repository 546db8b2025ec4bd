"""Processes of torch.distributed with gloo, to compare with torch's own."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.limits import HANG_S

IMPORTED = ["torch._dynamo", "flowdp.api"]
"""What the server of processes imports once, which would take each process three seconds."""


def in_processes(work: Callable[..., Any], folder: Path, size: int, *args: Any) -> list[Any]:
    """Run `work(rank, *args)` in `size` processes with one gloo group; returns their results, by rank.

    None for a process that ended well without one.
    """
    context: Any = multiprocessing.get_context("spawn")
    if os.name == "posix":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_process, args=(rank, size, str(folder / "store"), pipe, work, args))
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    answers: dict[Any, Any] = {}
    left = dict(zip((ours for ours, _ in pipes), processes, strict=True))
    while left:
        for ours in wait(list(left)):
            process = left.pop(ours)
            try:
                answers[ours] = ours.recv()
            except EOFError:
                process.join(HANG_S)
                if process.exitcode:  # the others may wait for it
                    _kill(left.values())
                    left.clear()
                    break
    for process in processes:
        process.join(HANG_S)
    assert [process.exitcode for process in processes] == [0] * size, "see what the processes wrote"
    return [answers.get(ours) for ours, _ in pipes]


def _kill(processes: Iterable[BaseProcess]) -> None:
    """Kill processes that do not end by themselves."""
    for process in processes:
        process.join(HANG_S)
        process.kill()


def _process(
    rank: int, size: int, store: str, answer: Any, work: Callable[..., Any], args: Sequence[Any]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    answer.send(work(rank, *args))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not at the end of the interpreter: a gloo thread that still needs it would then abort the process.
    os._exit(0)
