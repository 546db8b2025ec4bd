"""Shared code of the benches: pairs in shuffled order, medians, a ratio with its interval, a record.

::

    result = compare("small CNN", {"hand": lambda: step_ms(hand), "flowdp": lambda: step_ms(ours)}, pairs=15)
    report("process", [result], save=arguments.save)

The two measurements of a pair directly follow each other, in random order, so a slow phase of the machine
affects both. The ratio is the median of the pairs' ratios, and its interval a bootstrap over the pairs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flowdp.device.cores import usable_cores
from flowdp.device.discovery import cpu_name

__all__ = ["Comparison", "compare", "machine", "options", "report", "saved", "step_ms", "table"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
RESAMPLES = 4_000


@dataclass(frozen=True)
class Comparison:
    """Measurements of A against B, in pairs.

    Attributes:
        label: Name of the comparison.
        unit: Unit of the figures, mostly `ms`.
        names: Names of A and B.
        a: Figures of A, one per pair.
        b: Figures of B, in the same pairs.
    """

    label: str
    unit: str
    names: tuple[str, str]
    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float]:
        """Medians of A and of B."""
        return float(np.median(self.a)), float(np.median(self.b))

    @property
    def ratio(self) -> float:
        """Median over the pairs of A / B; for times, the speedup of B over A."""
        return float(np.median(np.divide(self.a, self.b)))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the ratio: percentile bootstrap over the pairs."""
        ratios = np.divide(self.a, self.b)
        drawn = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
        low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
        return float(low), float(high)


def compare(
    label: str, sides: Mapping[str, Callable[[], float]], *, pairs: int, unit: str = "ms", seed: int = 0
) -> Comparison:
    """Measure the two `sides` `pairs` times, the order in each pair drawn from `seed`.

    Each side does its own warm-up and returns one figure in `unit`.
    """
    (name_a, measure_a), (name_b, measure_b) = sides.items()
    draw = random.Random(seed)
    a, b = [], []
    for _ in range(pairs):
        if a_first := draw.random() < 0.5:
            a.append(measure_a())
        b.append(measure_b())
        if not a_first:
            a.append(measure_a())
    return Comparison(label, unit, (name_a, name_b), tuple(a), tuple(b))


def step_ms(step: Callable[[], object], *, steps: int = 30, warmup: int = 5) -> float:
    """Mean time of a call in milliseconds, over `steps` calls after `warmup` untimed ones."""
    for _ in range(warmup):
        step()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) * 1e3 / steps


def commit() -> str:
    """Short hash of the checkout, with `-dirty` if files differ from it; `nogit` without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    try:
        head = git("rev-parse", "--short", "HEAD").strip()
        return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "nogit"


def machine() -> dict[str, str | int]:
    """Hardware and software on which the figures depend."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def options(description: str | None, *, pairs: int) -> argparse.ArgumentParser:
    """A parser with the arguments that all benches share; a bench can add its own."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=pairs, help="measurements of each side (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write the record to bench/results")
    return parser


def saved(name: str, folder: Path = RESULTS) -> Path:
    """Path of a bench's record of today and of this commit."""
    return folder / f"{name}_{datetime.date.today().isoformat()}_{commit()}.json"


def table(results: Sequence[Comparison]) -> str:
    """A line per comparison: medians, ratio, interval, pairs."""
    width = max(len(result.label) for result in results)
    lines = []
    for result in results:
        (a, b), (low, high) = result.medians, result.interval
        lines.append(
            f"{result.label:<{width}}  {result.names[0]} {a:.3f}  {result.names[1]} {b:.3f} {result.unit}"
            f"  ratio {result.ratio:.3f} ({low:.3f}-{high:.3f}, n={len(result.a)})"
        )
    return "\n".join(lines)


def report(
    name: str,
    results: Sequence[Comparison],
    *,
    figures: Mapping[str, float] | None = None,
    save: bool = False,
    folder: Path = RESULTS,
    more: Mapping[str, object] | None = None,
) -> Path | None:
    """Print the table and, with `save`, write the record `<name>_<date>_<commit>.json`.

    Args:
        name: Name of the bench.
        results: Its comparisons.
        figures: Its other measurements, by names that end in the unit.
        save: Write the record.
        folder: Folder of the record.
        more: Other entries of the record, JSON values.

    Returns:
        Path of the record; None without `save`.
    """
    figures = figures or {}
    for key, value in figures.items():
        print(f"{key}  {value:,.3f}")
    if results:
        print(table(results))
    if not save:
        return None
    path = saved(name, folder)
    record = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "figures": dict(figures),
        "results": [
            {**vars(result), "medians": result.medians, "ratio": result.ratio, "interval": result.interval}
            for result in results
        ],
        **(more or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"saved {path.name}")
    return path
