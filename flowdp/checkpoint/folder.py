"""The folder of a run's checkpoints: which file is the newest, and which ones stay."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flowdp.checkpoint.file import UNFINISHED, read, remove, write
from flowdp.checkpoint.folder_lock import FolderLock
from flowdp.errors import CheckpointError
from flowdp.options import CheckpointOptions
from flowdp.policy.monitor import Monitor

__all__ = ["CheckpointFolder"]

BEST = "best.pt"
NAME = re.compile(r"step-\d{12,}-(\d+)\.pt")
LEFT_OVER = re.compile(rf"(step-\d{{12,}}-\d+|best)\.pt{re.escape(UNFINISHED)}")

T = TypeVar("T")

log = logging.getLogger("flowdp")


class CheckpointFolder:
    """The checkpoints of one run.

    Files are called `step-<global step>-<number>.pt`. Each new one has a higher number than all that are
    there, whatever its step: so the newest is that of the last run also where this went back to an earlier
    checkpoint, or began anew in a used folder.

    Args:
        options: The folder, which is made, and which files stay in it. Unfinished files of a killed process
            there are removed at the first `save`.

    Attributes:
        lock: A run that writes into the folder takes it first.
        best: Best value of the metric that `keep_best` names; None before the first.

    Raises:
        CheckpointError: The folder cannot be made or read.

    Threads: one at a time; those of the lock are its own.
    """

    def __init__(self, options: CheckpointOptions) -> None:
        self.options = options
        self.best: float | None = None
        self._top: list[tuple[float, str]] = []  # values and names of the best files, the best first
        self._folder = Path(options.dir)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._lost(error) from error
        self.lock = FolderLock(self._folder)
        self._is_swept = False

    def paths(self) -> list[Path]:
        """The checkpoints that are there, newest first; `best.pt` is not among them."""
        numbered = [
            (int(match[1]), path)
            for path in self._files()
            if (match := NAME.fullmatch(path.name)) is not None
        ]
        return [path for _, path in sorted(numbered, reverse=True)]

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that can be read, after all others `best.pt`; None where there is none.

        One that cannot be read is logged with its reason.
        """
        best = self._folder / BEST
        for path in [*self.paths(), *([best] if best.exists() else [])]:
            try:
                return path, read(path)
            except CheckpointError as error:
                log.warning("%s; the one before it is taken", error)
        return None

    def follow(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: its best values are those to beat, if they are of the same metric."""
        if state.get("keep_best") != self.options.keep_best:
            self.best, self._top = None, []
            return
        self.best = state["best"]
        self._top = [(value, name) for value, name in state["top"] if (self._folder / name).exists()]

    def save(
        self, state: Mapping[str, Any], *, version: int, global_step: int, value: float | None = None
    ) -> Path:
        """Write a checkpoint, then remove those that need not stay.

        Args:
            state: As of `write`; the values given here are filled in.
            version: Number of the checkpoint in its run.
            global_step: Steps of all ranks before it.
            value: Value of the metric that `keep_best` names; None without one.

        Raises:
            CheckpointError: It could not be written; those before it are untouched.
        """
        self._sweep()
        there = self.paths()
        number = version if not there else max(version, _number(there[0]) + 1)
        path = self._folder / f"step-{global_step:012d}-{number}.pt"
        keep_best = self.options.keep_best
        is_best = bool(value is not None and keep_best and Monitor(*keep_best).is_better(value, self.best))
        best = value if is_best else self.best
        top = self.best_of([*self._top, (value, path.name)])
        filled = {
            **state,
            "version": version,
            "global_step": global_step,
            "best": None if best is None else float(best),
            "keep_best": keep_best,
            "top": [[float(value), name] for value, name in top],
        }
        try:
            write(path, filled, also=self._folder / BEST if is_best else None)
        except CheckpointError as error:
            error.version = version
            raise
        self.best, self._top = best, top
        stay = {name for _, name in top}
        for old in self.paths()[self.options.keep_last :]:
            if old.name not in stay:
                remove(old)
        return path

    def best_of(self, valued: Iterable[tuple[float | None, T]]) -> list[tuple[float, T]]:
        """Those of several things that would stay for their value of the metric that `keep_best` names."""
        keep_best = self.options.keep_best
        return [] if keep_best is None else Monitor(*keep_best).best_of(valued, self.options.top_k)

    def _sweep(self) -> None:
        """Remove unfinished files, once, when this run writes: before, another run may own the folder."""
        if not self._is_swept:
            self._is_swept = True
            for path in self._files():
                if LEFT_OVER.fullmatch(path.name):
                    remove(path)

    def _files(self) -> list[Path]:
        try:
            return list(self._folder.iterdir())
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint folder {self._folder} cannot be used ({error.strerror}); give another one",
            path=str(self._folder),
        )


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
