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


@pytest.mark.parametrize(
    "given",
    [
        {"anchor": 0},
        {"anchor": True},
        {"overhead_target": 0.009},
        {"overhead_target": math.nan},
        {"divergence_threshold": None},
        {"divergence_guard": "yes"},
        {"max_anchor": -1},
        {"max_batch_diff": -1},
        {"max_batch_diff": False},
        {"divergence_threshold": 0.0},
        {"speed_hint": (0, 0.5)},
        {"speed_hint": (-1, 2.0)},
        {"speed_hint": [0, 2.0]},
        {"speed_hint": 2.0},
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any]) -> None:
    [(name, value)] = given.items()
    with pytest.raises(OptionError, match=f"cadence.{name}") as error:
        CadenceOptions(**given)
    # The message quotes the value.
    shown = value[1] if isinstance(value, tuple) and len(value) == 2 and value[0] == 0 else value
    assert repr(shown) in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        *({"lr": value} for value in (0, -1.0, math.inf, math.nan, "1", True, None)),
        *({"momentum": value} for value in (-0.1, 1, 1.5, math.nan, "0.5", False, None)),
        *({"nesterov": value} for value in (1, None, "yes")),
    ],
)
def test_the_outer_steps_that_cannot(given: dict[str, Any]) -> None:
    [(name, value)] = given.items()
    with pytest.raises(OptionError, match=f"outer.{name} must be") as error:
        OuterOptions(**given)
    assert repr(value) in str(error.value)


def test_which_outer_step_is_the_plain_mean() -> None:
    assert OuterOptions(lr=1, momentum=0).is_plain
    assert OuterOptions(lr=1.0, momentum=0.0, nesterov=True).is_plain
    assert not OuterOptions().is_plain
    assert not OuterOptions(lr=0.5, momentum=0).is_plain


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({"max_anchor": 0}, False),
        ({"max_batch_diff": 0}, False),
        ({"max_anchor": 1, "max_batch_diff": 1}, True),
    ],
)
def test_when_rounds_of_several_steps_are_wanted(given: dict[str, Any], windows: bool) -> None:
    assert CadenceOptions(**given).windows is windows


@pytest.mark.parametrize(
    "given",
    [
        {"dir": ""},
        {"dir": None},
        {"every": 0},
        {"every": 1.5},
        {"unit": "minute", "every": 0},
        {"unit": "hour"},
        {"keep_last": 0},
        {"keep_best": "loss"},
        {"keep_best": ("loss", "least")},
        {"keep_best": ("", "min")},
        {"keep_best": ("loss", "min"), "top_k": 0},
        {"top_k": 2},
        {"every": 1, "unit": "step", "keep_best": ("loss", "min")},
        {"every": 1, "unit": "minute", "keep_best": ("loss", "min")},
    ],
)
def test_checkpoint_options_that_cannot_work(given: dict[str, Any]) -> None:
    name, value = list(given.items())[-1]
    with pytest.raises(OptionError, match=f"checkpoint.{name}") as error:
        CheckpointOptions(**{"dir": "runs", **given})
    assert repr(value) in str(error.value)


def test_checkpoint_options_are_named() -> None:
    with pytest.raises(TypeError):
        CheckpointOptions("runs", 2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "given", "match"),
    [
        (ReadingOptions, {"shuffle": 1}, "reading.shuffle must be True, False or None, not 1"),
        (ReadingOptions, {"drop_last": "no"}, "reading.drop_last must be True, False or None, not 'no'"),
        (
            ReadingOptions,
            {"collate_fn": 3},
            "reading.collate_fn must be a function of a list of samples, not 3",
        ),
        (
            ReadingOptions,
            {"num_workers": -1},
            "num_workers must be an int of at least 0 or None, not -1",
        ),
        (ReadingOptions, {"num_workers": True}, "not True"),
        (
            FailureOptions,
            {"on_failure": "ignore"},
            "on_failure must be one of 'raise', 'continue', not 'ignore'",
        ),
        (FailureOptions, {"on_nan": True}, "on_nan must be one of 'quarantine', 'raise', not True"),
        (
            FailureOptions,
            {"stall_timeout": 0},
            "stall_timeout must be a number above 0 or None, not 0",
        ),
        (FailureOptions, {"stall_timeout": "a minute"}, "must be a number above 0 or None, not 'a minute'"),
        (FailureOptions, {"check_loss": None}, "failures.check_loss must be True or False, not None"),
        (RuntimeOptions, {"backend": "mpi"}, "runtime.backend must be one of .*'cpu', not 'mpi'"),
        (RuntimeOptions, {"launch_limit": 0}, "runtime.launch_limit must be .*at least 1"),
        (RuntimeOptions, {"capture": 1}, "runtime.capture must be 'auto', True, False or CaptureOptions"),
        (RuntimeOptions, {"tune_process": "hard"}, "must be True, False or a ProcessTuning, not 'hard'"),
        (RuntimeOptions, {"handle_sigterm": "x"}, "runtime.handle_sigterm must be True or False, not 'x'"),
    ],
)
def test_fields_of_a_run_out_of_range(kind: Any, given: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        kind(**given)
