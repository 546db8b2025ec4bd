"""What the races share: a process for each contestant, a clock, a table, and a picture."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

BASE = "by hand"
COLOURS = {
    "by hand": "#6e7781",
    "by hand, torch.compile": "#d4772b",
    "Lightning": "#8250df",
    "flowdp.setup": "#1b9e77",
    "flowdp Trainer": "#2f81f7",
    "flowdp Trainer, torch.compile": "#0a3069",
}
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Result:
    """What a contestant has come to.

    Attributes:
        figure: Seconds or milliseconds, by which the race is decided; None: the goal was not reached.
        final: Accuracy or loss at the end.
        first_step_s: Seconds from the start to the end of the first step, compilation included.
        curve: Points of the picture, in the order of time.
    """

    figure: float | None
    final: float
    first_step_s: float
    curve: tuple[tuple[float, float], ...]


Outcomes = Mapping[str, Result | str]
"""Results of the contestants; of one that failed, its error."""


def race(contestants: Mapping[str, Callable[[], Result]]) -> Outcomes:
    """Run the contestants in turn, each in a new process and with an empty cache of compiled code."""
    outcomes: dict[str, Result | str] = {}
    with TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        for name, contestant in contestants.items():
            print(f"{name} ...", flush=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, str(len(outcomes))))
            try:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    outcomes[name] = process.submit(contestant).result()
            except Exception as error:  # the others race on
                traceback.print_exception(error)
                outcomes[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return outcomes


def installed(names: Iterable[str]) -> list[str]:
    """The contestants that can start."""
    names = list(names)
    if "Lightning" in names and find_spec("lightning") is None:
        print("Lightning is skipped: it is not installed (pip install lightning)")
        names.remove("Lightning")
    return names


def prepare(name: str, seed: int = 0) -> torch.device:
    """The device, awake, in a process that is set up as for every other contestant."""
    device = torch.device(name)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.zeros(1, device=device)  # the driver's start belongs to nobody
    return device


def precision(device: str) -> Literal["bf16", "32"]:
    return "32" if device == "cpu" else "bf16"


def autocast(device: str) -> torch.autocast:
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision(device) == "bf16")


def lightning_trainer(device: str, **options: Any) -> Any:
    """A Trainer of Lightning on one device, without bar, logger, checkpoints and summary."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return lightning.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        precision="bf16-mixed" if precision(device) == "bf16" else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@dataclass(frozen=True)
class Batches:
    """Batches gathered on the device, in an order [samples] that is asked for anew in each pass."""

    data: tuple[Tensor, ...]
    size: int
    order: Callable[[], Tensor]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for index in self.order().to(self.data[0].device).split(self.size):
            yield tuple(part[index] for part in self.data)


class Clock:
    """Time since a contestant's start. Where it is read, the device has done all that it was given.

    Args:
        device: The device that is awaited.
        marks: Steps at whose begin the time is kept, counted from 1, beside the second.
    """

    def __init__(self, device: torch.device, marks: Iterable[int] = ()) -> None:
        self.device = device
        self.losses: list[Tensor] = []
        self.begin_s = dict.fromkeys((2, *marks), float("nan"))
        self.start_s = 0.0
        self.start_s = self.seconds()

    def seconds(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter() - self.start_s

    def around(self, loss: Loss) -> Loss:
        """The loss function, which also counts the steps; it waits for the device at the marks alone."""

        def timed(model: nn.Module, batch: Any) -> Tensor:
            step = len(self.losses) + 1
            if step in self.begin_s:
                self.begin_s[step] = self.seconds()
            value = loss(model, batch)
            self.losses.append(value.detach().clone())
            return value

        return timed


def table(outcomes: Outcomes, figure: str, final: str) -> str:
    """The outcomes in lines; the columns `figure` and `final` are named so."""
    base = outcomes.get(BASE)
    rows = [("contestant", figure, f"to {BASE}", "first step, s", final)]
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            rows.append((name, outcome[:70], "", "", ""))
            continue
        shown, ratio = "not reached", "-"
        if outcome.figure is not None:
            shown = f"{outcome.figure:.2f}"
            if isinstance(base, Result) and base.figure is not None:
                ratio = f"{outcome.figure / base.figure:.2f}"
        rows.append((name, shown, ratio, f"{outcome.first_step_s:.2f}", f"{outcome.final:.3f}"))
    # The text of an error runs on through the columns behind it.
    widths = [max(len(row[column]) for row in rows if row[2] or not column) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def draw(
    path: Path,
    outcomes: Outcomes,
    title: str,
    figure: str,
    axes: tuple[str, str],
    target: float | None = None,
) -> None:
    """Write a picture: on the left the curves, whose axes are named `axes`, on the right the figures."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("There is no picture: it needs matplotlib (pip install matplotlib)")
        return
    page = Figure(figsize=(10, 4), layout="constrained")
    page.suptitle(title)
    left, right = page.subplots(1, 2)
    for place, (name, outcome) in enumerate(outcomes.items()):
        colour = COLOURS.get(name, "#bf3989")
        if isinstance(outcome, str):
            right.text(0, place, " failed", va="center")
            continue
        width = 4.0 if name == BASE else 1.5  # seen beneath a curve that equals it
        left.plot(*zip(*outcome.curve, strict=True), color=colour, marker=".", linewidth=width, alpha=0.8)
        right.barh(place, outcome.figure or 0, color=colour, height=0.6)
        shown = "not reached" if outcome.figure is None else f"{outcome.figure:.2f}"
        right.text(outcome.figure or 0, place, f" {shown}", va="center")
    if target is not None:
        left.axhline(target, color="#1f2328", linewidth=0.8, linestyle=":")
    left.set(xlabel=axes[0], ylabel=axes[1], xlim=(0, None))
    left.grid(alpha=0.25)
    right.set(title=figure, xticks=[], xlim=(0, right.get_xlim()[1] * 1.15))
    right.set_yticks(range(len(outcomes)), list(outcomes))
    right.invert_yaxis()
    for spine in (left.spines.top, left.spines.right, *right.spines.values()):
        spine.set_visible(False)
    page.savefig(path, dpi=150)
    print(f"picture: {path}")
