"""Devices of given speeds that really train, on virtual time, in one thread.

`World` runs the production machines: they deal the batches, plan the rounds and decide what is averaged with
which weights. Here each virtual rank has a model and an optimizer, and takes its steps on real data when its
machine says so. So a run on four devices of any speed needs one core, its clock is exact, and the same seed
gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.quality.tasks import Task
from flowdp.data.epoch_order import EpochOrder
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import Done, Snapshot, Step, WorkerMachine
from flowdp.options import CadenceOptions, Policy
from flowdp.protocol.commands import Average, Command
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import Averaged, Checksum, Outcome, SyncAck
from flowdp.sim.world import VirtualRank, World

__all__ = ["Point", "Settings", "train"]

STEP_MS = 10.0
"""Time of a step of the user's batch on the fastest device."""

SYNC_MS = 0.3
"""Time of one averaging: some 3 % of a step, as between two GPUs of one machine."""

POINTS = 12
"""Points of a curve."""

LOOKED_AT = 1_000
"""Samples of the test part at each point but the last, which has all."""

WARM_UP = 0.05
"""Part of the run in which a scaled rate grows from the user's to its own."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Devices, policy, and one remedy or none.

    Attributes:
        speeds: Time of a step of each device, in those of the fastest. Shape (world_size,).
        policy: Policy of the run.
        batch: "each": every device takes steps of the user's batch size. "total": they share it.
        rate: The learning rate with more samples in a step: as it is, or times n or its square root, with a
            warm-up.
        outer_momentum: Momentum on the mean's difference from the last mean (SlowMo); 0 is a plain mean.
        outer_lr: Factor of that difference.
        nesterov: Whether the momentum looks ahead (DiLoCo).
        anchor: Steps of the slowest device in a round, under cadence; None: 10 to 200.
        moments: Whether the optimizers' moments are averaged, too.
    """

    speeds: tuple[float, ...]
    policy: Policy = "cadence"
    batch: Literal["each", "total"] = "each"
    rate: Literal["same", "linear", "sqrt"] = "same"
    outer_momentum: float = 0.0
    outer_lr: float = 1.0
    nesterov: bool = False
    anchor: int | None = None
    moments: bool = False

    @property
    def name(self) -> str:
        """The settings as a row's name, without the devices."""
        words = [self.policy, f"batch {self.batch}"]
        if self.rate != "same":
            words.append(f"rate {self.rate}")
        if self.outer_momentum or self.outer_lr != 1.0:
            words.append(
                f"outer {self.outer_lr:g}/{self.outer_momentum:g}{' nesterov' if self.nesterov else ''}"
            )
        if self.anchor is not None:
            words.append(f"anchor {self.anchor}")
        if self.moments:
            words.append("moments")
        return ", ".join(words)

    @property
    def mix(self) -> str:
        """The devices: "1:2.5"."""
        return ":".join(f"{speed:g}" for speed in self.speeds)


@dataclass(frozen=True)
class Point:
    """A point of a curve.

    Attributes:
        wall_ms: Virtual time.
        samples: Samples trained by all devices.
        loss: Cross-entropy on the test part.
        accuracy: Fraction of it that is right.
    """

    wall_ms: float
    samples: int
    loss: float
    accuracy: float


def train(task: Task, settings: Settings, seed: int) -> list[Point]:
    """Train a task on devices of these speeds.

    Returns:
        Its curve; the last point is the result.
    """
    world = _TrainingWorld(task, settings, seed)
    world.run()
    world.look(everything=True)
    return world.curve


@dataclass
class _Learner:
    """A rank's model: its parameters as one vector, and what it has trained."""

    model: nn.Module
    optimizer: Optimizer
    flat: Tensor
    gradients: Tensor
    buffers: list[Tensor]
    snapshot: Tensor | None = None
    rates: list[float] = field(default_factory=list)


def _learner(task: Task) -> _Learner:
    model = task.model()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    gradients = torch.zeros_like(flat)
    at = 0
    for parameter in parameters:
        end = at + parameter.numel()
        parameter.data = flat[at:end].view_as(parameter)
        parameter.grad = gradients[at:end].view_as(parameter)
        at = end
    optimizer = task.optimizer(parameters)
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.isfinite().all()]
    return _Learner(
        model, optimizer, flat, gradients, floats, None, [g["lr"] for g in optimizer.param_groups]
    )


class _TrainingWorld(World):
    """A virtual cluster whose ranks train."""

    def __init__(self, task: Task, settings: Settings, seed: int) -> None:
        size = len(settings.speeds)
        self._task, self._settings = task, settings
        self._train, self._test = task.load()
        count = len(self._train[1])
        together = settings.policy == "exact"
        each = task.batch_size if settings.batch == "each" else -(-task.batch_size // size)
        batch = each * size if together else each
        self._order = EpochOrder(count, batch, seed, shuffle=True, drop_last=False)
        self._steps = self._order.batches * task.epochs
        self._samples = count * task.epochs
        self._each = each
        cadence = CadenceOptions()
        if settings.anchor is not None:
            cadence = CadenceOptions(anchor=settings.anchor, max_anchor=settings.anchor)
        config = CoordinatorConfig(
            world_size=size,
            batches=self._order.batches,
            epochs=task.epochs,
            policy=settings.policy,
            cadence=cadence,
            global_batch=GlobalBatch(batch, count, least=2) if together else None,
        )
        super().__init__(
            Coordinator(config),
            GateState(size),
            [VirtualRank(WorkerMachine(rank), STEP_MS * speed) for rank, speed in enumerate(settings.speeds)],
            seed=seed,
            sync_ms=SYNC_MS,
            noise=0.02,
            batch_size=each,
        )
        self.curve: list[Point] = []
        self._learners: list[_Learner] = []
        for _ in range(size):
            torch.manual_seed(seed)  # all begin with the same weights
            self._learners.append(_learner(task))
        self._mean = self._learners[0].flat.clone()
        self._mean_buffers = [buffer.clone() for buffer in self._learners[0].buffers]
        self._momentum = torch.zeros_like(self._mean)
        self._weights: dict[int, tuple[int, ...]] = {}
        self._drifts = (0.0,) * size
        self._judge = task.model().eval()
        self._trained = 0  # samples of all ranks

    # ---------------------------------------------------------------- steps
    def step_ms(self, number: int, step: Step) -> float:
        """Draw the time of a step: a fixed part, and one that grows with its samples."""
        user = self._task.batch_size
        samples = self._each if step.part is None else step.part.samples
        whole = self._task.fixed + (1 - self._task.fixed) * samples / user
        return self.ranks[number].ms_per_step * whole * (1 + self.noise * (2 * self.rng.random() - 1))

    def samples_of(self, step: Step) -> int:
        """Samples that a rank trains in a step."""
        if step.part is not None:
            return step.part.samples
        return self._order.samples_in(step.epoch, step.batches[0])

    def end_step(self, number: int, step: Step, ms: float) -> None:
        """A rank has taken a step: here it does so."""
        learner = self._learners[number]
        index = self._order.indices(step.epoch, step.batches[0])
        if step.part is not None:
            index = index[step.part.start : step.part.stop]
        self._set_rate(learner, step.position)
        learner.gradients.zero_()
        inputs, labels = (part[index] for part in self._train)
        F.cross_entropy(learner.model(inputs), labels).backward()
        if step.part is None:
            learner.optimizer.step()
        self._trained += self.samples_of(step)
        super().end_step(number, step, ms)

    def _set_rate(self, learner: _Learner, position: int) -> None:
        """Cosine over the run, times the factor of the remedy."""
        share = position / self._steps
        size = len(self.ranks)
        aim = {"same": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[self._settings.rate]
        factor = 1 + (aim - 1) * min(1.0, share / WARM_UP)
        for group, rate in zip(learner.optimizer.param_groups, learner.rates, strict=True):
            group["lr"] = rate * factor * (1 + math.cos(math.pi * share)) / 2

    # ---------------------------------------------------------------- means
    def held(self, outcome: Outcome, sync_ms: float) -> None:
        """A round was held: here its mean is taken."""
        if sum(outcome.samples):
            if self._settings.policy == "exact":
                self._step_together(outcome.samples)
            else:
                self._meet(outcome)
        self._look_when_due()
        super().held(outcome, sync_ms)

    def _step_together(self, samples: Sequence[int]) -> None:
        weights = _weights(samples)
        first = self._learners[0]
        mean = _mean([learner.gradients for learner in self._learners], weights)
        first.gradients.copy_(mean)
        first.optimizer.step()
        self._share_buffers(weights)
        for learner in self._learners[1:]:
            learner.flat.copy_(first.flat)
        self._mean.copy_(first.flat)

    def _meet(self, outcome: Outcome) -> None:
        weights = _weights(outcome.samples)
        flats = [learner.flat for learner in self._learners]
        self._drifts = self._move(flats, weights)
        for learner in self._learners:
            learner.flat.copy_(self._mean)
        self._share_buffers(weights)
        if self._settings.moments:
            self._share_moments(weights)

    def _move(self, flats: Sequence[Tensor], weights: Sequence[float]) -> tuple[float, ...]:
        """Move the mean; returns the distance of each rank from it, as a part of its length."""
        settings, mean = self._settings, _mean(flats, weights)
        norm = float(mean.norm()) or 1.0
        drifts = tuple(float((flat - mean).norm()) / norm for flat in flats) if len(flats) > 1 else (0.0,)
        if settings.outer_momentum or settings.outer_lr != 1.0:
            difference = self._mean - mean
            self._momentum.mul_(settings.outer_momentum).add_(difference)
            if settings.nesterov:
                difference = difference + settings.outer_momentum * self._momentum
            else:
                difference = self._momentum
            mean = self._mean - settings.outer_lr * difference
        self._mean.copy_(mean)
        return drifts

    def _share_buffers(self, weights: Sequence[float]) -> None:
        for at, mean in enumerate(self._mean_buffers):
            mean.copy_(_mean([learner.buffers[at] for learner in self._learners], weights))
            for learner in self._learners:
                learner.buffers[at].copy_(mean)

    def _share_moments(self, weights: Sequence[float]) -> None:
        first, *others = (learner.optimizer for learner in self._learners)
        for states in zip(*(o.state.values() for o in (first, *others)), strict=True):
            for name, value in states[0].items():
                if torch.is_tensor(value) and value.dim():
                    mean = _mean([state[name] for state in states], weights)
                    for state in states:
                        state[name].copy_(mean)

    def acknowledgment(self, number: int, outcome: Outcome, done: Done, sync_ms: float) -> SyncAck:
        """Acknowledge the last round of an order, with the distance that was measured."""
        work, drift = self.ranks[number].work(done), self._drifts[number] if outcome.drift else None
        checksum = Checksum("simulated", 0) if outcome.compares else None
        return SyncAck(number, outcome, work, sync_ms, drift, checksum)

    # ---------------------------------------------------------------- means while the ranks train (async)
    def snapshot(self, number: int, action: Snapshot) -> None:
        """A rank takes its snapshot."""
        self._learners[number].snapshot = self._learners[number].flat.clone()
        super().snapshot(number, action)

    def obey(self, command: Command) -> None:
        """Obey a command; the weights of an averaging are kept for it."""
        if isinstance(command, Average):
            self._weights[command.round] = command.samples
        super().obey(command)

    def _average(self, round: int) -> None:
        weights = _weights(self._weights.pop(round))
        snapshots = [learner.snapshot for learner in self._learners]
        taken = [
            learner.flat if own is None else own
            for own, learner in zip(snapshots, self._learners, strict=True)
        ]
        drifts = self._move(taken, weights)
        for at, mean in enumerate(self._mean_buffers):
            mean.copy_(_mean([learner.buffers[at] for learner in self._learners], weights))
        self._look_when_due()
        self.tell(Averaged(round, self.sync_ms, drifts), "average")

    def apply(self, number: int, round: int) -> None:
        """A rank applies the mean of a round: it keeps the steps since its snapshot."""
        learner = self._learners[number]
        assert learner.snapshot is not None
        learner.flat.add_(self._mean - learner.snapshot)
        learner.snapshot = None
        for own, mean in zip(learner.buffers, self._mean_buffers, strict=True):
            own.copy_(mean)
        super().apply(number, round)

    # ---------------------------------------------------------------- the curve
    def _look_when_due(self) -> None:
        if self._trained >= self._samples * (len(self.curve) + 1) / POINTS:
            self.look()

    @torch.no_grad()
    def look(self, *, everything: bool = False) -> None:
        """Add a point to the curve: the mean, judged on the test part."""
        model = self._judge
        nn.utils.vector_to_parameters(self._mean, model.parameters())
        floats = [
            buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.isfinite().all()
        ]
        for own, mean in zip(floats, self._mean_buffers, strict=True):
            own.copy_(mean)
        inputs, labels = self._test if everything else (part[:LOOKED_AT] for part in self._test)
        scores = torch.cat([model(rows) for rows in inputs.split(500)])
        self.curve.append(
            Point(
                round(self.clock.now_ms, 1),
                self._trained,
                float(F.cross_entropy(scores, labels)),
                float((scores.argmax(1) == labels).float().mean()),
            )
        )


def _weights(samples: Sequence[int]) -> list[float]:
    whole = sum(samples)
    return [count / whole for count in samples]


def _mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    mean = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        mean.add_(tensor, alpha=weight)
    return mean
