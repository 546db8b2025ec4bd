"""Loops that the user owns, and runs that are cut or steered, on an emulated machine.

Each scenario trains or computes something, and compares it with plain PyTorch on the CPU. The user's own work
is on streams, too: on the default stream, or on one of the user's.
"""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flowdp
from flowdp.device.frozen_parameters import FrozenCheck
from flowdp.device.stopwatch import KEPT_LAPS, Stopwatch
from flowdp.device.streams import StreamLane
from tests.late import runs
from tests.late.device import LateCuda, Site
from tests.late.install import installed
from tests.late.orders import LATE, Order
from tests.late.runs import dataset_of, loss_of, samples
from tests.limits import HANG_S

__all__ = ["DOORS", "Door"]

STEPS = 6
RATE = 0.05


@dataclass(frozen=True)
class Door:
    """A scenario.

    Attributes:
        name: Name, for messages.
        work: Does it on the machine that is installed, and returns what is wrong.
        devices: Number of devices of the machine.
    """

    name: str
    work: Callable[[LateCuda], list[str]]
    devices: int = 2

    def faults(self, order: Order = LATE, removed: frozenset[Site] = frozenset()) -> list[str]:
        """Describe all that is wrong on a machine of this order; `removed` are waits that are left out."""
        cuda = LateCuda(self.devices, order)
        cuda.removed = removed
        with installed(cuda):
            found = self.work(cuda)
        return [*cuda.memory.hazards, *found]

    def __str__(self) -> str:
        return self.name


def perceptron() -> nn.Module:
    """A model whose outputs for a sample do not depend on the other samples."""
    torch.manual_seed(0)
    return runs.model(has_buffers=False)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Batches of the host."""
    x, y = samples(STEPS * 8)
    return list(zip(x.split(8), y.split(8), strict=True))


def plain_loop(windows: Sequence[Sequence[int]]) -> nn.Module:
    """Plain PyTorch on the same batches; each step is of the means over a window of them."""
    module, data = perceptron(), batches()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for window in windows:
        for number in window:
            (loss_of(module, *data[number]) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def differences(module: nn.Module, expected: nn.Module) -> list[str]:
    """Parameters and buffers that are not those of another module, up to rounding."""
    state = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    return [
        f"{name} is {float((state[name] - tensor).abs().max()):g} away from that of plain PyTorch"
        for name, tensor in expected.state_dict().items()
        if not torch.allclose(state[name], tensor, rtol=1e-9, atol=1e-9)
    ]


def late(tensors: Sequence[Tensor], device: str = "cuda:0") -> Iterator[Tensor]:
    """Tensors that work on the current stream makes of those of the host."""
    return ((tensor.to(device, non_blocking=True) + 1) - 1 for tensor in tensors)


def users_stream(cuda: LateCuda, *, has_own: bool) -> AbstractContextManager[Any]:
    """A stream of the user's, or the default one."""
    return cuda.stream(cuda.Stream("cuda:0")) if has_own else nullcontext()


# ---------------------------------------------------------------- setup
def setup_loop(backend: Any, devices: Sequence[int] = (0, 1), *, has_own: bool = False) -> Any:
    """A plain loop around `flowdp.setup`."""

    def work(cuda: LateCuda) -> list[str]:
        with users_stream(cuda, has_own=has_own):
            module = perceptron().to("cuda:0")
            for parameter in module.parameters():
                parameter.data.copy_(next(late([parameter.detach().cpu()])))
            optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
            places = [f"cuda:{index}" for index in devices]
            losses = torch.zeros((), device="cuda:0", dtype=torch.float64)
            with flowdp.setup(module, optimizer, devices=places, backend=backend, progress=False) as dp:
                for batch in batches():
                    x, y = late(batch)
                    loss = F.mse_loss(dp(x[:, 2:]), y)
                    del x  # its memory is the next one's, as in any loop
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses += loss.detach()
            found = differences(module, plain_loop([[number] for number in range(STEPS)]))
            return found if bool(losses.isfinite()) else [*found, "a loss is not finite"]

    return work


def setup_elsewhere(cuda: LateCuda) -> list[str]:
    """A loop whose batches lie on another device than the model, in memory that is used again."""
    module = perceptron().to("cuda:0")
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    buffer = torch.empty(8, runs.FEATURES, dtype=torch.float64, device="cuda:1")
    with flowdp.setup(module, optimizer, devices=["cuda:0", "cuda:1"], backend="local", progress=False) as dp:
        for x, y in batches():
            buffer.copy_(x[:, 2:], non_blocking=True)
            buffer.add_(1).sub_(1)
            (y,) = late([y])
            F.mse_loss(dp(buffer), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return differences(module, plain_loop([[number] for number in range(STEPS)]))


def setup_watched(_cuda: LateCuda) -> list[str]:
    """A loop that reads the replica on the other device before each call, which writes to it."""
    module = perceptron().to("cuda:0")
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    read = []
    with flowdp.setup(module, optimizer, devices=["cuda:0", "cuda:1"], backend="local", progress=False) as dp:
        for x, y in batches():
            (parameter, *_) = dp.replicas[0].parameters()
            (zero,) = late([torch.zeros(parameter.shape, dtype=parameter.dtype)], "cuda:1")
            read.append(parameter.detach() + zero)
            x, y = late((x[:, 2:], y))
            F.mse_loss(dp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        # Replicas are one step behind: the next call sends the parameters.
        expected = [plain_loop([[number] for number in range(count)]) for count in (0, *range(STEPS - 1))]
        rows = [next(module.parameters()) for module in expected]
    wrong = [number for number, row in enumerate(rows) if not torch.allclose(read[number].cpu(), row)]
    return [f"the replica has other parameters before calls {wrong}"] if wrong else []


def laps(_cuda: LateCuda) -> list[str]:
    """Times of more laps than may wait for the device."""
    lane = StreamLane(torch.device("cuda:0"))
    watch = Stopwatch(lane, keeps=True)
    for _ in range(KEPT_LAPS + 1):
        with watch.running():
            torch.ones(1, device="cuda:0")
        watch.lap()
    return [] if watch.is_known and watch.take_ms() >= 0.0 else ["the oldest lap is not known"]


def frozen(_cuda: LateCuda) -> list[str]:
    """A write to a frozen parameter, which its bits tell."""
    lane = StreamLane(torch.device("cuda:0"))
    with lane.on(lane.compute):
        module = nn.Linear(3, 2).to("cuda:0").requires_grad_(False)
        parameters = FrozenCheck(module, "")
        parameters.begin()
        found = [parameters.changed()]
        module.weight.data.add_(1)
        found.append(parameters.changed())
    return [] if found == [[], ["weight"]] else [f"changed are {found}"]


def setup_windows(backend: Any, *, cadence: bool) -> Any:
    """A loop over the windows of `dp.epoch`, which copies batches ahead."""

    def work(_cuda: LateCuda) -> list[str]:
        module = perceptron().to("cuda:0")
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        x, y = samples(STEPS * 8)
        loader = DataLoader(TensorDataset(x[:, 2:], y), 8)
        dp = flowdp.setup(
            module,
            optimizer,
            devices=["cuda:0", "cuda:1"],
            backend=backend,
            cadence=flowdp.CadenceOptions(max_anchor=1) if cadence else False,
            loss_fn=lambda c: F.mse_loss(c.output, c.batch[1]),
            progress=False,
        )
        windows: list[list[int]] = []
        total = 0
        with dp:
            for window in dp.epoch(loader):
                result = dp.forward_batch(window)
                dp.step()
                count = result.samples // 8
                windows.append(list(range(total, total + count)))
                total += count
        return differences(module, plain_loop(windows))

    return work


def setup_predicts(_cuda: LateCuda) -> list[str]:
    """Outputs of `dp.predict`."""
    module = perceptron()
    x = samples()[0][:, 2:]
    expected = copy.deepcopy(module)(x)
    with flowdp.setup(module, devices=["cuda:0", "cuda:1"], progress=False) as dp:
        found = dp.predict(x, batch_size=8)
    return [] if torch.allclose(found, expected) else ["the outputs are wrong"]


# ---------------------------------------------------------------- by hand
def manual_loop(backend: Any) -> Any:
    """A loop with `flowdp.Ddp`."""

    def work(_cuda: LateCuda) -> list[str]:
        devices = ["cuda:0", "cuda:1"]
        with flowdp.Ddp.wrap([perceptron() for _ in devices], devices, backend=backend) as ddp:
            ddp.sync_params()
            optimizers = [torch.optim.SGD(module.parameters(), lr=RATE) for module in ddp.models]

            def backward(rank: int, module: nn.Module, batch: Any) -> int:
                x, y = late(batch, devices[rank])
                loss_of(module, x, y).backward()
                return len(x)

            for x, y in batches():
                counts = ddp.parallel(backward, [(x[:3], y[:3]), (x[3:], y[3:])])
                ddp.weighted_all_reduce_gradients(counts)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            expected = plain_loop([[number] for number in range(STEPS)])
            return [fault for module in ddp.models for fault in differences(module, expected)]

    return work


def threaded_loop(strategy: Any, devices: Sequence[int] = (0, 1)) -> Any:
    """A thread per rank, with `flowdp.DistributedDataParallel`."""

    def work(cuda: LateCuda) -> list[str]:
        groups = flowdp.local_groups([f"cuda:{index}" for index in devices])
        found: list[str] = []
        expected = plain_loop([[number] for number in range(STEPS)])
        modules = [perceptron() for _ in groups]

        def train(group: Any) -> None:
            try:
                with cuda.stream(cuda.Stream(group.device)), torch.autograd.set_multithreading_enabled(False):
                    module = modules[group.rank].to(group.device)
                    ddp = flowdp.DistributedDataParallel(module, group, strategy=strategy)
                    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
                    for x, y in batches():
                        part = slice(0, 4) if group.rank == 0 else slice(4, 8)
                        x, y = late((x[part], y[part]), str(group.device))
                        loss_of(ddp, x, y).backward()
                        if strategy == "none":
                            ddp.sync_gradients()
                        optimizer.step()
                        optimizer.zero_grad()
                    found.extend(differences(module, expected))
            except BaseException as error:
                found.append(f"rank {group.rank}: {error!r}")

        threads = [threading.Thread(target=train, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return work


# ---------------------------------------------------------------- the Trainer
def trainer_of(devices: Sequence[int] = (0, 1), **options: Any) -> flowdp.Trainer:
    """A Trainer whose runs repeat to the bit."""
    given: dict[str, Any] = {
        "model": perceptron(),
        "optimizer": runs.optimizer_of,
        "loss": lambda module, batch: loss_of(module, *batch),
        "dataset": samples(),
        "per_device_batch_size": 8,
        "policy": "sync",
        "epochs": 2,
        **options,
    }
    return flowdp.Trainer(devices=[f"cuda:{index}" for index in devices], progress=False, **given)


EXACT: dict[str, Any] = {
    "policy": "exact",
    "batch_size": 8,
    "per_device_batch_size": None,
    "runtime": flowdp.RuntimeOptions(partition_ratios=(0.5, 0.5)),
}
"""Options of windows that are shared from the first on."""


def resumed(policy: Any) -> Any:
    """A run that is continued from its checkpoint, to the bit."""

    def work(_cuda: LateCuda) -> list[str]:
        options = {"policy": policy, "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01)}
        if policy == "exact":
            options |= {"runtime": flowdp.RuntimeOptions(partition_ratios=(0.5, 0.5))}
        whole = trainer_of(**options).start().join()
        with tempfile.TemporaryDirectory() as folder:
            trainer_of(epochs=1, checkpoint=folder, **options).start().join()
            last = trainer_of(checkpoint=folder, resume=True, **options).start().join()
        return [
            f"{name} is not that of an uncut run"
            for name, tensor in whole.state_dict.items()
            if not torch.equal(tensor, last.state_dict[name])
        ]

    return work


def steered(_cuda: LateCuda) -> list[str]:
    """A run whose parameters the user writes while it is paused, and which never changes them itself."""
    seen: list[tuple[bool, Tensor]] = []
    is_written, is_seen = threading.Event(), threading.Event()

    def loss(module: nn.Module, batch: Any) -> Tensor:
        (parameter, *_) = module.parameters()
        seen.append((is_written.is_set(), parameter.detach().clone()))
        if sum(is_late for is_late, _ in seen) == 8:
            is_seen.set()
        return loss_of(module, *batch)

    run = trainer_of(
        epochs=10**6, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.0)
    ).start()
    with run.paused():
        for replica in run._engine.replicas:
            for parameter in replica.module.parameters():
                host = torch.full(parameter.shape, 0.25, dtype=parameter.dtype)
                (value,) = late([host], str(replica.device))
                parameter.data.copy_(value)
        is_written.set()
    is_seen.wait(HANG_S)
    run.stop()
    run.join()
    steps = [value.cpu() for is_late, value in seen if is_late]
    wrong = sum(not torch.equal(value, torch.full_like(value, 0.25)) for value in steps)
    found = [f"{wrong} of {len(steps)} steps have other parameters"] if wrong else []
    return found if steps else ["no step was taken behind the pause"]


def copied_replicas(_cuda: LateCuda) -> list[str]:
    """A replica that copies another one while both have work to do; the run is paused for it."""
    run = trainer_of((0, 0), epochs=10**6).start()
    with run.paused():
        donor, other = run._engine.replicas
        row = donor.flat.memories[0]
        with donor.lane.on(donor.lane.compute):
            row.zero_()
            row.add_(3)
        with other.lane.on(other.lane.compute):
            other.copy_from(donor)
        with donor.lane.on(donor.lane.compute):
            row.fill_(5)
        other.lane.drain()
        copied = [parameter.detach().cpu() for parameter in other.module.parameters()]
    run.stop()
    run.join()
    values = {float(value) for tensor in copied for value in tensor.reshape(-1)}
    return [] if values == {3.0} else [f"the copy has {values}"]


def not_finite(_cuda: LateCuda) -> list[str]:
    """A run in which a step gives NaN, which is an error that names the step.

    It is one of the second epoch, amid rounds that are armed together: no report comes between them.
    """

    def loss(module: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        value = loss_of(module, *batch)
        if (worker.rank, worker.epoch, worker.global_step) == (1, 1, 16) and value.requires_grad:
            value.register_hook(lambda gradient: gradient * float("nan"))
        return value

    try:
        trainer_of(loss=loss, failures=flowdp.FailureOptions(on_nan="raise"), **EXACT).start().join()
    except flowdp.FlowdpError as error:
        text = str(error)
        return [] if "rank 1 " in text and "batch 6, " in text else [text]
    return ["NaN was not noticed"]


def timed(_cuda: LateCuda) -> list[str]:
    """A run with a record of its copies."""
    run = trainer_of(dataset=dataset_of("streamed", samples()), timeline=True).start()
    run.join()
    return []


def validated(kind: str) -> Any:
    """An evaluation and a prediction without a run."""

    def work(_cuda: LateCuda) -> list[str]:
        data = samples()
        trainer = trainer_of(evaluation=flowdp.EvaluationOptions(dataset_of(kind, data), step=runs.evaluated))
        expected = float(loss_of(perceptron(), *data).detach())
        found = []
        if trainer.validate()["mse"] != pytest.approx(expected, rel=1e-9):
            found.append("the evaluation is wrong")
        outputs = trainer.predict(dataset_of(kind, data), lambda module, batch: module(batch[0][:, 2:]))
        if not torch.allclose(outputs, perceptron()(data[0][:, 2:])):
            found.append("the predictions are wrong")
        return found

    return work


DOORS = [
    Door("setup", setup_loop("local")),
    Door("setup on a stream of the user's", setup_loop("local", has_own=True)),
    Door("setup on one device", setup_loop("local", (0, 0)), 1),
    Door("setup over NCCL", setup_loop("nccl")),
    Door("setup, batches elsewhere", setup_elsewhere),
    Door("setup, the replica watched", setup_watched),
    Door("laps", laps),
    Door("frozen parameters", frozen),
    Door("windows", setup_windows("local", cadence=False)),
    Door("windows of whole batches", setup_windows("local", cadence=True)),
    Door("windows over NCCL", setup_windows("nccl", cadence=True)),
    Door("dp.predict", setup_predicts),
    Door("Ddp", manual_loop("local")),
    Door("Ddp over NCCL", manual_loop("nccl")),
    *(Door(f"threads, {name}", threaded_loop(name)) for name in ("overlapped", "synchronous", "none")),
    Door("threads, one device", threaded_loop("overlapped", (0, 0)), 1),
    Door("resumed, sync", resumed("sync")),
    Door("resumed, exact", resumed("exact")),
    Door("steered", steered),
    Door("copied replicas", copied_replicas, 1),
    Door("not finite", not_finite),
    Door("timed", timed),
    Door("validated, streamed", validated("streamed")),
    Door("validated, made on the device", validated("made")),
]
