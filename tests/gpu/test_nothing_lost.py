"""Tests of long runs on cards: resuming, too little memory, NaN or inf parameters, ranks that leave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.cadences import cadence_for
from bench.gpu.checks import BATCH_SIZE, deviation, faults_of, held_by, samples
from bench.gpu.checks import model as perceptron
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.nccl import NcclMean
from flowdp.device.streams import Lane, StreamLane, open_lanes
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine import build as engine_module
from flowdp.replica.rank_state import capture
from flowdp.replica.replica import Replica
from tests.collective.fake_nccl import FakeNccl
from tests.fakes import FakeCuda, FakeEvent
from tests.gpu.conftest import Ranks, fake_streams
from tests.gpu.test_memory import MIB
from tests.gpu.test_memory import limited as limited  # a fixture
from tests.limits import HANG_S
from tests.parts import parts_of

Hold = Callable[[Lane], Callable[[], bool]]

COUNT = 160


def error(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0][:, 2:]), batch[1])


def trainer(devices: Sequence[torch.device], loss: Any = error, **options: Any) -> flowdp.Trainer:
    torch.manual_seed(0)
    policy = options.pop("policy", "cadence")
    return flowdp.Trainer(
        options.pop("model", perceptron),
        lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
        loss,
        dataset=options.pop("dataset", samples(COUNT)),
        devices=list(devices),
        progress=False,
        **{
            "per_device_batch_size": BATCH_SIZE,
            "epochs": 3,
            "policy": policy,
            "cadence": cadence_for(policy, anchor=2, max_anchor=2),
            **options,
        },
    )


# ---------------------------------------------------------------- checkpoints
def with_dropout(device: torch.device) -> nn.Module:
    """Only on a card: the CPU's generator belongs to the process, and is not saved."""
    rate = 0.5 if device.type == "cuda" else 0.0
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(rate), nn.Linear(16, 1)).to(device)


def test_a_resumed_run_has_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    """Each card's generator is saved and restored; ranks that share one would draw in any order."""
    devices = ranks(2)
    if devices[0] == devices[1] and devices[0].type == "cuda":
        devices = devices[:1]
    saves = flowdp.CheckpointOptions(tmp_path, every=3, unit="step", keep_last=100)
    options = {"model": with_dropout, "policy": "sync", "epochs": 2}
    whole = trainer(devices, checkpoint=saves, **options).fit()
    found = sorted(tmp_path.glob("*.pt"))
    assert len(found) >= 2  # while one is written, others are skipped
    if devices[0].type == "cuda":  # resuming must not depend on it
        torch.cuda.manual_seed_all(99)
    for path in (found[0], found[len(found) // 2]):
        resumed = trainer(devices, resume=path, **options).fit()
        assert resumed.global_step == whole.global_step
        assert [record.loss for record in resumed.history] == [record.loss for record in whole.history]
        for name, tensor in whole.state_dict.items():
            assert torch.equal(resumed.state_dict[name], tensor), name


def replica_on(lane: Lane) -> Replica:
    """A replica that has taken a step."""
    with lane.on(lane.compute):
        module = perceptron().to(lane.device)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)
        replica = Replica(parts_of(module, optimizer, lane), lambda m, batch: m(batch).square().mean())
        worker = CurrentWorker(0, lane.device, module, samples=4, sink=lambda *_: None)
        replica.add(torch.randn(4, 8, device=lane.device), worker)
        replica.step()
    lane.drain()
    return replica


@pytest.fixture
def held_back(device: torch.device, has_streams: bool, monkeypatch: pytest.MonkeyPatch) -> Hold:
    """`held_back(lane)` delays the device and returns a function that releases it: true if it was late."""

    def hold(lane: Lane) -> Callable[[], bool]:
        if device.type == "cuda":
            mark = lane.event()
            torch.cuda._sleep(1_000_000_000)  # half a second
            mark.record(lane.compute)
            return lambda: not mark.query()
        gone_on = threading.Event()
        if has_streams:  # a thread that waits for an event does not get past it
            monkeypatch.setattr(FakeEvent, "passed", gone_on)

        def is_late() -> bool:
            gone_on.set()
            return True  # or the capture would not have returned

        return is_late

    return hold


def test_a_capture_leaves_the_host_to_go_on(device: torch.device, has_streams: bool, held_back: Hold) -> None:
    is_fake = has_streams and device.type == "cpu"
    lane = StreamLane(device, FakeCuda()) if is_fake else open_lanes([device])[0]
    replica = replica_on(lane)
    with lane.on(lane.compute):
        capture(replica, shared=True)()  # allocates the host memory
        wanted = {name: tensor.clone() for name, tensor in replica.module.state_dict().items()}
        moments = [state["exp_avg"].clone() for state in replica.optimizers[0].state.values()]
        is_late = held_back(lane)
        taken = capture(replica, shared=True)
        assert is_late()
        for parameter in replica.module.parameters():
            parameter.data.add_(1)  # training continues
        state = taken()
    lane.drain()
    for name, tensor in wanted.items():
        assert torch.equal(state["model"][name], tensor.cpu()), name
        assert state["model"][name].device.type == "cpu"
    saved = [entry["exp_avg"] for entry in state["optimizers"][0]["state"].values()]
    assert all(torch.equal(one, other.cpu()) for one, other in zip(saved, moments, strict=True))


# ---------------------------------------------------------------- too little memory
def test_a_batch_for_which_there_is_no_room_is_taken_in_pieces(device: torch.device, limited: Any) -> None:
    """Real on a card: a sample's step needs 64 MiB, and there is room for 24 of the 64 samples."""
    seen: list[Tensor] = []
    unit = 64 * MIB

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        if device.type == "cuda":
            torch.empty(len(x) * unit, dtype=torch.uint8, device=device)
        elif len(x) > 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
        seen.append(x[:, 0].clone())
        return error(model, batch)

    plain = {
        "policy": "cadence",
        "model": lambda: nn.Linear(8, 1),
        "per_device_batch_size": 64,
        "dataset": samples(128),
    }
    wanted = trainer([device], error, **plain).fit().state_dict
    if device.type == "cuda":
        limited(24 * unit)
    run = trainer([device], loss, **plain).start()
    state = run.join(HANG_S)
    assert run.status().pieces == (4,)
    assert sorted(int(i) for part in seen for i in part.tolist()) == sorted([*range(128)] * 3)
    assert {len(part) for part in seen} == {16}
    for name, tensor in wanted.items():
        torch.testing.assert_close(state.state_dict[name], tensor, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- NaN or inf parameters
@pytest.mark.parametrize(
    ("policy", "backend"), [("sync", "auto"), ("cadence", "cpu"), ("async", "auto"), ("exact", "auto")]
)
def test_a_replica_that_leaves_the_numbers_is_left_out(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, policy: str, backend: str
) -> None:
    has_failed: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        is_bad = worker.rank == 1 and worker.local_step >= 2 and not has_failed
        if is_bad:
            has_failed.append(worker.epoch)
        return error(model, batch) * (float("nan") if is_bad else 1.0)

    with caplog.at_level(logging.WARNING, "flowdp"):
        run = trainer(
            ranks(2), loss, policy=policy, runtime=flowdp.RuntimeOptions(backend=backend), epochs=5
        ).start()
        replicas = run._engine.replicas
        state = run.join(HANG_S)
    assert state.epochs_done == 5
    assert has_failed
    assert any("rank 1 on" in text and "had NaN or infinite numbers" in text for text in caplog.messages)
    assert all(bool(tensor.isfinite().all()) for tensor in state.state_dict.values())
    first, second = (held_by(replica.module).cpu() for replica in replicas)
    assert torch.equal(first, second)
    assert state.history[-1].loss < 1.5 * state.history[has_failed[0] + 1].loss


# ---------------------------------------------------------------- ranks that leave
@pytest.mark.parametrize("count", [2, 3])
def test_means_without_a_rank_that_left(device: torch.device, count: int) -> None:
    assert deviation([device] * count, DeviceMean, leaves=True) < 1e-6
    through_the_host = lambda flats, lanes: HostMean(flats, lanes, lambda _: None)  # noqa: E731
    assert deviation([device] * count, through_the_host, leaves=True) < 1e-6


@pytest.mark.gpu(2)
@pytest.mark.parametrize("make", [DeviceMean, NcclMean])
def test_means_between_cards_without_one_that_left(make: Any) -> None:
    cards = [torch.device("cuda", index) for index in range(min(3, torch.cuda.device_count()))]
    assert deviation(cards, make, leaves=True) < 1e-6


@pytest.mark.parametrize(("policy", "backend"), [("sync", "auto"), ("cadence", "cpu")])
def test_the_others_go_on(ranks: Ranks, policy: str, backend: str) -> None:
    assert faults_of(ranks(3), policy=policy, runtime=flowdp.RuntimeOptions(backend=backend), leaver=1) == []


@pytest.fixture(params=[pytest.param("cards", marks=pytest.mark.gpu(2)), "streams"])
def over_nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ranks averaged by NCCL: one per card, three at most; or three on a fake NCCL."""
    if request.param == "cards":
        return {
            "devices": [f"cuda:{n}" for n in range(min(3, torch.cuda.device_count()))],
            "runtime": flowdp.RuntimeOptions(backend="nccl"),
        }
    fake_streams(monkeypatch)

    def collective(
        _: Any,
        policy: Any,
        replicas: Any,
        lanes: Any,
        meet: Any,
        outer: Any,
        *_team: Any,
        **_on: Any,
    ) -> NcclMean:
        return NcclMean(replicas, lanes, FakeNccl(lanes[0].device_module, lanes), outer)

    monkeypatch.setattr(engine_module, "open_collective", collective)
    return {"devices": ["cpu"] * 3}


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_the_others_go_on_over_nccl(over_nccl: dict[str, Any], policy: str) -> None:
    assert faults_of(**over_nccl, policy=policy, leaver=1, stall="averaging") == []
