"""Tests of the place where the metrics of several machines meet."""

from __future__ import annotations

import pickle

import pytest
import torch

from flowdp.engine.machine_metrics import MachineMetrics, MetricsMeeting
from flowdp.engine.metrics import Parts, States


def states(count: int, value: float) -> States:
    return [(count, {"total": torch.tensor(value), "all": [torch.tensor([value])]})]


class Place:
    """The meeting of machine 0, and those of two others, with links as quick as a call."""

    def __init__(self) -> None:
        self.first = MetricsMeeting(0)
        self.others = [MetricsMeeting(1), MetricsMeeting(2)]
        for machine, meeting in enumerate(self.others, 1):
            meeting.send = lambda metrics, machine=machine: self.first.take(  # type: ignore[misc]
                machine, pickle.loads(pickle.dumps(metrics))
            )


def parts(metric: object, *values: float, name: str = "f1") -> Parts:
    return {name: (metric, [states(1, value) for value in values])}


def totals(found: Parts) -> dict[str, list[float]]:
    return {name: [of[0][1]["total"].item() for of in ranks] for name, (_, ranks) in found.items()}


def test_the_states_of_all_machines_come_in_their_order_to_the_metrics_of_the_first() -> None:
    place, metric = Place(), object()
    place.others[1].bring(0, 7, ["loss"], parts(object(), 5.0))
    place.first.bring(0, 6, ["score"], parts(metric, 1.0, 2.0))
    place.others[0].bring(0, 6, [], parts(object(), 3.0, 4.0))
    end, means, found = place.first.end(0)
    assert (end, means) == (7, {"loss", "score"})
    assert totals(found) == {"f1": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert found["f1"][0] is metric
    with pytest.raises(TypeError, match="not on machine 0"):
        place.first.end(0)  # the meeting is over


def test_machines_without_batches_bring_nothing() -> None:
    place = Place()
    place.first.bring(0, 1, [], parts(object(), 1.0))
    assert totals(place.first.end(0)[2]) == {"f1": [1.0]}


def test_an_evaluation_that_was_cut_short_leaves_nothing_for_the_next() -> None:
    place = Place()
    place.others[0].bring(0, 4, ["old"], parts(object(), 9.0))
    for meeting, value in ((place.others[0], 2.0), (place.first, 1.0)):
        meeting.bring(1, 4, [], parts(object(), value))
    end, means, found = place.first.end(1)
    assert (end, means, totals(found)) == (4, set(), {"f1": [1.0, 2.0]})
    assert not place.first._others


def test_a_metric_that_machine_0_lacks_is_an_error() -> None:
    place = Place()
    place.first.bring(0, 2, [], parts(object(), 1.0))
    place.others[0].bring(0, 2, [], parts(object(), 1.0) | parts(object(), 1.0, name="auroc"))
    with pytest.raises(TypeError, match="the metric 'auroc' was updated on another machine and not on"):
        place.first.end(0)


def test_a_machine_that_is_asked_for_the_values_as_machine_0_has_none_says_so() -> None:
    place = Place()
    place.others[0].bring(0, 2, [], parts(object(), 1.0))
    with pytest.raises(TypeError, match="metrics of the evaluation were updated on another machine and not"):
        place.others[0].end(0)


def test_no_tensor_travels_in_the_message_itself() -> None:
    sent: list[MachineMetrics] = []
    meeting = MetricsMeeting(1)
    meeting.send = sent.append
    meeting.bring(3, 2, ["loss"], parts(object(), 1.0))
    [metrics] = sent
    assert (metrics.evaluation, metrics.end, metrics.means) == (3, 2, frozenset(["loss"]))
    assert isinstance(metrics.states, bytes)
