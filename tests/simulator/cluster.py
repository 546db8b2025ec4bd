"""A virtual cluster under the eyes of all judges."""

from __future__ import annotations

from collections.abc import Callable

from flowdp.errors import ProtocolError
from flowdp.sim.scenario import Scenario
from flowdp.sim.world import Machines, World
from tests.simulator.effect import Memory
from tests.simulator.rules import Rules
from tests.simulator.violation import Violation

__all__ = ["JudgedWorld"]


class JudgedWorld(World):
    """One run of a scenario, judged by all rules.

    Args:
        scenario: The run.
        machines: The machines to run.
        trace: Called with the time and a line for every event; None: silent.
        memory: State of the run that this one continues; None: it continues none.

    Attributes:
        rules: The judges.
    """

    def __init__(
        self,
        scenario: Scenario,
        machines: Machines | None = None,
        trace: Callable[[float, str], None] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.rules = Rules(scenario, memory)
        super().__init__(scenario, machines, trace, self.rules)

    def run(self) -> None:
        """Run to the end.

        Raises:
            Violation: A rule does not hold.
        """
        try:
            super().run()
        except ProtocolError as error:
            raise Violation("S2", f"the protocol was broken: {error}") from error
