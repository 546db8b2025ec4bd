"""Scenarios: the shape of a run and what goes wrong in it, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from flowdp.machine.coordinator import RunConfig
from flowdp.messages import Requested
from flowdp.options import CadenceOptions, Policy

__all__ = ["Crash", "Scenario", "Wish", "draw"]

STALL = 20.0
"""A stalled step takes this many times its time."""

LATENCY_MS = 8000.0
"""Longest delay of a late snapshot."""


@dataclass(frozen=True)
class Crash:
    """A rank fails: before its first order, in a step, on its way to the gate, or in the averaging.

    Attributes:
        rank: Who.
        where: At which kind of action.
        after: How many such actions succeed before.
    """

    rank: int
    where: Literal["start", "step", "enter", "mean", "snapshot", "apply"]
    after: int


@dataclass(frozen=True)
class Wish:
    """The user asks for something at a time."""

    at_ms: float
    request: Requested


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run of the virtual cluster.

    Attributes:
        seed: Of the random numbers drawn while it runs.
        config: What the coordinator is told.
        ms_per_step: Mean time of one step per rank. Shape (world_size,).
        noise: Relative spread of a step's time.
        sync_ms: Time of one averaging.
        batch_size: Samples of a batch; in exact, what a rank trains in its time of a step.
        last_batch: Samples of an epoch's last batch; in exact the window and the samples of an epoch say it.
        lengths: Batches of the epochs, in turn, where `config` does not know them.
        read_ms: Time that reading one of those batches takes.
        ahead: How many of them are read and not taken, at most, while nobody waits.
        latency_ms: Longest time that a message takes.
        stall: Probability that a step takes `STALL` times its time.
        late_snapshot: Probability that a snapshot takes up to `LATENCY_MS` longer.
        lost_snapshot: Probability that it never comes.
        slow_from: (rank, step, factor): from that step of its on, the rank is slower by that factor.
        crashes: Ranks that fail.
        wishes: What the user does, in order of time.
        differs: (rank, epoch): from the end of that epoch on, the rank's replica is not that of the others.
    """

    seed: int
    config: RunConfig
    ms_per_step: tuple[float, ...]
    noise: float = 0.0
    sync_ms: float = 1.0
    batch_size: int = 8
    last_batch: int = 8
    lengths: tuple[int, ...] = ()
    read_ms: float = 0.0
    ahead: int = 4
    latency_ms: float = 0.1
    stall: float = 0.0
    late_snapshot: float = 0.0
    lost_snapshot: float = 0.0
    slow_from: tuple[int, int, float] | None = None
    crashes: tuple[Crash, ...] = ()
    wishes: tuple[Wish, ...] = field(default=())
    differs: tuple[int, int] | None = None

    def length(self, epoch: int) -> int:
        """Batches of an epoch."""
        known = self.config.batches
        return self.lengths[epoch % len(self.lengths)] if known is None else known

    def dealt(self, epoch: int) -> int:
        """Batches of an epoch that the run comes to."""
        if self.config.max_steps is None:
            return self.length(epoch)
        group = max(self.config.groups or (1,))
        before = sum(-(-self.length(earlier) // group) for earlier in range(epoch))
        return max(0, min(self.length(epoch), (self.config.max_steps - before) * group))

    def samples_in(self, epoch: int, batch: int) -> int:
        """Samples of a batch."""
        window, samples = self.config.window, self.config.samples
        if window is not None and samples is not None:
            return min(window, samples - batch * window)
        return self.last_batch if batch == self.length(epoch) - 1 else self.batch_size

    def step_ms(self, rank: int, samples: int) -> float:
        """Mean time of a step."""
        ms = self.ms_per_step[rank]
        return ms if self.config.window is None else ms * samples / self.batch_size

    @property
    def longest_step_ms(self) -> float:
        """No step takes longer than this."""
        slowed = self.slow_from[2] if self.slow_from else 1.0
        whole = max(self.step_ms(rank, self.config.window or 0) for rank in range(len(self.ms_per_step)))
        return whole * (1 + self.noise) * slowed * (STALL if self.stall else 1.0)

    @cached_property
    def longest_run_ms(self) -> float:
        """No run that ends by itself takes longer than this."""
        steps = sum(self.length(epoch) for epoch in range(self.config.epochs or 1))
        per_step = self.longest_step_ms + self.sync_ms + 6 * self.latency_ms + self.read_ms
        last_wish_ms = max((wish.at_ms for wish in self.wishes), default=0.0)
        lateness_ms = (steps * 4 + 20) * (self.lost_snapshot + self.late_snapshot) * LATENCY_MS * 8
        return 100 + 4 * steps * per_step + len(self.wishes) * (last_wish_ms + 1) + lateness_ms

    @property
    def is_calm(self) -> bool:
        """Whether nothing happens that ends the run before its last step."""
        is_stopped = any(wish.request.what == "stop" for wish in self.wishes)
        return not self.crashes and not is_stopped and self.differs is None


def draw(seed: int) -> Scenario:
    """The scenario of a seed: small and large, calm and wild ones.

    Each kind of trouble is switched on or off for a whole run (swarm), so that runs with one trouble alone,
    which show its own bugs best, come up as often as runs with all of them.
    """
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 2, 2, 3, 3, 4, 5, 6, 8))
    ratio = rng.choice((1.0, 1.2, 2.5, 4.0, 12.0))
    base_ms = rng.choice((0.5, 4.0, 20.0))
    ms_per_step = tuple(base_ms * rng.uniform(1.0, ratio) for _ in range(world_size))
    policy: Policy = rng.choice(("sync", "cadence", "cadence", "async", "async"))
    config = RunConfig(
        world_size=world_size,
        batches=rng.choice((1, 2, 3, rng.randint(1, 12), rng.randint(10, 60), rng.randint(30, 150))),
        epochs=rng.choice((1, 1, 2, 3, 4)),
        max_steps=rng.choice((None, None, None, rng.randint(1, 80))),
        policy=policy,
        cadence=_draw_cadence(rng, world_size),
        ratios=_draw_ratios(rng, world_size) if policy != "sync" and rng.random() < 0.1 else None,
        wait_for_metric=rng.random() < 0.1,
    )
    has = {
        kind: rng.random() < 0.25
        for kind in ("noise", "stall", "late", "lost", "slow", "crash", "wish", "link")
    }
    batch_size = rng.choice((1, 8))
    span_ms = sum(ms_per_step) / world_size**2 * (config.batches or 1) * (config.epochs or 1)
    scenario = Scenario(
        seed=seed,
        config=config,
        ms_per_step=ms_per_step,
        noise=rng.choice((0.05, 0.5)) if has["noise"] else 0.0,
        sync_ms=rng.choice((0.0, 0.05, 0.5)) * base_ms,
        batch_size=batch_size,
        last_batch=rng.randint(1, batch_size),
        latency_ms=rng.choice((1.0, 30.0)) if has["link"] else 0.1,
        stall=0.02 if has["stall"] else 0.0,
        late_snapshot=0.1 if has["late"] else 0.0,
        lost_snapshot=0.1 if has["lost"] else 0.0,
        slow_from=(rng.randrange(world_size), rng.randint(0, 30), rng.choice((2.0, 5.0)))
        if has["slow"]
        else None,
        crashes=_draw_crashes(rng, world_size) if has["crash"] else (),
        wishes=_draw_wishes(rng, span_ms) if has["wish"] else (),
    )
    # By the seed, so that one of the others stays the run it was when it found something: no run of the
    # corpus is among the last two kinds.
    if seed % 11 == 8:
        return _draw_exact(rng, scenario)
    if seed % 10 == 8:
        scenario = _draw_stream(rng, scenario)
    return _draw_groups(rng, scenario) if seed % 13 == 7 else scenario


def _draw_exact(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same in windows of samples."""
    config, ranks = scenario.config, len(scenario.ms_per_step)
    windows = config.batches or 1
    window = rng.choice((1, 7, 8 * ranks, rng.randint(1, 40)))
    return replace(
        scenario,
        config=replace(
            config,
            policy="exact",
            window=window,
            samples=(windows - 1) * window + rng.randint(1, window),
            ratios=_draw_ratios(rng, ranks) if rng.random() < 0.3 else None,
        ),
        batch_size=-(-window // ranks),
        last_batch=1,
        differs=(rng.randrange(ranks), rng.randint(0, 3)) if ranks > 1 and rng.random() < 0.1 else None,
    )


def _draw_groups(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with steps of several batches; with equal ones where the run ends by steps."""
    ranks = len(scenario.ms_per_step)
    groups = tuple(rng.randint(1, 3) for _ in range(ranks))
    if scenario.config.max_steps is not None:
        groups = groups[:1] * ranks
    return replace(scenario, config=replace(scenario.config, groups=groups))


def _draw_stream(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with epochs whose lengths only the reader finds out."""
    mean_ms = sum(scenario.ms_per_step) / len(scenario.ms_per_step) ** 2
    return replace(
        scenario,
        config=replace(scenario.config, batches=None),
        lengths=tuple(rng.choice((1, 2, rng.randint(1, 12), rng.randint(10, 80))) for _ in range(4)),
        read_ms=rng.choice((0.0, 0.3, 1.0, 3.0)) * mean_ms,
        ahead=rng.choice((1, 4, 2 * len(scenario.ms_per_step) + 2, 40)),
    )


def _draw_cadence(rng: random.Random, world_size: int) -> CadenceOptions:
    return CadenceOptions(
        anchor=rng.choice((1, 2, 10, 10, 30)),
        overhead_target=rng.choice((0.05, 0.1, 0.5)),
        max_anchor=rng.choice((None, None, 1, 15, 0)),
        max_batch_diff=rng.choice((None, None, None, 0, 1, 5)),
        speed_hint=rng.choice((None, None, (rng.randrange(world_size), rng.uniform(1, 5)))),
        divergence_guard=rng.random() < 0.8,
    )


def _draw_ratios(rng: random.Random, world_size: int) -> tuple[float, ...]:
    weights = [rng.uniform(0.2, 1.0) for _ in range(world_size)]
    return tuple(weight / sum(weights) for weight in weights)


def _draw_crashes(rng: random.Random, world_size: int) -> tuple[Crash, ...]:
    count = min(world_size, rng.choice((1, 1, 1, 2)))
    return tuple(
        Crash(
            rank,
            rng.choice(("start", "step", "step", "enter", "mean", "snapshot", "apply")),
            rng.choice((0, 1, rng.randint(0, 20))),
        )
        for rank in rng.sample(range(world_size), count)
    )


def _draw_wishes(rng: random.Random, span_ms: float) -> tuple[Wish, ...]:
    wishes: list[Wish] = []
    for kind in rng.choices(("stop", "pause", "set_lr"), k=rng.randint(1, 3)):
        at_ms = rng.uniform(0.0, 1.1) * span_ms
        if kind == "pause":
            back_ms = at_ms + rng.choice((0.0, 1.0, span_ms / 4))
            wishes += [Wish(at_ms, Requested("pause")), Wish(back_ms, Requested("unpause"))]
        elif kind == "stop":
            wishes.append(Wish(at_ms, Requested("stop")))
        else:
            wishes.append(Wish(at_ms, Requested("set_lr", rng.choice((0.1, 0.01)))))
    return tuple(sorted(wishes, key=lambda wish: wish.at_ms))
