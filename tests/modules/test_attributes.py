"""Tests of attributes: those set by the loop reach all ranks at the next call; those set by forwards stay."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flowdp.errors import FlowdpError, OptionError
from flowdp.modules.attributes import ENTRIES, Attributes


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rate


def double(x: Tensor) -> Tensor:
    return 2 * x


def slope(net: Any) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    (found,) = torch.autograd.grad(net.layer(x).sum(), x)
    return list(found)


@dataclass(slots=True)
class Options:
    rate: float = 0.1
    by_name: dict[str, int] = field(default_factory=lambda: {"a": 1})


class Late(Options):
    """Slots and a table; one slot is empty at first."""

    __slots__ = ("__dict__", "__hidden")

    def hide(self, value: object) -> None:
        self.__hidden = value

    def hidden(self) -> object:
        return getattr(self, "_Late__hidden", None)


class Net(nn.Module):
    """Attributes of many kinds, some of them bound to its own parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = Inner(), nn.Linear(2, 2)
        self.config = self.inner.config = SimpleNamespace(rate=0.1, sizes=[1, 2], by_name={"a": 1})
        self.temperature, self.names, self.pair = 1.0, ["a"], (1, [2])
        self.mask, self.array = torch.ones(2), np.ones(3)
        self.function: Any = self.layer.forward
        self.state: Any = None
        self.calls = 0
        self.seen: set[int] = set()
        self.options, self.late = Options(), Late()
        self.losses = deque([1.0, 2.0], maxlen=2)


class Ranks:
    """A module and its replicas."""

    def __init__(self, count: int = 3) -> None:
        self.nets: list[Any] = [Net()]
        self.nets += [copy.deepcopy(self.nets[0]) for _ in range(count - 1)]
        self.attributes = Attributes([list(net.modules()) for net in self.nets])

    def call(self, *ran: int, do: Callable[[Any], object] = lambda net: None) -> None:
        """A call by the ranks `ran`, and its forward's writes."""
        self.attributes.look()
        self.attributes.send()
        for rank in ran:
            do(self.nets[rank])
        self.attributes.note(set(ran))


SET: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "a number": (lambda n: setattr(n.inner, "rate", 0.5), lambda n: n.inner.rate),
    "no number": (lambda n: setattr(n, "temperature", None), lambda n: n.temperature),
    "an equal number of another type": (lambda n: setattr(n, "temperature", 1), lambda n: str(n.temperature)),
    "a new attribute": (lambda n: setattr(n.layer, "extra", "text"), lambda n: n.layer.extra),
    "one less": (lambda n: delattr(n, "temperature"), lambda n: hasattr(n, "temperature")),
    "another list": (lambda n: setattr(n, "names", ["b", "c"]), lambda n: n.names),
    "into a list": (lambda n: n.names.append("b"), lambda n: n.names),
    "into a tuple's list": (lambda n: n.pair[1].append(3), lambda n: n.pair),
    "into a set": (lambda n: n.seen.add(3), lambda n: n.seen),
    "a configuration": (lambda n: setattr(n.config, "rate", 0.7), lambda n: n.inner.config.rate),
    "deep in one": (lambda n: n.config.by_name.update(a=2), lambda n: n.config.by_name),
    "a slot": (lambda n: setattr(n.options, "rate", 0.7), lambda n: n.options.rate),
    "deep in a slot": (lambda n: n.options.by_name.update(a=2), lambda n: n.options.by_name),
    "a base's slot": (lambda n: setattr(n.late, "rate", 0.7), lambda n: n.late.rate),
    "an empty slot": (lambda n: n.late.hide(3), lambda n: n.late.hidden()),
    "beside slots": (lambda n: setattr(n.late, "more", 3), lambda n: getattr(n.late, "more", None)),
    "a slot less": (lambda n: delattr(n.options, "rate"), lambda n: hasattr(n.options, "rate")),
    "into a deque": (lambda n: n.losses.append(3.0), lambda n: list(n.losses)),
    "another tensor": (lambda n: setattr(n, "mask", torch.zeros(2)), lambda n: n.mask.tolist()),
    "into a tensor": (lambda n: n.mask.zero_(), lambda n: n.mask.tolist()),
    "into an array": (lambda n: n.array.fill(4), lambda n: n.array.tolist()),
    "a function": (lambda n: setattr(n, "function", double), lambda n: n.function),
    "a hook": (lambda n: n.inner.register_forward_hook(lambda m, a, out: out + 1), lambda n: n.inner(3.0)),
    "a backward hook": (
        lambda n: n.layer.register_full_backward_hook(lambda m, given, came: (3 * given[0],)),
        slope,
    ),
}


@pytest.mark.parametrize("what", SET)
def test_what_the_loop_sets_is_the_same_on_all_ranks(what: str) -> None:
    ranks = Ranks()
    change, value = SET[what]
    ranks.call(0, 1, 2)
    before = value(ranks.nets[1]) if what != "a new attribute" else None
    change(ranks.nets[0])
    assert value(ranks.nets[0]) != before
    ranks.call(0)
    assert value(ranks.nets[0]) == value(ranks.nets[1]) == value(ranks.nets[2])
    assert ranks.nets[1].config is ranks.nets[1].inner.config, "one object stays one"
    assert ranks.nets[1].config is not ranks.nets[0].config
    assert not ranks.attributes.is_live


def test_numbers_that_a_factory_does_not_know_are_replaced() -> None:
    nets: list[Any] = [Net(), Net()]
    nets[0].inner.rate, nets[0].temperature = 0.7, 2.0
    nets[1].function = double
    attributes = Attributes([list(net.modules()) for net in nets])
    attributes.look()
    attributes.send()
    assert (nets[1].inner.rate, nets[1].temperature) == (0.7, 2.0)
    assert nets[1].function is double


def test_a_hook_that_is_removed_is_removed_everywhere() -> None:
    ranks = Ranks()
    handle = ranks.nets[0].inner.register_forward_hook(lambda m, args, kw, out: out + 1, with_kwargs=True)
    ranks.call(0, 1)
    assert [net.inner(3.0) for net in ranks.nets] == [pytest.approx(1.3)] * 3
    handle.remove()
    ranks.call(0, 1)
    assert [net.inner(3.0) for net in ranks.nets] == [pytest.approx(0.3)] * 3


def test_what_is_bound_to_a_rank_stays_bound_to_it() -> None:
    ranks = Ranks()
    for value in (ranks.nets[0].inner.forward, functools.partial(Net.extra_repr, ranks.nets[0])):
        ranks.call(0, 1, 2)
        assert (
            all(net.function.__self__ is net.layer for net in ranks.nets)
            or value.__class__ is functools.partial
        )
        ranks.nets[0].function = value
        ranks.call(0, 1, 2)
        owners = [getattr(net.function, "__self__", None) or net.function.args[0] for net in ranks.nets]
        wanted = [net.inner if hasattr(value, "__self__") else net for net in ranks.nets]
        assert all(owner is own for owner, own in zip(owners, wanted, strict=True))
        for net in ranks.nets:
            net.function = net.layer.forward
        ranks.attributes.look()


def test_what_a_forward_counts_is_counted_by_ranks_without_a_part_too() -> None:
    ranks = Ranks()

    def count(net: Any) -> None:
        net.calls += 1
        net.names.append("call")

    ranks.call(0, 1, 2, do=count)
    ranks.call(0, 1, do=count)
    ranks.call(0, 1, 2, do=count)
    assert [net.calls for net in ranks.nets] == [3, 3, 3]
    assert [len(net.names) for net in ranks.nets] == [4, 4, 4]
    assert ranks.attributes.is_live
    ranks.nets[0].calls = 0  # the loop's writes come first
    ranks.call(0, 1, 2, do=count)
    assert [net.calls for net in ranks.nets] == [1, 1, 1]


def test_what_a_forward_keeps_of_its_part_stays_where_it_is() -> None:
    ranks = Ranks()
    weight = torch.ones(1, requires_grad=True)

    def keep(net: Any) -> None:
        net.state = torch.full((2,), float(ranks.nets.index(net))) * weight

    for _ in range(2):
        ranks.call(0, 1, 2, do=keep)
        assert [net.state[0].item() for net in ranks.nets] == [0, 1, 2]
        keep(ranks.nets[0])  # as in a call of the user's own module, or a checkpoint's second forward
    ranks.nets[0].state = None
    ranks.call(0, 1)
    assert ranks.nets[1].state is None


def test_nothing_that_was_replaced_is_kept() -> None:
    ranks = Ranks()
    for kind in (torch.ones, lambda n: [torch.ones(n)]):
        made: list[Any] = []

        def keep(net: Any, kind: Any = kind, made: list[Any] = made) -> None:
            net.state = kind(2)
            made.append(weakref.ref(net.state if isinstance(net.state, Tensor) else net.state[0]))

        for _ in range(3):
            ranks.call(0, 1, do=keep)
        assert [one() is None for one in made] == [True] * 4 + [False] * 2


def test_a_tensor_of_the_forwards_that_the_loop_sets_is_refused() -> None:
    ranks = Ranks()
    ranks.call(0, 1, 2, do=lambda net: setattr(net, "state", torch.ones(2)))
    ranks.nets[0].state = ranks.nets[0].state * 2
    with pytest.raises(FlowdpError, match=r"'state' of Net is a tensor that forward sets.*as an argument"):
        ranks.call(0, 1, 2)


def test_a_call_of_the_module_itself_is_no_error() -> None:
    """As for an evaluation: it sets the losses and traces that forward keeps."""
    ranks = Ranks(2)
    weight = torch.ones(1, requires_grad=True)

    def keep(net: Any) -> None:
        net.state = torch.tensor(3.0) if net is ranks.nets[0] else torch.tensor(4.0)
        net.config.by_name["loss"] = 2 * weight
        net.names.append(2 * weight)

    for _ in range(2):
        ranks.call(0, 1, do=keep)
        keep(ranks.nets[0])
    ranks.call(0, 1)
    assert ranks.nets[1].state == 3


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a module": (lambda: [nn.Linear(2, 2)], "with a Linear"),
    "a closure": (lambda: (lambda layer: lambda x: layer(x))(nn.Linear(2, 2)), "with a Linear"),
    "a parameter": (lambda: [nn.Parameter(torch.ones(1))], "with a Parameter"),
    "a leaf": (lambda: torch.ones(1, requires_grad=True), "with a Tensor"),
    "a lock": (lambda: threading.Lock(), "a lock, which cannot be copied"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_copied_is_refused_by_name(what: str) -> None:
    ranks = Ranks()
    make, message = REFUSED[what]
    ranks.nets[0].state = make()
    with pytest.raises(FlowdpError, match=f"attribute 'state' of Net has been set to .*{message}"):
        ranks.call(0, 1, 2)


def test_a_graph_that_no_forward_makes_is_refused() -> None:
    ranks = Ranks()
    ranks.nets[0].state = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(FlowdpError, match="a tensor with a graph"):
        ranks.call(0, 1, 2)


def test_objects_with_a_state_of_their_own_are_left_alone() -> None:
    class Logger:
        def __init__(self) -> None:
            self.lock, self.count = threading.Lock(), 0

    ranks = Ranks(1)
    logger = Logger()
    ranks.nets[0].state = logger
    ranks.nets.append(Net())
    ranks.nets[1].state = Logger()
    ranks.attributes = Attributes([list(net.modules()) for net in ranks.nets])
    logger.count += 1
    ranks.call(0, 1)
    assert ranks.nets[1].state.count == 0


def test_long_containers_are_compared_by_their_length() -> None:
    ranks = Ranks()
    ranks.nets[0].names = [0] * (ENTRIES + 1)
    ranks.call(0, 1)
    ranks.nets[0].names[5] = 1
    ranks.call(0, 1)
    assert ranks.nets[1].names[5] == 0
    ranks.nets[0].names.append(1)
    ranks.call(0, 1)
    assert ranks.nets[1].names == ranks.nets[0].names


def test_cycles_are_no_trouble() -> None:
    ranks = Ranks()
    ranks.nets[0].names.append(ranks.nets[0].names)
    ranks.nets[0].config.owner = ranks.nets[0]
    ranks.call(0, 1)
    assert ranks.nets[1].config.owner is ranks.nets[1]
    ranks.call(0, 1)


def test_a_tensor_that_requires_grad_and_is_no_parameter_is_refused_before() -> None:
    net = Net()
    net.mask.requires_grad_()
    with pytest.raises(OptionError, match=r"'mask' of Net holds a tensor that requires grad.*nn.Parameter"):
        Attributes([list(net.modules())])


def test_layers_in_a_plain_list_are_refused_before() -> None:
    net = Net()
    net.more = [{"layers": (nn.Linear(2, 2),)}]
    with pytest.raises(OptionError, match=r"'more' of Net holds a module that is not registered.*ModuleList"):
        Attributes([list(net.modules())])
    net.more[0]["layers"][0].requires_grad_(False)  # a teacher, not in the state_dict
    net.same = [*net.children()]
    Attributes([list(net.modules())])
