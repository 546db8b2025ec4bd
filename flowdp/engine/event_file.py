"""The file of a run's event log: a disk that is full ends the file, and not the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flowdp.errors import OptionError

__all__ = ["EventFile"]

log = logging.getLogger("flowdp")


class EventFile:
    """File of events; it takes lines until it is closed, or one cannot be written.

    Args:
        path: Path of the file; an older one is replaced.
        complain: Called once with the reason, where a line cannot be written.

    Threads:
        Any, one at a time.

    Raises:
        OptionError: It cannot be opened.
    """

    def __init__(self, path: Path, complain: Callable[[str], object]) -> None:
        self.path = path
        self._is_begun = False
        self._complain = complain
        try:
            self._file = open(  # noqa: SIM115 - the run closes it
                path, "w", encoding="utf-8", buffering=1, opener=_open_at_once
            )
        except OSError as error:
            raise OptionError(self._cannot(error) + "; give another path") from error

    def write(self, line: str) -> None:
        """Write a line; after one that could not be written, nothing.

        Raises:
            OptionError: The very first line cannot be written: there is no room for any.
        """
        if self._file.closed:
            return
        try:
            self._file.write(line)
        except OSError as error:
            self._drop()
            if not self._is_begun:
                raise OptionError(self._cannot(error) + "; give another path") from error
            text = self._cannot(error) + "; it ends there, and the run goes on"
            log.error("%s", text)
            self._complain(text)
        self._is_begun = True

    def close(self) -> None:
        """Close the file."""
        if not self._file.closed:
            self._drop()

    def _drop(self) -> None:
        with suppress(OSError):  # of the line that is still in its buffer
            self._file.close()

    def _cannot(self, error: OSError) -> str:
        return f"event_log cannot be written to {str(self.path)!r} ({error})"


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without a reader is an error and not waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
