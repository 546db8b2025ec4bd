"""Whole runs whose steps are replays of captured graphs, against eager ones; graphs and streams are faked.

The fakes run the recorded work where CUDA would: what is not ordered by an event is a race, and what a graph
reads at the wrong time is another number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu.checks import Single
from flowdp.data.trees import flatten, tensors_of
from flowdp.device.streams import CudaLane
from flowdp.engine import assembly
from flowdp.engine.captured import Computed, Factors, StepGraph
from flowdp.engine.context import CurrentWorker
from flowdp.engine.cuda_graph import CudaGraphs

SAMPLES, STEPS = 70, 24
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(SAMPLES, 3, generator=GENERATOR), torch.randint(2, (SAMPLES,), generator=GENERATOR)


class Always:
    """Captures each form when it comes for the second time, and replays it from then on."""

    def __init__(self, replica: Any) -> None:
        self.graphs: dict[Any, StepGraph | None] = {}
        self.replays = 0
        self._recorder = CudaGraphs(replica)
        self._worker: CurrentWorker

    def run(self, batch: Any, worker: CurrentWorker, factors: Factors) -> Computed | None:
        leaves = list(tensors_of(batch))
        form = flatten(batch)[1], tuple(leaf.shape for leaf in leaves)
        key = str(form)
        if key not in self.graphs:
            self.graphs[key] = None
            return None
        graph = self.graphs[key]
        if graph is None:
            graph = self.graphs[key] = self._recorder.record(batch, leaves, worker, factors)
        self.replays += 1
        computed = graph.run(leaves, factors, None)
        for (name, weight), value in zip(graph.records, computed.scalars, strict=True):
            worker.sink(name, value, weight)
        return computed

    def step(self, factor: float) -> bool:
        return self._recorder.step(factor)


@pytest.fixture
def captured(lanes: str, monkeypatch: pytest.MonkeyPatch) -> list[Always]:
    """From now on runs capture; what has captured."""
    if lanes == "cpu":
        pytest.skip("a CPU has no streams")
    made: list[Always] = []
    own = assembly._replica

    def replica(*parts: Any) -> Any:
        one = own(*parts)
        assert isinstance(one.lane, CudaLane)
        made.append(Always(one))
        one.captured = made[-1]
        return one

    monkeypatch.setattr(assembly, "_replica", replica)
    return made


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


def classify(module: nn.Module, batch: Any) -> Any:
    loss = F.cross_entropy(module(batch[0]), batch[1])
    return loss, {"twice": 2 * loss}


def train(ranks: int = 1, dropout: float = 0.0, *, is_streamed: bool = True, **options: Any) -> Any:
    torch.manual_seed(1)
    data: tuple[Tensor, Tensor] = X, Y
    settings: dict[str, Any] = {"batch_size": 8, "max_steps": STEPS, "seed": 2, **options}
    return flowdp.Trainer(
        model(dropout),
        lambda params: torch.optim.AdamW(params, 0.01, fused=True),
        classify,
        dataset=Single(data) if is_streamed else data,
        devices=["cpu"] * ranks,
        progress=False,
        **settings,
    ).fit()


def assert_same(one: Any, other: Any) -> None:
    for name, tensor in one.state_dict.items():
        assert torch.equal(tensor, other.state_dict[name]), name
    assert [(e.loss, e.scalars) for e in one.history] == [(e.loss, e.scalars) for e in other.history]


EVEN = {"ranks": 2, "policy": "exact", "partition_ratios": (0.5, 0.5)}

RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dropout": {"dropout": 0.5},
    "data there": {"is_streamed": False},
    "two ranks": {"ranks": 2, "policy": "sync"},
    "clipped": {"ranks": 2, "policy": "sync", "max_grad_norm": 0.1},
    "exact": EVEN,
    "exact, clipped, in pieces": {**EVEN, "max_grad_norm": 0.1, "batch_size": 3, "global_batch_size": 10},
    "accumulation": {"gradient_accumulation_steps": 3},
}
"""Runs that repeat to the bit."""


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_captured_run_is_the_eager_one(
    options: dict[str, Any], lanes: str, request: pytest.FixtureRequest
) -> None:
    eager = train(**options)
    made = request.getfixturevalue("captured")
    assert_same(train(**options), eager)
    assert made
    assert all(one.replays for one in made)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_ranks_of_other_policies_replay_beside_the_averaging(policy: Any, captured: list[Always]) -> None:
    state = train(2, policy=policy, cadence=flowdp.CadenceOptions(anchor=2, max_anchor=4))
    assert state.global_step == STEPS
    assert sum(one.replays for one in captured) > STEPS // 2
    assert all(tensor.isfinite().all() for tensor in state.state_dict.values())


def test_checkpoints_between_replays(captured: list[Always], tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "sync", "max_steps": None}
    whole = train(2, epochs=3, checkpoint=tmp_path / "whole", **options)
    train(2, epochs=1, checkpoint=tmp_path / "cut", **options)
    again = train(2, epochs=3, checkpoint=tmp_path / "cut", resume=True, **options)
    for name, tensor in whole.state_dict.items():
        assert torch.equal(tensor, again.state_dict[name]), name
    assert all(one.replays for one in captured)
