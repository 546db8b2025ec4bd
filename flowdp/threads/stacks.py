"""Python stacks of a run's threads, for a stalled run and for `Run.dump()`."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable

__all__ = ["stacks"]


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
