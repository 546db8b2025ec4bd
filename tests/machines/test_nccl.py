"""The mean of several machines by NCCL, in real processes, with a fake NCCL that sums between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flowdp.collective import nccl
from flowdp.collective.nccl import NcclMean, open_nccl_machines
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import CollectiveError
from flowdp.options import OuterOptions
from tests.collective.fake_nccl import FakeNcclOfMachines
from tests.collective.fake_world import FakeLane
from tests.collective.test_machines_mean import (
    DILOCO,
    World,
    check_close,
    check_equal,
    every,
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


class NcclWorld(World):
    """The ranks of this process on fake lanes, and the mean of all machines: by NCCL, or on the host."""

    def __init__(
        self, sizes: Sequence[int] = (2, 1), *, by: str = "nccl", loads: Any = None, **options: Any
    ) -> None:
        self.by, self.loads = by, loads
        super().__init__(sizes, **options)
        self.opened = len(self.nccl.groups)  # sums of the start, with no other thread of the run yet

    def open_lanes(self, count: int) -> Sequence[Lane]:
        self.cuda = FakeCuda()
        for replica in self.replicas:
            self.cuda.watch(f"rank {replica.rank}", *replica.memories)
        return [FakeLane(torch.device("cuda", place), self.cuda) for place in range(count)]

    def open_mean(self, outer: OuterOptions | None, **options: Any) -> Any:
        self.nccl = FakeNcclOfMachines(self.cuda, self.lanes, self.team.ranks, self.team.world_size)
        if self.by == "host":
            return super().open_mean(outer, **options)
        nccl.load = lambda: self.nccl
        if self.loads is not None:
            self.nccl = self.loads(self)
        return open_nccl_machines(self.replicas, self.lanes, self.team, outer)

    def close(self) -> None:
        self.mean.close()
        assert not self.cuda.races
        assert not self.nccl.abused
        if isinstance(self.mean, NcclMean):
            assert not self.nccl.aborted
            assert all(is_quiet for is_quiet, _ in self.nccl.groups[self.opened :]), "a launch beside others"


def plain(case: dict[str, Any], by: str) -> dict[str, Any]:
    world = NcclWorld(case.get("sizes", (2, 1)), by=by, outer=case.get("outer"))
    samples = case.get("samples", FULL)
    found: dict[str, Any] = {}
    for _ in range(2):  # the second one is of an outer step that the first has moved
        world.train(range(len(samples)))
        for rank in case.get("bad", ()):
            world.spoil(rank)
        found["before"] = world.states()
        found["averagings"] = world.hold(samples, drift=True, earlier=case.get("earlier", ()))
        found["after"] = world.states()
    world.close()
    return found


def inner(by: str) -> dict[str, Any]:
    """Two inner rounds, of which the second has no mean on machine 1, and one of all."""
    world = NcclWorld(rounds=3, outer=DILOCO, by=by)
    world.train(range(3))
    world.hold(FULL, inner=True)
    after = world.states()
    world.train((0, 2))
    world.hold((40, 0, 24), inner=True, drift=True)
    world.hold((0, 0, 0))  # of nothing
    world.train(range(3))
    world.hold(FULL, earlier=(80, 8, 48))
    found = {"inner": after, "all": world.states()}
    world.close()
    return found


def refusal(**options: Any) -> str:
    try:
        NcclWorld(**options)
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

    def absent(world: NcclWorld) -> Any:
        nccl.load = refuse
        return world.nccl

    def refuse() -> Any:
        raise CollectiveError("cupy is not there")

    def broken(world: NcclWorld) -> Broken:
        made.append(Broken(world.cuda, world.lanes, world.team.ranks, world.team.world_size))
        return made[0]

    whole = NcclWorld()
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
