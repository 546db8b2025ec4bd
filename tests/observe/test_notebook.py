"""Tests of the dashboard; tests/browser has those in Jupyter."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import flowdp

widgets = pytest.importorskip("ipywidgets", reason="needs ipywidgets: pip install 'flowdp[notebook]'")


def test_the_rate_is_known_before_the_first_round() -> None:
    looked = threading.Event()

    def loss(model: nn.Module, batch: Any) -> Any:
        assert looked.wait(60)
        return model(batch[0]).square().mean()

    run = flowdp.Trainer(
        nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.25),
        loss,
        dataset=torch.utils.data.TensorDataset(torch.randn(16, 2)),
        batch_size=4,
        epochs=1,
        devices=["cpu"] * 2,
        progress=False,
    ).start()
    try:
        controls, _ = run.dashboard().children
        [field] = [one for one in controls.children if isinstance(one, widgets.FloatText)]
        assert field.value == 0.25
    finally:
        looked.set()
        run.join()
