"""Tests of values that travel between machines, in real processes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flowdp.errors import CollectiveError
from flowdp.network.machines import Machines
from flowdp.network.transfer import Transfer
from tests.limits import HANG_S
from tests.torch_world import in_processes

pytestmark = pytest.mark.posix


def values() -> dict[str, Any]:
    """One of each kind that a saved state may hold."""
    draw = torch.Generator().manual_seed(3)
    matrix = torch.randn(5, 7, generator=draw)
    picture = torch.randn(2, 3, 4, 5, generator=draw).to(memory_format=torch.channels_last)
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64)
    return {
        "matrix": matrix,
        "the same": [matrix, {"again": matrix}],
        "a part": matrix[1:3, ::2],
        "channels last": picture,
        "conjugated": torch.randn(3, dtype=torch.complex64, generator=draw).conj(),
        "dtypes": [torch.ones(3, 2).to(kind) for kind in kinds],
        "empty": torch.empty(0, 4),
        "step": torch.tensor(7.0),
        "sparse": torch.eye(3).to_sparse(),
        "large": torch.arange(3_000_000),
        "plain": (1, 2.5, "text", None, (True, b"bytes")),
    }


def told(rank: int) -> Any:
    machines = Machines(HANG_S)
    transfer = Transfer(machines)
    assert list(transfer.others) == [1, 2]
    if rank:
        transfer.send(values() | {"from": rank}, 0)
        transfer.send("the end", 0)
        return None
    first = [transfer.receive(machine) for machine in transfer.others]
    assert [transfer.receive(machine) for machine in transfer.others] == ["the end"] * 2
    wanted = values()
    for machine, value in zip(transfer.others, first, strict=True):
        assert value.pop("from") == machine
        assert value.keys() == wanted.keys()
        assert value["the same"][0] is value["the same"][1]["again"] is value["matrix"]
        for name in ("matrix", "a part", "channels last", "conjugated", "empty", "step", "large"):
            assert torch.equal(value[name], wanted[name]), name
            assert value[name].dtype == wanted[name].dtype
        assert value["channels last"].is_contiguous(memory_format=torch.channels_last)
        for own, mine in zip(value["dtypes"], wanted["dtypes"], strict=True):
            assert own.dtype == mine.dtype
            assert torch.equal(own, mine)
        assert torch.equal(value["sparse"].to_dense(), wanted["sparse"].to_dense())
        assert value["plain"] == wanted["plain"]
    return True


def test_a_value_arrives_with_its_tensors_once_each_and_in_order(tmp_path: Path) -> None:
    assert in_processes(told, tmp_path, 3) == [True, None, None]


def lost(rank: int, folder: str) -> Any:
    machines = Machines(HANG_S)
    transfer = Transfer(machines)
    pipe = Path(folder) / "pipe"
    if rank:
        pipe.open("wb").close()  # until machine 0 is there
        os._exit(0)
    pipe.open("rb").close()
    begin_s = time.monotonic()
    texts = []
    for act in (lambda: transfer.receive(1), lambda: transfer.send(values(), 1)):
        try:
            act()
        except CollectiveError as error:
            texts.append(str(error))
    took_s = time.monotonic() - begin_s
    (Path(folder) / "found.json").write_text(json.dumps([took_s, texts]))
    os._exit(0)  # the other one comes to no end in common


def test_a_lost_machine_is_named_without_waiting_for_the_timeout(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    in_processes(lost, tmp_path, 2, str(tmp_path))
    took_s, texts = json.loads((tmp_path / "found.json").read_text())
    assert took_s < HANG_S / 2
    received, sent = texts
    assert re.match(r"receiving states from machine 1 \(.+\) failed: it was lost", received)
    assert re.match(r"sending states to machine 1 \(.+\) failed: it was lost", sent)
