"""Tests of steps as graphs of operations: the same bits as eager steps, or a reason why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowdp.device import worker_context
from flowdp.device.streams import open_lanes
from flowdp.device.worker_context import CurrentWorker
from flowdp.graphs.base import Computed, Factors, NotCaptured
from flowdp.graphs.cpu_graph import CpuGraph, CpuRecorder, SharedGraphs
from flowdp.graphs.guards import Guards
from flowdp.replica.replica import Replica
from tests.parts import parts_of

CPU = torch.device("cpu")
X = torch.randn(4, 6)


def mean(model: nn.Module, batch: Any) -> Any:
    return model(batch).square().mean()


@pytest.fixture(autouse=True)
def _bound_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is bound to the thread before or after the test."""
    monkeypatch.setattr(worker_context._local, "worker", None, raising=False)


class Rank:
    """A replica and the recorder of its graphs."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] = mean,
        shared: SharedGraphs | None = None,
        precision: Any = "32",
    ) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lane = open_lanes([CPU])[0]
        self.replica = Replica(parts_of(model, optimizer, lane, precision=precision), loss)
        self.worker = CurrentWorker(0, CPU, model, samples=4, sink=lambda *_: None)
        worker_context.bind(self.worker)
        self.guards = Guards({"": model}, loss)
        self.recorder = CpuRecorder(self.replica, {"": model}, self.guards, shared or SharedGraphs())

    def record(self, *leaves: Tensor) -> CpuGraph:
        return self.recorder.record(leaves[0] if len(leaves) == 1 else leaves, leaves, self.worker, ONE)

    def eager(self, batch: Any) -> Computed:
        return self.replica.compute(batch, self.worker, ONE)

    def gradients(self) -> list[Tensor | None]:
        return [one.grad for one in self.replica.module.parameters()]


ONE = Factors(1.0, 4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.embed((x.abs() * 3).long().clamp(max=6)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 3, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x[None])[0]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x[None])


class Again(nn.Module):
    """A checkpointed part: its forward is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.sign()


class Own(nn.Linear):
    """A function with its own backward, and a hook on its result."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_forward_hook(lambda _module, _inputs, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Doubled.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.4)),
    "tied": Tied,
    "recurrent": Recurrent,
    "attention": Attending,
    "checkpointed": Again,
    "own backward": Own,
}


@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_buffers_and_draws_are_those_of_an_eager_step(name: str, precision: str) -> None:
    if (name, precision) == ("recurrent", "bf16") and torch.__version__ < "2.13":
        pytest.skip(
            "older torch rounds the backward of an LSTM otherwise in a graph: a run notices and stays eager"
        )
    torch.manual_seed(3)
    model = MODELS[name]()
    if (name, precision) == ("recurrent", "bf16"):
        try:
            with torch.autocast("cpu", torch.bfloat16):
                model(X)
        except RuntimeError as error:  # oneDNN needs AVX-512 for it
            pytest.skip(f"torch has no bf16 LSTM on this CPU: {error}")
    eager, captured = (Rank(one, precision=precision) for one in (copy.deepcopy(model), model))
    graph = captured.record(X)
    state = torch.get_rng_state()
    for step in range(3):
        torch.set_rng_state(state)
        one = eager.eager(X * step)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        other = graph.run([X * step], ONE, None)
        assert torch.equal(after, torch.get_rng_state())
        state = after
        assert torch.equal(one.loss, other.loss)
        assert not other.loss.requires_grad
    for mine, theirs in zip(captured.gradients(), eager.gradients(), strict=True):
        assert mine is theirs is None or (
            mine is not None and theirs is not None and torch.equal(mine, theirs)
        )
    pairs = zip(captured.replica.module.buffers(), eager.replica.module.buffers(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_trial_changes_nothing() -> None:
    rank = Rank(MODELS["layers"]())
    graph = rank.record(X)
    graph.run([X], ONE, None)
    there = [*rank.replica.module.buffers(), *(one for one in rank.gradients() if one is not None)]
    before = [one.clone() for one in there]
    trial = graph.trial([X], ONE, torch.Generator())
    assert all(torch.equal(one, other) for one, other in zip(there, before, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(trial.buffers, before, strict=False))


class Writing(nn.Embedding):
    """Writes to its weights and its input in every forward."""

    def __init__(self) -> None:
        super().__init__(7, 6, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(3).abs().long().clamp(max=6))


def test_a_trial_of_a_forward_that_writes_leaves_parameters_and_batch_alone() -> None:
    rank = Rank(Writing())
    weight = rank.replica.module.weight
    graph, before, batch = rank.record(X), weight.detach().clone(), X.clone()
    trial = graph.trial([batch], ONE, None)
    assert torch.equal(weight, before)
    assert torch.equal(batch, X)
    assert torch.equal(trial.computed.loss, rank.eager(batch).loss)
    assert not torch.equal(weight, before)


def test_a_parameter_that_has_thawed_is_refused() -> None:
    model = nn.Linear(6, 2)
    model.bias.requires_grad_(False)
    rank = Rank(model)
    model.bias.requires_grad_(True)
    with pytest.raises(NotCaptured, match="'bias' was frozen when the run began"):
        rank.record(X)


def test_shares_of_the_loss_are_inputs() -> None:
    rank = Rank(nn.Linear(6, 2))
    graph = rank.record(X)
    whole = graph.run([X], ONE, None).loss
    assert torch.equal(graph.run([X], Factors(0.3, 4), None).loss, whole * 0.3)


def test_a_generator_is_an_input() -> None:
    rank = Rank(nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5)))
    graph = rank.record(X)
    losses = [graph.run([X], ONE, torch.Generator().manual_seed(seed)).loss for seed in (1, 1, 2)]
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_ranks_of_one_architecture_share_a_graph_and_others_do_not() -> None:
    shared = SharedGraphs()
    ranks = [Rank(nn.Sequential(nn.Linear(6, 3), nn.Dropout(p)), shared=shared) for p in (0.1, 0.1, 0.2)]
    one, same, other = (rank.record(X) for rank in ranks)
    assert one._traced is same._traced
    assert one._traced is not other._traced
    same.run([X], ONE, None)
    assert not any(gradient.any() for gradient in ranks[0].gradients())
    assert None not in map(type, ranks[1].gradients())


def test_a_tensor_beside_the_tables_is_read_as_it_is() -> None:
    weights = torch.ones(())
    rank = Rank(nn.Linear(6, 2), lambda model, batch: model(batch).mean() * weights)
    graph = rank.record(X)
    before = graph.run([X], ONE, None).loss
    weights.fill_(2.0)
    assert torch.equal(graph.run([X], ONE, None).loss, 2 * before)


def replaced(model: nn.Module, batch: Any) -> Any:
    model.kept = model.kept + 1
    return model(batch).mean()


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)
        self.register_buffer("kept", torch.zeros(()))


PARAMETERS: list[nn.Parameter] = []
TEMPERATURE = torch.ones(())

REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "takes a number out of a tensor": (
        lambda: nn.Linear(6, 2),
        lambda model, batch: model(batch).mean() * (2 if batch.sum() > 0 else 1),
    ),
    "out of a tensor .* goes on by it": (
        lambda: nn.Linear(6, 2),
        lambda model, batch: model(batch).mean() * TEMPERATURE.item(),
    ),
    "depends on data": (lambda: nn.Linear(6, 2), lambda model, batch: model(batch)[batch[:, :2] > 0].mean()),
    "records a number of Python": (
        lambda: nn.Linear(6, 2),
        lambda model, batch: (model(batch).mean(), {"x": 1.0}),
    ),
    "global_step": (
        lambda: nn.Linear(6, 2),
        lambda model, batch: model(batch).mean() * (1 + worker_context.current_worker().global_step),
    ),
    "new tensor into 'kept'": (Buffered, replaced),
    "backward draws random numbers": (
        lambda: nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5)),
        lambda model, batch: checkpoint(model, batch, use_reentrant=False).mean(),
    ),
    "sparse": (
        lambda: nn.Embedding(7, 2, sparse=True),
        lambda model, batch: model(batch.long().clamp(0, 6)).mean(),
    ),
    "past the model": (
        lambda: nn.Linear(6, 2),
        lambda model, batch: model(batch).mean() + PARAMETERS[0].sum(),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_step_that_cannot_be_recorded_says_why_and_leaves_the_model_as_it_was(reason: str) -> None:
    make, loss = REFUSED[reason]
    rank = Rank(make(), loss)
    PARAMETERS[:] = list(rank.replica.module.parameters())
    before = {id(one) for one in (*rank.replica.module.parameters(), *rank.replica.module.buffers())}
    with pytest.raises(NotCaptured, match=reason):
        rank.record(X)
    assert {id(one) for one in (*rank.replica.module.parameters(), *rank.replica.module.buffers())} == before
    assert worker_context.current_worker() is rank.worker


def test_hooks_of_parameters_and_scaled_losses_are_refused() -> None:
    rank = Rank(nn.Linear(6, 2))
    next(iter(rank.replica.module.parameters())).register_hook(lambda gradient: gradient * 2)
    with pytest.raises(NotCaptured, match="has hooks"):
        rank.record(X)
    with pytest.raises(NotCaptured, match="fp16"):
        Rank(nn.Linear(6, 2), precision="fp16").record(X)


def test_a_criterion_with_numbers_of_its_own() -> None:
    rank = Rank(
        nn.Linear(6, 2), lambda model, batch: F.mse_loss(model(batch), torch.tensor(0.5).expand(4, 2))
    )
    graph = rank.record(X)
    assert torch.equal(graph.run([X], ONE, None).loss, rank.eager(X).loss)
