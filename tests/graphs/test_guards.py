"""Tests of guards: Python state on which a recorded graph depends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flowdp.graphs.guards import Guards

FACTOR = 1.0
SETTINGS = SimpleNamespace(weight=1.0)
TABLE = {"weight": 1.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.drop.register_forward_hook(lambda *_: None)
        self.register_buffer("scale", torch.ones(1))
        self.plain = torch.ones(1)
        self.beta = 0.5

    def forward(self, x: torch.Tensor) -> Any:
        return self.drop(self.layer(x))


def loss(model: nn.Module, batch: Any) -> Any:
    return model(batch).sum() * FACTOR * SETTINGS.weight * TABLE["weight"]


CHANGES: dict[str, Callable[[Net], object]] = {
    "drop": lambda net: setattr(net.drop, "p", 0.2),
    "beta": lambda net: setattr(net, "beta", 0.6),
    "eval": lambda net: net.drop.eval(),
    "new attribute": lambda net: setattr(net, "more", 1),
    "attribute of another type": lambda net: setattr(net, "beta", torch.ones(2)),
    "attribute gone": lambda net: delattr(net, "beta"),
    "frozen": lambda net: net.layer.weight.requires_grad_(False),
    "forward hook": lambda net: net.layer.register_forward_hook(lambda *_: None),
    "second hook": lambda net: net.drop.register_forward_hook(lambda *_: None),
    "hook, and attribute gone": lambda net: (net.layer.register_forward_hook(print), delattr(net, "beta")),
    "backward hook": lambda net: net.layer.register_full_backward_hook(lambda *_: None),
    "buffer": lambda net: setattr(net, "scale", torch.ones(1)),
    "parameter": lambda net: setattr(net.layer, "weight", nn.Parameter(torch.ones(2, 2))),
    "tensor": lambda net: setattr(net, "plain", torch.ones(1)),
    "memory": lambda net: setattr(net.layer.weight, "data", torch.ones(2, 2)),
    "layer": lambda net: setattr(net, "drop", nn.Dropout(0.1)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_a_module_is_seen(kind: str) -> None:
    net = Net()
    watched = Guards(net, loss)
    assert watched.changed() is None
    CHANGES[kind](net)
    assert watched.changed() is not None
    watched.retake()
    assert watched.changed() is None


def test_what_the_loss_names_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Guards(Net(), partial(lambda function, *args: function(*args), loss))
    for owner, name in ((SETTINGS, "weight"), (TABLE, "weight"), (globals(), "FACTOR")):
        with monkeypatch.context() as patch:
            (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, 2.0)  # type: ignore[operator]
            assert watched.changed() is not None
        assert watched.changed() is None


def test_closures_arguments_and_objects_of_the_loss_are_seen() -> None:
    weight, held, norm = 1.0, torch.ones(1), {"norm": nn.BatchNorm1d(2)}

    class Criterion:
        beta = 1.0

        def __init__(self) -> None:
            self.alpha = 1.0

        def __call__(self, model: nn.Module, batch: Any) -> Any:
            return model(norm["norm"](batch)) * weight * held * self.alpha

    def closed(model: nn.Module, batch: Any) -> Any:
        return model(norm["norm"](batch)) * weight * held

    criterion = Criterion()
    for function in (closed, lambda *args: closed(*args)):
        watched = Guards(Net(), function)
        assert any(one is norm["norm"].running_mean for one in watched.state)
        assert any(one is held for one in watched.state)
        norm["norm"].eval()
        assert watched.changed() is not None
        norm["norm"].train()
        weight += 1.0
        assert watched.changed() is not None
        watched.retake()
        held = torch.ones(1)
        assert watched.changed() is not None
    for function in (criterion, criterion.__call__, lambda *args: criterion(*args)):
        watched = Guards(Net(), function)
        criterion.alpha += 1.0
        assert watched.changed() is not None


def test_shared_globals_may_be_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Guards(Net(), loss)
    monkeypatch.setitem(globals(), "ANOTHER", 1.0)
    assert watched.changed() is None
