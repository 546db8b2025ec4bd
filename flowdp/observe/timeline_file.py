"""The file of a run's timeline, written at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowdp.errors import OptionError
from flowdp.observe.callbacks import Callback
from flowdp.timeline.timeline import check_path

__all__ = ["TimelineFile", "check_timeline"]


def check_timeline(timeline: object) -> bool | Path:
    """Whether a run has a timeline, or the path of its file.

    Raises:
        OptionError: Neither a bool nor the path of a .json or .html file in a folder that exists.
    """
    if isinstance(timeline, bool):
        return timeline
    path = check_path(timeline)
    if not path.absolute().parent.is_dir():
        raise OptionError(f"timeline: there is no folder {str(path.parent)!r} for {path.name!r}")
    return path


class TimelineFile(Callback):
    """Callback that writes the timeline when the run is over, failed or not.

    Args:
        path: A .json or .html file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run: Any = None

    def on_train_start(self, run: Any) -> None:
        """Keep the run."""
        self._run = run

    def on_train_end(self, _state: Any) -> None:
        """Write the file."""
        run, self._run = self._run, None
        run.timeline.save(self._path)
