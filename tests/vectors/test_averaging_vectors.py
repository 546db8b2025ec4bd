"""flodl's vectors for averaging, run through flat replicas, their snapshots and the machine.

A check returns flowdp's values under the names in the vector. All must agree, except the values that
`differences_averaging.md` lists with a reason; those must really differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.nccl import NcclMean
from flowdp.device.discovery import resolve_devices
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import HostLane, open_lanes
from flowdp.device.structure import check_same, structure
from flowdp.errors import OptionError, ProtocolError
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.protocol.commands import Average, Command, RoundEnded, Send
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import (
    Arrival,
    Averaged,
    Fact,
    Outcome,
    Requested,
    RequestParams,
    SnapshotReady,
    StartEpoch,
    StepsDone,
    SyncAck,
    Tick,
    Update,
    Work,
    WorkerReady,
)
from tests.collective.fake_nccl import FakeNccl
from tests.collective.fake_world import FakeLane
from tests.fakes import FakeCuda
from tests.invariants import check
from tests.vectors.book import Answers, Book, Vector

BOOK = Book({"cpu_averaging", "nccl_numeric"}, "differences_averaging.md")
HOST = [HostLane(torch.device("cpu"))] * 2
VECTORS, CHECKS, answers = BOOK.vectors, BOOK.checks, BOOK.answers


def agree(answer: object, expected: object) -> bool:
    if isinstance(expected, str) and expected.startswith("<"):
        return isinstance(answer, int | float) and answer < float(expected[1:].split()[0])
    if isinstance(expected, float):
        given = answer if isinstance(answer, list | tuple) else [answer]
        return len(given) > 0 and all(value == pytest.approx(expected, rel=1e-6) for value in given)
    return bool(answer == expected)


# ---------------------------------------------------------------- replicas of one value
def replica(rank: int, shape: Sequence[int] = (4,)) -> FlatReplica:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(*shape))
    return FlatReplica(module, rank)


def fill(flat: FlatReplica, value: float) -> None:
    flat.memories[0].fill_(value)


def value(flat: FlatReplica) -> float:
    values = set(flat.memories[0].tolist())
    assert len(values) == 1
    return values.pop()


class Cluster:
    """Two ranks with a single parameter each, their snapshots, and the machine that requests them."""

    def __init__(self, shape: Sequence[int] = (4,)) -> None:
        self.machine = Coordinator(CoordinatorConfig(world_size=2, batches=10_000, epochs=1, policy="async"))
        self.replicas = [replica(rank, shape) for rank in (0, 1)]
        self.snapshots = SnapshotMean(self.replicas, HOST)
        self.now_ms = 0.0
        self.orders: list[list[StartEpoch]] = [[], []]
        self.asked: int | None = None  # the round whose snapshots are requested
        self.average: Average | None = None  # the requested mean
        self.drifts: tuple[float, ...] = ()
        self.trained = [0, 0]  # steps, per rank
        self.loaded = [0, 0]  # means, per rank
        self.rounds = 0
        for rank in (0, 1):
            self.tell(WorkerReady(rank))

    @property
    def state(self) -> str:
        round_ = self.machine.rounds._round
        return "Idle" if round_ is None else "Computing" if round_.is_averaging else "Collecting"

    def tell(self, fact: Fact) -> None:
        for command in self.machine.handle(fact, self.now_ms):
            self.obey(command)
        check(self.machine)

    def obey(self, command: Command) -> None:
        match command:
            case Send(rank, StartEpoch() as order):
                self.orders[rank].append(order)
            case Send(_, RequestParams(round)):
                self.asked = round
            case Send(rank, Update(round)):
                self.snapshots.apply(rank, round, 1)
                self.loaded[rank] += 1
            case Average():
                self.average = command
            case RoundEnded():
                self.rounds += 1

    def train(self) -> None:
        """Both ranks take steps, at the same pace, until a round begins."""
        self.asked = None
        while self.asked is None:
            for rank in (0, 1):
                order = self.orders[rank].pop(0)
                steps = len(order.batches)
                self.trained[rank] += steps
                self.tell(StepsDone(rank, order.plan, Work(0, steps, 8 * steps, 10.0 * steps, pace_ms=10.0)))

    def take(self, rank: int, given: float, steps: int = 1) -> None:
        """The requested snapshot of a rank with parameters `given`."""
        fill(self.replicas[rank], given)
        self.snapshots.take(rank, self.asked)
        self.tell(SnapshotReady(rank, self.asked, steps, 8 * steps))

    def meet(self) -> None:
        """A wish calls the ranks to the gate: a round whose snapshots have not all come is given up."""
        self.tell(Requested("set_lr", 0.1))
        order = self.orders[0][-1]
        self.orders = [[], []]
        samples = tuple(8 * steps for steps in self.trained)
        outcome = Outcome(
            order.sync.round, sum(self.trained), (0, 1), tuple(self.trained), samples, hurried=True
        )
        for rank in (0, 1):
            self.tell(SyncAck(rank, outcome, Work(0, 0, 0)))

    def compute(self) -> None:
        sync_ms, self.drifts = self.snapshots.average(self.average.round, self.average.samples)
        self.tell(Averaged(self.average.round, sync_ms, self.drifts))


# ---------------------------------------------------------------- the vectors
@answers("CA-001")
def _weighted(vector: Vector) -> Answers:
    replicas = [replica(rank, vector["setup"]["shape"]) for rank in (0, 1)]
    snapshots, version = SnapshotMean(replicas, HOST), vector["input"]["version"]
    given = vector["input"]["snapshots"]
    for rank, snapshot in enumerate(given):
        fill(replicas[rank], snapshot["value"])
        snapshots.take(rank, version)
    snapshots.average(version, [snapshot["batch_count"] for snapshot in given])
    with pytest.raises(ProtocolError):
        snapshots.apply(0, version - 1, 1)
    for rank in (0, 1):
        snapshots.apply(rank, version, 1)
    assert value(replicas[0]) == value(replicas[1])
    return {"value": value(replicas[0]), "version": version}


@answers("CA-003")
def _trigger(vector: Vector) -> Answers:
    machine = Coordinator(
        CoordinatorConfig(world_size=2, batches=4, epochs=1, policy=vector["setup"]["policy"])
    )
    commands = [*machine.handle(WorkerReady(0), 0.0), *machine.handle(WorkerReady(1), 0.0)]
    sent = [command for command in commands if isinstance(command, Send)]
    orders = [[type(c.order).__name__ for c in sent if c.rank == rank] for rank in (0, 1)]
    assert orders[0] == orders[1]
    return {"messages_per_rank_in_order": orders[0]}


@answers("CA-005")
def _full_cycle(_: Vector) -> Answers:
    cluster = Cluster()
    cluster.train()
    states = [cluster.state]
    cluster.tell(Tick())
    states.append(cluster.state)
    cluster.take(0, 1.0)
    assert cluster.state == "Collecting"
    cluster.take(1, 3.0)
    states.append(cluster.state)
    cluster.tell(Tick())
    states.append(cluster.state)
    cluster.compute()
    states.append(cluster.state)
    assert cluster.loaded[0] == cluster.loaded[1]
    return {"states": states, "version": cluster.rounds, "update_version": cluster.loaded[0]}


@answers("CA-007")
def _stale(vector: Vector) -> Answers:
    cluster = Cluster()
    cluster.train()
    stale = cluster.asked
    cluster.take(0, 999.0)
    cluster.meet()
    cluster.train()
    assert cluster.asked != stale
    for rank, given in enumerate(vector["input"]["round2"]):
        cluster.take(rank, given)
    # The late answer for the round that was given up changes nothing.
    cluster.tell(SnapshotReady(1, stale, 1, 8))
    cluster.compute()
    assert value(cluster.replicas[0]) == value(cluster.replicas[1])
    return {"round2_average": value(cluster.replicas[0]), "version": cluster.loaded[0]}


@answers("CA-009")
def _survivor(vector: Vector) -> Answers:
    given = vector["input"]["final_snapshots"][0]
    replicas = [replica(0), replica(1)]
    fill(replicas[0], given["value"])
    fill(replicas[1], 1.0)
    gate = GateState(2)
    assert gate.enter(Arrival(0, 0, 0, given["batch_count"], 8 * given["batch_count"])) is None
    outcome = gate.leave(1)
    mean = HostMean(replicas, open_lanes([torch.device("cpu")] * 2), lambda rank: None)
    mean.prepare(0)
    mean.launch(outcome)
    mean.average(0, outcome)
    return {"value": value(replicas[0])}


@answers("CA-011")
def _end_to_end(vector: Vector) -> Answers:
    cluster = Cluster((3,))
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(40, 3, generator=draw)
    cluster.train()
    for rank, (start, count) in enumerate(vector["setup"]["plans"]):
        weights = cluster.replicas[rank].memories[0][:3]
        for row in data[start : start + count]:
            weights -= 0.1 * (weights @ row - row.sum()) * row
        cluster.snapshots.take(rank, cluster.asked)
        cluster.tell(SnapshotReady(rank, cluster.asked, cluster.trained[rank], count))
    first, second = (flat.memories[0] for flat in cluster.replicas)
    assert (first - second).abs().sum() > 1e-3
    cluster.compute()
    return {"versions": cluster.loaded, "param_abs_diff_sum": float((first - second).abs().sum())}


@answers("CA-013")
def _wrong_count(_: Vector) -> Answers:
    two, none = nn.Linear(3, 1), nn.Identity()
    with pytest.raises(OptionError) as error:
        check_same([structure(two), structure(none)])
    assert "weight" in str(error.value)
    return {"error": True}


@answers("CA-015")
def _drift(vector: Vector) -> Answers:
    cluster = Cluster(vector["setup"]["shape"])
    cluster.train()
    for rank, snapshot in enumerate(vector["input"]["snapshots"]):
        cluster.take(rank, snapshot["value"], snapshot["batch_count"])
    cluster.compute()
    cadence = cluster.machine.rounds.cadence
    return {
        "average": value(cluster.replicas[1]),
        "relative_delta_each_rank": cluster.drifts,
        "anchor": cadence.anchor,
        "calibrated": cadence.el_che.is_calibrated,
    }


# ---------------------------------------------------------------- sums by NCCL, on a fake that really sums
def summed(values: Sequence[float]) -> list[float]:
    """The sum at each rank: its mean, times the number of ranks."""
    cuda = FakeCuda()
    lanes = [FakeLane(torch.device("cuda", rank), cuda) for rank in range(len(values))]
    replicas = [replica(rank) for rank in range(len(values))]
    for flat, given in zip(replicas, values, strict=True):
        fill(flat, given)
        cuda.watch("a replica", *flat.memories)
    mean = NcclMean(replicas, lanes, FakeNccl(cuda, lanes))
    for rank in range(len(values)):
        mean.prepare(rank)
    ones = (1,) * len(values)
    mean.launch(Outcome(0, 0, tuple(range(len(values))), ones, ones))
    mean.close()
    assert cuda.races == []
    return [value(flat) * len(values) for flat in replicas]


@answers("NC-002", "NC-004")
def _sum(vector: Vector) -> Answers:
    return {"values": summed(vector["input"]["values"])}


@answers("NC-006")
def _one_device(_: Vector) -> Answers:
    assert summed([7.0]) == [7.0]
    return {"error": False}


@answers("NC-008")
def _rank_out_of_range(vector: Vector) -> Answers:
    """Ranks are positions in the list of lanes, so a rank out of range is one communicator too many."""
    cuda = FakeCuda()
    lanes = [FakeLane(torch.device("cuda", rank), cuda) for rank in range(vector["setup"]["world"])]
    with pytest.raises(ValueError, match="argument"):
        NcclMean([replica(rank) for rank in range(vector["setup"]["rank"] + 1)], lanes, FakeNccl(cuda, lanes))
    return {"error": True}


@answers("NC-010")
def _no_devices(_: Vector) -> Answers:
    with pytest.raises(OptionError):
        resolve_devices([])
    return {"error": True}


@answers("NC-012")
def _sum_of_gradients(vector: Vector) -> Answers:
    """Each rank's gradient for its half of the rows, averaged like a replica's parameters."""
    weight = torch.tensor(vector["input"]["w"], dtype=torch.float32)
    rows = torch.randn(vector["input"]["x_rows"], len(weight), generator=torch.Generator().manual_seed(0))

    def gradient(batch: torch.Tensor) -> torch.Tensor:
        parameter = weight.clone().requires_grad_()
        (batch @ parameter).square().sum().backward()
        return parameter.grad

    cuda = FakeCuda()
    lanes = [FakeLane(torch.device("cuda", card), cuda) for card in (0, 1)]
    modules = [nn.ParameterList([nn.Parameter(gradient(half))]) for half in rows.chunk(2)]
    replicas = [FlatReplica(module, rank) for rank, module in enumerate(modules)]
    mean = DeviceMean(replicas, lanes)
    for rank in (0, 1):
        mean.prepare(rank)
    outcome = Outcome(0, 0, (0, 1), (1, 1), (1, 1))
    mean.launch(outcome)
    found = 2 * modules[1][0].data
    return {"abs_diff": float((found - gradient(rows)).abs().max())}


# ---------------------------------------------------------------- rules of this file
def test_every_vector_is_run():
    assert CHECKS.keys() == VECTORS.keys()


def test_every_difference_names_a_value_of_a_vector_and_a_reason():
    BOOK.check_rows()


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_vector(name):
    BOOK.check(name, agree)
