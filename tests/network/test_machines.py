"""Real processes of one job find each other, and share values and sums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flowdp.errors import OptionError
from flowdp.network.machines import find_machines
from tests.torch_world import in_processes


def calls(rank: int) -> dict[str, Any]:
    machines = find_machines(timeout_s=60.0)
    assert machines is not None
    values = torch.full((3,), float(rank + 1), dtype=torch.float64)
    counts = torch.tensor([rank, 5 - rank])
    machines.reduce([values, counts], ["sum", "max"])
    halves = torch.full((3,), 1.5 + rank, dtype=torch.bfloat16)
    machines.reduce([halves])
    mine = torch.tensor([rank + 10])
    machines.spread([mine])
    found = {
        "place": (machines.index, machines.count, machines.leads),
        "gathered": machines.gather({"rank": rank}),
        "shared": machines.share(f"of {rank}"),
        "spread": mine.tolist(),
        "sums": values.tolist(),
        "largest": counts.tolist(),
        "halves": halves.tolist(),
        "names": machines.names,
    }
    machines.close()
    machines.close()
    return found


def test_machines_share_values_and_sums(tmp_path: Path) -> None:
    found = in_processes(calls, tmp_path, 3)
    for rank, one in enumerate(found):
        assert one["place"] == (rank, 3, rank == 0)
        assert one["gathered"] == [{"rank": other} for other in range(3)]
        assert one["shared"] == "of 0"
        assert one["spread"] == [10]
        assert one["sums"] == [6.0] * 3
        assert one["largest"] == [2, 5]
        assert one["halves"] == [7.5] * 3
        assert one["names"] == found[0]["names"]
        assert one["names"][rank].startswith(f"machine {rank} (")


def alone(rank: int) -> bool:
    return find_machines(timeout_s=60.0, wanted=False) is None


def test_a_process_may_train_by_itself_in_a_job(tmp_path: Path) -> None:
    assert in_processes(alone, tmp_path, 2) == [True, True]


def test_no_job_no_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_machines(timeout_s=1.0) is None
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a scheduler: nothing says where the others are
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert find_machines(timeout_s=1.0) is None


def test_an_environment_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "no port",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(OptionError, match=r"a job of 2 processes.*machines=False"):
        find_machines(timeout_s=1.0)
