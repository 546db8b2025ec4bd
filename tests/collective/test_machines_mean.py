"""Tests of the mean of several machines, in real processes, against arithmetic in float64."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective import host
from flowdp.collective.base import Averaging
from flowdp.collective.host import HostMean
from flowdp.collective.machines_mean import PACKS
from flowdp.device.flat_gradients import SharedGradients
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import Lane, open_lanes
from flowdp.network.machines import find_machines
from flowdp.network.team import Team
from flowdp.options import MachineOptions, OuterOptions, Payload
from flowdp.protocol.messages import Outcome
from tests.collective.fake_world import in_threads, model
from tests.limits import HANG_S
from tests.torch_world import in_processes

CPU = torch.device("cpu")
DILOCO = OuterOptions(lr=0.7, momentum=0.9, nesterov=True)
State = dict[str, Tensor]


def module_of(rank: int) -> nn.Module:
    """Parameters that are equal on all ranks, statistics and counts of the rank, and two constants."""
    module, own = model(0), model(rank)
    for mine, theirs in zip(module.buffers(), own.buffers(), strict=True):
        mine.copy_(theirs)
    module.register_buffer("table", torch.randn(50, generator=torch.Generator().manual_seed(7)))
    return module


def noise(like: Tensor, rank: int, round: int) -> Tensor:
    """What a rank trains in a round."""
    draw = torch.Generator().manual_seed(1000 * rank + round)
    return 0.05 * torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like.dtype)


class World:
    """The ranks of this process, of machines of these sizes, and the mean of all."""

    def __init__(
        self,
        sizes: Sequence[int],
        payload: str = "full",
        outer: OuterOptions | None = None,
        rounds: int = 1,
        **options: Any,
    ) -> None:
        self.machines = find_machines(timeout_s=HANG_S)
        assert self.machines is not None
        self.team = Team(tuple(sizes), self.machines, MachineOptions(payload=payload, rounds=rounds))
        self.modules = [module_of(rank) for rank in self.team.ranks]
        self.replicas = [
            FlatReplica(module, rank) for module, rank in zip(self.modules, self.team.ranks, strict=True)
        ]
        self.lanes = self.open_lanes(len(self.modules))
        self.mean = self.open_mean(outer, **options)
        self.round = 0

    def open_lanes(self, count: int) -> Sequence[Lane]:
        return open_lanes([CPU] * count)

    def open_mean(self, outer: OuterOptions | None, **options: Any) -> Any:
        """The mean of all machines, by default in the hosts' memory."""
        barrier = threading.Barrier(len(self.modules), timeout=HANG_S)
        return HostMean(self.replicas, self.lanes, lambda _: barrier.wait(), outer, self.team, **options)

    def train(self, ranks: Sequence[int]) -> None:
        for lane, module, rank in zip(self.lanes, self.modules, self.team.ranks, strict=True):
            if rank in ranks:
                with lane.on(lane.compute):
                    for parameter in module.parameters():
                        parameter.data += noise(parameter, rank, self.round)

    def spoil(self, rank: int) -> None:
        """Let nothing of a rank's floating-point memory be a number."""
        if rank in self.team.ranks:
            place = rank - self.team.ranks.start
            with self.lanes[place].on(self.lanes[place].compute):
                for memory in self.replicas[place].memories:
                    if memory.dtype.is_floating_point:
                        memory.fill_(torch.nan)

    def hold(self, samples: Sequence[int], **more: Any) -> list[Averaging]:
        members = tuple(self.team.ranks if more.get("inner") else range(self.team.world_size))
        outcome = Outcome(self.round, 0, members, (1,) * len(samples), tuple(samples), **more)
        places = range(len(self.modules))
        for place, lane in enumerate(self.lanes):
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

    def settle(self) -> None:
        places = range(len(self.modules))
        assert in_threads(places, self.mean.settle) == [None] * len(places)

    def states(self) -> list[State]:
        return [{k: v.clone() for k, v in module.state_dict().items()} for module in self.modules]


def weighted(states: Sequence[State], weights: Sequence[float]) -> State:
    """The mean of all ranks in float64; of counts and flags the largest."""
    wanted = {}
    for name, tensor in states[0].items():
        if tensor.dtype.is_floating_point:
            terms = [n * one[name].double() for n, one in zip(weights, states, strict=True) if n]
            wanted[name] = sum(terms) / sum(weights)
        else:
            wanted[name] = torch.stack([one[name] for one in states]).amax(0)
    return wanted


def tolerance(dtype: torch.dtype, payload: str = "full") -> float:
    if dtype == torch.float64:
        return 1e-12
    return 2**-7 if dtype == torch.bfloat16 else (2e-3 if payload == "bf16" else 2e-6)


def check_close(found: State, wanted: State, payload: str = "full") -> None:
    for name, tensor in wanted.items():
        allowed = tolerance(found[name].dtype, payload)
        assert torch.allclose(found[name].double(), tensor.double(), rtol=allowed, atol=allowed), name


def check_equal(states: Sequence[State]) -> None:
    for one in states[1:]:
        for name, tensor in states[0].items():
            assert torch.equal(one[name], tensor), name


def every(found: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """The results of all ranks, from those of the machines."""
    return [one for machine in found for one in machine[key]]


# ---------------------------------------------------------------- means that are waited for
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"samples": (40, 0, 24)},
    "NaN of a rank": {"samples": (40, 0, 24), "bad": (1,)},
    "narrow": {"payload": "bf16"},
    "narrow, NaN of a machine": {"payload": "bf16", "samples": (0, 0, 24), "bad": (0, 1)},
    # Within a machine the weights are those of the last round; between them, those since the last mean.
    "earlier": {"samples": (8, 0, 8), "earlier": (8, 16, 0), "weights": (32, 0, 8)},
    "large": {"small": 0},
}


@contextmanager
def smallest(elements: int | None) -> Iterator[None]:
    """Let replicas of more elements than this be reduced by all ranks together."""
    before = host.SMALL
    host.SMALL = before if elements is None else elements
    try:
        yield
    finally:
        host.SMALL = before


def plain(sizes: Sequence[int], case: dict[str, Any]) -> dict[str, Any]:
    with smallest(case.get("small")):
        world = World(sizes, case.get("payload", "full"), case.get("outer"))
    samples = case.get("samples", (40, 8, 24))
    found: dict[str, Any] = {"world": world}
    for _ in range(2):  # the second one is of a base, and of an outer step, that the first has moved
        world.train(range(3))
        for rank in case.get("bad", ()):
            world.spoil(rank)
        found["before"] = world.states()
        found["averagings"] = world.hold(samples, drift=True, earlier=case.get("earlier", ()))
        found["after"] = world.states()
    del found["world"]
    return found


def plain_cases(_rank: int) -> dict[str, Any]:
    return {name: plain((2, 1), case) for name, case in PLAIN.items()}


def inner_rounds(_rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for small in (None, 0):
        with smallest(small):
            world = World((2, 1))
        world.train(range(3))
        before = world.states()
        averagings = world.hold((40, 8, 24), inner=True, drift=True)
        found[f"inner {small}"] = {
            "before": before,
            "after": world.states(),
            "averagings": averagings,
        }
        world.hold((0, 0, 0))  # of nothing
        found[f"nothing {small}"] = world.states()
        world.train(range(3))
        before = world.states()
        world.hold((40, 8, 24), earlier=(40, 8, 24))
        found[f"all {small}"] = {"before": before, "after": world.states()}
    return found


def exact(rank: int) -> dict[str, Any]:
    """A round of gradients: rank 1 alone uses the last layer, and its losses alone name a weight."""
    machines = find_machines(timeout_s=HANG_S)
    assert machines is not None
    found: dict[str, Any] = {}
    for payload in ("full", "bf16"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 1).double())
        gradients = SharedGradients(FlatReplica(module, rank))
        mean = HostMean(
            [gradients],
            open_lanes([CPU]),
            lambda _: None,
            None,
            Team((1, 1), machines, MachineOptions(payload=payload)),
        )
        for turn in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank + 10 * turn))
            loss = module[0](x).square().mean()
            if (rank, turn) == (1, 0):
                loss = loss + module[2](module[0](x).double()).sum().float()
                gradients.is_weighted = True
                gradients.weight.fill_(0.5)
            elif turn == 0:
                gradients.weight.fill_(1.0)
            loss.backward()
            mean.prepare(0)
            own = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            outcome = Outcome(turn, 1, (0, 1), (1, 1), (8, 24))
            mean.launch(outcome)
            mean.average(0, outcome)()
            touched = gradients.settle(None)
            gradients.show(touched)
            got = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            found[f"{payload} {turn}"] = {"own": own, "touched": touched, "got": got}
            gradients.clear()
    return found


def packed(found: Any) -> bytes:
    """Results with tensors, on their way to the test: multiprocessing would send descriptors of files."""
    content = io.BytesIO()
    torch.save(found, content)
    return content.getvalue()


def unpacked(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def two(rank: int) -> bytes:
    found = {
        "plain": plain_cases(rank),
        "inner": inner_rounds(rank),
        "exact": exact(rank),
        "overlap": {name: overlapped(**case) for name, case in OVERLAPS.items()},
    }
    return packed(found)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two machines, of two ranks and of one."""
    return [unpacked(one) for one in in_processes(two, tmp_path_factory.mktemp("job"), 2)]


@pytest.mark.parametrize("name", PLAIN)
def test_the_mean_of_all_ranks_on_all_machines_to_the_same_bits(
    found: list[dict[str, Any]], name: str
) -> None:
    case, results = PLAIN[name], [one["plain"][name] for one in found]
    before, after = every(results, "before"), every(results, "after")
    wanted = weighted(before, case.get("weights", case.get("samples", (40, 8, 24))))
    check_close(after[0], wanted, case.get("payload", "full"))
    check_equal(after)
    start = module_of(0).state_dict()
    for constant in ("table", "mask"):
        assert torch.equal(after[0][constant], start[constant])
    rounding = 1e-3 if "payload" in case else 1e-5
    averagings = every(results, "averagings")
    for rank, one in enumerate(averagings):
        if not case.get("samples", (1, 1, 1))[rank]:
            assert (one.drift, one.norm) == (None, None)
            continue
        names = [key for key, _ in module_of(0).named_parameters()]
        mean = torch.cat([wanted[key].double().flatten() for key in names])
        own = torch.cat([before[rank][key].double().flatten() for key in names])
        assert one.drift == pytest.approx(float((own - mean).norm() / mean.norm()), rel=0.02, abs=rounding)
        assert one.norm == pytest.approx(float(mean.norm()), rel=1e-3)


@pytest.mark.parametrize("small", [None, 0])
def test_inner_rounds_are_of_one_machine(found: list[dict[str, Any]], small: int | None) -> None:
    for machine, ranks in enumerate(((0, 1), (2,))):
        inner = found[machine]["inner"][f"inner {small}"]
        check_close(inner["after"][0], weighted(inner["before"], [(40, 8, 24)[rank] for rank in ranks]))
        check_equal(inner["after"])
        check_equal([inner["after"][0], *found[machine]["inner"][f"nothing {small}"]])
        assert all((one.drift is not None) for one in inner["averagings"]) == (machine == 0)
    results = [one["inner"][f"all {small}"] for one in found]
    after = every(results, "after")
    check_close(after[0], weighted(every(results, "before"), (80, 16, 48)))
    check_equal(after)


@pytest.mark.parametrize("payload", ["full", "bf16"])
def test_touched_parameters_and_weights_travel(found: list[dict[str, Any]], payload: str) -> None:
    first, second = (one["exact"][f"{payload} 0"] for one in found)
    # The middle layer has no part in any loss; the last one on machine 1 alone.
    assert first["touched"] == second["touched"] == [True, True, False, False, True, True]
    weight = (8 * 1.0 + 24 * 0.5) / 32
    for mine, theirs, one, other in zip(
        first["got"], second["got"], first["own"], second["own"], strict=True
    ):
        if mine is None:
            assert theirs is None
            continue
        assert torch.equal(mine, theirs)
        wanted = (8 * one.double() + 24 * other.double()) / 32 / weight
        # Float64 is left alone, float32 travels as bfloat16.
        allowed = 1e-12 if mine.dtype == torch.float64 else (2e-2 if payload == "bf16" else 1e-6)
        assert torch.allclose(mine.double(), wanted, rtol=allowed, atol=allowed)
    # In the next round no loss names a weight, and no one uses the last layer.
    first, second = (one["exact"][f"{payload} 1"] for one in found)
    assert first["touched"] == second["touched"] == [True, True, False, False, False, False]
    for mine, one, other in zip(first["got"], first["own"], second["own"], strict=True):
        if mine is not None:
            wanted = (8 * one.double() + 24 * other.double()) / 32
            allowed = 2e-2 if payload == "bf16" else 1e-6
            assert torch.allclose(mine.double(), wanted, rtol=allowed, atol=allowed)


# ---------------------------------------------------------------- means on their way
FULL = (40, 8, 24)
OVERLAPS: dict[str, dict[str, Any]] = {
    "rounds": {"rounds": [FULL] * 4},
    "narrow": {"rounds": [FULL] * 4, "payload": "bf16"},
    "outer": {"rounds": [FULL] * 4, "outer": DILOCO},
    "no samples": {"rounds": [FULL, (40, 8, 0), FULL, (0, 0, 24), FULL]},
    "NaN": {"rounds": [FULL, (40, 8, 0), (40, 8, 0)], "bad": (1, 2)},
    "one": {"rounds": [FULL]},
    "none": {"rounds": []},
}


def overlapped(
    rounds: Sequence[Sequence[int]],
    payload: str = "full",
    outer: OuterOptions | None = None,
    bad: tuple[int, int] | None = None,
    sizes: Sequence[int] = (2, 1),
) -> dict[str, Any]:
    world = World(sizes, payload, outer, overlaps=True)
    states, averagings = [], []
    for samples in rounds:
        world.train([rank for rank, count in enumerate(samples) if count])
        if bad is not None and bad[0] == world.round:
            world.spoil(bad[1])
        averagings.append(world.hold(samples, drift=True))
        states.append(world.states())
    world.settle()
    settled = world.states()
    world.settle()
    return {"states": states, "settled": settled, "again": world.states(), "averagings": averagings}


class Formula:
    """The formula of the module, for the parameters of all ranks, in float64."""

    def __init__(self, sizes: Sequence[int], outer: OuterOptions | None = None) -> None:
        names = [name for name, _ in module_of(0).named_parameters()]
        start = {name: module_of(0).state_dict()[name].double() for name in names}
        self.machine_of = [machine for machine, size in enumerate(sizes) for _ in range(size)]
        self.ranks = [{**start} for _ in self.machine_of]
        self.sent: list[State] | None = None
        self.mean: State = {}
        self.outer, self.last = outer, start
        self.momentum = {name: torch.zeros_like(one) for name, one in start.items()}

    def arrive(self) -> None:
        if self.sent is None:
            return
        if self.outer is not None:
            for name, mean in self.mean.items():
                difference = self.last[name] - mean
                self.momentum[name] = self.outer.momentum * self.momentum[name] + difference
                step = difference + self.outer.momentum * self.momentum[name]
                self.mean[name] = self.last[name] = self.last[name] - self.outer.lr * step
        for rank, machine in enumerate(self.machine_of):
            for name, mean in self.mean.items():
                sent = self.sent[machine][name]
                here = self.ranks[rank][name]
                self.ranks[rank][name] = here + (mean - sent) if sent.isfinite().all() else mean

    def round(self, number: int, samples: Sequence[int], bad: int | None = None) -> None:
        example = dict(module_of(0).named_parameters())
        for rank, values in enumerate(self.ranks):
            for name in values:
                if samples[rank]:
                    values[name] = values[name] + noise(example[name], rank, number).double()
                if rank == bad:
                    values[name] = torch.full_like(values[name], torch.nan)
        self.arrive()
        self.sent = []
        for machine in range(max(self.machine_of) + 1):
            here = [rank for rank, its in enumerate(self.machine_of) if its == machine]
            counts = [samples[rank] for rank in here]
            counts = counts if any(counts) else [1] * len(here)
            self.sent.append(weighted([self.ranks[rank] for rank in here], counts))
            for rank in here:
                self.ranks[rank] = dict(self.sent[-1])
        weights = [
            sum(samples[rank] for rank, its in enumerate(self.machine_of) if its == machine)
            for machine in range(len(self.sent))
        ]
        self.mean = weighted(self.sent, weights)

    def settle(self) -> State:
        if self.sent is not None:
            self.sent = [{name: one * torch.nan for name, one in sent.items()} for sent in self.sent]
        self.arrive()
        return self.ranks[0]


def check_overlap(results: list[dict[str, Any]], case: dict[str, Any], sizes: Sequence[int]) -> None:
    payload, bad = case.get("payload", "full"), case.get("bad")
    formula = Formula(sizes, case.get("outer"))
    for number, samples in enumerate(case["rounds"]):
        formula.round(number, samples, bad[1] if bad is not None and bad[0] == number else None)
        after = [state for one in results for state in one["states"][number]]
        for rank, wanted in enumerate(formula.ranks):
            if all(one.isfinite().all() for one in wanted.values()):
                check_close(after[rank], wanted, payload)
    wanted, settled = formula.settle(), every(results, "settled")
    check_close(settled[0], wanted, payload)
    for name, tensor in settled[0].items():  # all but the statistics and counts before the first round
        assert case["rounds"] == [] or all(torch.equal(one[name], tensor) for one in settled), name
    for mine, again in zip(settled, every(results, "again"), strict=True):
        check_equal([mine, again])


@pytest.mark.parametrize("name", OVERLAPS)
def test_a_mean_that_comes_a_round_later_loses_nothing_of_that_round(
    found: list[dict[str, Any]], name: str
) -> None:
    case, results = OVERLAPS[name], [one["overlap"][name] for one in found]
    check_overlap(results, case, (2, 1))
    if case["rounds"]:
        # The last means are of the statistics and counts of all, constants are as they were.
        settled, start = every(results, "settled")[0], [module_of(rank).state_dict() for rank in range(3)]
        for constant in ("table", "mask"):
            assert torch.equal(settled[constant], start[0][constant])
        for count in ("seen", "flags", "1.num_batches_tracked"):
            assert torch.equal(settled[count], torch.stack([one[count] for one in start]).amax(0))
        first = results[0]["averagings"][0][0]
        assert (first.drift, first.norm) == (None, None)  # no mean has come yet
    if name == "rounds":
        assert torch.allclose(
            every(results, "settled")[0]["1.running_var"],
            weighted(start, FULL)["1.running_var"].float(),
            rtol=1e-6,
        )
        for one in results:
            for averagings in one["averagings"][1:]:
                assert all(0 < averaging.drift < 1 and averaging.norm > 1 for averaging in averagings)


THREE = {"rounds": [(8, 24, 0, 16), (8, 8, 8, 8), (0, 8, 0, 0), (8, 16, 24, 32)]}


def three(_rank: int) -> bytes:
    found = plain((1, 2, 1), {"samples": (8, 24, 0, 16)})
    return packed({"plain": found, "overlap": overlapped(**THREE, sizes=(1, 2, 1))})


def test_three_machines(tmp_path: Path) -> None:
    found = [unpacked(one) for one in in_processes(three, tmp_path, 3)]
    results = [one["plain"] for one in found]
    after = every(results, "after")
    check_close(after[0], weighted(every(results, "before"), (8, 24, 0, 16)))
    check_equal(after)
    check_overlap([one["overlap"] for one in found], THREE, (1, 2, 1))


def test_each_payload_has_a_pack() -> None:
    assert set(PACKS) == set(get_args(Payload))


def test_bf16_halves_float32_alone() -> None:
    single, double = torch.randn(5), torch.randn(5, dtype=torch.float64)
    assert torch.equal(PACKS["bf16"](single), single.bfloat16())
    assert PACKS["bf16"](double) is double
    assert PACKS["full"](single) is single
