"""Checkpoints and best models of runs on several machines.

Run as a script: `begin` trains a part of each case, with a checkpoint at its end, and `resume` the rest of
it; `draw` does both with random numbers of each rank; `best` trains until early stopping ends it. The loss
notes the indices of its samples, which are their first column.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from flowdp.engine import barrier_tasks
from flowdp.replica import rank_state
from flowdp.replica.factories import all_of
from flowdp.replica.rank_state import capture, of_rank
from flowdp.replica.replica import Replica
from flowdp.trainer import start
from flowdp.trainer.resume import Resumed
from tests.machines.launch import report
from tests.machines.rounds import data, digest, packed

SAMPLES, BATCH, EPOCHS, STEPS = 403, 4, 3, 150
JUDGED, BEST = 40, 1

CASES: Mapping[str, Mapping[str, Any]] = {
    "cadence": {"policy": "cadence", "per_device_batch_size": BATCH},
    "sync": {"policy": "sync", "per_device_batch_size": BATCH},
    "exact": {"policy": "exact", "batch_size": BATCH},
}
OWN = ("cadence", "sync")
"""Cases whose ranks have optimizer states of their own."""


def moments(optimizers: Sequence[Mapping[str, Any]]) -> str:
    """Checksum of the states of a rank's optimizers."""
    found = hashlib.sha256()
    for optimizer in optimizers:
        for number, state in sorted(optimizer["state"].items()):
            for name, value in sorted(state.items()):
                found.update(f"{number} {name}".encode())
                found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def watch(case: str) -> None:
    """Report the optimizer states of each rank as they are saved, and as they are restored."""

    def noted(replica: Replica, *, shared: bool, **given: Any) -> Callable[[], dict[str, Any]]:
        worker = flowdp.current_worker()
        assert worker is not None
        found = moments([one.state_dict() for one in all_of(replica.optimizers)])
        report("saved", case=case, rank=worker.rank, digest=found, shared=shared)
        return capture(replica, shared=shared, **given)

    def put_back(self: Resumed, replicas: Sequence[Replica], ranks: Sequence[int] | None = None) -> None:
        restore(self, replicas, ranks)
        for rank, replica in zip(ranks or range(len(replicas)), replicas, strict=True):
            found = moments([one.state_dict() for one in all_of(replica.optimizers)])
            report("restored", case=case, rank=rank, digest=found)

    restore = RESTORE
    barrier_tasks.capture = noted  # type: ignore[attr-defined]
    Resumed.put_back = put_back  # type: ignore[method-assign]


RESTORE = Resumed.put_back


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def error(model: nn.Module, rows: Tensor) -> Tensor:
    wanted: Tensor = rows[:, 1:].sum(1, keepdim=True)
    out: Tensor = model(rows[:, 1:])
    return (out - wanted).square().mean()


def train(case: str, devices: int, folder: Path, *, resumes: bool) -> None:
    leads = os.environ["RANK"] == "0"
    trained: list[tuple[int, list[int]]] = []
    runs: list[flowdp.Run] = []

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        worker = flowdp.current_worker()
        assert worker is not None
        if torch.is_grad_enabled():  # the check of the first loss does not count
            trained.append((worker.epoch, batch[0][:, 0].int().tolist()))
        if case == "sync" and not resumes and not leads and worker.global_step > STEPS and runs:
            runs[0].stop()  # on the machine that follows
        return error(model, batch[0])

    watch(case)
    # Machine 0 alone sees the files.
    files = folder / case if leads else folder / "not there"
    options: dict[str, Any] = {"resume": str(files)} if resumes else {"checkpoint": str(files)}
    if not resumes and case != "sync":
        options["max_steps"] = STEPS
    run = flowdp.Trainer(
        net(),
        lambda params: torch.optim.Adam(params, lr=3e-3),
        loss,
        dataset=(data(SAMPLES, 1),),
        epochs=EPOCHS if resumes or case != "sync" else 1000,
        devices=["cpu"] * devices,
        progress=False,
        **options,
        **CASES[case],
    ).start()
    runs.append(run)
    state = run.join()
    epochs = sorted({epoch for epoch, _ in trained})
    for epoch in (epochs[0], epochs[-1]):
        indices = Counter(index for one, batch in trained if one == epoch for index in batch)
        report("epoch", case=case, epoch=epoch, **packed(indices, SAMPLES))
    report(
        "trained",
        case=case,
        digest=digest(state.state_dict),
        steps=state.global_step,
        done=state.epochs_done,
        problems=list(run.status().problems),
    )


def fake_generators() -> None:
    """Give CPU devices generators, whose states are numbers of ranks, and report those that are restored."""

    def state_of(device: torch.device) -> Tensor:
        worker = flowdp.current_worker()
        assert worker is not None
        return torch.tensor([worker.rank + 1], dtype=torch.uint8)

    def put_back(self: Resumed, replicas: Sequence[Replica], ranks: Sequence[int] | None = None) -> None:
        for rank in ranks or ():
            found = of_rank(self.ranks, rank)["generator"]
            report("generator", rank=rank, state=None if found is None else found.tolist())

    rank_state._generator_state = state_of
    start.is_accelerator = lambda device: True  # type: ignore[attr-defined]
    Resumed.put_back = put_back  # type: ignore[method-assign]


def draw(devices: int, folder: Path) -> None:
    """Train with a checkpoint at the end, and resume from it."""
    fake_generators()
    leads = os.environ["RANK"] == "0"
    for epochs in (1, 2):
        flowdp.Trainer(
            net(),
            lambda params: torch.optim.Adam(params, lr=3e-3),
            lambda model, batch: error(model, batch[0]),
            dataset=(data(SAMPLES, 1),),
            batch_size=BATCH,
            epochs=epochs,
            devices=["cpu"] * devices,
            policy="exact",
            checkpoint=str(folder / "draws") if leads else None,
            resume=epochs > 1 and leads,
            progress=False,
        ).fit()


def train_best(devices: int) -> None:
    """Train towards the targets for some epochs, and away from them from then on."""
    seen: list[str] = []

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        worker = flowdp.current_worker()
        assert worker is not None
        return error(model, batch[0]) * (1 if worker.epoch <= BEST else -0.1)

    def judge(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        found = digest(model.state_dict())
        if found not in seen[-devices:]:
            seen.append(found)
        return {"score": error(model, batch[0])}

    state = flowdp.Trainer(
        net(),
        lambda params: torch.optim.SGD(params, lr=0.01),
        loss,
        dataset=(data(SAMPLES, 1),),
        per_device_batch_size=BATCH,
        epochs=20,
        devices=["cpu"] * devices,
        policy="sync",
        evaluation=flowdp.EvaluationOptions((data(JUDGED, 2),), step=judge, sanity_check=0),
        callbacks=[flowdp.EarlyStopping("score", patience=2, restore_best=True)],
        progress=False,
    ).fit()
    scores = [epoch.eval["score"] for epoch in state.history]
    report("best", digest=digest(state.state_dict), seen=seen, scores=scores)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, devices, folder, *cases = sys.argv[1:]
    own = int(devices.split(",")[int(os.environ["RANK"])])
    if what == "best":
        train_best(own)
    if what == "draw":
        draw(own, Path(folder))
    for case in cases:
        train(case, own, Path(folder), resumes=what == "resume")
