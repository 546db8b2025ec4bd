"""Tests of requests to the coordinator."""

from __future__ import annotations

from flowdp.engine.failures import Failures
from flowdp.engine.requests import Requests
from flowdp.errors import FlowdpError
from flowdp.observe.records import Records
from flowdp.protocol.messages import Failed, Requested


def test_requests_are_numbered_and_posted_in_order() -> None:
    requests = Requests(Records(), Failures())
    assert [requests.request(Requested(what)) for what in ("pause", "stop")] == [1, 2]
    assert [requests.inbox.get(1000) for _ in range(2)] == [Requested("pause"), Requested("stop")]


def test_an_error_from_outside_ends_the_run_and_is_its_failure() -> None:
    records, failures = Records(), Failures()
    requests = Requests(records, failures)
    error = FlowdpError("a callback has raised")
    requests.fail(error)
    assert failures.first is error
    assert isinstance(requests.inbox.get(1000), Failed)


def test_a_run_that_is_over_takes_none() -> None:
    records, failures = Records(), Failures()
    requests = Requests(records, failures)
    records.end(None, over=True)
    assert requests.request(Requested("stop")) == 0
    requests.fail(FlowdpError("late"))
    assert requests.inbox.get(0) is None
    assert failures.first is not None
