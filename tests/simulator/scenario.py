"""Scenarios: the shape of a run, and what goes wrong in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.worker import Step
from flowdp.protocol.messages import Requested
from tests.simulator.machines import Links

__all__ = ["LATENCY_MS", "STALL", "Crash", "Disturbance", "Loss", "Scenario", "Wish"]

STALL = 20.0
"""A stalled step takes this many times its time."""

LATENCY_MS = 8000.0
"""Longest delay of a late snapshot."""


@dataclass(frozen=True)
class Crash:
    """A rank fails: before its first order, in a step, on its way to the gate, in the averaging, in a task.

    Attributes:
        rank: Who.
        where: At which kind of action.
        after: How many such actions succeed before.
    """

    rank: int
    where: Literal["start", "step", "enter", "mean", "snapshot", "apply", "evaluate", "capture"]
    after: int

    @property
    def is_alone(self) -> bool:
        """Whether no mean and no barrier task of the others depends on it."""
        return self.where in ("start", "step", "enter")


Where = Literal["time", "step", "gate", "arrivals", "outcome", "task"]


@dataclass(frozen=True)
class Loss:
    """A machine is lost, all its ranks at once and without a word.

    Attributes:
        machine: Its number; not 0, which leads.
        where: At a time; in the middle of a step; when a rank stands in its gate; when its arrivals have been
            sent; when an outcome comes; when a rank begins a barrier task.
        after: The time, or how many such things happen to its ranks before.
        detect_ms: Time until the coordinator hears of it.
    """

    machine: int
    where: Where
    after: float
    detect_ms: float


@dataclass(frozen=True)
class Wish:
    """The user asks for something at a time."""

    at_ms: float
    request: Requested


@dataclass(frozen=True)
class Disturbance:
    """A rank is slow for a while: a hiccup of one step, or a phase.

    Attributes:
        rank: The slow rank.
        step: The step of its that is the first slow one.
        factor: How many times slower it is.
        for_ms: Steps begun within this time of the first one are slow, too; 0: that one alone is.
    """

    rank: int
    step: int
    factor: float
    for_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run of the virtual cluster.

    Attributes:
        seed: Seed of the random numbers drawn while it runs.
        config: Configuration of the coordinator.
        ms_per_step: Mean time of one step per rank. Shape (world_size,).
        noise: Relative spread of a step's time.
        sync_ms: Time of one averaging.
        batch_size: Samples of a batch; in exact, what a rank trains in its time of a step.
        fixed: Part of that time that does not depend on its samples (exact).
        last_batch: Samples of an epoch's last batch; in exact the window and the samples of an epoch say it.
        lengths: Batches of the epochs, in turn, where `config` does not know them.
        uneven: Each of several machines reads its own stream, and machine m's has m + 1 times that length;
            else each trains every n-th batch of one.
        read_ms: Time that reading one of those batches takes.
        ahead: How many of them are read and not taken, at most, while nobody waits.
        latency_ms: Longest time that a message takes.
        stall: Probability that a step takes `STALL` times its time.
        late_snapshot: Probability that a snapshot takes up to `LATENCY_MS` longer.
        slow_from: (rank, step, factor): from that step of its on, the rank is slower by that factor.
        disturbance: A rank that is slow for a while; None: none is.
        crashes: Ranks that fail.
        wishes: What the user does, in order of time.
        differs: (rank, epoch): from the end of that epoch on, the rank's replica is not that of the others.
        bad_steps: (rank, step): in that step of its, the rank's replica leaves the numbers.
        late_verdicts: Devices leave such a replica out of the mean, and their hosts hear of it one round late
            (sync and cadence).
        eval_batches: Batches of an evaluation.
        eval_ms: Mean time of one of them.
        capture_ms: Longest time that it takes a rank to put down what a checkpoint keeps of it.
        write_ms: Time in which a checkpoint's file is written.
        links: Links between the machines, where `config` has several.
        loss: A machine that is lost; None: none is.
        later: The run that begins where this one was saved; None: none does.
        begins_at: Which of the saved positions of the run before this one begins at, as a fraction of them.
    """

    seed: int
    config: CoordinatorConfig
    ms_per_step: tuple[float, ...]
    noise: float = 0.0
    sync_ms: float = 1.0
    batch_size: int = 8
    fixed: float = 0.0
    last_batch: int = 8
    lengths: tuple[int, ...] = ()
    uneven: bool = False
    read_ms: float = 0.0
    ahead: int = 4
    latency_ms: float = 0.1
    stall: float = 0.0
    late_snapshot: float = 0.0
    slow_from: tuple[int, int, float] | None = None
    disturbance: Disturbance | None = None
    crashes: tuple[Crash, ...] = ()
    wishes: tuple[Wish, ...] = field(default=())
    differs: tuple[int, int] | None = None
    bad_steps: tuple[tuple[int, int], ...] = ()
    late_verdicts: bool = False
    eval_batches: int = 1
    eval_ms: float = 1.0
    capture_ms: float = 1.0
    write_ms: float = 0.0
    links: Links | None = None
    loss: Loss | None = None
    later: Scenario | None = None
    begins_at: float = 1.0

    @property
    def patience(self) -> int:
        """Rounds, or blocks of them, that may end before something is done that is wanted.

        Where the outcome of one crosses a link, the next one may be decided meanwhile.
        """
        return 3 if self.links is None else 4

    @property
    def way_ms(self) -> float:
        """Longest time of a message between the coordinator and a rank."""
        return self.latency_ms + max(self.links.latency_ms if self.links else (0.0,))

    @property
    def pass_ms(self) -> float:
        """Longest time of the averagings up to the next one of all machines, with the mean on its way."""
        if self.links is None:
            return 0.0
        return (self.config.inner_rounds + 1) * self.sync_ms + 2 * self.links.mean_ms

    @property
    def streams(self) -> int:
        """Machines that read a stream of their own; 1: one source serves all ranks."""
        return max(1, len(self.config.machines)) if self.config.batches is None else 1

    def own_length(self, epoch: int, machine: int) -> int:
        """Batches of an epoch in the stream of a machine."""
        known = self.config.batches
        whole = self.lengths[epoch % len(self.lengths)] if known is None else known
        return whole * (machine + 1) if self.uneven else len(range(machine, whole, self.streams))

    def length(self, epoch: int) -> int:
        """Batches of an epoch."""
        return sum(self.own_length(epoch, machine) for machine in range(self.streams))

    def exists(self, epoch: int, batch: int) -> bool:
        """Whether an epoch has a batch of this number."""
        return batch // self.streams < self.own_length(epoch, batch % self.streams)

    def numbers(self, epoch: int) -> set[int]:
        """Numbers of an epoch's batches."""
        machines = range(self.streams)
        return {i * self.streams + at for at in machines for i in range(self.own_length(epoch, at))}

    def planned_steps(self, epoch: int) -> int:
        """Steps of an epoch, where they have as many batches on all ranks."""
        group = max(self.config.groups or (1,))
        return sum(-(-self.own_length(epoch, machine) // group) for machine in range(self.streams))

    def room(self, epoch: int) -> int:
        """Steps up to the limit of the run, which has one, when an epoch begins."""
        start = self.config.start
        first, before = (0, 0) if start is None else (start.done, start.planned)
        return (self.config.max_steps or 0) - before - sum(map(self.planned_steps, range(first, epoch)))

    def dealt(self, epoch: int) -> int:
        """Batches of an epoch that the run comes to, or that the one before it had come to.

        Of several streams at most these: the last step of each may have fewer batches than the others.
        """
        start = self.config.start
        if self.config.max_steps is None or (start is not None and epoch < start.done):
            return self.length(epoch)
        group = max(self.config.groups or (1,))
        dealt = [one.position for one in (() if start is None else start.open) if one.epoch == epoch]
        return max(0, *dealt, min(self.length(epoch), self.room(epoch) * group))

    def samples_in(self, epoch: int, batch: int) -> int:
        """Samples of a batch."""
        whole = self.config.global_batch
        if whole is not None and whole.samples is not None:
            return min(whole.size, whole.samples - batch * whole.size)
        is_last = not self.exists(epoch, batch + (self.streams if self.uneven else 1))
        return self.last_batch if is_last else self.batch_size

    def samples_of(self, step: Step) -> int:
        """Samples that a rank trains in a step."""
        if step.part is not None:
            return step.part.samples
        return sum(self.samples_in(step.epoch, batch) for batch in step.batches)

    def step_ms(self, rank: int, samples: int) -> float:
        """Mean time of a step."""
        ms = self.ms_per_step[rank]
        if self.config.global_batch is None:
            return ms
        return ms * (self.fixed + (1.0 - self.fixed) * samples / self.batch_size)
