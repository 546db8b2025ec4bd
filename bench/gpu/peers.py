"""One card beside what people would use instead of flowdp: milliseconds per step of a few small models.

All rows of a workload are measured in one process, in turn, in several rounds, so a slow minute of the
machine meets all. Each trains a new model from the same start, over the same samples, for a warm-up epoch and
some that are timed; epochs begin as in a user's program, with a new order. Behind the last step the loss of
the same samples is taken, so rows that train differently are seen. The optimizer is AdamW as most people
write it, fused only where a row says so.
"""

from __future__ import annotations

import gc
import importlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flowdp
from bench.gpu.one_device import gathered
from bench.gpu.part import Figure, Finding, Note, Place
from bench.models import Gpt, classify, predict_next

__all__ = ["EXPERT", "HAND", "ROWS", "Row", "Work", "measure", "works"]

RATE = 1e-3
WARM_UP = 1
"""Epochs before the timed ones."""

REPEATS = 3
REPEATED_S = 100.0
"""Time of a workload after which its rows are not measured once more."""

Batches = Callable[[], Iterator[Any]]
Step = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Work:
    """A model and its data.

    Attributes:
        name: Name in the record.
        make: Makes a new model.
        loss: Loss of (model, batch).
        data: Tensors on the host, `steps * batch_size` samples.
        batch_size: Samples per step.
        steps: Steps of an epoch.
        epochs: Epochs of a row, the warm-up among them.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    data: tuple[Tensor, ...]
    batch_size: int
    steps: int
    epochs: int


class Epochs:
    """Times the steps of all epochs behind the warm-up.

    Args:
        place: Its device is awaited at both ends.
        work: Number of epochs and of their steps.
    """

    def __init__(self, place: Place, work: Work) -> None:
        self._place, self._work = place, work
        self._start_s = self._stop_s = 0.0

    def begins(self, epoch: int) -> None:
        """Note the time where the warm-up is over."""
        if epoch == WARM_UP:
            self._place.wait()
            self._start_s = perf_counter()

    def end(self) -> None:
        """Note the end of the last epoch."""
        self._place.wait()
        self._stop_s = perf_counter()

    @property
    def ms(self) -> float:
        """Mean time per step."""
        return (self._stop_s - self._start_s) * 1e3 / self._work.steps / (self._work.epochs - WARM_UP)


# ---------------------------------------------------------------- workloads
def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def cnn(width: int) -> nn.Module:
    """Three convolutions with batch norm on images of 32 x 32."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def labelled(samples: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Random inputs [samples, *shape], and the classes that a random layer gives them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, *shape, generator=draw)
    return x, (x.flatten(1) @ torch.randn(x[0].numel(), 10, generator=draw)).argmax(1)


def sentences(samples: int, length: int, tokens: int) -> tuple[Tensor]:
    """Texts [samples, length + 1] in which each token leaves two choices for the next."""
    draw = torch.Generator().manual_seed(0)
    text = [torch.randint(0, tokens, (samples,), generator=draw)]
    for _ in range(length):
        text.append((3 * text[-1] + torch.randint(0, 2, (samples,), generator=draw)) % tokens)
    return (torch.stack(text, 1),)


def works(place: Place) -> list[Work]:
    """MLP 784-1024-1024-10, a CNN, and a GPT of 6 layers; or tiny ones."""
    layers, width, length, tokens = place.pick((6, 256, 128, 256), (1, 16, 8, 16))
    gpt = partial(Gpt, layers=layers, width=width, heads=4, length=length, tokens=tokens)

    def work(
        name: str, make: Callable[[], nn.Module], loss: Any, data: Any, size: int, steps: int, epochs: int
    ) -> Work:
        size, steps, epochs = place.pick((size, steps, epochs), (4, 6, 2))
        return Work(name, make, loss, data(size * steps), size, steps, epochs)

    texts = partial(sentences, length=length, tokens=tokens)
    return [
        work("MLP", partial(mlp, place.pick(1024, 16)), classify, lambda n: labelled(n, 784), 128, 200, 4),
        work("CNN", partial(cnn, place.pick(32, 2)), classify, lambda n: labelled(n, 3, 32, 32), 128, 100, 4),
        work("GPT", gpt, predict_next, texts, 16, 80, 3),
    ]


# ---------------------------------------------------------------- rows
def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, fused=True)


def loader(place: Place, work: Work) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(*work.data), work.batch_size, shuffle=True, pin_memory=place.is_cuda, drop_last=True
    )


def copied(place: Place, work: Work) -> Batches:
    """Epochs of a DataLoader, whose batches are copied to the device."""
    batches = loader(place, work)

    def epoch() -> Iterator[Any]:
        for batch in batches:
            yield tuple(part.to(place.device, non_blocking=True) for part in batch)

    return epoch


def resident(place: Place, work: Work) -> Batches:
    """Epochs of shuffled batches that are gathered from data on the device."""
    return partial(gathered, tuple(part.to(place.device) for part in work.data), work.batch_size)


def trained(place: Place, work: Work, epoch: Batches, step: Step) -> float:
    """Milliseconds per step of a loop that adds up the losses on the device."""
    times, total = Epochs(place, work), torch.zeros((), device=place.device)
    for number in range(work.epochs):
        times.begins(number)
        for batch in epoch():
            total += step(batch)
    times.end()
    return times.ms


def by_hand(
    place: Place, work: Work, model: nn.Module, *, source: Any, adam: Any, compiled: Any = None
) -> float:
    """A plain loop.

    Args:
        place: Its device.
        work: The workload.
        model: Is trained.
        source: `copied` or `resident`.
        adam: Makes the optimizer.
        compiled: Arguments of `torch.compile`; None: the model is not compiled.
    """
    model.to(place.device)
    optimizer = adam(model.parameters())
    called: Any = model if compiled is None else torch.compile(model, **compiled)

    def step(batch: Any) -> Tensor:
        loss = work.loss(called, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return trained(place, work, source(place, work), step)


def by_compile(place: Place, work: Work, model: nn.Module, **options: Any) -> float:
    """A loop around `torch.compile`; in a rehearsal only the front half of the compiler works."""
    compiled = place.pick(options, {"backend": "eager"})
    return by_hand(place, work, model, source=resident, adam=fused, compiled=compiled)


def by_graph(place: Place, work: Work, model: nn.Module) -> float:
    """An expert's loop: gather, forward, backward and optimizer in one CUDA graph, one replay per step."""
    model.to(place.device)
    data = tuple(part.to(place.device) for part in work.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, capturable=place.is_cuda)
    order = torch.arange(work.steps * work.batch_size, device=place.device)
    row, begin, total = (
        order[: work.batch_size].clone(),
        torch.zeros_like(order[:1]),
        torch.zeros((), device=place.device),
    )

    def step() -> None:
        index = order.index_select(0, row + begin)
        loss = work.loss(model, tuple(part.index_select(0, index) for part in data))
        loss.backward()
        optimizer.step()
        begin.add_(work.batch_size)
        total.add_(loss.detach())

    replay = captured(step, model, optimizer, begin) if place.is_cuda else partial(cleared, step, optimizer)
    times = Epochs(place, work)
    for number in range(work.epochs):
        times.begins(number)
        order.copy_(torch.randperm(len(order), device=place.device))
        begin.zero_()
        for _ in range(work.steps):
            replay()
    times.end()
    return times.ms


def cleared(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
    """A step, after which gradients are gone, as in a graph that makes them anew."""
    step()
    optimizer.zero_grad()


def captured(
    step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, begin: Tensor
) -> Callable[[], None]:
    """Capture a step; its warm-up leaves model and optimizer as they were."""
    values = [value.clone() for value in model.state_dict().values()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            begin.zero_()
            cleared(step, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for value, before in zip(model.state_dict().values(), values, strict=True):
            value.copy_(before)
        for state in optimizer.state.values():
            for one in state.values():
                one.zero_()
    replay: Callable[[], None] = graph.replay
    return replay


def by_accelerate(place: Place, work: Work, model: nn.Module) -> float:
    """The loop of Accelerate's quick tour."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=not place.is_cuda)
    network, optimizer, batches = accelerator.prepare(model, plain(model.parameters()), loader(place, work))

    def step(batch: Any) -> Tensor:
        loss = work.loss(network, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return trained(place, work, lambda: iter(batches), step)


def by_lightning(place: Place, work: Work, model: nn.Module) -> float:
    """A LightningModule and its Trainer, without bar, logger, checkpoints and summary."""
    lightning: Any = importlib.import_module("lightning")
    times = Epochs(place, work)

    class Module(lightning.LightningModule):  # type: ignore[misc]  # a class that is not installed here
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def on_train_epoch_start(self) -> None:
            times.begins(self.current_epoch)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return work.loss(self.model, batch)

        def on_train_end(self) -> None:
            times.end()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return plain(self.parameters())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about workers of the loader
        lightning.Trainer(
            accelerator=place.pick("gpu", "cpu"),
            devices=1,
            max_epochs=work.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), loader(place, work))
    return times.ms


def by_setup(place: Place, work: Work, model: nn.Module) -> float:
    """The loop by hand with `flowdp.setup`."""
    model.to(place.device)
    optimizer = plain(model.parameters())
    options: dict[str, Any] = {"tune_process": place.is_cuda, "progress": False}
    with flowdp.setup(model, optimizer, devices=[place.device], **options) as dp:

        def step(batch: Any) -> Tensor:
            loss = work.loss(dp, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return trained(place, work, copied(place, work), step)


def by_trainer(
    place: Place, work: Work, model: nn.Module, *, is_compiled: bool = False, **runtime: Any
) -> float:
    """`flowdp.Trainer` on tensors; its epochs follow each other without a gap."""
    options: dict[str, Any] = place.pick({}, {"backend": "eager"})
    called: Any = torch.compile(model, **options) if is_compiled else model
    state = flowdp.Trainer(
        called,
        plain,
        work.loss,
        dataset=work.data,
        batch_size=work.batch_size,
        epochs=work.epochs,
        devices=[place.device],
        progress=False,
        # A rehearsal on the CPU captures nothing.
        runtime=flowdp.RuntimeOptions(tune_process=place.is_cuda, **(runtime if place.is_cuda else {})),
    ).fit()
    timed = state.history[WARM_UP:]
    return sum(epoch.epoch_ms for epoch in timed) / len(timed) / work.steps


@dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
        train: Trains a model, and returns milliseconds per step.
        needs: Package that must be installed; "": none.
    """

    train: Callable[[Place, Work, nn.Module], float]
    needs: str = ""


HAND = "by hand, DataLoader"
EXPERT = "the whole step in a CUDA graph"
ROWS: Mapping[str, Row] = {
    HAND: Row(partial(by_hand, source=copied, adam=plain)),
    EXPERT: Row(by_graph),
    "flowdp Trainer": Row(by_trainer),
    "flowdp Trainer, capture=False": Row(partial(by_trainer, capture=False)),
    "flowdp Trainer, capture=True": Row(partial(by_trainer, capture=True)),
    "flowdp setup, DataLoader": Row(by_setup),
    "by hand, data on the card, fused": Row(partial(by_hand, source=resident, adam=fused)),
    "Accelerate": Row(by_accelerate, "accelerate"),
    "Lightning": Row(by_lightning, "lightning"),
    "torch.compile by hand": Row(by_compile),
    "torch.compile by hand, reduce-overhead": Row(partial(by_compile, mode="reduce-overhead")),
    "flowdp Trainer, compiled model": Row(partial(by_trainer, is_compiled=True)),
}
"""Rows in the order of the first round; the two that others are compared with come first."""


# ---------------------------------------------------------------- the part
@dataclass
class Seen:
    """Measurements of a row of a workload.

    Attributes:
        ms: Milliseconds per step, by the number of the round.
        loss: Loss behind the last step of the last round.
    """

    ms: dict[int, float] = field(default_factory=dict)
    loss: float = float("nan")

    def times(self, other: Seen) -> float | None:
        """Median over the common rounds of the time as a multiple of another row's."""
        common = [self.ms[number] / other.ms[number] for number in self.ms if number in other.ms]
        return median(common) if common else None


@torch.no_grad()
def loss_of(place: Place, work: Work, model: nn.Module) -> float:
    """Loss of the first eighth of the samples, in evaluation mode."""
    model.to(place.device).eval()
    parts = (part.to(place.device).split(work.batch_size)[: -(-work.steps // 8)] for part in work.data)
    return float(torch.stack([work.loss(model, batch) for batch in zip(*parts, strict=True)]).mean())


def train(place: Place, work: Work, row: Row) -> tuple[float, float]:
    """Milliseconds per step and the final loss of a new model."""
    torch.manual_seed(0)
    model = work.make()
    try:
        ms = row.train(place, work, model)
        return ms, loss_of(place, work, model)
    finally:
        torch._dynamo.reset()
        gc.collect()
        if place.is_cuda:
            with suppress(RuntimeError):  # a device that has failed
                torch.cuda.empty_cache()


def findings(label: str, work: Work, seen: Mapping[str, Seen], name: str) -> Iterator[Finding]:
    """Figures of a row, and those of others that its newest time changes."""
    row = seen[name]
    yield Figure(f"{label}, {name}: best, ms", min(row.ms.values()))
    yield Figure(f"{label}, {name}: median, ms", median(row.ms.values()))
    yield Figure(f"{label}, {name}: loss after {work.steps * work.epochs} steps", row.loss)
    for other, words in ((EXPERT, "times the CUDA graph"), (HAND, "times the loop by hand")):
        for one in seen if name == other else (name,):
            if one != other and other in seen and (ratio := seen[one].times(seen[other])) is not None:
                yield Figure(f"{label}, {one}: {words}", ratio)


def measure(place: Place) -> Iterator[Finding]:
    missing = {name for name, row in ROWS.items() if row.needs and find_spec(row.needs) is None}
    for name in sorted(missing):
        yield Note(f"peers: {name} is left out, the package {ROWS[name].needs} is not installed")
    faults: list[str] = []
    draw = random.Random(0)
    for work in works(place):
        label = f"peers, {work.name}"
        names = [name for name in ROWS if name not in missing]
        seen: dict[str, Seen] = {}
        start_s = perf_counter()
        for number in range(place.pick(REPEATS, 1)):
            if number and perf_counter() - start_s > REPEATED_S:
                yield Note(f"{label}: {number} rounds, for more there was no time")
                break
            if number:
                draw.shuffle(names)
            for name in tuple(names):
                try:
                    ms, loss = train(place, work, ROWS[name])
                except Exception as fault:  # the other rows tell something, too
                    faults.append(f"{label}, {name}: {type(fault).__name__}: {fault}")
                    yield Note(faults[-1])
                    names.remove(name)
                    continue
                row = seen.setdefault(name, Seen())
                row.ms[number], row.loss = ms, loss
                yield from findings(label, work, seen, name)
    if faults:
        raise RuntimeError("; ".join(faults))
