"""Windows under exact on two CPU devices, beside one device, a loop by hand, and threads without an engine.

The threads do the same arithmetic and nothing else: each computes the gradients of half a window on a model
that shares its parameters with the other's; the last one sums them, steps and clears. They check and measure
nothing, so no engine can be faster.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.harness import options, report
from bench.models import Gpt, classify, images, predict_next, small_cnn, texts
from flowdp.device.cores import set_own_threads

Loss = Callable[[nn.Module, Any], Tensor]


def mlp(*widths: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def sentences(samples: int) -> tuple[Tensor, ...]:
    """Texts of 64 of 64 tokens, and one more."""
    return texts(samples, length=64, tokens=64)


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[int], tuple[Tensor, ...]], int, int]] = {
    "MLP 784-128-10": (partial(mlp, 784, 128, 10), classify, images, 128, 400),
    "MLP 784-1024-10": (partial(mlp, 784, 1024, 10), classify, images, 128, 120),
    "MLP 784-2048-2048-10": (partial(mlp, 784, 2048, 2048, 10), classify, images, 128, 24),
    "CNN": (small_cnn, classify, images, 128, 60),
    "GPT, 2 layers": (
        partial(Gpt, 2, 96, 4, 64, 64),
        predict_next,
        partial(texts, length=64, tokens=64),
        32,
        40,
    ),
}
"""Name -> model, loss, data, samples of a window, windows that are timed at least."""

SETTLED_S = 2.0
"""Seconds after which a run has tried whether one device alone is faster."""


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def by_hand(name: str) -> float:
    """Milliseconds of a step by hand, with all cores."""
    make, loss, draw, window, steps = CASES[name]
    model, data = make(), draw(4 * window)
    optimizer = adamw(model.parameters())

    def step(at: int) -> None:
        start = at % 4 * window
        loss(model, [part[start : start + window] for part in data]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for at in range(5):
        step(at)
    start_s = time.perf_counter()
    for at in range(steps):
        step(at)
    return (time.perf_counter() - start_s) * 1e3 / steps


def exact(name: str, devices: int) -> float:
    """Milliseconds of a window of a run that has found out whether its windows are worth sharing."""
    make, loss, draw, window, steps = CASES[name]
    run = flowdp.Trainer(
        make(),
        adamw,
        loss,
        dataset=draw(steps * window),
        batch_size=window,
        epochs=10**6,
        devices=["cpu"] * devices,
        policy="exact",
        failures=flowdp.FailureOptions(check_loss=False),
        progress=False,
    ).start()
    start_s = time.perf_counter()
    begun_s = took_s = 0.0
    seen = 0
    for record in run.metrics("round"):
        now_s = time.perf_counter()
        if not begun_s:
            begun_s = now_s if now_s - start_s > SETTLED_S else 0.0
            continue
        seen, took_s = seen + max(record.steps), now_s - begun_s
        if seen >= steps and took_s > SETTLED_S / 2:
            break
    run.stop()
    run.join()
    return took_s * 1e3 / seen


def threads(name: str) -> float:
    """Milliseconds of a window of two threads that share the parameters."""
    make, loss, draw, window, steps = CASES[name]
    data, models = draw(4 * window), [make(), make()]
    for mine, shared in zip(models[1].parameters(), models[0].parameters(), strict=True):
        mine.data = shared.data
    grads = [[torch.zeros_like(parameter) for parameter in model.parameters()] for model in models]
    for model, own in zip(models, grads, strict=True):
        for parameter, grad in zip(model.parameters(), own, strict=True):
            parameter.grad = grad
    optimizer = adamw(models[0].parameters())

    def take_step() -> None:
        torch._foreach_add_(grads[0], grads[1])
        torch._foreach_mul_(grads[0], 0.5)
        optimizer.step()
        torch._foreach_zero_([*grads[0], *grads[1]])

    barrier = threading.Barrier(2, take_step)
    begun_s = 0.0

    def work(rank: int) -> None:
        nonlocal begun_s
        set_own_threads(1)
        half = window // 2
        with torch.autograd.set_multithreading_enabled(False):
            for at in range(2 * steps):
                start = at % 4 * window + rank * half
                loss(models[rank], [part[start : start + half] for part in data]).backward()
                barrier.wait()
                if at + 1 == steps and not rank:
                    begun_s = time.perf_counter()

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return (time.perf_counter() - begun_s) * 1e3 / steps


SIDES: dict[str, Callable[[str], float]] = {
    "by hand": by_hand,
    "two threads": threads,
    "exact, one device": partial(exact, devices=1),
    "exact, two devices": partial(exact, devices=2),
}


def main() -> None:
    parser = options(__doc__, pairs=5)
    parser.add_argument("--only", choices=[*CASES], help="one model")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for name in [arguments.only] if arguments.only else CASES:
        found: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(arguments.pairs):
            for side, measure in SIDES.items():
                gc.collect()
                found[side].append(measure(name))
        figures |= {f"{name}, {side}, ms": median(times) for side, times in found.items()}
        line = "  ".join(f"{side} {median(times):.2f}" for side, times in found.items())
        print(f"{name:22} {line}", flush=True)
    report("exact_windows", [], figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
