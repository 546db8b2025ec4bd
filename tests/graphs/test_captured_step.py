"""Tests of the switch between eager and captured steps, and of the optimizer's step as a graph."""

from __future__ import annotations

from collections.abc import Callable
from os import environ
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp.device.cuda_graphs import GraphPool
from flowdp.device.gathered import Gathered
from flowdp.device.streams import StreamLane
from flowdp.device.worker_context import CurrentWorker
from flowdp.graphs.captured_step import CAPTURED, Captured
from flowdp.graphs.cuda_graph import CudaStepGraph
from flowdp.graphs.guards import Guards
from flowdp.options import CaptureOptions
from flowdp.policy.worth import WATCHED, LaunchWatch
from flowdp.replica.captured_update import CapturedUpdate
from flowdp.replica.replica import Replica
from tests.fakes import FakeCuda
from tests.parts import parts_of

CPU = torch.device("cpu")
X, Y = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2
RATE = 2**-5
"""A learning rate that is the same number in float32."""


def loss_of(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


class Rank:
    """A replica on a fake card whose steps are captured, and its worker."""

    def __init__(
        self,
        *,
        capture: bool = True,
        watch: LaunchWatch | None = None,
        module: Callable[[], nn.Module] | None = None,
        loss: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.module = (module or layers)()
        self.loss = loss or loss_of
        self.lane = StreamLane(CPU, FakeCuda())
        self.told: list[str] = []
        self.optimizer = torch.optim.AdamW(self.module.parameters(), RATE, fused=True)
        parts = parts_of(self.module, self.optimizer, self.lane, **options)
        if capture:
            object.__setattr__(parts, "capture", lambda step: self._captured(step, watch))
        self.replica = Replica(parts, self.loss)
        self.worker = CurrentWorker(0, CPU, self.module, samples=4, sink=lambda *_: None)

    def _captured(self, step: Any, watch: LaunchWatch | None) -> Captured:
        def tell(text: str, *, is_shown: bool = False) -> None:
            self.told.append(text)

        return Captured(
            step,
            CaptureOptions(),
            lambda: Guards(self.module, self.loss),
            tell,
            watch,
        )

    def step(self, number: int) -> Tensor | None:
        start = number % 2 * 4
        self.replica.begin()
        with self.lane.on(self.lane.compute):
            self.replica.add((X[start : start + 4], Y[start : start + 4]), self.worker)
            return self.replica.step()

    @property
    def captured(self) -> Captured:
        assert self.replica.captured is not None
        return self.replica.captured

    @property
    def replays(self) -> int:
        return int(self.lane.device_module.captures.replays)


def equal(one: Rank, other: Rank) -> bool:
    states = (one.module.state_dict(), other.module.state_dict())
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.01}, {"ema_decay": 0.9}], ids=str)
def test_a_step_is_two_launches_of_graphs(options: dict[str, Any]) -> None:
    eager, captured = Rank(capture=False, **options), Rank(**options)
    norms = []
    for number in range(20):
        losses = [rank.step(number) for rank in (eager, captured)]
        norms.append(
            [[norm.clone() for norm in rank.replica.update.take_norms()] for rank in (eager, captured)]
        )
        assert torch.equal(*losses)
        before = captured.replays
    assert equal(eager, captured)
    assert all(torch.equal(*pair) for one in norms for pair in zip(*one, strict=True))
    captured.step(20)
    assert captured.replays == before + 2
    assert captured.captured.state == CAPTURED
    if captured.replica.average is not None:
        pairs = zip(eager.replica.average.averages, captured.replica.average.averages, strict=True)  # type: ignore[union-attr]
        eager.step(20)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_rate_that_changes_is_read_by_the_graph_and_other_options_record_it_anew() -> None:
    eager, captured = Rank(capture=False), Rank()
    recorded: list[object] = []
    own = CapturedUpdate._record
    for number in range(40):
        for rank in (eager, captured):
            (group,) = rank.optimizer.param_groups
            group["lr"] = 2.0 ** -(5 + number % 3)
            if number == 30:
                group["betas"] = (0.5, 0.9)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    CapturedUpdate,
                    "_record",
                    lambda update, *args: recorded.append(args) or own(update, *args),
                )
                rank.step(number)
    assert equal(eager, captured)
    assert len(recorded) == 2


def test_options_that_change_in_each_step_leave_the_optimizer_eager() -> None:
    eager, captured = Rank(capture=False), Rank()
    for number in range(40):
        for rank in (eager, captured):
            rank.optimizer.param_groups[0]["betas"] = (0.5 + number / 100, 0.9)
            before = rank.replays
            rank.step(number)
    assert captured.replays == before + 1  # forward and backward alone
    assert equal(eager, captured)


def test_a_state_that_is_loaded_is_stepped() -> None:
    eager, captured = Rank(capture=False), Rank()
    for number in range(30):
        for rank in (eager, captured):
            if number == 20:
                rank.optimizer.load_state_dict(rank.optimizer.state_dict())
                rank.optimizer.state[rank.module[0].weight]["exp_avg"].mul_(2)  # type: ignore[index, union-attr]
            rank.step(number)
    assert equal(eager, captured)
    states = [rank.optimizer.state_dict()["state"][0] for rank in (eager, captured)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_no_node_that_ends_a_graph_is_alive_when_a_capture_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a node belongs to the stream on which it was made, and CUDA refuses that stream in a capture."""
    rank, seen = Rank(), []
    own = GraphPool.capture

    def capture(pool: GraphPool, work: Any) -> Any:
        for parameter in rank.module.parameters():
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            seen.append(dict(node.metadata))  # a new node has none
        return own(pool, work)

    monkeypatch.setattr(GraphPool, "capture", capture)
    compute = rank.replica.compute

    def marking(*args: Any) -> Any:
        for parameter in rank.module.parameters():
            edge = torch.autograd.graph.get_gradient_edge(parameter)
            edge.node.metadata["made"] = True
        return compute(*args)

    rank.replica.compute = marking  # type: ignore[method-assign]
    for number in range(8):
        rank.step(number)
    assert len(seen) == 8  # two graphs, four parameters
    assert not any(seen)


def test_a_batch_that_lies_on_the_device_is_gathered_by_the_graph() -> None:
    eager, captured = Rank(capture=False), Rank()
    gathers: list[Tensor] = []

    def gather(index: Tensor) -> Any:
        gathers.append(index)
        return X.index_select(0, index), Y.index_select(0, index)

    for number in range(20):
        index = (torch.arange(4) * (number + 1)) % 8
        for rank in (eager, captured):
            rank.replica.begin()
            with rank.lane.on(rank.lane.compute):
                batch = gather(index) if rank is eager else Gathered(index, gather, 4)
                rank.replica.add(batch, rank.worker)
                rank.replica.step()
    assert equal(eager, captured)
    # Of the captured ones: three eager steps, two to record, comparisons at 1, 2, 4, 8 and 16.
    assert len(gathers) == 20 + 3 + 2 + 5


def test_it_waits_until_it_is_known_whether_the_host_is_behind() -> None:
    watch = LaunchWatch()
    rank = Rank(watch=watch)
    for number in range(5):
        rank.step(number)
    assert "not known yet" in rank.captured.state
    for _ in range(WATCHED):
        watch.take(1.0, 1.02)
    for number in range(8):
        rank.step(number)
    assert rank.captured.state == CAPTURED
    assert rank.told == [
        "cpu waits for launches, 1 ms a step: steps run as CUDA graphs from now on, without the "
        "user's Python (capture=False leaves them eager)"
    ]


def test_an_eager_step_behind_captured_ones_begins_with_zeros() -> None:
    eager, captured = Rank(capture=False), Rank()
    for number in range(30):
        for rank in (eager, captured):
            size = 3 if number % 5 == 4 else 4
            rank.replica.begin()
            rank.worker.samples = size
            with rank.lane.on(rank.lane.compute):
                rank.replica.add((X[:size], Y[:size]), rank.worker)
                rank.replica.step()
    assert equal(eager, captured)


class Heads(nn.Module):
    """Two heads, of which a batch asks for one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, both: bool) -> Any:
        return self.first(x) + self.second(x) if both else self.first(x)


def of_heads(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0], batch[2]), batch[1])


def test_an_optimizer_makes_the_state_of_a_parameter_eagerly() -> None:
    """A recording that made it would make it anew, of zeros, in each step."""
    eager, captured = Rank(capture=False, module=Heads, loss=of_heads), Rank(module=Heads, loss=of_heads)
    for number in range(30):
        for rank in (eager, captured):
            # The second head's first gradient comes in the first micro-batch of a step, which is eager.
            rank.replica.begin()
            with rank.lane.on(rank.lane.compute):
                rank.replica.add((X[:4], Y[:4], number == 12), rank.worker, 0.5)
                rank.replica.add((X[4:], Y[4:], number > 12), rank.worker, 0.5)
                rank.replica.step()
    assert equal(eager, captured)


def test_writes_of_a_recording_touch_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's captures have no dispatch mode, so torch counts the writes of `_foreach` operations there."""
    own = CudaStepGraph._collect

    def collect(graph: CudaStepGraph, gradients: Any) -> None:
        own(graph, gradients)
        torch.autograd.graph.increment_version(graph.places)

    monkeypatch.setattr(CudaStepGraph, "_collect", collect)
    eager, captured = Rank(capture=False, module=Heads, loss=of_heads), Rank(module=Heads, loss=of_heads)
    for number in range(20):
        for rank in (eager, captured):
            rank.replica.begin()
            with rank.lane.on(rank.lane.compute):
                rank.replica.add((X[:4], Y[:4], number == 0), rank.worker)
                rank.replica.step()
    assert equal(eager, captured)


def test_a_difference_leaves_what_the_graph_alone_has_touched() -> None:
    asked = [True]

    def loss(module: nn.Module, batch: Any) -> Tensor:
        both = bool(environ.get("FLOWDP_TEST_BOTH")) or asked[0]
        return F.cross_entropy(module(batch[0], both), batch[1])

    eager, captured = (Rank(capture=capture, module=Heads, loss=loss) for capture in (False, True))
    for number in range(12):
        for rank in (eager, captured):
            with pytest.MonkeyPatch.context() as patch:
                asked[0] = number == 0
                if number < 4:
                    patch.setenv("FLOWDP_TEST_BOTH", "1")
                rank.step(number)
    assert "is there in one of them alone" in str(captured.captured.ended)
    assert equal(eager, captured)


def test_a_batch_norm_that_the_loss_holds_in_a_dict_is_put_back() -> None:
    def run(capture: bool) -> Rank:
        torch.manual_seed(1)
        held = {"norm": nn.BatchNorm1d(3)}
        rank = Rank(
            capture=capture,
            loss=lambda module, batch: F.cross_entropy(module(held["norm"](batch[0])), batch[1]),
        )
        for number in range(8):
            rank.step(number)
        held["norm"].eval()
        for number in range(8):
            rank.step(number)
        return rank

    assert equal(run(False), run(True))


def test_a_recorded_number_that_is_a_buffer_is_that_of_its_moment() -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        norm = module[0]  # type: ignore[index]
        return F.cross_entropy(module(batch[0]), batch[1]), {"mean": norm.running_mean[0]}

    def told(capture: bool) -> list[float]:
        rank = Rank(
            capture=capture,
            module=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)),
            loss=lambda module, batch: loss(module, batch),
        )
        values: list[float] = []
        rank.worker.sink = lambda _name, value, _weight: values.append(float(value))
        for number in range(12):
            rank.step(number)
        return values

    assert told(True) == told(False)


def test_a_number_that_is_changed_before_each_step_ends_it_with_advice() -> None:
    rank = Rank()
    for number in range(20):
        rank.module.beta = float(number)  # type: ignore[assignment]
        rank.step(number)
    assert "may be a tensor on the device" in str(rank.captured.ended)
