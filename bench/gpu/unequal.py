"""Two ranks on one card that are really unequal: 88 multiprocessors and the rest, by green contexts.

Measured are the samples per second of each rank's plain loop, alone and beside the other; then flowdp's
policies on the same two parts, as fractions of the sum of the two speeds; then DDP with equal batches, in two
processes. Where no green contexts can be had, the second rank waits on its stream (on a CPU: its thread
sleeps) for each of its samples, and a note says so.

A card runs processes one at a time, in slices, so a rank of DDP has its part and loses the time of the other
one's slice. So the processes' own speeds are measured beside each other, too, and "exact, equal batches" is
the same mathematics in one process.

    python -m bench.gpu.unequal --kind KIND --device cuda:0 --out FILE       one process of DDP
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu import partitions
from bench.gpu.nccl import SHARED_SINCE
from bench.gpu.part import Figure, Finding, Note, Place, timed_ms
from bench.gpu.peers import labelled
from bench.harness import ROOT
from flowdp.device.streams import Lane, open_lanes
from flowdp.replica import build

__all__ = ["DDP", "POLICIES", "WAITS", "Unequal", "measure", "open_unequal"]

MULTIPROCESSORS = (88, 40)
"""Of an H100 or H200 with 132; the driver gives all of the rest to the second rank."""

WAITS = "waits"
RATIO = 2.2
"""Speed of the first rank to that of the second where they wait."""

WAIT_MS = 5.0
"""Wait of the first rank for a batch."""

LEAST_RATIO = 1.3
"""Ratio of speeds below which parts of a card are not believed."""

AHEAD = 3
"""Steps that a plain loop is ahead of its device."""

DDP = "DDP in two processes"
DDP_LIMIT_S = 60.0

POLICIES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "exact": ("exact", {}),
    "cadence": ("cadence", {}),
    "async": ("async", {}),
    "sync": ("sync", {}),
    "exact, equal batches": ("exact", {"partition_ratios": (0.5, 0.5)}),
}
"""Policy and runtime options of each row."""


@dataclass(frozen=True)
class Size:
    """Size of model and data.

    Attributes:
        features: Inputs.
        width: Width of the hidden layers.
        layers: Hidden layers.
        batch: Samples of a step of a rank.
        batches: Batches of the dataset.
    """

    features: int
    width: int
    layers: int
    batch: int
    batches: int


FULL = Size(32, 2048, 3, 4096, 600)
"""Some 200 GFLOP a step in few kernels: the multiprocessors decide how fast it is. An epoch takes seconds."""

SMALL = Size(32, 64, 1, 64, 400)
"""Next to nothing beside the waits."""

TINY = Size(8, 8, 1, 4, 400)


@dataclass
class Unequal:
    """Two ranks of unequal speed on a device.

    Attributes:
        place: The device.
        kind: How they are made unequal: a key of `partitions.SPLITS`, or `WAITS`.
        lanes: Lane of each rank.
        size: Size of the model.
        waits: Wait of each rank for a sample: cycles of the device, on a CPU seconds; 0: none.
    """

    place: Place
    kind: str
    lanes: Sequence[Lane]
    size: Size
    waits: tuple[float, float] = (0.0, 0.0)

    def model(self) -> nn.Module:
        """A new perceptron."""
        torch.manual_seed(0)
        size = self.size
        layers: list[nn.Module] = []
        for inputs in (size.features, *(size.width,) * (size.layers - 1)):
            layers += [nn.Linear(inputs, size.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(size.width, 10))

    def data(self, batches: int) -> tuple[Tensor, Tensor]:
        """Inputs and classes of so many batches."""
        return made_once(self.size.batch * batches, self.size.features)

    def loss(self, rank: int, model: nn.Module, batch: Any) -> Tensor:
        """Loss of a batch, behind the rank's wait."""
        wait = self.waits[rank] * len(batch[0])
        if wait and self.place.is_cuda:
            torch.cuda._sleep(round(wait))
        elif wait:
            time.sleep(wait)
        return F.cross_entropy(model(batch[0]), batch[1])

    def step(self, rank: int, wrap: Callable[[nn.Module], nn.Module] = nn.Sequential) -> Callable[[], None]:
        """A step of a plain loop on one batch that lies there. Call both on the rank's stream."""
        model = wrap(self.model().to(self.place.device))
        optimizer = adam(model.parameters())
        batch = tuple(part.to(self.place.device) for part in self.data(1))

        def step() -> None:
            self.loss(rank, model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give these lanes to the runs that begin inside."""
        with patch.object(build, "open_lanes", lambda _: list(self.lanes)):
            yield


made_once = cache(labelled)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


# ---------------------------------------------------------------- how they become unequal
def open_unequal(place: Place, kind: str | None = None) -> tuple[Unequal, list[str]]:
    """Two unequal ranks, and why better ways to make them did not work.

    Args:
        place: Their device.
        kind: The only way that is tried, and without a look at the speeds; None: the first that works.
    """
    refused: list[str] = []
    for name, split in partitions.SPLITS.items() if place.is_cuda else ():
        if kind not in (None, name):
            continue
        try:
            torch.zeros(1, device=place.device)  # the green contexts belong to the one that torch makes
            lanes = partitions.lanes_on(place.device, split(place.device, MULTIPROCESSORS))
            made = Unequal(place, name, lanes, FULL)
            if kind is None:
                first, second = (rate(made, rank, 0.3) for rank in (0, 1))
                if first < LEAST_RATIO * second:
                    raise RuntimeError(f"the parts are {first:.0f} and {second:.0f} samples/s fast")
            return made, refused
        except Exception as fault:  # any of torch's, ctypes' and ours: then they wait
            refused.append(f"{name}: {type(fault).__name__}: {fault}")
    size = place.pick(SMALL, TINY)
    unit = WAIT_MS / 1e3
    if place.is_cuda:
        trial = 10_000_000
        unit = trial / timed_ms(place, lambda: torch.cuda._sleep(trial), repeats=5) * WAIT_MS
    lanes = open_lanes([place.device] * 2)
    return Unequal(place, WAITS, lanes, size, (unit / size.batch, RATIO * unit / size.batch)), refused


# ---------------------------------------------------------------- speeds of plain loops
def rate(ranks: Unequal, rank: int, seconds: float, ready: Callable[[], object] = lambda: None) -> float:
    """Samples per second of a rank's plain loop.

    Args:
        ranks: Both ranks.
        rank: This one.
        seconds: How long it is measured.
        ready: Called between its warm-up and its measurement; waits for the other rank.
    """
    lane = ranks.lanes[rank]
    with lane.on(lane.compute):
        step = ranks.step(rank)
        for _ in range(AHEAD):
            step()
        lane.drain()
        ready()
        marks = [lane.event() for _ in range(AHEAD)]
        taken, start_s = 0, perf_counter()
        while perf_counter() - start_s < seconds:
            if taken >= AHEAD:
                marks[taken % AHEAD].synchronize()
            step()
            marks[taken % AHEAD].record(lane.compute)
            taken += 1
        lane.drain()
        return taken * ranks.size.batch / (perf_counter() - start_s)


def speeds(ranks: Unequal, seconds: float) -> tuple[list[float], list[float]]:
    """Samples per second of each rank alone, and beside the other."""
    alone = [rate(ranks, rank, seconds) for rank in (0, 1)]
    both = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        beside = list(pool.map(lambda rank: rate(ranks, rank, seconds, both.wait), (0, 1)))
    return alone, beside


# ---------------------------------------------------------------- flowdp
def policy_rate(ranks: Unequal, name: str, warm_up_s: float, seconds: float) -> float:
    """Samples per second of both ranks in a run, behind its warm-up."""
    policy, runtime = POLICIES[name]
    batch = ranks.size.batch
    sizes: dict[str, Any] = (
        {"batch_size": 2 * batch} if policy == "exact" else {"per_device_batch_size": batch}
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return ranks.loss(flowdp.current_worker().rank, model, batch)

    with ranks.in_use():
        run = flowdp.Trainer(
            ranks.model(),
            adam,
            loss,
            dataset=ranks.data(ranks.size.batches),
            **sizes,
            epochs=10**6,
            devices=[ranks.place.device] * 2,
            policy=policy,
            progress=False,
            runtime=flowdp.RuntimeOptions(tune_process=ranks.place.is_cuda, **runtime),
        ).start()
    marks: list[tuple[float, int]] = []
    start_s = perf_counter()
    for record in run.metrics("round"):
        now_s = perf_counter()
        if now_s - start_s >= warm_up_s:
            marks.append((now_s, sum(record.samples)))
        if marks and now_s - marks[0][0] >= seconds:
            run.stop()
            break
    run.join()
    if len(marks) < 2:
        raise RuntimeError("no round ended while it was measured")
    return sum(samples for _, samples in marks[1:]) / (marks[-1][0] - marks[0][0])


# ---------------------------------------------------------------- DDP
def nccl_version() -> int:
    """Version of the NCCL that torch has loaded; 0 without one."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def work(kind: str, device: str, file: Path, seconds: float) -> None:
    """Be a process of DDP: the speeds of the processes, and of both together."""
    rank = int(os.environ["RANK"])
    place = Place(torch.device(device))
    if place.is_cuda:
        torch.cuda.set_device(place.device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if place.is_cuda else "gloo")
    words: Any = dist.new_group(backend="gloo")
    ranks, refused = open_unequal(place, kind)
    if ranks.kind != kind:
        raise RuntimeError("; ".join(refused))
    found: dict[str, float] = {}
    for who in ((0,), (1,), (0, 1)):
        dist.barrier(words)
        if rank in who:
            ready = (lambda: dist.barrier(words)) if len(who) > 1 else (lambda: None)
            found["beside" if len(who) > 1 else "alone"] = rate(ranks, rank, seconds, ready)
    slowest = torch.tensor([found["beside"]])
    dist.all_reduce(slowest, dist.ReduceOp.MIN, group=words)
    steps = math.ceil(seconds * float(slowest) / ranks.size.batch)
    lane = ranks.lanes[rank]
    with lane.on(lane.compute):
        step = ranks.step(rank, nn.parallel.DistributedDataParallel)
        for _ in range(5):
            step()
        lane.drain()
        dist.barrier(words)
        start_s = perf_counter()
        for _ in range(steps):
            step()
        lane.drain()
    found["ddp"] = 2 * steps * ranks.size.batch / (perf_counter() - start_s)
    file.write_text(json.dumps(found))
    dist.barrier(words)
    sys.stdout.flush()
    os._exit(0)  # one that ends first may abort the other


def ddp_rates(ranks: Unequal, seconds: float, limit_s: float = DDP_LIMIT_S) -> list[dict[str, float]]:
    """Samples per second of each process: `alone`, `beside` the other, and of both under `ddp`.

    Raises:
        RuntimeError: A process failed, or the time was over.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, f"{rank}.json") for rank in (0, 1)]
        options = ["--kind", ranks.kind, "--device", str(ranks.place.device), "--seconds", str(seconds)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.unequal", *options, "--out", str(file)],
                env={**shared, "RANK": str(rank)},
                cwd=ROOT,
                start_new_session=True,
            )
            for rank, file in enumerate(files)
        ]
        try:
            end_s = perf_counter() + limit_s
            codes = [process.wait(max(0.1, end_s - perf_counter())) for process in running]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not over within {limit_s:g} s") from None
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if not all(file.exists() for file in files):
            raise RuntimeError(f"the processes ended with exit codes {codes}; see the log")
        return [json.loads(file.read_text()) for file in files]


# ---------------------------------------------------------------- the part
def rank_figures(where: str, alone: Sequence[float], beside: Sequence[float]) -> Iterator[Finding]:
    for rank in (0, 1):
        yield Figure(f"unequal, {where}, rank {rank} alone, samples/s", alone[rank])
        yield Figure(f"unequal, {where}, rank {rank} beside the other, samples/s", beside[rank])


def measure(place: Place) -> Iterator[Finding]:
    ranks, refused = open_unequal(place)
    yield from (Note(f"unequal: not by {why}") for why in refused)
    yield Note(f"unequal: the ranks are made unequal by {ranks.kind}")
    for rank, lane in enumerate(ranks.lanes):
        module = getattr(lane, "device_module", None)
        if isinstance(module, partitions.PartitionedModule):
            yield Figure(f"unequal, rank {rank}: multiprocessors", module.partition.multiprocessors)
    warm_up_s, seconds = place.pick((2.5, 3.0), (0.3, 0.4))
    alone, beside = speeds(ranks, seconds / 2)
    yield from rank_figures("plain loops in threads", alone, beside)
    rates: dict[str, float] = {}
    faults: list[str] = []
    for name in POLICIES:
        try:
            rates[name] = policy_rate(ranks, name, warm_up_s, seconds)
        except Exception as fault:  # the other policies tell something, too
            faults.append(f"unequal, {name}: {type(fault).__name__}: {fault}")
            yield Note(faults[-1])
            continue
        yield Figure(f"unequal, {name}: samples/s", rates[name])
        yield Figure(f"unequal, {name}: fraction of the sum of the speeds", rates[name] / sum(beside))
    if place.is_cuda and (version := nccl_version()) < SHARED_SINCE:
        yield Note(f"unequal: DDP is left out, two ranks on one card need NCCL 2.30 or later, not {version}")
    else:
        try:
            processes = ddp_rates(ranks, seconds / 2)
        except RuntimeError as fault:
            faults.append(f"unequal, {DDP}: {fault}")
            yield Note(faults[-1])
        else:
            alone, there = ([one[key] for one in processes] for key in ("alone", "beside"))
            yield from rank_figures("plain loops in processes", alone, there)
            ddp = min(one["ddp"] for one in processes)
            yield Figure(f"unequal, {DDP}: samples/s", ddp)
            yield Figure(f"unequal, {DDP}: fraction of the sum of the speeds", ddp / sum(beside))
            yield Figure(f"unequal, {DDP}: fraction of the sum of the processes' speeds", ddp / sum(there))
            for name, one in rates.items():
                yield Figure(f"unequal, {name}: times {DDP}", one / ddp)
    if faults:
        raise RuntimeError("; ".join(faults))


def main() -> None:
    parser = argparse.ArgumentParser(description="Be one process of DDP on a part of the card.")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    work(given.kind, given.device, given.out, given.seconds)


if __name__ == "__main__":
    main()
