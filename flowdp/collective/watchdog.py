"""Watchdog of collectives whose kernels wait for each other on the devices.

When a link or a device dies, a kernel that spins for its peer never ends, and nothing fails on the host:
every worker waits for its device, for ever. Time alone shows it. The time before a round begins says nothing,
for it waits for a step of the user's, which may take as long as it likes; from there on it is alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from flowdp.collective.on_streams import ROUNDS
from flowdp.device.streams import Event
from flowdp.errors import CollectiveError, CollectiveTimeout

__all__ = ["LIMIT_S", "Watchdog"]

LIMIT_S = 60.0
"""Limit of an averaging that has begun: one of many gigabytes over a slow bus is done in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    number: int
    start: Event
    done: Sequence[Event]


class Watchdog:
    """Calls once when a round has begun and does not end; its thread runs until then, or until `close`.

    Args:
        devices: One per rank, for the message.
        limit_s: Longest time of a round that has begun. A longer one is noticed up to a half later.
        hung: Called with the error, on the watchdog's own thread.

    Threads:
        `launched`, `forget`: the thread that launches the rounds, one at a time. `close`: any.
    """

    def __init__(
        self, devices: Sequence[torch.device], limit_s: float, hung: Callable[[CollectiveError], object]
    ) -> None:
        self._devices = tuple(devices)
        self._limit_s = limit_s
        self._hung = hung
        # No more than these are under way at a time (`STEPS_AHEAD`, and the newest); the objects they refer
        # to are recorded again only after as many rounds more.
        self._lock = threading.Lock()  # guards `_rounds`, never while a device is asked
        self._rounds: deque[_Round] = deque(maxlen=ROUNDS // 2)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowdp-nccl-watch", daemon=True)
        self._thread.start()

    def launched(self, number: int, start: Event, done: Sequence[Event]) -> None:
        """A round is on the devices; returns at once.

        Args:
            number: Number of the round.
            start: Passed when every rank's step is done and the averaging begins, anywhere.
            done: One per rank, passed when its averaging is. One may end while another hangs.
        """
        with self._lock:
            self._rounds.append(_Round(number, start, done))

    def forget(self) -> None:
        """Stop watching the devices: a rank that left may stay behind with its part."""
        with self._lock:
            self._rounds.clear()

    def close(self) -> None:
        """End the thread and wait for it, unless it is the calling one; a second time does nothing."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        seen, since_s = None, 0.0
        # A timed look, for no device calls a host that does not wait for it; every 15 s, so no busy poll.
        while not self._closed.wait(self._limit_s / 4):
            begun, now_s = self._begun(), monotonic()
            if begun is not seen:
                seen, since_s = begun, now_s
            elif begun is not None and now_s - since_s >= self._limit_s:
                where, spent = ", ".join(map(str, self._devices)), f"{now_s - since_s:.3g}"
                text = (
                    f"averaging round {begun.number} over {where} began more than {spent} s ago and does not "
                    "end: a device, or a link between two, does not answer. The system's log may name it "
                    "(NVRM: Xid); NCCL_DEBUG=INFO says how they are linked"
                )
                self._hung(CollectiveTimeout(text))
                return

    def _begun(self) -> _Round | None:
        """The round that the devices average now, if they do."""
        with self._lock:
            rounds = tuple(self._rounds)
        try:
            for held in rounds:
                if not all(mark.query() for mark in held.done):
                    return held if held.start.query() else None
        except RuntimeError:  # the device has failed, and tells its worker, too
            pass
        return None
