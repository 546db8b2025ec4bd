"""Host time of flowdp's own code in a step: the time between two calls of the user's functions.

A run on one device whose step does nothing (no forward, backward or optimizer) is all host: the time of a
round over its steps is our code. A second run, with a clock around each part of the worker, shows the parts;
the clocks cost some 0.3 us each, which their sum shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

import flowdp
from bench.gpu.part import Figure, Finding, Note, Place
from flowdp.data.resident import ResidentFeed
from flowdp.data.source import Feed
from flowdp.engine.meter import Meter
from flowdp.engine.worker_thread import Worker
from flowdp.machine.worker import WorkerMachine
from flowdp.replica.learning_rate import LearningRate
from flowdp.replica.window_replica import LoneReplica

SAMPLES, BATCH_SIZE = 64_000, 8


@contextmanager
def replaced(owner: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of a class, its own or an inherited one."""
    own = owner.__dict__.get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class Stopwatch:
    """Time spent in methods, including those they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        seconds = self.seconds
        seconds[name] = 0.0

        def timed(*arguments: Any, **options: Any) -> Any:
            start_s = perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                seconds[name] += perf_counter() - start_s

        return timed


def parts(place: Place) -> dict[str, tuple[type, str]]:
    """Parts of a worker's step: name, class and method."""
    feed = place.pick(ResidentFeed, Feed)
    return {
        "what next": (WorkerMachine, "next"),
        "take": (feed, "take"),
        "begin": (Meter, "begin"),
        "learning rate": (LearningRate, "advance"),
        "end": (Meter, "end"),
        "release": (feed, "release"),
        "count": (WorkerMachine, "trained"),
        "step in all": (Worker, "_step"),
    }


def null_step_us(place: Place, steps: int) -> float:
    """Microseconds of our own code in a step."""
    loss = torch.zeros((), device=place.device)
    place.wait()
    x = torch.zeros(SAMPLES, 1)
    with replaced(LoneReplica, "add", lambda *_: None), replaced(LoneReplica, "step", lambda *_: loss):
        run = flowdp.Trainer(
            nn.Linear(1, 1),
            lambda params: torch.optim.SGD(params, lr=0.1),
            lambda model, batch: model(batch[0]).mean(),
            dataset=(x, x),
            batch_size=BATCH_SIZE,
            max_steps=steps,
            devices=[place.device],
            progress=False,
        ).start()
        records = list(run.metrics("round"))[3:]
        run.join()
    return 1e3 * sum(record.wall_ms for record in records) / sum(sum(record.steps) for record in records)


def measure(place: Place) -> Iterator[Finding]:
    steps = place.pick(20_000, 6_000)
    yield Figure("own code of a step, us", min(null_step_us(place, steps) for _ in range(place.pick(3, 2))))

    # The gather of a batch is also done by a hand loop.
    feed = place.pick(ResidentFeed, Feed)
    with replaced(feed, "take", lambda *_: ()):
        least = min(null_step_us(place, steps) for _ in range(place.pick(3, 2)))
    yield Figure("own code of a step without the gather, us", least)

    watch = Stopwatch()
    with ExitStack() as stack:
        for name, (owner, method) in parts(place).items():
            stack.enter_context(replaced(owner, method, watch.timed(name, getattr(owner, method))))
        total = null_step_us(place, steps)
    each = {name: seconds * 1e6 / steps for name, seconds in watch.seconds.items()}
    inside = each.pop("step in all")
    each["rest of the step"] = inside - sum(us for name, us in each.items() if name != "what next")
    each["rest of the loop, and rounds"] = total - inside - each["what next"]
    yield Note(f"a step with clocks takes {total:.1f} us; its parts:")
    for name, us in each.items():
        yield Figure(f"  {name}, us", us)
