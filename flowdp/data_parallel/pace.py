"""Choice between cut batches and the first device alone, in a loop that the user owns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from flowdp.device.streams import Lane
from flowdp.policy.worth import Worth

__all__ = ["Pace"]

log = logging.getLogger("flowdp")


class Pace:
    """Times the loop from step to step, and tries both ways.

    Args:
        lanes: One per rank.
        name: Name of the module, for the log.

    Attributes:
        is_cut: Whether the batches of the step under way are cut.
        is_settled: Whether the first device does all calls, and nothing is measured.

    Threads: the user's.

    Streams: At the edges of the steps that are timed, the host waits for all devices.
    """

    def __init__(self, lanes: Sequence[Lane], name: str) -> None:
        self.is_cut = True
        self.is_settled = False
        self._lanes = lanes
        self._name = name
        self._worth = Worth()
        self._samples = 0
        self._stepped_s: float | None = None
        self._told = False

    def note(self, samples: int) -> None:
        """Note a call of the step under way."""
        self._samples += samples

    def step(self) -> None:
        """Learn from the time since the last step."""
        worth = self._worth
        if worth.is_block_edge:
            for lane in self._lanes:
                lane.drain()
        now_s, samples = perf_counter(), self._samples
        before_s, self._stepped_s, self._samples = self._stepped_s, now_s, 0
        if before_s is None:
            return
        worth.stepped(1e3 * (now_s - before_s), samples)
        self.is_cut, self.is_settled = worth.is_cut, worth.is_chosen and not worth.is_cut
        if self.is_settled and not self._told:
            self._told = True
            log.warning(
                "calls of %s go to %s alone: %s; this is measured again from time to time",
                self._name,
                self._lanes[0].device,
                self,
            )

    def __str__(self) -> str:
        ms = self._worth.ms
        if not ms:
            return "batches are cut, and not yet timed"
        return f"a step takes {ms[True] / ms[False]:.2f} times as long when its batches are cut"
