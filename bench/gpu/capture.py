"""Captured steps against eager ones: steps per second of ranks on one card, and the bits of a run.

The model has many small kernels, so eager ranks wait for their launches and for the interpreter.
Expected: captured at least 1.5 times as fast as eager on 1 rank, and 3 times on 4, where eager ranks share
the interpreter (on an H200 8.6 and 5.6 times, by `launches`); a difference of 0 after 200 steps, or below
`BOUND` where a kernel adds in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.gpu.part import Figure, Finding, Note, Place
from bench.harness import compare
from bench.models import Gpt, predict_next, texts
from flowdp.graphs.trials import BOUND

BATCH_SIZE, LENGTH, TOKENS = 4, 32, 128
STEPS = 200
"""Steps of the run whose bits are compared."""


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect flowdp's warnings about captures."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("flowdp")
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)
        texts[:] = [text for text in texts if text.startswith("capture")]


def trainer(place: Place, ranks: int, steps: int, *, capture: bool, dropout: float = 0.0) -> flowdp.Trainer:
    """A run of small kernels on one card."""
    layers = place.pick(12, 2)
    make: Callable[[], nn.Module] = partial(
        Gpt, layers=layers, width=64, heads=4, length=LENGTH, tokens=TOKENS
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = predict_next(model, batch)
        # Adds little to the loss, and holds all random numbers of the step.
        return (
            value if not dropout else value + 1e-3 * nn.functional.dropout(value.expand(64), dropout).mean()
        )

    torch.manual_seed(0)
    return flowdp.Trainer(
        make,
        lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        loss,
        dataset=texts(BATCH_SIZE * place.pick(100, 10), LENGTH, TOKENS),
        per_device_batch_size=BATCH_SIZE,
        max_steps=steps,
        devices=[place.device] * ranks,
        policy="cadence" if ranks > 1 else "sync",
        seed=0,
        progress=False,
        # A rehearsal on the CPU captures nothing.
        runtime=flowdp.RuntimeOptions(capture=capture and place.pick(True, "auto")),
    )


def step_ms(place: Place, ranks: int, *, capture: bool) -> float:
    """Milliseconds per step of any rank, in the second half of a run."""
    run = trainer(place, ranks, place.pick(240, 40), capture=capture).start()
    records = list(run.metrics("round"))
    run.join()
    records = records[len(records) // 2 :]
    return sum(record.wall_ms for record in records) / sum(sum(record.steps) for record in records)


def largest_difference(place: Place, dropout: float) -> float:
    """Largest difference between parameters of a captured and an eager run, relative to the largest one."""
    steps = place.pick(STEPS, 20)
    one, other = (
        trainer(place, 1, steps, capture=capture, dropout=dropout).fit().state_dict
        for capture in (True, False)
    )
    return max(
        float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-30))
        for name in one
    )


def measure(place: Place) -> Iterator[Finding]:
    with heard() as warnings:
        for dropout in (0.0, 0.1):
            found = largest_difference(place, dropout)
            yield Figure(f"capture, {STEPS} steps, dropout {dropout}: largest difference", found)
            if found > BOUND:
                raise RuntimeError(
                    f"captured steps differ from eager ones by {found:.2e} of the largest value"
                )
        for ranks in place.pick((1, 2, 4), (1,)):
            sides = {
                "eager": partial(step_ms, place, ranks, capture=False),
                "captured": partial(step_ms, place, ranks, capture=True),
            }
            yield compare(f"capture, ranks on one card: {ranks}", sides, pairs=place.pick(3, 1))
    for text in sorted(set(warnings)):
        yield Note(text)
