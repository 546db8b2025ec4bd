"""Tests of resuming under another policy."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

import flowdp

SAMPLES = 48


def fit(policy: Any, folder: Path, epochs: int) -> flowdp.TrainedState:
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 4)
    return flowdp.Trainer(
        model=nn.Linear(4, 2),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        dataset=(inputs, (inputs.sum(1) > 0).long()),
        per_device_batch_size=4,
        epochs=epochs,
        policy=policy,
        devices=["cpu", "cpu"],
        checkpoint=folder,
        resume=True,
        progress=False,
        runtime=flowdp.RuntimeOptions(tune_process=False),
    ).fit()


# With exact, replicas and optimizers must be equal; otherwise each rank had its own.
@pytest.mark.parametrize(
    ("before", "after"), list(permutations(("sync", "cadence", "async", "exact"), 2)), ids="-".join
)
def test_a_run_goes_on_under_another_policy(before: str, after: str, tmp_path: Path) -> None:
    first = fit(before, tmp_path, epochs=1)
    state = fit(after, tmp_path, epochs=2)
    assert [record.epoch for record in state.history] == [0, 1]
    assert state.global_step > first.global_step
    assert sum(part.samples for part in state.history[1].per_rank) == SAMPLES


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def loaded(folder: Path, loader: Any, **options: Any) -> flowdp.Trainer:
    return flowdp.Trainer(
        model=nn.Linear(1, 1),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
        loss=lambda model, batch: model(batch).square().mean(),
        dataset=loader,
        policy="sync",
        devices=["cpu"],
        checkpoint=folder,
        progress=False,
        **{"runtime": flowdp.RuntimeOptions(tune_process=False)} | options,
    )


def test_the_order_of_a_loader_stays_inside_an_epoch(tmp_path: Path) -> None:
    loaded(tmp_path, DataLoader(Numbers(), batch_size=4), max_steps=5).fit()
    with pytest.raises(flowdp.CheckpointError, match="batch_size was 4, it is 8 now"):
        loaded(tmp_path, DataLoader(Numbers(), batch_size=8), epochs=1, resume=True).start()
    with pytest.raises(flowdp.CheckpointError, match="sampler was 'SequentialSampler'"):
        loaded(tmp_path, DataLoader(Numbers(), batch_size=4, shuffle=True), epochs=1, resume=True).start()
    state = loaded(tmp_path, DataLoader(Numbers(), batch_size=4), epochs=1, resume=True).fit()
    assert sum(part.samples for part in state.history[0].per_rank) == SAMPLES


def test_an_unseeded_sampler_is_refused_inside_an_epoch(tmp_path: Path) -> None:
    def loader(generator: torch.Generator | None) -> DataLoader[torch.Tensor]:
        return DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(SAMPLES), generator))

    loaded(tmp_path / "a", loader(None), max_steps=5).fit()
    with pytest.raises(flowdp.CheckpointError, match="draws another order than it did"):
        loaded(tmp_path / "a", loader(None), epochs=1, resume=True).start()
    loaded(tmp_path / "b", loader(torch.Generator().manual_seed(1)), max_steps=5).fit()
    seeded = loader(torch.Generator().manual_seed(1))
    assert loaded(tmp_path / "b", seeded, epochs=1, resume=True).fit().epochs_done == 1


def test_what_is_watched_may_change(tmp_path: Path) -> None:
    numbers = (torch.arange(SAMPLES, dtype=torch.float32)[:, None],)
    given = {"per_device_batch_size": 4, "resume": True}

    def worse(model: nn.Module, batch: Any) -> Any:
        worker = flowdp.current_worker()
        return {"loss": model(batch[0]).square().mean(), "late": float(-worker.epoch)}

    def trainer(epochs: int, monitor: str, mode: Any) -> flowdp.Trainer:
        return flowdp.Trainer(
            model=nn.Linear(1, 1),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
            loss=worse,
            dataset=numbers,
            epochs=epochs,
            devices=["cpu"],
            checkpoint=tmp_path,
            callbacks=[flowdp.EarlyStopping(monitor, patience=2, mode=mode)],
            progress=False,
            **{"runtime": flowdp.RuntimeOptions(tune_process=False)} | given,  # type: ignore[arg-type]
        )

    assert trainer(9, "late", "max").fit().epochs_done == 3
    # Not at once: the best value of another name does not count for this one.
    assert trainer(9, "late", "min").fit().epochs_done == 9


def test_what_is_done_to_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    taken: list[flowdp.Checkpoint] = []

    def spoil(checkpoint: flowdp.Checkpoint) -> None:
        for value in checkpoint.state_dict.values():
            value.zero_()
        taken.append(checkpoint)

    best = flowdp.EarlyStopping(patience=None, restore_best=True)
    state = loaded(
        tmp_path,
        torch.ones(SAMPLES, 1),
        per_device_batch_size=4,
        epochs=2,
        callbacks=[best, flowdp.OnCheckpoint(spoil)],
    ).fit()
    assert taken
    assert all(value.abs().sum() > 0 for value in state.state_dict.values())


def test_a_metric_that_is_not_there_is_said(tmp_path: Path) -> None:
    options: Any = flowdp.CheckpointOptions(tmp_path, keep_best=("acuracy", "max"))
    run = loaded(options, torch.ones(SAMPLES, 1), per_device_batch_size=4, epochs=1).start()
    run.join()
    assert any("'acuracy'" in problem for problem in run.status().problems)
