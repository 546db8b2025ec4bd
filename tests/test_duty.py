"""What is said while all ranks stand still."""

from __future__ import annotations

import dataclasses

import pytest

from flowdp import duty, messages
from flowdp.machine.story import decode, encode


def test_duties_are_orders_and_their_answers_are_facts() -> None:
    for order in (duty.Evaluate(2, 1), duty.Capture(0, 1), duty.Adopt(3)):
        assert isinstance(order, messages.Order)
        assert isinstance(order, duty.Duty)
    for fact in (duty.Evaluated(0, ()), duty.Captured(1), duty.Adopted(2)):
        assert isinstance(fact, messages.Fact)


@pytest.mark.parametrize(
    "said", [duty.Evaluate(2, 1), duty.Evaluated(1, ((0, 8.0, (("loss", float("inf")),)),)), duty.Capture(4)]
)
def test_they_stand_in_a_story_and_cannot_be_changed(said: object) -> None:
    assert decode(encode(said)) == said
    assert dataclasses.is_dataclass(said)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(said, dataclasses.fields(said)[0].name, 7)
