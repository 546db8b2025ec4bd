"""Metrics that keep a state from batch to batch (torchmetrics), in an evaluation by several ranks.

The mean of F1 scores over batches is not the F1 score of all samples. So each rank updates a metric of its
own, and at the end the states are merged by the reductions that the metric itself declares for a distributed
run. They are recognised by their interface: torchmetrics need not be installed.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdp.errors import OptionError
from flowdp.policy.metric_array import MetricArray
from flowdp.replica.optimizer_rebuild import leaves, variables

__all__ = [
    "MetricPool",
    "Parts",
    "States",
    "check_metrics",
    "computed",
    "flattened",
    "is_metric",
    "named_metrics",
    "rank_metrics",
    "reset",
    "source_of",
    "takes_metrics",
    "updates",
]

TWO_WAYS = (
    "either a criterion as loss (loss=torch.nn.CrossEntropyLoss()), with which each metric is updated by "
    "metric.update(model(x), y) on the forward of the loss; or evaluation=EvaluationOptions(dataset, step=f) "
    "with a function f(model, batch, metrics) that updates them by name: metrics['f1'].update(output, y)"
)

_BOOKS = {
    "_cache",
    "_computed",
    "_enable_grad",
    "_forward_cache",
    "_is_synced",
    "_should_unsync",
    "_to_sync",
    "_update_count",
}
"""Attributes that torchmetrics keeps in every metric, beside its states."""

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module."""

LARGE = 1_000
"""Entries of a container that is not looked into."""

_OtherAttributes = dict[tuple[int, str], tuple[nn.Module, Any, Any]]
"""Attributes of a metric that are no states, by module and name: the module, the value, its seal."""

States = list[tuple[int, dict[str, Any]]]
"""Updates and states (on the CPU, by name) of a metric and of each metric inside it."""

Parts = dict[str, tuple[Any, list[States]]]
"""A metric of each name, and the states of all ranks that have updated theirs."""


def is_metric(value: object) -> bool:
    """Whether this is a metric with a state and declared reductions."""
    return isinstance(value, nn.Module) and isinstance(getattr(value, "_reductions", None), Mapping)


def updates(metric: nn.Module) -> int:
    """Updates since it was reset."""
    return max((part._update_count for part in _inner(metric)), default=0)


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
    takes = callable(step) and takes_metrics(step)
    if metrics is None:
        if takes and inspect.signature(step).parameters["metrics"].default is inspect.Parameter.empty:  # type: ignore[arg-type]
            raise OptionError(
                "evaluation.step has a parameter `metrics`, and the Trainer has none: give "
                "Trainer(metrics={'f1': ...}) torchmetrics objects by their names"
            )
        return
    named = named_metrics(metrics)
    if not isinstance(named, Mapping) or not named:
        raise OptionError(
            "metrics must be a mapping of torchmetrics objects by name, {'f1': MulticlassF1Score(10)}, "
            f"or a MetricCollection, not {metrics!r:.80}"
        )
    for name, metric in named.items():
        if not isinstance(name, str) or not is_metric(metric):
            raise OptionError(f"metrics: {name!r} must name a torchmetrics object, not {metric!r:.80}")
    if len({id(metric) for metric in named.values()}) < len(named):
        raise OptionError("metrics: one object has two names, and would be updated twice: give each its own")
    if not evaluates:
        raise OptionError("metrics are updated in the evaluation: give evaluation=dataset, too")
    if not takes and (step is not None or not isinstance(loss, nn.Module)):
        raise OptionError(f"metrics: nothing says what they are updated with. Give {TWO_WAYS}")
    if not takes and "loss" in named:
        raise OptionError("metrics: 'loss' is the name of the criterion's mean: give another name")


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


def flattened(name: str, value: object) -> Iterator[tuple[str, float | MetricArray]]:
    """Numbers and arrays in a metric's value, by name: `map/map_50` in a mapping, `roc/0` in a tuple.

    Raises:
        TypeError: It holds something else.
    """
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from flattened(f"{name}/{key}", one)
    elif isinstance(value, tuple | list):
        for place, one in enumerate(value):
            yield from flattened(f"{name}/{place}", one)
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


def named_metrics(result: object) -> object:
    """A collection of metrics as a mapping of its metrics by their names; anything else as it is."""
    if isinstance(result, nn.ModuleDict) and callable(getattr(result, "compute", None)):
        return dict(result.items(copy_state=False))  # type: ignore[call-arg]
    return result


def source_of(
    value: object, module: nn.Module, function: Callable[..., Any], given: Mapping[str, Any] | None = None
) -> object | None:
    """The metric that this number is the result of, for one batch or for the batches so far; None: of none.

    Args:
        value: Number that `function` has returned.
        module: Its first argument.
        function: The user's. Metrics are looked for where its code can name them.
        given: Metrics among its arguments.
    """
    named = chain(module.modules(), (given or {}).values(), _within(_reached(function)))
    metrics = (metric for metric in named if is_metric(metric))
    return next((metric for metric in metrics if _is_result(metric, value)), None)


def _is_result(metric: Any, value: object) -> bool:
    results = (getattr(metric, "_forward_cache", None), getattr(metric, "_computed", None))
    if isinstance(value, float):
        return any(isinstance(one, Tensor) and one.numel() == 1 and float(one) == value for one in results)
    return any(one is value for one in results if one is not None)


def _reached(function: Any) -> Iterator[object]:
    """The objects that a function's code can name: bound to it, of its closure, global."""
    for _, value in variables(function):
        yield from leaves(value)
    while isinstance(function, partial):
        function = function.func
    yield getattr(function, "__self__", function)


def _within(found: Iterable[object]) -> Iterator[object]:
    for one in found:
        if isinstance(one, nn.Module):
            yield from one.modules()
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            yield from list(vars(one).values())


@dataclass(frozen=True, slots=True)
class _RankMetric:
    """The batches that a rank has evaluated, and its metrics by their names."""

    batches: int
    metrics: Mapping[str, tuple[Any, States]]


class MetricPool:
    """Pool of the metrics of all ranks, evaluation by evaluation.

    Threads:
        The workers of the ranks, all of them at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # serialises everything below
        self._owners: dict[int, tuple[int, Any]] = {}
        self._parts: dict[int, list[_RankMetric]] = {}
        # By the metrics' ids: since its first batch of an evaluation.
        self._first: dict[int, _OtherAttributes] = {}

    def own(self, rank: int, name: str, metric: Any) -> None:
        """Note that a rank updates this metric, and has done so for one batch of this evaluation.

        Raises:
            TypeError: Another rank does, too: it would be two threads at once.
        """
        with self._lock:
            owner, _ = self._owners.setdefault(id(metric), (rank, metric))
            self._first[id(metric)] = _other_attributes(part for part in metric.modules() if is_metric(part))
        if owner != rank:
            raise TypeError(
                f"{name!r} is one {type(metric).__name__} for ranks {owner} and {rank}, which update it at "
                "the same time: make it a part of the model (self.f1 = ...), each rank having its own, "
                "or keep one for each current_worker().rank"
            )

    def put(self, evaluation: int, batches: int, metrics: Mapping[str, Any], end: int | None) -> Parts:
        """Take the states of a rank that has no batch left, and reset its metrics.

        Args:
            evaluation: Index of the evaluation, from 0.
            batches: That this rank has evaluated.
            metrics: Those it has updated, by their names.
            end: Batches of the evaluation that its ranks share; None where it was cut, so that the number is
                not known.

        Returns:
            The states of all ranks, for the last rank that evaluated any; else nothing.

        Raises:
            TypeError: A metric keeps something beside its states, which cannot be merged.

        Streams:
            The host waits for the states.
        """
        taken = {name: (metric, _states(metric)) for name, metric in metrics.items()}
        try:
            for name, metric in metrics.items():
                self._check(name, metric)
        finally:
            for metric in metrics.values():
                reset(metric)
        with self._lock:
            parts = self._parts.setdefault(evaluation, [])
            parts.append(_RankMetric(batches, taken))
            if not batches or sum(part.batches for part in parts) != end:
                return {}
            del self._parts[evaluation]
        found: Parts = {}
        for name in dict.fromkeys(name for part in parts for name in part.metrics):
            there = [part.metrics[name] for part in parts if name in part.metrics]
            found[name] = metrics[name] if name in metrics else there[0][0], [states for _, states in there]
        return found

    def _check(self, name: str, metric: nn.Module) -> None:
        """Check that neither updates nor a reset change anything but the states.

        Raises:
            TypeError: They do.
        """
        with self._lock:
            first = self._first.pop(id(metric), {})
        last = _other_attributes(metric.modules())
        reset(metric)
        after = _other_attributes(metric.modules())
        for then, now in ((first, last), (last, after)):
            _check_equal(name, then, now, "from batch to batch")


def _check_equal(name: str, then: _OtherAttributes, now: _OtherAttributes, how: str) -> None:
    for place, (part, _, sealed) in then.items():
        if place in now and now[place][2] != sealed:
            raise TypeError(
                f"{name!r} cannot be put together from several devices: a {type(part).__name__} keeps "
                f"{place[1]!r} {how}, and only states of add_state() are merged. Register it there with a "
                "dist_reduce_fx or, if this is a wrapper, return the metric that it wraps"
            )


def computed(parts: Parts) -> list[tuple[str, object]]:
    """Values of metrics over all batches, by their names; the metrics are reset.

    Raises:
        TypeError: One was never updated, or cannot be merged.

    Streams:
        The host waits for the values.
    """
    values = []
    for name, (metric, ranks) in parts.items():
        try:
            _fill(metric, ranks)
            values.append((name, _computed(name, metric)))
        finally:
            reset(metric)
    return values


def _computed(name: str, metric: Any) -> object:
    """Value of a metric that has the states of all ranks.

    Raises:
        TypeError: It was never updated, or notes something that is no state: the next value would depend on
            the rank that computed this one.
    """
    if not updates(metric):
        raise TypeError(f"{name!r} was updated for no batch: call its update(...) in the evaluation's step")
    before = _other_attributes(metric.modules())
    value = metric.compute()
    _check_equal(name, before, _other_attributes(metric.modules()), "from evaluation to evaluation")
    return value


def _inner(metric: nn.Module) -> list[Any]:
    # One that is composed of others has no state, and counts updates that it never forgets. So does one that
    # shows the states of the metric inside it as its own.
    parts = [part for part in metric.modules() if is_metric(part) and part._reductions]
    return list({id(part._reductions): part for part in parts}.values())


def _other_attributes(parts: Iterable[nn.Module]) -> _OtherAttributes:
    found: _OtherAttributes = {}
    for part in parts:
        states = {*part._reductions, *_BOOKS} if is_metric(part) else set()  # type: ignore[misc]
        for name, value in (*vars(part).items(), *part._buffers.items()):
            if name not in _OF_TORCH and name not in states:
                found[id(part), name] = part, value, _seal(value)
    return found


def _seal(value: Any, depth: int = 6) -> object:
    """A value that compares equal as long as the contents are the same; of a large container, its length."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, int | float | str):
        return value
    is_container = isinstance(value, dict | list | tuple | set | deque)
    held = value if is_container else {} if callable(value) else getattr(value, "__dict__", {})
    if not depth or len(held) > LARGE:
        return id(value), len(held)
    inside = [*held, *held.values()] if isinstance(held, dict) else held
    return id(value), [_seal(one, depth - 1) for one in inside]


def _states(metric: Any) -> States:
    return [
        (part._update_count, {name: _on_host(getattr(part, name)) for name in part._reductions})
        for part in _inner(metric)
    ]


def _on_host(state: Any) -> Any:
    # A list is the metric's own, and is emptied when the metric is reset.
    return [one.cpu() for one in state] if isinstance(state, list) else state.cpu()


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
        return [one for _, state in states for one in state]  # as if one rank had seen all batches
    stacked = torch.stack([state for _, state in states])
    if getattr(reduce, "__name__", "") == "dim_zero_mean":  # ranks may update it unequally often here
        counts = torch.tensor([count for count, _ in states], dtype=torch.float64)
        return (
            (stacked.double() * counts.view(-1, *[1] * (stacked.dim() - 1)))
            .sum(0)
            .div(counts.sum())
            .to(stacked)
        )
    return stacked if reduce is None else reduce(stacked)


def _on_device(state: Any, part: Any) -> Any:
    if isinstance(state, Tensor):
        return state.to(part.device)
    return state if getattr(part, "compute_on_cpu", False) else [one.to(part.device) for one in state]
