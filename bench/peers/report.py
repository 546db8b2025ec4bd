"""Tables and plot of the comparison, written into README.md and docs/performance.md.

    python -m bench.peers.report    # from the newest record in bench/results

The text between two marks such as `<!-- peers:begin -->` and `<!-- peers:end -->` is replaced. README.md
shows figures of a quiet machine only.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import RESULTS, ROOT
from bench.peers.cases import SIDES
from bench.peers.tasks import TASKS

__all__ = ["blocks", "draw", "is_quiet", "newest", "tables", "written"]

PLAIN = "data_parallel"
"""Side that is one plain process on the CPU; see `bench/peers/sides/data_parallel.py`."""

SHORT = (PLAIN, "ddp", "accelerate", "lightning", "setup", "exact", "cadence", "async")
"""Sides in the table of README.md."""

QUIET_LOAD = 3.0
NO_RECORD = (
    "`make bench-peers` compares flowdp with DistributedDataParallel, Accelerate, Lightning and Fabric on\n"
    "three models, on the CPU. There is no record of a quiet machine yet, so no figures are shown."
)

Run = Mapping[str, Any]
Record = Mapping[str, Any]
Row = Sequence[str]


def newest(folder: Path = RESULTS) -> Record | None:
    """The record that was written last; None: there is none."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("peers_*.json")]
    return max(records, key=lambda record: (record["date"], record["ended"]), default=None)


def main() -> None:
    record = newest()
    if record is not None and is_quiet(record):
        draw(record)
    for page, texts in blocks(record).items():
        path = ROOT / page
        path.write_text(written(path.read_text(encoding="utf-8"), texts), encoding="utf-8")
        print(f"wrote {page}")


def blocks(record: Record | None) -> dict[str, dict[str, str]]:
    """Texts of each page, by its path and the name of their marks."""
    if record is None:
        return {"README.md": {"figures": "", "peers": NO_RECORD}, "docs/performance.md": {"peers": NO_RECORD}}
    return {
        "README.md": {"figures": headline(record), "peers": summary(record)},
        "docs/performance.md": {"peers": tables(record)},
    }


def written(page: str, texts: Mapping[str, str]) -> str:
    """Page with the texts between its marks replaced.

    Raises:
        ValueError: The page has not exactly one pair of each mark.
    """
    for name, text in texts.items():
        first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, begin, rest = page.partition(first)
        _, end, after = rest.partition(last)
        if not begin or not end or first in after:
            raise ValueError(f"the page needs one {first} and one {last} behind it")
        page = f"{before}{first}\n{text}\n{last}{after}"
    return page


# ------------------------------------------------------------------ figures
def spread(values: Sequence[float], form: str) -> str:
    """Median, with the least and the largest in brackets."""
    if not values:
        return "-"
    if len(values) == 1:
        return format(values[0], form)
    return f"{median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def select(record: Record, kinds: Iterable[str], side: str, model: str | None = None) -> Iterator[Run]:
    """Runs of a side, and of a model."""
    for run in record["runs"]:
        if run["kind"] in kinds and run["side"] == side and model in (None, run["model"]):
            yield run


def ratios(
    record: Record, kind: str, model: str, side: str, base: str, base_kind: str | None = None
) -> list[float]:
    """Throughput of a side to that of another, in a run of its kind or of another, in the same round."""
    bases = {run["turn"]: run["rate"] for run in select(record, [base_kind or kind], base, model)}
    return [
        run["rate"] / bases[run["turn"]]
        for run in select(record, [kind], side, model)
        if run["turn"] in bases
    ]


def values(
    record: Record, kinds: Iterable[str], side: str, key: str, model: str | None = None
) -> list[float]:
    """One figure of all runs of a side that have it."""
    return [run[key] for run in select(record, kinds, side, model) if key in run]


def sides(record: Record, kind: str, model: str | None = None) -> list[str]:
    """Sides that were measured, in the order of `SIDES`."""
    return [name for name in SIDES if any(True for _ in select(record, [kind], name, model))]


# ------------------------------------------------------------------ tables
def grid(head: Row, rows: Iterable[Row]) -> str:
    """Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def label(name: str) -> str:
    """Name of a side, with a star where its mathematics are not those of DDP."""
    return SIDES[name].label + ("" if SIDES[name].ddp_maths else " *")


def is_quiet(record: Record) -> bool:
    """Whether the machine had little else to do: two devices and a launcher make a load of up to 3."""
    quiet: bool = record["load"] <= QUIET_LOAD
    return quiet


def summary(record: Record) -> str:
    """The short table and the plot; of a busy machine, whose ratios are chance, a sentence only."""
    if not is_quiet(record):
        return (
            "`make bench-peers` compares flowdp with DistributedDataParallel, Accelerate, Lightning and\n"
            "Fabric on three models, on the CPU. The newest record is of a machine that was busy with other\n"
            "programs, so its figures are not shown here, but in\n"
            "[docs/performance.md](docs/performance.md#beside-other-libraries)."
        )
    rows = [
        [
            label(name),
            *(to_both(record, "equal", model, name) for model in TASKS),
            to_both(record, "unequal", "cnn", name),
            short(values(record, ["failure"], name, "exit_s"), ".1f"),
        ]
        for name in sides(record, "equal")
        if name in SHORT
    ]
    head = ["samples/s, to DDP's (to one plain process's)", *(short_name(model) for model in TASKS)]
    head += ["CNN, 1 : 2.5", "s from an error to the exit"]
    return (
        f"{origin(record, spread='')}\n\n{grid(head, rows)}\n\n"
        "*1 : 2.5*: device 1 is 2.5 times slower; the plain process has device 0 alone. *From an error to\n"
        "the exit*: an exception on device 1, until the last process has gone. \\* Other mathematics: each\n"
        "device takes optimizer steps of its own, and parameters are averaged."
    )


def headline(record: Record) -> str:
    """What two devices have beside other libraries, in three lines; nothing of a busy machine."""
    if not is_quiet(record):
        return ""
    names = ["ddp", "accelerate", "lightning", "exact"]
    rows = [
        ["CNN, device 1 is 2.5 times slower: samples/s"]
        + [short(values(record, ["unequal"], name, "rate"), ",.0f") for name in names],
        ["from the command to the first step, s"]
        + [short(values(record, ["equal"], name, "first_step_s"), ".1f") for name in names],
        ["memory of all processes, MB"]
        + [short(values(record, ["failure"], name, "peak_mb"), ".0f") for name in names],
    ]
    for row in rows:
        row[-1] = f"**{row[-1]}**"
    return grid(["two devices", *(label(name) for name in names[:-1]), "**flowdp Trainer**"], rows)


def short_name(model: str) -> str:
    """Name of a task in a head."""
    return TASKS[model].label.split(",")[0]


def to_both(record: Record, kind: str, model: str, side: str) -> str:
    """Throughput to that of DDP and, in brackets, to that of one plain process on the fast device."""
    to_ddp = short(ratios(record, kind, model, side, "ddp"), ".2f")
    to_plain = short(ratios(record, kind, model, side, PLAIN, "equal"), ".2f")
    return "-" if to_ddp == "-" else f"{to_ddp} ({to_plain})"


def tables(record: Record) -> str:
    """All tables."""
    parts = [origin(record), *([picture("images")] if is_quiet(record) else [])]
    bases = (("ddp", None), (PLAIN, "equal"))
    head = ["", "samples/s", "to DDP", "to one plain process", "first step, s"]
    for model, task in TASKS.items():
        if rows := throughputs(record, "equal", model, bases):
            parts += [f"**{task.label}**, {task.batch_size} samples a device and step, two devices:"]
            parts += [grid(head, rows)]
    if rows := throughputs(record, "unequal", "cnn", bases):
        wait_us = record["wait_us"]["cnn"]
        parts += [
            f"**CNN, devices at 1 : 2.5**: device 1 waits {wait_us:.0f} us for each of its samples, 1.5 "
            "times the processor time of\ntheir forward and backward; the plain process has device 0 alone:",
            grid(head, rows),
        ]
    by_hand = (("hand", None),)
    alone = [(model, row) for model in TASKS for row in throughputs(record, "one", model, by_hand)]
    if alone:
        parts += ["**One device**, beside the loop by hand:"]
        parts += [
            grid(
                ["model", "", "samples/s", "to the loop by hand", "first step, s"],
                [[model, *row] for model, row in alone],
            )
        ]
    failures = [
        [
            label(name),
            *(
                spread(values(record, ["failure"], name, key), form)
                for key, form in (("peak_mb", ".0f"), ("shown_s", ".3f"), ("exit_s", ".2f"))
            ),
            str(sum(run.get("left", 0) for run in select(record, ["failure"], name))),
        ]
        for name in sides(record, "failure")
    ]
    if failures:
        parts += [
            "**An exception on device 1 of two**, in step 30 of the CNN, and the memory of all processes "
            "until then:"
        ]
        parts += [grid(["", "memory, MB", "shown, s", "exit, s", "processes left"], failures)]
    aborts = Counter(label(run["side"]) for run in record["runs"] if run.get("aborted"))
    if aborts:
        named = ", ".join(f"{name} {count}" for name, count in aborts.items())
        parts += [f"Runs whose program ended with an error behind its last step, which count: {named}."]
    return "\n\n".join(parts)


def throughputs(record: Record, kind: str, model: str, bases: Sequence[tuple[str, str | None]]) -> list[Row]:
    """Rows of one model: throughput, its ratios to bases (side and kind) in the same round, first step."""
    return [
        [
            label(name),
            spread(values(record, [kind], name, "rate", model), ",.0f"),
            *(spread(ratios(record, kind, model, name, *base), ".2f") for base in bases),
            spread(values(record, [kind], name, "first_step_s", model), ".1f"),
        ]
        for name in sides(record, kind, model)
    ]


def short(figures: Sequence[float], form: str) -> str:
    """Median alone."""
    return format(median(figures), form) if figures else "-"


def origin(record: Record, spread: str = ", with the least and the largest in brackets") -> str:
    """Sentence that says where the figures are from, and their spread."""
    if "machine" not in record:
        return ""
    machine, versions = record["machine"], record["versions"]
    others = ", ".join(f"{name} {versions[name]}" for name in ("lightning", "accelerate"))
    return (
        f"`make bench-peers`, {record['date']}, {record['commit']}: {machine['cores']} cores "
        f"({machine['cpu']}), torch {versions['torch']},\n{others}; "
        f"medians of the runs (rounds: {record['rounds']}){spread}."
        f"{beside(record)}"
    )


def beside(record: Record) -> str:
    """Warning that other programs ran at the same time."""
    if is_quiet(record):
        return ""
    return (
        f"\n**Other programs ran beside it** (load {record['load']} on {record['machine']['cores']} cores):\n"
        "a side was slow or fast by what else ran at that moment, so these figures are no evidence for or\n"
        "against any."
    )


# ------------------------------------------------------------------ plot
def picture(folder: str) -> str:
    """Plot, as HTML that follows the reader's choice of light or dark."""
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{folder}/peers-dark.svg">\n'
        f'  <img src="{folder}/peers-light.svg" alt="Samples per second of each library, relative to '
        'DistributedDataParallel, on three models">\n'
        "</picture>"
    )


def draw(record: Record, folder: Path = ROOT / "docs/images") -> None:
    """Write the plot in light and dark: ratios to DDP of each model, with the spread over the rounds."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "flowdp", "font.size": 9}):
        _draw(record, folder)


def _draw(record: Record, folder: Path) -> None:
    from matplotlib.figure import Figure

    names = [name for name in sides(record, "equal") if name != PLAIN][::-1]
    panels = [("equal", model, short_name(model)) for model in TASKS]
    panels += [("unequal", "cnn", "CNN, 1 : 2.5")]
    for theme, ink in (("light", "#1f2328"), ("dark", "#e6edf3")):
        figure = Figure(figsize=(9, 0.34 * len(names) + 0.7), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True)
        for axis, (kind, model, title) in zip(axes, panels, strict=True):
            for place, name in enumerate(names):
                if not (rates := ratios(record, kind, model, name, "ddp")):
                    continue
                middle = median(rates)
                own = SIDES[name].module in ("setup", "trainer")
                axis.barh(
                    place,
                    middle,
                    color="#2f81f7" if own else "#8b949e",
                    alpha=1 if SIDES[name].ddp_maths else 0.5,
                )
                axis.plot([min(rates), max(rates)], [place, place], color=ink, linewidth=1)
                axis.text(max(rates), place, f" {middle:.2f}", va="center", color=ink)
            axis.axvline(1, color=ink, linewidth=0.6, linestyle=":")
            axis.set_title(title, color=ink, fontsize=9)
            axis.set_yticks(range(len(names)), [label(name) for name in names])
            axis.tick_params(colors=ink, length=0)
            axis.set_xticks([])
            axis.margins(x=0.25)
            for spine in axis.spines.values():
                spine.set_visible(False)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"peers-{theme}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        path.write_text(
            re.sub(r"[ \t]+$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
