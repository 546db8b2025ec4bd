"""Scenarios drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

from flowdp.machine.config import BarrierPlan, CoordinatorConfig, GlobalBatch
from flowdp.options import CadenceOptions, Policy
from flowdp.policy.interval import MINUTE_MS, Interval
from flowdp.policy.monitor import Monitor
from flowdp.protocol.messages import Requested
from tests.simulator.machines import Links
from tests.simulator.scenario import Crash, Disturbance, Loss, Scenario, Where, Wish

__all__ = ["Crash", "Disturbance", "Loss", "Scenario", "Wish", "draw"]


def draw(seed: int) -> Scenario:
    """The scenario of a seed: small and large, calm and wild ones.

    Each kind of fault is switched on or off for a whole run (swarm), so that runs with one fault alone,
    which show its own bugs best, come up as often as runs with all of them.
    """
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 2, 2, 3, 3, 4, 5, 6, 8))
    ratio = rng.choice((1.0, 1.2, 2.5, 4.0, 12.0))
    base_ms = rng.choice((0.5, 4.0, 20.0))
    ms_per_step = tuple(base_ms * rng.uniform(1.0, ratio) for _ in range(world_size))
    policy: Policy = rng.choice(("sync", "cadence", "cadence", "async", "async"))
    config = CoordinatorConfig(
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
        for kind in ("noise", "stall", "late", "later", "slow", "crash", "wish", "link")
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
        late_snapshot=0.1 if has["late"] or has["later"] else 0.0,
        slow_from=(rng.randrange(world_size), rng.randint(0, 30), rng.choice((2.0, 5.0)))
        if has["slow"]
        else None,
        crashes=_draw_crashes(rng, world_size) if has["crash"] else (),
        wishes=_draw_wishes(rng, span_ms) if has["wish"] else (),
    )
    # By the seed, so that one of the others stays the run it was when it found something: no run of the
    # corpus is among these kinds.
    if seed % 68 == 14:
        return _draw_disturbed(rng, scenario)
    if seed % 19 == 2:
        max_ms = rng.uniform(0.0, 1.1) * span_ms + 0.001
        scenario = replace(scenario, config=replace(scenario.config, max_ms=max_ms))
    if seed % 11 == 8:
        scenario = _draw_exact(rng, scenario)
    else:
        scenario = _draw_stream(rng, scenario) if seed % 10 == 8 else scenario
        scenario = _draw_groups(rng, scenario) if seed % 13 == 7 else scenario
    scenario = _draw_lives(rng, scenario, span_ms) if seed % 15 in (1, 8, 12) or seed % 17 == 10 else scenario
    if seed % 17 not in (10, 14):
        return scenario
    is_long = scenario.config.policy != "exact" and scenario.config.batches is not None
    spread = _draw_machines(rng, scenario, rng.choice((1, 5, 20)) if is_long else 1)
    # The next life may have another number of machines, and with it other streams.
    is_uneven = spread.config.batches is None and spread.later is None and seed % 3 == 0
    return replace(spread, uneven=is_uneven)


def _draw_machines(rng: random.Random, scenario: Scenario, times: int) -> Scenario:
    """The same, and those that come after it, with the ranks on several machines.

    Args:
        rng: Source of the random numbers.
        scenario: The first of them.
        times: Epochs have so many times their batches, for rounds of all machines are far apart.
    """
    later = None if scenario.later is None else _draw_machines(rng, scenario.later, times)
    config, ranks = scenario.config, len(scenario.ms_per_step)
    batches = config.batches and config.batches * times
    max_steps = config.max_steps and config.max_steps * times
    whole = config.global_batch and replace(config.global_batch, may_be_alone=False)
    config = replace(config, batches=batches, max_steps=max_steps, on_failure="raise", global_batch=whole)
    if ranks == 1:
        return replace(scenario, config=config, later=later)
    cuts = sorted(rng.sample(range(1, ranks), rng.randint(1, min(3, ranks - 1))))
    numbers = tuple(stop - start for start, stop in zip((0, *cuts), (*cuts, ranks), strict=True))
    policy: Policy = "cadence" if config.policy == "async" else config.policy
    ms_per_step = list(scenario.ms_per_step)
    if rng.random() < 0.2:  # a machine that is far slower
        slow = rng.randrange(len(numbers))
        first = sum(numbers[:slow])
        for rank in range(first, first + numbers[slow]):
            ms_per_step[rank] *= 8.0
    step_ms = max(scenario.ms_per_step)
    latency_ms = rng.choice((0.1, 1.0, rng.choice((1.0, 10.0)) * step_ms))
    return replace(
        scenario,
        config=replace(
            config,
            policy=policy,
            cadence=replace(
                config.cadence,
                anchor=rng.choice((1, 2, 3, 10)),
                max_anchor=rng.choice((None, None, 15)),
                max_batch_diff=rng.choice((None, None, 5)),
            ),
            machines=numbers,
            inner_rounds=rng.choice((1, 2, 3, 5, 10, 50)) if policy == "cadence" else 1,
            overlaps=policy == "cadence" and rng.random() < 0.4,
        ),
        ms_per_step=tuple(ms_per_step),
        links=Links(
            (0.0, *(latency_ms * rng.uniform(0.1, 1.0) for _ in numbers[1:])),
            rng.choice((0.0, 0.3, 3.0)) * step_ms,
        ),
        loss=_draw_loss(rng, scenario, len(numbers)) if rng.random() < 0.2 else None,
        crashes=scenario.crashes if rng.random() < 0.5 else (),
        late_snapshot=0.0,
        later=later,
    )


def _draw_loss(rng: random.Random, scenario: Scenario, machines: int) -> Loss:
    where: Where = rng.choice(get_args(Where))
    span_ms = max(scenario.ms_per_step) * (scenario.config.batches or 10) * (scenario.config.epochs or 1)
    after = rng.uniform(0.0, 1.0) * span_ms if where == "time" else rng.choice((0, 1, rng.randint(0, 20)))
    return Loss(
        rng.randrange(1, machines), where, after, rng.choice((0.0, 1.0, 30.0)) * max(scenario.ms_per_step)
    )


def _draw_disturbed(rng: random.Random, scenario: Scenario) -> Scenario:
    """A run with one fault alone: a rank that is slow for a while, with time enough to recover."""
    ranks = rng.choice((2, 2, 3, 4))
    base_ms = rng.choice((0.5, 4.0, 20.0))
    ratio = rng.choice((1.0, 1.2, 2.5, 4.0))
    ms_per_step = tuple(base_ms * rng.uniform(1.0, ratio) for _ in range(ranks))
    anchor = rng.choice((2, 10, 30))
    batches = rng.choice((4, 8, 40)) * ranks
    policy: Policy = rng.choice(("cadence", "cadence", "async", "exact"))
    rounds_per_epoch = 1 if policy == "exact" else max(1, batches // (anchor * ranks))
    disturbance = Disturbance(
        rng.randrange(ranks),
        rng.choice((0, 1, rng.randint(0, 40))),
        rng.choice((3.0, 20.0, 100.0, 1000.0)),
        rng.choice((0.0, 0.0, rng.uniform(0.0, 40.0) * batches * base_ms)),
    )
    calm = Scenario(
        seed=scenario.seed,
        config=CoordinatorConfig(
            world_size=ranks,
            batches=batches,
            epochs=8 + 80 // rounds_per_epoch,
            policy=policy,
            cadence=CadenceOptions(
                anchor=anchor,
                speed_hint=rng.choice((None, None, (rng.randrange(ranks), rng.uniform(1.0, 50.0)))),
            ),
        ),
        ms_per_step=ms_per_step,
        sync_ms=rng.choice((0.0, 0.05)) * base_ms,
        disturbance=disturbance,
    )
    if policy != "exact":
        return calm
    window = 8 * ranks
    whole = GlobalBatch(window, 8 * batches)
    config = replace(calm.config, batches=batches // ranks, global_batch=whole)
    return replace(calm, config=config)


def _draw_exact(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same in windows of samples."""
    config, ranks = scenario.config, len(scenario.ms_per_step)
    windows = config.batches or 1
    window = rng.choice((1, 7, 8 * ranks, rng.randint(1, 40)))
    samples = (windows - 1) * window + rng.randint(1, window)
    return replace(
        scenario,
        config=replace(
            config,
            policy="exact",
            global_batch=GlobalBatch(
                window, samples, least=1 + scenario.seed % 2, may_be_alone=scenario.seed % 3 > 0
            ),
            ratios=_draw_ratios(rng, ranks) if rng.random() < 0.3 else None,
        ),
        batch_size=-(-window // ranks),
        fixed=(0.0, 0.2, 0.7)[scenario.seed // 11 % 3],
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


def _draw_lives(rng: random.Random, scenario: Scenario, span_ms: float) -> Scenario:
    """The same with barrier tasks, faults that a run survives, and runs that go on where it was saved."""
    first = _draw_faults(rng, _draw_tasks(rng, scenario, span_ms), span_ms)
    lives = [first]
    for _ in range(rng.choice((0, 1, 1, 2))):
        lives.append(_draw_faults(rng, _draw_next(rng, lives[-1]), span_ms))
    if scenario.seed // 15 % 4 == 3 and first.config.tasks.evaluation is not None:  # by the seed, as above
        lives = [_with_stop(life, span_ms) for life in lives]
    later = None
    for life in reversed(lives):
        later = replace(life, later=later)
    return later or first


def _draw_tasks(rng: random.Random, scenario: Scenario, span_ms: float) -> Scenario:
    """The same with checkpoints, evaluations, and an end by a monitor."""
    eval_every = rng.choice((None, None, 1, 1, 2))
    monitor = Monitor(
        name="loss" if eval_every is None else "score",
        mode=rng.choice(("min", "max")),
        patience=rng.choice((None, 1, 2)),
        min_delta=rng.choice((0.0, 0.1)),
    )
    watches = rng.random() < 0.3
    tasks = BarrierPlan(
        save=_draw_save(rng, scenario, span_ms),
        evaluation=None if eval_every is None else Interval(eval_every, "epoch"),
        monitor=monitor if watches else None,
        keeps_best=watches and rng.random() < 0.5,
    )
    if eval_every is not None and scenario.seed % 4 == 1:
        steps = 1 + scenario.seed % 37
        tasks = replace(tasks, evaluation=Interval(steps, "step"), monitor=None, keeps_best=False)
    step_ms = max(scenario.ms_per_step)
    return replace(
        scenario,
        config=replace(scenario.config, tasks=tasks),
        eval_batches=rng.choice((1, 2, rng.randint(1, 20))),
        eval_ms=rng.choice((0.1, 1.0)) * step_ms,
        capture_ms=rng.choice((0.0, 0.5, 5.0)) * step_ms,
        write_ms=(0.0, 0.3, 30.0)[scenario.seed // 15 % 3] * step_ms,  # by the seed, as above
    )


def _with_stop(scenario: Scenario, span_ms: float) -> Scenario:
    """The same with a stop, probably in an evaluation, after which the next life begins where it stood."""
    rng, tasks = random.Random(scenario.seed), scenario.config.tasks
    stop = Wish(rng.uniform(0.0, 2.0) * span_ms, Requested("stop"))
    tasks = replace(tasks, save=tasks.save or Interval(2, "epoch"))
    return replace(
        scenario,
        config=replace(scenario.config, tasks=tasks),
        wishes=tuple(sorted((*scenario.wishes, stop), key=lambda wish: wish.at_ms)),
        eval_ms=span_ms / (1 + scenario.eval_batches),
        begins_at=1.0,
    )


def _draw_save(rng: random.Random, scenario: Scenario, span_ms: float) -> Interval | None:
    plans = (
        None,
        Interval(rng.randint(1, 2), "epoch"),
        Interval(rng.choice((1, rng.randint(1, 5), rng.randint(5, 50))), "step"),
        Interval(rng.uniform(0.01, 0.5) * (span_ms + max(scenario.ms_per_step)) / MINUTE_MS, "minute"),
    )
    return rng.choice(plans)


def _draw_faults(rng: random.Random, scenario: Scenario, span_ms: float) -> Scenario:
    """The same with what a run with barrier tasks has to survive."""
    config, ranks = scenario.config, len(scenario.ms_per_step)
    has = {kind: rng.random() < 0.35 for kind in ("wish", "bad", "all", "alone", "task")}
    wishes = list(scenario.wishes)
    crashes = list(scenario.crashes)
    if has["wish"]:
        times = [rng.uniform(0.0, 1.1) * span_ms for _ in range(rng.randint(1, 3))]
        wishes += [Wish(at_ms, Requested(rng.choice(("checkpoint", "snapshot")))) for at_ms in times]
    bad = rng.sample(range(ranks), rng.randint(1, min(2, ranks))) if has["bad"] else []
    bad = list(range(ranks)) if has["bad"] and has["all"] and rng.random() < 0.2 else bad
    at = rng.randint(0, 20)
    if has["task"]:
        crashes.append(
            Crash(
                rng.randrange(ranks),
                rng.choice(("evaluate", "capture")),
                rng.choice((0, 1, rng.randint(0, 9))),
            )
        )
    if has["alone"]:
        config = replace(config, on_failure="continue")
        crashes += [
            Crash(rank, rng.choice(("step", "step", "enter")), rng.choice((0, 1, rng.randint(0, 20))))
            for rank in rng.sample(range(ranks), min(ranks, rng.choice((1, 1, 2, 3))))
        ]
    return replace(
        scenario,
        config=config,
        wishes=tuple(sorted(wishes, key=lambda wish: wish.at_ms)),
        crashes=tuple({crash.rank: crash for crash in crashes}.values()),
        bad_steps=tuple((rank, at if has["all"] else rng.randint(0, 20)) for rank in bad),
        # By the seed, for the same reason as in `draw`.
        late_verdicts=bool(bad) and scenario.seed // 15 % 2 == 0,
    )


def _draw_next(rng: random.Random, before: Scenario) -> Scenario:
    """The run that goes on where this one was saved: on the same devices or on others, perhaps for longer."""
    config, ms_per_step = before.config, before.ms_per_step
    if rng.random() < 0.5:
        ranks = rng.choice((1, 2, 3, 4, 8))
        ms_per_step = tuple(rng.choice(ms_per_step) * rng.uniform(0.5, 2.0) for _ in range(ranks))
    ranks = len(ms_per_step)
    policy: Policy = config.policy
    if policy != "exact" and rng.random() < 0.2:
        policy = rng.choice(("sync", "cadence", "async"))
    max_steps = rng.choice((None, config.max_steps, (config.max_steps or 0) + rng.randint(1, 80)))
    groups = config.groups and tuple(
        max(config.groups) if max_steps is not None else rng.randint(1, 3) for _ in range(ranks)
    )
    return replace(
        before,
        seed=rng.getrandbits(32),
        config=replace(
            config,
            world_size=ranks,
            epochs=(config.epochs or 1) + rng.choice((0, 0, 1)),
            max_steps=max_steps,
            policy=policy,
            cadence=_draw_cadence(rng, ranks),
            ratios=None,
            groups=groups,
            on_failure="raise",
        ),
        ms_per_step=ms_per_step,
        slow_from=None,
        crashes=_draw_crashes(rng, ranks) if rng.random() < 0.2 else (),
        wishes=(),
        differs=None,
        bad_steps=(),
        late_verdicts=False,
        begins_at=rng.random(),
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
            value = rng.choice((0.1, 0.01))
            wishes.append(Wish(at_ms, Requested("set_lr" if value == 0.1 else "scale_lr", value)))
    return tuple(sorted(wishes, key=lambda wish: wish.at_ms))
