"""Tests of optimizers on flat memory: the values of torch's steps parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from flowdp.device.flat_gradients import FlatGradients
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import HostLane
from flowdp.replica.factories import flatten
from flowdp.replica.flat_optimizer import LARGE, FlatOptimizer, obstacle
from flowdp.replica.flat_twin import ELEMENTWISE, FUSED

STEPS = 20

EVEN = ((16, 12), (64,), (8, 4, 6), (128,), (2, 64))
"""Shapes that fill torch's vectors: on the CPU the rest of a tensor may get other bits."""

RAGGED = ((7, 5), (3,), (1,), (), (65, 3), (0,), (17,))

Options = dict[str, Any]


def options(kind: type[Optimizer]) -> Iterator[Options]:
    """All options that change the values."""
    more: dict[type[Optimizer], list[Options]] = {
        optim.SGD: [
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.9, "dampening": 0.1},
        ],
        optim.Adam: [{"amsgrad": True}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
        optim.AdamW: [{"amsgrad": True}],
    }
    for one in ({}, *more[kind]):
        yield {"lr": 0.01, **one}
        yield {"lr": 0.01, "maximize": True, **one}
        if "weight_decay" not in one:
            yield {"lr": 0.01, "weight_decay": 0.1, **one}


CASES = [
    pytest.param(kind, one, id=f"{kind.__name__}-{'-'.join(f'{k}={v}' for k, v in one.items())}")
    for kind in ELEMENTWISE
    for one in options(kind)
]


class Bag(nn.Module):
    """Parameters of given shapes, without a forward."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = EVEN, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.all = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)

    def backward(self, step: int, touched: Sequence[bool]) -> None:
        generator = torch.Generator().manual_seed(step)
        terms = [(one * torch.randn(one.shape, generator=generator).to(one.dtype)).sum() for one in self.all]
        sum(term for term, is_there in zip(terms, touched, strict=True) if is_there).backward()  # type: ignore[union-attr]


Make = Callable[[list[nn.Parameter]], Optimizer]


class Flat:
    """A bag with an optimizer on flat memory."""

    def __init__(self, bag: Bag, make: Make, schedule: Callable[[Optimizer], Any] | None = None) -> None:
        self.bag = bag
        self.own = make(list(bag.all))
        self.scheduler = None if schedule is None else schedule(self.own)
        [self.replica] = flatten([bag], [HostLane(torch.device("cpu"))], self.own, may_thaw=True)
        assert obstacle(self.own, bag, self.replica) is None
        self.gradients = FlatGradients(self.replica)
        self.flat = FlatOptimizer(self.own, self.replica, self.gradients)
        self.stepped = self.own

    def step(self, step: int, touched: Sequence[bool]) -> None:
        self.bag.backward(step, touched)
        self.stepped = self.flat.prepare(self.gradients.collect())
        self.stepped.step()
        self.flat.finish()
        self.gradients.clear()
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def lengths(self) -> list[int]:
        """Number of tensors that each group steps."""
        return [len(group["params"]) for group in self.stepped.param_groups]


class Plain:
    """The same with torch alone."""

    def __init__(self, bag: Bag, make: Make, schedule: Callable[[Optimizer], Any] | None = None) -> None:
        self.bag = bag
        self.own = make(list(bag.all))
        self.scheduler = None if schedule is None else schedule(self.own)

    def step(self, step: int, touched: Sequence[bool]) -> None:
        self.own.zero_grad()
        self.bag.backward(step, touched)
        self.own.step()
        if self.scheduler is not None:
            self.scheduler.step()


def reference(kind: type[Optimizer], given: Options) -> Options:
    """The options for which torch uses the same kernel as for flat memory."""
    return given if kind not in FUSED["cpu"] or "foreach" in given else {"fused": True, **given}


def assert_equal(mine: Bag, theirs: Bag) -> None:
    for one, other in zip(mine.all, theirs.all, strict=True):
        assert torch.equal(one, other)


def assert_same_state(mine: Optimizer, theirs: Optimizer) -> None:
    ours, others = mine.state_dict(), theirs.state_dict()
    assert ours["state"].keys() == others["state"].keys()
    seen: set[int] = set()
    for key, state in others["state"].items():
        assert list(ours["state"][key]) == list(state)
        for name, value in state.items():
            own = ours["state"][key][name]
            assert (own.shape, own.dtype, own.stride()) == (value.shape, value.dtype, value.stride())
            assert torch.equal(own, value)
            if own.numel():
                assert own.data_ptr() not in seen  # a shared `step` would be counted twice
                seen.add(own.data_ptr())
    for own, other in zip(ours["param_groups"], others["param_groups"], strict=True):
        assert own.keys() == other.keys()
        assert all(own[name] == other[name] for name in own if name != "fused")


def both(
    kind: type[Optimizer],
    given: Options,
    shapes: Sequence[tuple[int, ...]] = EVEN,
    dtype: torch.dtype = torch.float32,
) -> tuple[Flat, Plain]:
    return (
        Flat(Bag(shapes, dtype), lambda params: kind(params, **given)),
        Plain(Bag(shapes, dtype), lambda params: kind(params, **reference(kind, given))),
    )


ALL = [True] * len(EVEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("kind", "given"), CASES)
def test_the_bits_are_those_of_torch_parameter_by_parameter(
    kind: type[Optimizer], given: Options, dtype: torch.dtype
) -> None:
    mine, plain = both(kind, given, dtype=dtype)
    for step in range(STEPS):
        mine.step(step, ALL)
        plain.step(step, ALL)
    assert mine.lengths == [1]
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)


def groups(params: list[nn.Parameter]) -> list[Options]:
    """Groups with members that are not neighbours in the module; the last parameter is in none."""
    return [
        {"params": [params[0], params[2]], "lr": 0.1},
        {"params": [params[3], params[1]], "weight_decay": 0.2},
    ]


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_each_group_is_one_flat_parameter_with_its_own_options(kind: type[Optimizer]) -> None:
    given = reference(kind, {"lr": 0.01})
    mine = Flat(Bag(), lambda params: kind(groups(params), lr=0.01))  # type: ignore[arg-type]
    plain = Plain(Bag(), lambda params: kind(groups(params), **given))  # type: ignore[arg-type]
    for step in range(STEPS):
        mine.step(step, ALL)
        plain.step(step, ALL)
    assert mine.lengths == [1, 1]
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_a_rate_may_be_a_tensor(kind: type[Optimizer]) -> None:
    given = {"lr": torch.tensor(0.1)}
    mine, plain = both(kind, given)
    for step in range(STEPS):
        given["lr"].fill_(0.1 / (step + 1))
        mine.step(step, ALL)
        plain.step(step, ALL)
    assert_equal(mine.bag, plain.bag)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_schedulers_steer_it_by_the_optimizer_that_the_user_has_made(kind: type[Optimizer]) -> None:
    def schedule(optimizer: Optimizer) -> Any:
        return optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1, cycle_momentum=True)

    given = {"momentum": 0.9} if kind is optim.SGD else {}
    mine = Flat(Bag(), lambda params: kind(params, lr=0.1, **given), schedule)  # type: ignore[call-arg]
    plain = Plain(
        Bag(),
        lambda params: kind(params, **reference(kind, {"lr": 0.1, **given})),  # type: ignore[arg-type]
        schedule,
    )
    for step in range(STEPS):  # torch's warning that nothing was stepped would be an error
        mine.step(step, ALL)
        plain.step(step, ALL)
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)


# ---------------------------------------------------------------- parameters without a gradient
STATEFUL = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "given"), STATEFUL)
def test_parameters_that_are_left_out_at_random_are_stepped_when_they_are_used(
    kind: type[Optimizer], given: Options
) -> None:
    mine, plain = both(kind, given)
    generator = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        touched = ALL if step < 4 else (torch.rand(5, generator=generator) < 0.7).tolist()
        touched[0] = True
        mine.step(step, touched)
        plain.step(step, touched)
        assert_equal(mine.bag, plain.bag)
        if step % 6 == 0:  # as for a checkpoint, which must change nothing
            mine.own.state_dict()
    assert_same_state(mine.own, plain.own)


@pytest.mark.parametrize(("kind", "given"), STATEFUL)
def test_a_parameter_that_is_frozen_for_some_steps_stands_still(
    kind: type[Optimizer], given: Options
) -> None:
    mine, plain = both(kind, given)
    for step in range(STEPS):
        is_free = not 5 <= step < 9
        for side in (mine, plain):
            side.bag.all[2].requires_grad_(is_free)
            side.step(step, [True, True, is_free, True, True])
    assert mine.lengths == [3]  # its two neighbours, and itself
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)


# ---------------------------------------------------------------- changes by the user
@pytest.mark.parametrize(("kind", "given"), STATEFUL)
def test_a_parameter_whose_data_the_user_replaces_is_stepped_where_it_is(
    kind: type[Optimizer], given: Options
) -> None:
    mine, plain = both(kind, given)
    for step in range(STEPS):
        if step == 7:
            for side in (mine, plain):
                side.bag.all[2].data = side.bag.all[2].data * 0.5
        mine.step(step, ALL)
        plain.step(step, ALL)
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)


def test_a_gradient_that_was_replaced_or_taken_away_is_what_counts() -> None:
    mine, plain = both(optim.AdamW, {"lr": 0.1})
    for step in range(STEPS):
        for side in (mine, plain):
            side.bag.backward(step, ALL)
            if step % 3 == 1:
                side.bag.all[1].grad = side.bag.all[1].grad * 2
                side.bag.all[3].grad = None
        optimizer = mine.flat.prepare(mine.gradients.collect())
        optimizer.step()
        mine.flat.finish()
        mine.gradients.clear()
        plain.own.step()
        plain.own.zero_grad()
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)


def test_autograd_sees_that_a_parameter_has_changed_since_its_forward() -> None:
    mine, _ = both(optim.SGD, {"lr": 0.1})
    kept = (mine.bag.all[0] ** 2).sum()
    mine.step(0, ALL)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_a_parameter_that_was_frozen_at_first_is_stepped_when_it_is_thawed() -> None:
    def frozen() -> Bag:
        bag = Bag()
        bag.all[1].requires_grad_(False)
        return bag

    def make(params: list[nn.Parameter]) -> Optimizer:
        return optim.AdamW(params, lr=0.1, fused=True)

    mine, plain = Flat(frozen(), make), Plain(frozen(), make)
    for step in range(STEPS):
        for side in (mine, plain):
            side.bag.all[1].requires_grad_(step >= 8)
            side.step(step, [True, step >= 8, True, True, True])
        if step == 12:
            mine.own.load_state_dict(copy.deepcopy(mine.own.state_dict()))
    assert mine.bag.all[1].grad is None
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)


# ---------------------------------------------------------------- state
@pytest.mark.parametrize(("kind", "given"), STATEFUL)
def test_torch_goes_on_from_its_state_and_it_from_torchs(kind: type[Optimizer], given: Options) -> None:
    mine, plain = both(kind, given)
    for step in range(STEPS):
        touched = [True, True, step > 3, True, step != 5]
        if step in (8, 14):  # now each continues with the other's state
            states = mine.own.state_dict(), plain.own.state_dict()
            plain.own.load_state_dict(copy.deepcopy(states[0]))
            mine.own.load_state_dict(copy.deepcopy(states[1]))
            for group in plain.own.param_groups:  # they are the other one's
                group["fused"] = reference(kind, given).get("fused")
            for group in mine.own.param_groups:
                group["fused"] = None
        mine.step(step, touched)
        plain.step(step, touched)
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)
    assert mine.stepped is not mine.own


# ---------------------------------------------------------------- steps one by one
@pytest.mark.parametrize("kind", list(ELEMENTWISE))
def test_state_that_was_loaded_is_there_in_the_order_of_its_parameters_before_a_step_has_used_it(
    kind: type[Optimizer],
) -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return kind(parameters, lr=0.01, **({"momentum": 0.9} if kind is optim.SGD else {}))

    mine, theirs = Bag(((3, 4, 5, 5), (7, 5))), Bag(((3, 4, 5, 5), (7, 5)))
    for bag in (mine, theirs):
        bag.all[0].data = bag.all[0].data.to(memory_format=torch.channels_last)
        bag.all[1].data = bag.all[1].data.t().contiguous().t()
    one, other = Flat(mine, make), Plain(theirs, make)
    for step in range(2):
        other.step(step, [True, True])
    saved = copy.deepcopy(other.own.state_dict())
    for entry in saved["state"].values():
        for name, value in entry.items():
            entry[name] = value.contiguous()
    one.own.load_state_dict(saved)
    mine.backward(2, [True, True])
    one.flat.prepare(one.gradients.collect())  # and no step, as where it runs out of memory
    found = one.own.state_dict()["state"]
    for number, entry in other.own.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(found[number][name], value)


def test_hooks_that_are_registered_later_see_the_users_optimizer_and_its_parameters() -> None:
    mine, plain = both(optim.AdamW, {"lr": 0.1, "fused": True})
    seen: list[int] = []

    def look(optimizer: Optimizer, *_: object) -> None:
        seen.append(sum(one.grad is not None for one in optimizer.param_groups[0]["params"]))

    for step in range(STEPS):
        if step == 9:
            mine.own.register_step_pre_hook(look)
        touched = [True, step > 12, True, True, True]
        mine.step(step, touched)
        plain.step(step, touched)
    assert seen == [4] * 4 + [5] * 7
    assert mine.stepped is mine.own
    assert_equal(mine.bag, plain.bag)
    assert_same_state(mine.own, plain.own)


def test_an_eps_that_becomes_zero_makes_no_nan_between_the_parameters() -> None:
    mine, plain = both(optim.AdamW, {"lr": 0.1, "fused": True}, RAGGED)
    touched = [True] * len(RAGGED)
    for step in range(6):
        for side in (mine, plain):
            side.own.param_groups[0]["eps"] = 1e-8 if step < 3 else 0.0
            side.step(step, touched)
    assert torch.isfinite(mine.replica.total())
    for one, other in zip(mine.bag.all, plain.bag.all, strict=True):
        torch.testing.assert_close(one, other)


class Own(optim.SGD):
    """A user's subclass."""


def _own_step(optimizer: Optimizer) -> Optimizer:
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    return optimizer


def _hooked(optimizer: Optimizer) -> Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda params: Own(params, lr=0.1), "Own is none"),
        (lambda params: optim.LBFGS(params), "LBFGS is none"),
        (lambda params: optim.RMSprop(params), "RMSprop is none"),
        (lambda params: _own_step(optim.SGD(params, lr=0.1)), "step of its own"),
        (lambda params: _hooked(optim.SGD(params, lr=0.1)), "hooks"),
        (lambda params: optim.Adam(params, eps=0.0), "eps=0.0 is 0 in torch.float32"),
        (lambda params: optim.Adam(params, differentiable=True), "differentiable"),
    ],
)
def test_it_says_why_an_optimizer_steps_its_parameters_one_by_one(make: Make, why: str) -> None:
    bag = Bag()
    found = obstacle(make(list(bag.all)), bag, FlatReplica(bag))
    assert found is not None
    assert why in found


def _tie(bag: Bag) -> None:
    bag.register_parameter("other", nn.Parameter(bag.all[0].data))


def _hook(bag: Bag) -> None:
    bag.all[0].register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda bag: bag.register_parameter("turn", nn.Parameter(torch.ones(2) * 1j)), "complex"),
        (lambda bag: bag.add_module("rows", nn.Embedding(3, 2, sparse=True)), "sparse"),
        (_tie, "shares it"),
        (_hook, "hook"),
        (lambda bag: bag.half(), "eps=1e-08 is 0 in torch.float16"),
    ],
)
def test_it_says_which_models_need_a_step_parameter_by_parameter(
    change: Callable[[Bag], Any], why: str
) -> None:
    bag = Bag()
    change(bag)
    found = obstacle(optim.Adam(bag.parameters()), bag, FlatReplica(bag))
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    ("make", "gains"),
    [
        (lambda params: optim.AdamW(params), True),  # a fused kernel instead of ten others
        (lambda params: optim.AdamW(params, fused=True), False),
        (lambda params: optim.SGD(params, lr=0.1), False),
    ],
)
def test_few_and_large_parameters_are_stepped_one_by_one_where_it_gains_nothing(
    make: Make, gains: bool
) -> None:
    bag = Bag([(LARGE * 3,), (LARGE,), (16,)])
    found = obstacle(make(list(bag.all)), bag, FlatReplica(bag))
    assert (found is None) is gains
    small = Bag([(LARGE,), (16,)])
    assert obstacle(make(list(small.all)), small, FlatReplica(small)) is None


def test_gaps_stay_zero() -> None:
    for kind in ELEMENTWISE:
        mine = Flat(Bag(RAGGED), lambda params, kind=kind: kind(params, lr=0.1))  # type: ignore[misc]
        for step in range(5):
            mine.step(step, [True] * len(RAGGED))
        [flat] = mine.replica.flats
        total = sum((one.detach().double().square().sum() for one in mine.bag.all), torch.zeros(()))
        torch.testing.assert_close(flat.memory.double().square().sum(), total.double())


def test_a_step_makes_no_tensor_of_each_parameter() -> None:
    calls: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    mine = Flat(Bag([(4,)] * 50), lambda params: optim.AdamW(params, lr=0.1))
    touched: list[Tensor | bool] = [True] * 50
    for step in range(2):
        mine.step(step, touched)  # type: ignore[arg-type]
    mine.bag.backward(2, touched)  # type: ignore[arg-type]
    with Count():
        mine.flat.prepare(mine.gradients.collect()).step()
        mine.flat.finish()
        mine.gradients.clear()
    assert sum(call.startswith("aten") for call in calls) <= 3, calls


@pytest.mark.parametrize("more", [{}, {"nesterov": True}, {"dampening": 0.1}, {"weight_decay": 0.1}])
def test_parameters_come_one_after_another_to_a_fused_momentum(
    more: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where flowdp takes torch's fused SGD, which has one first step for all."""
    mine, plain = both(optim.SGD, {"lr": 0.1, "momentum": 0.9, **more})
    monkeypatch.setitem(FUSED, "cpu", frozenset({optim.SGD}))
    count = len(mine.bag.all)
    for step in range(6):
        touched = [at <= step for at in range(count)]
        mine.step(step, touched)
        plain.step(step, touched)
        assert mine.stepped.param_groups[0]["fused"] is (None if "dampening" in more else True)
    for one, other in zip(mine.bag.all, plain.bag.all, strict=True):
        torch.testing.assert_close(one, other)
