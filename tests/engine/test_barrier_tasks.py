"""Tests of a rank's tasks at a barrier, and its answers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from flowdp.checkpoint.writer import PendingState
from flowdp.device.streams import HostLane, Lane, StreamLane
from flowdp.engine.barrier_tasks import BarrierTasks, described
from flowdp.network.team import Team
from flowdp.protocol.messages import CopyReplica, Evaluate, SaveState, TaskDone
from flowdp.replica.replica import Replica
from tests.fakes import FakeCuda
from tests.parts import parts_of

CPU = torch.device("cpu")


def replica(value: float, lane: Lane | None = None) -> Replica:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return Replica(parts_of(module, optimizer, lane), lambda *_: None)


class Taker:
    """Stands for the saver."""

    def __init__(self, *, keeps_ranks: bool = True, keeps_generators: bool = False) -> None:
        self.parts: dict[int, PendingState] = {}
        self.keeps_ranks, self.keeps_generators = keeps_ranks, keeps_generators

    def put(self, rank: int, part: PendingState) -> None:
        self.parts[rank] = part


class Evaluating:
    """Stands for the evaluator: two batches, and a wait."""

    def run(
        self, rank: int, own: Replica, number: int, wait: Callable[[], bool], moved: Callable[[], None]
    ) -> Any:
        assert wait()
        moved()
        moved()
        return TaskDone(rank, ((rank, 1.0, (("loss", 2.0),)),))


def never() -> bool:
    raise AssertionError("no wait here")


def tasks(own: Replica, *others: Replica, rank: int = 0, **given: Any) -> BarrierTasks:
    replicas = [own, *others] if rank == 0 else [*others, own]
    return served(replicas, rank, rank, **given)


def served(
    replicas: list[Replica], rank: int, index: int, team: Team | None = None, **given: Any
) -> BarrierTasks:
    parts = {"saver": Taker(), "evaluator": None, "team": team or Team((len(replicas),))} | given
    return BarrierTasks(
        cast(Any, SimpleNamespace(rank=rank, index=index, replica=replicas[index], outer=None)),
        replicas,
        cast(Any, SimpleNamespace(**parts)),
        cast(Any, SimpleNamespace(collective=None)),
    )


@pytest.mark.parametrize(("model", "has_model"), [(1, True), (0, False)])
def test_the_rank_that_is_named_puts_the_model_down(model: int, has_model: bool) -> None:
    taker, own = Taker(), replica(3.0)
    serve = tasks(own, replica(0.0), rank=1, saver=taker)
    assert described(SaveState(0, model))[0] == "saves its state"
    assert serve.serve(SaveState(0, model), never, lambda: None) == TaskDone(1)
    with torch.no_grad():
        own.module.weight.zero_()  # the run continues
    state = taker.parts[1]()
    assert ("model" in state) == has_model
    assert not has_model or state["model"]["weight"].item() == 3.0
    assert state["optimizers"][0]["param_groups"][0]["lr"] == 0.1


def test_an_evaluation_is_answered_with_its_numbers() -> None:
    moves: list[int] = []
    serve = tasks(replica(0.0), evaluator=Evaluating())
    answer = serve.serve(Evaluate(4, 0), lambda: True, lambda: moves.append(1))
    assert answer == TaskDone(0, ((0, 1.0, (("loss", 2.0),)),))
    assert len(moves) == 2
    assert described(Evaluate(4, 0))[0] == "evaluates after epoch 5"


@pytest.mark.parametrize("on_card", [False, True])
def test_a_rank_becomes_what_its_donor_is(on_card: bool) -> None:
    card = FakeCuda()
    lanes: list[Lane] = [StreamLane(CPU, card), StreamLane(CPU, card)] if on_card else [HostLane(CPU)] * 2
    donor, own = replica(5.0, lanes[0]), replica(float("nan"), lanes[1])
    serve = tasks(own, donor, rank=1)
    for memory in donor.flat.memories:
        card.watch("the donor", memory)
    assert described(CopyReplica(0))[0] == "copies the replica of rank 0"
    assert serve.serve(CopyReplica(0), never, lambda: None) == TaskDone(1)
    assert own.module.weight.item() == 5.0
    with donor.lane.on(donor.lane.compute), torch.no_grad():
        donor.module.weight.add_(1.0)  # it continues to train as soon as this is sent
    assert own.module.weight.item() == 5.0
    assert card.races == []
