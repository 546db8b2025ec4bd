"""The gate on virtual time: a meeting waits for all, takes its time, and loses whom it must."""

from __future__ import annotations

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.worker import Enter
from flowdp.protocol.commands import AbortGate
from flowdp.protocol.messages import Arrival, Directives, StartEpoch, SyncPoints
from tests.simulator.cluster import JudgedWorld
from tests.simulator.scenario import Crash, Scenario


def world(**given: object) -> JudgedWorld:
    config = CoordinatorConfig(world_size=3, batches=3, epochs=1, policy="sync")
    plain = Scenario(seed=0, config=config, ms_per_step=(1.0, 1.0, 1.0), sync_ms=5.0, latency_ms=0.0, **given)  # type: ignore[arg-type]
    made = JudgedWorld(plain)
    for rank in made.ranks:
        rank.machine.handle(StartEpoch(0, 0, (), SyncPoints(0, 0, 1, 0, 0)))
        rank.machine.next()
    return made


def enters(made: JudgedWorld, rank: int) -> None:
    made.enter(rank, Enter(Arrival(rank, 0, 0, 0, 0)))


def states(made: JudgedWorld) -> list[str]:
    return [rank.state for rank in made.ranks]


def rest(made: JudgedWorld, until_ms: float) -> None:
    while made.clock.now_ms < until_ms and made.clock.advance():
        pass


def test_a_mean_takes_its_time_when_all_have_come() -> None:
    made = world()
    enters(made, 0)
    enters(made, 2)
    assert states(made) == ["gate", "starting", "gate"]
    enters(made, 1)
    rest(made, 4.9)
    assert made.clock.now_ms == 5.0
    assert states(made) == ["idle", "idle", "idle"]


def test_without_a_rank_that_has_left_the_others_go_on() -> None:
    made = world()
    enters(made, 0)
    enters(made, 2)
    made.leave_gate(1)
    rest(made, 4.9)
    assert states(made) == ["idle", "starting", "idle"]
    [outcome] = made.rules.outcomes[0]
    assert (outcome.members, outcome.left) == ((0, 2), (1,))


def test_an_abort_releases_who_waits_and_lets_nobody_in() -> None:
    made = world()
    enters(made, 0)
    made.obey(AbortGate("rank 1 failed"))
    assert made.gate.error is not None
    rest(made, 0.1)
    assert states(made)[0] == "released"
    enters(made, 2)
    assert states(made)[2] == "released"


def test_a_failure_in_the_mean_is_an_error_for_all() -> None:
    made = world(crashes=(Crash(1, "mean", 0),))
    for rank in range(3):
        enters(made, rank)
    assert states(made)[1] == "gone"
    assert made.gate.error is not None
    rest(made, 10.0)
    assert made.rules.outcomes == [[], [], []]


def test_directives_are_told_by_the_next_outcome() -> None:
    made = world()
    made.gate.direct(Directives(halt=True))
    for rank in range(3):
        enters(made, rank)
    rest(made, 4.9)
    assert made.rules.outcomes[0][0].halt
