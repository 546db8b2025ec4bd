"""Tests of the services shared by the threads of a run."""

from __future__ import annotations

import torch

from flowdp.checkpoint.writer import Saver
from flowdp.engine.failures import Failures
from flowdp.engine.requests import Requests
from flowdp.engine.services import Services
from flowdp.network.team import Team
from flowdp.observe.records import Records
from tests.data.opening import opened


def services() -> Services:
    records, failures = Records(), Failures()
    requests = Requests(records, failures)
    return Services(
        team=Team((1,)),
        source=opened(torch.ones(4, 1), 2),
        records=records,
        failures=failures,
        requests=requests,
        saver=Saver(None, {}, None, requests.fail),
    )


def test_a_run_needs_neither_evaluation_nor_signals_nor_callbacks() -> None:
    own = services()
    assert own.sources == [own.source]
    assert own.evaluator is own.sigterm is None
    assert own.close_observer(None)
    assert own.fingerprint is not services().fingerprint
