"""Evaluation of the model while all ranks stand still: a rank that is free takes the next batch.

The replicas are equal then, so any rank may evaluate any batch: every batch is reported with its
number, and the means are taken in that order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from flowdp.data.limit import check_limit
from flowdp.data.slots import await_dataset, keep_for
from flowdp.data.source import Batch, Source
from flowdp.data.trees import moves_itself, tensors_of, tree_map
from flowdp.device.accelerator import device_generator, is_accelerator
from flowdp.device.compiled import FirstCalls
from flowdp.device.copies import move
from flowdp.device.streams import Lane
from flowdp.device.worker_context import CurrentWorker, current_worker
from flowdp.engine.machine_metrics import MetricsMeeting
from flowdp.engine.metrics import (
    MetricPool,
    Parts,
    computed,
    flattened,
    is_metric,
    named_metrics,
    reset,
    source_of,
    takes_metrics,
    updates,
)
from flowdp.engine.shared_batches import SharedBatches
from flowdp.errors import OptionError
from flowdp.modules.training_mode import put_modes
from flowdp.policy.metric_array import MetricArray
from flowdp.protocol.messages import Evaluated, MetricsMerged
from flowdp.replica.replica import unpack_loss
from flowdp.validators import check_function, check_int, one_of

__all__ = [
    "EvalStep",
    "EvalSums",
    "EvaluatedReplica",
    "EvaluationOptions",
    "Evaluator",
    "check_evaluation",
    "check_judged",
    "evaluating",
    "own_generator",
    "to_lane",
]

EvalStep = Callable[..., Mapping[str, Any] | None]
"""The user's own: (model, batch) or (model, batch, metrics) -> means over the batch, or metrics that it has
updated, by name; None for nothing beside `metrics`."""

EvalSums = tuple[tuple[int, float, tuple[tuple[str, float], ...]], ...]
"""Results of batches: number, samples (or another weight of the means), and (name, mean) pairs."""

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
        check_function("evaluation.step", self.step, "(model, batch)")
        check_int("evaluation.every", self.every)
        one_of("evaluation.unit", self.unit, Literal["epoch", "step"])
        check_limit("evaluation.limit_batches", self.limit_batches)
        check_int("evaluation.sanity_check", self.sanity_check, least=0)


def check_evaluation(evaluation: object, train_step: object) -> EvaluationOptions | None:
    """Make options of a dataset; options and None pass.

    Raises:
        OptionError: A `train_step` is evaluated, and there is no `step` for that.
    """
    if evaluation is None:
        return None
    options = evaluation if isinstance(evaluation, EvaluationOptions) else EvaluationOptions(evaluation)
    if options.step is None and train_step is not None:
        raise OptionError(
            "a train_step does not say how to evaluate: give evaluation=EvaluationOptions(dataset, step=...) "
            "with a function of (model, batch) that returns a mapping of means over the batch"
        )
    return options


def check_judged(options: EvaluationOptions | None, *, judges: bool) -> None:
    """Check that the evaluation belongs to epochs, where something judges epochs by it.

    Raises:
        OptionError: It comes every so many steps.
    """
    if judges and options is not None and options.unit == "step":
        raise OptionError(
            "evaluation.unit='step': EarlyStopping and keep_best judge epochs, and such an evaluation "
            "belongs to none: use unit='epoch', or call run.stop() and run.checkpoint() in on_evaluation"
        )


class EvaluatedReplica(Protocol):
    """A rank's model and loss: of a `Replica`, or without an optimizer."""

    @property
    def module(self) -> nn.Module:
        """The model, the rank's own."""
        ...

    @property
    def function(self) -> Callable[..., Any]:
        """The loss, of (model, batch)."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the rank."""
        ...

    @property
    def lane(self) -> Lane:
        """Lane of the device."""
        ...

    def casting(self) -> AbstractContextManager[object]:
        """Autocast, if any."""
        ...


class Evaluator:
    """The evaluations of a run: each reads its dataset once, and its ranks share it.

    Args:
        source: Source of the evaluation's batches.
        eval_step: Function of (model, batch), or of (model, batch, metrics), that returns means over the
            batch; None: the loss is evaluated, with the scalars that it returns.
        metrics: Metrics of each rank by their names, of no other rank; `metrics` of the step, or updated with
            output and target of a criterion. Empty: there are none. Shape (world_size,).

    Attributes:
        batches: Batches that the ranks share.
        meeting: Metrics of all machines.

    Threads:
        The user's, unless a method says otherwise; it has made the dataset's tensors.
    """

    def __init__(
        self,
        source: Source,
        eval_step: EvalStep | None = None,
        metrics: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.batches = SharedBatches(source)
        self._eval_step = eval_step
        self._takes_metrics = eval_step is not None and takes_metrics(eval_step)
        self._metrics = metrics
        self._pool = MetricPool()
        self.meeting = MetricsMeeting(self.batches.source.stride.first)

    @property
    def source(self) -> Source:
        """Source of the batches."""
        return self.batches.source

    def run(
        self, rank: int, replica: EvaluatedReplica, wait: Callable[[], bool], moved: Callable[[], None]
    ) -> Evaluated:
        """Evaluate batches until none is left. Every rank of the run calls it for each evaluation.

        Values that the user's code records (`record_scalar`) count towards the evaluation, and not towards
        the epoch.

        Args:
            rank: Rank index.
            replica: Its own; the module's modes are put back, whatever happens.
            wait: Blocks until the rank was woken, or more often; False: told to leave.
            moved: Called after each batch.

        Returns:
            Results of each batch that this rank evaluated; not of all, if it was cut or told to leave. The
            last rank to come to the end adds the values of the metrics that all ranks have updated: numbers
            as a batch of weight 1 behind the others. On several machines the last rank of each brings their
            states to the meeting, and `merge` has the values.

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
        rows: list[_Row] = []
        used = {id(part): updates(part) for part in replica.module.modules() if is_metric(part)}
        given = self._metrics[rank] if self._metrics else {}
        own = _Metrics(self._pool, rank, used, given)
        sink, samples = worker.sink, worker.samples
        with self.batches.reading(rank) as number:
            try:
                own.move(replica.device)
                with evaluating(replica.module), own_generator(replica.device), torch.no_grad():
                    while (taken := self.batches.take(rank, number, wait)) is not None:
                        self._evaluate(number, *taken, replica, worker, rows, own)
                        moved()
                    parts = self._gathered(number, own)
                    end, means = self.batches.end(number), {row[2] for row in rows}
                    if not parts or end is None:
                        return Evaluated(rank, _read(rows))
                    if self.source.stride.step > 1:
                        self.meeting.bring(number, end, means, parts)
                        return Evaluated(rank, _read(rows), has_metrics=True)
                    numbers, arrays = _values(end, means, parts)
                    return Evaluated(rank, _read(rows) + numbers, arrays)
            finally:
                own.reset()
                worker.sink, worker.samples = sink, samples

    def _gathered(self, number: int, own: _Metrics) -> Parts:
        """Metrics of all ranks of this machine, where this is the last one; else none."""
        found, own.found = own.found, {}  # from here on the pool's: another rank may still fill one
        return self._pool.put(number, own.batches, found, self.batches.own(number))

    def merge(self, rank: int, number: int) -> MetricsMerged:
        """Merge the metrics that all machines have brought to the meeting of an evaluation.

        Args:
            rank: Rank index.
            number: Index of the evaluation.

        Raises:
            TypeError: They cannot be merged.

        Threads:
            The worker of a rank of machine 0, while all ranks stand still.
        """
        with torch.no_grad():
            numbers, arrays = _values(*self.meeting.end(number))
        return MetricsMerged(rank, numbers, arrays)

    def cut(self) -> None:
        """Let no rank take another batch, of this evaluation or a later one.

        Threads:
            Any. Does not block.
        """
        self.batches.cut()

    # ------------------------------------------------------------ a batch
    def _evaluate(
        self,
        number: int,
        batch: int,
        payload: Batch,
        replica: EvaluatedReplica,
        worker: CurrentWorker,
        rows: list[_Row],
        own: _Metrics,
    ) -> None:
        is_first, own.batches = not own.batches, own.batches + 1
        function = self._eval_step or replica.function

        def sink(name: str, value: object, weight: float | Tensor) -> None:
            if is_first and (metric := source_of(value, replica.module, function, own.given)) is not None:
                raise TypeError(_of_one_batch(name, metric))
            rows.append((batch, weight, name, _one(name, value)))

        worker.samples = samples = self.source.samples_in(number, batch)
        worker.sink = sink
        is_new = is_first and number == 0
        turn = FirstCalls(replica.module, function).turn(samples) if is_new else nullcontext()
        try:
            own_batch = tree_map(lambda leaf: to_lane(leaf, replica.lane), payload)
            if self._eval_step is None:
                self._evaluate_loss(replica, own_batch, worker, sink, own, turn)
                return
            given = {"metrics": MappingProxyType(own.given)} if self._takes_metrics else {}
            with turn, replica.casting():
                means = named_metrics(self._eval_step(replica.module, own_batch, **given))
            own.take_given()
            if means is None and self._takes_metrics:
                return
            if not isinstance(means, Mapping):
                raise TypeError(
                    f"evaluation.step must return a mapping of means over the batch by their names, not "
                    f"{type(means).__name__}"
                )
            for name, mean in means.items():
                if is_metric(mean):
                    own.take(name, mean)
                else:
                    sink(name, mean, samples)
        except Exception as error:
            error.add_note(f"in {self.batches.name(number, batch)} of the evaluation")
            raise

    def _evaluate_loss(
        self,
        replica: EvaluatedReplica,
        batch: Batch,
        worker: CurrentWorker,
        sink: Callable[[str, object, float | Tensor], None],
        own: _Metrics,
        turn: AbstractContextManager[object],
    ) -> None:
        """Evaluate the loss and, of a criterion, the metrics on the same forward."""
        model = _Watched(replica.module) if own.given else replica.module
        with turn, replica.casting():
            result = replica.function(model, batch)
            weight: float | Tensor = worker.samples
            if isinstance(result, Mapping) and "weight" in result:
                weight = _one("weight", result["weight"])
                result = {name: value for name, value in result.items() if name != "weight"}
            loss = result if isinstance(result, Tensor) else unpack_loss(result, worker)
        sink("loss", loss, weight)
        if isinstance(model, _Watched):
            for metric in own.given.values():
                metric.update(model.output, batch[1])
            own.take_given()


class _Watched:
    """A module that keeps its last output, for a criterion to call.

    Attributes:
        output: The last one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.output: Any = None

    def __call__(self, *inputs: Any) -> Any:
        self.output = self._module(*inputs)
        return self.output


class _Metrics:
    """The metrics that a rank has updated in an evaluation.

    Args:
        pool: Metrics of all ranks.
        rank: Rank index.
        used: Updates of the metrics in its module before the evaluation, by their ids.
        given: Those that the Trainer has given it, by their names.

    Attributes:
        batches: That it has evaluated.
        given: As given.
        found: Its metrics by their names, those that the user's code has returned included.
    """

    def __init__(
        self, pool: MetricPool, rank: int, used: Mapping[int, int], given: Mapping[str, Any]
    ) -> None:
        self.batches = 0
        self.given = given
        self.found: dict[str, Any] = {}
        self._pool = pool
        self._rank = rank
        self._used = used

    def take(self, name: object, metric: Any) -> None:
        """Take a metric that the user's code has returned.

        Raises:
            TypeError: It cannot be this rank's alone, or of this evaluation alone.
        """
        if self.found.get(_text(name)) is metric:
            return
        self._pool.own(self._rank, _text(name), metric)
        if count := self._used.get(id(metric)):
            raise TypeError(
                f"{name!r} had {count} updates before the evaluation began: keep a {type(metric).__name__} "
                "for the evaluation alone"
            )
        if _text(name) in self.found:
            raise TypeError(
                f"{name!r} is another {type(metric).__name__} than for the batch before: return the same"
            )
        self.found[_text(name)] = metric

    def take_given(self) -> None:
        """Take the metrics of the Trainer, behind a batch."""
        for name, metric in self.given.items():
            self.take(name, metric)

    def move(self, device: torch.device) -> None:
        """Move the metrics of the Trainer to this rank's device, where their inputs are.

        Streams:
            On the current one.
        """
        for metric in self.given.values():
            metric.to(device)

    def reset(self) -> None:
        """Reset them: they are the evaluation's own."""
        for metric in (*self.found.values(), *self.given.values()):
            reset(metric)


def _values(
    end: int, means: Collection[str], parts: Parts
) -> tuple[EvalSums, tuple[tuple[str, MetricArray], ...]]:
    """Values of metrics: numbers, as a batch of weight 1 behind all `end` others, and arrays.

    Raises:
        TypeError: A value has the name of another one, or of one of the `means`; or it cannot be computed.
    """
    named = [one for name, value in computed(parts) for one in flattened(name, value)]
    for name, times in Counter(name for name, _ in named).items():
        if times > 1 or name in means:
            raise TypeError(f"{name!r} is the name of two values of the evaluation: rename one of them")
    numbers = tuple((name, one) for name, one in named if isinstance(one, float))
    arrays = tuple((name, one) for name, one in named if isinstance(one, MetricArray))
    return (((end, 1.0, numbers),) if numbers else ()), arrays


def _of_one_batch(name: str, metric: object) -> str:
    return (
        f"{name!r} is the value of a {type(metric).__name__} for a single batch, and the mean of these is "
        "not its value for all samples: call its update(...), and return the metric itself, "
        f"{{{name!r}: metric}}"
    )


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric must be a str, not {name!r}")
    return name


def _one(name: object, value: object, of: str = "the mean over the batch") -> float | Tensor:
    """A number, or a copy of a one-element tensor: the base of a view may be large, or written again."""
    _text(name)
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach().reshape(()).to(torch.float64, copy=True)
        what = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    elif isinstance(value, Mapping):
        what = f"a dict of {', '.join(map(repr, value))}: return a metric for each number"
    elif isinstance(value, nn.Module):
        what = f"a {type(value).__name__}: return numbers, or metrics with states of their own"
    else:
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            what = repr(value)
    raise TypeError(f"{name!r} must be one number, {of}, not {what}")


def _read(rows: list[_Row]) -> EvalSums:
    """Bring the numbers to the host; those of a device by one copy."""
    found = [value for row in rows for value in (row[1], row[3])]
    for device in {value.device for value in found if isinstance(value, Tensor)}:
        places = [i for i, v in enumerate(found) if isinstance(v, Tensor) and v.device == device]
        numbers = torch.stack([torch.as_tensor(found[i]) for i in places]).tolist()
        for place, number in zip(places, numbers, strict=True):
            found[place] = number
    read = ((row[0], float(found[2 * i]), (row[2], float(found[2 * i + 1]))) for i, row in enumerate(rows))
    return tuple((*key, tuple(map(itemgetter(2), of))) for key, of in groupby(read, key=itemgetter(0, 1)))


def to_lane(leaf: Any, lane: Lane) -> Any:
    """A leaf of a batch on the lane's device; the current stream is its `compute`."""
    await_dataset(leaf, lane, lane.compute)
    if isinstance(leaf, Tensor):
        moved = move(leaf, lane.device)
    elif moves_itself(leaf):
        moved = leaf.to(lane.device)
    else:
        return leaf
    # One that lies there already belongs to another stream, which gets its memory when we let go of it.
    keep_for(lane.compute, tensors_of(moved))
    return moved


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; then each submodule has its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        put_modes(modes)


@contextmanager
def own_generator(device: torch.device) -> Iterator[None]:
    """Restore a device's generator: ranks share batches by speed, and training must not depend on it."""
    if not is_accelerator(device):
        yield
        return
    generator = device_generator(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
