"""Tests of building replicas: equal, one per device, of the kind that the policy needs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from flowdp.collective.batch_norm import PARTS_ALONE
from flowdp.errors import CollectiveError, OptionError
from flowdp.network.team import Team
from flowdp.replica.batch_sizes import plan_sizes
from flowdp.replica.build import ReplicaConfig, build_replicas
from flowdp.replica.custom_step import CustomStepReplica
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.learning_rate import SchedulerOptions
from flowdp.replica.replica import Replica

CPU = torch.device("cpu")


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.5)


def settings(policy: Any = "cadence", devices: int = 2, **given: Any) -> ReplicaConfig:
    options: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 2),
        "optimizer": adam,
        "loss": lambda model, batch: model(batch).mean(),
        "train_step": None,
        "policy": policy,
        "sizes": plan_sizes(torch.ones(40, 2), None, 4, 1, policy, devices),
        "seed": 0,
        "precision": "32",
        "max_grad_norm": None,
        "scheduler": SchedulerOptions(lr_scaling="linear"),
    }
    return ReplicaConfig(**options | given)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "exact"])
def test_replicas_are_equal_and_share_nothing(policy: str) -> None:
    made = build_replicas(settings(policy, 3), [CPU] * 3)
    first, *others = (replica.module.weight for replica in made)
    for weight in others:
        assert torch.equal(weight, first)
        assert weight.data_ptr() != first.data_ptr()
    kind = ExactReplica if policy == "exact" else Replica
    assert {type(replica) for replica in made} == {kind}
    assert [replica.flat.rank for replica in made] == [0, 1, 2]


def test_an_instance_gives_its_weights_and_its_optimizer_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    for replica in build_replicas(settings(model=model, optimizer=optimizer), [CPU, CPU]):
        assert torch.equal(replica.module.weight, before)
        assert replica.module.weight is not model.weight
        [twin] = replica.optimizers
        assert twin.state[replica.module.weight]["step"].item() == 1
        assert twin.state[replica.module.weight] is not optimizer.state[model.weight]
    assert torch.equal(model.weight, before)


def test_a_step_of_the_users_own_may_have_several_optimizers() -> None:
    def two(params: Any) -> dict[str, torch.optim.Optimizer]:
        first, second = params
        return {"one": adam([first]), "two": adam([second])}

    made = build_replicas(
        settings(optimizer=two, loss=None, train_step=lambda worker, batch: None), [CPU] * 2
    )
    assert {type(replica) for replica in made} == {CustomStepReplica}
    assert [list(replica.optimizers) for replica in made] == [["one", "two"]] * 2
    with pytest.raises(OptionError, match="2 optimizers"):
        build_replicas(settings(optimizer=two), [CPU] * 2)


@pytest.mark.parametrize("policy", ["cadence", "exact"])
def test_an_optimizer_that_needs_a_closure_is_for_a_step_of_the_users_own(policy: str) -> None:
    with pytest.raises(OptionError, match=r"LBFGS computes the loss .* give a train_step"):
        build_replicas(settings(policy, optimizer=torch.optim.LBFGS), [CPU] * 2)


@pytest.mark.parametrize(
    ("policy", "devices", "is_resumed", "warns"),
    [
        ("exact", 2, False, True),
        ("exact", 2, True, False),  # the run before has said it
        ("exact", 1, False, False),
        ("sync", 2, False, False),
    ],
)
def test_batch_norm_under_exact_is_not_that_of_the_window(
    policy: str, devices: int, is_resumed: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flowdp"):
        given = settings(policy, model=lambda: nn.BatchNorm1d(2), is_resumed=is_resumed)
        build_replicas(given, [CPU] * devices)
    assert (PARTS_ALONE in caplog.messages) == warns


@pytest.mark.parametrize("devices", [1, 2])
def test_an_optimizer_factory_reads_the_marks_on_parameters(devices: int) -> None:
    def by_mark(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], **getattr(p, "_optim", {})} for p in params], lr=0.5)

    model = nn.Linear(2, 2)
    model.weight._optim = {"lr": 0.0}
    for replica in build_replicas(settings(model=model, optimizer=by_mark, devices=devices), [CPU] * devices):
        [optimizer] = replica.optimizers
        assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.5 * devices]


class Alternating(nn.Module):
    """Weights and biases alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def by_kind(model: nn.Module) -> torch.optim.Optimizer:
    decay = {one for one in model.parameters() if one.dim() > 1}  # in a different order in each process
    rest = [one for one in model.parameters() if one.dim() == 1]
    return torch.optim.AdamW([{"params": list(decay)}, {"params": rest, "weight_decay": 0.0}])


@pytest.mark.parametrize("policy", ["cadence", "exact"])
def test_each_parameter_group_lies_in_one_piece_on_every_rank(policy: str) -> None:
    made = build_replicas(settings(policy, model=Alternating, optimizer=by_kind), [CPU, CPU])
    for replica in made:
        assert replica.update.flat is not None
        assert [one.dim() for one, _ in replica.flat.parameters()] == [2, 2, 1, 1]
    for name, tensor in made[0].module.state_dict().items():
        assert torch.equal(tensor, made[1].module.state_dict()[name])


def test_a_step_of_the_users_own_finds_parameters_where_they_were_and_gradients_as_torch_has_them() -> None:
    options: dict[str, Any] = {"loss": None, "train_step": lambda *_: None}
    for replica in build_replicas(settings(model=Alternating, optimizer=by_kind, **options), [CPU, CPU]):
        assert replica.update.flat is None
        assert replica.gradients is None
        assert [one.dim() for one, _ in replica.flat.parameters()] == [2, 1, 2, 1]
        assert all(one.grad is None for one in replica.module.parameters())


@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_one_device_of_several_machines_is_not_alone(policy: str) -> None:
    """Other machines have replicas, too, so what is frozen stays so, and as it is."""

    def half() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        return model

    config = settings(policy, model=half)
    [one] = build_replicas(config, [CPU], Team((1, 1)))
    [alone] = build_replicas(settings(policy, 1, model=half), [CPU])
    assert (one.frozen is not None) is (policy == "sync")
    assert alone.frozen is None
    for replica in (one, alone):
        replica.module[0].requires_grad_(True)
    alone.flat.gather()
    with pytest.raises(CollectiveError, match="was frozen when the run started"):
        one.flat.gather()
