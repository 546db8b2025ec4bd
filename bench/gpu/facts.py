"""Limits of the card: ceilings against which the other parts are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import torch

from bench.gpu.part import Figure, Finding, Place, timed_ms
from bench.harness import step_ms


def measure(place: Place) -> Iterator[Finding]:
    size = place.pick(1 << 30, 1 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    ms = timed_ms(place, lambda: target.copy_(source), repeats=20)
    yield Figure("copy on the device, read + written, GB/s", 2e-6 * size / ms)

    host = torch.ones(size // 4, dtype=torch.uint8, pin_memory=place.is_cuda)
    part = target[: size // 4]
    ms = timed_ms(place, lambda: part.copy_(host, non_blocking=True), repeats=10)
    yield Figure("copy to the device, pinned, GB/s", 1e-6 * size / 4 / ms)
    ms = timed_ms(place, lambda: host.copy_(part, non_blocking=True), repeats=10)
    yield Figure("copy from the device, pinned, GB/s", 1e-6 * size / 4 / ms)

    side = place.pick(8192, 256)
    a, b = (torch.randn(side, side, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    ms = timed_ms(place, lambda: a @ b, repeats=10)
    yield Figure("bf16 matrix product, TFLOP/s", 2e-9 * side**3 / ms)

    little = torch.zeros(1, device=place.device)
    yield Figure("a kernel, host, us", _call_us(place, lambda: little.add_(1)))
    if place.is_cuda:
        yield from _marks(place, little)


def _call_us(place: Place, call: Callable[[], object]) -> float:
    """Host time of one call: the fastest of ten bursts that fit into the launch queue."""
    times = []
    for _ in range(10):
        place.wait()
        times.append(step_ms(call, steps=200) * 1e3)
    return min(times)


def _marks(place: Place, little: torch.Tensor) -> Iterator[Finding]:
    """Host time of events and of waiting for them."""
    stream, event = torch.cuda.Stream(), torch.cuda.Event(blocking=True)
    yield Figure("an event recorded, host, us", _call_us(place, event.record))
    yield Figure("an event awaited by a stream, host, us", _call_us(place, lambda: stream.wait_event(event)))

    def there_and_back() -> float:
        start_s = perf_counter()
        little.add_(1)
        event.record()
        event.synchronize()
        return (perf_counter() - start_s) * 1e6

    times = sorted(there_and_back() for _ in range(200))
    yield Figure("a kernel awaited by a sleeping host, us", times[len(times) // 2])
