"""One device of flowdp against hand-written loops: on data resident on the device, and on loaded data.

`measure`: both gather shuffled batches from the same tensors on the device. `measure_loader`: both read the
same `DataLoader` with worker processes; the hand loop with pin_memory and non_blocking copies.
`measure_loop`: a loop over `dp.epoch` against such a hand loop, where the dataset is tensors, and through
worker processes. The hand loops read nothing back; all optimizers are fused.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flowdp
from bench.gpu.checks import Single
from bench.gpu.part import Clock, Finding, Note, Place
from bench.harness import compare
from bench.models import Gpt, classify_bytes, photos, predict_next, resnet18, texts
from flowdp.device.cores import usable_cores


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        name: Name, with the batch size.
        make: Makes a new model.
        loss: Loss of (model, batch).
        data: Tensors on the host.
        batch_size: Samples per step.
        steps: Number of timed steps.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    data: tuple[Tensor, ...]
    batch_size: int
    steps: int


def cases(place: Place) -> list[Case]:
    """ResNet-18 on 128 x 128 images, and a GPT of 4 layers on texts of 256 tokens; or tiny ones."""
    if place.is_cuda:
        gpt = partial(Gpt, layers=4, width=384, heads=6, length=256, tokens=4096)
        return [
            Case("ResNet-18, 256", resnet18, classify_bytes, photos(256 * 80, 128), 256, 40),
            Case("GPT of 4 layers, 32", gpt, predict_next, texts(32 * 400, 256, 4096), 32, 60),
        ]
    gpt = partial(Gpt, layers=4, width=32, heads=4, length=16, tokens=64)
    return [
        Case("ResNet-18, 8", partial(resnet18, 4), classify_bytes, photos(8 * 40, 32), 8, 12),
        Case("GPT of 4 layers, 4", gpt, predict_next, texts(4 * 40, 16, 64), 4, 12),
    ]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def hand_ms(place: Place, case: Case, epoch: Callable[[], Iterator[Any]]) -> float:
    """Milliseconds per step of a hand loop that repeats the batches of `epoch`."""
    model = case.make().to(place.device)
    optimizer = adam(model.parameters())
    clock = Clock(place, case.steps)
    total = torch.zeros((), device=place.device)
    while not clock.is_over:
        for batch in epoch():
            clock.tick()
            loss = case.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            if clock.is_over:
                break
    return clock.ms


def flowdp_ms(place: Place, case: Case, dataset: Any, **options: Any) -> float:
    """Milliseconds per step of flowdp on one device."""
    clock = Clock(place, case.steps)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        clock.tick()
        return case.loss(model, batch)

    flowdp.Trainer(
        case.make,
        adam,
        loss,
        dataset=dataset,
        max_steps=clock.calls,
        devices=[place.device],
        progress=False,
        runtime=flowdp.RuntimeOptions(tune_process=place.is_cuda),
        **options,
    ).fit()
    return clock.ms


def loop_ms(place: Place, case: Case, loader: Any) -> float:
    """Milliseconds per step of a loop over the windows of `setup` on one device."""
    model = case.make()
    optimizer = adam(model.parameters())
    clock = Clock(place, case.steps)
    with flowdp.setup(
        model, optimizer, devices=[place.device], tune_process=place.is_cuda, progress=False
    ) as dp:
        while not clock.is_over:
            for window in dp.epoch(loader):
                clock.tick()
                case.loss(dp, tuple(window[field] for field in range(len(case.data)))).backward()
                dp.step()
                if clock.is_over:
                    break
    return clock.ms


def copied_ms(place: Place, case: Case, loader: Any) -> float:
    """Milliseconds per step of a hand loop that copies the batches of a loader."""

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield tuple(part.to(place.device, non_blocking=True) for part in batch)

    return hand_ms(place, case, epoch)


def gathered(data: tuple[Tensor, ...], batch_size: int) -> Iterator[tuple[Tensor, ...]]:
    """The shuffled batches of an epoch, from tensors on the device."""
    order = torch.randperm(len(data[0]), device=data[0].device)
    for index in order.split(batch_size):
        yield tuple(tensor.index_select(0, index) for tensor in data)


def measure(place: Place) -> Iterator[Finding]:
    for case in cases(place):
        there = tuple(tensor.to(place.device) for tensor in case.data)
        hand = partial(hand_ms, place, case, partial(gathered, there, case.batch_size))
        ours = partial(flowdp_ms, place, case, case.data, per_device_batch_size=case.batch_size)
        yield compare(f"{case.name}, data there", {"flowdp": ours, "hand": hand}, pairs=place.pick(7, 1))


def worker_processes(place: Place, case: Case) -> int:
    """One per core, up to 8, as far as shared memory has room."""
    batch_bytes = sum(tensor.nbytes for tensor in case.data) // len(case.data[0]) * case.batch_size
    try:
        room = shutil.disk_usage("/dev/shm").free // 2
    except OSError:
        room = 0
    wanted = place.pick(max(2, min(8, usable_cores() - 4)), 2)
    return min(wanted, room // (3 * batch_bytes))  # for each worker two batches waiting and one in work


def measure_loader(place: Place) -> Iterator[Finding]:
    for case in cases(place)[: place.pick(2, 1)]:
        processes = worker_processes(place, case)
        yield Note(f"{case.name}, DataLoader: {processes} worker processes")
        options: dict[str, Any] = {"num_workers": processes, "persistent_workers": processes > 0}
        loader: Any = partial(
            DataLoader, Single(case.data), case.batch_size, shuffle=True, pin_memory=place.is_cuda, **options
        )

        def hand(case: Case = case, loader: Any = loader) -> float:
            return copied_ms(place, case, loader())

        def ours(case: Case = case, loader: Any = loader) -> float:
            return flowdp_ms(place, case, loader())

        yield compare(f"{case.name}, DataLoader", {"flowdp": ours, "hand": hand}, pairs=place.pick(3, 1))


def measure_loop(place: Place) -> Iterator[Finding]:
    case = cases(place)[0]
    processes = worker_processes(place, case)
    datasets: dict[str, tuple[Any, dict[str, Any]]] = {
        "a TensorDataset": (TensorDataset(*case.data), {}),
        f"{processes} processes": (
            Single(case.data),
            {"num_workers": processes, "persistent_workers": processes > 0},
        ),
    }
    for name, (dataset, options) in datasets.items():
        loader: Any = partial(
            DataLoader, dataset, case.batch_size, shuffle=True, pin_memory=place.is_cuda, **options
        )
        sides = {
            "setup": lambda loader=loader: loop_ms(place, case, loader()),
            "hand": lambda loader=loader: copied_ms(place, case, loader()),
        }
        yield compare(f"a loop over setup, {case.name}, {name}", sides, pairs=place.pick(3, 1))
