"""flodl's vectors for threads, losses and iterators, run through the engine.

As in the other vector tests, a check returns flowdp's values under the names in the vector, and all that
differ are in `differences_engine.md` with a reason.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

from flowdp import OptionError, SchedulerOptions, Trainer, current_worker, record_scalar
from flowdp.checkpoint.saver import Saver
from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.host import HostMean
from flowdp.data.open_feeds import open_feeds
from flowdp.device import worker_context
from flowdp.device.streams import HostLane, open_lanes
from flowdp.device.worker_context import CurrentWorker, bind
from flowdp.engine.failures import Failures
from flowdp.engine.meter import Meter, OrderSums
from flowdp.engine.parts import Mail, MeetingPoint, RankParts, Services
from flowdp.engine.rank_pool import RankPool
from flowdp.engine.requests import Requests
from flowdp.engine.worker_thread import Worker
from flowdp.network.team import Team
from flowdp.observe.records import Records
from flowdp.options import FailureOptions
from flowdp.protocol.messages import (
    Fact,
    Leave,
    RequestParams,
    SnapshotReady,
    StartEpoch,
    StepsDone,
    SyncPoints,
)
from flowdp.replica.replica import Replica
from flowdp.threads.gate import Gate
from flowdp.threads.inbox import Inbox
from tests.data.opening import opened
from tests.limits import HANG_S
from tests.parts import parts_of

Answers = dict[str, Any]
Check = Callable[[dict[str, Any]], Answers]

HERE = Path(__file__).parent
VECTORS: dict[str, dict[str, Any]] = {
    vector["id"]: vector for vector in json.loads((HERE / "flodl.json").read_text())
}
AREAS = {"record_scalar", "worker_control"}
MINE = {name for name, vector in VECTORS.items() if vector["area"] in AREAS} | {
    "CF-009", "LR-002", "LR-004", "LR-006", "LR-008", "MG-003", "MG-005",
}  # fmt: skip
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (HERE / "differences_engine.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| vector")
]
DIFFERENCES = {(row[0], row[1]) for row in ROWS}
CHECKS: dict[str, Check] = {}


def answers(name: str) -> Callable[[Check], Check]:
    """Register a check for a vector."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


def mse(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def trainer(loss: Callable[..., Any] = mse, lr: float = 0.1, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "policy": "cadence",
        "dataset": torch.ones(16, 1),
        "per_device_batch_size": 4,
        "epochs": 1,
        "devices": 1,
    } | options
    return Trainer(nn.Linear(1, 1), lambda params: torch.optim.SGD(params, lr), loss, **given)


# ---------------------------------------------------------------- the trainer
@answers("CF-009")
def missing_batch_size(vector: dict[str, Any]) -> Answers:
    with pytest.raises(OptionError) as caught:
        trainer(per_device_batch_size=None)
    missing = str(caught.value).startswith("batch_size is missing")
    return {"error": "batch_size is required" if missing else str(caught.value)}


def rates(steps: int, **options: Any) -> list[float]:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(current_worker().lr)
        return mse(model, batch)

    trainer(loss, epochs=None, max_steps=steps, **options).fit()
    return seen


@answers("LR-002")
def scaled_rate(vector: dict[str, Any]) -> Answers:
    # Two devices at a ratio of 1: the factor is 2.
    [rate] = rates(vector["input"]["steps"], lr=0.05, devices=2, scheduler=SchedulerOptions(lr_scaling=1.0))
    return {"optimizer_lr": rate}


@answers("LR-004")
def milestones(vector: dict[str, Any]) -> Answers:
    seen = rates(
        vector["input"]["steps"],
        scheduler=SchedulerOptions(lambda optimizer: MultiStepLR(optimizer, [4, 8], gamma=0.1), unit="step"),
    )
    return {"lrs": seen, "transitions": len(set(seen)) - 1}


@answers("MG-003")
def one_record_for_each_epoch(vector: dict[str, Any]) -> Answers:
    run = trainer(epochs=vector["setup"]["num_epochs"], devices=vector["setup"]["world"]).start()
    first, second = list(run.metrics()), list(run.metrics())
    return {
        "metrics_fn_calls": sum(record.epoch == 0 for record in first),
        "queue_receives_same": all(mine is theirs for mine, theirs in zip(first, second, strict=True)),
    }


@answers("MG-005")
def a_single_device(vector: dict[str, Any]) -> Answers:
    run = trainer(epochs=vector["input"]["epochs"]).start()
    records = run.metrics()
    seen = [next(records) for _ in range(vector["input"]["epochs"])]
    then = next(records, None)
    return {
        "metrics_fn_calls": len(seen),
        "queued": len(run.poll_metrics()),
        "batch_share": list(seen[-1].share),
        "then": str(then),
    }


# ---------------------------------------------------------------- values of the loss
@pytest.fixture(autouse=True)
def _bound_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is bound to the thread before or after the test."""
    monkeypatch.setattr(worker_context._local, "worker", None, raising=False)


def fresh_worker() -> Meter:
    """Make the calling thread a worker's; returns the destination of its values."""
    meter = Meter(HostLane(torch.device("cpu")))
    bind(CurrentWorker(0, torch.device("cpu"), nn.Linear(1, 1), samples=1, sink=meter.scalar))
    return meter


def drained(meter: Meter) -> dict[str, list[float]]:
    reports: list[OrderSums] = []
    meter.close(reports.append)
    return {name: [total, int(weight)] for name, (total, weight) in reports[0].scalars.items()}


@answers("RS-002")
def several_names(vector: dict[str, Any]) -> Answers:
    found: list[Answers] = []

    def body() -> None:
        meter = fresh_worker()
        for name, value in vector["input"]["calls"]:
            record_scalar(name, value)
        found.append(drained(meter))

    in_threads(body)
    return found[0]


@answers("RS-004")
def each_thread_its_own(vector: dict[str, Any]) -> Answers:
    found: Answers = {}
    both = threading.Barrier(2)

    def body(which: str) -> None:
        meter = fresh_worker()
        both.wait(HANG_S)
        record_scalar(*vector["input"][which])
        both.wait(HANG_S)
        found[f"{which}_sees"] = drained(meter)

    in_threads(lambda: body("main"), lambda: body("child"))
    return found


def in_threads(*bodies: Callable[[], None]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)


# ---------------------------------------------------------------- orders to a worker
class Rank:
    """One worker thread, with the test as its coordinator."""

    def __init__(self, samples: int = 8, batch_size: int = 4) -> None:
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        lane = HostLane(torch.device("cpu"))
        replica = Replica(parts_of(module, optimizer, lane), mse)
        self.flat = replica.flat
        source = opened(torch.ones(samples, 1), batch_size)
        self.inbox: Inbox[Mail] = Inbox()
        gate = Gate(1)
        self.mean = Watched([self.flat], open_lanes([torch.device("cpu")]), gate.finish)
        self.snapshots = SnapshotMean([self.flat], [lane])
        [feed] = open_feeds(source, [lane])
        records, failures = Records(), Failures()
        requests = Requests(records, failures)
        self.facts = requests.inbox
        services = Services(
            team=Team((1,)),
            source=source,
            records=records,
            failures=failures,
            requests=requests,
            saver=Saver(),
        )
        meeting = MeetingPoint(gate=gate, collective=self.mean, snapshots=self.snapshots)
        pool = RankPool(1, 1)
        parts = RankParts(rank=0, index=0, replica=replica, feed=feed, inbox=self.inbox, pool=pool)
        self.worker = Worker(parts, [replica], services, meeting, FailureOptions())
        self.thread = threading.Thread(target=self.worker.run)

    def start(self, *orders: Mail) -> None:
        for order in orders:
            self.inbox.post(order)
        self.thread.start()

    def hear(self, kind: type[Fact]) -> Any:
        while not isinstance(fact := self.facts.get(5000), kind):
            assert fact is not None, f"no {kind}"
        return fact

    def end(self) -> None:
        self.inbox.post(Leave())
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()


class Watched(HostMean):
    calls = 0

    def average(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return super().average(*args, **options)


@answers("WK-001")
def a_snapshot(vector: dict[str, Any]) -> Answers:
    rank = Rank()
    rank.start(RequestParams(0))
    sent = rank.hear(SnapshotReady)
    has_left = not rank.thread.is_alive()
    rank.end()
    return {
        "param_snapshot_sent": sent.round == 0 and rank.snapshots._taken == [0],
        "shutdown": has_left,
        "n_params": len(rank.flat._views),
    }


@answers("WK-003")
def a_plan(vector: dict[str, Any]) -> Answers:
    rank = Rank(750, 1)
    rank.start(StartEpoch(0, 1, tuple(range(750))))
    done = rank.hear(StepsDone)
    rank.end()
    return {
        "pending_plan.size": done.work.samples if done.work.epoch == 1 else None,
        "consumed_once": rank.worker.current.local_step == 750,
    }


@answers("WK-007")
def told_to_leave_before_the_plan(vector: dict[str, Any]) -> Answers:
    rank = Rank(vector["setup"]["dataset"], vector["setup"]["batch"])
    rank.start(Leave(), StartEpoch(0, 0, tuple(range(100))))
    rank.thread.join(HANG_S)
    return {"returns_shutdown": not rank.thread.is_alive() and rank.worker.current.local_step == 0}


@answers("WK-009")
def meetings_after_the_end(vector: dict[str, Any]) -> Answers:
    rank = Rank()
    rank.start(Leave("gone"), *(StartEpoch(0, 0, (), SyncPoints(n, 0, 1, 0, 0)) for n in range(3)), Leave())
    rank.thread.join(HANG_S)
    assert not rank.thread.is_alive()
    return {"collective_calls": rank.mean.calls, "returns": True}


# ---------------------------------------------------------------- all vectors
def agree(answer: object, expected: object) -> bool:
    if (
        isinstance(expected, list)
        and isinstance(answer, list)
        and expected
        and isinstance(expected[0], float)
    ):
        return answer == pytest.approx(expected, rel=1e-9)
    if isinstance(expected, float):
        return answer == pytest.approx(expected, rel=1e-9)
    return bool(answer == expected) and type(answer) is type(expected)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_vector(name: str) -> None:
    vector = VECTORS[name]
    given = CHECKS[name](vector)
    assert given.keys() <= vector["expected"].keys()
    for value, expected in vector["expected"].items():
        agrees = value in given and agree(given[value], expected)
        if (name, value) in DIFFERENCES:
            assert not agrees, f"{name} {value} agrees: delete its row"
        else:
            assert agrees, f"{name} {value}: {given.get(value)!r}, expected {expected!r}"


def test_every_vector_is_answered_or_has_a_reason() -> None:
    for name in MINE - CHECKS.keys():
        for value in VECTORS[name]["expected"]:
            assert (name, value) in DIFFERENCES, f"{name} {value} is neither answered nor explained"
    assert CHECKS.keys() <= MINE
    assert all(len(row) == 4 and all(row) for row in ROWS)
    assert all(value in VECTORS[name]["expected"] for name, value in DIFFERENCES)
