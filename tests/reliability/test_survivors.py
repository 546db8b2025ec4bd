"""on_failure="continue": a rank is lost, and with it only what it had not brought to a mean."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp import OutOfDeviceMemory, StepError
from tests.numerics.conftest import Step, Witness
from tests.reliability.small import SAMPLES, WAIT_S, Counts, Written, count, trainer

ALL = Counter(range(SAMPLES))
POLICIES = ("sync", "cadence")


class Fails:
    """A loss that fails in the step of this number of each rank named."""

    def __init__(self, step: int, *ranks: int, error: type[Exception] = ValueError) -> None:
        self.step, self.ranks, self.error = step, ranks, error

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        if worker.rank in self.ranks and worker.local_step >= self.step:
            raise self.error("mine")
        return count(model, batch)


def lost(witness: Witness, rank: int) -> list[Step]:
    """The steps of a rank that no mean has seen: those of its last round, of which the last one failed."""
    steps = witness.of(rank)
    return [step for step in steps if step.round == steps[-1].round]


def kept(witness: Witness, epoch: int, *failed: int) -> Counter[int]:
    """How often the samples of an epoch were trained, without what was lost."""
    gone = Counter(i for rank in failed for s in lost(witness, rank) if s.epoch == epoch for i in s.indices)
    return witness.samples(epoch) - gone


def equal(policy: str, devices: int) -> list[float] | None:
    """Equal parts, so that each rank comes to its step, however slow it is."""
    return None if policy == "sync" else [1.0] * devices


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize(("devices", "rank"), [(2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_others_train_what_was_lost(
    witness: Witness, caplog: pytest.LogCaptureFixture, policy: str, devices: int, rank: int, step: int
) -> None:
    model = Counts()
    cadence = flowdp.CadenceOptions(anchor=2, max_anchor=2)
    run = trainer(
        witness, policy, devices, loss=Fails(step, rank), model=model, on_failure="continue", cadence=cadence,
        partition_ratios=equal(policy, devices), epochs=8,
    ).start()  # fmt: skip
    with caplog.at_level(logging.ERROR, "flowdp"):
        state = run.join(WAIT_S)
    assert (state.epochs_done, state.interrupted, run.error) == (8, False, None)
    for epoch in range(8):
        assert kept(witness, epoch, rank) == ALL
    [problem] = run.status().problems
    assert problem.startswith(f"rank {rank} left: rank {rank} on cpu failed in epoch")
    assert any(f"rank {rank} has left, and the others go on" in one for one in caplog.messages)
    for record in state.history:
        assert sum(part.samples for part in record.per_rank) == SAMPLES
        assert sum(part.steps for part in record.per_rank) == 6
    # The answer is the survivors', in which every sample has left its mark in each epoch.
    assert torch.equal(model.trained, state.state_dict["trained"])
    assert state.state_dict["trained"].min() >= 8 / devices - 1e-3


def test_in_sync_every_step_has_left_its_mark_just_once(witness: Witness) -> None:
    # 12 batches of 2: the rank fails in the third round of three ranks, and two train the rest.
    run = trainer(
        witness, "sync", 3, samples=24, batch_size=2, loss=Fails(2, 1), on_failure="continue", epochs=1
    ).start()
    state = run.join(WAIT_S)
    weight = {index: 1 / 3 for step in witness.steps if step.round < 1 for index in step.indices}
    third = [step for step in witness.steps if step.round == 1 and step.rank != 1]
    weight |= {index: 1 / 2 for step in third for index in step.indices}
    marks = state.state_dict["trained"]
    assert len(weight) == 16
    for index in range(24):
        assert marks[index].item() == pytest.approx(weight.get(index, 1 / 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_after_the_other_and_the_last_one_ends_the_run(witness: Witness, policy: str) -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        if worker.local_step >= 2 + 3 * worker.rank:
            raise ValueError(f"mine, of rank {worker.rank}")
        return count(model, batch)

    run = trainer(witness, policy, 3, loss=fails, on_failure="continue", epochs=None, max_steps=10**6).start()
    with pytest.raises(StepError, match="mine, of rank") as caught:
        run.join(WAIT_S)
    told = [problem[:12] for problem in run.status().problems]
    assert told == [f"rank {rank} left:" for rank in range(3) if rank != caught.value.rank]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_without_memory_leaves(witness: Witness, policy: str) -> None:
    fails = Fails(1, 1, error=torch.OutOfMemoryError)
    run = trainer(
        witness, policy, 2, loss=fails, on_failure="continue", partition_ratios=equal(policy, 2)
    ).start()
    state = run.join(WAIT_S)
    assert state.epochs_done == 3
    assert isinstance(run._engine.failures.forgiven.get(1), OutOfDeviceMemory)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_survivors_keep_checkpoints_and_can_be_resumed(
    tmp_path: Path, witness: Witness, policy: str
) -> None:
    written = Written()
    options: dict[str, Any] = {"checkpoint": tmp_path, "on_failure": "continue"}
    state = trainer(witness, policy, 2, loss=Fails(1, 0), on_checkpoint=written, epochs=2, **options).fit()
    assert written.all[-1].global_step == state.global_step
    resumed = trainer(witness, policy, 2, resume=True, **options).fit()
    assert resumed.epochs_done == 3
    assert witness.samples(2) == ALL


def test_without_it_the_run_fails(witness: Witness) -> None:
    with pytest.raises(StepError, match="mine") as caught:
        trainer(witness, "sync", 2, loss=Fails(1, 1)).fit()
    assert caught.value.rank == 1


def test_many_rounds_are_cut_short_after_a_rank_has_left() -> None:
    """Nobody reads the inbox of a rank that is gone: what goes to all must not fill it."""

    def fail_once(model: nn.Module, batch: Any) -> torch.Tensor:
        worker = flowdp.current_worker()
        if worker.rank == 1 and worker.local_step == 1:
            raise ValueError("gone")
        return model(batch[0]).square().mean()

    run = flowdp.Trainer(
        model=nn.Linear(1, 1),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        loss=fail_once,
        dataset=(torch.randn(64, 1),),
        batch_size=1,
        max_steps=10**9,
        devices=["cpu"] * 3,
        on_failure="continue",
        progress=False,
    ).start()
    while not run.status().problems:
        run.snapshot()
    for _ in range(80):  # an inbox of a worker holds 64
        run.snapshot()
    run.stop()
    assert run.join(20).interrupted
    assert run.error is None


def test_what_was_read_can_be_handed_out_once() -> None:
    class Squares(torch.utils.data.Dataset[float]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> float:
            return float(index**2)

    with pytest.raises(flowdp.OptionError, match="needs a dataset of tensors"):
        flowdp.Trainer(
            model=nn.Linear(1, 1),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
            loss=lambda model, batch: model(batch[:, None]).mean(),
            dataset=Squares(),
            batch_size=1,
            epochs=1,
            devices=["cpu"] * 2,
            on_failure="continue",
        ).start()
