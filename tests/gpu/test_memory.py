"""Tests of memory: the gauge, too little memory, leftovers of a run."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu.checkpoint import pinned_bytes
from bench.gpu.checks import BATCH_SIZE, Single, model, samples
from flowdp.checkpoint import host_copies
from flowdp.data.prefetch import PrefetchFeed
from flowdp.data.resident import ResidentFeed
from flowdp.device import streams
from flowdp.device.memory import read_memory
from flowdp.engine import barrier_tasks
from flowdp.policy.budget import DEPTH_LIMIT
from tests.limits import HANG_S

MIB = 1 << 20


def free_by_nvidia_smi() -> int:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not installed")
    uuid = torch.cuda.get_device_properties(0).uuid
    asked = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=HANG_S, check=False)
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
    feeds = [worker.parts.feed for worker in run._engine._parts.workers]
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


def train_wide(
    device: torch.device, dataset: Any, waits_for: Callable[[Any], bool] | None = None, **options: Any
) -> tuple[list[int], Any]:
    """Train an epoch; returns the samples seen, and the feed, for which the tenth step on a card waits."""
    seen: list[Tensor] = []
    feeds: list[Any] = []
    pause = threading.Event()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        rows = batch if isinstance(batch, Tensor) else batch[0]
        seen.append(rows[:, -1].clone())
        if device.type == "cuda" and len(seen) == 10 and waits_for is not None:
            while not (feeds and waits_for(feeds[0])):
                assert not pause.wait(0.01)
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
        **options,
    ).start()
    [worker] = run._engine._parts.workers
    feeds.append(worker.parts.feed)
    try:
        run.join(HANG_S)
    finally:
        pause.set()
    return sorted(int(i) for rows in seen for i in rows.tolist()), feeds[0]


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
    # A batch takes longer to make than a step: so the ring is waited for until it has found no more room.
    seen, feed = train_wide(
        device, Wide(16 * 40, row_bytes), lambda feed: feed._gauge._budget.limits[0] < DEPTH_LIMIT
    )
    assert seen == list(range(16 * 40))
    if is_cuda:
        assert feed.depth < 5


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
@pytest.mark.parametrize(("part", "depth"), [(0.5, DEPTH_LIMIT), (0.97, 0)], ids=["half full", "nearly full"])
def test_batches_ahead_leave_the_memory_of_others_alone(part, depth):
    """On a nearly full card no batch is ahead, and no dataset is brought there."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    filler = torch.empty(free - int((1 - part) * total), dtype=torch.uint8, device="cuda:0")
    try:
        rows = torch.arange(640, dtype=torch.float32).unsqueeze(1).expand(-1, 1024).contiguous()
        for dataset in ((rows,), Wide(640, 4096)):
            seen, feed = train_wide(torch.device("cuda", 0), dataset)
            assert seen == list(range(640))
            if isinstance(dataset, Wide) or not depth:
                assert (type(feed), feed.depth) == (PrefetchFeed, depth)
    finally:
        del filler
        torch.cuda.empty_cache()


@pytest.mark.gpu(1)
def test_as_many_batches_are_ahead_as_have_room():
    square = torch.ones(8, 8, device="cuda:0")
    (square @ square).sum().item()  # loads cuBLAS, which takes memory that is no batch's
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    room = 512 * MIB
    runtime = flowdp.RuntimeOptions(memory_fraction=(total - free + room) / total)
    seen, feed = train_wide(torch.device("cuda", 0), Wide(16 * 40, 4 * MIB), runtime=runtime)
    assert seen == list(range(16 * 40))
    assert 4 <= feed.depth <= 8  # training takes some of it, and cuBLAS its workspace


OTHER_PROGRAM = """
import sys, torch
free, total = torch.cuda.mem_get_info(0)
taken = torch.empty(free - int(0.05 * total), dtype=torch.uint8, device="cuda:0")
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu(1)
@pytest.mark.long
def test_batches_ahead_make_room_for_another_program_and_come_back():
    """The device's memory is read once in a second."""
    feeds: list[PrefetchFeed] = []
    wanted = {"ahead": lambda depth: depth > 0, "gone": lambda depth: depth == 0}
    waits_for, reached = ["ahead"], threading.Event()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)
        if feeds and wanted[waits_for[0]](feeds[0].depth):
            reached.set()
        return model(batch[:, :8]).square().mean()

    def await_(state: str) -> bool:
        waits_for[0] = state
        reached.clear()
        return reached.wait(HANG_S)

    run = flowdp.Trainer(
        nn.Linear(8, 1),
        lambda params: torch.optim.SGD(params, lr=1e-9),
        loss,
        dataset=Wide(16 * 40, MIB),
        batch_size=16,
        epochs=10**6,
        devices=["cuda:0"],
        progress=False,
    ).start()
    feeds += [worker.parts.feed for worker in run._engine._parts.workers]
    try:
        assert await_("ahead")
        with subprocess.Popen(
            [sys.executable, "-c", OTHER_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            try:
                assert other.stdout is not None
                assert other.stdout.readline() == "taken\n"
                assert await_("gone")
            finally:
                other.kill()
        assert await_("ahead")
    finally:
        run.stop()
        run.join(HANG_S)


def test_a_step_without_room_gets_that_of_the_batches_ahead(device, has_streams, limited):
    """Real on a card: the ring has a third of the allocator's memory, and a late step needs 3 quarters."""
    is_cuda = device.type == "cuda"
    unit = 32 * MIB  # of a batch
    # Of 12 the step needs 9: beside one batch in use and 3 ahead there is no room, and one may be on its way.
    least = 3 if is_cuda else 2 if has_streams else 0
    seen: list[Tensor] = []
    feeds: list[Any] = []
    ahead: list[int] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if feeds and len(seen) >= 20 and not ahead:
            for _ in range(100):  # more come by themselves, as many as the order under way has
                if (held := getattr(feeds[0], "ahead", 0)) >= least:
                    ahead.append(held)
                    break
                assert not pause.wait(0.01)
            if ahead and not is_cuda:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        if is_cuda and ahead:
            torch.empty(9 * unit, dtype=torch.uint8, device=device)
        seen.append(batch[:, -1].clone())
        return model(batch[:, :8]).square().mean()

    pause = threading.Event()
    if is_cuda:
        limited(12 * unit)
    run = flowdp.Trainer(
        nn.Linear(8, 1),
        lambda params: torch.optim.SGD(params, lr=1e-9),
        loss,
        dataset=Wide(16 * 40, unit // 16 if is_cuda else 1024),
        batch_size=16,
        epochs=3,
        devices=[device],
        policy="sync",
        runtime=flowdp.RuntimeOptions(prefetch_depth=6),
        progress=False,
    ).start()
    feeds += [worker.parts.feed for worker in run._engine._parts.workers]
    try:
        run.join(HANG_S)
    finally:
        pause.set()  # ends a step that still waits for batches
    assert sorted(int(i) for rows in seen for i in rows.tolist()) == sorted([*range(640)] * 3)
    assert run.status().pieces == ((1,) if has_streams else (2,))
    assert ahead


# ---------------------------------------------------------------- memory of the host
def test_a_checkpoint_pins_no_more_than_its_limit(device, monkeypatch, tmp_path):
    """Its state is several times as large."""
    monkeypatch.setattr(barrier_tasks, "PinnedBlocks", lambda lane: host_copies.PinnedBlocks(lane, 16 * MIB))
    is_cuda = device.type == "cuda"
    before = pinned_bytes() if is_cuda else 0
    state = flowdp.Trainer(
        nn.Sequential(nn.Linear(8, 2**20), nn.Linear(2**20, 1)),
        lambda params: torch.optim.Adam(params, lr=1e-3),
        lambda model, batch: F.mse_loss(model(batch[0][:, 2:]), batch[1]),
        dataset=samples(64),
        batch_size=BATCH_SIZE,
        epochs=1,
        devices=[device],
        checkpoint=flowdp.CheckpointOptions(tmp_path),
        progress=False,
    ).fit()
    if is_cuda:
        assert pinned_bytes() - before <= 18 * MIB
    (path,) = tmp_path.glob("*.pt")
    saved = flowdp.load_checkpoint(path)
    for name, tensor in state.state_dict.items():
        assert torch.equal(saved.state_dict[name], tensor), name


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
    state = run.join(HANG_S)
    assert state.interrupted == (number % 3 == 0)


@pytest.mark.long
def test_starts_and_stops_leave_nothing(device):
    for number in range(12):
        start_and_stop(device, number)
    before = left(device)
    for number in range(200 if device.type == "cuda" else 6):
        start_and_stop(device, number)
    assert left(device) == before
