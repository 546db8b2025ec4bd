"""Tests of memory: the gauge, too little memory, leftovers of a run."""

from __future__ import annotations

import gc
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu.checks import BATCH_SIZE, Single, model, samples
from flowdp.data.prefetch import PrefetchFeed
from flowdp.data.resident import ResidentFeed
from flowdp.device import streams
from flowdp.device.memory import read_memory

MIB = 1 << 20


def free_by_nvidia_smi() -> int:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not installed")
    uuid = torch.cuda.get_device_properties(0).uuid
    asked = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0 or not answer.stdout.strip().isdigit():
        pytest.skip(f"nvidia-smi does not report this card: {answer.stdout}{answer.stderr}")
    return int(answer.stdout) * MIB


@pytest.mark.gpu(1)
def test_the_gauge_reads_what_nvidia_says():
    device = torch.device("cuda", 0)
    (lane,) = streams.open_lanes([device])
    before, theirs = read_memory(lane), free_by_nvidia_smi()
    taken = torch.empty(1024 * MIB, dtype=torch.uint8, device=device)
    after, theirs_after = read_memory(lane), free_by_nvidia_smi()
    assert before is not None
    assert after is not None
    assert abs(before.total - torch.cuda.get_device_properties(0).total_memory) < 1024 * MIB
    assert abs((before.free - after.free) - (theirs - theirs_after)) < 64 * MIB
    assert abs(after.free - theirs_after) < 1024 * MIB  # memory reserved by the driver
    assert after.active - before.active == taken.nbytes
    assert after.peak >= after.active


# ---------------------------------------------------------------- the same training
def losses(device: torch.device, dataset: Any) -> tuple[Tensor, list[Any]]:
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = F.mse_loss(model(batch[0][:, 2:]), batch[1])
        seen.append(value.detach())
        return value

    torch.manual_seed(1)
    run = flowdp.Trainer(
        model(),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        loss,
        dataset=dataset,
        batch_size=BATCH_SIZE,
        epochs=3,
        devices=[device],
        progress=False,
    ).start()
    feeds = run._engine._feeds
    run.join()
    return torch.stack(seen).cpu(), feeds


def test_data_there_and_streamed_data_train_the_same(device, has_streams):
    there, feeds = losses(device, samples())
    streamed, other_feeds = losses(device, Single(samples()))
    assert torch.equal(there, streamed)
    if has_streams:
        assert (type(feeds[0]), type(other_feeds[0])) == (ResidentFeed, PrefetchFeed)
    if device.type == "cuda":
        lying, lying_feeds = losses(device, tuple(tensor.to(device) for tensor in samples()))
        assert torch.equal(there, lying)
        assert type(lying_feeds[0]) is ResidentFeed


# ---------------------------------------------------------------- too little memory
class Wide:
    """Batches of `row_bytes` per sample."""

    def __init__(self, length: int, row_bytes: int) -> None:
        self._length = length
        self._width = row_bytes // 4

    def __len__(self) -> int:
        return self._length

    def get_batch(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.float32).unsqueeze(1).expand(-1, self._width).clone()


def train_wide(device: torch.device, dataset: Any) -> tuple[list[int], Any]:
    """Train an epoch; returns the samples seen, and the feed."""
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        rows = batch if isinstance(batch, Tensor) else batch[0]
        seen.append(rows[:, -1].clone())
        if device.type == "cuda":
            torch.cuda._sleep(40_000_000)  # some 20 ms: longer than a batch takes to make
        return model(rows[:, :8].float()).square().mean()

    run = flowdp.Trainer(
        nn.Linear(8, 1),
        lambda params: torch.optim.SGD(params, lr=1e-9),
        loss,
        dataset=dataset,
        batch_size=16,
        epochs=1,
        devices=[device],
        progress=False,
    ).start()
    [feed] = run._engine._feeds
    run.join()
    return sorted(int(i) for rows in seen for i in rows.tolist()), feed


@pytest.fixture
def limited() -> Iterator[Any]:
    """`limited(bytes)`: the allocator gets this much more than it holds, unknown to the gauge."""

    def limit(more: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + more) / total, 0)

    yield limit
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        torch.cuda.empty_cache()


def test_a_ring_takes_what_there_is(device, limited):
    is_cuda = device.type == "cuda"
    row_bytes = 2 * MIB if is_cuda else 1024
    if is_cuda:
        limited(5 * 16 * row_bytes)
    seen, feed = train_wide(device, Wide(16 * 40, row_bytes))
    assert seen == list(range(16 * 40))
    if is_cuda:
        assert 1 <= feed.depth < 5


def test_a_dataset_that_does_not_fit_after_all_is_streamed(device, limited):
    is_cuda = device.type == "cuda"
    width = 256 * 1024 if is_cuda else 16
    rows = torch.arange(640, dtype=torch.float32).unsqueeze(1).expand(-1, width).contiguous()
    if is_cuda:
        limited(rows.nbytes // 2)
    seen, feed = train_wide(device, (rows,))
    assert seen == list(range(640))
    assert not is_cuda or type(feed) is PrefetchFeed


@pytest.mark.gpu(1)
def test_on_a_full_card_one_batch_is_ahead_and_no_dataset_is_brought():
    free, _ = torch.cuda.mem_get_info(0)
    filler = torch.empty(free - 3000 * MIB, dtype=torch.uint8, device="cuda:0")
    try:
        rows = torch.arange(640, dtype=torch.float32).unsqueeze(1).expand(-1, 1024).contiguous()
        for dataset in ((rows,), Wide(640, 4096)):
            seen, feed = train_wide(torch.device("cuda", 0), dataset)
            assert seen == list(range(640))
            assert (type(feed), feed.depth) == (PrefetchFeed, 1)
    finally:
        del filler
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- leftovers
def left(device: torch.device) -> tuple[int, int, int]:
    """Bytes on the device, lanes of the process, threads."""
    gc.collect()
    allocated = 0
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one for each pair of a thread's handle and a stream
        allocated = torch.cuda.memory_allocated(device)
    return allocated, len(streams._made), threading.active_count()


def start_and_stop(device: torch.device, number: int) -> None:
    data = samples(160)
    run = flowdp.Trainer(
        model(),
        lambda params: torch.optim.SGD(params, lr=1e-3),
        lambda model, batch: F.mse_loss(model(batch[0][:, 2:]), batch[1]),
        dataset=Single(data) if number % 2 else data,
        per_device_batch_size=BATCH_SIZE,
        epochs=1 if number % 3 else 1000,
        policy=("sync", "cadence", "async")[number % 3],
        runtime=flowdp.RuntimeOptions(backend=("local", "cpu")[number // 2 % 2]),
        devices=[device] * 2,
        progress=False,
    ).start()
    if number % 3 == 0:
        run.stop()
    state = run.join(60)
    assert state.interrupted == (number % 3 == 0)


def test_starts_and_stops_leave_nothing(device):
    for number in range(12):
        start_and_stop(device, number)
    before = left(device)
    for number in range(200 if device.type == "cuda" else 6):
        start_and_stop(device, number)
    assert left(device) == before
