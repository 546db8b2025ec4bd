"""Machines that are killed or frozen in the middle of a run, and the run that goes on.

Processes of torchrun jobs are killed at random moments; torchrun starts all again, and they resume. The model
counts in an integer buffer how often each sample was trained in each epoch; of such a buffer the mean takes
the largest, so batches that were lost with a process are not in it. As a module, this is one machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from tests.limits import HANG_S
from tests.machines.agents import Agents
from tests.machines.launch import Job, Record, await_release, report

SAMPLES, BATCH, EPOCHS, DEVICES = 401, 4, 4, 2
EVERY = 25
STEPS = EPOCHS * -(-SAMPLES // BATCH)
LATE = STEPS - 40
"""Step from which on a job waits until its test has killed all that it wants to kill."""

FROZEN_TIMEOUT_S = 3.0
KILLED_TIMEOUT_S = 2 * HANG_S
"""Longer than a job waits: a killed machine has to be noticed by its connections, not by its silence."""

POLICIES = ("exact", "sync", "cadence")
HOLDS = (100, STEPS // 2)
"""Steps at which the jobs of `resized` hold until they are ended: the first one, and the machine alone."""

LOOP = "setup"
"""The worker of `loop`, which has no links: only its sums notice that a machine is gone."""


class Counting(nn.Module):
    """A layer, and a count for each sample of each epoch, of shape (EPOCHS, SAMPLES)."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(EPOCHS, SAMPLES, dtype=torch.int64))

    def forward(self, numbers: Tensor, x: Tensor) -> Tensor:
        worker = flowdp.current_worker()
        if worker is not None:  # none where the loss is compared with those of its parts
            self.seen[worker.epoch, numbers] += 1
        out: Tensor = self.layer(x)
        return out


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    numbers, x = batch
    worker = flowdp.current_worker()
    if worker is not None and worker.global_step >= LATE:
        await_release()
    if _holds_at is not None and worker.global_step >= _holds_at:
        threading.Event().wait()
    return nn.functional.mse_loss(model(numbers, x), x.sum(1, keepdim=True))


_holds_at: int | None = None


def hold() -> None:
    """Let this process hold in the middle of its training, but for the last job of `resized`."""
    global _holds_at
    was_alone, is_alone = Path(os.environ["FLOWDP_TEST_FOLDER"], "alone"), os.environ["WORLD_SIZE"] == "1"
    if is_alone or not was_alone.exists():
        _holds_at = HOLDS[is_alone]
    if is_alone:
        was_alone.touch()


def trainer_of(policy: Any, timeout_s: float, chosen: Any = None, batch: int = BATCH) -> flowdp.Trainer:
    """A Trainer that goes on from the newest checkpoint of the job; with another loss or batch, if given."""
    folder = Path(os.environ["FLOWDP_TEST_FOLDER"], "checkpoints")
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"machines": flowdp.MachineOptions(timeout=timeout_s)}
    options["batch_size" if policy == "exact" else "per_device_batch_size"] = batch
    if policy == "cadence":
        options["cadence"] = flowdp.CadenceOptions(anchor=3, max_anchor=5)
        options["machines"] = flowdp.MachineOptions(timeout=timeout_s, rounds=3)
    return flowdp.Trainer(
        Counting(),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        chosen or loss,
        dataset=(torch.arange(SAMPLES), torch.randn(SAMPLES, 4, generator=draw)),
        epochs=EPOCHS,
        devices=["cpu"] * DEVICES,
        policy=policy,
        checkpoint=flowdp.CheckpointOptions(folder, every=EVERY, unit="step"),
        resume=True,
        failures=flowdp.FailureOptions(check_loss=False),
        progress=False,
        **options,
    )


def worker(policy: Any, timeout_s: float) -> None:
    """Train from the newest checkpoint to the end, and report rounds, and what the model has counted."""
    trainer = trainer_of(policy, timeout_s)
    run = trainer.start()
    report("started", step=run.start_step, machines=int(os.environ["WORLD_SIZE"]))
    try:
        for record in run.metrics(10):
            report("step", step=record.global_step, machines=int(os.environ["WORLD_SIZE"]))
        state = run.join()
    except flowdp.FlowdpError as error:
        _report_failure(error)
        raise
    counts = state.state_dict["seen"]
    report(
        "trained",
        steps=state.global_step,
        epochs=state.epochs_done,
        samples=[sum(one.samples for one in epoch.per_rank) for epoch in state.history],
        complete=[epoch.is_complete for epoch in state.history],
        wrong=[[int(epoch), int(sample)] for epoch, sample in (counts != 1).nonzero()[:20]],
    )


def loop(timeout_s: float) -> None:
    """Train in a loop of one's own, without an end, and report steps."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data, BATCH)
    machines = flowdp.MachineOptions(timeout=timeout_s)
    with flowdp.setup(model, optimizer, devices=["cpu"] * DEVICES, machines=machines) as parallel:
        report("started", step=0)
        step = 0
        try:
            while True:
                for inputs, targets in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(parallel(inputs), targets).backward()
                    optimizer.step()
                    step += 1
                    if step % 10 == 0:
                        report("step", step=step)
        except flowdp.FlowdpError as error:
            _report_failure(error)
            raise


def _report_failure(error: flowdp.FlowdpError) -> None:
    report("failed", kind=type(error).__name__, text=str(error)[:500])


# ---------------------------------------------------------------- the jobs
def killed(policy: str, kills: int, draw: random.Random) -> None:
    """Kill processes of a job, one after another, and check what its last life has trained."""
    with Job("tests.machines.kills", "--worker", policy, restarts=kills, waits=True) as job:
        begun = job.wait_for("started", 2)
        for life in range(kills):
            # Each life gets further than the one before, and dies before the run is over.
            step = (life + 1) * 100 + draw.randrange(80)
            victim = draw.randrange(2)
            job.wait_for("step", 1, partial(_has_come, life, step))
            os.kill(next(one["pid"] for one in begun if one["machine"] == victim), signal.SIGKILL)
            at = time.monotonic()
            begun = job.wait_for("started", 2, partial(_has_come, life + 1, 0))
            took_s = max(one["at"] for one in begun) - at
            resumed = {one["step"] for one in begun}
            print(
                f"{policy}: machine {victim} killed at step {step}; {took_s:.1f} s later all go on, {resumed}"
            )
            assert len(resumed) == 1
            assert resumed.pop() > 0, "nothing was resumed"
        job.release()
        job.ended()
        check_end(job.wait_for("trained", 2))


def _has_come(life: int, step: int, one: Record) -> bool:
    return bool(one["life"] == life and one["step"] >= step)


def check_end(both: Sequence[Record]) -> None:
    """Check that all epochs are complete, and that each sample was trained once in each."""
    assert {one["machine"] for one in both} == {0, 1}
    for one in both:
        assert one["wrong"] == []
        assert one["samples"] == [SAMPLES] * EPOCHS
        assert one["complete"] == [True] * EPOCHS
        assert (one["steps"], one["epochs"]) == (STEPS, EPOCHS)


def resized(policy: str) -> None:
    """Kill one of two machines with its torchrun, and start another one: the job shrinks, and grows again."""
    with Agents("tests.machines.kills", "--worker", policy, "--holds") as job:
        job.add_agent()
        both = job.wait_for("started", 2)
        assert {one["machines"] for one in both} == {2}
        job.wait_for("step", 1, lambda one: one["step"] >= HOLDS[0] // 2)
        job.kill(1)  # the first one keeps the rendezvous
        (alone,) = job.wait_for("started", 1, lambda one: one["machines"] == 1)
        assert 0 < alone["step"] <= HOLDS[0]
        job.wait_for("step", 1, lambda one: one["machines"] == 1 and one["step"] >= HOLDS[1] - 50)
        job.add_agent()
        again = job.wait_for("started", 4, lambda one: one["machines"] == 2)[2:]
        assert alone["step"] <= again[0]["step"] == again[1]["step"] < STEPS
        job.ended()
        check_end(job.wait_for("trained", 2))


def lost(number: signal.Signals, victim: int, step: int, worker: str = "sync") -> None:
    """Kill or freeze a process that no launcher watches: the other one has an error, and ends.

    Args:
        number: The signal.
        victim: The machine.
        step: Step of any machine, from which on it happens.
        worker: A policy, or `LOOP`.
    """
    timeout_s = FROZEN_TIMEOUT_S if number == signal.SIGSTOP else KILLED_TIMEOUT_S
    arguments = ("--worker", worker, "--timeout", timeout_s)
    with Job("tests.machines.kills", *arguments, waits=True) as job:
        begun = job.wait_for("started", 2)
        job.wait_for("step", 1, lambda one: one["step"] >= step)
        os.kill(next(one["pid"] for one in begun if one["machine"] == victim), number)
        job.release()
        job.wait_end(1 - victim)
        (failed,) = job.wait_for("failed", 1, lambda one: one["machine"] != victim)
        assert failed["kind"] == "MachineLostError", failed
        assert "lost" in failed["text"], failed
        assert "has not left yet" not in job.output()  # no thread was left in a call that does not end


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as one machine of a job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worker", choices=(*POLICIES, LOOP), required=True)
    parser.add_argument("--timeout", type=float, default=KILLED_TIMEOUT_S)
    parser.add_argument("--holds", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.holds:
        hold()
    if given.worker == LOOP:
        loop(given.timeout)
    else:
        worker(given.worker, given.timeout)


if __name__ == "__main__":
    main()
