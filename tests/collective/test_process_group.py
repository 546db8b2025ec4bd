from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flowdp.collective.process_group import ProcessGroup
from flowdp.errors import OptionError
from tests.torch_world import in_processes


def test_one_rank_leaves_tensors_as_they_are():
    group = ProcessGroup.single()
    assert (group.rank, group.size, group.backend) == (0, 1, "single")
    assert group.device == torch.device("cpu")
    tensor = torch.arange(6.0).view(2, 3).t()
    for op in ("sum", "mean", "max", "min"):
        group.all_reduce(tensor, op)
    group.broadcast(tensor)
    group.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]]
    (copy,) = group.all_gather(tensor)
    copy.zero_()
    assert tensor.sum() == 15
    assert group.all_gather_object("x") == ["x"]
    group.barrier()
    group.abort("no matter")
    group.close()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda g: g.all_reduce(torch.zeros(2), "avg"), "'sum', 'mean', 'max', 'min'"),
        (lambda g: g.all_reduce(torch.zeros(2, dtype=torch.complex64), "max"), "complex"),
        (lambda g: g.all_reduce(torch.zeros(2).to_sparse()), "dense"),
        (lambda g: g.broadcast(torch.zeros(2), 1), "0 to 0"),
        (lambda g: ProcessGroup.from_torch(), "torchrun"),
    ],
)
def test_what_cannot_be_done_is_said(call, said):
    with pytest.raises(OptionError, match=said):
        call(ProcessGroup.single())


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,xpu:xccl", "xpu:1"),
    ],
)
def test_where_ranks_of_torch_distributed_are(config, device, monkeypatch):
    """Also if `init_process_group` was given no backend, which is then "undefined"."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "current_device", lambda: 1)
    assert ProcessGroup.from_torch().device == torch.device(device)


def gloo_answers(rank: int) -> dict[str, Any]:
    group = ProcessGroup.from_torch()
    answers: dict[str, Any] = {"who": (group.rank, group.size, group.backend, group.device)}
    for op in ("sum", "mean", "max", "min"):
        tensor = torch.tensor([1.0, -2.0]) * (rank + 1)
        group.all_reduce(tensor, op)
        answers[op] = tensor.tolist()
    narrow = torch.tensor([1.0 if rank == 0 else 2.0**-8], dtype=torch.bfloat16)
    work = group.all_reduce(narrow, "mean", async_op=True)
    work.wait()
    answers["narrow"] = narrow.item()
    turned = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    group.all_reduce(turned, "sum")
    answers["turned"] = turned.tolist()
    imaginary = torch.tensor([1j * (rank + 1)])
    group.all_reduce(imaginary)
    answers["imaginary"] = imaginary.tolist()
    for dtype in (torch.float64, torch.int64, torch.bool, torch.int16, torch.float8_e4m3fn):
        sent = torch.tensor([rank, 1 - rank]).to(dtype)
        (_, gathered) = group.all_gather(sent)
        group.broadcast(sent, 1)
        answers[str(dtype)] = sent.tolist()
        assert gathered.tolist() == sent.tolist()
    answers["gathered"] = [part.tolist() for part in group.all_gather(torch.tensor([[rank], [7]]))]
    answers["objects"] = group.all_gather_object({"rank": rank})
    group.barrier()
    group.close()
    return answers


def test_ranks_of_torch_distributed(tmp_path: Path) -> None:
    first, second = in_processes(gloo_answers, tmp_path, 2)
    assert first.pop("who") == (0, 2, "torch", torch.device("cpu"))
    assert second.pop("who") == (1, 2, "torch", torch.device("cpu"))
    assert first == second
    assert first == {
        "sum": [3.0, -6.0],
        "mean": [1.5, -3.0],
        "max": [2.0, -2.0],
        "min": [1.0, -4.0],
        "narrow": torch.tensor((1 + 2.0**-8) / 2).bfloat16().item(),
        "turned": [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]],
        "imaginary": [1.5j],
        "torch.float64": [1.0, 0.0],
        "torch.int64": [1, 0],
        "torch.bool": [True, False],
        "torch.int16": [1, 0],
        "torch.float8_e4m3fn": [1.0, 0.0],
        "gathered": [[[0], [7]], [[1], [7]]],
        "objects": [{"rank": 0}, {"rank": 1}],
    }
