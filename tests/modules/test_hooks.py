"""Tests of hooks: those of a module's copy use the copy's objects, and the module's own are unchanged."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp import FlowdpError
from flowdp.modules.hooks import Twins, twins_of
from tests.loops import assert_equal, gradients, numbers


class Features(nn.Module):
    """A loss of layers' outputs, which hooks store in an attribute: a perceptual loss."""

    def __init__(self, save: Callable[[Any, int], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.found: dict[int, Tensor] = {}
        self.register_buffer("scale", torch.tensor(2.0).double())
        for place in (0, 2):
            self.inner[place].register_forward_hook(save(self, place))

    def features(self, x: Tensor) -> list[Tensor]:
        self.inner(x)
        return [self.found[0].mean(1), self.found[2].mean(1)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.features(x), self.features(y), strict=True)
        return torch.stack([(mine - other).square().mean() for mine, other in pairs]).sum()


def by_self(net: Any, place: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        net.found[place] = output * net.scale

    return hook


def by_container(net: Any, place: int) -> Any:
    found = net.found
    return lambda module, inputs, output: found.__setitem__(place, output)


def by_default(net: Any, place: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor, net: Any = net, *, where: Any = net) -> None:
        net.found[place] = where.inner[0].weight.sum() * output

    return hook


def by_partial(net: Any, place: int) -> Any:
    return partial(lambda save, module, inputs, output: save(output), partial(net.found.__setitem__, place))


def by_wrapper(net: Any, place: int) -> Any:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inside(*given: Any) -> Any:
            return function(*given)

        return inside

    return logged(by_self(net, place))


def by_reference(net: Any, place: int) -> Any:
    reference: Any = weakref.ref(net)
    return lambda module, inputs, output: reference().found.__setitem__(place, output)


def by_list(net: Any, place: int) -> Any:
    holders = [(net, {"weight": net.inner[0].weight}, deque([net]))]
    return lambda module, inputs, output: holders[0][2][0].found.__setitem__(
        place, output * holders[0][1]["weight"].sum()
    )


WAYS = [by_self, by_container, by_default, by_partial, by_wrapper, by_reference, by_list]


@pytest.mark.parametrize("later", [False, True], ids=["before setup", "after setup"])
@pytest.mark.parametrize("save", WAYS)
def test_hooks_that_hold_their_module_work_on_each_replica(save: Any, later: bool) -> None:
    x, y = numbers(9, 6), numbers(9, 6, seed=6)
    alone = Features(save)
    alone(x, y).backward()
    net = Features((lambda net, place: lambda *given: None) if later else save)
    with flowdp.setup(net, devices=["cpu"] * 3, partition_ratios=(1, 1, 1), progress=False) as dp:
        for place in (0, 2) if later else ():
            net.inner[place].register_forward_hook(save(net, place))
        for _ in range(3):
            net.zero_grad()
            dp(x, y).backward()
            assert_equal(gradients(net), gradients(alone))
            assert len(net.found[0]) == 3, "the user's module has its own part"


def test_a_replaced_forward_that_holds_its_layer() -> None:
    x = numbers(8, 3)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    old = net[0].forward
    net[0].forward = lambda x: 2 * old(x)  # type: ignore[method-assign]
    net(x).sum().backward()
    wanted = gradients(net)
    with flowdp.setup(net, devices=["cpu"] * 2, progress=False) as dp:
        for _ in range(2):
            net.zero_grad()
            dp(x).sum().backward()
            assert_equal(gradients(net), wanted)
        earlier: Any = net[1].forward
        net[1].forward = lambda x: 3 * earlier(x)  # type: ignore[method-assign]
        net.zero_grad()
        dp(x).sum().backward()
        assert_equal([net[1].bias.grad], [3 * wanted[3]])  # type: ignore[operator]


class Holder:
    """An object of a module, with its own functions."""

    def __init__(self) -> None:
        self.call: Any = None


def copied(module: nn.Module) -> Any:
    memo: dict[int, Any] = {}
    made = copy.deepcopy(module, memo)
    memo.pop(id(memo))
    Twins(memo | twins_of(module.modules(), made.modules())).rebind(memo.values())
    return made


def test_a_function_that_holds_nothing_of_the_module_is_the_same_one() -> None:
    log: list[int] = []
    net: Any = nn.Linear(1, 1)
    net.call = lambda: log.append(1)
    net.several = (net.call, [net.call])
    made = copied(net)
    assert made.call is net.call
    assert made.several[0] is net.call


def test_functions_keep_their_form_and_hold_one_another() -> None:
    net: Any = nn.Linear(1, 1)

    def even(count: int, /, *, of: Any = net) -> Any:
        """Whether `number` is even."""
        return (net, of) if count == 0 else odd(count - 1)

    def odd(count: int) -> Any:
        return even(count - 1)

    even.mark = [net]  # type: ignore[attr-defined]
    net.holder = Holder()
    net.holder.call = even
    net.calls = [odd, (odd, 3)]
    net.by_name = {"odd": odd}
    made = copied(net)
    assert made.holder.call(4) == (made, made)
    assert net.holder.call(4) == (net, net)
    assert made.calls[0] is made.calls[1][0] is made.by_name["odd"]
    assert made.calls[0](3) == (made, made)
    assert made.holder.call.mark == [made]
    assert made.holder.call.__doc__ == even.__doc__
    assert made.holder.call.__qualname__ == even.__qualname__


def test_cells_are_common_to_the_functions_of_a_copy() -> None:
    net: Any = nn.Linear(1, 1)
    held = net

    def change() -> None:
        nonlocal held
        held = 5

    net.change, net.look = change, lambda: held
    made = copied(net)
    assert made.look() is made
    made.change()
    assert made.look() == 5
    assert net.look() is net


def test_a_cell_without_content_and_long_lists_are_left_alone() -> None:
    net: Any = nn.Linear(1, 1)
    many = [net] * 2_000
    net.call = lambda: (net, many, later)
    made = copied(net)
    later = 3
    assert made.call() == (made, many, 3)
    assert made.call()[1] is many


def test_a_change_beside_a_function_reaches_the_replicas() -> None:
    net: Any = nn.Linear(3, 3)
    net.options = {"function": lambda: net, "sizes": [1]}
    with flowdp.setup(net, devices=["cpu"] * 2, progress=False) as dp:
        replica: Any = dp._replicas.modules[1]
        dp(torch.ones(4, 3))
        net.options["sizes"].append(2)
        dp(torch.ones(4, 3))
        assert replica.options["sizes"] == [1, 2]
        assert replica.options["function"]() is replica
        assert net.options["function"]() is net


# ---------------------------------------------------------------- objects outside the module
kept_by_name: dict[str, Any] = {}
last: Any = None


def into_a_global_dict(net: Any) -> None:
    net[0].register_forward_hook(lambda module, inputs, output: kept_by_name.__setitem__("a", output))


def into_a_global(net: Any) -> None:
    def hook(module: nn.Module, inputs: Any) -> None:
        global last
        last = inputs[0]

    net[0].register_forward_pre_hook(hook)


def into_a_cell(net: Any) -> None:
    kept: Any = 0

    def hook(module: nn.Module, inputs: Any, words: Any, output: Tensor) -> None:
        nonlocal kept
        kept = [output, kept][:1]

    net[0].register_forward_hook(hook, with_kwargs=True)


def into_a_list(net: Any) -> None:
    found: list[Any] = []
    net[0].register_forward_hook(lambda module, inputs, output: found.append(output.detach()))


class Extractor:
    """An object of the loop with a method as hook."""

    def __init__(self, net: Any) -> None:
        self.net, self.found = net, {"all": [[None]]}
        net[0].register_forward_hook(partial(self.save, "all"))

    def save(self, key: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self.found[key][0] = [{"output": output}]  # type: ignore[list-item]


KEEPERS = [into_a_global_dict, into_a_global, into_a_cell, into_a_list, Extractor]


@pytest.mark.parametrize("keep", KEEPERS)
def test_hooks_that_keep_a_tensor_of_the_batch_in_an_object_of_the_loop_are_an_error(keep: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    keep(net)
    with (
        flowdp.setup(net, devices=["cpu"] * 2, progress=False) as dp,
        pytest.raises(FlowdpError, match=r"the hook .* of '0' \(Linear\) keeps a tensor of the batch"),
    ):
        dp(torch.randn(4, 3))
    with flowdp.setup(net, devices=["cpu"] * 2, progress=False, check=False) as dp:
        dp(torch.randn(4, 3))


def test_hooks_that_keep_numbers_in_an_object_of_the_loop_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    norms: list[Any] = []
    names: list[str] = []
    net[0].register_forward_hook(lambda module, inputs, output: norms.append(output.norm().item()))
    net[0].register_forward_hook(lambda module, inputs, output: norms.append(module.weight.norm()))
    net[1].register_forward_hook(lambda module, inputs, output: names.append("called"))
    with flowdp.setup(net, devices=["cpu"] * 2, progress=False) as dp:
        for _ in range(4):
            dp(torch.randn(4, 3))
    told = [record.getMessage() for record in caplog.records if "changes an object" in record.getMessage()]
    assert len(told) == 1
    assert "<lambda> of '0' (Linear) changes an object of the loop" in told[0]


def test_what_hooks_keep_in_the_module_or_do_not_keep_passes(caplog: pytest.LogCaptureFixture) -> None:
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    options = {"factor": 2.0, "many": [0.0] * 5_000}
    net[0].seen = {}
    net[0].register_forward_hook(lambda module, inputs, output: options["factor"] * output)
    net[0].register_forward_hook(lambda module, inputs, output: module.seen.update(width=output.shape[1]))
    with flowdp.setup(net, devices=["cpu"] * 2, progress=False) as dp:
        dp(torch.randn(4, 3)).sum().backward()
    assert not [record for record in caplog.records if "hook" in record.getMessage()]


def test_backward_hooks_that_keep_results_in_an_object_of_the_loop_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    found: dict[str, Any] = {}
    net[1].register_full_backward_hook(lambda module, given, came: found.update(came=came[0]))
    net[1].register_full_backward_hook(lambda module, given, came: None)
    with flowdp.setup(net, devices=["cpu"] * 2, progress=False) as dp:
        for _ in range(3):
            dp(torch.randn(4, 3)).sum().backward()
    (told,) = [record.getMessage() for record in caplog.records if "the hook" in record.getMessage()]
    assert "<lambda> of '1' (Linear) keeps results in an object of the loop" in told
