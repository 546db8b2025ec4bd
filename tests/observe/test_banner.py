"""Tests of the line that names the devices: once per process, and only if wanted."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from torch import nn

import flowdp
from flowdp.observe import banner
from flowdp.observe.banner import tell_devices

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banner, "_told", set())


def test_each_mix_of_devices_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for devices in ([CPU, CPU], [CPU, CPU], [CARD, CPU, CARD]):
        tell_devices(devices)
    lines = capsys.readouterr().err.splitlines()
    summary = str(flowdp.devices(probe=False))
    assert lines == [
        f"flowdp: training on 2 x cpu | {summary}",
        f"flowdp: training on 2 x cuda:0, cpu | {summary}",
    ]


def fit(**options: Any) -> None:
    flowdp.Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda model, batch: model(batch).mean(),
        dataset=torch.ones(8, 1),
        per_device_batch_size=2,
        epochs=1,
        devices=2,
        **options,
    ).fit()


def set_up(**options: Any) -> None:
    model = nn.Linear(1, 1)
    flowdp.setup(model, torch.optim.SGD(model.parameters(), 0.1), devices=2, **options).close()


@pytest.mark.parametrize("start", [fit, set_up])
def test_it_is_told_by_default_and_not_with_progress_false(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()  # no terminal
    monkeypatch.setattr(sys, "stderr", stream)
    start(progress=False)
    assert stream.getvalue() == ""
    for _ in range(2):
        start()
    assert stream.getvalue().startswith("flowdp: training on 2 x cpu | ")
    assert stream.getvalue().count("\n") == 1
