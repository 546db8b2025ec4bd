"""The mean of several machines by NCCL, in real processes, with a fake NCCL that sums between them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flowdp.collective import nccl
from flowdp.collective.base import Averaging
from flowdp.collective.host import HostMean
from flowdp.collective.nccl import NcclMean, open_nccl_machines
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import QUIET
from flowdp.errors import CollectiveError
from flowdp.network.machines import Machines, find_machines
from flowdp.network.team import Team
from flowdp.options import MachineOptions, OuterOptions
from flowdp.protocol.messages import Outcome
from tests.collective.fake_nccl import FakeNcclOfMachines
from tests.collective.fake_world import FakeLane, in_threads
from tests.collective.test_machines_mean import (
    DILOCO,
    State,
    check_close,
    check_equal,
    every,
    module_of,
    noise,
    packed,
    unpacked,
    weighted,
)
from tests.fakes import FakeCuda
from tests.torch_world import in_processes

FULL = (40, 8, 24)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"samples": (40, 0, 24)},
    "one rank each": {"sizes": (1, 1), "samples": (40, 24)},
    "NaN of a rank": {"samples": (40, 0, 24), "bad": (1,)},
    "earlier alone": {"samples": (0, 0, 8), "earlier": (24, 16, 0)},
    "outer": {"outer": DILOCO},
}


def machines() -> Machines:
    found = find_machines(timeout_s=60.0)
    assert found is not None
    return found


class World:
    """The ranks of this process on fake lanes, and the mean of all machines: by NCCL, or on the host."""

    def __init__(
        self,
        sizes: Sequence[int] = (2, 1),
        outer: OuterOptions | None = None,
        *,
        rounds: int = 1,
        by: str = "nccl",
        loads: Any = None,
    ) -> None:
        self.cuda = FakeCuda()
        self.team = Team(tuple(sizes), machines(), MachineOptions(rounds=rounds))
        ranks = self.team.ranks
        self.lanes = [FakeLane(torch.device("cuda", place), self.cuda) for place in range(len(ranks))]
        self.modules = [module_of(rank) for rank in ranks]
        self.replicas = [FlatReplica(one, rank) for one, rank in zip(self.modules, ranks, strict=True)]
        for replica in self.replicas:
            self.cuda.watch(f"rank {replica.rank}", *replica.memories)
        self.nccl = FakeNcclOfMachines(self.cuda, self.lanes, ranks, self.team.world_size)
        self.round = 0
        self.mean: Any
        if by == "host":
            barrier = threading.Barrier(len(ranks), timeout=60.0)
            self.mean = HostMean(self.replicas, self.lanes, lambda _: barrier.wait(), outer, self.team)
        else:
            nccl.load = lambda: self.nccl
            if loads is not None:
                self.nccl = loads(self)
            self.mean = open_nccl_machines(self.replicas, self.lanes, self.team, outer)

        self.opened = len(self.nccl.groups)  # sums of the start, with no other thread of the run yet

    def train(self, samples: Sequence[int], bad: Sequence[int] = ()) -> None:
        """A step of the ranks with samples; those that are bad end with no number."""
        for lane, module, replica in zip(self.lanes, self.modules, self.replicas, strict=True):
            with lane.on(lane.compute):
                if samples[replica.rank]:
                    for parameter in module.parameters():
                        parameter.data += noise(parameter, replica.rank, self.round)
                if replica.rank in bad:
                    for memory in replica.memories:
                        if memory.dtype.is_floating_point:
                            memory.fill_(torch.nan)

    def hold(self, samples: Sequence[int], **more: Any) -> list[Averaging]:
        ranks = self.team.ranks
        members = tuple(ranks if more.get("inner") else range(self.team.world_size))
        outcome = Outcome(self.round, 0, members, (1,) * len(samples), tuple(samples), **more)
        places = range(len(ranks))
        for place, lane in zip(places, self.lanes, strict=True):
            with lane.on(lane.compute):
                self.mean.prepare(place)
        self.mean.launch(outcome)

        def average(place: int) -> Averaging:
            lane = self.lanes[place]
            with lane.on(lane.compute):
                read = self.mean.average(place, outcome)
            return read()

        found = in_threads(places, average)
        self.round += 1
        assert all(isinstance(one, Averaging) for one in found), found
        return found

    def states(self) -> list[State]:
        return [{k: v.clone() for k, v in module.state_dict().items()} for module in self.modules]

    def close(self) -> None:
        self.mean.close()
        assert not self.cuda.races
        assert not self.nccl.abused
        if isinstance(self.mean, NcclMean):
            assert not self.nccl.aborted
            assert all(is_quiet for is_quiet, _ in self.nccl.groups[self.opened :]), "a launch beside others"


def plain(case: dict[str, Any], by: str) -> dict[str, Any]:
    world = World(case.get("sizes", (2, 1)), case.get("outer"), by=by)
    samples = case.get("samples", FULL)
    found: dict[str, Any] = {}
    for _ in range(2):  # the second one is of an outer step that the first has moved
        world.train([1] * len(samples), case.get("bad", ()))
        found["before"] = world.states()
        found["averagings"] = world.hold(samples, drift=True, earlier=case.get("earlier", ()))
        found["after"] = world.states()
    world.close()
    return found


def inner(by: str) -> dict[str, Any]:
    """Two inner rounds, of which the second has no mean on machine 1, and one of all."""
    world = World(rounds=3, outer=DILOCO, by=by)
    world.train(FULL)
    world.hold(FULL, inner=True)
    after = world.states()
    world.train((40, 0, 24))
    world.hold((40, 0, 24), inner=True, drift=True)
    world.hold((0, 0, 0))  # of nothing
    world.train(FULL)
    world.hold(FULL, earlier=(80, 8, 48))
    found = {"inner": after, "all": world.states()}
    world.close()
    return found


def refusal(**options: Any) -> str:
    try:
        World(**options)
    except CollectiveError as error:
        return str(error)
    return "none"


class Broken(FakeNcclOfMachines):
    """Sums that do not reach this machine."""

    def _across(self, result: Any, dtype: int, op: int, ndev: int) -> Any:
        return super()._across(result, dtype, op, ndev) * 0


def refusals(index: int) -> dict[str, Any]:
    """A start where NCCL works on machine 0 and not on machine 1, twice, each while another run lives."""
    made: list[Broken] = []

    def absent(world: World) -> Any:
        nccl.load = refuse
        return world.nccl

    def refuse() -> Any:
        raise CollectiveError("cupy is not there")

    def broken(world: World) -> Broken:
        made.append(Broken(world.cuda, world.lanes, world.team.ranks, world.team.world_size))
        return made[0]

    whole = World()
    texts = {
        "absent": refusal(loads=absent if index else None),
        "broken": refusal(loads=broken if index else None),
    }
    whole.close()
    return {**texts, "aborted": [one.aborted for one in made], "quiet": not QUIET.locked()}


def two(index: int) -> bytes:
    found: dict[str, Any] = {
        name: {by: plain(case, by) for by in ("nccl", "host")} for name, case in CASES.items()
    }
    found["inner rounds"] = {by: inner(by) for by in ("nccl", "host")}
    return packed(found | {"refusals": refusals(index)})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return [unpacked(one) for one in in_processes(two, tmp_path_factory.mktemp("job"), 2)]


@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_all_ranks_is_the_hosts(found: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    nccl, host = ([one[name][by] for one in found] for by in ("nccl", "host"))
    after, wanted = every(nccl, "after"), every(host, "after")
    check_equal(after)
    check_close(after[0], wanted[0])
    if not {"outer", "earlier"} & case.keys():
        check_close(after[0], weighted(every(nccl, "before"), case.get("samples", FULL)))
    for mine, theirs in zip(every(nccl, "averagings"), every(host, "averagings"), strict=True):
        assert (mine.drift is None) == (theirs.drift is None)
        if mine.norm is not None:
            assert mine.norm == pytest.approx(theirs.norm, rel=1e-3)


def test_inner_rounds_are_of_one_machine_and_have_no_outer_step(found: list[dict[str, Any]]) -> None:
    nccl, host = ([one["inner rounds"][by] for one in found] for by in ("nccl", "host"))
    for mine, theirs in zip(nccl, host, strict=True):
        check_equal(mine["inner"])
        check_close(mine["inner"][0], theirs["inner"][0])
    assert not torch.equal(nccl[0]["inner"][0]["0.weight"], nccl[1]["inner"][0]["0.weight"])
    check_equal(every(nccl, "all"))
    check_close(every(nccl, "all")[0], every(host, "all")[0])


@pytest.mark.parametrize(
    ("name", "text"), [("absent", "cupy is not there"), ("broken", "gives rank 2 wrong sums")]
)
def test_all_machines_hear_that_nccl_does_not_work_on_one(
    found: list[dict[str, Any]], name: str, text: str
) -> None:
    first, second = (one["refusals"][name] for one in found)
    assert first == second
    assert first.startswith("machine 1 (")
    assert text in first
    assert all(one["refusals"]["quiet"] for one in found)


def test_communicators_of_a_start_that_failed_are_aborted(found: list[dict[str, Any]]) -> None:
    assert found[1]["refusals"]["aborted"] == [[2]]
