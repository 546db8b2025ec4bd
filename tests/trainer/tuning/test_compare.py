"""Tests of compared trainers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import flowdp
from flowdp import compare
from tests.trainer.tuning.small import DATA, trainer


def test_the_same_settings_give_the_same_losses_from_the_same_start() -> None:
    runs = {"a": trainer(), "b": trainer(seed=7), "c": trainer(per_device_batch_size=8)}
    found = compare(runs, epochs=2)
    assert [run.name for run in found.runs] == ["a", "b", "c"]
    a, b, c = found.runs
    assert a.error is b.error is c.error is None
    assert a.samples == b.samples == c.samples == 2 * len(DATA[0])
    assert a.loss == b.loss != c.loss  # one seed for all, and factories draw the same weights
    assert a.first_loss is not None
    assert a.loss is not None
    assert a.loss < a.first_loss
    assert a.loss_per_s == pytest.approx((a.first_loss - a.loss) / a.seconds)
    assert 0 < a.efficiency <= 1
    assert a.samples_per_s > 0


def test_policies_beside_each_other_with_their_evaluation() -> None:
    policies = ("sync", "cadence", "async", "exact")
    runs = {one: trainer(policy=one, devices=["cpu"] * 2, evaluation=DATA) for one in policies}
    found = compare(runs, epochs=3)
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "run"
    assert "eval loss" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == list(policies)
    for run in found.runs:
        assert run.eval is not None
        assert run.eval["loss"] < 6
        assert run.samples == 3 * len(DATA[0])


def test_a_run_that_fails_has_its_error_in_its_row() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError("of <the> loss")

    def model() -> nn.Module:
        raise KeyError("of the factory")

    found = compare({"loss": trainer(loss=broken), "factory": trainer(model=model), "last": trainer()})
    assert isinstance(found["loss"].error, flowdp.StepError)
    assert isinstance(found["factory"].error, KeyError)
    assert found["last"].error is None
    assert found["last"].samples == len(DATA[0])
    assert "of <the> loss" in str(found)
    assert "of &lt;the&gt; loss" in found._repr_html_()
    assert flowdp.runs() == ()
