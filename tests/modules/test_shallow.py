"""Tests of shallow replicas: they follow the module's parts and attributes, and have tables of their own."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from flowdp.modules.shallow import ShallowReplicas
from tests.loops import assert_equal, numbers


class Net(nn.Module):
    """Attributes of many kinds, some of them parts or bound to parts."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.register_buffer("scale", torch.ones(3).double())
        self.config = SimpleNamespace(rate=0.1)
        self.lock, self.names, self.path = threading.Lock(), ["a"], ("first", "last")
        self.listed: Any = [self.first, self.last]
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.listed:
            x = layer(x)
        return x * self.scale


def halves(net: nn.Module) -> dict[int, Tensor]:
    """Tensors that stand for those of a module: half their values."""
    return {id(tensor): tensor.detach() / 2 for tensor in (*net.parameters(), *net.buffers())}


def renewed(net: nn.Module, shallow: ShallowReplicas | None = None) -> Any:
    """Replica 1 of 2, with half the values."""
    shallow = shallow or ShallowReplicas(net, 2)
    shallow.look()
    return shallow.renew(1, halves(net))


def halved(net: nn.Module, x: Tensor) -> Tensor:
    """The output of a module with half the values."""
    out: Tensor = torch.func.functional_call(
        net,
        {
            name: tensor.detach() / 2
            for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
        },
        x,
    )
    return out


# ---------------------------------------------------------------- tensors and parts
def test_a_replica_computes_with_its_own_tensors_and_the_modules_are_as_before() -> None:
    net = Net()
    state = {name: (tensor, tensor.clone()) for name, tensor in net.state_dict(keep_vars=True).items()}
    replica = renewed(net)
    assert type(replica) is Net
    assert replica.config is net.config
    assert replica.lock is net.lock
    assert replica.listed[0] is replica.first
    assert replica.first is not net.first
    assert_equal([replica(numbers(2, 3))], [halved(net, numbers(2, 3))])
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert tensor is state[name][0]
        assert torch.equal(tensor, state[name][1])


def test_tied_parameters_and_a_part_with_two_names_stay_one() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    net[1].weight = net[0].weight
    net.append(net[0])
    replica = renewed(net)
    assert replica[0].weight is replica[1].weight
    assert replica[2] is replica[0]


def test_a_replica_is_one_object_from_call_to_call() -> None:
    """Compiled code is kept by the objects that it was compiled for."""
    net = Net()
    shallow = ShallowReplicas(net, 2)
    replica = renewed(net, shallow)
    first = replica.first
    assert renewed(net, shallow) is replica
    assert replica.first is first
    assert shallow.renew(0, {}) is not replica


def test_what_a_forward_sets_on_a_replica_is_gone_at_the_next_call() -> None:
    net = Net()
    shallow = ShallowReplicas(net, 2)
    replica = renewed(net, shallow)
    replica.seen = torch.ones(1)
    replica.first.more = nn.Linear(1, 1)
    replica.scale = torch.zeros(3)
    replica.last.weight = None
    replica.first.register_forward_hook(lambda *_: None)
    assert [table.get("scale") is replica.scale for table in shallow.tables(1)] == [True, False, False]
    replica = renewed(net, shallow)
    assert not hasattr(replica, "seen")
    assert not hasattr(replica.first, "more")
    assert not replica.first._forward_hooks
    assert replica.scale.tolist() == [0.5] * 3
    assert replica.last.weight is not None
    assert not net.first._forward_hooks


def test_hooks_of_the_module_are_those_of_a_replica() -> None:
    net = Net()
    shallow = ShallowReplicas(net, 2)
    renewed(net, shallow)
    handle = net.last.register_forward_hook(lambda module, args, out: out + 1)
    bare = halved(net, numbers(2, 3))  # which has the hook, too
    assert_equal([renewed(net, shallow)(numbers(2, 3))], [bare])
    handle.remove()
    assert_equal([renewed(net, shallow)(numbers(2, 3))], [bare - 0.5])


# ---------------------------------------------------------------- what the loop changes


def rename_part(net: Any) -> None:
    net.tail, net.listed = net.last, []
    del net.last, net.listed
    net.listed = [net.first]


CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], Any]]] = {
    "a number": (lambda n: setattr(n.first, "rate", 0.5), lambda n: n.first.rate),
    "one less": (lambda n: delattr(n, "state"), lambda n: hasattr(n, "state")),
    "another name for a part": (rename_part, lambda n: (hasattr(n, "tail"), hasattr(n, "last"))),
    "into a configuration": (lambda n: setattr(n.config, "rate", 0.7), lambda n: n.config.rate),
    "a list of parts": (lambda n: setattr(n, "listed", [n.last]), lambda n: n(numbers(2, 3))),
    "into a list of parts": (lambda n: n.listed.append(n.last), lambda n: n(numbers(2, 3))),
    "into a list in a tuple": (lambda n: n.pair[1].append(n.last), lambda n: n.pair[1][0].weight),
    "into a dict": (lambda n: n.by_name.update(b=n.last), lambda n: n.by_name["b"].weight),
    "another part": (lambda n: setattr(n, "last", nn.Tanh()), lambda n: type(n.last)),
    "a new part": (lambda n: setattr(n, "third", nn.Linear(3, 1)), lambda n: n.third.weight),
    "a new parameter": (
        lambda n: setattr(n.first, "bias", nn.Parameter(torch.ones(3).double())),
        lambda n: n.first.bias,
    ),
    "a buffer of another form": (lambda n: setattr(n, "scale", torch.ones(2, 3)), lambda n: n.scale),
    "evaluation": (lambda n: n.eval(), lambda n: (n.training, n.last.training)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_loop_changes_is_the_same_in_the_next_call(change: str) -> None:
    net: Any = Net()
    net.pair, net.by_name = (1, []), {"a": net.first}
    shallow = ShallowReplicas(net, 2)
    renewed(net, shallow)
    do, read = CHANGES[change]
    do(net)
    found, wanted = read(renewed(net, shallow)), read(net)
    if isinstance(wanted, Tensor):
        # Half the weights are there, and no others.
        assert found.shape == wanted.shape
        assert not torch.equal(found, wanted)
    else:
        assert found == wanted
    if change not in ("another part", "a buffer of another form"):
        shallow.look()
        assert_equal([shallow.renew(1, {})(numbers(2, 3))], [net(numbers(2, 3))])


def test_parts_that_are_gone_are_let_go() -> None:
    net = Net()
    shallow = ShallowReplicas(net, 2)
    renewed(net, shallow)
    old = net.last
    net.last, net.listed = nn.Linear(3, 3), []
    renewed(net, shallow)
    assert all(part is not old for part in shallow.parts)
    assert len(shallow.parts) == 3


class Written(nn.Module):
    """Writes to plain tensors and arrays, which no state dict has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.total, self.counts, self.queue = torch.zeros(3), np.zeros(3), [torch.zeros(3)]
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        self.total += x
        self.queue[0].add_(x)
        self.counts += 1
        return x + self.total


def test_plain_tensors_and_arrays_are_copied_and_follow_those_of_the_module() -> None:
    net: Any = Written("a")  # and its class wants an argument
    shallow = ShallowReplicas(net, 2)
    for value in (0.0, 5.0):
        net.total.fill_(value)
        net.counts[:] = value
        net.queue[0].fill_(value)
        shallow.look()
        replica: Any = shallow.renew(1, {})
        assert torch.equal(replica(torch.ones(3)), torch.full((3,), value + 2))
        assert [replica.counts[0], float(replica.queue[0][0])] == [value + 1, value + 1]
        assert [net.counts[0], float(net.queue[0][0]), float(net.total[0])] == [value] * 3


def test_a_tensor_that_is_a_buffer_too_is_the_replicas_buffer() -> None:
    net: Any = nn.BatchNorm1d(3)
    net.known = {"mean": net.running_mean}
    shallow = ShallowReplicas(net, 2)
    shallow.look()
    own = torch.ones(3)
    replica: Any = shallow.renew(1, {id(net.running_mean): own})
    assert replica.known["mean"] is replica.running_mean is own


# ---------------------------------------------------------------- parts among the attributes
class Pair(NamedTuple):
    layer: nn.Module
    number: int

    def __call__(self, x: Tensor) -> Any:
        return self.layer(x)


class Layers(list[nn.Module]):
    def __call__(self, x: Tensor) -> Any:
        return self[0](x)


HELD: dict[str, Callable[[Any, Any], Any]] = {
    "a part": lambda net, layer: layer,
    "a named tuple": lambda net, layer: Pair(layer, 1),
    "a list of a class of its own": lambda net, layer: Layers([layer]),
    "a method": lambda net, layer: layer.forward,
    "a partial": lambda net, layer: partial(lambda layer, x, times: times * layer(x), layer, times=3),
    "by name": lambda net, layer: partial(lambda x, layer: layer(x), layer=layer),
}


@pytest.mark.parametrize(
    ("held", "around"), [*((held, "alone") for held in HELD), ("a method", "tuple"), ("a partial", "deep")]
)
def test_what_holds_a_part_has_that_of_its_replica(held: str, around: str) -> None:
    net = Net()
    function = HELD[held](net, net.first)
    forms: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "alone": (function, lambda state: state),
        "tuple": ((function, 2), lambda state: state[0]),
        "deep": ([{"f": (1, [function])}], lambda state: state[0]["f"][1][0]),
    }
    net.state, take = forms[around]
    replica = renewed(net)
    assert type(replica.state) is type(net.state) or around == "alone"
    x = numbers(2, 3)
    twin = Net()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.div_(2)
    assert_equal([take(replica.state)(x)], [HELD[held](twin, twin.first)(x)])
    assert not torch.equal(take(net.state)(x), take(replica.state)(x))


def test_what_holds_no_part_is_shared_but_for_containers_that_a_forward_may_write_to() -> None:
    net = Net()
    values: list[Any] = [(1, "a"), lambda x: net.first(x), max, net.config]
    for value in values:
        net.state = value
        assert renewed(net).state is value
    containers: list[Any] = [
        [1, [2]],
        {"a": (1,)},
        {1, 2},
        deque([1, 2], maxlen=2),
        Counter("ab"),
        OrderedDict(b=1, a=2),
        defaultdict(list, a=[1]),
    ]
    for value in containers:
        net.state = value
        found = renewed(net).state
        assert found == value
        assert type(found) is type(value)
        assert found is not value
    assert found["b"] == []
    assert "b" not in value


def test_containers_that_hold_themselves() -> None:
    net = Net()
    net.listed.append(net.listed)
    by_name: dict[str, Any] = {"layer": net.first}
    by_name["self"] = by_name
    net.state = [by_name]
    replica = renewed(net)
    assert replica.listed[0] is replica.first
    assert replica.state[0]["layer"] is replica.first


# ---------------------------------------------------------------- modules of torch
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "kind",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        parametrizations.weight_norm,
        partial(prune.l1_unstructured, name="weight", amount=0.5),
    ],
)
def test_normed_and_pruned_layers(kind: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(kind(nn.Linear(6, 4))).double().eval()
    net(numbers(2, 6))
    found = renewed(net)(numbers(2, 6))
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.div_(2)
    assert_equal([found], [net(numbers(2, 6))])


def test_recurrent_layers() -> None:
    """They list their weights in an attribute, too."""
    torch.manual_seed(3)
    net = nn.LSTM(3, 4, num_layers=2).double()
    found = renewed(net)(numbers(5, 2, 3))[0]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.div_(2)
    assert_equal([found], [net(numbers(5, 2, 3))[0]])
