"""A race of loops over the baby GPT of nanoGPT, on one device: by hand, Lightning, and flowdp.

    python examples/race_gpt.py                     # on the GPU, where there is one
    python examples/race_gpt.py --small --device cpu

All train 6 layers of 384 channels on 64 texts of 256 characters a step, in bf16 (float32 on the CPU), on the
source of Python's standard library. An iteration is timed as the mean of those after the first `--warm-up`,
which may compile and allocate; the device is awaited at both ends alone. The loss in the table is that of
texts held out.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import racing
import torch
import torch.nn.functional as F
from racing import Batches, Clock, Loss, Result
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import flowdp

LIBRARY = Path(os.__file__).parent
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
TEXT_BYTES = 1_100_000  # as long as nanoGPT's Shakespeare


@dataclass(frozen=True)
class Recipe:
    """What all contestants share: the settings of nanoGPT's `train_shakespeare_char`."""

    device: str
    iterations: int
    warm_up: int
    layers: int = 6
    heads: int = 6
    channels: int = 384
    context: int = 256
    batch_size: int = 64
    dropout: float = 0.2

    def texts(self) -> tuple[Tensor, Tensor]:
        """Texts for training and for the loss at the end [n, context + 1], as bytes, on the device."""
        sources = [path.read_text("utf-8", "ignore") for path in sorted(LIBRARY.glob("*.py"))]
        places = {character: place for place, character in enumerate(CHARACTERS)}
        text = bytes(places[character] for character in "".join(sources)[:TEXT_BYTES] if character in places)
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        train, held_out = tokens.tensor_split([len(tokens) * 9 // 10])
        return (
            train.unfold(0, self.context + 1, self.context // 16).contiguous(),
            held_out.unfold(0, self.context + 1, self.context).contiguous(),
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=self.device != "cpu")

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        """A rise over a fiftieth of the iterations, then a cosine down to a tenth."""
        rise = self.iterations // 50 + 1

        def factor(step: int) -> float:
            done = min(1.0, step / self.iterations)
            return min((step + 1) / rise, 0.55 + 0.45 * math.cos(math.pi * done))

        return LambdaLR(optimizer, factor)


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a norm and with a shortcut around it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        channels = recipe.channels
        self.heads, self.dropout = recipe.heads, recipe.dropout
        self.norm_1, self.norm_2 = (nn.LayerNorm(channels, bias=False) for _ in range(2))
        self.split = nn.Linear(channels, 3 * channels, bias=False)
        self.join = nn.Linear(channels, channels, bias=False)
        self.perceptron = nn.Sequential(
            nn.Linear(channels, 4 * channels, bias=False),
            nn.GELU(),
            nn.Linear(4 * channels, channels, bias=False),
            nn.Dropout(recipe.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.split(self.norm_1(x)).chunk(3, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.join(seen.transpose(1, 2).flatten(2)), dropout)
        y: Tensor = x + self.perceptron(self.norm_2(x))
        return y


class Gpt(nn.Module):
    """A language model of characters, its output tied to its input."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), recipe.channels)
        self.places = nn.Embedding(recipe.context, recipe.channels)
        blocks = (Block(recipe) for _ in range(recipe.layers))
        self.blocks = nn.Sequential(
            nn.Dropout(recipe.dropout), *blocks, nn.LayerNorm(recipe.channels, bias=False)
        )
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_last = name.endswith(("join.weight", "perceptron.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * recipe.layers) if is_last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        return F.linear(self.blocks(x), self.characters.weight)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean over all characters, each from those before it."""
    tokens = batch[0].long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(recipe: Recipe, model: nn.Module, texts: Tensor) -> float:
    model.to(recipe.device).eval()
    parts = texts.split(recipe.batch_size)
    with racing.autocast(recipe.device):
        return sum(float(loss(model, (part,))) * len(part) for part in parts) / len(texts)


def batches(recipe: Recipe, texts: Tensor) -> Batches:
    """As many as there are iterations, drawn by chance."""
    samples = recipe.iterations * recipe.batch_size
    return Batches((texts,), recipe.batch_size, lambda: torch.randint(len(texts), (samples,)))


# ------------------------------------------------------------------ the contestants
def by_hand(recipe: Recipe, texts: Tensor, loss: Loss, two_lines: bool = False) -> nn.Module:
    model: nn.Module = Gpt(recipe).to(recipe.device)
    optimizer = recipe.optimizer(model)
    scheduler = recipe.schedule(optimizer)
    if two_lines:  # with `import flowdp`
        model = flowdp.setup(model, optimizer, devices=[recipe.device], progress=False)
    for batch in batches(recipe, texts):
        with racing.autocast(recipe.device):
            value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def by_lightning(recipe: Recipe, texts: Tensor, loss: Loss) -> nn.Module:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Gpt(recipe)

        def training_step(self, batch: tuple[Tensor, ...], _: int) -> Tensor:
            return loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            optimizer = recipe.optimizer(self.model)
            return [optimizer], [{"scheduler": recipe.schedule(optimizer), "interval": "step"}]

    module = Module()
    trainer = racing.lightning_trainer(recipe.device, max_steps=recipe.iterations, gradient_clip_val=1.0)
    trainer.fit(module, batches(recipe, texts))
    model: nn.Module = module.model
    return model


def by_flowdp(recipe: Recipe, texts: Tensor, loss: Loss) -> nn.Module:
    model = Gpt(recipe)
    flowdp.Trainer(
        model,
        recipe.optimizer,
        loss,
        dataset=(texts,),
        batch_size=recipe.batch_size,
        max_steps=recipe.iterations,
        devices=[recipe.device],
        precision=racing.precision(recipe.device),
        max_grad_norm=1.0,
        scheduler=flowdp.SchedulerOptions(recipe.schedule, unit="step"),
        reading=flowdp.ReadingOptions(drop_last=True),
        failures=flowdp.FailureOptions(stall_timeout=None),  # a first step may compile for minutes
        progress=False,
    ).fit()
    return model


CONTESTANTS: dict[str, tuple[Callable[[Recipe, Tensor, Loss], nn.Module], bool]] = {
    "by hand": (by_hand, False),
    "by hand, torch.compile": (by_hand, True),
    "Lightning": (by_lightning, False),
    "flowdp.setup": (partial(by_hand, two_lines=True), False),
    "flowdp Trainer": (by_flowdp, False),
    "flowdp Trainer, torch.compile": (by_flowdp, True),
}
"""Function of a contestant, and whether model and loss are compiled, as one function."""


def run(recipe: Recipe, name: str) -> Result:
    """The result of a contestant, in this process."""
    contestant, is_compiled = CONTESTANTS[name]
    device = racing.prepare(recipe.device)
    train, held_out = recipe.texts()
    first, last = recipe.warm_up + 1, recipe.iterations
    clock = Clock(device, marks=(first, last))
    model = contestant(recipe, train, clock.around(torch.compile(loss) if is_compiled else loss))
    ms = 1e3 * (clock.begin_s[last] - clock.begin_s[first]) / (last - first)
    width = -(-recipe.iterations // 50)  # of a point of the curve, for single losses are noise
    parts = torch.stack(clock.losses).float().split(width)
    curve = tuple((width * place + len(part) / 2, part.mean().item()) for place, part in enumerate(parts))
    return Result(ms, held_out_loss(recipe, model, held_out), clock.begin_s[2], curve)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=50, help="iterations before the timed ones")
    parser.add_argument("--small", action="store_true", help="4 layers of 128 channels, for the CPU")
    parser.add_argument("--picture", type=Path, default=Path("race_gpt.png"))
    options = parser.parse_args()
    if options.warm_up > options.iterations - 2:
        parser.error(
            f"--iterations {options.iterations} leaves none to time behind --warm-up {options.warm_up}"
        )
    recipe = Recipe(options.device, options.iterations, options.warm_up)
    if options.small:
        sizes: dict[str, Any] = {"layers": 4, "heads": 4, "channels": 128, "context": 64, "batch_size": 12}
        recipe = replace(recipe, **sizes, dropout=0.0)  # nanoGPT's own sizes for a CPU

    names = racing.installed(options.contestants)
    outcomes = racing.race({name: partial(run, recipe, name) for name in names})
    print(f"\n{racing.table(outcomes, 'ms per iteration', f'loss after {recipe.iterations}')}\n")
    title = f"GPT of {recipe.layers} layers and {recipe.channels} channels, on {recipe.device}"
    racing.draw(options.picture, outcomes, title, "ms per iteration", ("iteration", "loss"))


if __name__ == "__main__":
    main()
