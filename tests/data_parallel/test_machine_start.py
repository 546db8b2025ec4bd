"""Machines that begin a loop together: what must be the same on all, and what they take from machine 0."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowdp
from flowdp.data_parallel.machine_start import TIMEOUT_S, check_machines
from flowdp.errors import FlowdpError, OptionError
from flowdp.options import MachineOptions
from tests.torch_world import in_processes


def layer(width: int = 2) -> nn.Linear:
    return nn.Linear(3, width)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def begin(model: nn.Module, optimizer: Any = None, **options: Any) -> flowdp.DataParallel:
    return flowdp.setup(model, optimizer, devices=["cpu", "cpu"], progress=False, **options)


def other_shape(rank: int) -> None:
    begin(layer(2 + rank))


def frozen(rank: int) -> None:
    model = layer()
    model.bias.requires_grad_(rank == 0)
    begin(model)


def other_optimizer(rank: int) -> None:
    model = layer()
    begin(model, torch.optim.Adam(model.parameters()) if rank else sgd(model))


def other_rate(rank: int) -> None:
    model = layer()
    try:
        begin(model, sgd(model, 0.1 + rank))
    finally:
        model(torch.ones(1, 3)).sum().backward()  # the model is as it was: no machine waits for this one


def other_clipping(rank: int) -> None:
    begin(layer(), max_grad_norm=1.0 + rank)


def closures(_rank: int) -> None:
    model = layer()
    begin(model, torch.optim.LBFGS(model.parameters()))


def sync_batch_norm(_rank: int) -> None:
    begin(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer(), nn.BatchNorm1d(2))), cadence=False)


def shortened(_rank: int) -> None:
    flowdp.setup(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), devices=["cpu"], progress=False)


def whole_batches(_rank: int) -> None:
    begin(layer(), cadence=True)


FAULTS: dict[Callable[[int], None], str] = {
    other_shape: r"'weight' is float32 \(3, 3\) on machine 1 .* and float32 \(2, 3\) on machine 0",
    frozen: r"'bias' is float32 \(2,\) frozen on machine 1 .* every machine must build the same model",
    other_optimizer: "'optimizer 0' is Adam on machine 1 .* and SGD on machine 0",
    other_rate: "'lr of group 0 of optimizer 0' is 1.1 on machine 1 .* and 0.1 on machine 0",
    other_clipping: r"max_grad_norm=\)' is 2.0 on machine 1 .* and 1.0 on machine 0",
    closures: "LBFGS decides by the loss",
    sync_batch_norm: "SyncBatchNorm takes the statistics of the devices of one machine",
    shortened: "Embedding '0' has max_norm=1.0",
    whole_batches: "cadence=True sizes the windows by the speed of one machine's devices",
}


def starts(rank: int) -> dict[str, Any]:
    answers = []
    for fault in FAULTS:
        try:
            fault(rank)
            answers.append("nothing")
        except OptionError as error:
            answers.append(str(error))
    torch.manual_seed(rank)
    model = nn.Sequential(layer(), nn.BatchNorm1d(2))
    first = [p.clone() for p in model.parameters()]
    begin(model).close()
    alone = layer()
    begin(alone, machines=False).close()
    fixed = layer().requires_grad_(False)
    if rank == 0:  # a model that is not trained needs no other machine
        begin(fixed).close()
    second_model = layer()
    dp = begin(second_model, sgd(second_model))
    try:
        dp.set_optimizer([sgd(dp.module), sgd(dp.module)] if rank else sgd(dp.module))
        second = "nothing"
    except FlowdpError as error:
        second = str(error)
    return {
        "answers": answers,
        "mine": [p.tolist() for p in first],
        "theirs": [p.tolist() for p in model.parameters()],
        "alone": alone.weight.tolist(),
        "second": second,
    }


def test_machines_that_differ_do_not_begin(tmp_path: Path) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    found = in_processes(starts, tmp_path, 2)
    for rank, one in enumerate(found):
        for (fault, text), answer in zip(FAULTS.items(), one["answers"], strict=True):
            assert re.search(text, answer), (rank, fault.__name__, answer)
        assert "'optimizer 1' is SGD on machine 1" in one["second"]
        assert one["theirs"] == found[0]["mine"]
    assert found[0]["mine"] != found[1]["mine"]
    assert found[0]["alone"] != found[1]["alone"]


def test_options() -> None:
    assert check_machines(True, layer()) == MachineOptions(timeout=TIMEOUT_S)
    assert check_machines(True, layer().requires_grad_(False)) is None
    assert check_machines(False, layer()) is None
    given = MachineOptions(timeout=5, payload="bf16")
    assert check_machines(given, layer()) == given
    for other in (MachineOptions(rounds=4), MachineOptions(overlap=False), MachineOptions(stream="part")):
        with pytest.raises(OptionError, match="rounds, overlap and stream are for a Trainer"):
            check_machines(other, layer())
    with pytest.raises(OptionError, match="machines must be True, False or MachineOptions"):
        flowdp.setup(layer(), machines=2)  # type: ignore[arg-type]
