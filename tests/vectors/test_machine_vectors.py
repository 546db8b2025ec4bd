"""flodl's vectors for the protocol, run through `flowdp.machine` and the ledger.

A check returns flowdp's values under the names in the vector. All must agree, except the values that
`differences_machine.md` lists with a reason; those must really differ, or be missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.epochs import Epochs
from flowdp.machine.worker import Idle, Snapshot, Step, WorkerMachine
from flowdp.options import CadenceOptions
from flowdp.policy.drift import Overshoot
from flowdp.policy.ledger import Ledger
from flowdp.protocol.commands import Command, EpochMetrics, RoundEnded, Send
from flowdp.protocol.gate import GateState, decide
from flowdp.protocol.messages import (
    Arrival,
    Averaged,
    Directives,
    Exiting,
    Leave,
    RequestParams,
    SnapshotReady,
    StartEpoch,
    StepsDone,
    SyncAck,
    SyncPoints,
    Throttle,
    Work,
    WorkerReady,
)
from tests.vectors.book import Answers, Book, Vector

AREAS = {
    "should_average",
    "throttle",
    "timing_messages",
    "finish_averaging",
    "epoch_dispatch",
    "chunk_pool",
    "worker_control",
    "dead_rank",
}
REMARKS = {"note", "formula"}

BOOK = Book(AREAS, "differences_machine.md")
VECTORS, CHECKS, DIFFERENCES, answers = BOOK.vectors, BOOK.checks, BOOK.differences, BOOK.answers


# ---------------------------------------------------------------- two ranks
class Free:
    """Ranks that train without waiting, and the machine between them."""

    def __init__(
        self, batches: int = 1000, *, epochs: int = 1, ratios: Sequence[float] | None = None, **options: Any
    ):
        config = CoordinatorConfig(
            world_size=2, batches=batches, epochs=epochs, ratios=ratios, cadence=CadenceOptions(**options)
        )
        self.machine = AsyncRounds(config, Epochs(config))
        self.out: list[list[StartEpoch]] = [[], []]
        self.throttled = [False, False]
        self.requested = False

    def decide(self) -> None:
        for command in self.machine.decide(0.0):
            assert isinstance(command, Send)
            match command.order:
                case StartEpoch():
                    self.out[command.rank].append(command.order)
                case Throttle():
                    self.throttled[command.rank] = True
                case RequestParams():
                    self.requested = True

    def trains(self, rank: int, steps: int, pace_ms: float = 10.0) -> int:
        """The rank takes up to this many steps, order by order; returns their number."""
        done = 0
        self.decide()
        while done < steps and self.out[rank] and self.out[rank][0].batches:
            order = self.out[rank].pop(0)
            count = len(order.batches)
            work = Work(order.epoch, count, 8 * count, pace_ms * count, 0.0, pace_ms, (1.0, 8 * count))
            self.machine.take(StepsDone(rank, order.plan, work), 0.0)
            done += count
            self.decide()
        return done

    def steps(self) -> list[int]:
        """Steps since the last mean, per rank."""
        return [rank.trained - rank.snapshot for rank in self.machine._ranks]


def orders(commands: list[Command]) -> dict[int, StartEpoch]:
    """The first order of each rank among the commands."""
    found: dict[int, StartEpoch] = {}
    for command in commands:
        if isinstance(command, Send) and isinstance(command.order, StartEpoch):
            found.setdefault(command.rank, command.order)
    return found


def started(**given: Any) -> tuple[Coordinator, dict[int, StartEpoch]]:
    machine = Coordinator(CoordinatorConfig(**{"world_size": 2, "batches": 100, "epochs": 1, **given}))
    commands = [command for rank in (0, 1) for command in machine.handle(WorkerReady(rank), 0.0)]
    return machine, orders(commands)


def met(
    machine: Coordinator,
    block: dict[int, StartEpoch],
    pace_ms: Sequence[float] = (10.0, 10.0),
    drift: Any = None,
) -> list[Command]:
    """All ranks acknowledge a block."""
    first = block[0].sync
    assert first is not None
    steps = tuple(len(order.batches) for order in block.values())
    outcome = decide(
        {rank: Arrival(rank, first.round, first.global_step, n, 8 * n) for rank, n in enumerate(steps)},
        Directives(),
        2,
    )
    commands: list[Command] = []
    for rank, order in block.items():
        work = Work(
            order.epoch, steps[rank], 8 * steps[rank], pace_ms[rank] * steps[rank], 0.0, pace_ms[rank]
        )
        commands += machine.handle(SyncAck(rank, outcome, work, 0.1, drift=drift), 1.0)
    return commands


def all_at_the_gate(block: dict[int, StartEpoch], steps: Sequence[int]) -> bool:
    """Whether the round is decided when the ranks have taken these steps of it."""
    gate = GateState(2)
    is_decided = False
    for rank, order in block.items():
        worker = WorkerMachine(rank)
        worker.handle(order)
        for _ in range(steps[rank]):
            assert isinstance(worker.next(), Step)
            worker.trained(8)
        action = worker.next()
        if isinstance(action, Arrival):
            is_decided = gate.enter(action) is not None
    return is_decided


# ---------------------------------------------------------------- times of rounds
@answers("SA-002")
def _sync(vector: Vector) -> Answers:
    _, block = started(policy="sync")
    return {"should_average": all_at_the_gate(block, vector["input"]["steps_since_avg"])}


@answers("SA-004", "SA-006", "SA-014")
def _cadence(vector: Vector) -> Answers:
    """Quotas of a wall time, met when every rank has taken its own."""
    setup, given = vector["setup"], vector["input"]
    pace = setup.get("calibrated_ms")
    if pace is None:
        calibrate = setup.get("calibrate", {"wall_ms": [100, 200], "batches": [10, 10]})
        pace = [wall / n for wall, n in zip(calibrate["wall_ms"], calibrate["batches"], strict=True)]
    machine, probe = started(policy="cadence", batches=1000)
    block = orders(met(machine, probe, pace))
    quotas = [len(block[rank].batches) for rank in (0, 1)]
    # The slowest rank's ten steps fill the time aimed at by the vector.
    assert [quota * ms for quota, ms in zip(quotas, pace, strict=True)] == [10 * max(pace)] * 2
    steps = given.get("batches") or [
        int(wall / ms) for wall, ms in zip(given["wall_ms_accum"], pace, strict=True)
    ]
    return {"should_average": all_at_the_gate(block, [min(n, q) for n, q in zip(steps, quotas, strict=True)])}


@answers("SA-008", "SA-012", "SA-016")
def _async(vector: Vector) -> Answers:
    counts = vector["setup"].get("batch_counts", [10, 10])
    steps = vector["input"].get("steps_since_avg") or vector["input"].get("batches") or [9, 9]
    run = Free(ratios=[count / sum(counts) for count in counts])
    assert list(run.machine.cadence.quotas) == counts
    # A quarter of the counts at a time: nine steps are three orders, the tenth begins a fourth.
    for rank, count in enumerate(steps):
        assert run.trains(rank, count) >= count
    return {"should_average": run.requested}


def trained_epochs(count: int, of: int) -> tuple[Coordinator, list[Command]]:
    """A sync run of these epochs, one round each, of which some were trained."""
    machine, block = started(policy="sync", batches=2, epochs=of)
    said: list[Command] = []
    waiting = [block]
    for _ in range(count):
        said = met(machine, waiting.pop(0))
        ahead: list[dict[int, StartEpoch]] = []
        for command in said:
            if isinstance(command, Send) and isinstance(command.order, StartEpoch):
                if command.rank == 0:
                    ahead.append({})
                ahead[-1][command.rank] = command.order
        waiting += ahead
    return machine, said


@answers("SA-010")
def _after_the_last_epoch(vector: Vector) -> Answers:
    epochs = vector["setup"]["num_epochs"]
    machine, said = trained_epochs(epochs, epochs)
    return {"should_average": bool(orders(said)), "all_epochs_done": machine.epochs.is_complete}


@answers("SA-018")
def _before_the_last_epoch(vector: Vector) -> Answers:
    machine, _ = trained_epochs(vector["input"]["last_aggregated_epoch"] + 1, vector["setup"]["num_epochs"])
    return {"all_epochs_done": machine.epochs.is_complete}


@answers("WK-015")
def _dead_rank(vector: Vector) -> Answers:
    machine, block = started(policy="sync")
    gate = GateState(2)
    gate.enter(Arrival(0, 0, 0, len(block[0].batches), 8))
    machine.handle(Exiting(1), 1.0)
    gate.abort(machine.error or "")
    return {"active_count": len(machine._present()), "should_average": gate._complete() is not None}


# ---------------------------------------------------------------- counters
@answers("TM-001")
def _steps_done(vector: Vector) -> Answers:
    run = Free()
    run.trains(0, 1, vector["input"]["msgs"][0]["batch_ms"])
    ranks = run.machine._ranks
    return {
        "steps": run.steps(),
        "wall": [sum(work.busy_ms for work in rank.works) for rank in ranks],
        "last_batch_ms_rank0": ranks[0].pace_ms,
    }


@answers("TM-003")
def _exiting_twice(vector: Vector) -> Answers:
    machine, _ = started()
    counts = []
    for message in vector["input"]["msgs"]:
        machine.handle(Exiting(message["exiting"], "failed"), 1.0)
        counts.append(len(machine._present()))
    return {"active_count_after_each": counts}


@answers("TM-005")
def _acknowledgments(vector: Vector) -> Answers:
    machine, block = started(policy="cadence", batches=1000, cadence=CadenceOptions(speed_hint=(1, 1.0)))
    block = orders(met(machine, block))
    drift = vector["input"]["sync_acks"][0]["divergence"]
    [record] = [c for c in met(machine, block, drift=drift) if isinstance(c, RoundEnded)]
    return {
        "steps_since_avg": list(record.steps),
        "wall_unchanged": record.busy_ms == (100.0, 100.0),
        "divergence": [record.drift],
    }


@answers("FA-001", "FA-003")
def _end_of_a_round(vector: Vector) -> Answers:
    run = Free(anchor=3, ratios=[5 / 8, 3 / 8], max_batch_diff=1)
    while not run.requested:
        assert run.trains(0, 1) + run.trains(1, 1) > 0
    for rank, steps in enumerate(run.steps()):
        run.machine.take(SnapshotReady(rank, 0, steps, 8 * steps), 0.0)
    run.machine.decide(0.0)
    said = run.machine.take(Averaged(0, 1.0, (0.05, 0.03)), 0.0)
    run.decide()
    ranks = run.machine._ranks
    given = {
        "steps": [rank.trained - rank.mean for rank in ranks],
        "wall": [int(sum(work.busy_ms for work in rank.works)) for rank in ranks],
        "throttled": [rank.orders == deque() or rank.limit < rank.dealt for rank in ranks],
        "version": run.machine.next_round,
        "avg_count": sum(isinstance(command, RoundEnded) for command in said),
        "loss_accum": [int(sum(work.losses[0] for work in rank.works)) for rank in ranks],
        "loss_count": [sum(work.losses[1] for work in rank.works) for rank in ranks],
        "divergence": [run.machine._round] * 2,
    }
    return {key: value for key, value in given.items() if key in vector["expected"]}


@answers("FA-005")
def _global_step(vector: Vector) -> Answers:
    setup = vector["setup"]
    arrivals = {r: Arrival(r, 0, setup["global_step"], n, 8 * n) for r, n in enumerate(setup["steps"])}
    outcome = decide(arrivals, Directives(), 2)
    return {"global_step": outcome.global_step, "broadcast": outcome}


# ---------------------------------------------------------------- shares of the batches
class Pool:
    """A ledger of single samples, with one rank at a time asking."""

    def __init__(self, total: int) -> None:
        self.ledger = Ledger(0, total, 2)
        self.hands: list[tuple[int, tuple[int, ...]]] = []

    def take(self, size: int, rank: int) -> list[int] | None:
        is_empty = self.ledger.remaining == 0
        hand = self.ledger.deal([size if r == rank else 0 for r in (0, 1)], [1.0, 1.0])[rank]
        self.hands.append((rank, hand))
        if is_empty:
            return None
        return [hand[0], len(hand)] if hand else [self.ledger.position, 0]


@answers("CK-002", "CK-006", "CK-008")
def _takes(vector: Vector) -> Answers:
    pool = Pool(vector["setup"]["total"])
    given = {
        "returns": [pool.take(size, rank) for size, rank in vector["input"]["takes"]],
        "remaining": pool.ledger.remaining,
        "epoch_done": pool.ledger.is_complete,
    }
    return {key: value for key, value in given.items() if key in vector["expected"]}


@answers("CK-004")
def _completion(vector: Vector) -> Answers:
    pool, given = Pool(vector["setup"]["total"]), vector["input"]
    for size, rank in given["takes"]:
        pool.take(size, rank)
    done = []
    for (rank, hand), complete in zip(pool.hands, given["complete"], strict=True):
        assert [rank, len(hand)] == complete
        pool.ledger.count_back(rank, hand, len(hand))
        done.append(pool.ledger.is_complete)
    return {"done_after_first_two": any(done[:2]), "done_at_end": done[-1]}


@answers("CK-010")
def _first_orders(vector: Vector) -> Answers:
    setup = vector["setup"]
    run = Free(setup["total"] // setup["batch_size"], epochs=setup["num_epochs"])
    run.decide()

    def plan(rank: int, epoch: int) -> dict[str, int] | None:
        batches = [batch for order in run.out[rank] if order.epoch == epoch for batch in order.batches]
        size = setup["batch_size"]
        return {"epoch": epoch, "offset": batches[0] * size, "size": len(batches) * size} if batches else None

    return {"rank0_plan": plan(0, 0), "rank1_plan": plan(1, 0) or plan(1, 1)}


@answers("CK-012")
def _two_epochs_under_way(vector: Vector) -> Answers:
    pools = {name: Pool(vector["setup"][name]["total"]) for name in ("pool0", "pool1")}
    for name, pool in pools.items():
        for size, rank in vector["setup"][name]["takes"]:
            pool.take(size, rank)
    for rank, epoch, count in vector["input"]["metrics"]:
        pool = pools[epoch.replace("epoch", "pool")]
        [hand] = [hand for owner, hand in pool.hands if owner == rank]
        pool.ledger.count_back(rank, hand, count)
    return {f"{name}.completed[0]": pool.ledger.trained for name, pool in pools.items()}


@answers("CK-014")
def _end_of_the_run(vector: Vector) -> Answers:
    machine, said = trained_epochs(2, vector["setup"]["num_epochs"])
    leaves = [c for c in said if isinstance(c, Send) and c.order == Leave()]
    return {"last_aggregated_epoch": machine.epochs.done - 1, "shutdown_msgs": len(leaves)}


@answers("CK-016")
def _runaway(vector: Vector) -> Answers:
    run = Free(20, epochs=2, ratios=[0.5, 0.5])
    run.machine._overshoot = Overshoot(20, limit=vector["setup"]["max_overshoot"])
    planned = vector["setup"]["planned"]
    assert list(run.machine.cadence.quotas) == planned
    # Rank 0 has done its plan, rank 1 has not.
    assert run.trains(0, 100) == planned[0]
    return {"rank0_gets_epoch1_plan": any(order.epoch == 1 for order in run.out[0])}


@answers("CK-018")
def _size_of_the_first_orders(vector: Vector) -> Answers:
    run = Free(vector["setup"]["remaining_batches"])
    run.decide()
    return {"batches": len(run.out[0][0].batches)}


@answers("CK-020")
def _size_of_orders(vector: Vector) -> Answers:
    counts = vector["setup"]["batch_counts"]
    run = Free(vector["setup"]["remaining_batches"], ratios=[count / sum(counts) for count in counts])
    run.decide()
    return {"batches": len(run.out[0][0].batches)}


# ---------------------------------------------------------------- epochs
@answers("ED-002")
def _far_ahead(vector: Vector) -> Answers:
    run = Free(4, epochs=10)
    # Rank 1 still has its first batch of epoch 0; rank 0 goes as far as it may.
    run.trains(0, 100)
    return {"rank0_msg": run.out[0][0] if run.out[0] else None, "rank_waiting[0]": run.throttled[0]}


@answers("ED-004")
def _nothing_after_the_last_epoch(vector: Vector) -> Answers:
    run = Free(4, epochs=1)
    run.trains(0, 100)
    trains = [order for order in run.out[0] if order.batches]
    return {"rank0_msg": trains[0] if trains else None}


@answers("ED-006")
def _next_epoch(vector: Vector) -> Answers:
    _, said = trained_epochs(1, vector["setup"]["num_epochs"])
    [ended] = [command.epoch for command in said if isinstance(command, EpochMetrics)]
    epochs = {order.epoch for order in orders(said).values()}
    assert orders(said).keys() == {0, 1}
    return {"all_ranks_msg": f"StartEpoch({epochs.pop()})", "last_aggregated": ended}


# ---------------------------------------------------------------- the lead
@answers("TH-001", "TH-003", "TH-005")
def _throttle(vector: Vector) -> Answers:
    run = Free(max_batch_diff=vector["setup"]["max_batch_diff"])
    run.trains(0, vector["input"]["steps"][0])
    return {"throttle_sent": run.throttled}


# ---------------------------------------------------------------- workers
@answers("TH-007")
def _a_throttled_worker_hears(vector: Vector) -> Answers:
    worker = WorkerMachine(0)
    worker.handle(Throttle(0, "at its lead limit"))
    worker.handle(Leave())
    return {"returns_shutdown": worker.next() == Leave()}


@answers("WK-001")
def _request(vector: Vector) -> Answers:
    worker = WorkerMachine(0)
    worker.handle(RequestParams(0))
    action = worker.next()
    return {"param_snapshot_sent": action == Snapshot(0, 0, 0), "shutdown": isinstance(action, Leave)}


@answers("WK-003")
def _plan(vector: Vector) -> Answers:
    worker = WorkerMachine(0)
    worker.handle(StartEpoch(0, 1, tuple(range(750))))
    size = 0
    while isinstance(worker.next(), Step):
        worker.trained(1)
        size += 1
    # The report of the whole order was its last one.
    return {"pending_plan.size": size, "consumed_once": worker.next() == Idle()}


@answers("WK-005")
def _meeting_alone(vector: Vector) -> Answers:
    worker, gate = WorkerMachine(0), GateState(1)
    worker.handle(StartEpoch(0, 0, (), SyncPoints(0, 0, 1, 0, 0)))
    action = worker.next()
    assert isinstance(action, Arrival)
    outcome = gate.enter(action)
    assert outcome is not None
    worker.met(outcome)
    return {
        "shutdown": isinstance(worker.next(), Leave),
        "no_op": (outcome.global_step, worker.steps, worker.total_steps) == (0, 0, 0),
    }


@answers("WK-007")
def _shutdown_before_a_plan(vector: Vector) -> Answers:
    worker = WorkerMachine(0)
    worker.handle(StartEpoch(0, 0, tuple(range(vector["input"]["plan"][2]))))
    worker.handle(Leave())
    return {"returns_shutdown": worker.next() == Leave()}


@answers("WK-009")
def _meetings_before_a_shutdown(vector: Vector) -> Answers:
    worker = WorkerMachine(0)
    for round in range(3):
        worker.handle(StartEpoch(0, 0, (), SyncPoints(round, 0, 1, 0, 0)))
    worker.handle(Leave())
    actions = [worker.next() for _ in range(4)]
    return {
        "collective_calls": sum(isinstance(action, Arrival) for action in actions),
        "returns": all(action == Leave() for action in actions),
    }


@answers("WK-011")
def _abort_twice(vector: Vector) -> Answers:
    gate = GateState(2)
    gate.abort("first")
    gate.abort("second")
    return {"panics": gate.error != "first"}


# ---------------------------------------------------------------- tests
def test_every_vector_is_run_or_listed_with_a_reason() -> None:
    silent = [
        name
        for name, vector in VECTORS.items()
        if name not in CHECKS and any((name, key) not in DIFFERENCES for key in vector["expected"])
    ]
    assert silent == []
    assert CHECKS.keys() <= VECTORS.keys()
    assert {vector["area"] for vector in VECTORS.values()} == AREAS


def test_every_difference_names_a_value_of_a_vector_and_a_reason() -> None:
    BOOK.check_rows()


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_vector(name: str) -> None:
    vector = VECTORS[name]
    expected = {key: value for key, value in vector["expected"].items() if key not in REMARKS}
    given = CHECKS[name](vector)
    assert given.keys() <= expected.keys()
    for key, value in expected.items():
        if (name, key) in DIFFERENCES:
            assert key not in given or given[key] != value, f"{key} agrees: delete its row"
        else:
            assert key in given, f"{key} is neither answered nor listed"
            assert given[key] == value, (key, given[key], value)
            assert type(given[key]) is type(value)
