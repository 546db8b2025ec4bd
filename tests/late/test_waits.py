"""Waits of hosts that leave a device without work, on devices that are late."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp.engine.meter import Meter
from tests.late.device import LateCuda, Mark
from tests.late.doors import EXACT, trainer_of
from tests.late.install import installed
from tests.late.runs import loss_of


class WatchedCuda(LateCuda):
    """A machine that counts the waits of workers for the last work on a stream.

    Attributes:
        count: Such waits of ranks that have orders: without any, a rank has nothing to do in any case.
    """

    def __init__(self, devices: int) -> None:
        super().__init__(devices)
        self.count = 0
        self.is_idle = threading.local()

    def demand(self, mark: Mark) -> None:
        """See `LateCuda.demand`."""
        is_worker = threading.current_thread().name.startswith("flowdp-worker")
        is_waiting = is_worker and not mark.is_passed and not getattr(self.is_idle, "here", False)
        with self.lock:
            behind = takewhile(lambda entry: entry is not mark, reversed(mark.stream.queue))
            if is_waiting and not any(map(callable, behind)):
                self.count += 1
        super().demand(mark)


def waits_of(
    monkeypatch: pytest.MonkeyPatch, devices: Sequence[int] = (0, 1), backend: str = "local", **options: Any
) -> int:
    """Waits in a run."""
    cuda, settle = WatchedCuda(2), Meter.settle

    def settled(meter: Meter) -> None:
        cuda.is_idle.here = True
        settle(meter)
        cuda.is_idle.here = False

    monkeypatch.setattr(Meter, "settle", settled)
    runtime = flowdp.RuntimeOptions(partition_ratios=(0.5, 0.5), backend=backend)  # type: ignore[arg-type]
    given = {**EXACT, "runtime": runtime, "failures": flowdp.FailureOptions(check_loss=False), **options}
    with installed(cuda):
        trainer_of(devices, **given).start().join()
    return cuda.count


def weighted(module: nn.Module, batch: Any) -> dict[str, Any]:
    """A loss that names its weight, which lies on the device."""
    return {"loss": loss_of(module, *batch), "weight": batch[0][:, 1].sum()}


def weighted_by_one(module: nn.Module, batch: Any) -> Any:
    """The same on the first rank; the loss of the other names none."""
    return (weighted if flowdp.current_worker().rank == 0 else plain)(module, batch)


def plain(module: nn.Module, batch: Any) -> Tensor:
    return loss_of(module, *batch)


@pytest.mark.parametrize(
    ("backend", "devices", "options"),
    [
        ("local", (0, 0), {}),
        ("local", (0, 1), {"max_grad_norm": 0.1}),
        ("nccl", (0, 1), {"max_grad_norm": 0.1}),
        ("nccl", (0, 1), {"max_grad_value": 0.1}),
        ("local", (0, 0), {"loss": weighted}),
        ("nccl", (0, 1), {"loss": weighted}),
        ("local", (0, 1), {"optimizer": lambda params: torch.optim.RMSprop(params, 0.01)}),
    ],
)
def test_under_exact_no_host_waits_for_work_of_its_own_window(
    backend: str, devices: Sequence[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waits_of(monkeypatch, devices, backend, **options) == 0


def test_one_host_waits_where_a_step_depends_on_the_ranks_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the gradients are divided by a weight, as the losses of one rank alone name one."""
    windows = 2 * 11
    assert waits_of(monkeypatch, loss=weighted_by_one) == windows
