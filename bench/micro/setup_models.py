"""`setup` on two CPU devices, with and without fixed shares, against the plain loop: ten models of all sizes.

One device is the loop without flowdp. Each side has a process of its own, which is warmed up and then takes
steps in blocks, in turns with the others; nothing sets the number of torch's threads. A step is forward,
loss, backward, optimizer.step and zero_grad. The ratios are times over those of the plain loop: above 1, the
side is slower; `fixed / two` is the price of `partition_ratios`. CPU time is that of all threads.

GPT-2 small has its first two layers and 8,192 of its 50,257 tokens: with all of them a step would be little
but the product with the tokens' matrix, and the optimizer's step for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.harness import Comparison, options, report
from bench.models import Gpt, resnet18, small_cnn

WARM_UP = 120  # steps; whether cutting pays may be found out within the first 100
REPEATS = 5
BLOCK_MS = 1_500.0
LEAST_STEPS = 5  # of a block
BATCHES = 4

SIDES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "setup": {"devices": ["cpu"]},
    "two": {"devices": ["cpu", "cpu"]},
    "fixed": {"devices": ["cpu", "cpu"], "partition_ratios": (1.0, 1.0)},
}
"""Name of a side -> arguments of `setup`; None: without flowdp."""

RATIOS = (("setup", "plain"), ("two", "plain"), ("fixed", "plain"), ("fixed", "two"))

Data = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Data], Tensor]


# ---------------------------------------------------------------- models
class GruLoop(nn.Module):
    """A cell that is called once for each of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(32, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 64)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        y: Tensor = self.out(state)
        return y


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(32, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.layers(x)[0][:, -1])
        return y


class Transformer(nn.Module):
    """Four layers of torch's own, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 4), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.layers(x).mean(1))
        return y


class Vae(nn.Module):
    """The one of PyTorch's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(784, 400)
        self.mean, self.log_variance = nn.Linear(400, 20), nn.Linear(400, 20)
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance


def mlp(layers: int) -> nn.Module:
    """64 - 128 - 10, or more layers of 128."""
    inner: list[nn.Module] = []
    for _ in range(layers - 2):
        inner += [nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), *inner, nn.Linear(128, 10))


def classes_of(model: nn.Module, data: Data) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def next_tokens(model: nn.Module, data: Data) -> Tensor:
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


def evidence(model: nn.Module, data: Data) -> Tensor:
    again, mean, log_variance = model(data[0])
    fit = F.binary_cross_entropy_with_logits(again, data[0], reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    loss: Tensor = (fit + divergence) / len(mean)
    return loss


def vectors(samples: int, *shape: int) -> Data:
    return torch.randn(samples, *shape), torch.randint(0, 10, (samples,))


def tokens(samples: int, length: int, kinds: int) -> Data:
    text = torch.randint(0, kinds, (samples, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass(frozen=True)
class Case:
    """Model, batch and loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Data]
    loss: Loss = classes_of


CASES = {
    "mlp, batch 16": Case(partial(mlp, 2), partial(vectors, 16, 64)),
    "mlp, batch 64": Case(partial(mlp, 2), partial(vectors, 64, 64)),
    "mlp of 20 layers": Case(partial(mlp, 20), partial(vectors, 64, 64)),
    "GRUCell loop": Case(GruLoop, partial(vectors, 32, 20, 32)),
    "LSTM": Case(Lstm, partial(vectors, 32, 20, 32)),
    "CNN": Case(small_cnn, partial(vectors, 64, 1, 28, 28)),
    "transformer": Case(Transformer, partial(vectors, 16, 32, 128)),
    "GPT-2, 2 layers": Case(partial(Gpt, 2, 768, 12, 64, 8_192), partial(tokens, 4, 64, 8_192), next_tokens),
    "ResNet-18, 32 x 32": Case(partial(resnet18, 64, 10), partial(vectors, 32, 3, 32, 32)),
    "VAE": Case(Vae, lambda: (torch.rand(64, 784),), evidence),
}


# ---------------------------------------------------------------- a side
class Loop:
    """The loop of a side, in whose process it runs."""

    def __init__(self, name: str, side: str) -> None:
        torch.manual_seed(0)
        case, arguments = CASES[name], SIDES[side]
        self._loss = case.loss
        self.model = case.make()
        self._optimizer = torch.optim.AdamW(self.model.parameters())
        if arguments is not None:
            self.model = flowdp.setup(self.model, self._optimizer, progress=False, **arguments)
        self._batches = cycle([case.batch() for _ in range(BATCHES)])

    def block(self, steps: int) -> tuple[float, float]:
        """Take steps; returns wall and CPU time of one, in milliseconds."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = self._loss(self.model, next(self._batches))
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return wall_s * 1e3 / steps, cpu_s * 1e3 / steps

    def decision(self) -> str:
        """What a wrapper says of itself, and the shares of the last call."""
        model = self.model
        if not isinstance(model, flowdp.DataParallel):
            return ""
        return f"{model!r}, shares {list(model.shard_sizes)}"


def serve(connection: Connection, name: str, side: str) -> None:
    """Take blocks of as many steps as are asked for; None ends it."""
    loop = Loop(name, side)
    while (steps := connection.recv()) is not None:
        connection.send(loop.block(steps))
    connection.send(loop.decision())
    if isinstance(loop.model, flowdp.DataParallel):
        loop.model.close()


class Process:
    """A side in a process of its own, free of the other sides' threads and settings."""

    def __init__(self, name: str, side: str) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, side), daemon=True)
        self._process.start()
        theirs.close()  # or the end of the process would not show

    def block(self, steps: int) -> tuple[float, float]:
        self._connection.send(steps)
        wall_ms, cpu_ms = self._connection.recv()
        return wall_ms, cpu_ms

    def close(self) -> str:
        """End it; returns its decision."""
        self._connection.send(None)
        decision = str(self._connection.recv())
        self._process.join()
        return decision


# ---------------------------------------------------------------- measurement
@dataclass(frozen=True)
class Times:
    """Wall and CPU time of a step of each side in each repeat, in milliseconds."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def comparisons(self, name: str) -> list[Comparison]:
        """The ratios of `RATIOS`, of wall and of CPU time."""
        found = []
        for what, times in (("wall", self.wall), ("CPU", self.cpu)):
            for a, b in RATIOS:
                label = f"{name}, {what}, {a} / {b}"
                found.append(Comparison(label, "ms", (a, b), tuple(times[a]), tuple(times[b])))
        return found


def measured(sides: dict[str, Any], *, repeats: int, warm_up: int, block_ms: float, seed: int = 0) -> Times:
    """Warm the sides up, one after the other, then let each take a block in each repeat, in random order."""
    for side in sides.values():
        side.block(warm_up)
    # As many steps for all: a block of the plain loop takes about `block_ms`.
    took_ms, _ = sides["plain"].block(LEAST_STEPS)
    steps = max(LEAST_STEPS, round(block_ms / took_ms))
    times = Times({side: [] for side in sides}, {side: [] for side in sides})
    order, dice = list(sides), random.Random(seed)
    for _ in range(repeats):
        dice.shuffle(order)
        for side in order:
            wall_ms, cpu_ms = sides[side].block(steps)
            times.wall[side].append(wall_ms)
            times.cpu[side].append(cpu_ms)
    return times


def rows(found: dict[str, Times]) -> str:
    """A line for each model: medians of the sides, and medians of the ratios."""
    width = max(map(len, found))
    heads = [*SIDES, *(f"{a}/{b}" for a, b in RATIOS)]
    lines = [f"{'':<{width}}       " + "".join(f"{head:>13}" for head in heads)]
    for name, times in found.items():
        for what, of in (("wall", times.wall), ("CPU", times.cpu)):
            figures = [f"{np.median(of[side]):.3f} ms" for side in SIDES]
            figures += [f"{np.median(np.divide(of[a], of[b])):.2f}" for a, b in RATIOS]
            lines.append(f"{name:<{width}}  {what:<5}" + "".join(f"{figure:>13}" for figure in figures))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, pairs=REPEATS)
    parser.add_argument(
        "--repeats",
        type=int,
        dest="pairs",
        default=REPEATS,
        help="the same (%(default)s): blocks of each side",
    )
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before them (%(default)s)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="models whose name has it; repeat it")
    parser.add_argument("--quick", action="store_true", help="short blocks: only shows that it runs")
    given = parser.parse_args(arguments)
    found: dict[str, Times] = {}
    decisions: dict[str, dict[str, str]] = {}
    for name in CASES:
        if given.only and not any(text.lower() in name.lower() for text in given.only):
            continue
        sides = {side: Process(name, side) for side in SIDES}
        block_ms = BLOCK_MS / 10 if given.quick else BLOCK_MS
        found[name] = measured(sides, repeats=given.pairs, warm_up=given.warm_up, block_ms=block_ms)
        decisions[name] = {side: process.close() for side, process in sides.items()}
        print(rows({name: found[name]}), flush=True)
    if not found:
        parser.error(f"no model is named so: {', '.join(CASES)}")
    results = [comparison for name, times in found.items() for comparison in times.comparisons(name)]
    report("setup_models", results, save=given.save, more={"decisions": decisions, "warm_up": given.warm_up})
    print(rows(found))


if __name__ == "__main__":
    main()
