"""The folder of a run's checkpoints: which file is the newest, which ones stay, and the run that owns it.

A folder belongs to one live run. `lockf` on a file in it keeps other processes out: it is this process's
alone, so a forked child does not hold it, and the kernel takes it back however the process ends. It does not
tell two runs of one process apart; a table does.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from flowdp.checkpoint.file import UNFINISHED, read, remove, write
from flowdp.errors import CheckpointError, OptionError
from flowdp.options import CheckpointOptions
from flowdp.policy.monitor import Monitor

__all__ = ["CheckpointFolder", "FolderLock"]

BEST = "best.pt"
NAME = re.compile(r"step-\d{12,}-(\d+)\.pt")
LEFT_OVER = re.compile(rf"(step-\d{{12,}}-\d+|best)\.pt{re.escape(UNFINISHED)}")
LOCK_NAME = ".flowdp.lock"
LAST_FILE_S = 60.0

T = TypeVar("T")

log = logging.getLogger("flowdp")


class FolderLock:
    """Lock on an existing folder: taken when a run starts, given back when it has written its last file.

    Threads:
        `take`: the one that starts the run. `end`, `give_back`: any.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = folder.resolve()
        self._file: IO[str] | None = None
        self._is_ending = False
        self._is_free = threading.Event()

    def take(self) -> None:
        """Take the folder; waits for a run of this process that has ended and writes its last file.

        Raises:
            OptionError: Another run holds it, of this process or of another one.
        """
        with _lock:
            holder = _held.setdefault(self._key, self)
        if holder is not self:
            if not (holder._is_ending and holder._is_free.wait(LAST_FILE_S)):
                raise self._refusal()
            return self.take()
        self._is_free.clear()
        self._is_ending = False
        if fcntl is None:
            return None
        try:
            self._file = (self._folder / LOCK_NAME).open("a")
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.give_back()
            raise self._refusal() from None
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): nothing keeps another run from writing there",
                self._folder,
                error.strerror,
            )
        return None

    def _refusal(self) -> OptionError:
        return OptionError(
            f"checkpoint={str(self._folder)!r}: a live run writes there; stop() and join() it first "
            "(flowdp.runs() lists those of this process), or give another folder"
        )

    def end(self) -> None:
        """Note that the run has ended: it releases the folder once its last file is written."""
        self._is_ending = True

    def give_back(self) -> None:
        """Let another run have the folder; a second time does nothing."""
        with _lock:
            if _held.get(self._key) is self:
                # Before it leaves the table: closing it ends any lock of the process.
                if self._file is not None:
                    self._file.close()
                del _held[self._key]
            self._is_free.set()


_held: dict[Path, FolderLock] = {}
_lock = threading.Lock()  # guards the table


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
        self._files()
        self.lock = FolderLock(self._folder)
        self._is_swept = False
        self._between: Path | None = None  # the newest file, where the next one replaces it

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
        self,
        state: Mapping[str, Any],
        *,
        version: int,
        global_step: int,
        value: float | None = None,
        is_between: bool = False,
    ) -> Path:
        """Write a checkpoint, then remove those that need not stay.

        Args:
            state: As of `write`; the values given here are filled in.
            version: Number of the checkpoint in its run.
            global_step: Steps of all ranks before it.
            value: Value of the metric that `keep_best` names; None without one.
            is_between: The next checkpoint replaces it, and it counts not among those that stay.

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
        if self._between is not None and self._between.name not in stay:
            remove(self._between)
        self._between = path if is_between else None
        for old in self.paths()[self.options.keep_last + is_between :]:
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
        """Files of the folder, which is made where it is not there: it may be deleted during the run."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
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
