"""Tests of the matrix of failures: a sample passes, and the bench finds wrong outcomes."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from bench.reliability import faults, trial
from bench.reliability.failures import main, matrix
from bench.reliability.faults import ALL, BACKENDS, POLICIES, WHENS, Case, all_cases
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.nan_guard import NanGuard

FOUND_FAULTS = {
    # While a reader was held, ranks without data met again and again, which counted as progress.
    "stall-getitem-cadence-3-cpu-middle-any",
    # A callback's error after the end of the run was logged twice and never raised.
    "error-callback-sync-3-cpu-last-any-ends",
    # A callback that did not return delayed an error by more than 2 s.
    "error-forward-cadence-4-local-last-any-held",
    # With "exact" the optimizer's first step, at the gate, was counted as a later one.
    "stall-step-exact-2-local-first-1",
}


def sample() -> list[Case]:
    """Some cases of every fault at every site, and those that once found a bug."""
    groups: dict[Any, list[Case]] = defaultdict(list)
    for case in all_cases():
        groups[case.fault, case.site, case.asked, case.rank == ALL].append(case)
    draw = random.Random(1)
    cases = [case for group in groups.values() for case in draw.sample(group, 1 if group[0].waits else 3)]
    return cases + [case for case in all_cases() if case.name in FOUND_FAULTS]


def test_there_are_enough_cases_and_each_has_a_name() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) > 4000


def test_a_sample_of_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WITHIN_S", 10.0)  # others use the cores, too
    for module in (faults, trial):
        monkeypatch.setattr(module, "STALL_TIMEOUT_S", 1.0)
    cases = sample()
    assert {(case.policy, case.devices) for case in cases} == {(p, n) for p in POLICIES for n in range(1, 5)}
    assert {(case.backend, case.when) for case in cases} == {(b, when) for b in BACKENDS for when in WHENS}
    report = matrix(cases)
    assert report.failures == []
    assert report.cases.total() == len(cases) > 100


# ---------------------------------------------------------------- wrong outcomes are found
def wrong_with(case: Case) -> str:
    [(failed, wrong)] = matrix([case]).failures
    assert failed is case
    return wrong


def test_an_error_without_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ErrorContext, "explain", lambda place, cause, task="": RuntimeError(str(cause)))
    wrong = wrong_with(Case("error", "forward", "sync", 2, "local", "middle", 1))
    assert "not StepError" in wrong
    assert "the cause is None" in wrong


def test_numbers_gone_bad_that_nobody_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NanGuard, "judge", lambda numbers: None)
    monkeypatch.setattr(NanGuard, "mark_bad", lambda numbers, step, what: None)
    wrong = wrong_with(Case("nan", "forward", "sync", 2, "local", "middle", 0, "quarantine"))
    assert "the final state is not finite" in wrong


def test_a_run_that_waits_where_it_should_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "HANG_S", 0.2)
    monkeypatch.setattr(trial, "expected", lambda case: "continues")
    wrong = wrong_with(Case("stall", "backward", "exact", 2, "cpu", "middle", 1))
    assert "join() raised TimeoutError" in wrong


def test_the_table_and_how_to_try_one_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "error-factory-sync-2-local-last-any"
    assert main(["--case", name]) == 0
    assert "1 of 1 cases" in capsys.readouterr().out
    monkeypatch.setattr(trial, "expected", lambda case: "continues")
    assert main(["--case", name]) == 1
    assert f"--case {name}" in capsys.readouterr().out
