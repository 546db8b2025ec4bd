"""Outputs of the model for each sample of a dataset, in its order, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from flowdp.data.source import Batch
from flowdp.device.compiled import FirstCalls
from flowdp.device.trees import concatenated, described, flatten, is_cut, tree_map, unflatten
from flowdp.engine.shared_batches import EvaluatedReplica, SharedBatches
from flowdp.errors import DataError

__all__ = ["PredictStep", "forward_step", "joined", "outputs_of"]

PredictStep = Callable[[nn.Module, Any], Any]
"""Function of (model, batch) that returns an output with an entry for each sample of the batch."""


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

    batches.each(rank, replica, batches.begin(rank), wait, task)
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
