"""The judge of rounds of one big step (exact): every sample of every window once, and one step of all."""

from __future__ import annotations

from flowdp.machine.worker import Step
from flowdp.protocol.commands import Finish
from flowdp.protocol.messages import Outcome
from tests.simulator.scenario import Scenario
from tests.simulator.violation import Violation

__all__ = ["Windows"]


class Windows:
    """Watches the windows of one run.

    Attributes:
        compared: The (epoch, window) of the rounds after which the replicas were compared.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        batch = scenario.config.global_batch
        self._least = 1 if batch is None else batch.least
        self._round: list[Step] = []  # what was trained since the last meeting
        self.compared: set[tuple[int, int]] = set()

    def trained(self, step: Step) -> None:
        """A rank has trained its part."""
        self._round.append(step)

    def held(self, outcome: Outcome) -> list[tuple[int, int]]:
        """All parts have met; returns the (epoch, window) of each window that they make."""
        steps, self._round = self._round, []
        if not any(step.alone for step in steps):
            return [self._window(steps, outcome, outcome.global_step - 1)]
        if sum(map(bool, outcome.steps)) != 1:
            raise Violation("S16", f"{outcome} is of steps that one rank takes alone")
        first = outcome.global_step - len(steps)
        return [self._window([step], outcome, first + at) for at, step in enumerate(steps)]

    def _window(self, steps: list[Step], outcome: Outcome, position: int) -> tuple[int, int]:
        """The window that these parts make, at this position."""
        if len({(step.epoch, *step.batches) for step in steps}) != 1:
            raise Violation("S16", f"round {outcome.round} is not of one window: {steps}")
        if {step.position for step in steps} != {position}:
            raise Violation("S16", f"{steps} are not the step at {position} before {outcome}")
        epoch, window = steps[0].epoch, steps[0].batches[0]
        stop = 0
        parts = sorted((step.part.start, step.part.stop) for step in steps if step.part is not None)
        for part in parts:
            if part[0] != stop:
                raise Violation("S15", f"the parts {parts} of window {window} do not tile it")
            stop = part[1]
            samples = part[1] - part[0]
            if 0 < samples < min(self._least, self._scenario.samples_in(epoch, window)):
                raise Violation("S15", f"of the parts {parts} of window {window} one is too small")
        if stop != self._scenario.samples_in(epoch, window):
            raise Violation("S15", f"the parts {parts} of window {window} leave samples out")
        if outcome.compares:
            self.compared.add((epoch, window))
        elif outcome.stop:
            raise Violation("S17", f"{outcome} ends the run, and its replicas are not compared")
        return epoch, window

    def ended(self, epoch: int) -> None:
        """An epoch is complete."""
        start = self._scenario.config.start
        stood = [] if start is None else [one for one in start.open if one.epoch == epoch]
        windows = self._scenario.dealt(epoch)
        if stood and stood[0].position == windows:
            return  # all of it was trained by the run that this one continues
        if (epoch, windows - 1) not in self.compared:
            raise Violation("S17", f"epoch {epoch} has ended, and its replicas were not compared")

    def over(self, finish: Finish) -> None:
        """The run is over."""
        differs = self._scenario.differs
        if differs is None or self._scenario.crashes:
            return
        # One against one, the first is believed.
        rank = differs[0] if self._scenario.config.world_size > 2 else 1
        is_seen = any(epoch >= differs[1] for epoch, _ in self.compared)
        if is_seen != (finish.error is not None and f"rank {rank} " in finish.error):
            raise Violation("S17", f"rank {differs[0]} differs from epoch {differs[1]}, and {finish}")
