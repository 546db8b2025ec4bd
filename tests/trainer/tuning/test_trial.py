"""Tests of trial runs: nothing of the user's is changed by one."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import flowdp
from flowdp.trainer.tuning.trial import trial_run
from tests.trainer.tuning.small import DATA, net, sgd, trainer


def generators() -> list[Any]:
    return [random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def test_model_optimizer_and_generators_are_left_alone(tmp_path: Path) -> None:
    model, called = net(), []

    class Told(flowdp.Callback):
        def on_epoch_end(self, *_: object) -> None:
            called.append(1)

    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(*DATA)
    optimizer = sgd(model.parameters())
    given = trainer(
        model=model,
        optimizer=optimizer,
        dataset=DataLoader(dataset, 4, sampler=RandomSampler(dataset, replacement=True, generator=generator)),
        per_device_batch_size=None,
        checkpoint=tmp_path / "run",
        callbacks=[Told()],
        timeline=tmp_path / "run.json",
    )
    before = generators(), generator.get_state().tolist(), copy.deepcopy(model.state_dict())
    with trial_run(given.config) as run:
        state = run.join()
    assert state.global_step == 17
    assert not torch.equal(state.state_dict["0.weight"], before[2]["0.weight"])
    torch.testing.assert_close(model.state_dict(), before[2], rtol=0, atol=0)
    assert state.module is not model
    assert not optimizer.state
    assert (generators(), generator.get_state().tolist()) == before[:2]
    assert not called
    assert not list(tmp_path.iterdir())


def test_a_block_that_raises_stops_the_run() -> None:
    given = trainer(epochs=None, max_steps=10**9)
    with pytest.raises(KeyError), trial_run(given.config):
        raise KeyError
    assert flowdp.runs() == ()


def test_a_start_that_fails_leaves_nothing() -> None:
    before = generators()

    def broken() -> Any:
        torch.rand(3)
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"), trial_run(trainer(model=broken).config):
        pass
    assert generators() == before
    assert flowdp.runs() == ()


def test_short_runs_measure_on_one_machine() -> None:
    config = trainer().config
    spread = replace(config, team=SimpleNamespace(is_spread=True, sizes=(1, 2)))
    with (
        pytest.raises(flowdp.OptionError, match=r"measure on one machine.* has 2: .*machines=False"),
        trial_run(spread),
    ):
        pass
