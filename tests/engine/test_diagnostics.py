"""Tests of the status of ranks, as seen by another thread."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp.engine.diagnostics import Diagnostics
from flowdp.machine.worker import Step
from flowdp.protocol.messages import Arrival
from flowdp.threads.gate import Gate
from tests.limits import HANG_S


def worker(rank: int, **seen: Any) -> Any:
    """The part of a worker that is read: an idle one by default."""
    shown = {"has_left": False, "awaited": None, "task": "", "moves": 0, "longest_ms": 0.0}
    activity = {name: seen.pop(name, value) for name, value in shown.items()}
    return SimpleNamespace(
        parts=SimpleNamespace(rank=rank),
        replica=SimpleNamespace(steps_at_gate=False),
        step=seen.pop("step", None),
        current=SimpleNamespace(local_step=seen.pop("local_step", 0), device="cpu"),
        machine=SimpleNamespace(throttled=seen.pop("throttled", None)),
        activity=SimpleNamespace(**activity),
    )


class Named:
    """Stands for the source."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def indices(self, epoch: int, batch: int) -> tuple[int, ...]:
        return tuple(range(100 * batch, 100 * batch + self.samples))

    def waits_for(self) -> str:
        return ""


def diagnostics(*workers: Any, gate: Gate | None = None, samples: int = 4) -> Diagnostics:
    source: Any = Named(samples)
    return Diagnostics(
        workers,
        gate or Gate(len(workers)),
        [source],
        lambda n: ["e"] * n,
    )


STEP = Step(2, (7,), 9)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate in which rank 0 of 2 waits."""
    made = Gate(2)

    def enter() -> None:
        with pytest.raises(flowdp.CollectiveError):
            made.enter(Arrival(0, 3, 0, 1, 4))

    thread = threading.Thread(target=enter)
    thread.start()
    while not made.waiting():
        threading.Event().wait(0.001)
    yield made
    made.abort("the test is over")
    thread.join(HANG_S)


def test_who_waits_in_the_gate_has_started(gate: Gate) -> None:
    seen = diagnostics(worker(0, step=STEP), worker(1, step=STEP), gate=gate)
    assert seen.report("", ()).ranks[0] == "at the gate in round 3, waiting for ranks 1"
    assert not seen.all_signs().has_started
    assert diagnostics(worker(0, step=STEP), worker(1), gate=gate).all_signs().has_started


@pytest.mark.parametrize(
    ("rank", "started"),
    [
        ({"step": STEP}, False),  # in its first step
        ({"awaited": (0, 0)}, False),
        ({"step": STEP, "local_step": 1}, True),
        ({"awaited": (0, 0), "local_step": 1}, True),
        ({}, True),  # it has nothing to do
        ({"task": "evaluates"}, True),
    ],
)
def test_a_stall_before_the_first_step_has_ended_is_told_apart(rank: dict[str, Any], started: bool) -> None:
    assert diagnostics(worker(0, local_step=5), worker(1, **rank)).all_signs().has_started == started


def test_a_report_and_a_stall_tell_all_that_is_known() -> None:
    seen = diagnostics(worker(0), worker(1, step=STEP))
    text = str(seen.report("the headline", [threading.current_thread()], events=2))
    assert text.startswith("the headline\n  rank 0: idle\n  rank 1: in a step")
    assert "test_a_report_and_a_stall_tell_all_that_is_known" in text
    assert text.endswith("The last events:\n  e\n  e")
    error = seen.stall_error(12.0, [threading.current_thread()])
    assert error.ranks == ("idle", "in a step (epoch 3, batch 8)")
    assert set(error.stacks) == {threading.current_thread().name}
    assert "nothing has moved for 12.0 s" in str(error)


def test_the_stack_of_a_run_that_hangs_is_that_of_the_users_line() -> None:
    inside, opened = threading.Event(), threading.Event()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inside.set()
        assert opened.wait(HANG_S)  # the hanging line
        return model(batch).mean()

    run = flowdp.Trainer(
        nn.Linear(1, 1), lambda p: torch.optim.SGD(p, 1e-3), loss, policy="cadence",
        dataset=torch.ones(8, 1), per_device_batch_size=2,
        epochs=1, devices=2, progress=False,
    ).start()  # fmt: skip
    try:
        assert inside.wait(HANG_S)
        text = run.dump()
    finally:
        opened.set()
        run.join(HANG_S)
    assert "# the hanging line" in text
    assert "in a step (epoch 1, batch" in text
    assert "flowdp-coordinator is here:" in text
    assert "StartEpoch" in text


class Hangs(torch.utils.data.Dataset[Tensor]):
    """A dataset with one sample that hangs until it is released."""

    def __init__(self, sample: int, opened: Any) -> None:
        self.sample, self.opened = sample, opened

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == self.sample:
            self.opened.wait(HANG_S)
        return torch.ones(1)


def stalled(**options: Any) -> flowdp.StallError:
    run = flowdp.Trainer(
        nn.Linear(1, 1),
        lambda p: torch.optim.SGD(p, 1e-3),
        lambda model, batch: model(batch).mean(),
        epochs=1,
        devices=2,
        policy="sync",
        failures=flowdp.FailureOptions(stall_timeout=3.0),
        progress=False,
        **options,
    ).start()
    with pytest.raises(flowdp.StallError) as caught:
        run.join()
    return caught.value


@pytest.mark.posix
def test_a_stall_names_the_process_that_does_not_deliver() -> None:
    opened = multiprocessing.get_context("fork").Event()
    loader = torch.utils.data.DataLoader(
        Hangs(31, opened), 4, num_workers=2, multiprocessing_context="fork", prefetch_factor=1
    )
    error = stalled(dataset=loader)
    assert "waiting for data: batch " in " ".join(error.ranks)
    found = re.search(
        r"reader: waiting for DataLoader worker (\d) \(process (\d+)\) to read batch 16 of epoch 1",
        str(error),
    )
    assert found is not None
    assert found[1] == "1"  # the two get batches in turn
    assert int(found[2]) != os.getpid()
