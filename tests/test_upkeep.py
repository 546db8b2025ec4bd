"""What a Trainer was told of keeping a run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from flowdp.checkpoint.resume import Resumed
from flowdp.errors import CheckpointError, OptionError
from flowdp.machine.barrier_tasks import SavePlan
from flowdp.observe.callbacks import Callback, EarlyStopping, OnCheckpoint
from flowdp.options import CheckpointOptions, FailureOptions
from flowdp.result import TrainedState
from flowdp.upkeep import Upkeep


def upkeep(policy: Any = "cadence", world_size: int = 2, train_step: object = None, **given: Any) -> Upkeep:
    options: dict[str, Any] = {
        "evaluation": None,
        "checkpoint": None,
        "resume": False,
        "callbacks": (),
        "failures": None,
    }
    made = Upkeep(**{**options, **given})
    made.check(train_step, policy, world_size)
    return made


def trained(model: torch.nn.Module) -> TrainedState:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainedState(model.state_dict(), optimizer.state_dict(), (), 0, 0, interrupted=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"checkpoint": 7}, "checkpoint must be a folder"),
        ({"resume": True}, "resume=True takes the newest checkpoint of the folder"),
        ({"resume": 1.5}, "resume must be True, the path of a checkpoint or a TrainedState"),
        ({"failures": FailureOptions(on_failure="continue"), "policy": "async"}, "'sync' and 'cadence'"),
        ({"failures": FailureOptions(on_failure="continue"), "policy": "exact"}, "'sync' and 'cadence'"),
        ({"failures": FailureOptions(on_failure="continue"), "world_size": 1}, "needs another device"),
        ({"callbacks": [print]}, "callbacks must be instances of flowdp.Callback"),
        ({"callbacks": [EarlyStopping(), EarlyStopping("acc")]}, "one EarlyStopping decides"),
        ({"evaluation": torch.zeros(2), "train_step": print}, "does not say how to evaluate"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        upkeep(**given)


def test_nothing_asked_for_is_nothing_done(tmp_path: Path) -> None:
    kept = upkeep()
    assert kept.tasks(None).save is None
    assert kept.tasks(None).eval_every is None
    assert not any(kept.tasks(None).halts(epoch) for epoch in range(5))
    assert kept.begin(ExitStack()) == (None, None)
    assert not kept.care(None, {}).has_listeners
    assert list(tmp_path.iterdir()) == []


def test_a_folder_means_a_checkpoint_after_every_epoch(tmp_path: Path) -> None:
    assert upkeep(checkpoint=tmp_path).tasks(None).save == SavePlan(1, "epoch")
    options = CheckpointOptions(tmp_path, every=50, unit="step")
    assert upkeep(checkpoint=options).tasks(None).save == SavePlan(50, "step")


def test_whoever_hears_of_checkpoints_has_them_taken() -> None:
    class Deaf(Callback):
        pass

    class Hearing(Callback):
        def on_checkpoint(self, checkpoint: Any) -> None:
            pass

    assert upkeep(callbacks=[Deaf()]).tasks(None).save is None
    assert upkeep(callbacks=[Hearing()]).tasks(None).save == SavePlan(1, "epoch")
    listening = upkeep(callbacks=[OnCheckpoint(print)])
    assert listening.tasks(None).save == SavePlan(1, "epoch")
    assert listening.care(None, {}).has_listeners


def test_early_stopping_becomes_the_monitor() -> None:
    tasks = upkeep(callbacks=[EarlyStopping("acc", patience=2, mode="max", restore_best=True)]).tasks(None)
    assert tasks.monitor is not None
    assert (tasks.monitor.name, tasks.monitor.patience, tasks.keeps_best) == ("acc", 2, True)


def test_a_state_begins_at_its_epoch() -> None:
    model = torch.nn.Linear(2, 1)
    store, resumed = upkeep(resume=trained(model)).begin(ExitStack())
    assert store is None
    assert isinstance(resumed, Resumed)
    assert (resumed.position.done, resumed.position.global_step) == (0, 0)
    assert resumed.model.keys() == model.state_dict().keys()


@pytest.mark.parametrize("resume", [False, "a state"])
def test_the_checkpoints_of_another_run_are_not_written_over(tmp_path: Path, resume: Any) -> None:
    (tmp_path / "step-000000000007-1.pt").write_bytes(b"of days")
    state = trained(torch.nn.Linear(2, 1)) if resume else False
    with pytest.raises(OptionError, match="holds checkpoints of another run"):
        upkeep(checkpoint=tmp_path, resume=state).begin(ExitStack())


def test_nothing_is_begun_anew_where_no_checkpoint_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "step-000000000007-1.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        upkeep(checkpoint=tmp_path, resume=True).begin(ExitStack())
    store, resumed = upkeep(checkpoint=tmp_path / "new", resume=True).begin(ExitStack())
    assert store is not None
    assert resumed is None
