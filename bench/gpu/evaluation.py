"""Evaluation against hand-written loops: on data that lies on the card, and on data in plain host memory.

Both sides take batches in order, without gradients; flowdp's are timed inside the evaluation, from call to
call of its step. From host memory both copy each batch in turn with the step, without pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu.part import Clock, Figure, Finding, Place
from bench.harness import compare
from bench.models import photos, resnet18

Data = tuple[Tensor, ...]


def hits(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Mean accuracy and loss of a batch, left on the device."""
    logits = model(batch[0].float().div_(255))
    return {
        "loss": F.cross_entropy(logits, batch[1]),
        "accuracy": (logits.argmax(1) == batch[1]).float().mean(),
    }


def make(place: Place) -> nn.Module:
    return resnet18(place.pick(64, 4))


def hand_ms(place: Place, data: Data, batch_size: int, steps: int) -> float:
    model, clock = make(place).to(place.device).eval(), Clock(place, steps, warmup=5)
    kept = []
    with torch.no_grad():
        while not clock.is_over:
            for parts in zip(*(part.split(batch_size) for part in data), strict=True):
                clock.tick()
                kept.append(hits(model, tuple(part.to(place.device) for part in parts)))
                if clock.is_over:
                    break
    return clock.ms


def flowdp_ms(place: Place, data: Data, batch_size: int, steps: int) -> float:
    clock = Clock(place, steps, warmup=5)

    def timed(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if not clock.is_over:
            clock.tick()
        return hits(model, batch)

    some = photos(batch_size, place.pick(128, 32))
    flowdp.Trainer(
        partial(make, place),
        lambda params: torch.optim.SGD(params, lr=0.0),
        lambda model, batch: hits(model, batch)["loss"],
        dataset=some,
        per_device_batch_size=batch_size,
        # The batches of an epoch are as many as the clock's calls, or more.
        epochs=-(-clock.calls * batch_size // len(data[0])),
        evaluation=flowdp.EvaluationOptions(data, step=timed, sanity_check=0),
        devices=[place.device],
        progress=False,
    ).fit()
    return clock.ms


def measure(place: Place) -> Iterator[Finding]:
    batch_size = place.pick(256, 8)
    data: Data = photos(batch_size * place.pick(40, 20), place.pick(128, 32))
    there = tuple(part.to(place.device) for part in data)
    steps = place.pick(30, 8)
    medians = []
    for name, samples in (("data there", there), ("data on the host", data)):
        sides = {
            "flowdp": partial(flowdp_ms, place, samples, batch_size, steps),
            "hand": partial(hand_ms, place, samples, batch_size, steps),
        }
        result = compare(f"evaluation, {name}", sides, pairs=place.pick(5, 1))
        yield result
        medians.append(result.medians[0])
    yield Figure("evaluation: host / there, of flowdp", medians[1] / medians[0])
    batch_bytes = sum(part.nbytes for part in data) / len(data[0]) * batch_size
    yield Figure("evaluation: copied from the host, GB/s", 1e-6 * batch_bytes / medians[1])
