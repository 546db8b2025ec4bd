"""flodl's vectors for decisions, run through `flowdp.policy`.

A check returns flowdp's values under the names in the vector. All must agree, except the values that
`differences.md` lists with a reason; those must really differ, or be missing.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from flowdp.errors import OptionError
from flowdp.options import CadenceOptions
from flowdp.policy.drift import DivergenceGuard, GuardAction, Overshoot, largest_drift, lead_limits
from flowdp.policy.el_che import ElChe
from flowdp.policy.formats import format_duration, format_metric
from flowdp.policy.schedule import lr_factor, position
from flowdp.policy.shares import (
    ThroughputBalance,
    hinted_weights,
    part_sizes,
)
from flowdp.policy.tally import Tally, Work
from tests.vectors.book import ALL, Answers, Book, Vector

AREAS = {
    "chunk_ratio_rebalance",
    "config",
    "convergence_guard",
    "el_che",
    "format_eta",
    "format_metric",
    "lr_schedule",
    "metrics_aggregation",
    "overshoot_autotune",
    "partition_sizes",
    "shard_sizes",
    "throttle",
}
# Remarks inside an expectation, and intermediate values that no caller can see.
REMARKS = {"note", "test_asserts", "tol", "alpha_used_rank1", "min_anchor", "auto"}

BOOK = Book(AREAS, "differences.md")
VECTORS, CHECKS, DIFFERENCES, answers = BOOK.vectors, BOOK.checks, BOOK.differences, BOOK.answers


def agree(answer: object, expected: object, tol: float) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(answer, dict)
            and answer.keys() == expected.keys()
            and all(agree(answer[key], expected[key], tol) for key in expected)
        )
    if isinstance(expected, list):
        return (
            isinstance(answer, list | tuple)
            and len(answer) == len(expected)
            and all(agree(a, e, tol) for a, e in zip(answer, expected, strict=True))
        )
    if isinstance(expected, float) and isinstance(answer, int | float):
        return math.isclose(answer, expected, rel_tol=tol, abs_tol=1e-12)
    return bool(answer == expected) and type(answer) is type(expected)


# ---------------------------------------------------------------- El Che
def cadence(setup: Vector) -> ElChe:
    hint = setup.get("speed_ratio")
    options: dict[str, Any] = {key: setup[key] for key in ("overhead_target", "max_anchor") if key in setup}
    return ElChe(setup["world_size"], setup["anchor"], speed_hint=tuple(hint) if hint else None, **options)


def state(che: ElChe) -> Answers:
    return {
        "batch_counts": che.batch_counts,
        "total": che.total_batches,
        "anchor": che.anchor,
        "calibrated": che.is_calibrated,
        "ms_per_batch": che.ms_per_batch,
        "anchor_wall_ms": che.anchor_wall_ms,
    }


def asked(vector: Vector, given: Answers) -> Answers:
    return {key: value for key, value in given.items() if key in vector["expected"]}


def report(che: ElChe, times: Vector) -> ElChe:
    che.report_timing(times["wall_ms"], times["actual_batches"], times["sync_ms"])
    return che


@answers("EC-001", "EC-003", "EC-005", "EC-007", "EC-009", "EC-027", "EC-033", "EC-035", "EC-039", "EC-041")
def _el_che(vector: Vector) -> Answers:
    che = cadence(vector["setup"])
    for times in (vector["setup"].get("calibrate"), vector["input"]):
        if times and "wall_ms" in times:
            report(che, times)
    return asked(vector, state(che))


@answers("EC-011")
def _clamped(vector: Vector) -> Answers:
    che = report(cadence(vector["setup"]), {"wall_ms": [500, 1000], "actual_batches": [10, 10], "sync_ms": 0})
    assert che.batch_counts == (20, 10)
    clamped = che.clamp_total(vector["input"]["max_total"])
    return {"clamped": clamped, "sum": sum(clamped)}


@answers("EC-013")
def _with_target_and_cap(vector: Vector) -> Answers:
    che = cadence({**vector["setup"], "overhead_target": 0.20, "max_anchor": 100})
    assert (che.overhead_target, che.max_anchor) == (0.20, 100)
    return asked(vector, state(che))


@answers("EC-015")
def _with_difference(vector: Vector) -> Answers:
    setup = vector["setup"]
    che = ElChe(setup["world_size"], setup["anchor"], max_batch_diff=5)
    return {"max_batch_diff": che.max_batch_diff, "default_without_call": cadence(setup).max_batch_diff}


@answers("EC-017")
def _bounded_update(vector: Vector) -> Answers:
    setup = vector["setup"]
    che = ElChe(setup["world_size"], setup["anchor"], max_batch_diff=setup["max_batch_diff"])
    report(che, {"wall_ms": [100, 20], "actual_batches": [10, 10], "sync_ms": 0})
    assert (che.ms_per_batch, che.batch_counts) == ((10.0, 2.0), (10, 50))
    return asked(vector, state(report(che, vector["input"])))


@answers("EC-019")
def _refused(vector: Vector) -> Answers:
    with pytest.raises(OptionError, match="anchor must be at least 1"):
        cadence(vector["setup"])
    return {"error": "anchor must be >= 1"}


@answers("EC-021", "EC-023", "EC-025")
def _hinted(vector: Vector) -> Answers:
    hint = [vector["input"]["slow_rank"], vector["input"]["ratio"]]
    return asked(vector, state(cadence({**vector["setup"], "speed_ratio": hint})))


@answers("EC-029")
def _nudged(vector: Vector) -> Answers:
    che = ElChe(2, 20)
    report(che, {"wall_ms": [200, 400], "actual_batches": [20, 20], "sync_ms": 0})
    assert che.batch_counts == (40, 20)
    che.nudge_anchor_down(vector["input"]["factor"])
    return asked(vector, state(che))


@answers("EC-031")
def _nudged_up(vector: Vector) -> Answers:
    che = cadence(vector["setup"])
    che.nudge_anchor_down(vector["input"]["factor"])
    return asked(vector, state(che))


@answers("EC-037")
def _jitter(vector: Vector) -> Answers:
    che = cadence(vector["setup"])
    report(che, {"wall_ms": [100, 200], "actual_batches": [10, 10], "sync_ms": 0})
    return asked(vector, state(report(che, vector["input"])))


# ---------------------------------------------------------------- options
@answers("CF-001")
def _default_options(vector: Vector) -> Answers:
    options = CadenceOptions()
    return {key: getattr(options, key) for key in vector["expected"] if hasattr(options, key)}


@answers("CF-003", "CF-005")
def _configured(vector: Vector) -> Answers:
    off = "max_anchor=Some(0)" in vector["input"]["op"]
    options = CadenceOptions(max_anchor=0) if off else CadenceOptions()
    if not options.windows:
        return {"el_che": None}
    with pytest.raises(OptionError, match="at least 2 devices"):
        ElChe(vector["setup"]["devices"], options.anchor)
    return {"el_che": None}


@answers("CF-007")
def _given_options(vector: Vector) -> Answers:
    options = CadenceOptions(overhead_target=0.05, max_anchor=100, anchor=20, divergence_threshold=0.01)
    return {key: getattr(options, key) for key in vector["expected"]}


# ---------------------------------------------------------------- shares
@answers("SH-001", "SH-003", "SH-005")
def _shards(vector: Vector) -> Answers:
    return {"sizes": part_sizes(vector["input"]["batch_size"], vector["setup"]["chunk_ratios"])}


def rebalanced(throughput: list[int], ratios: list[float]) -> ThroughputBalance:
    """Ten steps at this throughput; 0 is a rank that is never measured."""
    balance = ThroughputBalance(ratios)
    for _ in range(10):
        balance.update(throughput, [1.0] * len(throughput))
    assert balance.throughput == pytest.approx(throughput)
    return balance


@answers("SH-007")
def _shards_after_rebalance(vector: Vector) -> Answers:
    balance = rebalanced(vector["setup"]["ema_throughput"], [0.5, 0.5])
    return {"sizes": part_sizes(vector["input"]["batch_size"], balance.ratios)}


@answers("RB-002", "RB-004")
def _rebalanced(vector: Vector) -> Answers:
    return {"ratios": rebalanced(vector["input"]["ema_throughput"], vector["setup"]["old"]).ratios}


@answers("RB-006")
def _rebalance_interval(vector: Vector) -> Answers:
    balance = rebalanced([2, 1], [0.5, 0.5])
    after = [balance.update([2, 1], [1.0, 1.0]) for _ in range(50)]
    assert sum(after) == 1
    return {"rebalanced_at_step": 10 + after.index(True) + 1}


@answers("RB-008")
def _first_throughput(vector: Vector) -> Answers:
    balance = ThroughputBalance([0.5, 0.5])
    balance.update([vector["input"]["first_measurement_rank0"], 0], [1.0, 1.0])
    return {"ema_rank0": balance.throughput[0]}


@answers("RB-010")
def _balanced(vector: Vector) -> Answers:
    ratios = ThroughputBalance(vector["input"]["chunk_ratios"]).ratios
    return {"is_balanced": max(ratios) - min(ratios) < 1e-6}


@answers("PS-002", "PS-006")
def _equal(vector: Vector) -> Answers:
    return {"sizes": part_sizes(vector["setup"]["total"], [1.0] * vector["setup"]["world_size"])}


@answers("PS-004", "PS-008")
def _by_speed(vector: Vector) -> Answers:
    che = ElChe(vector["setup"]["world_size"])
    if "calibrate" in vector["input"]:
        report(che, vector["input"]["calibrate"])
    speeds = [1.0 / ms if ms else 1.0 for ms in che.ms_per_batch]
    return {"sizes": part_sizes(vector["setup"]["total"], speeds)}


@answers("PS-010")
def _by_hint(vector: Vector) -> Answers:
    hint = (1, 2.3)
    che = ElChe(2, speed_hint=hint)
    assert (che.batch_counts, che.ms_per_batch) == ((23, 10), (0.0, 0.0))
    sizes = part_sizes(vector["setup"]["total"], hinted_weights(2, hint))
    assert sizes == (697, 303)
    return {"sizes": sizes}


# ---------------------------------------------------------------- drift, lead
FLODL_ACTIONS = {
    GuardAction.STABLE: "Stable",
    GuardAction.HOLD: "SuppressGrowth",
    GuardAction.TIGHTEN: "NudgeDown",
}


@answers("CG-001")
def _drifts(vector: Vector) -> Answers:
    return {"max_relative_delta": largest_drift(vector["input"]["deltas"])}


@answers("CG-007", "CG-009", "CG-011")
def _guarded(vector: Vector) -> Answers:
    guard = DivergenceGuard(vector["setup"]["threshold"])
    actions = [FLODL_ACTIONS[guard.report((d,)).action] for d in vector["input"]["max_deltas"]]
    return asked(vector, {"actions": actions, "last_action": actions[-1], "history_len": len(guard.history)})


@answers("CG-013")
def _bounded_history(vector: Vector) -> Answers:
    guard = DivergenceGuard()
    for interval in range(vector["input"]["intervals"]):
        guard.report((0.01 * interval, 0.0))
    return {"history_len": "<= 5" if len(guard.history) <= 5 else len(guard.history)}


@answers("OV-002")
def _overshoot_grows(vector: Vector) -> Answers:
    setup, guard = vector["setup"], DivergenceGuard()
    overshoot = Overshoot(setup["total_samples"] // setup["batch_size"])
    assert overshoot.value == setup["initial"]
    for delta in vector["input"]["max_deltas"]:
        overshoot.averaged(guard.report((delta, delta)).action)
    return {"max_overshoot": overshoot.value}


@answers("OV-004")
def _overshoot_capped(_: Vector) -> Answers:
    overshoot = Overshoot(200)
    for _ in range(20):
        overshoot.averaged(GuardAction.STABLE)
    assert overshoot.value == 4
    return {"max_overshoot": overshoot.value}


@answers("OV-006")
def _overshoot_of_the_user(vector: Vector) -> Answers:
    overshoot = Overshoot(1000, vector["setup"]["user_max_overshoot"])
    overshoot.averaged(GuardAction.STABLE)
    return {"max_overshoot": overshoot.value}


@answers("OV-008")
def _overshoot_at_first(vector: Vector) -> Answers:
    return {"initial": [Overshoot(batches).value for batches in vector["input"]["total_batches"]]}


@answers("OV-010")
def _rising_drift(vector: Vector) -> Answers:
    che, guard = ElChe(2), DivergenceGuard()
    times = vector["setup"]["calibrate"]
    che.report_timing(times["wall_ms"], times["batches"], times["sync_ms"])
    for delta in vector["input"]["five_rising_divergences"]:
        if guard.report((delta, delta)).action is GuardAction.TIGHTEN:
            che.nudge_anchor_down(0.5)
    assert che.anchor == 2
    return {"anchor_after": f">= anchor_before ({che.anchor})" if che.anchor >= 10 else che.anchor}


@answers("TH-001", "TH-003", "TH-005")
def _throttled(vector: Vector) -> Answers:
    steps, limit = vector["input"]["steps"], vector["setup"]["max_batch_diff"]
    if limit is None:  # without a limit, room is not asked for
        return {"throttle_sent": [False] * len(steps)}
    limits = lead_limits(steps, [True] * len(steps), limit)
    pairs = zip(steps, limits, strict=True)
    return {"throttle_sent": [most is not None and taken >= most for taken, most in pairs]}


# ---------------------------------------------------------------- learning rate
@answers("LR-002")
def _scaled(_: Vector) -> Answers:
    return {"optimizer_lr": 0.05 * lr_factor(1.0, 2)}


@answers("LR-004")
def _same_curve(vector: Vector) -> Answers:
    """One device alone, then two in rounds of 2 + 2 steps: the milestones are at the same positions."""

    def lr(step: int) -> float:
        return 0.1 * 0.1 ** sum(milestone <= step for milestone in (4, 8))

    count = vector["input"]["steps"]
    lrs = [lr(position(0, i, count, count)) for i in range(count)]
    for start in range(0, count, 4):
        for i in range(2):
            assert lr(position(start, i, 4, 2)) == lrs[start + 2 * i]
    return {"lrs": lrs, "transitions": sum(a != b for a, b in pairwise(lrs))}


@answers("LR-006", "LR-008")
def _counted(vector: Vector) -> Answers:
    """In a user's loop all devices take one step together."""
    after = [position(step, 0, 1, 1) + 1 for step in range(vector["input"]["steps"])]
    counts = {"training_step_after_each": after, "training_step": after[-1]}
    return asked(vector, counts)


# ---------------------------------------------------------------- metrics
def messages(with_accuracy: bool = True) -> Tally:
    tally = Tally(0, 2)
    for message in ALL["MG-001"]["input"]["msgs"]:
        scalars = {
            name: tuple(pair) for name, pair in message["scalars"].items() if name == "loss" or with_accuracy
        }
        samples = message["samples"]
        tally.add(
            message["rank"],
            Work(
                0,
                message["batches"],
                samples,
                message["ms"],
                losses=(message["loss"] * samples, samples),
                scalars=scalars,
            ),
        )
    return tally


@answers("MG-001")
def _aggregated(vector: Vector) -> Answers:
    metrics = messages().result(1200.0, anchor=10, global_step=100, epochs=1)
    return {
        "avg_loss": metrics.loss,
        "epoch_ms": metrics.epoch_ms,
        "scalars": metrics.scalars,
        "per_rank_loss": [rank.scalars["loss"] for rank in metrics.per_rank],
        "throughput_samples_per_ms": [rate / 1000.0 for rate in metrics.throughput],
        "batch_share": metrics.share,
    }


@answers("MG-003")
def _epoch_loss(_: Vector) -> Answers:
    return {"avg_loss": messages(with_accuracy=False).result(1200.0, 10, 100, 2).loss}


@answers("MG-005")
def _one_device(vector: Vector) -> Answers:
    tally = Tally(0, 1)
    for _ in range(vector["setup"]["dataset"] // vector["setup"]["batch"]):
        tally.add(0, Work(0, 1, vector["setup"]["batch"]))
    return {"batch_share": tally.result(1.0, 1, 4, 3).share}


@answers("FM-001", "FM-003", "FM-005")
def _duration(vector: Vector) -> Answers:
    return {"text": format_duration(1000.0 * vector["input"]["secs"])}


@answers("FM-011", "FM-013")
def _metric(vector: Vector) -> Answers:
    return {"text": format_metric(vector["input"]["value"])}


# ---------------------------------------------------------------- rules of this file
def test_every_vector_is_run_or_listed_with_a_reason():
    silent = [
        name
        for name, vector in VECTORS.items()
        if name not in CHECKS and any((name, key) not in DIFFERENCES for key in vector["expected"])
    ]
    assert silent == []
    assert CHECKS.keys() <= VECTORS.keys()


def test_every_difference_names_a_value_of_a_vector_and_a_reason():
    for row in BOOK.rows:
        assert len(row) == 4, row
        assert all(row), row
        assert row[1] in ALL[row[0]]["expected"], row
    assert len(BOOK.rows) == len(DIFFERENCES)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_vector(name):
    vector = VECTORS[name]
    expected = {key: value for key, value in vector["expected"].items() if key not in REMARKS}
    given = CHECKS[name](vector)
    assert given.keys() <= expected.keys()
    for key, value in expected.items():
        if (name, key) in DIFFERENCES:
            assert key not in given or not agree(given[key], value, 1e-9), f"{key} agrees: delete its row"
        else:
            assert agree(given[key], value, vector["expected"].get("tol", 1e-9)), (key, given[key], value)
