"""Runs of this process whose threads are alive: devices in use, and runs to end at the process's exit."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from flowdp.errors import OptionError
from flowdp.protocol.messages import Requested

__all__ = ["add", "check_free", "remove", "runs"]

EXIT_GRACE_S = 5.0
"""How long the end of the process waits for a run that was told to stop."""


_live: weakref.WeakSet[Any] = weakref.WeakSet()  # of engines
_lock = threading.RLock()
"""Guards the set, which must not change while it is read. Reentrant: a signal's handler may ask."""


def add(run: Any) -> None:
    """Register a run whose threads are about to start; dropped when the last reference to it goes.

    Raises:
        OptionError: Another run that has begun since the check at its start holds a device or the model.
    """
    with _lock:
        check_free([replica.device for replica in run.replicas], run.trained)
        _live.add(run)


def remove(run: Any) -> None:
    """Drop a run whose start was rolled back."""
    with _lock:
        _live.discard(run)


def _all() -> list[Any]:
    with _lock:
        return list(_live)


def runs() -> list[Any]:
    """The runs that are not over, from the oldest."""
    return sorted((run for run in _all() if not run.records.is_over), key=lambda run: run.begun_s)


def check_free(devices: Sequence[torch.device], model: object = None) -> None:
    """Check that no live run holds what another one needs.

    Args:
        devices: Two runs would share a CUDA device's streams and memory.
        model: The user's module, into which the last of two runs would write its result; None: none.

    Raises:
        OptionError: A run holds one of them.
    """
    for engine in _all():
        if engine.records.is_over:
            continue
        held = {replica.device for replica in engine.replicas} - {torch.device("cpu")}
        if taken := held.intersection(devices):
            names = ", ".join(sorted(map(str, taken)))
            raise OptionError(
                f"devices: {names} is held by another run, which is not over: stop() and join() it first "
                "(flowdp.runs() lists the live ones)"
            )
        if model is not None and engine.trained is model:
            raise OptionError(
                f"model: this {type(model).__name__} is trained by a live run, and both would write into it. "
                "flowdp.runs() lists the live runs: run.stop() and run.join() that one first, or give a "
                "copy, copy.deepcopy(model)"
            )


def _end_of_process() -> None:
    """Wait for the runs of a script that ends without `join()`; a Ctrl-C there, or before, stops them.

    One whose user has left it by a second Ctrl-C, which the script caught, gets `EXIT_GRACE_S`.

    Daemon threads and this, not plain threads: a plain thread's wait at exit cannot be interrupted without
    an abort inside torch.
    """
    runs = _all()
    try:
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            _stop(runs)  # the script ended by an uncaught Ctrl-C
            return
        awaited = [engine for engine in runs if not engine.is_abandoned]
        for engine in awaited:
            engine.request(Requested("unpause"))  # no other thread is left to do it
        for engine in awaited:
            engine.records.wait()
            engine.close_observer(None)
        _await(runs)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # a second one does not wait
            _stop(runs)
        _exit_interrupted()


def _stop(runs: Sequence[Any]) -> None:
    for engine in runs:
        engine.request(Requested("stop", "Ctrl-C"))
    _await(runs)


def _await(runs: Sequence[Any]) -> None:
    """Join runs that have ended or were told to, but for threads that stay inside the user's code."""
    deadline_s = perf_counter() + EXIT_GRACE_S
    for engine in runs:
        engine.records.wait(over=True, timeout_s=max(0.0, deadline_s - perf_counter()))
        engine.join()
        engine.close_observer(max(0.0, deadline_s - perf_counter()))
        engine.tell_end()


def _exit_interrupted() -> None:
    """End the process as an uncaught Ctrl-C does: by SIGINT, which a shell shows as 130.

    An exception of an atexit callback is printed and changes nothing. The interpreter looks, when all else is
    done, whether a KeyboardInterrupt has left code that was run from C.
    """
    names: ctypes.py_object[dict[str, object]] = ctypes.py_object({})
    with suppress(KeyboardInterrupt):
        ctypes.pythonapi.PyRun_String(b"raise KeyboardInterrupt", 257, names, names)  # 257: Py_file_input


def _forget_in_child() -> None:
    """Forget the runs in a forked process: their threads are the parent's, and one may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _live.clear()


atexit.register(_end_of_process)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
