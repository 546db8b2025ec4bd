"""The timeline of a run: its record in time, and the files and figures made of it."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flowdp.device.discovery import device_names, device_uuid
from flowdp.errors import OptionError
from flowdp.timeline.figure import figure_of
from flowdp.timeline.page import page_of
from flowdp.timeline.record import TimelineRecord
from flowdp.timeline.trace import trace_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Timeline", "check_path", "open_timeline"]

WRITERS = {".json": trace_of, ".html": page_of}


def check_path(path: object) -> Path:
    """The path of a file that a timeline can write.

    Raises:
        OptionError: It is none, or ends neither in .json nor in .html.
    """
    if isinstance(path, (str, PathLike)) and Path(path).suffix in WRITERS:
        return Path(path)
    raise OptionError(
        f"a timeline is saved as a trace for Perfetto, 'run.json', or as a page, 'run.html', not as {path!r}"
    )


def open_timeline(devices: Sequence[torch.device], first_rank: int, about: str) -> Timeline:
    """A timeline of the ranks of this machine, whose CUDA devices are sampled; it has not begun."""
    cards = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    uuids = {str(card): uuid for card in cards if (uuid := device_uuid(card)) is not None}
    return Timeline(device_names(devices), uuids, first_rank, about)


class Timeline(TimelineRecord):
    """Timeline of a run.

    ::

        run = Trainer(..., timeline=True).start()
        run.join()
        run.timeline.save("trace.json")  # opens in https://ui.perfetto.dev and chrome://tracing
        run.timeline.save("run.html")    # one page; opens in a browser, without network

    Of a long run neighbouring spans are merged, and rounds and samples left out, so that it is there from its
    beginning to its end.

    Threads:
        Any; while the run goes on the newest spans may be missing.
    """

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as a trace (.json, for Perfetto) or as a page (.html).

        Raises:
            OptionError: The path ends otherwise.
            OSError: The file cannot be written.
        """
        file = check_path(path)
        file.write_text(WRITERS[file.suffix](self), encoding="utf-8", errors="replace")

    def plot(self) -> Figure:
        """Draw lanes, loss and throughput with matplotlib.

        Returns:
            The figure; a notebook shows it, `figure.savefig("run.png")` writes it.

        Raises:
            OptionError: matplotlib is not installed.
        """
        return figure_of(self)
