"""Tests of the options that several machines cannot have, or must have alike: in real processes."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import flowdp
from flowdp import MachineOptions, Trainer
from flowdp.errors import OptionError
from flowdp.trainer.team_options import _check_backend, _part_of
from tests.torch_world import in_processes

SAME: dict[str, tuple[dict[str, Any], str]] = {
    "machines": ({"machines": 3}, r"machines must be True, False or MachineOptions\(...\), not 3"),
    "rounds": ({"machines": MachineOptions(rounds=4)}, r"rounds=4\) is for policy='cadence'"),
    "async": ({"policy": "async"}, "policy='async' trains on one machine"),
    "local": (
        {"runtime": flowdp.RuntimeOptions(backend="local")},
        "backend='local' is for the devices of one machine",
    ),
    "failures": (
        {"policy": "sync", "failures": flowdp.FailureOptions(on_failure="continue")},
        "on_failure='continue' is for the devices of one machine",
    ),
}
"""Arguments that every machine gives, and the refusal."""

OTHER: dict[str, tuple[str, list[Any]]] = {
    "replica.policy": ("policy", ["sync", "cadence"]),
    "sizes": ("batch_size", [8, 16]),
    "epochs": ("epochs", [1, 2]),
    "replica.seed": ("seed", [0, 1]),
    "replica.max_grad_norm": ("max_grad_norm", [1.0, None]),
    "limit": ("limit_batches", [3, 4]),
    "runtime.backend": ("runtime", [flowdp.RuntimeOptions(), flowdp.RuntimeOptions(backend="cpu")]),
    "team.options": ("machines", [MachineOptions(timeout=20.0), MachineOptions(timeout=30.0)]),
}
"""Arguments in which machines differ, by their name in the refusal."""


def refusal(**given: Any) -> str:
    data = TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
    own = {"devices": ["cpu"], "batch_size": 8, "epochs": 1, "progress": False, **given}
    try:
        Trainer(nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1), nn.MSELoss(), dataset=data, **own)
    except OptionError as error:
        return str(error)
    return "none"


def refusals(rank: int) -> dict[str, str]:
    same = {name: refusal(**given) for name, (given, _) in SAME.items()}
    other = {name: refusal(**{key: values[rank]}) for name, (key, values) in OTHER.items()}
    return {**{f"same {name}": text for name, text in same.items()}, **other, "fits": refusal()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return in_processes(refusals, tmp_path_factory.mktemp("job"), 2)


@pytest.mark.parametrize("name", SAME)
def test_an_option_that_several_machines_cannot_have(found: list[dict[str, str]], name: str) -> None:
    for one in found:
        assert re.search(SAME[name][1], one[f"same {name}"])


@pytest.mark.parametrize("name", OTHER)
def test_machines_that_mean_different_runs_name_the_argument(found: list[dict[str, str]], name: str) -> None:
    first, second = (one[name] for one in found)
    assert first == second
    assert f"different runs: {name} is " in first
    assert re.search(r"on machine 0 \(.*\) and .* on machine 1 \(.*\); give every machine the same", first)


def test_machines_with_the_same_arguments_are_not_refused(found: list[dict[str, str]]) -> None:
    assert [one["fits"] for one in found] == ["none", "none"]


@pytest.mark.parametrize(
    ("overlaps", "payload", "text"),
    [(True, "full", "give machines=MachineOptions.overlap=False"), (False, "bf16", "not as payload='bf16'")],
)
def test_nccl_between_machines_sends_numbers_as_they_are_and_is_waited_for(
    overlaps: bool, payload: Any, text: str
) -> None:
    def config(overlaps: bool, payload: Any) -> Any:
        team = SimpleNamespace(options=MachineOptions(payload=payload))
        return SimpleNamespace(runtime=SimpleNamespace(backend="nccl"), overlaps=overlaps, team=team)

    _check_backend(config(False, "full"))
    with pytest.raises(OptionError, match=text):
        _check_backend(config(overlaps, payload))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_processes_of_one_host_share_its_cards(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(torch.device(kind, number) for number in range(4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _part_of(cards) == cards[2:]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _part_of(cards) == cards[:2]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert _part_of(cards) == cards
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert _part_of((torch.device("cpu"),)) == (torch.device("cpu"),)
    with pytest.raises(OptionError, match="3 processes on this host cannot share its 4 devices"):
        _part_of(cards)
