"""Metrics that keep a state from batch to batch (torchmetrics), in an evaluation by several ranks.

The mean of F1 scores over batches is not the F1 score of all samples. So each rank updates a metric of its
own, and at the end the states are merged by the reductions that the metric itself declares for a distributed
run; those of several machines meet on machine 0. Metrics are recognised by their interface: torchmetrics need
not be installed.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.errors import OptionError
from flowdp.policy.tally import MetricArray

__all__ = [
    "MetricPool",
    "Parts",
    "RankMetrics",
    "States",
    "check_metrics",
    "is_metric",
    "metric_values",
    "named_metrics",
    "rank_metrics",
    "reset",
    "takes_metrics",
]

TWO_WAYS = (
    "either a criterion as loss (loss=torch.nn.CrossEntropyLoss()), with which each metric is updated by "
    "metric.update(model(x), y) on the forward of the loss; or evaluation=EvaluationOptions(dataset, step=f) "
    "with a function f(model, batch, metrics) that updates them by name: metrics['f1'].update(output, y)"
)

States = list[tuple[int, dict[str, Any]]]
"""Updates and states (on the CPU, by name) of a metric and of each metric inside it."""

Parts = dict[str, tuple[Any, States]]
"""A rank's metrics by their names, with their states; None for one of another machine."""


# ---------------------------------------------------------------- the metrics of a Trainer
def is_metric(value: object) -> bool:
    """Whether this is a metric with a state and declared reductions."""
    return isinstance(value, nn.Module) and isinstance(getattr(value, "_reductions", None), Mapping)


def reset(metric: Any) -> None:
    """Reset a metric and each one inside it: `Metric.reset` leaves those alone."""
    metric.reset()
    for part in metric.modules():
        if part is not metric and is_metric(part):
            part.reset()


def takes_metrics(step: Callable[..., Any]) -> bool:
    """Whether a step has a third parameter named `metrics`."""
    try:
        return "metrics" in list(inspect.signature(step).parameters)[2:]
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def check_metrics(metrics: object, *, evaluates: bool, step: object, loss: object) -> None:
    """Check the metrics of a Trainer, and that something updates them.

    Args:
        metrics: As given; None: none.
        evaluates: The Trainer has an evaluation.
        step: The evaluation's step; None without one.
        loss: The Trainer's.

    Raises:
        OptionError: They are no metrics by their names, or nothing updates them.
    """
    if metrics is None:
        return
    named = named_metrics(metrics)
    is_named = isinstance(named, Mapping) and all(isinstance(name, str) for name in named)
    if not isinstance(named, Mapping) or not named or not is_named or not all(map(is_metric, named.values())):
        raise OptionError(
            "metrics must be a mapping of torchmetrics objects by name, {'f1': MulticlassF1Score(10)}, "
            f"or a MetricCollection, not {metrics!r:.80}"
        )
    if not evaluates:
        raise OptionError("metrics are updated in the evaluation: give evaluation=dataset, too")
    takes = callable(step) and takes_metrics(step)
    if not takes and (step is not None or not isinstance(loss, nn.Module)):
        raise OptionError(f"metrics: nothing says what they are updated with. Give {TWO_WAYS}")


def rank_metrics(metrics: object, world_size: int) -> list[Mapping[str, Any]]:
    """Copies of the metrics for each rank, by their names, without an update; none where there are none."""
    if metrics is None:
        return []
    copies: list[Mapping[str, Any]] = []
    for _ in range(world_size):
        named = named_metrics(copy.deepcopy(metrics))  # together: some share a network
        assert isinstance(named, Mapping)
        for metric in named.values():
            reset(metric)
        copies.append(dict(named))
    return copies


def named_metrics(result: object) -> object:
    """A collection of metrics as a mapping of its metrics by their names; anything else as it is."""
    if isinstance(result, nn.ModuleDict) and callable(getattr(result, "compute", None)):
        return dict(result.items(copy_state=False))  # type: ignore[call-arg]
    return result


# ---------------------------------------------------------------- the ranks' metrics
@dataclass(frozen=True, slots=True)
class RankMetrics:
    """Metrics of one rank of another machine behind an evaluation.

    Attributes:
        evaluation: Index of the evaluation.
        rank: Rank index.
        states: States by the names of the metrics, pickled.
    """

    evaluation: int
    rank: int
    states: bytes


class MetricPool:
    """Pool of the metrics that the ranks of all machines have updated in an evaluation.

    Args:
        send: Sends the metrics of a machine that follows to machine 0, in front of all that it sends later;
            does not block. None on machine 0.

    Threads:
        The workers of the ranks, all of them at once, and those of the links to other machines.
    """

    def __init__(self, send: Callable[[RankMetrics], None] | None = None) -> None:
        self._send = send
        self._lock = threading.Lock()  # guards what follows
        self._ranks: dict[int, dict[int, Parts]] = {}  # by evaluation and rank

    def put(self, evaluation: int, rank: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a rank that has no batch left, by their names.

        Streams:
            The host waits for the states.
        """
        parts: Parts = {name: (metric, _states(metric)) for name, metric in metrics.items()}
        if self._send is None:
            self._keep(evaluation, rank, parts)
        else:
            states = {name: states for name, (_, states) in parts.items()}
            self._send(RankMetrics(evaluation, rank, pickle.dumps(states, pickle.HIGHEST_PROTOCOL)))

    def take(self, metrics: RankMetrics) -> None:
        """Take the metrics of a rank of another machine."""
        parts = {name: (None, states) for name, states in pickle.loads(metrics.states).items()}
        self._keep(metrics.evaluation, metrics.rank, parts)

    def merged(self, evaluation: int) -> dict[str, tuple[Any, list[States]]]:
        """A metric of each name with the states of all ranks, in their order; the pool forgets them.

        Raises:
            TypeError: Two ranks have updated one metric: it would be two threads at once. Or another machine
                has a metric that machine 0 has not updated.
        """
        with self._lock:
            ranks = sorted(self._ranks.pop(evaluation, {}).items())
        together: dict[str, tuple[Any, list[States]]] = {}
        seen: set[int] = set()
        for _, parts in ranks:
            for name, (metric, states) in parts.items():
                if id(metric) in seen:
                    raise TypeError(
                        f"{name!r} is one {type(metric).__name__} for several ranks, which update it at the "
                        "same time: make it a part of the model (self.f1 = ...), each rank having its own, "
                        "or give Trainer(metrics={...})"
                    )
                first, before = together.get(name, (metric, []))
                together[name] = first, [*before, states]
            seen |= {id(metric) for metric, _ in parts.values() if metric is not None}
        missing = [name for name, (metric, _) in together.items() if metric is None]
        if missing or self._send is not None:
            raise TypeError(
                f"metrics of the evaluation ({', '.join(missing)}) were updated on another machine "
                "and not on machine 0, which computes the values: return the same metrics for every batch"
            )
        return together

    def _keep(self, evaluation: int, rank: int, parts: Parts) -> None:
        with self._lock:
            # One that was cut short is never merged.
            self._ranks = {number: of for number, of in self._ranks.items() if number >= evaluation}
            self._ranks.setdefault(evaluation, {})[rank] = parts


# ---------------------------------------------------------------- the values
def metric_values(
    merged: Mapping[str, tuple[Any, Sequence[States]]],
) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, MetricArray], ...]]:
    """Values of metrics over all batches: numbers and arrays, by their names; the metrics are reset.

    Raises:
        TypeError: One was never updated, or has a value that is neither.

    Streams:
        The host waits for the values.
    """
    named: list[tuple[str, float | MetricArray]] = []
    for name, (metric, ranks) in merged.items():
        try:
            _fill(metric, ranks)
            if not any(part._update_count for part in _inner(metric)):
                raise TypeError(
                    f"{name!r} was updated for no batch: call its update(...) in the evaluation's step"
                )
            named += _flattened(name, metric.compute())
        finally:
            reset(metric)
    numbers = tuple((name, value) for name, value in named if isinstance(value, float))
    return numbers, tuple((name, value) for name, value in named if isinstance(value, MetricArray))


def _flattened(name: str, value: object) -> Iterator[tuple[str, float | MetricArray]]:
    """Numbers and arrays in a metric's value, by name: `map/map_50` in a mapping, `roc/0` in a tuple."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flattened(f"{name}/{key}", part)
    elif isinstance(value, tuple | list):
        for place, part in enumerate(value):
            yield from _flattened(f"{name}/{place}", part)
    elif isinstance(value, Tensor) and not value.is_complex():
        numbers = value.detach().to("cpu", torch.float64)
        if numbers.numel() == 1:
            yield name, numbers.item()
        else:
            yield name, MetricArray(tuple(numbers.shape), tuple(numbers.flatten().tolist()))
    elif isinstance(value, bool | int | float):
        yield name, float(value)
    else:
        raise TypeError(f"{name!r} must be numbers, what its compute() returns, not {value!r:.80}")


def _inner(metric: nn.Module) -> list[Any]:
    # One that is composed of others has no state, and counts updates that it never forgets. So does one that
    # shows the states of the metric inside it as its own.
    parts = [part for part in metric.modules() if is_metric(part) and part._reductions]
    return list({id(part._reductions): part for part in parts}.values())


def _states(metric: Any) -> States:
    return [
        (part._update_count, {name: _on_host(getattr(part, name)) for name in part._reductions})
        for part in _inner(metric)
    ]


def _on_host(state: Any) -> Any:
    # A list is the metric's own, and is emptied when the metric is reset.
    return [value.cpu() for value in state] if isinstance(state, list) else state.cpu()


def _fill(metric: Any, ranks: Sequence[States]) -> None:
    """Give a metric the states of all ranks together."""
    for part, of_ranks in zip(_inner(metric), zip(*ranks, strict=True), strict=True):
        updated = [(count, states) for count, states in of_ranks if count]
        for name, reduce in part._reductions.items():
            if updated:
                merged = _merged([(count, states[name]) for count, states in updated], reduce)
                setattr(part, name, _on_device(merged, part))
        part._update_count = sum(count for count, _ in updated)
        part._computed = None
    for part in filter(is_metric, metric.modules()):
        part._to_sync = False  # all states are here: nothing to ask another process for


def _merged(states: Sequence[tuple[int, Any]], reduce: Callable[[Any], Any] | None) -> Any:
    """One state of several ranks, by their updates: as torchmetrics reduces it over processes."""
    if isinstance(states[0][1], list):
        return [value for _, state in states for value in state]  # as if one rank had seen all batches
    stacked = torch.stack([state for _, state in states])
    if getattr(reduce, "__name__", "") == "dim_zero_mean":  # ranks may update it unequally often here
        counts = torch.tensor([count for count, _ in states], dtype=torch.float64)
        weights = (counts / counts.sum()).view(-1, *[1] * (stacked.dim() - 1))
        return (stacked.double() * weights).sum(0).to(stacked)
    return stacked if reduce is None else reduce(stacked)


def _on_device(state: Any, part: Any) -> Any:
    if isinstance(state, Tensor):
        return state.to(part.device)
    return state if getattr(part, "compute_on_cpu", False) else [value.to(part.device) for value in state]
