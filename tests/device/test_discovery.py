from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch

from flowdp.device import discovery
from flowdp.device.discovery import (
    DeviceInfo,
    DevicesOption,
    DeviceSummary,
    choose_devices,
    cpu_name,
    devices,
    reach_each_other,
    resolve_devices,
)
from flowdp.errors import OptionError

GB = 2**30
CPU = torch.device("cpu")


def gpu(index: int, name: str = "NVIDIA RTX 4090", problem: str | None = None) -> DeviceInfo:
    return DeviceInfo(torch.device("cuda", index), name, 24 * GB, problem)


NO_CUDA = DeviceSummary((DeviceInfo(CPU, "some processor", 8 * GB),))
TWO = DeviceSummary((gpu(0), gpu(1)))
ONE_OF_TWO = DeviceSummary((gpu(0, problem="busy"), gpu(1)))
NONE_OF_ONE = DeviceSummary((gpu(0, problem="no kernel image"), DeviceInfo(CPU, "some processor", 8 * GB)))
CUDA = [torch.device("cuda", index) for index in range(3)]
CUDA_0, CUDA_1 = CUDA[:2]


class TestSummary:
    @pytest.mark.parametrize(
        ("summary", "line"),
        [
            (NO_CUDA, "no CUDA available | CPU mode"),
            (DeviceSummary((gpu(0),)), "1 GPU | RTX 4090 (24.0 GB) | single-device mode"),
            (TWO, "2 GPUs | RTX 4090 (24.0 GB) | RTX 4090 (24.0 GB)"),
            (
                DeviceSummary((gpu(0), gpu(1, "NVIDIA GTX 1060"))),
                "2 GPUs (heterogeneous) | RTX 4090 (24.0 GB) | GTX 1060 (24.0 GB)",
            ),
            (ONE_OF_TWO, "1 GPU | RTX 4090 (24.0 GB) | single-device mode | cuda:0 unusable: busy"),
            (NONE_OF_ONE, "no CUDA available | CPU mode | cuda:0 unusable: no kernel image"),
        ],
    )
    def test_one_line(self, summary: DeviceSummary, line: str) -> None:
        assert str(summary) == line

    def test_heterogeneous_asks_the_usable_ones(self) -> None:
        assert DeviceSummary((gpu(0), gpu(1, "other"))).heterogeneous
        assert not DeviceSummary((gpu(0), gpu(1, "other", problem="busy"))).heterogeneous

    def test_this_machine(self) -> None:
        here = devices()
        cuda = torch.cuda.device_count()
        assert len(here.devices) == cuda or here.devices[-1].device == CPU
        assert here.usable
        assert all(info.memory_bytes > 2**20 and info.name for info in here.usable)
        if not cuda:
            assert str(here) == "no CUDA available | CPU mode"

    def test_cpu_name_says_more_than_the_architecture(self) -> None:
        assert cpu_name()
        assert platform.system() != "Linux" or platform.machine() != "x86_64" or cpu_name() != "x86_64"

    @pytest.mark.gpu(1)
    def test_every_cuda_device_is_tried(self) -> None:
        assert [info.device.index for info in devices().devices] == list(range(torch.cuda.device_count()))
        assert torch.cuda.get_device_name(0) == devices().devices[0].name


class TestChoose:
    @pytest.mark.parametrize(
        ("wanted", "there", "chosen"),
        [
            ("auto", NO_CUDA, [CPU]),
            ("auto", TWO, [CUDA_0, CUDA_1]),
            ("auto", ONE_OF_TWO, [CUDA_1]),
            ("auto", NONE_OF_ONE, [CPU]),
            (1, TWO, [CUDA_0]),
            (1, ONE_OF_TWO, [CUDA_1]),
            (3, NO_CUDA, [CPU, CPU, CPU]),
            (["cpu", "cpu"], TWO, [CPU, CPU]),
            (["cpu:1", torch.device("cpu", 0)], NO_CUDA, [CPU, CPU]),
            (["cuda:1", "cuda:1"], TWO, [CUDA_1, CUDA_1]),
            ([1, 0], TWO, [CUDA_1, CUDA_0]),
            (range(2), TWO, [CUDA_0, CUDA_1]),
            (("cuda", "cpu"), TWO, [CUDA_0, CPU]),
        ],
    )
    def test_what_an_option_means(
        self, wanted: DevicesOption, there: DeviceSummary, chosen: list[torch.device]
    ) -> None:
        assert choose_devices(wanted, there) == tuple(chosen)

    @pytest.mark.parametrize(
        ("wanted", "there", "reason"),
        [
            ("cpu", NO_CUDA, r"devices must be 'auto', an int or a list, not 'cpu': try \['cpu'\]"),
            (True, NO_CUDA, "not True"),
            (None, NO_CUDA, "not None"),
            (2.0, NO_CUDA, "not 2.0"),
            ([], NO_CUDA, "devices is empty"),
            (0, NO_CUDA, "at least 1, not 0"),
            (-1, TWO, "at least 1, not -1"),
            (3, TWO, "devices=3, but this machine has cuda:0, cuda:1, cpu"),
            (2, ONE_OF_TWO, "devices=2, but this machine has cuda:1, cpu"),
            (["cuda:0"], NO_CUDA, "'cuda:0' is not here: this machine has cpu"),
            (["cuda"], NO_CUDA, "'cuda' is not here"),
            ([0], NO_CUDA, "0 is not here"),
            (["cuda:2"], TWO, "'cuda:2' is not here: this machine has cuda:0, cuda:1, cpu"),
            (["cuda:0"], ONE_OF_TWO, "cuda:0 cannot be used: busy"),
            (["meta"], TWO, "'meta' is not here"),
            (["tpu"], TWO, "'tpu' is no device of torch"),
            ([-1], TWO, "-1"),
            (["cpu", True], NO_CUDA, "a CUDA index, not True"),
            ([None], NO_CUDA, "a CUDA index, not None"),
        ],
    )
    def test_what_cannot_be(self, wanted: DevicesOption, there: DeviceSummary, reason: str) -> None:
        with pytest.raises(OptionError, match=reason):
            choose_devices(wanted, there)


class TestResolve:
    def test_cpu_replicas(self) -> None:
        assert resolve_devices(["cpu", "cpu"]) == (CPU, CPU)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
    def test_without_cuda(self) -> None:
        assert resolve_devices("auto") == (CPU,)
        assert resolve_devices(2) == (CPU, CPU)
        with pytest.raises(OptionError, match="this machine has cpu"):
            resolve_devices(["cuda:0"])

    @pytest.mark.gpu(1)
    def test_with_cuda(self) -> None:
        assert resolve_devices(["cuda"]) == (torch.device("cuda", 0),)
        assert torch.device("cuda", 0) in resolve_devices("auto")


@pytest.mark.parametrize(
    ("chosen", "together"),
    [
        ([CPU, CPU], True),
        ([CUDA[0], CUDA[0]], True),
        ([CUDA[0], CUDA[1]], True),
        ([CUDA[0], CUDA[2]], False),
        ([CUDA[2], CUDA[1]], False),  # one way is not enough
        ([CUDA[0], CPU], False),
    ],
)
def test_who_reads_whose_memory(
    chosen: list[torch.device], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = {(0, 1), (1, 0), (1, 2)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in reads)
    assert reach_each_other(chosen) is together


def test_only_the_devices_that_are_named_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    compared: list[tuple[torch.device, ...]] = []
    broken = {CUDA[2]: "out of order"}

    def problem(device: torch.device) -> str | None:
        tried.append(device)
        return broken.get(device)

    monkeypatch.setattr(discovery, "_problem_of", problem)
    monkeypatch.setattr(discovery, "_peers_of", lambda device: ())
    monkeypatch.setattr(discovery, "check_copies", compared.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    card = SimpleNamespace(name="A", total_memory=GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert resolve_devices(["cuda:1", "cuda:1"]) == (CUDA[1], CUDA[1])
    assert tried == [CUDA[1]]
    with pytest.raises(OptionError, match="cuda:2 cannot be used: out of order"):
        resolve_devices([2])
    assert resolve_devices("auto") == (CUDA[0], CUDA[1])
    with pytest.raises(OptionError, match="devices=3, but"):
        resolve_devices(3)
    assert compared == [(CUDA[1], CUDA[1]), (CUDA[0], CUDA[1])]


def test_a_device_that_has_computed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_fine", set())
    assert discovery._problem_of(CPU) is None

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("busy\nwith a stack")

    monkeypatch.setattr(torch, "ones", refuse)
    assert discovery._problem_of(CPU) is None
    monkeypatch.setattr(discovery, "_fine", set())
    assert discovery._problem_of(CPU) == "busy"
