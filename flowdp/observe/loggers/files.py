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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TextIO

from flowdp.errors import OptionError
from flowdp.observe.loggers.log import Every, Log, Setting
from flowdp.observe.loggers.numbers import Number

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
        super().__init__(_CSVFile(_usable("CSVLogger", path)), every=every)


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
        super().__init__(_JSONLFile(_usable("JSONLLogger", path)), every=every)


class _RowFile:
    """A file of rows, which a run begins or continues."""

    newline: ClassVar[str] = "\n"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def open_at(self, step: int) -> None:
        """Open the file, with those rows of an earlier run that this one continues."""
        self.close()
        if self.path.exists() and not (step > 0 and self.keep(step)):
            self.set_aside()
        self.open()

    def keep(self, step: int) -> bool:
        """Drop the rows that the run will log again; False where the file is of another kind."""
        raise NotImplementedError

    def set_aside(self) -> Path:
        """Rename the file."""
        return set_aside(self.path)

    def open(self) -> TextIO:
        """Open the file for more rows."""
        self._file = self.path.open("a", encoding="utf-8", newline=self.newline)
        return self._file

    def write(self, text: str) -> None:
        """Write a row, and hand it to the system."""
        file = self._file or self.open()  # a rewriting that failed, on a full disk say, has closed it
        file.write(text)
        file.flush()

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def rewritten(self) -> Iterator[TextIO]:
        """A new file, which takes the place of the old one where the block ends without an error."""
        self.close()
        unfinished = self.path.with_name(self.path.name + ".tmp")
        try:
            with unfinished.open("w", encoding="utf-8", newline=self.newline) as file:
                yield file
            unfinished.replace(self.path)
        finally:
            unfinished.unlink(missing_ok=True)

    def is_torn(self) -> bool:
        """Whether the last row has no end: the process was killed while it wrote that."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return file.read() != b"\n"


class _CSVFile(_RowFile):
    """Rows of numbers under a header that grows."""

    newline = ""  # the csv module writes line ends itself, and so knows which to quote in a name

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: list[str] = []

    def begin(self, settings: Mapping[str, Setting], step: int) -> None:
        self._columns = []
        self.open_at(step)
        text = json.dumps(_plain(settings), indent=2, allow_nan=False)
        _beside(self.path).write_text(f"{text}\n", encoding="utf-8")

    def set_aside(self) -> Path:
        aside = super().set_aside()
        if (settings := _beside(self.path)).exists():
            settings.replace(_beside(aside))
        return aside

    def keep(self, step: int) -> bool:
        try:
            rows = self._rows()
            columns = next(rows, [])
            if STEP not in columns:
                return False
            with self.rewritten() as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows(row for row in rows if _stays(dict(zip(columns, row, strict=True)), step))
        except (csv.Error, ValueError):
            return False
        self._columns = columns
        return True

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        row = {STEP: step, **numbers}
        fresh = [name for name in row if name not in self._columns]
        if fresh:
            self._widen(fresh)
        text = StringIO()
        csv.writer(text).writerow([row.get(name, "") for name in self._columns])
        self.write(text.getvalue())

    def end(self, status: str) -> None:  # noqa: ARG002 - a table of numbers has no place for it
        self.close()

    def _widen(self, fresh: list[str]) -> None:
        """Add columns: the rows so far are empty there."""
        rows = self._rows()
        next(rows, None)
        columns = [*self._columns, *fresh]
        with self.rewritten() as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows([*row, *[""] * len(fresh)] for row in rows)
        self._columns = columns
        self.open()

    def _rows(self) -> Iterator[list[str]]:
        """Header and rows of the file, without a torn last one."""
        is_torn = self.is_torn()
        with self.path.open(encoding="utf-8", errors="replace", newline=self.newline) as file:
            rows = csv.reader(file, strict=True)
            last = next(rows, None)
            for row in rows:
                assert last is not None
                yield last
                last = row
            if last is not None and not is_torn:
                yield last


class _JSONLFile(_RowFile):
    """One JSON object on each line."""

    def begin(self, settings: Mapping[str, Setting], step: int) -> None:
        self.open_at(step)
        self._write({"settings": _plain(settings)})

    def keep(self, step: int) -> bool:
        try:
            with (
                self.path.open(encoding="utf-8", errors="replace", newline=self.newline) as file,
                self.rewritten() as kept,
            ):
                lines = (line for line in file if line.endswith("\n"))
                first = next(lines, "null")
                if not isinstance(head := json.loads(first), dict) or "settings" not in head:
                    raise ValueError("it does not begin as a file of this class does")
                kept.write(first)
                kept.writelines(line for line in lines if _stays(json.loads(line), step))
                file.close()  # before the new one takes its place, for Windows
        except (ValueError, AttributeError):  # no JSON, no object
            return False
        return True

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        self._write(_plain({STEP: step, **numbers}))

    def end(self, status: str) -> None:
        self._write({"status": status})
        self.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self.write(json.dumps(row, allow_nan=False) + "\n")


def set_aside(path: Path) -> Path:
    """Rename what another run has left, so that no run writes over it; returns the new path."""
    aside = free_path(path)
    path.rename(aside)
    log.warning("%s is of another run, and is called %s from now on", path, aside)
    return aside


def free_path(path: Path) -> Path:
    """The path with the first number at its stem that is not taken: "m-1.csv"."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
    return next(one for one in numbered if not one.exists())


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
