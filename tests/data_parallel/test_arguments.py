"""Tests of the arguments of `setup`: checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flowdp.data_parallel import arguments
from flowdp.data_parallel.arguments import (
    check_cadence,
    check_model,
)
from flowdp.errors import OptionError
from flowdp.options import CadenceOptions
from tests.loops import CPU


@pytest.mark.parametrize("layer", [lambda: nn.LazyLinear(4), lambda: nn.LazyBatchNorm1d(affine=False)])
def test_parameters_and_buffers_without_a_shape(layer: Any) -> None:
    model = nn.Sequential(layer(), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(OptionError, match=r"'0\.\w+' has no shape yet; run one batch"):
        check_model(model)
    model(torch.ones(3, 4))
    check_model(model)


@pytest.mark.parametrize(
    ("option", "devices", "windows"),
    [
        (None, 2, False),  # two of the same name
        (True, 2, True),
        (False, 2, False),
        (CadenceOptions(anchor=3), 2, True),
        (CadenceOptions(max_anchor=0), 2, False),
        (CadenceOptions(max_batch_diff=0), 2, False),
        (True, 1, False),
        (CadenceOptions(), 1, False),
    ],
)
def test_when_there_are_windows(option: Any, devices: int, windows: bool) -> None:
    found = check_cadence(option, [CPU] * devices)
    assert found[1] is windows
    assert found[0] == (option if isinstance(option, CadenceOptions) else CadenceOptions())


def test_devices_of_different_names_have_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        def __init__(self, index: int, name: str) -> None:
            self.device, self.name = torch.device("cuda", index), name

    class Found:
        devices = (Info(0, "big"), Info(1, "big"), Info(2, "small"))

    monkeypatch.setattr(arguments, "find_devices", lambda probe: Found)
    cards = [info.device for info in Found.devices]
    assert check_cadence(None, cards)[1]
    assert not check_cadence(None, cards[:2])[1]
    assert check_cadence(None, [CPU, cards[0]])[1]
    assert not check_cadence(False, cards)[1]
