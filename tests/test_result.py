"""Tests of a run's result and position."""

from __future__ import annotations

import torch
from torch import nn

from flowdp.result import Status, TrainedState, on_cpu, optimizer_state


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.5)


def test_a_state_is_loaded_into_a_module() -> None:
    source, target = nn.Linear(2, 1), nn.Linear(2, 1)
    state = TrainedState(source.state_dict(), {}, (), 7, 1, interrupted=False)
    assert state.load_into(target) is target
    assert torch.equal(target.weight, source.weight)
    assert target.weight.data_ptr() != source.weight.data_ptr()


def test_the_state_of_optimizers_has_the_form_in_which_they_were_given() -> None:
    one, two = adam(nn.Linear(1, 1)), adam(nn.Linear(1, 1))
    assert optimizer_state([one]) == one.state_dict()
    assert optimizer_state([one, two]) == [one.state_dict(), two.state_dict()]
    assert optimizer_state({"a": one}) == {"a": one.state_dict()}


def test_a_tensor_on_the_cpu_is_one_of_its_own() -> None:
    flat = torch.arange(6.0, requires_grad=True)
    copy = on_cpu(flat[2:4])
    assert copy.tolist() == [2.0, 3.0]
    assert not copy.requires_grad
    assert copy.untyped_storage().nbytes() == 8  # not the whole memory of which it is a view
    assert on_cpu("text") == "text"


def test_a_status_is_one_line() -> None:
    status = Status("running", 2, 1234, 9, (600, 634), (None, "no batches"))
    assert str(status) == "running | 2 epochs | step 1,234 | steps per rank 600 634"
    waiting = Status("running", 0, 4, 1, (2, 2), (None, None), launch_bound=0.416)
    assert str(waiting).endswith(" | steps per rank 2 2 | waits to launch 42 %")
    troubled = Status("running", 2, 1234, 9, (600,), (None,), problems=("rank 1 left", "a full disk"))
    assert str(troubled).endswith(" | problems: 2")
