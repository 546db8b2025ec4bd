"""Cost of callbacks in a step, per call: an `on_step` that returns, one that records, an update of `EMA`.

    python -m bench.micro.step_callback

The calls that a worker makes are timed by themselves, the best of many repeats: whole steps differ by more
than a call takes.
"""

from __future__ import annotations

import timeit
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.harness import options, report

CALLS, REPEATS = 1000, 50


class Returns(flowdp.Callback):
    """Does nothing."""

    def on_step(self, worker: Any, loss: Tensor | None) -> None:
        """Return."""


class Records(flowdp.Callback):
    """Counts the loss once more."""

    def on_step(self, worker: Any, loss: Tensor | None) -> None:
        """Record it."""
        if loss is not None:
            worker.record("again", loss)


def worker_of(*callbacks: flowdp.Callback) -> Any:
    """The worker of a run that is over."""
    run = flowdp.Trainer(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))),
        lambda params: torch.optim.SGD(params, lr=0.01),
        lambda model, batch: model(batch).square().mean(),
        dataset=torch.randn(64, 64),
        batch_size=4,
        epochs=1,
        devices=["cpu"],
        callbacks=callbacks,
        progress=False,
    ).start()
    [worker] = run._engine._parts.workers  # type: ignore[union-attr]
    run.join()
    return worker


def best_us(call: Any) -> float:
    """Least time of a call, in microseconds."""
    return min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS * 1e6


def main() -> None:
    """Measure, and print the figures."""
    arguments = options(__doc__, pairs=1).parse_args()
    torch.set_num_threads(1)
    loss, figures = torch.tensor(1.0), {}
    for name, callback in (("that returns", Returns()), ("that records the loss", Records())):
        worker = worker_of(callback)
        figures[f"on_step {name}, us"] = best_us(lambda worker=worker: worker._call_back(loss, 4))
    without = worker_of()
    figures["without one, us"] = best_us(lambda: without._step_callbacks and None)
    update = worker_of(flowdp.EMA(0.999)).replica.average.update
    figures["EMA of 16 tensors, 33,280 numbers, us"] = best_us(update)
    report("step_callback", [], figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
