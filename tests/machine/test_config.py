"""Tests of the coordinator's record of a run's settings."""

from __future__ import annotations

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.event_log import decode, encode
from flowdp.options import CadenceOptions


def test_it_survives_a_log() -> None:
    config = CoordinatorConfig(
        world_size=2, batches=None, epochs=3, cadence=CadenceOptions(anchor=4), groups=(2, 1)
    )
    assert decode(encode(config)) == config
