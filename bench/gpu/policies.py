"""Short runs of every policy: the loss on one and on two replicas of a card, against that of the CPU.

Sync, and exact with fixed shares, take the same steps on both, so their losses differ by rounding. Under
cadence and async the ranks' speeds decide who trains what, so theirs are alike and not equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.cadences import cadence_for
from bench.gpu.checks import BATCH_SIZE, model, samples
from bench.gpu.part import Figure, Finding, Note, Place

__all__ = ["POLICIES", "loss_of", "measure"]

STEPS = 20
ROUNDING, ALIKE = 1e-3, 0.3
"""Relative distances of losses that are allowed."""

POLICIES = {"sync": ROUNDING, "exact": ROUNDING, "cadence": ALIKE, "async": ALIKE}
"""Policies, and how far the loss may be from the CPU's."""


def error(module: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(module(batch[0][:, 2:]), batch[1])


def loss_of(device: torch.device, policy: Any, ranks: int) -> float:
    """Mean loss of a run's first steps."""
    torch.manual_seed(0)
    state = flowdp.Trainer(
        model(),
        lambda params: torch.optim.SGD(params, lr=0.02),
        error,
        dataset=samples(BATCH_SIZE * STEPS * ranks),
        per_device_batch_size=BATCH_SIZE,
        max_steps=STEPS if policy == "exact" else STEPS * ranks,
        devices=[device] * ranks,
        policy=policy,
        cadence=cadence_for(policy, anchor=2, max_anchor=2),
        runtime=flowdp.RuntimeOptions(
            partition_ratios=(1 / ranks,) * ranks if policy == "exact" and ranks > 1 else None
        ),
        progress=False,
    ).fit()
    loss = state.history[-1].loss
    if loss is None:
        raise RuntimeError(f"{policy}, {ranks} replicas: the run has no loss")
    return loss


def measure(place: Place) -> Iterator[Finding]:
    faults = []
    for policy, allowed in POLICIES.items():
        for ranks in (1, 2):
            name = f"{policy}, {ranks} replica{'s' if ranks > 1 else ''}"
            start_s = perf_counter()
            try:
                here, there = (
                    loss_of(device, policy, ranks) for device in (place.device, torch.device("cpu"))
                )
            except Exception as fault:  # the other policies tell something, too
                faults.append(f"{name}: {type(fault).__name__}: {fault}")
                yield Note(faults[-1])
                continue
            away = abs(here - there) / abs(there)
            yield Figure(f"{name}, {STEPS} steps: loss away from the CPU's, per mille", 1e3 * away)
            yield Figure(f"{name}, {STEPS} steps on both: s", perf_counter() - start_s)
            if not away <= allowed:
                faults.append(f"{name}: the loss is {here}, on the CPU {there}")
    if faults:
        raise RuntimeError("; ".join(faults))
