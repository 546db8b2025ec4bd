"""A stop in an evaluation on several machines, and the run that goes on from there.

Run as a script with a folder: each machine stops a run of its own turn, in the evaluation of an epoch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import flowdp
from flowdp.engine.shared_batches import SharedBatches
from tests.limits import HANG_S
from tests.machines.launch import report
from tests.machines.rounds import digest

EPOCHS, STOPPED = 4, 1


def train(name: str, *, acts: bool = False, **options: Any) -> None:
    """Train, and report the history.

    Args:
        name: Of the run.
        acts: Whether this machine stops it.
        options: Of the Trainer.
    """
    handle: Future[flowdp.Run] = Future()
    is_cut, cut = threading.Event(), SharedBatches.cut

    def noted(self: SharedBatches) -> None:
        cut(self)
        is_cut.set()

    def judge(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        if acts and flowdp.current_worker().epoch == STOPPED:
            handle.result(HANG_S).stop()
            assert is_cut.wait(HANG_S)  # this batch is not done before all machines know
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1])}

    SharedBatches.cut = noted  # type: ignore[method-assign]
    torch.manual_seed(3)
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(4))
    run = flowdp.Trainer(
        nn.Linear(5, 1),
        lambda params: torch.optim.SGD(params, lr=0.1),
        nn.MSELoss(),
        dataset=(x, x.sum(1, keepdim=True)),
        per_device_batch_size=4,
        epochs=EPOCHS,
        devices=["cpu"] * 2,
        policy="sync",
        evaluation=flowdp.EvaluationOptions((x, x.sum(1, keepdim=True)), step=judge, sanity_check=0),
        scheduler=flowdp.SchedulerOptions(
            lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
            unit="epoch",
        ),
        progress=False,
        **options,
    ).start()
    handle.set_result(run)
    state = run.join()
    SharedBatches.cut = cut  # type: ignore[method-assign]
    report(
        "trained",
        name=name,
        interrupted=state.interrupted,
        digest=digest(state.state_dict),
        history=[[one.epoch, one.lr, dict(one.eval), one.owes_evaluation] for one in state.history],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own = int(os.environ["RANK"])
    train("whole")
    for machine in (0, 1):
        # Machine 0 alone sees the files.
        folder = str(Path(sys.argv[1]) / (str(machine) if own == 0 else "not there"))
        train(f"stopped by {machine}", acts=machine == own, checkpoint=folder)
        train(f"resumed, {machine}", resume=folder)
    dist.barrier()
    dist.destroy_process_group()
