"""Conversion of a run's records to flat numbers by name, the same for all loggers.

Numbers of the user's (`record_scalar`, keys of a loss or an evaluation) stand behind a prefix, so that none
takes the place of a number of flowdp's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from flowdp.policy.metric_array import MetricArray
from flowdp.policy.tally import EpochMetrics, RankMetrics
from flowdp.protocol.commands import EvaluationEnded, RoundEnded

__all__ = ["Number", "numbers_of"]

Number = int | float

MOST_ELEMENTS = 100
"""Elements of a metric that are written; a larger one is no row of numbers."""

APART = "scalars/"
"""Prefix of recorded scalars that are called like a number of flowdp's own."""


def numbers_of(record: EpochMetrics | EvaluationEnded | RoundEnded) -> dict[str, Number]:
    """Numbers of a record by name; fields that are None are left out.

    ::

        epoch, lr                             of an epoch, from 0; the first group's learning rate
        lr_groups/<name>                      of all groups, where there are several
        train/loss, train/<scalar>            means over all ranks
        eval/<name>                           means and metrics of the evaluation
        eval_arrays/<name>[1,0]               elements of a metric with several, up to 100 of them
        run/samples_per_s, run/epoch_ms ...   of all ranks together
        rank0/loss, rank0/busy_ms ...         the part of each rank
        round/loss, round_rank0/steps ...     of a round

    A recorded scalar with the name of a number of flowdp's own is `train/scalars/<name>`. Characters that
    UTF-8 does not have (lone surrogates) are written as escapes.
    """
    match record:
        case RoundEnded():
            return _of_round(record)
        case EvaluationEnded():
            return {"epoch": record.epoch, **_evaluated(record)}
        case EpochMetrics():
            return _of_epoch(record)


def _of_epoch(metrics: EpochMetrics) -> dict[str, Number]:
    numbers = _present("", {"epoch": metrics.epoch, "lr": metrics.lr})
    numbers |= _groups("lr_groups/", metrics.group_lrs)
    if not metrics.is_complete:  # a run that goes on reports this epoch once more
        numbers["is_complete"] = 0
    if metrics.owes_evaluation:  # so does one
        numbers["is_evaluated"] = 0
    numbers |= _part(
        "train/",
        {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "grad_norm_max": metrics.grad_norm_max},
        metrics.scalars,
    )
    numbers |= _evaluated(metrics)
    numbers |= _present(
        "run/",
        {
            "samples_per_s": sum(metrics.throughput),
            "epoch_ms": metrics.epoch_ms,
            "efficiency": metrics.efficiency,
            "rounds": metrics.rounds,
            "sync_ms": metrics.sync_ms,
            "anchor": metrics.anchor,
            "divergence": metrics.divergence,
        },
    )
    for rank, part in enumerate(metrics.per_rank):
        numbers |= _of_rank(rank, part, metrics.share[rank], metrics.throughput[rank])
    return numbers


def _evaluated(record: EpochMetrics | EvaluationEnded) -> dict[str, Number]:
    numbers: dict[str, Number] = {f"eval/{_encodable(name)}": value for name, value in record.eval.items()}
    for name, array in record.eval_arrays.items():
        numbers |= _elements(f"eval_arrays/{_encodable(name)}", array)
    return numbers


def _of_rank(rank: int, part: RankMetrics, share: float, samples_per_s: float) -> dict[str, Number]:
    own = {
        "loss": part.loss,
        "lr": part.lr,
        "samples": part.samples,
        "steps": part.steps,
        "share": share,
        "samples_per_s": samples_per_s,
        "busy_ms": part.busy_ms,
        "data_wait_ms": part.data_wait_ms,
        "wait_ms": part.wait_ms,
        "sync_ms": part.sync_ms,
    }
    return _part(f"rank{rank}/", own, part.scalars)


def _of_round(record: RoundEnded) -> dict[str, Number]:
    numbers = _present(
        "round/",
        {
            "number": record.round,
            "rounds": record.rounds,
            "epoch": record.epoch,
            "loss": record.loss,
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "grad_norm_max": record.grad_norm_max,
            "param_norm": record.param_norm,
            "drift": record.drift,
            "anchor": record.anchor,
            "wall_ms": record.wall_ms,
            "sync_ms": record.sync_ms,
        },
    )
    numbers |= _groups("round_lr_groups/", record.group_lrs)
    for rank in range(len(record.steps)):
        own = {
            "steps": record.steps[rank],
            "samples": record.samples[rank],
            "busy_ms": record.busy_ms[rank],
            "data_wait_ms": record.data_ms[rank],
            "wait_ms": record.wait_ms[rank],
        }
        numbers |= _present(f"round_rank{rank}/", own)
    return numbers


def _present(prefix: str, numbers: Mapping[str, Number | None]) -> dict[str, Number]:
    return {f"{prefix}{name}": value for name, value in numbers.items() if value is not None}


def _elements(name: str, array: MetricArray) -> dict[str, Number]:
    if len(array.values) > MOST_ELEMENTS:
        return {}
    indices = product(*map(range, array.shape))
    return {
        f"{name}[{','.join(map(str, index))}]": value
        for index, value in zip(indices, array.values, strict=True)
    }


def _groups(prefix: str, rates: Mapping[str, float]) -> dict[str, Number]:
    return {f"{prefix}{_encodable(name)}": lr for name, lr in rates.items()}


def _part(prefix: str, own: Mapping[str, Number | None], scalars: Mapping[str, float]) -> dict[str, Number]:
    """Numbers of flowdp's own and recorded scalars behind one prefix; no two of them have the same name."""
    numbers = _present(prefix, own)
    for name, value in scalars.items():
        is_taken = name in own or name.startswith(APART)
        numbers[f"{prefix}{APART if is_taken else ''}{_encodable(name)}"] = value
    return numbers


def _encodable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")
