"""Tests of the comparison of calls that are cut with the same on one device."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp import FlowdpError, OptionError
from flowdp.data_parallel.comparison import Call, Schedule, check_call
from flowdp.data_parallel.cut import Arguments
from flowdp.data_parallel.layout import Callee, Layout
from tests.data_parallel.test_layout import Tagger, padded
from tests.loops import assert_equal, gradients, mlp, numbers, replicas_of


class Giving(nn.Module):
    """Returns a function of its layer's outputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = mlp(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


# ---------------------------------------------------------------- outputs


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).squeeze()


def test_a_squeeze_with_one_sample_a_device(setup: Any) -> None:
    message = r"output has shape \(2,\) for the whole batch, and \(\) for its parts"
    with pytest.raises(FlowdpError, match=message):
        setup(Squeezed())(numbers(2, 6))
    dp = setup(Squeezed())
    for samples in (8, 8, 6):
        assert dp(numbers(samples, 6)).shape == (samples,)
    with pytest.raises(FlowdpError, match=message):
        dp(numbers(2, 6))


@pytest.mark.parametrize(
    ("function", "difference"),
    [
        (
            lambda out: (out, len(out)),
            r"Giving.forward gives another result .*output\[1\] is 8 for the whole batch, and 4 for ",
        ),
        (
            lambda out: (out, (out > 0).sum()),
            r"output\[1\] cannot be gathered: it is one number of torch.int64",
        ),
        (lambda out: out.mean().reshape(1), r"output cannot be .* averaged: loss.mean\(\), loss.squeeze"),
        (lambda out: out - out.mean(0), r"output differs by up to .* A module that looks across the batch"),
        (lambda out: out.std(), r"output is .* for the whole batch"),
    ],
)
def test_outputs_that_depend_on_the_cut(setup: Any, function: Any, difference: str) -> None:
    with pytest.raises(FlowdpError, match=difference):
        setup(Giving(function))(numbers(8, 6))


def test_parts_that_raise_where_the_whole_batch_does_not(setup: Any) -> None:
    class Fixed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if len(input) < 8:
                raise ValueError("eight at a time")
            return super().forward(input)

    with pytest.raises(
        FlowdpError, match=r"a part raises ValueError: eight at a time .*8 samples as 4"
    ) as told:
        setup(Fixed(6, 2))(torch.randn(8, 6))
    assert isinstance(told.value.__cause__, ValueError)


# ---------------------------------------------------------------- gradients, and writes to parameters


class Reversed(torch.autograd.Function):
    """Turns gradients around, and multiplies them with the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient * len(gradient)


def test_gradients_that_depend_on_the_cut(setup: Any) -> None:
    def function(out: Tensor) -> Tensor:
        made: Tensor = Reversed.apply(out)  # type: ignore[no-untyped-call]
        return made

    with pytest.raises(
        FlowdpError, match=r"the gradient of inner.0.weight differs by up to .*8 samples as 4 \+ 4"
    ):
        setup(Giving(function))(numbers(8, 6))
    with torch.no_grad():
        setup(Giving(function))(numbers(8, 6))
    frozen = Giving(function).requires_grad_(False)
    with flowdp.setup(frozen, devices=["cpu"] * 2, progress=False) as dp:
        dp(numbers(8, 6))
        with pytest.raises(FlowdpError, match="the gradient of argument 0 differs"):
            dp(numbers(8, 6).requires_grad_())


def test_a_tensor_to_train_that_is_no_parameter(setup: Any) -> None:
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)
    dp = setup(Giving(lambda out: out * scale))
    with pytest.raises(FlowdpError, match=r"uses a tensor of shape \(3,\) that requires grad and is neither"):
        dp(numbers(8, 6))
    scale.requires_grad_(False)
    dp(numbers(8, 6)).sum().backward()


# ---------------------------------------------------------------- windows
def test_batches_that_are_cut_for_windows(setup: Any) -> None:
    def loss(context: Any) -> Tensor:
        labels = context.batch["labels"][:, 1:].flatten()
        return F.cross_entropy(context.output["logits"][:, :-1].flatten(0, 1), labels)

    full = padded()
    full["labels"] = full["input_ids"]
    dp = setup(Tagger(), loss_fn=loss, inputs="input_ids")
    first, second = dp.epoch([full, padded()])
    dp.forward_batch(first)
    message = r"forward_batch gives another result when the batch is cut: output\['loss'\] is"
    with pytest.raises(FlowdpError, match=message):
        dp.forward_batch(second)
    dp = setup(Tagger(), inputs="input_ids")
    for window in dp.epoch([full, padded()]):
        dp.forward_batch(window)
    dp = setup(nn.LSTM(3, 5))
    for window in dp.epoch([torch.randn(4, 6, 3)]):
        with pytest.raises(FlowdpError, match="forward_batch gives another result"):
            dp.forward_batch(window)


# ---------------------------------------------------------------- calls that pass, without a trace


class Everything(nn.Module):
    """Dropout, batch norm, a count of calls, and three kinds of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(True), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.loose = nn.BatchNorm1d(4, track_running_stats=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.loose(self.layers(x.clone()))
        return F.dropout(out, 0.2, self.training) * random.random()


@pytest.mark.parametrize("is_rows", [True, False])
def test_a_run_with_the_check_has_the_bits_of_one_without(setup: Any, is_rows: bool) -> None:
    class Counting(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out = super().forward(x)
            return out if is_rows else out.mean()

    def state(check: bool) -> Any:
        torch.manual_seed(1)
        model = Counting(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        dp = setup(model, check=check, partition_ratios=(1, 1))
        for _ in range(4):
            # The second call is checked before the backward of the first.
            (dp(torch.randn(8, 6)).mean() + dp(torch.randn(8, 6)).square().mean()).backward()
            dp.step()
        return [tensor.tolist() for tensor in model.state_dict().values()], model.calls

    checked = state(True)
    assert checked == state(False)
    assert checked[1] == 8


def test_generators_go_on_as_if_there_were_no_check(setup: Any) -> None:
    def states(check: bool) -> Any:
        torch.manual_seed(1)
        random.seed(1)
        dp = setup(Everything(), check=check)
        for _ in range(2):
            dp(torch.randn(8, 6))
        return torch.random.get_rng_state().tolist(), random.getstate()

    assert states(True) == states(False)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_check_runs_in_every_mode(setup: Any, mode: Any) -> None:
    model = Everything()
    with mode():
        dp = setup(model)
        for _ in range(2):
            dp(torch.randn(8, 6))
        with pytest.raises(FlowdpError, match="say dim=1"):
            setup(nn.LSTM(3, 5).bfloat16())(torch.randn(4, 6, 3).bfloat16())
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())


def test_check_false_compares_nothing(setup: Any) -> None:
    assert setup(Squeezed(), check=False)(numbers(2, 6)).shape == ()
    with pytest.raises(OptionError, match="check must be True or False"):
        setup(mlp(), check=1)


# ---------------------------------------------------------------- what forward keeps
def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class Queue(nn.Module):
    """Keeps its last outputs, as in momentum contrast, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("queue", torch.zeros(8, 3).double())
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.queue = torch.cat([out.detach(), self.queue])[:8]
        self.calls += 1
        return out


def test_buffers_that_hold_something_of_the_batch_are_named_once(
    setup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dp = setup(Queue())
    for _ in range(3):
        dp(numbers(8, 6))
    (told,) = warnings_of(caplog)
    assert "Queue.forward keeps values of the batch in 'queue': a state that forward keeps is that" in told
    assert dp.module.calls == 3


class Noting(nn.Module):
    """Keeps an auxiliary loss, a list of features and a count, as in mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.features: list[Tensor] = []
        self.calls = 0
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.aux = out.square().mean()
        self.width = out.shape[1]
        self.features = [out.detach()]
        self.calls += 1
        self.seen += len(x)
        return out.sum() / len(x)


def test_attributes_that_hold_a_result_of_the_batch_are_named_once(
    setup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dp = setup(nn.Sequential(Noting()))
    for _ in range(4):
        dp(numbers(8, 6))
    (told,) = warnings_of(caplog)
    assert "keeps values of the batch in '0.aux', '0.features', '0.seen'" in told
    assert dp.module[0].calls == 4


class Loose(nn.Module):
    """Writes to a buffer, and the same in each part to a parameter that is not trained; sets attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.mean.lerp_(out.detach().mean(0), 0.1)
        self.calls.data.fill_(7.0)
        self.last, self.register = out, len(x)
        return out


def test_a_comparison_leaves_the_module_as_it_was() -> None:
    model = Loose()
    model(numbers(8, 6)).sum().backward()
    before, state = dict(vars(model)), copy.deepcopy(model.state_dict())
    tensors = [*model.parameters(), *model.buffers()]
    versions, grads = [tensor._version for tensor in tensors], gradients(model)
    x = numbers(8, 6).requires_grad_()
    with replicas_of(model) as replicas:
        check_call(replicas, call(model, x, (4, 4)))
    assert all(vars(model)[name] is value for name, value in before.items())
    assert vars(model).keys() == before.keys()
    assert all(
        mine is own for mine, own in zip(tensors, [*model.parameters(), *model.buffers()], strict=True)
    )
    assert versions == [tensor._version for tensor in tensors]
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(
        torch.equal(mine, own) for mine, own in zip(grads, gradients(model), strict=True) if own is not None
    )
    assert x.grad is None


# ---------------------------------------------------------------- calls that cannot be checked
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("four at most"), "with the whole batch it raises ValueError: four at most"),
        (torch.OutOfMemoryError("no room"), "the first device has no memory for it beside what it holds"),
    ],
)
def test_a_module_that_cannot_take_the_whole_batch(
    setup: Any, caplog: pytest.LogCaptureFixture, error: Exception, said: str
) -> None:
    class Small(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if len(input) > 4:
                raise error
            return super().forward(input)

    setup(Small(6, 2))(torch.randn(8, 6))
    (told,) = warnings_of(caplog)
    assert said in told


class Rounding(nn.Module):
    """Amplifies a rounding that depends on the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kinds = nn.Linear(6, 3), set[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.kinds = self.kinds | {out.dtype}
        return out + (out / len(x) * len(x) - out) * 5e5


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_difference_by_rounding_is_none(setup: Any, kind: torch.dtype) -> None:
    torch.manual_seed(1)
    model = Rounding()
    x = torch.randn(48, 6)
    whole = model(x)
    assert not torch.allclose(whole, torch.cat([model(part) for part in x.split(16)]), rtol=1e-3, atol=1e-3)
    model.to(kind)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    setup(model, devices=["cpu"] * 3)(x.to(kind))
    assert model.kinds == {torch.float32, kind}
    assert_equal(list(model.state_dict().values()), before)


def call(model: nn.Module, x: Any, sizes: tuple[int, ...]) -> Call:
    def run(module: nn.Module, part: Any) -> Any:
        return module(*part.args, **part.kwargs)

    return Call(Arguments(Layout(), Callee(model.forward), (x,), {}), run, sizes, set())


# ---------------------------------------------------------------- forwards that are no function
class Doing(nn.Module):
    """Does something beside its layer."""

    def __init__(self, do: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.do = mlp(), do
        self.steps = itertools.count(1)

    def forward(self, x: Tensor) -> Any:
        return self.do(self, self.inner(x))


def drop_by_python(module: Any, y: Tensor) -> Tensor:
    return y * 0 if random.random() < 0.5 else y


def drop_by_numpy(module: Any, y: Tensor) -> Tensor:
    return y * float(np.random.rand() < 0.5)


@pytest.mark.parametrize("do", [drop_by_python, drop_by_numpy])
def test_a_forward_with_random_numbers_that_cannot_be_held_is_not_refused(setup: Any, do: Any) -> None:
    dp = setup(Doing(do))
    for step in range(2):
        assert dp(numbers(8, 6, seed=step)).shape == (8, 3)


# ---------------------------------------------------------------- remedies
@pytest.mark.parametrize(
    ("make", "args", "kwargs", "options"),
    [
        (lambda: nn.LSTM(3, 5, 2).double(), (numbers(4, 6, 3),), {}, {"dim": 1}),
        (Tagger, (), padded(), {"reduce": lambda labels: (labels[:, 1:] != -100).sum()}),
        (lambda: Tagger("sum"), (), padded(), {"reduce": "sum"}),
    ],
)
def test_a_difference_goes_with_the_option_that_the_error_names(
    setup: Any, make: Any, args: Any, kwargs: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(FlowdpError, match=r"gives another result .* say dim=1 .* say reduce='sum'"):
        setup(make())(*args, **kwargs)
    setup(make(), **options)(*args, **kwargs)


def test_a_batch_without_padding_tells_nothing_and_a_later_one_does(setup: Any) -> None:
    dp = setup(Tagger())
    full = padded()
    full["labels"] = full["input_ids"]
    dp(**full)["loss"].backward()
    with pytest.raises(FlowdpError, match=r"output\['loss'\] is "):
        dp(**padded())


def test_each_form_has_its_distances() -> None:
    def due(schedule: Schedule, form: object, calls: int) -> list[int]:
        found = []
        for number in range(1, calls + 1):
            if schedule.is_due(form):
                found.append(number)
            schedule.passed(form)
        return found

    schedule = Schedule(Callee(mlp().forward))
    assert due(schedule, "a", 1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 512, 1000]
    assert due(schedule, "b", 5) == [1, 2, 4]
    # Forms without end have one count in common.
    assert sum(len(due(schedule, form, 1)) for form in range(200)) < 30
    assert schedule.is_due("c") == schedule.is_due("d")
