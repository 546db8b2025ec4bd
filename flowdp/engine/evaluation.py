"""Evaluation of the model while all ranks stand still: a rank that is free takes the next batch.

The replicas are equal then, so any rank may evaluate any batch: every batch is reported with its
number, and the means are taken in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor

from flowdp.data.limit import check_limit
from flowdp.data.source import Batch, Source
from flowdp.device.compiled import FirstCalls
from flowdp.device.worker_context import CurrentWorker, current_worker
from flowdp.engine.metrics import (
    MetricPool,
    RankMetrics,
    is_metric,
    metric_values,
    named_metrics,
    reset,
    takes_metrics,
)
from flowdp.engine.shared_batches import EvaluatedReplica, SharedBatches
from flowdp.errors import OptionError
from flowdp.protocol.messages import Evaluation, TaskDone
from flowdp.replica.loss import unpack_loss
from flowdp.validators import check_function, check_int, one_of

__all__ = ["EvalStep", "EvaluationOptions", "Evaluator", "check_evaluation"]

EvalStep = Callable[..., Mapping[str, Any] | None]
"""The user's own: (model, batch) or (model, batch, metrics) -> means over the batch, or metrics that it has
updated, by name; None for nothing beside `metrics`."""

_Row = tuple[int, float | Tensor, str, float | Tensor]  # batch, weight, name, mean


@dataclass(frozen=True)
class EvaluationOptions:
    """Settings of the evaluation of the averaged model.

    ::

        Trainer(..., evaluation=test_set)                                       # the loss, after every epoch
        Trainer(..., evaluation=EvaluationOptions(test_set, step=accuracy, every=5))

    Attributes:
        dataset: As a Trainer's `dataset`; each sample is evaluated once, by all devices together.
        step: Function of (model, batch) that returns a mapping of means over the batch, or of metrics
            (torchmetrics) of the model that it has updated; None: the loss, with the scalars that it returns.
            One with a third parameter `metrics` gets this device's copies of the Trainer's metrics by their
            names, updates them, and may return None.
        every: Epochs or steps between two evaluations.
        unit: "epoch" or "step". A step is one of all devices; the evaluation comes behind the first round
            that ends there, and belongs to no epoch: its numbers are in an `EvaluationEnded`, for
            `on_evaluation` and `run.metrics("evaluation")`. EarlyStopping and `keep_best`, which judge
            epochs, are refused. One that a stop leaves out is made by the run that resumes there, of either
            unit.
        limit_batches: How many batches are evaluated at most (int), or which fraction of them (float). None:
            all.
        sanity_check: Batches that are evaluated before the first epoch, while `start()` is called, so that an
            error there is found before an hour of training; not where a run is resumed. Their numbers go
            nowhere, and the run is the same with and without it. 0: none.
    """

    dataset: Any
    _: KW_ONLY
    step: EvalStep | None = None
    every: int = 1
    unit: Literal["epoch", "step"] = "epoch"
    limit_batches: int | float | None = None
    sanity_check: int = 2

    def __post_init__(self) -> None:
        """Check the fields; the dataset is checked when a run opens it.

        Raises:
            OptionError: A field is out of its range.
        """
        check_function("evaluation.step", self.step, "(model, batch)", 2, "metrics")
        check_int("evaluation.every", self.every)
        one_of("evaluation.unit", self.unit, Literal["epoch", "step"])
        check_limit("evaluation.limit_batches", self.limit_batches)
        check_int("evaluation.sanity_check", self.sanity_check, least=0)


def check_evaluation(evaluation: object, train_step: object, *, judges: bool) -> EvaluationOptions | None:
    """Make options of a dataset; options and None pass.

    Args:
        evaluation: As given to the Trainer.
        train_step: The Trainer's.
        judges: Something judges epochs by the evaluation.

    Raises:
        OptionError: A `train_step` is evaluated, and there is no `step` for that. Or epochs are judged, and
            the evaluation comes every so many steps.
    """
    if evaluation is None:
        return None
    options = evaluation if isinstance(evaluation, EvaluationOptions) else EvaluationOptions(evaluation)
    if options.step is None and train_step is not None:
        raise OptionError(
            "a train_step does not say how to evaluate: give evaluation=EvaluationOptions(dataset, step=...) "
            "with a function of (model, batch) that returns a mapping of means over the batch"
        )
    if judges and options.unit == "step":
        raise OptionError(
            "evaluation.unit='step': EarlyStopping and keep_best judge epochs, and such an evaluation "
            "belongs to none: use unit='epoch', or call run.stop() and run.checkpoint() in on_evaluation"
        )
    return options


class Evaluator:
    """The evaluations of a run: each reads its dataset once, and its ranks share it.

    Args:
        source: Source of the evaluation's batches.
        eval_step: Function of (model, batch), or of (model, batch, metrics), that returns means over the
            batch; None: the loss is evaluated, with the scalars that it returns.
        metrics: Metrics of each rank by their names, of no other rank; `metrics` of the step, or updated with
            output and target of a criterion. Empty: there are none. Shape (world_size,).
        send: See `MetricPool`.

    Attributes:
        batches: Batches that the ranks share.
        pool: Metrics of all ranks and machines.

    Threads:
        The user's, unless a method says otherwise; it has made the dataset's tensors.
    """

    def __init__(
        self,
        source: Source,
        eval_step: EvalStep | None = None,
        metrics: Sequence[Mapping[str, Any]] = (),
        send: Callable[[RankMetrics], None] | None = None,
    ) -> None:
        self.batches = SharedBatches(source)
        self.pool = MetricPool(send)
        self._eval_step = eval_step
        self._metrics = metrics

    @property
    def source(self) -> Source:
        """Source of the batches."""
        return self.batches.source

    def run(
        self,
        index: int,
        replica: EvaluatedReplica,
        number: int,
        wait: Callable[[], bool],
        moved: Callable[[], None],
    ) -> TaskDone:
        """Evaluate batches until none is left. Every rank of the run calls it for each evaluation.

        Values that the user's code records (`record_scalar`) count towards the evaluation, and not towards
        the epoch.

        Args:
            index: Place of the rank among those of its machine.
            replica: Its own; the module's modes are put back, whatever happens.
            number: Index of the evaluation.
            wait: Blocks until the rank was woken, or more often; False: told to leave.
            moved: Called after each batch.

        Returns:
            Results of each batch that this rank evaluated; not of all, if it was cut or told to leave. The
            states of its metrics are in the pool of machine 0 then, and `merge` has the values.

        Streams:
            All is enqueued on the current stream, which is the lane's `compute`, and the results are read
            when all is.

        Threads:
            The worker of the rank, all of them at once.

        Raises:
            DataError: The dataset failed.
            TypeError: The return value holds neither numbers nor metrics by name.
            Exception: Raised by the user's code, with a note of the batch.
        """
        worker = current_worker()
        sink, samples = worker.sink, worker.samples
        given = self._metrics[index] if self._metrics else {}
        reading = _Reading(self._eval_step, replica, worker, given, is_first=number == 0)

        def task(batch: int, payload: Batch, samples: int) -> None:
            reading.evaluate(batch, payload, samples)
            moved()

        try:
            self.batches.each(index, replica, number, wait, task, " of the evaluation")
            metrics = reading.metrics()
            if metrics:
                self.pool.put(number, worker.rank, metrics)
            return TaskDone(worker.rank, _read(reading.rows), has_metrics=bool(metrics))
        finally:
            for metric in reading.used.values():
                reset(metric)
            worker.sink, worker.samples = sink, samples

    def merge(self, rank: int, number: int) -> TaskDone:
        """Merge the metrics that all ranks have brought to the pool: numbers as a batch of weight 1.

        Args:
            rank: Rank index.
            number: Index of the evaluation.

        Raises:
            TypeError: They cannot be merged.

        Threads:
            The worker of a rank of machine 0, while all ranks stand still.
        """
        with torch.no_grad():
            numbers, arrays = metric_values(self.pool.merged(number))
        return TaskDone(rank, ((-1, 1.0, numbers),) if numbers else (), arrays)


class _Reading:
    """One rank's part of an evaluation.

    Attributes:
        rows: Its results so far.
        batches: That it has evaluated.
        used: Metrics that are the evaluation's, by their names: given, and returned by the user's code.

    Args:
        is_first: It is the run's first evaluation, where torch.compile may work.
    """

    def __init__(
        self,
        step: EvalStep | None,
        replica: EvaluatedReplica,
        worker: CurrentWorker,
        given: Mapping[str, Any],
        *,
        is_first: bool,
    ) -> None:
        self.rows: list[_Row] = []
        self.batches = 0
        self.used: dict[str, Any] = dict(given)
        self._step, self._replica, self._worker, self._given = step, replica, worker, given
        self._is_first = is_first
        self._takes = {"metrics": MappingProxyType(given)} if step is not None and takes_metrics(step) else {}
        self._calls = FirstCalls(replica.module, step or replica.function)
        for metric in given.values():
            metric.to(replica.device)  # where its inputs are
        for metric in filter(is_metric, replica.module.modules()):
            reset(metric)  # what the training has counted is not of the evaluation

    def evaluate(self, batch: int, payload: Batch, samples: int) -> None:
        """Evaluate a batch that is on the device."""
        replica, self._worker.samples = self._replica, samples
        self._worker.sink = lambda name, value, weight: self._note(batch, name, value, weight)
        self.batches += 1
        may_compile = self._is_first and self.batches == 1
        with self._calls.turn(samples) if may_compile else nullcontext(), replica.casting():
            if self._step is None:
                self._evaluate_loss(batch, payload)
                return
            means = named_metrics(self._step(replica.module, payload, **self._takes))
        if means is None and self._takes:
            return
        if not isinstance(means, Mapping):
            raise TypeError(
                "evaluation.step must return a mapping of means over the batch by their names, not "
                f"{type(means).__name__}"
            )
        for name, mean in means.items():
            if is_metric(mean):
                self.used[name] = mean
            else:
                self._note(batch, name, mean, samples)

    def metrics(self) -> Mapping[str, Any]:
        """The metrics that it has updated, by their names.

        Raises:
            TypeError: One has the name of a mean.
        """
        if twice := {name for _, _, name, _ in self.rows}.intersection(self.used):
            raise TypeError(f"{min(twice)!r} is the name of a mean and of a metric: rename one of them")
        return self.used if self.batches else {}

    def _evaluate_loss(self, batch: int, payload: Batch) -> None:
        """Evaluate the loss and, of a criterion, the metrics on the same forward."""
        replica = self._replica
        outputs: list[Any] = []

        def model(*inputs: Any) -> Any:
            outputs.append(replica.module(*inputs))
            return outputs[-1]

        result = replica.function(model if self._given else replica.module, payload)
        loss, weight, scalars = unpack_loss(result)
        for name, value in scalars.items():
            self._worker.record(name, value)
        self._note(batch, "loss", loss, self._worker.samples if weight is None else _number("weight", weight))
        for metric in self._given.values():
            metric.update(outputs[-1], payload[1])

    def _note(self, batch: int, name: str, value: object, weight: float | Tensor) -> None:
        self.rows.append((batch, weight, name, _number(name, value)))


def _number(name: object, value: object) -> float | Tensor:
    """A number, or a copy of a one-element tensor: the base of a view may be large, or written again."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(torch.float64, copy=True)
    if isinstance(name, str) and isinstance(value, SupportsFloat) and not isinstance(value, Tensor):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    raise TypeError(f"{name!r} must be one number, the mean over the batch, not {what}")


def _read(rows: list[_Row]) -> tuple[Evaluation, ...]:
    """Bring the numbers to the host; those of a device by one copy."""
    values = [value for row in rows for value in (row[1], row[3])]
    for device in {value.device for value in values if isinstance(value, Tensor)}:
        places = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.device == device]
        numbers = torch.stack([torch.as_tensor(values[i]) for i in places]).tolist()
        for place, number in zip(places, numbers, strict=True):
            values[place] = number
    read = ((row[0], float(values[2 * i]), (row[2], float(values[2 * i + 1]))) for i, row in enumerate(rows))
    return tuple((*key, tuple(map(itemgetter(2), of))) for key, of in groupby(read, key=itemgetter(0, 1)))
