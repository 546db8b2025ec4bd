"""Tests of the table of layers."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import flowdp


def test_a_model_is_summarised_and_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchinfo", reason="torchinfo is not installed")
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    found = flowdp.summary(model, input_size=(2, 4))
    assert found.total_params == 21
    assert "BatchNorm1d" in str(found)
    assert not capsys.readouterr().out
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training
    with pytest.raises(flowdp.OptionError, match="takes a module, not <class"):
        flowdp.summary(nn.Linear)  # type: ignore[arg-type]


def test_without_torchinfo_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchinfo", None)
    with pytest.raises(flowdp.OptionError, match=r"pip install 'flowdp\[summary\]'"):
        flowdp.summary(nn.Linear(1, 1))
