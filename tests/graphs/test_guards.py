"""Tests of a step's fingerprint: Python state on which a recorded graph depends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from flowdp.graphs.guards import Guards

FACTOR = 1.0
SETTINGS = SimpleNamespace(weight=1.0)
TABLE = {"weight": 1.0}


def inner(value: Any) -> Any:
    return value * FACTOR


class Net(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(p)
        self.register_buffer("scale", torch.ones(1))
        self.plain = torch.ones(1)
        self.sizes = [1, [2, 3]]
        self.names = {"a": 1}
        self.nothing: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        return inner(self.drop(self.layer(x))) * SETTINGS.weight * TABLE["weight"]


def loss(model: nn.Module, batch: Any) -> Any:
    return model(batch).sum()


def guards(net: Net, function: Callable[..., Any] = loss) -> Guards:
    return Guards({"": net}, function)


CHANGES: dict[str, Callable[[Net], object]] = {
    "drop.p was 0.1": lambda net: setattr(net.drop, "p", 0.2),
    "layer.in_features": lambda net: setattr(net.layer, "in_features", 3),
    "training was True": lambda net: net.drop.eval(),
    "sizes": lambda net: net.sizes[1].append(4),  # type: ignore[attr-defined]
    "names": lambda net: net.names.update(b=2),
    "nothing": lambda net: net.nothing.append(1),
    "entries instead of": lambda net: setattr(net, "more", 1),
    "layer.weight.requires_grad was True": lambda net: net.layer.weight.requires_grad_(False),
    "_forward_hooks": lambda net: net.layer.register_forward_hook(lambda *_: None),
    "_backward_hooks": lambda net: net.layer.register_full_backward_hook(lambda *_: None),
    "hooks of layer.weight": lambda net: net.layer.weight.register_hook(lambda gradient: gradient),
    "'scale' of a Net": lambda net: setattr(net, "scale", torch.ones(1)),
    "'weight' of a Linear": lambda net: setattr(net.layer, "weight", nn.Parameter(torch.ones(2, 2))),
    "plain is another object": lambda net: setattr(net, "plain", torch.ones(1)),
    "layer.weight lies in other memory": lambda net: setattr(net.layer.weight, "data", torch.ones(2, 2)),
    "_modules.drop": lambda net: setattr(net, "drop", nn.Dropout(0.1)),
}


@pytest.mark.parametrize("told", CHANGES)
def test_a_change_of_a_module_is_seen_and_named(told: str) -> None:
    net = Net()
    watched = guards(net)
    assert watched.changed() is None
    CHANGES[told](net)
    assert told in (watched.changed() or "nothing was seen")
    watched.retake()
    assert watched.changed() is None


def test_globals_and_objects_of_functions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = guards(Net())
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.FACTOR", 2.0)
        assert "FACTOR" in (watched.changed() or "")
    with monkeypatch.context() as patch:
        patch.setattr(SETTINGS, "weight", 2.0)
        assert "weight was 1.0, it is 2.0" in (watched.changed() or "")
    with monkeypatch.context() as patch:
        patch.setitem(TABLE, "weight", 2.0)
        assert "TABLE" in (watched.changed() or "")
    with monkeypatch.context() as patch:
        patch.setattr(Net, "forward", lambda *_: None)
        assert "forward" in (watched.changed() or "")
    assert watched.changed() is None


def test_closures_and_arguments_of_the_loss_are_seen() -> None:
    weight, table = 1.0, {"x": 1}

    def closed(model: nn.Module, batch: Any) -> Any:
        return model(batch) * weight

    def given(model: nn.Module, batch: Any, table: Any) -> Any:
        return model(batch) * table["x"]

    watched, other = guards(Net(), closed), guards(Net(), partial(given, table=table))
    assert watched.changed() is None
    assert other.changed() is None
    weight = 2.0
    table["x"] = 2
    assert "'weight'" in (watched.changed() or "")
    assert "an argument of the loss" in (other.changed() or "")


def test_what_cannot_be_compared_or_is_gone_counts_as_changed() -> None:
    net = Net()
    net.table = {n: n for n in range(2000)}
    net.array = np.ones(2)
    value: Any = 1.0

    def closed(model: nn.Module, batch: Any) -> Any:
        return model(batch) * value  # noqa: F821 - it is gone below

    watched = guards(net, closed)
    assert watched.changed() is None
    net.array = np.ones(2)
    assert "array is another object" in (watched.changed() or "")
    watched.retake()
    net.table[2000] = 0
    assert "2001 entries instead of 2000" in (watched.changed() or "")
    watched.retake()
    del value
    assert watched.changed() is not None


class Loss:
    """A loss object with a module and a method that reads a global."""

    def __init__(self) -> None:
        self.noise = nn.Dropout(0.1)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.noise(model(batch)) * FACTOR


def decorated(function: Callable[..., Any], scale: list[float]) -> Callable[..., Any]:
    @wraps(function)
    def inside(model: nn.Module, batch: Any) -> Any:
        return function(model, batch) * scale[0]

    return inside


def test_objects_decorators_and_their_modules_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    called, scale = Loss(), [1.0]
    watched, other = guards(Net(), called), guards(Net(), decorated(loss, scale))
    called.noise.p = 0.2
    assert "noise.p was 0.1, it is 0.2" in (watched.changed() or "")
    watched.retake()
    monkeypatch.setattr(f"{__name__}.FACTOR", 2.0)
    assert "FACTOR" in (watched.changed() or "")
    other.retake()
    scale[0] = 2.0
    assert "scale" in (other.changed() or "")


def test_a_tensor_of_a_closure_is_told_apart_as_an_object() -> None:
    weight = torch.ones(1)
    watched = guards(Net(), lambda model, batch: model(batch) * weight)
    assert watched.changed() is None
    weight = torch.ones(1)
    assert "is another o" in (watched.changed() or "")


def test_an_iterator_is_named() -> None:
    ticks = iter([1.0, 2.0])
    assert guards(Net()).obstacle is None
    watched = guards(Net(), lambda model, batch: model(batch) * next(ticks))
    assert "'ticks'" in (watched.obstacle or "")


def test_switches_of_torch_are_seen() -> None:
    watched = guards(Net())
    with torch.no_grad():
        assert "switches" in (watched.changed() or "")
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert "switches" in (watched.changed() or "")
    finally:
        handle.remove()
    assert watched.changed() is None


def test_a_dict_that_another_rank_writes_to_meanwhile_is_copied_all_the_same() -> None:
    shared: dict[str, Any] = {}

    class Watching(dict[str, int]):
        """When it is read, another rank has added to the dict that contains it."""

        def __len__(self) -> int:
            shared["added"] = 1
            return 0

    net = Net()
    net.names = shared
    shared["first"] = Watching()
    assert guards(net).changed() is not None
    assert list(shared) == ["first", "added"]


def test_a_hook_in_a_table_that_was_there_is_seen() -> None:
    net = Net()
    net.layer.weight.register_hook(lambda gradient: gradient).remove()
    watched = guards(net)
    handle = net.layer.weight.register_hook(lambda gradient: gradient * 2)
    assert watched.changed() == "the hooks of layer.weight have changed"
    handle.remove()
    assert watched.changed() is None


def test_objects_and_modules_in_containers_are_seen() -> None:
    net = Net()
    net.cfg = SimpleNamespace(model=SimpleNamespace(head=SimpleNamespace(scale=1.0)))
    net.parts = [nn.Dropout(0.1)]
    terms = [SimpleNamespace(weight=1.0), {"inner": [SimpleNamespace(weight=1.0)]}]
    beta = torch.tensor(1.0)
    queue = deque([1, 2])

    def held(model: nn.Module, batch: Any) -> Any:
        return model(batch) * terms[0].weight * beta * queue[0]  # type: ignore[union-attr]

    watched = guards(net, held)
    assert watched.changed() is None
    changes: list[Callable[[], object]] = [
        lambda: setattr(terms[0], "weight", 2.0),
        lambda: setattr(terms[1]["inner"][0], "weight", 2.0),  # type: ignore[index]
        lambda: setattr(net.parts[0], "p", 0.2),  # type: ignore[index]
        lambda: setattr(net.cfg.model.head, "scale", 2.0),  # type: ignore[union-attr]
        lambda: beta.fill_(2.0),
        lambda: queue.append(3),
    ]
    for change in changes:
        change()
        assert watched.changed() is not None
        watched.retake()
        assert watched.changed() is None
