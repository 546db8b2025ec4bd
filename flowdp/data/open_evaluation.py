"""Source of an evaluation or a prediction: a dataset in its own order, read on demand."""

from __future__ import annotations

from dataclasses import replace

from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flowdp.data.loader_source import ReadPlan
from flowdp.data.open_source import Source, as_tensors, open_source
from flowdp.errors import OptionError
from flowdp.options import ReadingOptions

__all__ = ["open_evaluation"]


def open_evaluation(
    dataset: object, batch_size: int, reading: ReadingOptions, plan: ReadPlan, *, name: str = "evaluation"
) -> Source:
    """The source of an evaluation: each epoch of it is one, in the dataset's own order, begun on demand.

    Of several machines, number m of M evaluates the batches m, m + M, m + 2 M, ..., and reads these alone; of
    an IterableDataset it reads all. They keep their numbers in the whole, by which the results of all
    machines are put in order.

    Args:
        dataset: See `open_source`. A DataLoader has its own settings.
        batch_size: Samples of a batch.
        reading: That of the training; of it `collate_fn` and `num_workers` hold where they have a use.
        plan: What is read, and for whom; on demand.
        name: Purpose of the dataset, for errors.

    Raises:
        DataError: A sampler failed; see `open_source`.
        OptionError: The dataset cannot be read.
    """
    size: int | None = batch_size
    try:
        shuffle = None if isinstance(dataset, IterableDataset) else False
        reading = replace(reading, shuffle=shuffle, drop_last=False)
        if isinstance(dataset, DataLoader):
            size, reading = None, ReadingOptions()
        elif type(dataset) is not TensorDataset and as_tensors(dataset) is not None:
            reading = replace(reading, collate_fn=None, num_workers=None)
        elif hasattr(dataset, "get_batch"):
            reading = replace(reading, collate_fn=None)
        return open_source(dataset, size, reading, replace(plan, epochs=None, on_demand=True))
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error
