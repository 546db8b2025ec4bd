"""Advice for a call that gives another result when it is cut: an option with which it gives the same.

What real models have needed: the batch along dim 1, and losses that are no mean over samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from flowdp.data.trees import tensors_of
from flowdp.data_parallel.comparison import Result, Trial
from flowdp.data_parallel.layout import Layout

__all__ = ["advice"]

COUNTED = ("!= -100", "!= 0")
"""Conditions on integers by which losses count tokens: the index that cross_entropy ignores, and padding."""


def advice(trial: Trial, whole: Result) -> str | None:
    """The option of `setup` with which the parts give the outputs of the whole batch; None without one."""
    layout = trial.call.layout
    if layout.split is not None or layout.join is not None:
        return None
    for option, text in _options(trial, whole):
        if not trial.differences(whole, trial.parts(option)):
            return text
    return None


def _options(trial: Trial, whole: Result) -> Iterator[tuple[Layout, str]]:
    call = trial.call
    text = "Cut along dim 1 it gives the same: say dim=1 in setup(), or batch_first=True in the layers."
    yield replace(call.layout, dim=1), text
    if all(output.dim() for output in tensors_of(whole.output)):
        return
    yield replace(call.layout, reduce="sum"), "With reduce='sum' in setup() it gives the same."
    for condition in COUNTED:
        for name, value in call.arguments.named:
            if isinstance(name, str) and isinstance(value, Tensor) and not value.is_floating_point():
                for rows in ("[:, 1:]", "") if value.dim() > 1 else ("",):
                    text = f"lambda {name}: ({name}{rows} {condition}).sum()"
                    option = replace(call.layout, reduce=eval(text, {}))
                    yield option, f"With reduce={text} in setup() it gives the same."
