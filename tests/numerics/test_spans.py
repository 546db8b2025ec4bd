"""Exact steps of several cards, each of which steps a span of the parameters: as one device takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import flowdp
from flowdp.errors import StepError
from flowdp.replica.flat_twin import ELEMENTWISE
from flowdp.replica.joint_step import SpanStep
from tests.data.cards import Card, put_on_streams
from tests.numerics.test_exact import apart, check_equal
from tests.numerics.test_owners import OPTIMIZERS, STEPS, Make, Unlike, exact, mse, net, plain

EQUAL, UNEQUAL = (1.0, 1.0, 1.0), (0.5, 0.4, 0.1)


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Fake streams alone, on which every replica is watched."""
    card = Card()
    put_on_streams(card, monkeypatch.setattr)
    yield "streams"
    assert not card.races


def shared(ratios: Any) -> dict[str, Any]:
    tuning = flowdp.ProcessTuning(openmp=False)
    return {"runtime": flowdp.RuntimeOptions(partition_ratios=ratios, tune_process=tuning)}


def with_spans(run: flowdp.Run) -> flowdp.Run:
    assert isinstance(run._engine._parts.workers[0]._meeting.joint, SpanStep)
    return run


class Idle(nn.Sequential):
    """A model with a layer that has a part in some windows, and one in none."""

    def __init__(self) -> None:
        super().__init__(*net())
        self.often, self.never = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Any) -> Any:
        output = nn.Sequential(*list(self)[:5])(x)  # type: ignore[call-overload]
        return output + self.often(output) * (x[:, :1] > 1.0) if bool((x[:, 0] > 1.0).any()) else output


def idle_net() -> Idle:
    torch.manual_seed(4)
    return Idle()


def weighted(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    weight = x[:, 1].abs().sum()
    return {"loss": nn.functional.mse_loss(model(x), y, reduction="sum") / weight, "weight": weight}


def train(make: Make, model: nn.Module, ratios: Any = UNEQUAL, **options: Any) -> flowdp.Run:
    """Train on cards: those of torch's optimizers that step flat memory step spans, others everything."""
    run = exact(make, len(ratios), model, **shared(ratios), **options).start()
    has_spans = type(run._engine.replicas[0].update.optimizer) in ELEMENTWISE
    assert isinstance(run._engine._parts.workers[0]._meeting.joint, SpanStep) is has_spans
    assert run.join().global_step == STEPS
    check_equal(run)
    return run


@pytest.mark.parametrize(
    ("name", "ratios"),
    [
        ("SGD", (1.0, 1.0)), ("Adam", UNEQUAL), ("AdamW", (1.0, 2.0, 3.0, 4.0)), ("Adafactor", UNEQUAL),
        ("Adagrad", (1.0, 1.0)),
    ],
)  # fmt: skip
def test_optimizers_with_and_without_spans(name: str, ratios: Any) -> None:
    model, make = net(), OPTIMIZERS[name]
    train(make, model, ratios)
    assert apart(model, plain(make, net())) < 1e-12


@pytest.mark.parametrize(
    ("name", "norm", "value", "ratios"),
    [
        ("SGD", 0.3, None, UNEQUAL), ("Adam", None, 0.01, EQUAL), ("AdamW", 0.3, None, EQUAL),
        ("AdamW", None, 0.01, UNEQUAL), ("Adafactor", 0.3, None, UNEQUAL),
    ],
)  # fmt: skip
def test_groups_clipping_weights_and_parameters_without_a_gradient(
    name: str, norm: float | None, value: float | None, ratios: Any
) -> None:
    def make(params: Any) -> optim.Optimizer:
        listed = list(params)
        return OPTIMIZERS[name]([{"params": listed[::2], "lr": 0.003}, {"params": listed[1::2]}])

    model = idle_net()
    train(make, model, ratios, loss=weighted, max_grad_norm=norm, max_grad_value=value)
    expected = plain(make, idle_net(), weighted, clip=norm, value=value)
    assert apart(model, expected) < 1e-12
    assert torch.equal(model.never.weight, idle_net().never.weight)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_rank_with_nans_is_left_out_of_its_window(name: str) -> None:
    """Its gradient is masked on the device; all take the step of the others."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        is_odd = worker.rank == 1 and worker.global_step == 5
        return mse(model, batch) * (torch.nan if is_odd else 1.0)

    model = net()
    train(OPTIMIZERS[name], model, loss=loss)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_replicas_of_unlike_kinds_are_equal_to_the_bit() -> None:
    run = with_spans(exact(Unlike(), 3, callbacks=[flowdp.EMA(0.9)]).start())
    run.join()
    check_equal(run)
    first, *others = [replica.average.averages[0] for replica in run._engine.replicas]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_state_is_there_once(name: str) -> None:
    run = with_spans(exact(OPTIMIZERS[name], 3).start())
    result = run.join()
    replicas = run._engine.replicas
    length = replicas[0].flat.flats[0].split
    names = ELEMENTWISE[type(replicas[0].update.optimizer)]
    for replica in replicas:
        assert not replica.update.optimizer.state
        twin = replica.update.flat._twin.optimizer
        for each in names & {key for state in twin.state.values() for key in state}:
            assert sum(state[each].numel() for state in twin.state.values()) <= length // 3
    state = result.optimizer_state["state"]
    assert list(state) == list(range(len(list(net().parameters()))))
    made: list[optim.Optimizer] = []
    plain(lambda params: made.append(OPTIMIZERS[name](params)) or made[0])  # type: ignore[func-returns-value]
    for number, entry in made[0].state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.allclose(state[number][key].double(), value.double(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "before", "after"), [("SGD", 2, 3), ("Adam", 2, 1), ("AdamW", 1, 3), ("AdamW", 3, 2)]
)
def test_a_checkpoint_goes_on_with_other_spans(name: str, before: int, after: int, tmp_path: Any) -> None:
    make, model = OPTIMIZERS[name], net()
    folder = flowdp.CheckpointOptions(tmp_path, every=20, unit="step")
    exact(make, before, max_steps=20, checkpoint=folder).fit()
    exact(make, after, model, checkpoint=folder, resume=True).fit()
    assert apart(model, plain(make, net())) < 1e-12


class Moves(nn.Sequential):
    """A model whose forward moves its parameters out of the flat memory."""

    def forward(self, x: Any) -> Any:
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()
        return super().forward(x)


def test_parameters_that_a_forward_moves() -> None:
    make, model = OPTIMIZERS["AdamW"], Moves(*net())
    with_spans(exact(make, 3, model).start()).join()
    assert apart(model, plain(make, Moves(*net()))) < 1e-12


@pytest.mark.parametrize("ratios", [(1.0, 1.0), (1.0, 2.0, 3.0, 4.0)], ids=len)
def test_a_model_smaller_than_the_spans(ratios: Any) -> None:
    """Some ranks own padding alone."""
    make = OPTIMIZERS["AdamW"]

    def small() -> nn.Module:
        torch.manual_seed(3)
        return nn.Linear(6, 4, bias=False).double()

    model = small()
    run = with_spans(exact(make, len(ratios), model, **shared(ratios), max_grad_norm=0.3).start())
    run.join()
    assert apart(model, plain(make, small(), clip=0.3)) < 1e-12
    check_equal(run)


@pytest.mark.parametrize("changes", ["hooks", "form"])
def test_a_state_that_is_loaded_during_the_run_has_to_fit(changes: str) -> None:
    made: list[optim.Optimizer] = []

    def make(params: Any) -> optim.Optimizer:
        made.append(optim.SGD(params, lr=0.01, momentum=0.9))
        return made[-1]

    class Loads(flowdp.Callback):
        def on_step(self, worker: Any, loss: Tensor | None) -> None:
            optimizer = made[worker.rank]
            if worker.local_step == 5:
                state = optim.SGD(optimizer.param_groups[0]["params"], lr=0.01, momentum=0.9).state_dict()
                if changes == "form":
                    state["state"] = {0: {"momentum_buffer": torch.zeros(3, dtype=torch.float64)}}
                optimizer.load_state_dict(state)
                if changes == "hooks":
                    optimizer.register_step_post_hook(lambda *_: None)

    what = {"hooks": "hooks were registered on it", "form": "its state has 'momentum_buffer' in another form"}
    with pytest.raises(StepError, match=what[changes]):
        exact(make, 2, callbacks=[Loads()]).fit()


@pytest.mark.parametrize("ratios", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_parameters_in_bfloat16(ratios: Any) -> None:
    """Their mean is taken in float32, and every replica gets the rounded one."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return mse(model, (batch[0].bfloat16(), batch[1].bfloat16()))

    model, make = net().bfloat16(), OPTIMIZERS["SGD"]
    run = with_spans(exact(make, 3, model, loss=loss, **shared(ratios)).start())
    run.join()
    check_equal(run)
    assert apart(model, plain(make, net().bfloat16(), loss)) < 0.05
