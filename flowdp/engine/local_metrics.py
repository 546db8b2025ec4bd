"""Values of torchmetrics on the threads of a run: of the object that is asked, and of no other process.

`Metric.compute()` asks every process of an initialised `torch.distributed`, and waits for their answers. The
ranks of a run call it in any number and order, and callbacks are called on machine 0 alone: the processes
would wait for each other for ever, or put together values of different calls. torchmetrics is recognised by
its module and need not be installed; one that is imported behind the start of a run is not seen.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

__all__ = ["local_metrics"]

log = logging.getLogger("flowdp")

_local = threading.local()
"""`marks`: weak references to the marks of the contexts in which the thread is."""

_lock = threading.Lock()  # serialises the replacement of the method, and guards what was told
_told: set[str] = set()


class _Mark:
    """Mark of a context that is open: it lives as long as that."""


@contextmanager
def local_metrics() -> Iterator[None]:
    """Context of a thread of a run: metrics that compute in it ask no other process.

    A Ctrl-C may come at any line of this, too, on the user's thread. No flag is left behind by one: a mark
    that was not taken away ends with its frame.
    """
    _replace_sync()
    mark = _Mark()
    _local.marks = [*_open_marks(), weakref.ref(mark)]
    try:
        yield
    finally:
        del mark


def _open_marks() -> list[weakref.ref[_Mark]]:
    return [mark for mark in getattr(_local, "marks", ()) if mark() is not None]


def _replace_sync() -> None:
    """Let torchmetrics ask whether its thread belongs to a run; elsewhere it does what it did."""
    loaded: Any = sys.modules.get("torchmetrics.metric")
    kind = getattr(loaded, "Metric", None)
    if kind is None or not hasattr(kind, "sync"):
        return
    with _lock:
        if not hasattr(kind.sync, "flowdp_original"):
            kind.sync = _asking(kind.sync)


def _asking(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def sync(metric: Any, *positions: Any, **given: Any) -> None:
        # Values by position come from a call of the user's own, and a group or function is the user's choice.
        is_usual = not positions and given.get("should_sync", True) and not _has_own_way(metric, given)
        if is_usual and _open_marks() and _is_job():
            _tell(type(metric).__name__)
            return
        original(metric, *positions, **given)

    sync.flowdp_original = original  # type: ignore[attr-defined]
    return sync


def _has_own_way(metric: Any, given: dict[str, Any]) -> bool:
    if any(
        given.get(name) is not None for name in ("dist_sync_fn", "process_group", "distributed_available")
    ):
        return True
    available = getattr(metric, "distributed_available_fn", None)
    return getattr(metric, "process_group", None) is not None or (callable(available) and not available())


def _is_job() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _tell(kind: str) -> None:
    with _lock:
        is_news = kind not in _told
        _told.add(kind)
    if is_news:
        log.warning(
            "%s.compute() in a loss, a step or a callback counts the updates of this object alone, not "
            "those of other machines, which do not call it at the same time; for the value of all give "
            "Trainer(metrics={...}), or return the metric itself from the evaluation's step",
            kind,
        )
