"""Work of flowdp's own in a step, counted in calls of its functions: no clock, so the same on any machine."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import flowdp

STEPS = 400
MOST = 68
"""Calls of flowdp's functions in a step of one CPU device. A function more on that path needs a reason."""

ROOT = str(Path(flowdp.__file__).parent)


def test_a_step_of_one_device_makes_few_calls() -> None:
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls[f"{frame.f_code.co_filename.removeprefix(ROOT)} {frame.f_code.co_qualname}"] += 1

    trainer = flowdp.Trainer(
        nn.Linear(2, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        lambda model, batch: model(batch[0]).mean(),
        dataset=(torch.randn(STEPS * 4, 2),),
        batch_size=4,
        epochs=1,
        devices=["cpu"],
        progress=False,
    )
    threading.setprofile(count)  # of the threads that are started from here on
    try:
        run = trainer.start()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    run.join()
    each = {name: number / STEPS for name, number in calls.items() if number >= STEPS / 2}
    assert 20 < sum(each.values()) <= MOST, "\n".join(f"{number:.2f} {name}" for name, number in each.items())
