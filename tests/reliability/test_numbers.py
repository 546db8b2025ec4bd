"""Tests of NaN or inf parameters: the replica is left out and healed, or the run ends."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp import FlowdpError, StepError
from tests.limits import HANG_S
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import SAMPLES, Written, count, trainer

POLICIES = ("sync", "cadence", "async", "exact")


class Trouble:
    """A loss that is NaN on one rank or on all, in their step of this number."""

    def __init__(self, step: int, rank: int | None) -> None:
        self.step, self.rank = step, rank
        self.indices: list[list[int]] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        loss = count(model, batch)
        if worker.local_step != self.step or self.rank not in (None, worker.rank):
            return loss
        if torch.is_grad_enabled():  # the check of the first loss does not count
            self.indices.append(batch[0].tolist())
        return loss * math.nan


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


@pytest.mark.parametrize(("rank", "step"), [(0, 0), (1, 4)])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_replica_is_healed_and_the_run_goes_on(
    recorder: StepRecorder, caplog: pytest.LogCaptureFixture, policy: str, rank: int, step: int
) -> None:
    trouble = Trouble(step, rank)
    run = trainer(
        recorder,
        policy,
        2,
        loss=trouble,
        optimizer=adam,
        runtime=flowdp.RuntimeOptions(partition_ratios=ratios(policy)),
        epochs=5,
    ).start()
    with caplog.at_level(logging.WARNING, "flowdp"):
        state = run.join(HANG_S)
    assert (state.epochs_done, state.interrupted) == (5, False)
    for values in (*state.state_dict.values(), *tensors(state.optimizer_state)):
        assert values.isfinite().all()
    [warning] = [one for one in caplog.messages if "NaN or infinite" in one]
    assert warning.startswith(f"rank {rank} on cpu had NaN or infinite numbers")
    [indices] = trouble.indices
    if policy != "exact" or rank == 0:  # the samples of a window are those of all ranks, rank 0's first
        assert f"(indices {', '.join(map(str, indices))}" in warning
    for record in state.history:
        assert math.isfinite(record.loss)
        assert sum(part.samples for part in record.per_rank) == SAMPLES


def ratios(policy: str, devices: int = 2) -> list[float] | None:
    """All ranks have work in every round, at any speed."""
    return None if policy == "sync" else [1.0] * devices


def tensors(state: Any) -> list[Tensor]:
    return [value for one in state["state"].values() for value in one.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize(("policy", "devices"), list(zip(POLICIES, (1, 2, 2, 2), strict=True)))
def test_without_a_healthy_replica_the_run_ends_and_names_the_last_checkpoint(
    tmp_path: Path, recorder: StepRecorder, policy: str, devices: int
) -> None:
    written = Written()

    def all_bad(model: nn.Module, batch: Any) -> Tensor:
        loss = count(model, batch)
        if flowdp.current_worker().epoch == 0:
            return loss
        written.wait(bool)
        return loss * math.nan

    run = trainer(
        recorder, policy, devices, loss=all_bad, checkpoint=tmp_path,
        callbacks=[flowdp.OnCheckpoint(written)],
        runtime=flowdp.RuntimeOptions(partition_ratios=ratios(policy, devices)),
    ).start()  # fmt: skip
    with pytest.raises(FlowdpError, match="NaN or infinite numbers in every replica") as caught:
        run.join(HANG_S)
    [path] = tmp_path.glob("*.pt")
    assert f"the last checkpoint is {str(path)!r}" in str(caught.value)
    state = trainer(recorder, policy, devices, checkpoint=tmp_path, resume=True).fit()
    assert state.epochs_done == 3
    assert state.state_dict["trained"].isfinite().all()


@pytest.mark.parametrize("policy", POLICIES)
def test_it_can_be_an_error_at_once(recorder: StepRecorder, policy: str) -> None:
    trouble = Trouble(1, 1)
    run = trainer(
        recorder,
        policy,
        2,
        loss=trouble,
        failures=flowdp.FailureOptions(on_nan="raise"),
        runtime=flowdp.RuntimeOptions(partition_ratios=ratios(policy)),
    ).start()
    with pytest.raises(StepError, match="FloatingPointError: the loss is not finite") as caught:
        run.join(HANG_S)
    assert (caught.value.rank, isinstance(caught.value.__cause__, FloatingPointError)) == (1, True)
    assert set(trouble.indices[0]) <= set(caught.value.indices)
