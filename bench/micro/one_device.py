"""One CPU device of flowdp against a hand-written loop.

Both gather their batches from the same tensors by index, in a shuffled order. With the same allocator setting
on both sides the difference is flowdp's own code; with the default setting for the hand loop, as in a user's
loop, it is the gain from flowdp. The setting cannot be undone, so the hand loop then runs in its own
processes. "As most people write it" is AdamW without `fused=True` on both sides, each in its own processes;
the other rows have a fused Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.harness import Comparison, compare, options, report
from bench.models import MODELS, Gpt, classify, images, predict_next, texts
from flowdp.data.tensor_source import TensorSource
from flowdp.device.cores import pause_openmp
from flowdp.device.process_tuning import keep_freed_memory
from flowdp.replica.window_replica import LoneReplica

WARM_UP = 20
SAMPLES = 60_000  # as in Fashion-MNIST


@dataclass(frozen=True)
class Task:
    """Model, data and optimizer."""

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, Any], Tensor]
    batch_size: int


TASKS = {
    **{name: Task(make, partial(images, SAMPLES), classify, size) for name, (make, size) in MODELS.items()},
    # About 1,000 small kernels per step: 12 small layers.
    "gpt": Task(partial(Gpt, 12, 32, 4, 8, 64), partial(texts, 4096, 8, 64), predict_next, 1),
}


def fused_adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True)


def plain_adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Clock:
    """A loss that records the start of step `WARM_UP` and of the last one."""

    def __init__(self, steps: int, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._loss = loss
        self.left = steps + WARM_UP + 1
        self.steps = steps
        self.start = self.stop = 0.0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.left -= 1
        if self.left == self.steps:
            self.start = perf_counter()
        elif self.left == 0:
            self.stop = perf_counter()
        return self._loss(model, batch)

    @property
    def ms(self) -> float:
        return (self.stop - self.start) * 1e3 / self.steps


def hand_ms(name: str, steps: int, make: Make = fused_adam) -> float:
    """Milliseconds per step of the hand loop."""
    task = TASKS[name]
    data, model, clock = task.data(), task.make(), Clock(steps, task.loss)
    optimizer = make(model.parameters())
    while clock.left:
        order = torch.randperm(len(data[0]))
        for index in order.split(task.batch_size):
            if not clock.left:
                break
            loss = clock.loss(model, tuple(tensor[index] for tensor in data))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
    return clock.ms


def flowdp_ms(name: str, steps: int, make: Make = fused_adam) -> float:
    """Milliseconds per step of flowdp on one device."""
    task = TASKS[name]
    clock = Clock(steps, task.loss)
    flowdp.Trainer(
        model=task.make(),
        optimizer=make,
        loss=clock.loss,
        dataset=task.data(),
        batch_size=task.batch_size,
        max_steps=steps + WARM_UP + 1,
        devices=["cpu"],
        progress=False,
    ).fit()
    return clock.ms


def null_step_us(steps: int = 20_000) -> float:
    """Microseconds of flowdp's own code in a step that does nothing: no batch gathered, no model run."""
    add, step, take = LoneReplica.add, LoneReplica.step, TensorSource.take
    loss = torch.zeros(())
    nothing: dict[str, Any] = {"add": lambda *_: None, "step": lambda *_: loss, "take": lambda *_: ()}
    try:
        LoneReplica.add, LoneReplica.step = nothing["add"], nothing["step"]  # type: ignore[method-assign]
        TensorSource.take = nothing["take"]  # type: ignore[method-assign]
        run = flowdp.Trainer(
            model=nn.Linear(1, 1),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss=classify,
            dataset=images(1000),
            batch_size=1,
            max_steps=steps,
            devices=["cpu"],
            progress=False,
        ).start()
        records = list(run.metrics("round"))[3:]
        run.join()
    finally:
        LoneReplica.add, LoneReplica.step, TensorSource.take = add, step, take  # type: ignore[method-assign]
    return 1e3 * sum(r.wall_ms for r in records) / sum(sum(r.steps) for r in records)


def fresh_ms(
    measure: Callable[..., float], name: str, steps: int, make: Make = fused_adam, *, tuned: bool = False
) -> float:
    """Measure a side in a new process, free of the other side's threads; `tuned`: with flowdp's allocator."""
    start = keep_freed_memory if tuned else None
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=start) as pool:
        return pool.submit(measure, name, steps, make).result()


def main() -> None:
    parser = options(__doc__, pairs=31)
    parser.add_argument("--quick", action="store_true", help="few steps and pairs")
    arguments = parser.parse_args()
    pairs = 5 if arguments.quick else arguments.pairs
    results: list[Comparison] = []
    # Before this process sets its allocator, which cannot be undone.
    own_pairs = 3 if arguments.quick else 7
    for name, steps in (("mlp", 600), ("wide cnn", 60)):
        results.append(
            compare(
                f"{name}, default allocator",
                {
                    "hand": partial(fresh_ms, hand_ms, name, steps),
                    "flowdp": partial(flowdp_ms, name, steps),
                },
                pairs=own_pairs,
            )
        )
    keep_freed_memory()
    for name, steps in (("mlp", 600), ("wide cnn", 40)):
        results.append(
            compare(
                f"{name}, same allocator",
                {
                    "flowdp": partial(flowdp_ms, name, steps),
                    "hand": partial(hand_ms, name, steps),
                },
                pairs=pairs,
            )
        )
    for name, steps in (("mlp", 2000), ("cnn", 300), ("gpt", 300)):
        results.append(
            compare(
                f"{name}, AdamW as most people write it",
                {
                    "flowdp": partial(fresh_ms, flowdp_ms, name, steps, plain_adamw, tuned=True),
                    "hand": partial(fresh_ms, hand_ms, name, steps, plain_adamw, tuned=True),
                },
                pairs=own_pairs,
            )
        )
    pause_openmp()
    figures = {"null step, us": min(null_step_us() for _ in range(3))}
    report("one_device", results, figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
