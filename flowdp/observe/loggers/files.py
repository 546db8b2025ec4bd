"""Loggers that write a file: CSV, and JSON by lines.

A row is handed to the system before the next one is taken, so a process that is killed loses one at most. A
run that goes on drops the rows behind its checkpoint, for it trains these steps again, and a torn last row. A
file of another run is never written over: it is renamed.
"""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Iterable, Mapping
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

from flowdp.checkpoint.file import beside
from flowdp.errors import OptionError
from flowdp.observe.loggers.log import Every, Log, Number, Setting

__all__ = ["CSVLogger", "JSONLLogger", "check_folder", "free_path", "set_aside"]

STEP = "global_step"
"""Column of the steps of all ranks."""

NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

log = logging.getLogger("flowdp")


class CSVLogger(Log):
    """Writes the numbers of a run to a CSV file, one row for each epoch.

    A number that appears later in the run gets a new column, which is empty in the rows before. The settings
    of the run are written beside it, as `<name>.settings.json`.

    ::

        flowdp.Trainer(..., callbacks=[flowdp.CSVLogger("runs/a/metrics.csv")])

    Args:
        path: The file. A resumed run continues it; a new one renames the file that is there.
        every: See `Log`.

    Raises:
        OptionError: Nothing can be written there, or `every` is something else.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: Every = "epoch") -> None:
        super().__init__(self, every=every)
        self._path = _usable("CSVLogger", path)
        self._columns: list[str] = []

    def begin(self, settings: Mapping[str, Setting], step: int) -> None:
        """See `RunLogger`."""
        self._columns, rows = self._read() if step and self._path.exists() else ([], [])
        if STEP in self._columns:
            self._rewrite([row for row in rows if _stays(row, step)])
        elif self._path.exists():
            aside = set_aside(self._path)
            if (beside := _beside(self._path)).exists():
                beside.replace(_beside(aside))
            self._columns = []
        text = json.dumps(_plain(settings), indent=2, allow_nan=False)
        _beside(self._path).write_text(f"{text}\n", encoding="utf-8")

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        """See `RunLogger`."""
        row = {STEP: step, **numbers}
        if not row.keys() <= set(self._columns):
            rows: list[dict[str, str]] = self._read()[1] if self._columns else []
            self._columns = list(dict.fromkeys([*self._columns, *row]))
            self._rewrite(rows)
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def end(self, status: str) -> None:
        """A table of numbers has no place for it."""

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and rows of the file."""
        table = csv.DictReader(StringIO(_whole_lines(self._path), newline=""))
        return list(table.fieldnames or ()), list(table)

    def _rewrite(self, rows: Iterable[Mapping[str, str]]) -> None:
        text = StringIO(newline="")
        table = csv.DictWriter(text, self._columns)
        table.writeheader()
        table.writerows(rows)
        _replace(self._path, text.getvalue())


class JSONLLogger(Log):
    """Writes the numbers of a run to a file of JSON objects, one on each line.

    The first line has the settings, the last one the status: `{"settings": {...}}`, `{"status": "done"}`. NaN
    and infinities, which JSON does not have, are the strings "NaN", "Infinity" and "-Infinity", as in
    protobuf's JSON: `float()` reads them.

    Args:
        path: The file. A resumed run continues it; a new one renames the file that is there.
        every: See `Log`.

    Raises:
        OptionError: Nothing can be written there, or `every` is something else.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: Every = "epoch") -> None:
        super().__init__(self, every=every)
        self._path = _usable("JSONLLogger", path)

    def begin(self, settings: Mapping[str, Setting], step: int) -> None:
        """See `RunLogger`."""
        if self._path.exists():
            lines = _whole_lines(self._path).splitlines(keepends=True) if step else []
            if lines and lines[0].startswith('{"settings":'):
                _replace(self._path, "".join(line for line in lines if _stays(json.loads(line), step)))
            else:
                set_aside(self._path)
        self._write({"settings": _plain(settings)})

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        """See `RunLogger`."""
        self._write(_plain({STEP: step, **numbers}))

    def end(self, status: str) -> None:
        """See `RunLogger`."""
        self._write({"status": status})

    def _write(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def _whole_lines(path: Path) -> str:
    """The text of a file without a last line that is torn, as its process was killed while it wrote that."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        text = file.read()
    return text[: text.rfind("\n") + 1]


def _replace(path: Path, text: str) -> None:
    """Write a file anew; it has all of the text, or that from before."""
    with beside(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def set_aside(path: Path) -> Path:
    """Rename what another run has left, so that no run writes over it; returns the new path."""
    aside = free_path(path)
    path.rename(aside)
    log.warning("%s is of another run, and is called %s from now on", path, aside)
    return aside


def free_path(path: Path) -> Path:
    """The path with the first number at its stem that is not taken: "m-1.csv"."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
    return next(free for free in numbered if not free.exists())


def check_folder(purpose: str, folder: Path) -> None:
    """Check that a folder can be written to; it is made where it is not there.

    Raises:
        OptionError: It cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"{purpose}: the folder {str(folder)!r} cannot be made ({error.strerror})"
        ) from error
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{purpose}: the folder {str(folder)!r} cannot be written to: give another one")


def _usable(purpose: str, path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise OptionError(f"{purpose} needs the path of a file, not {path!r}")
    if Path(path).is_dir():
        raise OptionError(f"{purpose} needs the path of a file, and {str(path)!r} is a folder")
    check_folder(purpose, Path(path).parent)
    return Path(path)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}.settings.json")


def _stays(row: Mapping[str, Any], step: int) -> bool:
    """Whether a row is not logged again by a run that goes on from this step."""
    is_final = "0" not in (str(row.get("is_complete")), str(row.get("is_evaluated")))
    return float(row.get(STEP, 0)) <= step and is_final


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON has them."""
    return {
        name: NOT_FINITE.get(str(value), value) if isinstance(value, float) else value
        for name, value in values.items()
    }
