"""Checks of runs and means on a device: every sample trained once, replicas equal, means right.

A missing dependency between two streams shows only where the device is late at that point. So delays are put
into backward, optimizer, copy or averaging, half of them at random. Each step's data is recorded by copies on
its own stream, for nothing may be read back before the run is over.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import flowdp
from bench.cadences import cadence_for
from bench.gpu.averaging import Make, one_round, outcome_of
from bench.gpu.part import lanes_of
from flowdp.collective import host
from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.nccl import NcclMean
from flowdp.data.prefetch import PrefetchFeed
from flowdp.device.flat_parameters import Flat, FlatReplica
from flowdp.replica.replica import Replica

__all__ = ["STALLS", "Single", "StepRecorder", "deviation", "faults_of", "model", "samples"]

STALLS = ("backward", "optimizer", "copy", "averaging")
"""Places at which a device can be delayed."""

LEAVES_AT = 4
"""The step in which the leaving rank fails, counted from 0."""

FEATURES = 8
STALL_CYCLES = 3_000_000  # 1.5 ms at 2 GHz, about twenty of these steps
STALL_CHANCE = 0.5
COUNT, BATCH_SIZE, EPOCHS = 519, 16, 3  # the last batch of an epoch has 7 samples


def samples(count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Inputs [count, 2 + FEATURES], starting with the sample's index and a function of it; and targets."""
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    features = torch.randn(count, FEATURES, generator=generator)
    return torch.cat((index, index / 2 + 1, features), 1), features.sum(1, keepdim=True)


def model() -> nn.Module:
    """A perceptron with float and integer buffers."""
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


class Single(Dataset[Any]):
    """Samples one by one: a dataset that cannot be resident on the device, so its batches are copied."""

    def __init__(self, data: tuple[Tensor, ...]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.data)


class Staller:
    """Delays the current stream at one place, the first time and then as `STALL_CHANCE` says.

    Args:
        where: One of `STALLS`; None: nowhere.
    """

    def __init__(self, where: str | None) -> None:
        self.where = where
        self.stalls = 0
        self._draw = random.Random(0)
        self._lock = threading.Lock()

    def at(self, where: str) -> None:
        """Delay the stream if `where` is the staller's place."""
        if where != self.where:
            return
        with self._lock:
            is_late = self.stalls == 0 or self._draw.random() < STALL_CHANCE
            self.stalls += is_late
        if is_late and torch.cuda.is_available():
            torch.cuda._sleep(STALL_CYCLES)


class StepRecorder:
    """A loss that records on the device which samples it was given.

    Args:
        staller: Delays its backward.
        leaver: A rank that fails in a step.

    Attributes:
        trained: Sample indices of each batch, on its device, by epoch.
        wrong: For each batch, whether any sample has another sample's values, on its device.
        rounds: Values of each replica after each round: `rounds[round][rank]`, on its device.
    """

    def __init__(self, staller: Staller, leaver: int | None = None) -> None:
        self._staller = staller
        self._leaver = leaver
        self._lock = threading.Lock()
        self.trained: dict[int, list[Tensor]] = defaultdict(list)
        self.wrong: list[Tensor] = []
        self.rounds: dict[int, dict[int, Tensor]] = defaultdict(dict)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        if worker.rank == self._leaver and worker.local_step == LEAVES_AT:
            raise RuntimeError("this rank leaves")
        x, y = batch
        index, wrong = x[:, 0].clone(), (x[:, 1] != x[:, 0] / 2 + 1).any()
        with self._lock:
            self.trained[worker.epoch].append(index)
            self.wrong.append(wrong)
            is_new = worker.round >= 0 and worker.rank not in self.rounds[worker.round]
        if is_new:
            self.rounds[worker.round][worker.rank] = held_by(model)
        loss = F.mse_loss(model(x[:, 2:]), y)
        loss.register_hook(lambda _: self._staller.at("backward"))
        return loss

    def faults(self, count: int, epochs: int) -> list[str]:
        """Errors in the data trained. Call it after the run."""
        found = [f"batch {number} had wrong values" for number, wrong in enumerate(self.wrong) if wrong]
        for epoch in range(epochs):
            seen = Counter(int(i) for index in self.trained[epoch] for i in index.nan_to_num(-1).tolist())
            twice = sum(times > 1 for times in seen.values())
            # The steps of a failed rank since the last mean are lost, and their batches are trained again.
            if seen.keys() != set(range(count)) or (twice and self._leaver is None):
                found.append(f"epoch {epoch}: {len(seen)} of {count} samples trained, {twice} twice")
        return found

    def unequal_rounds(self) -> list[int]:
        """Rounds after which two replicas differed."""
        return [
            number
            for number, held in self.rounds.items()
            if any(not torch.equal(next(iter(held.values())).cpu(), other.cpu()) for other in held.values())
        ]


@torch.no_grad()
def held_by(module: nn.Module) -> Tensor:
    """All parameters and buffers in float64, as one tensor."""
    tensors = (*module.parameters(), *module.buffers())
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


@contextmanager
def stalled(staller: Staller) -> Iterator[None]:
    """Delay the copies of prefetch and the averaging."""
    with ExitStack() as stack:
        stack.enter_context(_before(PrefetchFeed, "_bring", lambda *_: staller.at("copy")))
        for kind in (DeviceMean, NcclMean):
            stack.enter_context(_before(kind, "_enqueue", _on_comm(staller)))

        def late(lane: Any, *_: Any) -> None:
            with lane.on(lane.comm):
                staller.at("averaging")

        stack.enter_context(_before(host, "_copy", late))
        stack.enter_context(_before(SnapshotMean, "_mean_of", lambda mean, _, home: late(mean._lanes[home])))
        yield


def _on_comm(staller: Staller) -> Callable[..., None]:
    def late(mean: Any, _: Any, workers: Sequence[int]) -> None:
        for worker in workers:
            lane = mean._lanes[worker]
            with lane.on(lane.comm):
                staller.at("averaging")

    return late


@contextmanager
def _before(owner: Any, name: str, first: Callable[..., None]) -> Iterator[None]:
    """Call another function before each call of a function."""
    own = getattr(owner, name)

    def both(*arguments: Any, **options: Any) -> Any:
        first(*arguments)
        return own(*arguments, **options)

    setattr(owner, name, both)
    try:
        yield
    finally:
        setattr(owner, name, own)


def faults_of(
    devices: Sequence[torch.device | str],
    *,
    policy: str = "cadence",
    stall: str | None = None,
    is_streamed: bool = False,
    precision: str = "32",
    leaver: int | None = None,
    **options: Any,
) -> list[str]:
    """Train, and return the errors found.

    Args:
        devices: One device per rank.
        policy: As for the Trainer.
        stall: One of `STALLS`, the place of the delays.
        is_streamed: Whether batches are copied, though all would fit on the device.
        precision: As for the Trainer.
        leaver: A rank that fails early; the others continue.
        options: More arguments of the Trainer.
    """
    staller = Staller(stall)
    recorder = StepRecorder(staller, leaver)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(params, lr=0.02)
        made.register_step_pre_hook(lambda *_: staller.at("optimizer"))
        made.register_step_post_hook(lambda *_: staller.at("optimizer"))
        return made

    data = samples()
    settings: dict[str, Any] = {
        "cadence": cadence_for(policy, anchor=2, max_anchor=4),
        "policy": policy,
        "precision": precision,
        "failures": flowdp.FailureOptions(on_failure="raise" if leaver is None else "continue"),
        **options,
    }
    torch.manual_seed(0)
    with stalled(staller):
        run = flowdp.Trainer(
            model(),
            optimizer,
            recorder,
            dataset=Single(data) if is_streamed else data,
            per_device_batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            devices=list(devices),
            progress=False,
            **settings,
        ).start()
        replicas = run._engine.replicas
        state = run.join()
    found = recorder.faults(COUNT, EPOCHS)
    losses = [record.loss for record in state.history if record.loss is not None]
    if not losses[-1] < 0.7 * losses[0]:
        found.append(f"the loss did not fall: {losses}")
    if leaver is not None and not any(f"rank {leaver} left" in text for text in run.status().problems):
        found.append(f"rank {leaver} has not left")
    if len(devices) > 1:
        stayed = [replica for rank, replica in enumerate(replicas) if rank != leaver]
        found += _replica_faults(stayed, recorder, policy)
    has_streams = all(replica.lane.is_async for replica in replicas)
    if stall and not staller.stalls and (has_streams or stall in ("backward", "optimizer")):
        found.append(f"no delay in {stall}")
    return found


def _replica_faults(replicas: Sequence[Replica], recorder: StepRecorder, policy: str) -> list[str]:
    found = []
    # Asynchronous replicas are equal only at the end.
    if policy != "async":
        if len(recorder.rounds) < 3:
            found.append(f"only {len(recorder.rounds)} rounds were seen")
        found += [f"replicas differed after round {number}" for number in recorder.unequal_rounds()]
    first, *others = (held_by(replica.module).cpu() for replica in replicas)
    if not all(torch.equal(first, other) for other in others):
        found.append("replicas differed at the end")
    return found


def deviation(devices: Sequence[torch.device], make: Make, *, rounds: int = 4, leaves: bool = False) -> float:
    """Largest error of weighted means against a float64 reference, relative to its largest element.

    Args:
        devices: One device per rank.
        make: Makes the collective from replicas and lanes; replicas this small need no second meeting.
        rounds: Means of fresh values; in the second, one rank has NaN parameters and weight 0.
        leaves: Whether rank 0 has left before the last one.

    Raises:
        AssertionError: An integer buffer is not the maximum, or the members' bits differ.
    """
    lanes = lanes_of(devices)
    modules, replicas = [], []
    for rank, lane in enumerate(lanes):
        with lane.on(lane.compute):
            modules.append(model().to(lane.device))
            replicas.append(FlatReplica(modules[rank], rank))
        lane.drain()
    collective, worst = make(replicas, lanes), 0.0
    try:
        for number in range(rounds):
            bad = [len(lanes) - 1] if number == 1 else []
            left = [0] if leaves and number == rounds - 1 else []
            weights = [0 if rank in (*bad, *left) else 5 * rank + 1 for rank in range(len(lanes))]
            for rank, (replica, lane) in enumerate(zip(replicas, lanes, strict=True)):
                with lane.on(lane.compute):
                    for flat in replica.flats:
                        flat.memory.fill_(3 + rank) if flat.counts else flat.memory.normal_()
                        if rank in bad and not flat.counts:
                            flat.memory.fill_(torch.nan)
                lane.drain()
            outcome = outcome_of(number, weights, left=left)
            members = [replicas[rank] for rank in outcome.members]
            before = [[memory.double().cpu() for memory in replica.memories] for replica in members]
            one_round(collective, lanes, outcome)
            for lane in lanes:
                lane.drain()
            worst = max(worst, _distance(members, before, [weights[rank] for rank in outcome.members]))
    finally:
        collective.close()
    return worst


def _distance(
    replicas: Sequence[FlatReplica], before: Sequence[Sequence[Tensor]], weights: Sequence[int]
) -> float:
    worst = 0.0
    for index, flat in enumerate(replicas[0].flats):
        now = [replica.memories[index].cpu() for replica in replicas]
        assert all(torch.equal(now[0], other) for other in now), "the replicas differ"
        mean = _reference(flat, [memories[index] for memories in before], weights)
        away = float((now[0].double() - mean).abs().max() / mean.abs().max())
        assert not flat.counts or away == 0.0, "an integer is not the maximum"
        worst = max(worst, away)
    return worst


def _reference(flat: Flat, values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    if flat.counts:
        return torch.stack(list(values)).max(0).values
    weighted = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
    return torch.stack(weighted).sum(0) / sum(weights)
