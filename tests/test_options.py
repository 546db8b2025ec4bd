"""Tests of options: checked when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flowdp.errors import OptionError
from flowdp.options import (
    CadenceOptions,
    CheckpointOptions,
    FailureOptions,
    OuterOptions,
    ReadingOptions,
    RuntimeOptions,
)

WRONG: list[tuple[Any, dict[str, list[Any]]]] = [
    (
        CadenceOptions,
        {
            "anchor": [0, True],
            "overhead_target": [0.009, math.nan],
            "divergence_threshold": [None, 0.0],
            "divergence_guard": ["yes"],
            "max_anchor": [-1],
            "max_batch_diff": [-1, False],
            "speed_hint": [(-1, 2.0), [0, 2.0], 2.0],
        },
    ),
    (OuterOptions, {"lr": [0, math.inf, "1"], "momentum": [-0.1, 1, None], "nesterov": [1, None]}),
    (
        CheckpointOptions,
        {
            "dir": ["", None],
            "every": [0, 1.5],
            "unit": ["hour"],
            "keep_last": [0],
            "keep_best": ["loss", ("loss", "least"), ("", "min")],
            "top_k": [2],  # of nothing
        },
    ),
    (ReadingOptions, {"shuffle": [1], "drop_last": ["no"], "collate_fn": [3], "num_workers": [-1, True]}),
    (
        FailureOptions,
        {"on_failure": ["ignore"], "on_nan": [True], "stall_timeout": [0, "a minute"], "check_loss": [None]},
    ),
    (
        RuntimeOptions,
        {
            "backend": ["mpi"],
            "launch_limit": [0],
            "capture": [1],
            "tune_process": ["hard"],
            "handle_sigterm": ["x"],
        },
    ),
]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, fields in WRONG for name, values in fields.items() for value in values],
)
def test_a_field_out_of_range_is_named_with_its_value(kind: Any, name: str, value: Any) -> None:
    given = {"dir": "runs"} if kind is CheckpointOptions else {}
    with pytest.raises(OptionError, match=name) as error:
        kind(**{**given, name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"unit": "minute", "every": 0},
        {"keep_best": ("loss", "min"), "top_k": 0},
        {"keep_best": ("loss", "min"), "every": 1, "unit": "step"},
        {"keep_best": ("loss", "min"), "every": 1, "unit": "minute"},
    ],
)
def test_checkpoint_options_that_do_not_go_together(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="checkpoint"):
        CheckpointOptions("runs", **given)


def test_which_outer_step_is_the_plain_mean() -> None:
    assert OuterOptions(lr=1.0, momentum=0.0, nesterov=True).is_plain
    assert not OuterOptions().is_plain
    assert not OuterOptions(lr=0.5, momentum=0).is_plain


def test_when_rounds_of_several_steps_are_wanted() -> None:
    assert CadenceOptions(max_anchor=1, max_batch_diff=1).windows
    assert not CadenceOptions(max_anchor=0).windows
    assert not CadenceOptions(max_batch_diff=0).windows
