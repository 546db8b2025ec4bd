"""A folder that belongs to one live run: a lock that ends with the process that holds it.

`flock` on a file in the folder. It is bound to the open file, so it tells two runs of one process apart, and
the kernel gives it back however the process ends. A forked child shares the open file; it closes its own at
once, or the worker processes of a DataLoader would hold the folder of a run that was killed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from flowdp.errors import OptionError

__all__ = ["FolderLock"]

NAME = ".flowdp.lock"
FLAGS = os.O_RDWR | os.O_CREAT
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):  # no link is followed, no pipe waited for
    FLAGS |= getattr(os, _flag, 0)
HOLDER_BYTES = 4096
LAST_FILE_S = 60.0

log = logging.getLogger("flowdp")


class FolderLock:
    """Lock on an existing folder: taken when a run starts, given back when it has written its last file.

    Threads:
        `take`: the one that starts the run. `end`, `give_back`: any.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._handle: int | None = None
        self._is_mine = False
        self._is_ending = False
        self._is_free = threading.Event()

    def take(self) -> None:
        """Take the folder; waits for a run of this process that has ended and writes its last file.

        Raises:
            OptionError: Another run holds it, of this process or of another one.
        """
        if fcntl is None:
            log.warning("%s: nothing on this system keeps another run from writing there", self._folder)
            return
        try:
            while not self._is_taken():
                self.give_back()
        except BaseException:
            self.give_back()
            raise

    def _is_taken(self) -> bool:
        """Open and lock the file; False where its holder has just removed it."""
        _open.add(self)
        self._is_free.clear()
        self._is_ending = False
        try:
            self._handle = os.open(self._path, FLAGS, 0o666)
            if not stat.S_ISREG(os.fstat(self._handle).st_mode):
                raise OptionError(f"checkpoint: {str(self._path)!r} is no plain file; remove it")
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert self._handle is not None
            ending = [lock for lock in list(_open) if lock._is_ending and lock.holds(self._handle)]
            if ending and ending[0]._is_free.wait(LAST_FILE_S):
                return False
            raise OptionError(self._refusal(os.read(self._handle, HOLDER_BYTES))) from None
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): nothing keeps another run from writing to its folder",
                self._path,
                error.strerror,
            )
            return True
        if not self._is_there(self._handle):
            return False
        self._is_mine = True
        with suppress(OSError):  # a full disk; it tells the others less
            os.ftruncate(self._handle, 0)
            os.write(self._handle, json.dumps([os.getpid(), socket.gethostname(), time.time()]).encode())
        return True

    def _is_there(self, handle: int) -> bool:
        """Whether the open file still has its name."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._path, follow_symlinks=False))
        except OSError:
            return False

    def _refusal(self, holder: bytes) -> str:
        folder = str(self._folder)
        try:
            process, host, begun_s = json.loads(holder)
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun_s))
        except (ValueError, TypeError, OverflowError):  # it is just being written, or the disk was full
            return f"checkpoint={folder!r}: a live run writes there; stop it first, or give another folder"
        if (process, host) == (os.getpid(), socket.gethostname()):
            return (
                f"checkpoint={folder!r}: a live run of this process writes there, since {since}; stop() and "
                "join() it first (flowdp.runs() lists the live ones), or give another folder"
            )
        return (
            f"checkpoint={folder!r}: a live run of process {process} on {host} writes there, since {since}; "
            "stop it first, or give another folder"
        )

    def holds(self, handle: int) -> bool:
        """Whether an open file is the one that is locked here, or was until just now."""
        own = self._handle
        if own is None:  # given back at this moment
            return True
        try:
            return os.path.samestat(os.fstat(own), os.fstat(handle))
        except OSError:  # the same
            return True

    def end(self) -> None:
        """Note that the run has ended: it releases the folder once its last file is written."""
        self._is_ending = True

    def give_back(self) -> None:
        """Let another run have the folder; a second time does nothing."""
        with _giving_back:  # or two threads could close one file, whose number may be another's by then
            handle, self._handle = self._handle, None
        if handle is None:
            _open.discard(self)
            self._is_free.set()
            return
        if self._is_mine and self._is_there(handle):
            with suppress(OSError):
                self._path.unlink()  # while it is locked, so it is no other run's
        self._is_mine = False
        os.close(handle)
        _open.discard(self)  # last: a thread that finds it here may wait for it
        self._is_free.set()


_open: set[FolderLock] = set()
_giving_back = threading.Lock()


def _close_in_child() -> None:
    global _giving_back
    _giving_back = threading.Lock()  # a thread of the parent's may have held it
    for lock in _open:
        if lock._handle is not None:
            os.close(lock._handle)
            lock._handle = None
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
