"""Source of an evaluation or a prediction: a dataset in its own order, read on demand."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flowdp.data.limit import Limit
from flowdp.data.open_source import Collate, Source, as_tensors, open_source
from flowdp.errors import OptionError

__all__ = ["open_evaluation"]


def open_evaluation(
    dataset: object,
    *,
    batch_size: int,
    collate_fn: Collate | None,
    num_workers: int | None,
    world_size: int,
    limit: Limit | None = None,
    name: str = "evaluation",
    machine: int = 0,
    machines: int = 1,
) -> Source:
    """The source of an evaluation: each epoch of it is one, in the dataset's own order, begun on demand.

    Of several machines, number m of M evaluates the batches m, m + M, m + 2 M, ..., and reads these alone; of
    an IterableDataset it reads all. They keep their numbers in the whole, by which the results of all
    machines are put in order.

    Args:
        dataset: See `open_source`. A DataLoader has its own settings.
        batch_size: Samples of a batch.
        collate_fn: That of the training; it and `num_workers` are left out where they have no use.
        num_workers: That of the training.
        world_size: Ranks of this machine that evaluate.
        limit: Part of the dataset that is evaluated; None: all.
        name: Purpose of the dataset, for errors.
        machine: Number of this machine, from 0.
        machines: Machines that evaluate.

    Raises:
        DataError: A sampler failed; see `open_source`.
        OptionError: The dataset cannot be read.
    """
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": None if isinstance(dataset, IterableDataset) else False,
        "drop_last": False,
        "collate_fn": collate_fn,
        "num_workers": num_workers,
    }
    try:
        if isinstance(dataset, DataLoader):
            options = dict.fromkeys(options)
        elif type(dataset) is not TensorDataset and as_tensors(dataset) is not None:
            options["collate_fn"] = options["num_workers"] = None
        elif hasattr(dataset, "get_batch"):
            options["collate_fn"] = None
        return open_source(
            dataset,
            **options,
            seed=0,
            epochs=None,
            world_size=world_size,
            on_demand=True,
            limit=limit,
            machine=machine,
            machines=machines,
        )
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error
