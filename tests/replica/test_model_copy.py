"""Tests of copies of a module: what `copy.deepcopy` does not follow is copied, too, or refused."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm
from torch.optim import SGD

import flowdp
from flowdp.errors import OptionError
from flowdp.replica.model_copy import copy_module

CPU = torch.device("cpu")
X, Y = torch.rand(32, 6, dtype=torch.float64), torch.rand(32, dtype=torch.float64)


class Features(nn.Module):
    """Reads values that hooks on its layers have kept, as a perceptual loss does."""

    def __init__(self, *, is_closure: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.kept: dict[int, Tensor] = {}
        for place in (0, 2):
            keep = self.keeper(place) if is_closure else partial(self.keep, place)
            self.layers[place].register_forward_hook(keep)

    def keeper(self, place: int) -> Callable[..., None]:
        return lambda module, inputs, output: self.keep(place, module, inputs, output)

    def keep(self, place: int, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept[place] = output

    def forward(self, x: Tensor) -> Tensor:
        self.layers(x)
        return self.kept[0].mean(1) + self.kept[2].mean(1)


def error(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).pow(2).mean()
    return loss


def train(model: Any, devices: int) -> flowdp.TrainedState:
    return flowdp.Trainer(
        model=model,
        optimizer=lambda parameters: SGD(parameters, 0.1),
        loss=error,
        dataset=(X, Y),
        per_device_batch_size=8 // devices,
        epochs=1,
        policy="exact",
        reading=flowdp.ReadingOptions(shuffle=False),
        devices=["cpu"] * devices,
        progress=False,
    ).fit()


@pytest.mark.parametrize("is_factory", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_hooks_that_are_methods_are_the_copys_and_a_factory_may_have_closures(
    devices: int, is_factory: bool
) -> None:
    model = Features()
    plain = Features()
    plain.load_state_dict(model.state_dict())
    optimizer = SGD(plain.parameters(), 0.1)
    for start in range(0, 32, 8):
        optimizer.zero_grad()
        error(plain, (X[start : start + 8], Y[start : start + 8])).backward()
        optimizer.step()

    def make() -> nn.Module:
        made = Features(is_closure=True)
        made.load_state_dict(before)
        return made

    before = copy.deepcopy(model.state_dict())
    found = train(make if is_factory else model, devices).state_dict
    assert not model.kept
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def closure_as_hook(net: Any) -> None:
    @wraps(closure_as_hook)
    def hook(*given: Any) -> Any:
        return save(*given)

    def save(module: nn.Module, inputs: Any, output: Tensor) -> None:
        net.kept = output

    net[1].register_forward_hook(hook)


def default_as_hook(net: Any) -> None:
    def hook(module: nn.Module, inputs: Any, output: Tensor, net: Any = net) -> None:
        net.kept = output

    net[1].register_forward_hook(hook)


def replaced_forward(net: Any) -> None:
    old = net[1].forward
    net[1].forward = lambda x: 2 * old(x)


def compiled_forward(net: Any) -> None:
    net[1].forward = torch.compile(net[1].forward, backend="eager")


def reference(net: Any) -> None:
    net[1].above = [weakref.ref(net)]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (closure_as_hook, "1._forward_hooks"),
        (default_as_hook, "1._forward_hooks"),
        (replaced_forward, "1.forward"),
        (compiled_forward, "1.forward"),
        (reference, "1.above"),
    ],
)
def test_functions_that_hold_the_original_are_refused(change: Callable[[Any], None], where: str) -> None:
    """A copy would use the original's parameters, and train them not at all."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).double()
    copy_module(net, CPU)
    change(net)
    with pytest.raises(OptionError, match=rf"a function in its attribute '{where}' .* give a factory"):
        train(net, 1)


def test_functions_that_hold_nothing_of_the_module_or_the_copy_pass() -> None:
    net: Any = nn.Sequential(nn.LSTM(3, 3), nn.Linear(3, 3))
    found: list[Any] = []
    net[0].register_forward_hook(lambda module, inputs, output: found.append(output))
    net.call = net.several = [net[1].forward, partial(net[1].forward)]
    made: Any = copy_module(net, CPU)
    assert made.call[0].__self__ is made.call[1].func.__self__ is made[1]
    made[0](torch.ones(1, 3))
    assert len(found) == 1
    compiled = copy_module(torch.compile(net, backend="eager"), CPU)
    assert isinstance(compiled, nn.Module)


def test_marks_on_parameters_are_copied() -> None:
    model = nn.Linear(2, 2)
    model.weight.options = {"lr": 0.0, "of": model.bias}  # type: ignore[attr-defined]
    made: Any = copy_module(model, CPU)
    assert made.weight.options == {"lr": 0.0, "of": made.bias}
    assert made.weight.options["of"] is made.bias


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5)  # type: ignore[no-any-return, no-untyped-call]


def normed() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(3, 3))


def spectral() -> nn.Module:
    return spectral_norm(nn.Linear(3, 3))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("make", [pruned, normed, spectral])
def test_weights_that_each_forward_computes(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    x = torch.ones(1, 3)
    model(x)
    made = copy_module(model, CPU)
    made(x).sum().backward()
    assert torch.equal(made(x), model(x))
    assert all(parameter.grad is not None for parameter in made.parameters())
