"""Forwards with a Trainer's settings on all its devices, outside a run: validation, prediction, a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from queue import SimpleQueue
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from flowdp.data.loader_source import ReadPlan
from flowdp.data.open_source import loader_generators, open_evaluation
from flowdp.data.source import Batch
from flowdp.device import worker_context
from flowdp.device.compiled import FirstCalls, make_room
from flowdp.device.cores import pool_sizes, set_own_threads
from flowdp.device.dispatch import prepare_torch
from flowdp.device.draws import generators_kept
from flowdp.device.memory import keep_memory
from flowdp.device.process_tuning import as_tuning, tuned_process
from flowdp.device.streams import Lane
from flowdp.device.trees import concatenated, described, flatten, is_cut, tree_map, unflatten
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.active_runs import check_free
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.evaluation import Evaluator
from flowdp.engine.metrics import RankMetrics, rank_metrics
from flowdp.engine.shared_batches import EvaluatedReplica, SharedBatches
from flowdp.errors import DataError, FlowdpError, OptionError
from flowdp.options import ProcessTuning
from flowdp.policy.tally import MetricArray, evaluation_means
from flowdp.protocol.messages import TaskDone
from flowdp.replica.build import ReplicaConfig
from flowdp.replica.inference import build_inference
from flowdp.replica.rank_state import restore_model
from flowdp.replica.replica import Replica
from flowdp.threads.crew import Crew
from flowdp.trainer.config import DatasetOption, RunConfig
from flowdp.trainer.result import TrainedState, resumed_from
from flowdp.trainer.resume import find
from flowdp.validators import check_function, check_int

__all__ = ["PredictStep", "StateOption", "open_evaluator", "predict", "try_evaluation", "validate"]

StateOption = TrainedState | str | PathLike[str]

PredictStep = Callable[[nn.Module, Any], Any]
"""Function of (model, batch) that returns an output with an entry for each sample of the batch."""

T = TypeVar("T")
Task = Callable[[int, EvaluatedReplica, Callable[[], bool]], T]
"""Done on the thread of a rank: (rank, replica, wait), with the wait that `SharedBatches.take` needs."""


def validate(config: RunConfig, state: StateOption | None) -> dict[str, float | MetricArray]:
    """Evaluate the model on the evaluation's dataset; see `Trainer.validate`."""
    if config.evaluation is None:
        raise OptionError("validate() needs the dataset to evaluate on: give Trainer(evaluation=...)")
    replicas = _replicas(config, state)
    evaluator = open_evaluator(config.alone)
    assert evaluator is not None

    def task(rank: int, replica: EvaluatedReplica, wait: Callable[[], bool]) -> TaskDone:
        return evaluator.run(rank, replica, 0, wait, lambda: None)

    merge = partial(_merge, evaluator)
    parts = _on_all_ranks(task, replicas, evaluator.batches, _tuning(config), "validates", merge)
    means = evaluation_means([result for part in parts for result in part.results])
    arrays = {name: array for part in parts for name, array in part.arrays}
    return means | arrays


def predict(
    config: RunConfig,
    dataset: DatasetOption,
    step: PredictStep | None,
    state: StateOption | None,
    batch_size: int | None,
) -> Any:
    """Outputs of the model for a dataset; see `Trainer.predict`."""
    check_function("step", step, "(model, batch)", 2)
    check_int("batch_size", batch_size, optional=True)
    if isinstance(dataset, DataLoader):
        if isinstance(dataset.sampler, RandomSampler):
            raise OptionError(
                "predict: this DataLoader shuffles, and the outputs would be in an order that nobody knows: "
                "give one with shuffle=False"
            )
        if batch_size is not None:
            raise OptionError("predict: batch_size has no use beside a DataLoader, which has its own")
    replicas = _replicas(config, state)
    source = open_evaluation(
        dataset,
        batch_size or config.forward_size,
        config.reading,
        ReadPlan(None, len(config.devices)),
        name="predict",
    )
    batches = SharedBatches(source)
    task = partial(outputs_of, batches, step or forward_step(isinstance(config.replica.loss, nn.Module)))
    parts = _on_all_ranks(task, replicas, batches, _tuning(config), "predicts")
    outputs = {number: output for part in parts for number, output in part.items()}
    return joined([outputs[number] for number in sorted(outputs)])


def forward_step(has_criterion: bool) -> PredictStep:
    """The step where none is given: the model's forward.

    Args:
        has_criterion: Whether batches of two parts are (inputs, target), as a criterion has it.
    """

    def step(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return model(batch)
        if isinstance(batch, tuple | list) and len(batch) in ((1, 2) if has_criterion else (1,)):
            return model(batch[0])
        of = f" of {len(batch)}" if isinstance(batch, tuple | list | Mapping) else ""
        raise TypeError(
            f"a batch here is a {type(batch).__name__}{of}, and without a step the model is called with a "
            "batch that is one tensor" + (", or with x of (x, y)" if has_criterion else "") + ": say how, "
            "predict(dataset, step=lambda model, batch: model(batch[0]))"
        )

    return step


def outputs_of(
    batches: SharedBatches, step: PredictStep, rank: int, replica: EvaluatedReplica, wait: Callable[[], bool]
) -> dict[int, tuple[Any, int]]:
    """Compute the outputs of one reading of a dataset, until no batch is left.

    Args:
        batches: Batches that the ranks share.
        step: Function of (model, batch).
        rank: Rank index.
        replica: Its own.
        wait: See `SharedBatches.take`.

    Returns:
        By the batch's number its output, on the CPU, and its samples. Each output is waited for.

    Threads:
        The thread of the rank, all of them at once.

    Raises:
        DataError: The dataset failed.
        TypeError: An output has no entry for each sample.
        Exception: Raised by the user's code, with a note of the batch.
    """
    outputs: dict[int, tuple[Any, int]] = {}
    calls = FirstCalls(replica.module, step)

    def task(batch: int, payload: Batch, samples: int) -> None:
        with calls.turn(samples), replica.casting():
            output = step(replica.module, payload)
        _check(output, samples)
        outputs[batch] = tree_map(_on_host, output), samples

    batches.each(rank, replica, 0, wait, task)
    return outputs


def joined(outputs: Sequence[tuple[Any, int]]) -> Any:
    """The outputs of all batches as one, in their order.

    A list as long as the batch, in all batches, has an entry for each sample. Tensors that differ in more
    than their length are taken apart into a list of the samples.

    Args:
        outputs: Output and samples of each batch.

    Raises:
        DataError: There is none.
    """
    if not outputs:
        raise DataError("there is no sample to predict")
    if not all(_is_list(output, samples) for output, samples in outputs):
        trees = [flatten(output, samples) for output, samples in outputs]
        forms = [(form, [_form(leaf) for leaf in leaves]) for leaves, form in trees]
        if all(form == forms[0] for form in forms):
            leaves = [concatenated(parts) for parts in zip(*(leaves for leaves, _ in trees), strict=True)]
            return unflatten(leaves, trees[0][1])
    return [entry for output, samples in outputs for entry in _entries(output, samples)]


def _entries(output: Any, samples: int) -> list[Any]:
    if _is_list(output, samples):
        return list(output)
    leaves, form = flatten(output, samples)
    return [unflatten([leaf[place] for leaf in leaves], form) for place in range(samples)]


def _is_list(output: object, samples: int) -> bool:
    return isinstance(output, list) and len(output) == samples


def _form(leaf: Any) -> object:
    return (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else type(leaf)


def _check(output: Any, samples: int) -> None:
    """Check that an output has an entry for each sample of its batch.

    Raises:
        TypeError: It has not.
    """
    if _is_list(output, samples):
        return
    leaves, form = flatten(output, samples)
    wrong = [pair for pair in zip(form.paths(), leaves, strict=True) if not is_cut(pair[1], samples)]
    if wrong or not leaves:
        path, leaf = wrong[0] if wrong else ("", output)
        kind = "" if isinstance(leaf, Tensor) else f" ({type(leaf).__name__})"
        raise TypeError(
            f"an output must have an entry for each of the batch's {samples} samples, along the first "
            f"dimension of each tensor, and here output{path} is {described(leaf)}{kind}: give "
            "predict(dataset, step=...), whose step leaves it out or returns a list of it"
        )


def _on_host(leaf: Any) -> Any:
    # A copy, on the CPU too: a module may write its next output into the same memory.
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def open_evaluator(config: RunConfig, send: Callable[[RankMetrics], None] | None = None) -> Evaluator | None:
    """Open the evaluation's dataset, with metrics for each rank; None where there is no evaluation.

    Args:
        config: Settings of the run.
        send: On a machine that follows, sends its metrics to machine 0.

    Raises:
        OptionError: The dataset is wrong.
    """
    source = config.open_evaluation()
    if source is None or config.evaluation is None:
        return None
    return Evaluator(source, config.evaluation.step, rank_metrics(config.metrics, len(config.devices)), send)


def try_evaluation(config: RunConfig, replicas: Sequence[Replica]) -> None:
    """Evaluate some batches before the first epoch, so that an error there is found before the training.

    No trace is left: the numbers are dropped, and random numbers and buffers are as before.

    Args:
        config: Settings of the run.
        replicas: Replicas of all ranks, newly built.

    Raises:
        DataError: The dataset failed.
        StepError: The user's code raised.

    Threads:
        The user's, before any thread of the run exists.
    """
    options = config.evaluation
    if options is None or not options.sanity_check:
        return
    is_less = isinstance(options.limit_batches, int) and options.limit_batches < options.sanity_check
    few = options if is_less else replace(options, limit_batches=options.sanity_check)
    evaluator = open_evaluator(replace(config.alone, evaluation=few))
    assert evaluator is not None

    def task(rank: int, replica: EvaluatedReplica, wait: Callable[[], bool]) -> TaskDone:
        replicas[rank].mark()
        try:
            return evaluator.run(rank, replica, 0, wait, lambda: None)
        finally:
            replicas[rank].undo()

    with generators_kept(own=loader_generators(options.dataset)):
        doing = f"tries the evaluation before the first epoch (sanity_check={options.sanity_check})"
        merge = partial(_merge, evaluator)
        # The run itself looks at the cores, too, and says how many threads train.
        _on_all_ranks(task, replicas, evaluator.batches, _tuning(config), doing, merge, tells=False)


def _merge(evaluator: Evaluator, *_: object) -> TaskDone:
    """Compute the metrics of the only evaluation of its evaluator."""
    return evaluator.merge(0, 0)


def _replicas(config: RunConfig, state: StateOption | None) -> Sequence[EvaluatedReplica]:
    check_free(config.devices)
    return build_inference(config.replica, config.devices, _loading(config.replica, state))


def _leave(_module: nn.Module) -> None:
    """Leave the weights that the copy of the Trainer's model has."""


def _tuning(config: RunConfig) -> ProcessTuning:
    return as_tuning(config.runtime.tune_process)


def _loading(config: ReplicaConfig, state: StateOption | None) -> Callable[[nn.Module], None]:
    """A function that puts the weights into a module: their moving average, where the run keeps one.

    Raises:
        CheckpointError: The state cannot be read.
        OptionError: It is none, or there is none.
    """
    if state is None:
        if not isinstance(config.model, nn.Module):
            raise OptionError(
                "the Trainer's model is a factory, which makes new weights each time: give state=, a "
                "TrainedState or the path of a checkpoint"
            )
        return _leave
    if not isinstance(state, TrainedState | str | PathLike):
        raise OptionError(f"state must be a TrainedState or the path of a checkpoint, not {state!r:.80}")
    start = resumed_from(state) if isinstance(state, TrainedState) else find(fspath(state), None)
    assert start is not None
    model, ema = start.model, {} if config.ema_decay is None else start.ema
    evaluated = {name: ema[name].to(value.dtype) if name in ema else value for name, value in model.items()}
    return partial(restore_model, model=evaluated, buffers=start.buffers)


def _on_all_ranks(
    task: Task[T],
    replicas: Sequence[EvaluatedReplica],
    batches: SharedBatches,
    tuning: ProcessTuning,
    doing: str,
    then: Task[T] | None = None,
    tells: bool = True,
) -> list[T]:
    """Execute a task on a thread for each rank, and wait for all; no thread is left, whatever happens.

    An error of one rank, or a Ctrl-C, ends the others behind their batch.

    Args:
        task: Done for each rank.
        replicas: One per rank.
        batches: Batches that they share; closed at the end.
        tuning: Settings of the process meanwhile.
        doing: Description of the task in errors: "predicts".
        then: Called in the same way on the first rank's thread, when all have done theirs.
        tells: Whether the log says that the cores are busy.

    Returns:
        The results of the ranks, and of `then`.

    Raises:
        DataError: The dataset failed.
        StepError: The user's code raised; it has rank, device, batch and the indices of the samples.
        OutOfDeviceMemory: A device had no room for a batch.

    Threads:
        The user's.
    """
    woken: list[SimpleQueue[bool]] = [SimpleQueue() for _ in replicas]

    def work(rank: int, do: Task[T]) -> T:
        replica = replicas[rank]
        worker = CurrentWorker(rank, replica.device, replica.module, sink=lambda *_: None)
        try:
            with worker_context.bound(worker):
                return do(rank, replica, woken[rank].get)
        except FlowdpError:
            batches.cut()
            raise
        except BaseException as error:
            keep_memory([replica.lane])
            batches.cut()
            raise ErrorContext(worker, batches.source).explain(error, doing) from error

    make_room(len(replicas))
    lanes = [replica.lane for replica in replicas]
    threads = pool_sizes([lane.device for lane in lanes], tuning, adapts=True, tells=tells)
    with ExitStack() as stack:
        stack.callback(batches.source.close)
        if len(replicas) > 1:
            prepare_torch()
        stack.enter_context(tuned_process(tuning))
        wake_all = partial(_wake_all, woken)
        batches.start(wake=lambda rank, *_: woken[rank].put(True), failed=wake_all)
        crew = Crew(
            [f"flowdp-worker-{rank}" for rank in range(len(replicas))],
            lambda rank: _around(lanes[rank], threads[rank]),
        )
        stack.callback(crew.close)
        stack.callback(batches.cut)  # before that: an interrupt leaves jobs that wait
        done = crew.run([partial(work, rank, task) for rank in range(len(replicas))])
        if then is not None:
            done += crew.run([partial(work, 0, then), *[None] * (len(replicas) - 1)])
        return [result for result in done if result is not None]


def _wake_all(woken: Sequence[SimpleQueue[bool]], _error: object) -> None:
    for queue in woken:
        queue.put(True)


@contextmanager
def _around(lane: Lane, threads: int) -> Iterator[None]:
    """Context of a rank's thread."""
    set_own_threads(threads)
    with lane.on(lane.compute):
        yield
