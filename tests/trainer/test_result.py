"""Tests of a run's result and position."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp.trainer.result import load_checkpoint, on_cpu, weights_on_cpu

DATA = torch.arange(24.0).reshape(12, 2)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trainer(model: object, **options: object) -> flowdp.Trainer:
    given = {
        "dataset": DATA,
        "per_device_batch_size": 2,
        "epochs": 2,
        "policy": "sync",
        "devices": ["cpu"],
        "progress": False,
    }
    return flowdp.Trainer(
        model, lambda params: torch.optim.Adam(params, lr=0.01), loss, **{**given, **options}
    )


def test_a_tensor_on_the_cpu_is_one_of_its_own() -> None:
    flat = torch.arange(6.0, requires_grad=True)
    copy = on_cpu(flat[2:4])
    assert copy.tolist() == [2.0, 3.0]
    assert not copy.requires_grad
    assert copy.untyped_storage().nbytes() == 8  # not the whole memory of which it is a view
    assert on_cpu("text") == "text"


def test_tied_weights_stay_one_tensor() -> None:
    flat = torch.arange(6.0)
    copies = weights_on_cpu({"a": flat[2:4], "b": flat[2:4], "c": flat[:2], "d": "extra"})
    assert copies["a"] is copies["b"]
    assert copies["a"].tolist() == [2.0, 3.0]
    assert copies["c"].untyped_storage().nbytes() == 8
    assert list(copies) == ["a", "b", "c", "d"]


def test_the_module_of_a_result_is_the_instance_or_a_new_one() -> None:
    model = nn.Linear(2, 1)
    state = trainer(model).fit()
    assert state.module is model
    assert torch.equal(model.weight, state.state_dict["weight"])
    with torch.no_grad():
        model.weight.zero_()
    assert not state.module.weight.any()  # it is filled once, and the user's from then on
    made = trainer(lambda: nn.Linear(2, 1)).fit()
    assert isinstance(made.module, nn.Linear)
    assert made.module is made.module
    assert torch.equal(made.module.weight, made.state_dict["weight"])


def test_the_module_of_a_snapshot_is_a_copy() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with trainer(model, epochs=None, max_steps=10**9).start() as run:
        snapshot = run.snapshot()
        assert snapshot.module is not model
        assert torch.equal(snapshot.module.weight, snapshot.state_dict["weight"])
        assert torch.equal(model.weight, before)
        run.stop()


def test_a_state_without_a_model_says_so() -> None:
    state = trainer(lambda: nn.Linear(2, 1)).fit()
    assert state.module is not None
    again = pickle.loads(pickle.dumps(state))
    assert torch.equal(again.state_dict["weight"], state.state_dict["weight"])
    with pytest.raises(flowdp.OptionError, match=r"build the model, and state\.load_into\(model\)"):
        _ = again.module


def test_a_checkpoint_is_read_as_a_state(tmp_path: Path) -> None:
    whole = trainer(lambda: nn.Linear(2, 1), checkpoint=tmp_path / "run").fit()
    read = load_checkpoint(tmp_path / "run")
    assert torch.equal(read.state_dict["weight"], whole.state_dict["weight"])
    assert read.history == whole.history
    assert str(read) == str(whole)  # it says nothing of an interrupt
    torch.optim.Adam(nn.Linear(2, 1).parameters()).load_state_dict(read.optimizer_state)
    further = [
        trainer(lambda: nn.Linear(2, 1), epochs=3, resume=start).fit()
        for start in (read, max((tmp_path / "run").glob("*.pt")))
    ]
    assert torch.equal(further[0].state_dict["weight"], further[1].state_dict["weight"])
    with pytest.raises(flowdp.CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "gone.pt")
    with pytest.raises(flowdp.OptionError, match="not True"):
        load_checkpoint(True)  # type: ignore[arg-type]
