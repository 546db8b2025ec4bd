"""Machines that are killed, fail and come during `run_elastic`, and the others, which train on as they are.

::

    python -m tests.machines.elastic --times 20

kills machines of jobs, at random moments, and prints how soon the others train again. The model counts as in
`kills`. `--worker` is the script itself; its machines are numbered by `RANK`, whatever rank they have later.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flowdp
from tests.limits import HANG_S
from tests.machines.kills import (
    BATCH,
    EPOCHS,
    POLICIES,
    SAMPLES,
    STEPS,
    loss,
    trainer_of,
)
from tests.machines.launch import Job, Record, report

HEARTBEAT_S = 2.0
"""Seconds without a heartbeat after which the lighthouse counts a machine as dead."""

BROKEN_STEP = 3
BROKEN_BATCH = 60
"""Samples of a batch of which each device has a part, as yet, so that the machine that fails has one."""

HELD_STEP = 40

HELD: list[int] = []
"""Sizes of the worlds in which this process was held."""

TIMEOUT_S = 4.0
"""Timeout of a run whose machine is frozen."""

WORKERS = ("train", "held", "frozen", "fails")


def worker(kind: str, count: int, policy: Any) -> None:
    """Train as a machine of a job, and report each life, its steps, and what the model has counted."""
    place, lives = int(os.environ["RANK"]), itertools.count()
    folder = Path(os.environ["FLOWDP_TEST_FOLDER"])

    def train() -> flowdp.TrainedState:
        life = next(lives)
        timeout_s = TIMEOUT_S if kind == "frozen" else 2 * HANG_S
        batch = BROKEN_BATCH if kind == "fails" else BATCH
        trainer = trainer_of(policy, timeout_s, partial(_loss, kind, place, folder), batch)
        run = trainer.start()
        report("started", life=life, step=run.start_step, rank=dist.get_rank(), count=dist.get_world_size())
        for record in run.metrics(10):
            report("step", life=life, step=record.global_step)
        return run.join()

    try:
        state = flowdp.run_elastic(train, start_machines=count, host="127.0.0.1", timeout=HANG_S)
    except flowdp.FlowdpError as error:
        report("failed", kind=type(error).__name__, text=str(error)[:500], lives=next(lives))
        raise
    report(
        "trained",
        lives=next(lives),
        steps=state.global_step,
        samples=[sum(one.samples for one in epoch.per_rank) for epoch in state.history],
        complete=[epoch.is_complete for epoch in state.history],
        wrong=[[int(epoch), int(sample)] for epoch, sample in (state.state_dict["seen"] != 1).nonzero()[:20]],
        has_group=dist.is_initialized(),
    )


def _loss(kind: str, place: int, folder: Path, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    worker = flowdp.current_worker()
    assert worker is not None
    if kind == "fails" and place == 1 and worker.global_step >= BROKEN_STEP:
        raise ValueError("this sample is broken")
    if kind == "held" and worker.rank == 0 and worker.global_step >= HELD_STEP and not HELD:
        HELD.append(dist.get_world_size())
        (folder / "gate").open().close()  # a named pipe: until the test opens its other end
    return loss(model, batch)


# ---------------------------------------------------------------- the jobs
class ElasticJob(Job):
    """Machines of one job, each by itself, and a lighthouse.

    Args:
        kind: Work of each machine, of `WORKERS`.
        machines: How many begin.
        policy: Averaging policy.
        waits: As `Job`.
    """

    def __init__(
        self, kind: str = "train", machines: int = 3, policy: str = "exact", *, waits: bool = False
    ) -> None:
        from torchft.coordination import LighthouseServer

        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=60_000,  # as the program torchft_lighthouse has it
            heartbeat_timeout_ms=int(HEARTBEAT_S * 1e3),
        )
        port = self._lighthouse.address().rpartition(":")[2]
        self._is_held = kind == "held"
        super().__init__(
            "tests.machines.elastic",
            *("--worker", kind, "--machines", machines, "--policy", policy),
            processes=machines,
            waits=waits,
            environment={"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"},
        )

    def _start(self) -> None:
        if self._is_held:
            os.mkfifo(self.folder / "gate")
        super()._start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._lighthouse.shutdown()

    def places(self) -> list[dict[str, str]]:
        """Environment of each process; `run_elastic` finds the others by itself."""
        return [{"RANK": str(place)} for place in range(self.count)]

    def started(self, count: int, life: int | None = None) -> dict[int, Record]:
        """Wait until a world of so many machines trains; returns the starts, by machine.

        Args:
            count: Machines in the world.
            life: Number of the world in each process, from 0; None: any.
        """
        records = self.wait_for(
            "started", count, lambda one: one["count"] == count and life in (None, one["life"])
        )
        return {one["machine"]: one for one in records}

    def kill(self, victim: Record) -> float:
        """Kill a machine; returns the time, on `time.monotonic`."""
        os.kill(victim["pid"], signal.SIGKILL)
        return time.monotonic()


def killed(leads: bool, draw: random.Random, policy: str = "exact") -> tuple[float, float]:
    """Kill machine 0, or one of the others, of three, and check what the two others have trained.

    Returns:
        Seconds until both had started again, and until they had trained ten steps.
    """
    with ElasticJob(policy=policy, waits=True) as job:
        begun = job.started(3, 0)
        step = 100 + draw.randrange(200)
        job.wait_for("step", 3, lambda one: one["step"] >= step)
        victim = next(one for one in begun.values() if (one["rank"] == 0) is leads)
        at = job.kill(victim)
        job.release()
        again = job.started(2, 1)
        assert {one["pid"] for one in again.values()} == {
            one["pid"] for one in begun.values() if one is not victim
        }
        assert all(one["step"] > 0 for one in again.values())  # the run was resumed
        steps = job.wait_for("step", 2, lambda one: one["life"] == 1)
        check_end(job.wait_for("trained", 2), lives=2)
        return max(one["at"] for one in again.values()) - at, max(one["at"] for one in steps[:2]) - at


def check_end(trained: Sequence[Record], lives: int | None = None) -> None:
    """Check that all epochs are complete, and that each sample was trained once in each."""
    for one in trained:
        assert one["wrong"] == []
        assert one["samples"] == [SAMPLES] * EPOCHS
        assert one["complete"] == [True] * EPOCHS
        assert one["steps"] == STEPS
        assert lives in (None, one["lives"])
        assert not one["has_group"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as one machine, or start jobs and kill their machines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="number of kills (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (%(default)s)")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--machines", type=int, default=3, help=argparse.SUPPRESS)
    parser.add_argument("--policy", choices=POLICIES, help="policy of all jobs; default: each in turn")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.worker:
        worker(given.worker, given.machines, given.policy)
        return 0
    draw, found = random.Random(given.seed), []
    for turn in range(given.times):
        policy = given.policy or POLICIES[turn // 2 % len(POLICIES)]
        found.append(killed(turn % 2 == 0, draw, policy))
        which = "machine 0" if turn % 2 == 0 else "another"
        started_s, trained_s = found[-1]
        print(
            f"{policy}, {which} killed: started {started_s:.2f} s, ten steps {trained_s:.2f} s later",
            flush=True,
        )
    for name, times in zip(("started again", "ten steps"), zip(*found, strict=True), strict=True):
        print(f"{name}: median {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
