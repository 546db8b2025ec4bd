"""Scenarios are drawn from their seed, of every kind, and within what the options allow."""

from __future__ import annotations

from collections import Counter

from tests.simulator.faults import Scenario, draw

DRAWN = [draw(seed) for seed in range(1000)]


def kinds(scenario: Scenario) -> list[str]:
    """What is special about a scenario."""
    config = scenario.config
    found = [f"policy {config.policy}", f"{config.world_size} ranks"]
    found += [f"crash in {crash.where}" for crash in scenario.crashes]
    found += [f"wish to {wish.request.what}" for wish in scenario.wishes]
    special = {
        "noise": scenario.noise,
        "stall": scenario.stall,
        "late": scenario.late_snapshot,
        "slow": scenario.slow_from,
        "short last batch": scenario.last_batch < scenario.batch_size,
        "one batch": config.batches == 1,
        "ratios": config.ratios,
        "max_steps": config.max_steps,
        "metric": config.wait_for_metric,
        "calm": not scenario.crashes and not scenario.wishes,
        "lockstep": config.cadence.max_batch_diff == 0,
        "stream": config.batches is None,
        "slow reader": scenario.read_ms > max(scenario.ms_per_step) / config.world_size,
        "fast reader": config.batches is None and scenario.read_ms == 0.0,
        "groups": config.groups,
        "fewer samples than ranks": (
            config.global_batch is not None and config.global_batch.size < config.world_size
        ),
        "differs": scenario.differs,
        "max_time": config.max_ms,
    }
    return found + [kind for kind, there in special.items() if there]


def test_every_kind_comes_up() -> None:
    seen = Counter(kind for scenario in DRAWN for kind in set(kinds(scenario)))
    wanted = [f"policy {name}" for name in ("sync", "cadence", "async", "exact")]
    wanted += [f"{n} ranks" for n in (1, 2, 3, 4, 5, 6, 8)]
    wanted += [f"crash in {where}" for where in ("start", "step", "enter", "mean", "snapshot", "apply")]
    wanted += [f"wish to {what}" for what in ("stop", "pause", "unpause", "set_lr")]
    wanted += ["noise", "stall", "late", "slow", "short last batch", "one batch", "ratios"]
    wanted += ["max_steps", "metric", "calm", "lockstep", "stream", "slow reader", "fast reader"]
    wanted += ["groups", "fewer samples than ranks", "differs", "max_time"]
    rare = {kind: seen[kind] for kind in wanted if seen[kind] < 5}
    assert rare == {}


def test_scenarios_are_sound() -> None:
    for scenario in DRAWN:
        config = scenario.config
        assert len(scenario.ms_per_step) == config.world_size
        assert 1 <= scenario.last_batch <= scenario.batch_size
        assert len({crash.rank for crash in scenario.crashes}) == len(scenario.crashes)
        assert all(crash.rank < config.world_size for crash in scenario.crashes)
        if config.policy == "exact":
            whole = config.global_batch
            assert whole is not None
            assert config.batches == -(-whole.samples // whole.size)
            assert config.groups is None
        if config.groups is not None:
            assert config.max_steps is None or len(set(config.groups)) == 1
        assert [w.at_ms for w in scenario.wishes] == sorted(w.at_ms for w in scenario.wishes)
        if config.ratios is not None:
            assert abs(sum(config.ratios) - 1.0) < 1e-9


# ---------------------------------------------------------------- barrier tasks and lives
LONG = [draw(seed) for seed in range(3000) if seed % 15 in (1, 8, 12)]


def later_kinds(scenario: Scenario) -> list[str]:
    """What is special about the barrier tasks of a scenario, its troubles, and what comes after it."""
    config, later = scenario.config, scenario.later
    tasks, watched = config.tasks, config.tasks.monitor
    bad = {rank for rank, _ in scenario.bad_steps}
    special = {
        f"saved by {tasks.save and tasks.save.unit}": True,
        "evaluated": tasks.evaluation,
        "watched": watched,
        "patient": watched is not None and watched.patience is None,
        "the best is kept": tasks.keeps_best,
        "bad": bad,
        "bad and late": scenario.late_verdicts,
        "all bad": len(bad) == config.world_size > 1,
        "survives": config.on_failure == "continue",
        "survives on a stream": config.on_failure == "continue" and config.batches is None,
        "crash alone": any(crash.is_alone for crash in scenario.crashes),
        "several crashes": len(scenario.crashes) > 1,
        "crash in evaluate": any(crash.where == "evaluate" for crash in scenario.crashes),
        "crash in capture": any(crash.where == "capture" for crash in scenario.crashes),
        "wish to checkpoint": any(wish.request.what == "checkpoint" for wish in scenario.wishes),
        "wish to snapshot": any(wish.request.what == "snapshot" for wish in scenario.wishes),
        "a second life": later,
        "a third life": later and later.later,
    }
    if later is not None:
        special |= {
            "other devices": later.config.world_size != config.world_size,
            "another policy": later.config.policy != config.policy,
            "more epochs": (later.config.epochs or 0) > (config.epochs or 0),
            "a limit": later.config.max_steps is not None and config.max_steps is None,
            "no limit": later.config.max_steps is None and config.max_steps is not None,
            "a longer limit": (later.config.max_steps or 0) > (config.max_steps or 10**9),
        }
    return [kind for kind, there in special.items() if there]


def test_every_kind_of_task_and_life_comes_up() -> None:
    seen = Counter(kind for scenario in LONG for kind in later_kinds(scenario))
    wanted = [f"saved by {unit}" for unit in (None, "epoch", "step", "minute")]
    wanted += [
        "evaluated",
        "watched",
        "patient",
        "the best is kept",
        "bad",
        "bad and late",
        "all bad",
        "survives",
    ]
    wanted += ["crash alone", "several crashes", "crash in evaluate", "crash in capture"]
    wanted += ["wish to checkpoint", "wish to snapshot", "a second life", "a third life", "other devices"]
    wanted += ["another policy", "more epochs", "a limit", "no limit", "a longer limit"]
    assert {kind: seen[kind] for kind in wanted if seen[kind] < 5} == {}


def test_lives_are_sound() -> None:
    for first in LONG:
        before, life = first, first.later
        while life is not None:
            config = life.config
            assert len(life.ms_per_step) == config.world_size
            assert (config.batches, config.global_batch, life.lengths) == (
                before.config.batches,
                before.config.global_batch,
                before.lengths,
            )
            assert (life.batch_size, life.last_batch) == (before.batch_size, before.last_batch)
            assert (config.epochs or 0) >= (before.config.epochs or 0)
            assert (config.policy == "exact") == (before.config.policy == "exact")
            if config.groups is not None:
                assert len(config.groups) == config.world_size
                assert config.max_steps is None or len(set(config.groups)) == 1
            before, life = life, life.later


# ---------------------------------------------------------------- several machines
def machine_kinds(scenario: Scenario) -> list[str]:
    """What is special about the machines of a scenario."""
    config, loss = scenario.config, scenario.loss
    special = {
        f"policy {config.policy}": True,
        f"{len(config.machines)} machines": True,
        "inner rounds": config.inner_rounds > 1,
        "every round of all": config.inner_rounds == 1 and config.policy == "cadence",
        "overlap": config.overlaps,
        "one rank on a machine": 1 in config.machines,
        "bad": scenario.bad_steps,
        "bad and late": scenario.late_verdicts,
        f"lost at {loss and loss.where}": True,
        "a slow link": scenario.way_ms > 5.0 * min(scenario.ms_per_step),
    }
    return [kind for kind, there in special.items() if there]


def test_every_kind_of_machines_comes_up() -> None:
    firsts = [draw(seed) for seed in range(4000) if seed % 17 in (10, 14)]
    drawn = [scenario for scenario in firsts if scenario.links is not None]
    seen = Counter(kind for scenario in drawn for kind in machine_kinds(scenario))
    wanted = [f"policy {name}" for name in ("sync", "cadence", "exact")]
    wanted += [f"{n} machines" for n in (2, 3, 4)]
    wanted += [f"lost at {at}" for at in (None, "time", "step", "gate", "arrivals", "outcome", "task")]
    wanted += ["inner rounds", "every round of all", "overlap", "one rank on a machine", "a slow link"]
    wanted += ["bad", "bad and late"]
    assert {kind: seen[kind] for kind in wanted if seen[kind] < 5} == {}


def test_machines_are_sound() -> None:
    lives = [draw(seed) for seed in range(2000) if seed % 17 in (10, 14) and seed % 68 != 14]
    lives += [life.later for life in lives if life.later is not None]
    for scenario in lives:
        config, links = scenario.config, scenario.links
        assert config.on_failure == "raise"
        assert (links is None) == (config.machines == ()) == (config.world_size == 1)
        if links is not None:
            assert sum(config.machines) == config.world_size
            assert min(config.machines) >= 1
            assert len(links.latency_ms) == len(config.machines) >= 2
            assert config.policy != "async"
            assert config.global_batch is None or not config.global_batch.may_be_alone
            assert scenario.loss is None or 0 < scenario.loss.machine < len(config.machines)
