"""A Ctrl-C at every line of `Trainer.start()`: nothing is left behind, and the same trainer starts again.

::

    python -m bench.reliability.interrupts                    every line once, for each policy
    python -m bench.reliability.interrupts --every 10         every tenth

The signal is a real one, raised before a line of flowdp's code in `start()`.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Dataset

import flowdp

__all__ = ["interrupt", "make", "places"]

ROOT = str(Path(flowdp.__file__).parent)


class _Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


class _Listener(flowdp.Callback):
    def on_epoch_end(self, metrics: flowdp.EpochMetrics) -> None:
        """A callback, so that the run starts the observer's thread."""


def make(folder: Path, **options: Any) -> flowdp.Trainer:
    """A trainer whose runs have all kinds of threads, a folder and a SIGTERM handler."""
    given: dict[str, Any] = {
        "model": torch.nn.Linear(1, 1), "optimizer": lambda params: torch.optim.SGD(params, 1e-3),
        "loss": lambda model, batch: (model(batch) - batch).square().mean(), "dataset": _Ones(),
        "per_device_batch_size": 2, "epochs": 1, "devices": 2, "policy": "sync", "evaluation": _Ones(),
        "checkpoint": folder, "resume": True, "callbacks": [_Listener()], "progress": False,
        "runtime": flowdp.RuntimeOptions(handle_sigterm=True),
    } | options  # fmt: skip
    return flowdp.Trainer(**given)


@contextmanager
def _traced(each: Callable[[FrameType], None]) -> Iterator[None]:
    """Call a function before each line of flowdp run by this thread, except in finalizers.

    A finalizer runs at any allocation, and Python drops its errors.
    """

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            each(frame)
        return local

    def enter(frame: FrameType, *_: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(ROOT) else None

    before = sys.gettrace()
    gc.disable()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


def places(trainer: flowdp.Trainer) -> list[str]:
    """Lines of flowdp in a start that resumes, in the order of their first run."""
    seen: dict[str, None] = {}
    for _ in range(2):  # the first start has nothing to resume, and creates objects that the process keeps
        seen.clear()
        with _traced(lambda frame: seen.setdefault(_place(frame))):
            run = trainer.start()
        run.stop()
        run.join()
    return list(seen)


def interrupt(trainer: flowdp.Trainer, place: str) -> list[str] | None:
    """Start, with a Ctrl-C when a line is first reached.

    Returns:
        The errors found; None if this start did not reach the line, as waits and measurements differ.

    Threads:
        The main one.
    """
    before, was_there = _process(), False

    def each(frame: FrameType) -> None:
        nonlocal was_there
        if _place(frame) == place:
            was_there = True
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    wrong, run = [], None
    with suppress(KeyboardInterrupt), _traced(each):
        run = trainer.start()
    if run is not None and not was_there:
        run.stop()
        run.join()
        return None
    if run is not None:
        wrong.append("start() returned")
    if _process() != before:
        wrong.append(f"the process was {before}, and is {_process()}")
    for run in flowdp.runs():
        wrong.append("a run is alive")
        run.stop()
        run.join()
    try:
        run = trainer.start()
        run.stop()
        run.join()
    except Exception as error:
        wrong.append(f"the trainer does not start again: {type(error).__name__}: {error}")
    return [f"a Ctrl-C at {place}: {text}" for text in wrong]


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename[len(ROOT) + 1 :]}:{frame.f_lineno}"


def _process() -> tuple[Any, ...]:
    """State of the process that a start changes."""
    return (
        sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("flowdp-")),
        signal.getsignal(signal.SIGTERM),
        signal.getsignal(signal.SIGINT),
        sys.getswitchinterval(),
        torch.get_num_threads(),
    )


def main() -> int:
    """Interrupt at each line and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th line")
    every = parser.parse_args().every
    failed = tried = missed = 0
    for policy in ("sync", "cadence", "async", "exact"):
        with tempfile.TemporaryDirectory() as name:
            trainer = make(Path(name), policy=policy, epochs=10**6)
            for place in places(trainer)[::every]:
                wrong = interrupt(trainer, place)
                tried += wrong is not None
                missed += wrong is None
                for text in wrong or ():
                    failed += 1
                    print(f"{policy}: {text}")
    print(f"{tried} interrupts, {failed} faults; {missed} starts did not reach the line")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
