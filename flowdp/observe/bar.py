"""The terminal of a run: a line that names its devices, and a progress bar, which is a callback."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from flowdp.device.discovery import devices as find_devices
from flowdp.errors import OptionError
from flowdp.observe.callbacks import Callback
from flowdp.observe.notebook import is_in_notebook
from flowdp.observe.tables import device_table, epoch_table
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import RoundEnded

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["ProgressBar", "tell", "tell_devices", "wants_progress"]

log = logging.getLogger("flowdp")

EPOCHS = 12
"""Newest epochs in the summary."""

FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
"""That of tqdm without steps per second: samples per second say it, and a line has room for the shares."""


_told: set[str] = set()


def tell_devices(devices: Iterable[torch.device], machines: Sequence[str] = ()) -> None:
    """Print the devices of a run, and those of this machine, as a line on stderr: once in a process.

    Args:
        devices: One per rank.
        machines: Names of all machines, where there are several; the devices are those of the first.
    """
    ranks = Counter(map(str, devices))
    chosen = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in ranks.items())
    if machines:
        chosen += f" of {machines[0]}, one of {len(machines)}"
    line = f"flowdp: training on {chosen} | {find_devices(probe=False)}"
    if line in _told or sys.stderr is None:
        return
    _told.add(line)
    print(line, file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Print a line of a run on stderr where the log, which has it as INFO, does not show it."""
    if not log.isEnabledFor(logging.INFO) and sys.stderr is not None:
        print(f"flowdp: {line}", file=sys.stderr, flush=True)


def wants_progress(progress: bool | Literal["auto"]) -> bool:
    """Whether to draw the bar; "auto": where tqdm is installed and the output is seen.

    Raises:
        OptionError: Neither a bool nor "auto", or True without tqdm.
    """
    if not isinstance(progress, bool) and progress != "auto":
        raise OptionError(f"progress must be True, False or 'auto', not {progress!r}")
    has_tqdm = find_spec("tqdm") is not None
    if progress is True and not has_tqdm:
        raise OptionError("progress=True needs tqdm: pip install 'flowdp[progress]'")
    return bool(progress) and has_tqdm and (progress is True or _is_watched())


def _is_watched() -> bool:
    return is_in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


class ProgressBar(Callback):
    """Progress bar of a run: epoch, loss, samples per second, shares; at its end, tables.

    It steps aside for the callbacks that are called after it, and for `aside` blocks.

    Args:
        total_steps: Steps of all ranks in the run; None where unknown.
        batches: Steps of all ranks in an epoch; None where unknown.
        start: Steps that were behind a resumed run when it began.
    """

    def __init__(self, total_steps: int | None, batches: int | None, start: int = 0) -> None:
        self._total_steps = total_steps
        self._start = start
        self._epochs = "" if total_steps is None or batches is None else f"/{-(-total_steps // batches)}"
        self._lock = threading.Lock()  # serialises the state below, and drawing
        self._bar: tqdm[NoReturn] | None = None
        self._inside = 0  # blocks for which it steps aside
        self._is_over = False
        self._tables = ""  # printed at the end
        self._run: Any = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the terminal's line to output printed in this block.

        Threads:
            Any. The observer's does not wait for the block: it goes on, and draws nothing.
        """
        with self._lock:
            self._inside += 1
            if self._bar is not None:
                self._bar.clear()
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._is_over:
                    self._close()
                elif self._bar is not None and not self._inside:
                    self._bar.refresh()

    def on_train_start(self, run: Any) -> None:
        """Draw it, empty."""
        from tqdm.auto import tqdm  # an extra, and slow to import: only where a bar is drawn

        self._run = run
        with self._lock:
            # With a fixed `miniters` tqdm's monitor thread never draws it by itself.
            self._bar = tqdm(
                total=self._total_steps,
                initial=self._start,
                unit="step",
                dynamic_ncols=True,
                miniters=1,
                bar_format=None if self._total_steps is None else FORMAT,
            )
            if self._inside:
                self._bar.clear()

    def on_round(self, record: RoundEnded) -> None:
        """Move it to the end of this round; tqdm draws it ten times a second at most."""
        with self._lock:
            if self._bar is None:
                return
            self._bar.set_description(f"epoch {record.epoch + 1}{self._epochs}", refresh=False)
            self._bar.set_postfix(_postfix(record), refresh=False)
            if self._inside:
                self._bar.n = record.global_step
            else:
                self._bar.update(record.global_step - self._bar.n)

    def on_epoch_end(self, _metrics: EpochMetrics) -> None:
        """Leave the line to the callbacks that are called next; a round draws it again."""
        self._clear()

    def on_checkpoint(self, _checkpoint: Any) -> None:
        """See `on_epoch_end`."""
        self._clear()

    def on_train_end(self, state: Any) -> None:
        """Leave the last drawing where it is, and print tables of a run that has not failed."""
        run, self._run = self._run, None
        with self._lock:
            self._is_over = True
            if state is not None and run is not None:
                report, history = run.report(), run.history
                tables = [epoch_table(history, EPOCHS), device_table(report)] if report.ideal else []
                shown = [str(table) for table in tables if table.rows]
                self._tables = "\n\n".join([*shown, report.headline] if shown else [])
            self._close()

    def _clear(self) -> None:
        with self._lock:
            if self._bar is not None and not self._inside:
                self._bar.clear()

    def _close(self) -> None:
        if self._bar is not None and not self._inside:
            self._bar.close()
            self._bar = None
            if sys.stderr is not None and self._tables:
                print(self._tables, file=sys.stderr)


def _postfix(record: RoundEnded) -> dict[str, str]:
    samples = sum(record.samples)
    share = " ".join(f"{100 * count / max(1, samples):.0f} %" for count in record.samples)
    rate = samples / record.wall_ms * 1e3 if record.wall_ms > 0 else 0.0
    shown = {} if record.loss is None else {"loss": f"{record.loss:.3f}"}
    return shown | {"samples/s": f"{rate:,.0f}", "share": share}
