"""Python stacks of a run's threads, for a stalled run and for `Run.dump()`, and those of a user's errors."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from flowdp.errors import FlowdpError, ProtocolError

__all__ = ["Folding", "folded", "is_own", "stacks"]

E = TypeVar("E", bound=BaseException)

OWN = str(Path(__file__).parents[1])
TORCH = (str(Path("site-packages", "torch")), str(Path("dist-packages", "torch")))
"""Parts of the paths of torch's files."""


def stacks(threads: Iterable[threading.Thread]) -> dict[str, str]:
    """The Python stack of each thread that is alive, by its name: outermost call first.

    Threads:
        Any. The threads run on meanwhile, so each stack is of a moment of its own.
    """
    wanted = list(threads)
    idents = {thread.ident for thread in wanted}
    # Frames keep their locals alive. No name may hold them here: this frame is one of them, and would keep
    # them all until the garbage collector comes.
    texts = {
        ident: "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident in idents
    }
    found: dict[str, str] = {}
    for thread in wanted:
        text = texts.get(thread.ident or -1)
        if text is not None and thread.is_alive():  # an ident is given again once its thread has ended
            found[thread.name if thread.name not in found else f"{thread.name} ({thread.ident})"] = text
    return found


def folded(error: E) -> E:
    """Return a user's error without the frames of flowdp and torch that have called the user's code.

    Its traceback begins with the user's first frame; without one with torch's, and without that it stays.
    """
    for callers in ((OWN, *TORCH), (OWN,)):
        trace = error.__traceback__
        while trace is not None and any(part in trace.tb_frame.f_code.co_filename for part in callers):
            trace = trace.tb_next
        if trace is not None:
            return error.with_traceback(trace)
    return error


def is_own(error: BaseException) -> bool:
    """Whether flowdp itself has raised an error: neither the user's code nor torch."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(OWN)


class Folding:
    """Context that leaves its frame and those below out of the traceback of a run's error.

    They say nothing: the cause has the user's frames. A bug of flowdp keeps them.

    Args:
        also: Another exception that is raised below by no code of the user's.
    """

    def __init__(self, also: type[BaseException] = FlowdpError) -> None:
        self._kinds = FlowdpError, also

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._kinds) and not isinstance(error, ProtocolError):
            error.__traceback__ = None
