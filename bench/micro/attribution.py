"""Attribution of time by `run.report()`, where the waits are known, and the cost of a timeline.

    python -m bench.micro.attribution             # a minute
    python -m bench.micro.attribution --pairs 21  # more pairs for the timeline

Steps, batches, averagings, evaluations and saved states are timed waits, so the part of the run that each
takes is known. The figure is the largest error over all parts and devices. A timeline is measured on two
devices with steps of 1 ms, on and off in turns: samples per second on over off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import Dataset

import flowdp
from bench.harness import compare, options, report
from flowdp.collective import host
from flowdp.engine import barrier_tasks

STEPS = 40
BATCH = 8
Loss = Callable[[nn.Module, Any], torch.Tensor]


def steps(*ms: float) -> Loss:
    """A loss whose step takes so long on each rank."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(ms[flowdp.current_worker().rank] / 1e3)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return loss


def numbers(batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A dataset of so many batches."""
    return torch.zeros(batches * BATCH, 4), torch.zeros(batches * BATCH, 1)


def evaluated(_: nn.Module, batch: Any) -> dict[str, float]:
    """An evaluation of a batch that takes 80 ms."""
    time.sleep(80e-3)
    return {"rows": float(len(batch[0]))}


class SlowData(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of which a batch takes 100 ms to read."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(100.0 / BATCH / 1e3)
        return torch.zeros(4), torch.zeros(1)


def slower(owner: Any, name: str) -> AbstractContextManager[Any]:
    """A function of flowdp's that takes 40 ms longer."""
    own = getattr(owner, name)

    def late(*given: Any, **options: Any) -> Any:
        time.sleep(40e-3)
        return own(*given, **options)

    return patch.object(owner, name, late)


@dataclass(frozen=True)
class Case:
    """A run whose parts are known.

    Attributes:
        name: Its name.
        expected: Fractions of each device's time by part; parts that are not named are 0.
        settings: Arguments of the Trainer.
        around: Context of the run.
    """

    name: str
    expected: tuple[Mapping[str, float], ...]
    settings: Mapping[str, Any]
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


CASES = (
    Case(
        "sync, steps of 40 and 100 ms",
        ({"training": 0.4, "waiting for others": 0.6}, {"training": 1.0}),
        {"policy": "sync", "loss": steps(40, 100)},
    ),
    Case(
        "cadence, steps of 40 and 100 ms",
        ({"training": 1.0}, {"training": 1.0}),
        {
            "loss": steps(40, 100),
            "dataset": numbers(3 * 14),  # rounds of 4 and 10 steps
            "policy": "cadence",
            "cadence": flowdp.CadenceOptions(max_anchor=4, speed_hint=(1, 2.5)),
        },
    ),
    Case(
        "batches of 100 ms, steps of 40 ms",
        ({"training": 0.4, "data": 0.6},),
        {"loss": steps(40), "dataset": SlowData(), "devices": ["cpu"]},
    ),
    Case(
        "steps and averagings of 40 ms",
        ({"training": 0.5, "averaging": 0.5},) * 2,
        {"policy": "sync", "loss": steps(40, 40)},
        lambda: slower(host.HostMean, "_reduce"),
    ),
    Case(
        "20 steps of 40 ms, and 10 batches evaluated in 80 ms each",
        ({"training": 0.5, "evaluation": 0.5},),
        {
            "loss": steps(40),
            "epochs": STEPS // 20,
            "dataset": numbers(20),
            "evaluation": flowdp.EvaluationOptions(numbers(10), step=evaluated),
            "devices": ["cpu"],
        },
    ),
    Case(
        "4 steps of 40 ms, and a state of 40 ms",
        ({"training": 0.8, "checkpoint": 0.2},),
        {"loss": steps(40), "devices": ["cpu"]},
        lambda: slower(barrier_tasks, "capture"),
    ),
)


def measured(case: Case, folder: str) -> flowdp.EfficiencyReport:
    """Run a case, and read its report."""
    given: dict[str, Any] = {
        "dataset": numbers(STEPS),
        "epochs": 1,
        "devices": ["cpu"] * 2,
        **case.settings,
    }
    if "checkpoint" in case.expected[0]:
        given["checkpoint"] = flowdp.CheckpointOptions(folder, every=4, unit="step")
    with case.around():
        run = train(**given)
    return run.report()


def train(**settings: Any) -> flowdp.Run:
    """A run of a linear model, to its end."""
    run = flowdp.Trainer(
        nn.Linear(4, 1),
        lambda params: torch.optim.SGD(params, lr=1e-3),
        per_device_batch_size=BATCH,
        progress=False,
        reading=flowdp.ReadingOptions(shuffle=False),
        **settings,
    ).start()
    run.join()
    return run


def error(expected: Mapping[str, float], parts: Mapping[str, float]) -> float:
    """Largest difference of a part from what is known."""
    return max(abs(parts[name] - expected.get(name, 0.0)) for name in parts)


def rate(*, timeline: bool) -> float:
    """Samples per second of two devices with steps of 1 ms."""
    return (
        train(loss=steps(1, 1), dataset=numbers(1000), epochs=1, devices=["cpu"] * 2, timeline=timeline)
        .report()
        .reached
    )


def main() -> None:
    """Print the errors, and the ratio of a timeline."""
    arguments = options(__doc__, pairs=7).parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        with TemporaryDirectory() as folder:
            found = measured(case, folder)
        errors = [error(e, one.parts) for e, one in zip(case.expected, found.devices, strict=True)]
        known = "; ".join(", ".join(f"{n} {100 * v:.0f} %" for n, v in e.items()) for e in case.expected)
        print(f"{case.name}: known {known}; largest error {100 * max(errors):.1f} %", flush=True)
        if max(errors) > 0.05:
            print(found)
    sides = {"on": lambda: rate(timeline=True), "off": lambda: rate(timeline=False)}
    compared = compare("timeline", sides, pairs=arguments.pairs, unit="samples/s")
    report("attribution", [compared], save=arguments.save)


if __name__ == "__main__":
    main()
