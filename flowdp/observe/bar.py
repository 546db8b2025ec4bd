"""A progress bar: one thread that reads the records and draws."""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec
from typing import Literal

from flowdp.engine.records import Records
from flowdp.errors import OptionError
from flowdp.machine.commands import RoundEnded

__all__ = ["show_progress", "wants_progress"]


def wants_progress(progress: bool | Literal["auto"]) -> bool:
    """Whether to draw: "auto" where tqdm is installed and somebody may be looking.

    Raises:
        OptionError: Neither a bool nor "auto", or True without tqdm.
    """
    if progress not in (True, False, "auto"):
        raise OptionError(f"progress must be True, False or 'auto', not {progress!r}")
    has_tqdm = find_spec("tqdm") is not None
    if progress is True and not has_tqdm:
        raise OptionError("progress=True needs tqdm: pip install 'flowdp[progress]'")
    return bool(progress) and has_tqdm and (progress is True or _is_watched())


def _is_watched() -> bool:
    in_notebook = "ipykernel" in sys.modules
    return in_notebook or (sys.stderr is not None and sys.stderr.isatty())


def show_progress(records: Records, total_steps: int | None, batches: int | None) -> threading.Thread:
    """Draw until the run ends.

    Args:
        records: Of the run.
        total_steps: Steps of all ranks in the run; None where nobody knows.
        batches: Steps of all ranks in an epoch; None where nobody knows.
    """
    thread = threading.Thread(
        target=_draw, args=(records, total_steps, batches), name="flowdp-progress", daemon=True
    )
    thread.start()
    return thread


def _draw(records: Records, total_steps: int | None, batches: int | None) -> None:
    from tqdm.auto import tqdm  # an extra, and slow to import: only for those who draw

    of_all = "" if total_steps is None or batches is None else f"/{-(-total_steps // batches)}"
    with tqdm(total=total_steps, unit="step", dynamic_ncols=True) as bar:
        for record in records.round_records():
            bar.set_description(f"epoch {record.epoch + 1}{of_all}", refresh=False)
            bar.set_postfix(_postfix(record), refresh=False)
            bar.update(record.global_step - bar.n)


def _postfix(record: RoundEnded) -> dict[str, str]:
    samples = sum(record.samples)
    share = " ".join(f"{100 * count / max(1, samples):.0f} %" for count in record.samples)
    rate = samples / record.wall_ms * 1e3 if record.wall_ms > 0 else 0.0
    return {"loss": f"{record.loss:.3f}", "samples/s": f"{rate:,.0f}", "share": share}
