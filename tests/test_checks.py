"""Tests of the checks of arguments; errors of a whole Trainer are in test_trainer.py."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flowdp.checks import (
    check_backend,
    check_cadence,
    check_length,
    check_loop_backend,
    check_model_and_optimizer,
    check_outer,
    check_ratios,
    check_step,
    several_optimizers,
)
from flowdp.errors import OptionError
from flowdp.options import CadenceOptions, OuterOptions, Policy

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MODEL = nn.Linear(1, 1)
SGD = torch.optim.SGD(MODEL.parameters(), 0.1)


@pytest.mark.parametrize("optimizer", [SGD, [SGD], (SGD, SGD), {"a": SGD}, lambda params: SGD])
def test_optimizers_of_every_form(optimizer: Any) -> None:
    check_model_and_optimizer(MODEL, optimizer)
    if not callable(optimizer):
        with pytest.raises(OptionError, match="give an optimizer factory"):
            check_model_and_optimizer(lambda: MODEL, optimizer)


def test_a_step_is_one_of_two() -> None:
    check_step(lambda model, batch: 0, None, "exact", 4, SGD)
    check_step(None, lambda worker, batch: None, "async", 1, [SGD, SGD])
    for loss, train_step, match in ((None, None, "loss must be"), (print, print, "give one of them")):
        with pytest.raises(OptionError, match=match):
            check_step(loss, train_step, "sync", 1, SGD)
    with pytest.raises(OptionError, match="steps as it likes"):
        check_step(None, print, "exact", 1, SGD)
    assert "gives 3 optimizers" in several_optimizers(3)


def output_and_target(output: Any, target: Any) -> Any:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (F.cross_entropy, r"loss=lambda model, batch: F.cross_entropy\(model\(batch\[0\]\), batch\[1\]\)"),
        (partial(F.cross_entropy, label_smoothing=0.1), "F.cross_entropy seems to be one of an output"),
        (nn.CrossEntropyLoss, r"is a class: give an instance, loss=CrossEntropyLoss\(\)"),
        (lambda batch: batch, r"takes \(batch\)"),
        ("mse", "a function of .model, batch. or a criterion, not 'mse'"),
    ],
)
def test_a_loss_that_cannot_be_called_as_one(loss: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        check_step(loss, None, "exact", 1, SGD)
    check_step(output_and_target, None, "exact", 1, SGD)  # its arguments may have any names
    check_step(nn.CrossEntropyLoss(), None, "exact", 1, SGD)


def test_a_train_step_has_two_arguments() -> None:
    with pytest.raises(OptionError, match=r"a function of \(worker, batch\), and .* takes \(batch\)"):
        check_step(None, lambda batch: None, "sync", 1, SGD)


def made_for(*, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def test_a_factory_is_one_that_can_be_called() -> None:
    for factory in (lambda: SGD, lambda params, lr: SGD):
        with pytest.raises(OptionError, match=r"optimizer=<.*> takes .*optimizer=lambda params: "):
            check_model_and_optimizer(MODEL, factory)
    with pytest.raises(OptionError, match=r"model=Linear\(...\), or model=lambda: Linear\(...\)"):
        check_model_and_optimizer(nn.Linear, torch.optim.SGD)
    for optimizer in (torch.optim.SGD, partial(torch.optim.SGD, lr=0.1), made_for, lambda model: SGD):
        check_model_and_optimizer(MODEL, optimizer)
    for model in (lambda: MODEL, lambda device: MODEL, lambda *, device: MODEL, nn.Identity):
        check_model_and_optimizer(model, torch.optim.SGD)


@pytest.mark.parametrize(
    ("max_time", "ms"),
    [(90, 90e3), (0.25, 250.0), (timedelta(hours=1), 3.6e6), ("01:02:03:04", 93_784e3), (None, None)],
)
def test_a_time_in_every_form(max_time: Any, ms: float | None) -> None:
    assert check_length(1, None, max_time) == ms


@pytest.mark.parametrize("max_time", [0, -1, True, math.nan, "12 h", "12:00:00", timedelta(0), [1]])
def test_what_is_no_time(max_time: Any) -> None:
    with pytest.raises(OptionError, match="max_time must be a number of seconds") as caught:
        check_length(1, None, max_time)
    assert repr(max_time) in str(caught.value)


def test_the_rest_passes_on_what_is_right() -> None:
    assert check_length(1, None, None) is None
    check_backend("nccl", "exact", [CUDA])
    check_loop_backend("nccl", [CUDA])
    check_loop_backend("local", [CPU])
    assert check_cadence(None, "exact", 2) == CadenceOptions()
    hint = CadenceOptions(speed_hint=(1, 2.0))
    assert check_cadence(hint, "exact", 2) == hint
    assert check_ratios((3, 1), "exact", 2) == (0.75, 0.25)
    assert check_ratios(None, "sync", 2) is None


def test_and_refuses_what_is_not() -> None:
    for refused in (
        lambda: check_length(None, None, None),
        lambda: check_backend("nccl", "async", [CUDA]),
        lambda: check_backend("nccl", "exact", [CPU]),
        lambda: check_loop_backend("nccl", [CPU, CUDA]),
        lambda: check_loop_backend("cpu", [CPU]),  # type: ignore[arg-type]
        lambda: check_cadence(CadenceOptions(speed_hint=(2, 2.0)), "cadence", 2),
        lambda: check_cadence(CadenceOptions(speed_hint=(1, 2.0)), "sync", 2),
        lambda: check_ratios((3, 1), "sync", 2),
    ):
        with pytest.raises(OptionError):
            refused()


@pytest.mark.parametrize("policy", ["exact", "sync"])
def test_a_cadence_that_would_have_no_effect(policy: Policy) -> None:
    told = f"anchor=4.* has no use with policy='{policy}'.*add policy=\"cadence\""
    with pytest.raises(OptionError, match=told):
        check_cadence(CadenceOptions(anchor=4), policy, 2)


def test_an_outer_step_passes_where_rounds_have_several_steps() -> None:
    outer = OuterOptions()
    assert check_outer(None, "exact", CadenceOptions(max_anchor=0), "auto", [CPU]) is None
    for policy in ("cadence", "async"):
        for devices in ([CPU], [CPU, CPU], [CUDA], [CUDA, CUDA]):
            assert check_outer(outer, policy, CadenceOptions(), "auto", devices) is outer  # type: ignore[arg-type]
    assert check_outer(outer, "cadence", CadenceOptions(anchor=2, max_anchor=2), "cpu", [CUDA, CPU]) is outer
    assert check_outer(outer, "async", CadenceOptions(), "cpu", [CPU, CPU]) is outer


@pytest.mark.parametrize(
    ("policy", "cadence", "backend", "devices", "said"),
    [
        ("exact", {}, "auto", [CPU, CPU], "averages gradients.*use policy='cadence' or 'async'"),
        ("sync", {}, "auto", [CPU, CPU], "with policy='sync': .* 10 to 32 % higher"),
        ("cadence", {"max_anchor": 0}, "auto", [CPU, CPU], "max_anchor=0.*10 to 32 % higher"),
        ("cadence", {"anchor": 1, "max_anchor": 1}, "auto", [CPU, CPU], "after each step"),
        ("async", {}, "auto", [CUDA, CPU], "not for cuda:0, cpu with backend='auto': use policy='cadence'"),
    ],
)
def test_an_outer_step_is_refused_where_it_harms_or_cannot_be(
    policy: Any, cadence: dict[str, Any], backend: Any, devices: list[torch.device], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        check_outer(OuterOptions(), policy, CadenceOptions(**cadence), backend, devices)
