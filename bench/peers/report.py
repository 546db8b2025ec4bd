"""Tables and plot of the comparison, written into README.md and docs/performance.md.

    python -m bench.peers.report    # from the newest record in bench/results

The text between the marks `<!-- peers:begin -->` and `<!-- peers:end -->` is replaced. README.md
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

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"

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
    for page, block in blocks(record).items():
        path = ROOT / page
        path.write_text(written(path.read_text(encoding="utf-8"), block), encoding="utf-8")
        print(f"wrote {page}")


def blocks(record: Record | None) -> dict[str, str]:
    """Text of each page, by its path."""
    if record is None:
        return dict.fromkeys(("README.md", "docs/performance.md"), NO_RECORD)
    return {"README.md": summary(record), "docs/performance.md": tables(record)}


def written(page: str, block: str) -> str:
    """Page with the text between its marks replaced.

    Raises:
        ValueError: The page has not exactly one pair of marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after:
        raise ValueError(f"the page needs one {BEGIN} and one {END} behind it")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


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


def ratios(record: Record, kind: str, model: str, side: str, base: str) -> list[float]:
    """Throughput of a side to that of another in the same round."""
    bases = {run["turn"]: run["rate"] for run in select(record, [kind], base, model)}
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
            *(spread_short(ratios(record, "equal", model, name, "ddp")) for model in TASKS),
            spread_short(ratios(record, "unequal", "cnn", name, "ddp")),
            short(values(record, ["equal"], name, "first_step_s"), ".1f"),
            short(values(record, ["failure"], name, "peak_mb"), ".0f"),
            short(values(record, ["failure"], name, "exit_s"), ".1f"),
        ]
        for name in sides(record, "equal")
    ]
    head = ["samples/s to DDP's", *(task.label.split(",")[0] for task in TASKS.values())]
    head += ["CNN, 1 : 2.5", "first step, s", "memory, MB", "error to exit, s"]
    return (
        f"{origin(record, spread='')}\n\n{grid(head, rows)}\n\n"
        "\\* Other mathematics: each device takes optimizer steps of its own, and parameters are averaged.\n"
        "All other rows take one step on the gradient of the whole batch. All figures, with their spread:\n"
        "[docs/performance.md](docs/performance.md#beside-other-libraries).\n\n" + picture("docs/images")
    )


def tables(record: Record) -> str:
    """All tables."""
    parts = [origin(record)]
    for model, task in TASKS.items():
        if rows := throughputs(record, "equal", model, "ddp"):
            parts += [f"**{task.label}**, {task.batch_size} samples a device and step, two devices:"]
            parts += [grid(["", "samples/s", "to DDP", "first step, s"], rows)]
    if rows := throughputs(record, "unequal", "cnn", "ddp"):
        wait_us = record["wait_us"]["cnn"]
        parts += [
            f"**CNN, devices at 1 : 2.5**: device 1 waits {wait_us:.0f} us for each of its samples, 1.5 "
            "times the processor time of\ntheir forward and backward:",
            grid(["", "samples/s", "to DDP", "first step, s"], rows),
        ]
    alone = [(model, row) for model in TASKS for row in throughputs(record, "one", model, "hand")]
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


def throughputs(record: Record, kind: str, model: str, base: str) -> list[Row]:
    """Rows of one model: throughput, its ratio to the base in the same round, first step."""
    return [
        [
            label(name),
            spread(values(record, [kind], name, "rate", model), ",.0f"),
            spread(ratios(record, kind, model, name, base), ".2f"),
            spread(values(record, [kind], name, "first_step_s", model), ".1f"),
        ]
        for name in sides(record, kind, model)
    ]


def spread_short(found: Sequence[float]) -> str:
    return short(found, ".2f")


def short(found: Sequence[float], form: str) -> str:
    """Median alone."""
    return format(median(found), form) if found else "-"


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
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "flowdp", "font.size": 9})
    from matplotlib.figure import Figure

    names = [name for name in sides(record, "equal") if name != "data_parallel"][::-1]
    panels = [("equal", model, task.label.split(",")[0]) for model, task in TASKS.items()]
    panels += [("unequal", "cnn", "CNN, 1 : 2.5")]
    for theme, ink in (("light", "#1f2328"), ("dark", "#e6edf3")):
        figure = Figure(figsize=(9, 0.34 * len(names) + 0.7), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True)
        for axis, (kind, model, title) in zip(axes, panels, strict=True):
            for place, name in enumerate(names):
                if not (found := ratios(record, kind, model, name, "ddp")):
                    continue
                middle = median(found)
                own = SIDES[name].module in ("setup", "trainer")
                axis.barh(
                    place,
                    middle,
                    color="#2f81f7" if own else "#8b949e",
                    alpha=1 if SIDES[name].ddp_maths else 0.5,
                )
                axis.plot([min(found), max(found)], [place, place], color=ink, linewidth=1)
                axis.text(max(found), place, f" {middle:.2f}", va="center", color=ink)
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
