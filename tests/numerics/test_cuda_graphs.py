"""Tests of whole runs whose steps replay captured graphs, against eager ones; graphs and streams are fakes.

The fakes run the recorded work where CUDA would: without an event it is a race, and a graph that reads at the
wrong time gets another value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu.checks import Single
from flowdp.graphs.cuda_graph import CudaStepGraph
from tests.fake_graphs import Captures

pytestmark = pytest.mark.parametrize("lanes", ["streams"], indirect=True)  # a CPU has none

SAMPLES, STEPS = 70, 24
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(SAMPLES, 3, generator=GENERATOR), torch.randint(2, (SAMPLES,), generator=GENERATOR)


Replays = dict[int, int]


@pytest.fixture
def replays(lanes: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    """Replays of each rank so far; checks at the end that no thread made a forbidden call during a
    capture.
    """
    count: Replays = defaultdict(int)
    seen: list[Captures] = []
    own = CudaStepGraph.run

    def run(graph: CudaStepGraph, *arguments: Any) -> Any:
        count[graph._step.flat.rank] += 1
        seen.append(graph._step.lane.device_module.captures)  # type: ignore[attr-defined]
        return own(graph, *arguments)

    monkeypatch.setattr(CudaStepGraph, "run", run)
    yield count
    assert seen
    assert [call for call in seen[0].unsafe_calls if "memory" in call] == []
    assert seen[0].diverted == []


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


def classify(module: nn.Module, batch: Any) -> Any:
    loss = F.cross_entropy(module(batch[0]), batch[1])
    return loss, {"twice": 2 * loss}


def train(
    ranks: int = 1,
    dropout: float = 0.0,
    *,
    is_streamed: bool = True,
    capture: bool = False,
    ratios: tuple[float, float] | None = None,
    **options: Any,
) -> Any:
    torch.manual_seed(1)
    data: tuple[Tensor, Tensor] = X, Y
    settings: dict[str, Any] = {"per_device_batch_size": 8, "max_steps": STEPS, "seed": 2, **options}
    return flowdp.Trainer(
        model(dropout),
        lambda params: torch.optim.AdamW(params, 2**-7, fused=True),
        classify,
        dataset=Single(data) if is_streamed else data,
        devices=["cpu"] * ranks,
        progress=False,
        runtime=flowdp.RuntimeOptions(capture=capture, partition_ratios=ratios),
        **settings,
    ).fit()


def assert_same(one: Any, other: Any) -> None:
    for name, tensor in one.state_dict.items():
        assert torch.equal(tensor, other.state_dict[name]), name
    assert [(e.loss, e.scalars) for e in one.history] == [(e.loss, e.scalars) for e in other.history]


EVEN = {"ranks": 2, "policy": "exact", "ratios": (0.5, 0.5)}

RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dropout": {"dropout": 0.5},
    "data there": {"is_streamed": False},
    "two ranks": {"ranks": 2, "policy": "sync"},
    "clipped": {"ranks": 2, "policy": "sync", "max_grad_norm": 0.1},
    "clipped by value": {"ranks": 2, "policy": "sync", "max_grad_value": 0.01},
    "exact": EVEN,
    "exact, clipped, in pieces": {**EVEN, "max_grad_norm": 0.1, "per_device_batch_size": 3, "batch_size": 10},
    "accumulation": {"gradient_accumulation_steps": 3},
}
"""Runs that repeat bit for bit."""


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_captured_run_is_the_eager_one(options: dict[str, Any], replays: Replays) -> None:
    assert_same(train(**options, capture=True), train(**options))
    assert len(replays) == options.get("ranks", 1)
    assert min(replays.values()) > 4


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_ranks_of_other_policies_replay_beside_the_averaging(policy: Any, replays: Replays) -> None:
    state = train(
        2,
        policy=policy,
        cadence=flowdp.CadenceOptions(anchor=2, max_anchor=4),
        capture=True,
    )
    assert state.global_step == STEPS
    assert sum(replays.values()) > STEPS // 3
    assert all(tensor.isfinite().all() for tensor in state.state_dict.values())


def test_checkpoints_between_replays(replays: Replays, tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "sync", "max_steps": None, "checkpoint": tmp_path}
    whole = train(2, epochs=3, policy="sync", max_steps=None)
    train(2, epochs=1, capture=True, **options)
    again = train(2, epochs=3, resume=True, capture=True, **options)
    for name, tensor in whole.state_dict.items():
        assert torch.equal(tensor, again.state_dict[name]), name
    assert set(replays) == {0, 1}
