"""Tests of the machine's accelerator, by torch's own modules for CUDA, XPU and Metal."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp.device.accelerator import (
    INTERFACE,
    accelerator_devices,
    accelerator_type,
    device_module,
    is_accelerator,
    obstacle,
    started_devices,
)
from tests.accelerators import XpuCard, pretend
from tests.data.cards import put_on_streams
from tests.limits import HANG_S

CPU, XPU = torch.device("cpu"), torch.device("xpu", 1)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_the_machines_accelerator(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, kind, count=2)
    assert accelerator_type() == kind
    assert accelerator_devices() == [torch.device(kind, 0), torch.device(kind, 1)]


def test_a_backend_that_counts_no_devices_is_there_and_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = pretend(monkeypatch, "xpu")
    monkeypatch.delattr(module, "device_count")
    assert accelerator_devices() == [torch.device("xpu", 0)]
    assert "needs device_count" in str(obstacle("xpu"))


def test_each_device_has_the_module_of_its_type() -> None:
    assert device_module(XPU) is torch.xpu
    assert device_module(torch.device("cuda")) is torch.cuda
    assert is_accelerator(XPU)
    assert not is_accelerator(CPU)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_torchs_module_has_all_that_flowdp_uses(kind: str) -> None:
    assert obstacle(kind) is None


@pytest.mark.parametrize("name", INTERFACE)
def test_a_module_that_lacks_something_is_refused_by_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.xpu, name)
    reason = obstacle("xpu")
    assert reason is not None
    assert f"needs {name}, which torch.xpu does not have; pass devices=['cpu']" in reason


@pytest.mark.parametrize(
    ("kind", "is_started", "count"), [("xpu", True, 2), ("xpu", False, 0), ("mps", True, 0)]
)
def test_a_device_that_torch_has_not_started_has_drawn_nothing(
    kind: str, is_started: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pretend(monkeypatch, kind)
    monkeypatch.setattr(module, "is_initialized", lambda: is_started, raising=False)
    assert len(started_devices()) == count


def test_an_import_asks_no_driver() -> None:
    code = """
import torch
def refuse(*_, **__):
    raise SystemExit("asked a driver")
torch.accelerator.current_accelerator = refuse
for module in (torch.cuda, torch.xpu):
    module._lazy_init = module.device_count = module.current_device = refuse
import flowdp.api
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "imported\n", done.stderr


def trained(policy: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    data = torch.randn(64, 4), torch.randn(64, 2)
    flowdp.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.AdamW(params, 1e-2),
        dataset=data,
        batch_size=8,
        epochs=2,
        devices=["cpu", "cpu"],
        policy=policy,
        progress=False,
    ).fit()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_ranks_train_on_streams_like_xpus(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = trained(policy)
    card = XpuCard()
    put_on_streams(card, monkeypatch.setattr)
    on_card = trained(policy)
    assert not card.races
    assert card.log, "no stream had any work"
    for name, value in on_host.items():
        torch.testing.assert_close(on_card[name], value)
