"""A folder belongs to one live run: a lock that ends with the process that holds it.

`lockf` on a file in the folder keeps other processes out: it is this process's alone, so a forked child does
not hold it, and the kernel takes it back however the process ends. It does not tell two runs of one process
apart; a table does.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from flowdp.errors import OptionError

__all__ = ["FolderLock"]

NAME = ".flowdp.lock"
LAST_FILE_S = 60.0

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
            self._file = (self._folder / NAME).open("a")
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
                if (
                    self._file is not None
                ):  # before it leaves the table: closing it ends any lock of the process
                    self._file.close()
                del _held[self._key]
            self._is_free.set()


_held: dict[Path, FolderLock] = {}
_lock = threading.Lock()  # guards the table
