"""Part of the devices' time that a policy keeps: throughput over the sum of the solo throughputs.

A device's step is a timed wait, which releases the interpreter as a GPU's step does, inside a tiny real
model; "pure" leaves the model out, so that lost time is flowdp's and not due to two threads sharing the
interpreter. Solo and together are measured in turn, in one run. Under exact a wait is proportional to its
samples, and a window is eight batches per device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import nn

import flowdp
from bench.harness import options, report
from bench.models import Batch, classify
from flowdp.device.worker_context import CurrentWorker
from flowdp.options import Policy
from flowdp.replica.replica import Replica

MIXES: dict[str, tuple[float, ...]] = {
    "1:2.5 at 4 ms": (4.0, 10.0),
    "1:2.5 at 8 ms": (8.0, 20.0),
    "1:1.2 at 4 ms": (4.0, 4.8),
    "1:1.2 at 16 ms": (16.0, 19.2),
    "1:1:2:4 at 4 ms": (4.0, 4.0, 8.0, 16.0),
    "8 equal at 20 ms": (20.0,) * 8,
    "8 equal at 4 ms": (4.0,) * 8,
}
ROUNDS = 40
BATCH, WINDOW = 8, 8
"""Samples of a batch; batches per device in a window, if all were equally fast."""

ONE_THREAD = flowdp.ProcessTuning(openmp=False)
"""Every worker keeps the process's one OpenMP thread: a device alone gets no more."""


def dataset(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 64, generator=generator), torch.randint(
        0, 10, (samples,), generator=generator
    )


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Wait:
    """Makes each step of a rank take as long as on its device."""

    def __init__(self, ms: Sequence[float]) -> None:
        self.ms = ms

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        worker = flowdp.current_worker()
        time.sleep(self.ms[worker.rank] * worker.samples / BATCH / 1e3)
        return classify(model, batch)


@contextmanager
def only_waiting(wait: Wait) -> Iterator[None]:
    """Replace every replica's step by its wait."""
    loss = torch.zeros(())

    def add(replica: Replica, batch: Any, worker: CurrentWorker, share: float = 1.0) -> None:
        del replica, batch, share
        time.sleep(wait.ms[worker.rank] / 1e3)

    def step(replica: Replica, factor: float = 1.0) -> torch.Tensor:
        del replica, factor
        return loss

    own = Replica.add, Replica.step
    try:
        Replica.add, Replica.step = add, step  # type: ignore[method-assign, assignment]
        yield
    finally:
        Replica.add, Replica.step = own  # type: ignore[method-assign]


def samples_per_s(ms: Sequence[float], policy: Policy, steps: int, pure: bool) -> float:
    """Throughput of a whole run with this number of steps, first round and end included."""
    wait = Wait(ms)
    trainer = flowdp.Trainer(
        model=tiny(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        loss=wait.loss,
        dataset=dataset(steps * BATCH),
        per_device_batch_size=BATCH,
        batch_size=WINDOW * BATCH * len(ms) if policy == "exact" else None,
        epochs=1,
        devices=["cpu"] * len(ms),
        policy=policy,
        progress=False,
        runtime=flowdp.RuntimeOptions(tune_process=ONE_THREAD),
    )
    with only_waiting(wait) if pure else nullcontext():
        (epoch,) = trainer.start().metrics()
    return steps * BATCH / epoch.epoch_ms * 1e3


def efficiency(ms: Sequence[float], policy: Policy, pure: bool, seconds: float) -> float:
    """Throughput together over the sum of solo throughputs, measured one after another."""
    rate = sum(1e3 / one for one in ms)
    steps = max(int(seconds * rate), int(ROUNDS * 10 * sum(max(ms) / one for one in ms)))
    solo = {one: samples_per_s([one], policy, max(40, int(1000 / one)), pure) for one in sorted(set(ms))}
    return samples_per_s(ms, policy, steps, pure) / sum(solo[one] for one in ms)


def main() -> None:
    parser = options(__doc__, pairs=3)
    parser.add_argument("--mix", action="append", choices=MIXES, help="only this one (may repeat)")
    parser.add_argument("--policy", action="append", choices=["sync", "cadence", "async", "exact"])
    parser.add_argument("--pure", action="store_true", help="only pure waits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for mix in arguments.mix or MIXES:
        for pure in (True,) if arguments.pure else (False, True):
            for policy in arguments.policy or ("sync", "cadence", "async", "exact"):
                if pure and policy == "exact":
                    continue  # its step cannot be replaced by a wait: ranks meet to sum gradients
                values = [efficiency(MIXES[mix], policy, pure, 1.0) for _ in range(arguments.pairs)]
                label = f"{mix}, {policy}{', pure' if pure else ''}"
                figures[label] = median(values)
                print(f"{label:<32}{min(values):.3f} to {max(values):.3f}", flush=True)
    report("cadence", [], figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
