"""No two processes of a job train on one CUDA device; the devices' names and numbers are faked here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowdp.errors import OptionError
from flowdp.network import devices as module
from flowdp.network.devices import check_devices
from flowdp.network.machines import find_machines
from tests.torch_world import in_processes


def checked(rank: int, uuids: list[list[str | None]]) -> str:
    machines = find_machines(timeout_s=60.0)
    assert machines is not None
    own = dict(zip((torch.device("cuda", index) for index in range(2)), uuids[rank], strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "device_uuid", own.__getitem__)
        try:
            check_devices(machines, [torch.device("cpu"), *own, *own])  # a device may have several ranks
        except OptionError as error:
            return str(error)
        finally:
            machines.close()
    return ""


@pytest.mark.parametrize("count", [2, 3])
def test_devices_of_their_own(tmp_path: Path, count: int) -> None:
    uuids = [[f"card-{rank}-0", f"card-{rank}-1"] for rank in range(count)]
    assert in_processes(checked, tmp_path, count, uuids) == [""] * count


def test_a_device_of_two_processes_is_an_error_on_all(tmp_path: Path) -> None:
    first, second, third = in_processes(checked, tmp_path, 3, [["a"], ["b", "c"], ["c"]])
    assert first == second == third
    assert first.startswith("machine 1 (")
    assert "and machine 2 (" in first
    assert "both train on cuda:" in first
    assert "start one process on each host" in first


def test_nccls_own_variable_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert in_processes(checked, tmp_path, 2, [["a"], ["a"]]) == [""] * 2


def test_devices_without_an_identifier_are_not_compared(tmp_path: Path) -> None:
    assert in_processes(checked, tmp_path, 2, [[None], [None]]) == [""] * 2
