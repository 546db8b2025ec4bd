"""Tests of the choice of a collective: by devices, policy, and what works."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from flowdp.collective import select
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.select import choose_path, open_collective, open_loop
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import HostLane, Lane, StreamLane
from flowdp.errors import CollectiveError, MachineLostError
from flowdp.network.team import Team
from flowdp.options import MachineOptions, OuterOptions
from tests.fakes import FakeCuda

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", index) for index in range(2)]


class Nccl:
    """Stands for `NcclMean`: this machine has no NCCL."""

    def __init__(self, replicas: Any, lanes: Any, outer: Any) -> None:
        self.outer = [outer] * len(replicas)


def refuse(replicas: Any, lanes: Any, outer: Any = None) -> Any:
    raise CollectiveError("cupy is not there")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(select, "NcclMean", Nccl)


def lane(device: torch.device) -> Lane:
    if device == CPU:
        return HostLane(CPU)
    # Fake streams and CPU memory, named as a card.
    made = StreamLane(CPU, FakeCuda())
    made.device, made.pinned = device, HostLane(CPU).pinned  # type: ignore[method-assign]
    return made


def opened(devices: list[torch.device], backend: Any, policy: Any = "cadence", outer: Any = None) -> Any:
    replicas = [FlatReplica(nn.Linear(2, 1), rank) for rank in range(len(devices))]
    lanes = [lane(device) for device in devices]
    return open_collective(backend, policy, replicas, lanes, lambda rank: None, outer)


def chosen(devices: list[torch.device], backend: Any = "auto", policy: Any = "cadence") -> type:
    return type(opened(devices, backend, policy))


@pytest.mark.parametrize(
    ("devices", "backend", "policy", "collective"),
    [
        ([CPU], "auto", "cadence", HostMean),
        ([CPU, CPU], "auto", "sync", HostMean),
        ([CPU, CPU], "local", "async", HostMean),
        ([CPU, CPU], "cpu", "cadence", HostMean),
        ([CUDA[0]], "auto", "cadence", DeviceMean),
        ([CUDA[0]], "cpu", "cadence", DeviceMean),  # one rank needs no host memory
        ([CPU], "cpu", "cadence", HostMean),
        (CUDA, "auto", "cadence", Nccl),
        (CUDA, "nccl", "sync", Nccl),
        (CUDA, "local", "cadence", DeviceMean),
        (CUDA, "cpu", "cadence", HostMean),
        (CUDA, "auto", "async", DeviceMean),
        ([CUDA[0], CUDA[0]], "auto", "cadence", DeviceMean),
        ([CUDA[0], CUDA[0]], "nccl", "cadence", Nccl),
        ([CUDA[0], CPU], "auto", "cadence", HostMean),
    ],
)
def test_what_is_taken(devices: list[torch.device], backend: Any, policy: Any, collective: type) -> None:
    assert chosen(devices, backend, policy) is collective


@pytest.mark.parametrize("devices", [[CPU, CPU], CUDA, [CUDA[0], CUDA[0]], [CUDA[0], CPU]])
def test_each_way_takes_the_outer_step(devices: list[torch.device]) -> None:
    assert len(opened(devices, "auto", outer=OuterOptions()).outer) == 2
    assert not any(opened(devices, "auto").outer)


def test_without_nccl_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "NcclMean", refuse)
    with caplog.at_level(logging.WARNING, "flowdp"):
        assert chosen(CUDA) is DeviceMean
    assert "without NCCL: cupy is not there" in caplog.text
    caplog.clear()
    with pytest.raises(CollectiveError, match="cupy is not there"):
        chosen(CUDA, "nccl")
    assert not caplog.text


def test_xpus_average_through_the_host() -> None:
    assert chosen([torch.device("xpu", index) for index in range(2)]) is HostMean
    assert chosen([torch.device("xpu", 0)] * 2) is DeviceMean


def test_cards_that_do_not_reach_each_other_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    monkeypatch.setattr(select, "NcclMean", refuse)
    assert chosen(CUDA) is HostMean
    assert chosen(CUDA, "local") is DeviceMean  # as requested: the driver copies by its own detour


# ---------------------------------------------------------------- loops of one thread
class Loop:
    """Stands for `NcclLoop`."""

    def __init__(self, lanes: Any, sizes: Any) -> None:
        self.sizes = sizes


@pytest.mark.parametrize(
    ("devices", "backend", "is_nccl"),
    [
        (CUDA, "auto", True),
        (CUDA, "nccl", True),
        (CUDA, "local", False),
        ([CUDA[0], CUDA[0]], "auto", False),
        ([CUDA[0], CUDA[0]], "nccl", True),
        ([CUDA[0], CPU], "auto", False),
        ([CPU, CPU], "auto", False),
        ([CUDA[0]], "auto", False),
        ([CUDA[0]], "nccl", False),
    ],
)
def test_what_a_loop_takes(
    monkeypatch: pytest.MonkeyPatch, devices: list[torch.device], backend: Any, is_nccl: bool
) -> None:
    monkeypatch.setattr(select, "NcclLoop", Loop)
    opened = open_loop(backend, list(map(lane, devices)), {torch.float32: 3})
    assert (opened is not None) is is_nccl


# ---------------------------------------------------------------- several machines
class Others:
    """The machines of a job, of which the other one says the same, or not."""

    index, count = 0, 2

    def __init__(self, *, agrees: bool = True) -> None:
        self._agrees = agrees

    def gather(self, value: Any) -> list[Any]:
        return [value, self._agrees and value]


def team(size: int, payload: Any = "full", *, agrees: bool = True) -> Any:
    return Team((size, 1), Others(agrees=agrees), MachineOptions(payload=payload))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "backend", "options", "path"),
    [
        (CUDA, "auto", {}, "nccl"),
        (CUDA[:1], "auto", {}, "nccl"),
        (CUDA, "nccl", {}, "nccl"),
        (CUDA, "cpu", {}, "cpu"),
        (CUDA, "auto", {"overlaps": True}, "cpu"),
        (CUDA, "auto", {"payload": "bf16"}, "cpu"),
        ([CUDA[0], CUDA[0]], "auto", {}, "cpu"),
        ([CPU, CPU], "auto", {}, "cpu"),
    ],
)
def test_the_path_between_machines(
    devices: list[torch.device], backend: Any, options: dict[str, Any], path: str
) -> None:
    of = team(len(devices), options.get("payload", "full"))
    chosen = choose_path(backend, "sync", devices, of, overlaps=options.get("overlaps", False))
    assert chosen.backend == path
    assert "between machines" in str(chosen)
    assert (chosen.fallback is not None) == (path == "nccl" and backend == "auto")


class Spread(HostMean):
    """Stands for `HostMean`, which would open groups."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.team = given[4]


def spread(monkeypatch: pytest.MonkeyPatch, backend: Any, *, agrees: bool = True) -> Any:
    monkeypatch.setattr(select, "HostMean", Spread)
    replicas = [FlatReplica(nn.Linear(2, 1), 0)]
    of = team(1, agrees=agrees)
    return open_collective(backend, "sync", replicas, [lane(CUDA[0])], lambda rank: None, None, of)


def test_nccl_is_opened_on_all_machines_or_on_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def open_them(replicas: Any, lanes: Any, team: Any, outer: Any) -> str:
        return f"nccl of {team.world_size}"

    monkeypatch.setattr(select, "open_nccl_machines", open_them)
    assert spread(monkeypatch, "auto") == "nccl of 2"
    assert isinstance(spread(monkeypatch, "auto", agrees=False), Spread)
    monkeypatch.setattr(select, "open_nccl_machines", lambda *given: refuse(*given[:2]))
    with caplog.at_level(logging.WARNING, "flowdp"):
        assert isinstance(spread(monkeypatch, "auto"), Spread)
    assert "without NCCL: cupy is not there" in caplog.text
    with pytest.raises(CollectiveError, match="cupy is not there"):
        spread(monkeypatch, "nccl")


def test_a_machine_that_is_lost_meanwhile_is_no_reason_for_another_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(*given: Any) -> Any:
        raise MachineLostError("machine 1 was lost")

    monkeypatch.setattr(select, "open_nccl_machines", lose)
    with pytest.raises(MachineLostError, match="machine 1 was lost"):
        spread(monkeypatch, "auto")
