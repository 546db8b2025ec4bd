"""Runs of the Trainer on an emulated machine, and what must be true of them.

The loss notes which samples it was given. Plain PyTorch then takes the same steps on the CPU: the same
samples on the same ranks, and a mean behind each round. Parameters, buffers, losses and evaluations must be
those, in float64 up to rounding. Under "async" no round can be taken again, and properties are checked.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.cadences import cadence_for
from bench.gpu.checks import Single
from flowdp.trainer.result import TrainedState
from tests.late.device import LateCuda, Site
from tests.late.install import installed
from tests.late.orders import LATE, Order

__all__ = ["Case", "faults_of"]

FEATURES = 5
COUNT, BATCH, EPOCHS = 83, 8, 2  # the last batch of an epoch has 3 samples
PADDING, ROOM = 400, 290_000  # so wide, a dataset needs 271 kB, and a batch 26 kB


def samples(count: int = COUNT, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs [count, 2 + FEATURES], which begin with the sample's index and a function of it; and targets."""
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(count, dtype=dtype).unsqueeze(1)
    features = torch.randn(count, FEATURES, generator=generator, dtype=dtype)
    return torch.cat((index, index / 2 + 1, features), 1), features.sum(1, keepdim=True)


def model(dtype: torch.dtype = torch.float64, *, has_buffers: bool = True) -> nn.Module:
    """A perceptron, with float and integer buffers."""
    norm = nn.BatchNorm1d(6) if has_buffers else nn.LayerNorm(6)
    return nn.Sequential(nn.Linear(FEATURES, 6), norm, nn.Tanh(), nn.Linear(6, 1)).to(dtype)


class Made(Single):
    """Batches that the dataset makes on a device, on its default stream."""

    def get_batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        return tuple((tensor[indices].to("cuda:0", non_blocking=True) + 1) - 1 for tensor in self.data)


class Pinned(Single):
    """Batches in pinned memory of the dataset's own, of which it keeps nothing."""

    def get_batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices].pin_memory() for tensor in self.data)


class Ragged(Single):
    """Batches of ever other shapes, which have memory of their own on the device."""

    def get_batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        x, y = (tensor[indices] for tensor in self.data)
        return F.pad(x, (0, sum(indices) % 7)), y


def dataset_of(kind: str, data: tuple[Tensor, ...]) -> Any:
    """A dataset of a kind.

    Args:
        kind: "resident": on the device as a whole. "gathered": tensors that are too large for that. "full":
            the device has no room for a batch ahead, either. "there": the caller has made them on the
            device. "streamed", "made", "pinned", "ragged": see the classes.
        data: Its tensors, on the host.
    """
    if kind in ("resident", "full"):
        return data
    if kind == "gathered":
        return F.pad(data[0], (0, PADDING)), data[1]
    if kind == "there":
        return tuple((tensor.to("cuda:0", non_blocking=True) + 1) - 1 for tensor in data)
    return {"streamed": Single, "made": Made, "pinned": Pinned, "ragged": Ragged}[kind](data)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        policy: As for the Trainer.
        backend: As for the Trainer.
        devices: Devices of the ranks: as many cards as there are numbers.
        data: Kind of the dataset; see `dataset_of`.
        evaluated: Kind of the dataset of an evaluation; None: there is none.
        dtype: Of model and data.
        options: More arguments of the Trainer.
        leaver: A rank that fails in its third step.
        fills: Whether the device has no room for the third step of rank 0, unless its batch is parted.
        are_unlike: Whether the cards are of different kinds, and the optimizer is none that flowdp knows.
    """

    policy: str = "sync"
    backend: str = "local"
    devices: tuple[int, ...] = (0, 0)
    data: str = "resident"
    evaluated: str | None = None
    dtype: torch.dtype = torch.float64
    options: Mapping[str, Any] = field(default_factory=dict)
    leaver: int | None = None
    fills: bool = False
    are_unlike: bool = False

    def __str__(self) -> str:
        cards = "".join(map(str, self.devices))
        parts = [self.policy, self.backend, f"on {cards}", self.data, *self.options]
        parts += [f"evaluated {self.evaluated}"] if self.evaluated else []
        parts += [f"rank {self.leaver} leaves"] if self.leaver is not None else []
        flags = {"fills": self.fills, "unlike cards": self.are_unlike}
        return " ".join([*parts, *(name for name, is_on in flags.items() if is_on)])


@dataclass(frozen=True, slots=True)
class Part:
    """A forward that was trained.

    Attributes:
        step: (epoch, last round that was held, rank, step of the rank).
        index: Indices of its samples, on its device.
        wrong: Whether a sample had another one's values, on its device.
        rows: Number of its samples.
    """

    step: tuple[int, int, int, int]
    index: Tensor
    wrong: Tensor
    rows: int


class Recorder:
    """A loss that notes what it is given."""

    def __init__(self, case: Case) -> None:
        self.parts: list[Part] = []
        self._case = case
        self._lock = threading.Lock()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        x, y = batch
        if worker.local_step == 2 and torch.is_grad_enabled():
            if worker.rank == self._case.leaver:
                raise RuntimeError("this rank leaves")
            if self._case.fills and worker.rank == 0 and len(x) == BATCH:
                raise torch.OutOfMemoryError("the device is full")
        loss = loss_of(model, x, y)
        if loss.requires_grad:
            step = worker.epoch, worker.round, worker.rank, worker.local_step
            wrong = (x[:, 1] != x[:, 0] / 2 + 1).any()
            with self._lock:
                self.parts.append(Part(step, x[:, 0].clone(), wrong, len(x)))
        return loss


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a batch."""
    return F.mse_loss(model(x[:, 2 : 2 + FEATURES]), y)


def evaluated(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Numbers of an evaluation."""
    return {"mse": loss_of(model, *batch)}


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.5)


class Unknown(torch.optim.SGD):
    """An optimizer that may need all parameters, for all that flowdp knows."""


def unknown_of(params: Any) -> torch.optim.Optimizer:
    """The same optimizer, as another class."""
    return Unknown(params, lr=0.05, momentum=0.5)


@dataclass
class Outcome:
    """A run that has ended.

    Attributes:
        state: Its result.
        recorder: What it trained.
        replicas: Parameters and buffers of each rank, on the host.
    """

    state: TrainedState
    recorder: Recorder
    replicas: list[list[Tensor]]


def train(case: Case) -> Outcome:
    """Train, on the machine that is installed."""
    data = samples(dtype=case.dtype)
    recorder = Recorder(case)
    options = dict(case.options)
    if case.evaluated is not None:
        other = dataset_of(case.evaluated, samples(29, case.dtype))
        options["evaluation"] = flowdp.EvaluationOptions(other, step=evaluated)
    torch.manual_seed(0)
    sizes = {"batch_size": BATCH} if case.policy == "exact" else {"per_device_batch_size": BATCH}
    run = flowdp.Trainer(
        model(case.dtype, has_buffers=case.policy != "exact"),
        unknown_of if case.are_unlike else optimizer_of,
        recorder,
        dataset=dataset_of(case.data, data),
        devices=[f"cuda:{index}" for index in case.devices],
        policy=case.policy,  # type: ignore[arg-type]
        cadence=cadence_for(case.policy, anchor=2, max_anchor=3),
        runtime=flowdp.RuntimeOptions(backend=case.backend),  # type: ignore[arg-type]
        failures=flowdp.FailureOptions(
            on_failure="raise" if case.leaver is None else "continue", on_nan="raise"
        ),
        progress=False,
        **{"epochs": EPOCHS, **sizes, **options},
    ).start()
    modules = [replica.module for replica in run._engine.replicas]
    state = run.join()
    replicas = [[tensor.detach().cpu() for tensor in tensors_of(module)] for module in modules]
    return Outcome(state, recorder, replicas)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def faults_of(case: Case, order: Order = LATE, removed: frozenset[Site] = frozenset()) -> list[str]:
    """Train on a machine of this order, and describe all that is wrong.

    Args:
        case: The run.
        order: Order of the devices' work.
        removed: Waits of flowdp that are left out.
    """
    total = {"full": 1, "gathered": ROOM}.get(case.data, 10**9)
    cuda = LateCuda(max(case.devices) + 1, order, total)
    cuda.removed, cuda.are_unlike = removed, case.are_unlike
    with installed(cuda):
        outcome = train(case)
        faults = list(cuda.memory.hazards)
        faults += _data_faults(case, outcome)
        if case.policy == "async" or case.leaver is not None:
            faults += _property_faults(case, outcome)
    if case.policy != "async" and case.leaver is None:
        faults += _number_faults(case, outcome)
    return faults


def _data_faults(case: Case, outcome: Outcome) -> list[str]:
    parts = outcome.recorder.parts
    faults = [f"wrong values in the batch of {part.step}" for part in parts if part.wrong]
    epochs = int(case.options.get("epochs", EPOCHS))
    for epoch in range(epochs):
        found = (part.index.nan_to_num(-1).tolist() for part in parts if part.step[0] == epoch)
        seen = Counter(map(int, chain.from_iterable(found)))
        is_twice = case.leaver is None and max(seen.values(), default=0) > 1
        if seen.keys() != set(range(COUNT)) or is_twice:
            times = sorted(set(seen.values()))
            faults.append(f"epoch {epoch}: {len(seen)} of {COUNT} samples, each {times} times")
    first, *others = (held for rank, held in enumerate(outcome.replicas) if rank != case.leaver)
    if not all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True)):
        faults.append("the replicas differ at the end")
    return faults


def _property_faults(case: Case, outcome: Outcome) -> list[str]:
    faults = []
    if not all(bool(tensor.isfinite().all()) for tensor in outcome.state.state_dict.values()):
        faults.append("parameters are not finite")
    losses = [record.loss for record in outcome.state.history]
    if not all(loss is not None and 0.0 < loss < 20.0 for loss in losses):
        faults.append(f"losses {losses}")
    return faults


def _number_faults(case: Case, outcome: Outcome) -> list[str]:
    replay = Replay(case)
    by_round: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in outcome.recorder.parts:
        by_round[part.step[:2]].append(part)
    for _, parts in sorted(by_round.items()):
        replay.take_round(parts)
    replay.end_epoch()
    tolerance = 1e-9 if case.dtype == torch.float64 else 1e-4
    faults = []
    for name, tensor in replay.modules[0].state_dict().items():
        held = outcome.state.state_dict[name]
        if not torch.allclose(held, tensor, rtol=tolerance, atol=tolerance):
            faults.append(f"{name} is {float((held - tensor).abs().max()):g} away from that of plain PyTorch")
    for record, loss, mse in zip(outcome.state.history, replay.losses, replay.evaluated, strict=True):
        if record.loss is None or not abs(record.loss - loss) <= 1e-3 * tolerance**0.5 + 1e-6 * loss:
            faults.append(f"the loss of epoch {record.epoch} is {record.loss}, not {loss}")
        if case.evaluated is not None and not abs(record.eval["mse"] - mse) <= 1e-5 * mse:
            faults.append(f"the evaluation of epoch {record.epoch} gives {record.eval['mse']}, not {mse}")
    return faults


class Replay:
    """The steps of a run once more, by plain PyTorch on the CPU.

    Attributes:
        modules: One per rank; all are equal behind a round.
        losses: Mean loss of each epoch.
        evaluated: Its evaluation.
    """

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self._case = case
        self._is_exact = case.policy == "exact"
        first = model(case.dtype, has_buffers=not self._is_exact)
        count = 1 if self._is_exact else len(case.devices)
        self.modules = [copy.deepcopy(first) for _ in range(count)]
        self._optimizers = [optimizer_of(module.parameters()) for module in self.modules]
        self._x, self._y = samples(dtype=case.dtype)
        self._outer = case.options.get("outer")
        self._last = [tensor.detach().clone() for tensor in first.parameters()]
        self._momentum = [torch.zeros_like(tensor) for tensor in self._last]
        self._epoch = 0
        self._sum, self._samples = 0.0, 0
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def take_round(self, parts: Sequence[Part]) -> None:
        """Take the steps of a round, and the mean of the ranks."""
        if parts[0].step[0] != self._epoch:
            self.end_epoch()
        steps: dict[tuple[int, int], list[Part]] = defaultdict(list)
        trained = [0] * len(self.modules)
        for part in parts:
            _, _, rank, step = part.step
            is_shared = self._is_exact and len(self._case.devices) > 1
            steps[(0, 0) if is_shared else (rank, step)].append(part)
        for (rank, _), own in sorted(steps.items(), key=lambda item: item[0]):
            self._step(rank, own)
            trained[rank] += sum(part.rows for part in own)
        if len(self.modules) > 1:
            self._average(trained)

    def end_epoch(self) -> None:
        """Note the mean loss, and evaluate."""
        self._epoch += 1
        self.losses.append(self._sum / max(self._samples, 1))
        self._sum, self._samples = 0.0, 0
        module = copy.deepcopy(self.modules[0]).eval()
        with torch.no_grad(), self._casting():
            self.evaluated.append(float(loss_of(module, *samples(29, self._case.dtype))))

    def _step(self, rank: int, parts: Sequence[Part]) -> None:
        rows = sum(part.rows for part in parts)
        for part in parts:
            index = part.index.nan_to_num(0).to(torch.int64).clamp(0, COUNT - 1)
            with self._casting():
                loss = loss_of(self.modules[rank], self._x[index], self._y[index])
            (loss * (part.rows / rows)).backward()
            self._sum += float(loss.detach()) * part.rows
            self._samples += part.rows
        if (clip := self._case.options.get("max_grad_norm")) is not None:
            torch.nn.utils.clip_grad_norm_(self.modules[rank].parameters(), clip)
        self._optimizers[rank].step()
        self._optimizers[rank].zero_grad()

    def _casting(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._case.options.get("precision") == "bf16")

    @torch.no_grad()
    def _average(self, trained: Sequence[int]) -> None:
        for tensors in zip(*map(tensors_of, self.modules), strict=True):
            if tensors[0].is_floating_point():
                total = sum(trained)
                mean = torch.zeros_like(tensors[0])
                for tensor, count in zip(tensors, trained, strict=True):
                    mean += tensor * (count / total)
            else:
                mean = torch.stack(tensors).max(0).values
            for tensor in tensors:
                tensor.copy_(mean)
        if self._outer is not None:
            self._step_outer(self._outer)

    def _step_outer(self, outer: flowdp.OuterOptions) -> None:
        for place, (last, momentum) in enumerate(zip(self._last, self._momentum, strict=True)):
            parameters = [list(module.parameters())[place] for module in self.modules]
            difference = last - parameters[0]
            momentum.mul_(outer.momentum).add_(difference)
            last.sub_(momentum, alpha=outer.lr)
            for parameter in parameters:
                parameter.copy_(last)
