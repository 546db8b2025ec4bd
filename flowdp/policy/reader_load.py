"""Load of a reader thread: the part of the time in which it computes, which launches beside it lack."""

from __future__ import annotations

__all__ = ["LOOK_S", "MUCH", "ReaderLoad"]

LOOK_S = 10.0
"""Seconds of reading that a share is taken of."""

MUCH = 0.3
"""A share of the time that is worth a word: launches wait for the interpreter so much at most."""


class ReaderLoad:
    """Tells once that reading takes much of the time.

    Args:
        now_s: When the reading begins.
        cpu_s: CPU time of the thread until then.
    """

    def __init__(self, now_s: float, cpu_s: float) -> None:
        self._start_s, self._start_cpu_s = now_s, cpu_s
        self._is_told = False

    def passed(self, now_s: float, cpu_s: float) -> float | None:
        """Look at the clocks behind a batch.

        Args:
            now_s: The time.
            cpu_s: CPU time of the thread so far.

        Returns:
            The share of the time in which it has computed, where that is much, once; else None.
        """
        if self._is_told or now_s - self._start_s < LOOK_S:
            return None
        share = (cpu_s - self._start_cpu_s) / (now_s - self._start_s)
        self._start_s, self._start_cpu_s = now_s, cpu_s
        self._is_told = share >= MUCH
        return share if self._is_told else None
