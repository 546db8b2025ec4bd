"""Order of one run for a side's program: the task and its size, in; the time of each step, out.

A side writes its training loop as its documentation does, and takes model, data and loss from here. The loss
notes when it is called, so all sides are timed by the same code and no side needs a barrier for it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from bench.peers.tasks import TASKS, Task

__all__ = ["FAILURE", "VARIABLE", "Job", "Order", "first_device"]

FAILURE = "the device does not answer"
VARIABLE = "FLOWDP_BENCH_ORDER"  # torchrun and Lightning hand the environment on to their processes

_marks: list[tuple[int, float, int]] = []
_calls = itertools.count(1)


@dataclass(frozen=True)
class Order:
    """Run that a program is to make.

    Attributes:
        model: Name of the task.
        devices: CPU devices of one thread.
        steps: Steps of each device.
        folder: Folder for the times of the steps, a file per process.
        wait_us: Wait of device 1 for each of its samples: it is slower by that.
        fails_at: Step of device 1 that raises; 0: none.
        variant: Policy of the Trainer; empty for other sides.
    """

    model: str
    devices: int
    steps: int
    folder: str
    wait_us: float = 0.0
    fails_at: int = 0
    variant: str = ""

    def environment(self) -> dict[str, str]:
        """Environment variable that brings it to the program."""
        return {VARIABLE: json.dumps(asdict(self))}


class Job:
    """The run of this process, from its environment."""

    def __init__(self) -> None:
        self.order = Order(**json.loads(os.environ[VARIABLE]))
        self.task: Task = TASKS[self.order.model]
        self.devices = self.order.devices
        self.steps = self.order.steps
        self.batch_size = self.task.batch_size
        atexit.register(_write_marks, Path(self.order.folder))

    def dataset(self) -> Dataset[Any]:
        """Dataset of the task."""
        return self.task.dataset()

    def loader(self, sampler: Sampler[int] | None = None, *, processes: int = 1) -> DataLoader[Any]:
        """DataLoader for one of so many processes, whose batches together have `batch_size` a device."""
        size = self.batch_size * self.devices // processes
        return DataLoader(self.dataset(), size, shuffle=sampler is None, sampler=sampler, drop_last=True)

    def model(self, rank: Callable[[], int]) -> nn.Module:
        """Model of the task; where device 1 is to be slow or to fail, inside a module that does that there.

        Args:
            rank: Index of the device, from the thread that runs forward.
        """
        model = self.task.model()
        return Troubled(model, rank, self.order) if self.order.wait_us or self.order.fails_at else model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Loss of the task; notes the time and the number of samples."""
        _marks.append((threading.get_ident(), time.monotonic(), len(batch[0])))
        return self.task.loss(model, batch)


class Troubled(nn.Module):
    """A model whose forward on device 1 waits for a time per sample, or raises at a given step."""

    def __init__(self, model: nn.Module, rank: Callable[[], int], order: Order) -> None:
        super().__init__()
        self.model, self.rank, self.order = model, rank, order

    def forward(self, x: Tensor) -> Any:
        if self.rank() == 1:
            if self.order.fails_at and next(_calls) == self.order.fails_at:
                Path(self.order.folder, "raised").write_text(repr(time.monotonic()))
                raise RuntimeError(FAILURE)
            if self.order.wait_us:
                time.sleep(self.order.wait_us * len(x) / 1e6)
        return self.model(x)


def first_device() -> int:
    """Index of the only device."""
    return 0


def _write_marks(folder: Path) -> None:
    """Write the times of this process's steps at its end."""
    if _marks and folder.is_dir():
        (folder / f"marks-{os.getpid()}.json").write_text(json.dumps(_marks))
