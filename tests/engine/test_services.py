"""What an engine is given beside what it trains."""

from __future__ import annotations

from flowdp.engine.services import Care


def test_an_engine_does_without_any_of_it() -> None:
    care = Care()
    assert care.store is care.evaluator is care.stall_timeout_s is care.sigterm is None
    assert not care.has_listeners
    assert care.on_nan == "quarantine"


def test_no_two_runs_share_a_fingerprint() -> None:
    assert Care().fingerprint is not Care().fingerprint
