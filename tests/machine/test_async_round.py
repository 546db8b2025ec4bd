"""Tests of the state of an asynchronous round."""

from __future__ import annotations

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.async_round import AsyncRound, Meeting
from flowdp.protocol.messages import Outcome, SnapshotReady, SyncAck, Work


def test_who_is_missing_and_what_they_weigh() -> None:
    round_ = AsyncRound(4, 100.0)
    round_.snapshots[2] = SnapshotReady(2, 4, 3, 24)
    assert round_.missing(3) == (0, 1)
    round_.snapshots.update({0: SnapshotReady(0, 4, 1, 8), 1: SnapshotReady(1, 4, 0, 0)})
    assert round_.missing(3) == ()
    assert round_.samples(3) == (8, 0, 24)


def test_all_are_told_the_same() -> None:
    told = Outcome(5, 10, (0, 1), (1, 1), (8, 8))
    meeting = Meeting(5, is_hurried=False)
    meeting.acks[1] = SyncAck(1, told, Work(0, 1, 8))
    meeting.acks[0] = SyncAck(0, told, Work(0, 1, 8))
    assert meeting.outcome() is told
    meeting.acks[0] = SyncAck(0, Outcome(5, 11, (0, 1), (2, 1), (16, 8)), Work(0, 1, 8))
    with pytest.raises(ProtocolError, match="rank 0 left round 5 with another outcome"):
        meeting.outcome()
