from __future__ import annotations

import platform

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
from tests.accelerators import pretend

GB = 2**30
CPU = torch.device("cpu")


def gpu(index: int, name: str = "NVIDIA RTX 4090", problem: str | None = None) -> DeviceInfo:
    return DeviceInfo(torch.device("cuda", index), name, 24 * GB, problem)


def xpu(index: int) -> DeviceInfo:
    return DeviceInfo(torch.device("xpu", index), "Intel Arc", 16 * GB)


NO_CUDA = DeviceSummary((DeviceInfo(CPU, "some processor", 8 * GB),))
TWO = DeviceSummary((gpu(0), gpu(1)))
ONE_OF_TWO = DeviceSummary((gpu(0, problem="busy"), gpu(1)))
NONE_OF_ONE = DeviceSummary((gpu(0, problem="no kernel image"), DeviceInfo(CPU, "some processor", 8 * GB)))
XPUS = DeviceSummary((xpu(0), xpu(1)))
XPU_1 = torch.device("xpu", 1)


MAC = DeviceSummary(
    (DeviceInfo(torch.device("mps", 0), "MPS device", 0, "no float64"), DeviceInfo(CPU, "Apple M4", 8 * GB))
)
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
            (XPUS, "2 XPUs | Intel Arc (16.0 GB) | Intel Arc (16.0 GB)"),
            (DeviceSummary((xpu(0),)), "1 XPU | Intel Arc (16.0 GB) | single-device mode"),
            (MAC, "no CUDA available | CPU mode | mps:0 unusable: no float64"),
        ],
    )
    def test_one_line(self, summary: DeviceSummary, line: str) -> None:
        assert str(summary) == line

    def test_heterogeneous_asks_the_usable_ones(self) -> None:
        assert DeviceSummary((gpu(0), gpu(1, "other"))).heterogeneous
        assert not DeviceSummary((gpu(0), gpu(1, "other", problem="busy"))).heterogeneous

    def test_this_machine(self) -> None:
        here = devices()
        count = torch.accelerator.device_count()
        assert len(here.devices) == count or here.devices[-1].device == CPU
        assert here.usable
        assert all(info.memory_bytes > 2**20 and info.name for info in here.usable)
        if not count:
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
            ("auto", XPUS, [torch.device("xpu", 0), XPU_1]),
            (1, XPUS, [torch.device("xpu", 0)]),
            ([1, "xpu", "cpu"], XPUS, [XPU_1, torch.device("xpu", 0), CPU]),
            ("auto", MAC, [CPU]),
            (2, MAC, [CPU, CPU]),
        ],
    )
    def test_what_an_option_means(
        self, wanted: DevicesOption, there: DeviceSummary, chosen: list[torch.device]
    ) -> None:
        assert choose_devices(wanted, there) == tuple(chosen)

    @pytest.mark.parametrize(
        ("wanted", "there", "reason"),
        [
            ("cpu", NO_CUDA, r"'auto', an int or a list such as \['cpu', 'cpu'\], not 'cpu'$"),
            ("gpu", NO_CUDA, r"'auto', an int or a list such as \['cpu', 'cpu'\], not 'gpu'$"),
            ("2", TWO, "'auto', an int or a list such as .*, not '2'$"),
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
            (["cuda:0"], XPUS, "'cuda:0' is not here: this machine has xpu:0, xpu:1, cpu"),
            (["mps"], MAC, "mps:0 cannot be used: no float64"),
            (["mps"], NO_CUDA, "'mps' is not here"),
            (["tpu"], TWO, "'tpu' is no device of torch"),
            ([-1], TWO, "-1"),
            (["cpu", True], NO_CUDA, "the index of an accelerator, not True"),
            ([None], NO_CUDA, "the index of an accelerator, not None"),
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


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_only_the_devices_that_are_named_are_tried(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    compared: list[tuple[torch.device, ...]] = []
    cards = [torch.device(kind, index) for index in range(3)]
    broken = {cards[2]: "out of order"}

    def problem(device: torch.device) -> str | None:
        tried.append(device)
        return broken.get(device)

    pretend(monkeypatch, kind, count=3)
    monkeypatch.setattr(discovery, "_problem_of", problem)
    monkeypatch.setattr(discovery, "check_copies", compared.append)
    assert resolve_devices([f"{kind}:1", f"{kind}:1"]) == (cards[1], cards[1])
    assert tried == [cards[1]]
    with pytest.raises(OptionError, match=f"{kind}:2 cannot be used: out of order"):
        resolve_devices([2])
    assert resolve_devices("auto") == (cards[0], cards[1])
    with pytest.raises(OptionError, match="devices=3, but"):
        resolve_devices(3)
    assert compared == [(cards[1], cards[1]), (cards[0], cards[1])]


@pytest.mark.parametrize(
    ("fault", "error"), [("float64", RuntimeError), ("float64", TypeError), ("memory", RuntimeError)]
)
def test_a_device_is_tried_for_what_flowdp_needs_of_it(
    fault: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ones(count: int, *, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if fault == "float64" and dtype == torch.float64:
            raise error("Required aspect fp64 is not supported on the device")
        return torch.full((count,), 1, dtype=dtype)

    def info(device: torch.device) -> tuple[int, int]:
        if fault == "memory":
            raise RuntimeError("The device doesn't support querying the available free memory.")
        return 1, 2

    monkeypatch.setattr(discovery, "_fine", set())
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.xpu, "mem_get_info", info)
    problem = discovery._problem_of(XPU_1)
    assert problem is not None
    assert ("fp64" if fault == "float64" else "free memory") in problem
    assert not discovery._fine
    fault = ""
    assert discovery._problem_of(XPU_1) is None
    assert discovery._fine == {XPU_1}
