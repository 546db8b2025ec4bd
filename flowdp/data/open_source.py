"""Opening of the user's dataset as the one `Source` of all ranks' batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from flowdp.data.epoch_order import ALL, BatchOrder, EpochOrder, SamplerOrder
from flowdp.data.iterable_source import Measured, StreamReader
from flowdp.data.limit import Limit
from flowdp.data.loader_source import ReadPlan
from flowdp.data.map_source import DemandReader, Reader
from flowdp.data.source import Batch, Source
from flowdp.data.tensor_source import TensorSource
from flowdp.errors import OptionError
from flowdp.options import ReadingOptions
from flowdp.protocol.position import Position
from flowdp.validators import check_int

__all__ = [
    "dataset_length",
    "is_stream",
    "loader_generators",
    "loader_order",
    "open_evaluation",
    "open_source",
    "readable",
]

READS = ("__len__", "__getitem__", "__getitems__", "get_batch")
"""Methods of a dataset that is not iterated."""

Collate = Callable[[list[Any]], Batch]
Pack = Callable[[list[Tensor]], Batch]


def loader_order(dataset: object) -> dict[str, Any] | None:
    """Sampling settings of a DataLoader, as plain data; None for any other dataset."""
    if not isinstance(dataset, DataLoader):
        return None
    own: Any = dataset.batch_sampler
    sampler = dataset.sampler if own is None else getattr(own, "sampler", own)
    return {
        "batch_size": getattr(own, "batch_size", None),
        "drop_last": getattr(own, "drop_last", None),
        "sampler": type(sampler).__name__,
        "batch_sampler": type(own).__name__,
    }


def loader_generators(dataset: object) -> list[torch.Generator]:
    """Generators of a DataLoader and its samplers; empty of anything else."""
    if not isinstance(dataset, DataLoader):
        return []
    inner = getattr(dataset.batch_sampler, "sampler", None)
    owners = (dataset, dataset.sampler, dataset.batch_sampler, inner)
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def open_source(
    dataset: object, batch_size: int | None, reading: ReadingOptions, plan: ReadPlan, *, seed: int = 0
) -> Source:
    """The source of a dataset's batches.

    ::

        open_source((x, y), 64, ...)                            # tensors of equal length: batch (x, y)
        open_source({"x": x, "y": y}, 64, ...)                  # batch {"x": ..., "y": ...}
        open_source(dataset, 64, ...)                           # __getitem__ and collate_fn
        open_source(iterable, 64, ...)                          # an IterableDataset, to its end
        open_source(DataLoader(dataset, 64, shuffle=True), None, ...)       # the loader's settings

    A dataset with `get_batch(indices)` is asked for whole batches; one with
    `__getitems__(indices)` is asked for the samples of a batch at once, as torch does. Of a `DataLoader`, a
    plain RandomSampler becomes flowdp's seeded order, and any other sampler or batch_sampler is iterated once
    per epoch; with batch_size=None each item is a batch, and the length of its first tensor its samples. Its
    batches come in order, and its pin_memory, which speeds up copies to a GPU, has nothing to do here.

    An IterableDataset is iterated anew in each epoch, which ends where its iterator ends. Each worker process
    iterates all of it, unless the dataset looks at `torch.utils.data.get_worker_info()`.

    A resumed run reads its untrained batches, each epoch in its order; see `SamplerOrder` and
    `StreamReader` for the duties of a sampler and an IterableDataset.

    On several machines each opens the whole dataset, and reads the part of it that its own ranks need: a
    source on demand every n-th batch, an IterableDataset all, any other the batches that they `expect`; see
    `StreamReader` and `DemandReader` for the duties of a dataset, `check_identities` for the comparison.

    Args:
        dataset: Tensors of equal length (one, a tuple, a list or a mapping of them), a map-style dataset, an
            IterableDataset, or a torch DataLoader.
        batch_size: Samples of a batch; None: as the DataLoader says. Another one than its own makes its
            batches anew.
        reading: How samples become batches; of a DataLoader nothing is said.
        plan: Epochs and batches to read.
        seed: Seed of the order, >= 0.

    Raises:
        CheckpointError: The run stands inside an epoch of an IterableDataset.
        DataError: A sampler failed, which is tried where there are several machines.
        OptionError: Something in this cannot work, or is not supported.
    """
    if plan.is_part and not is_stream(dataset):
        raise OptionError(
            "machines=MachineOptions(stream='part') is for an IterableDataset, and the dataset is "
            f"{type(dataset).__name__}: give every machine the whole of it, and leave stream out"
        )
    loader, pack = _loader_of(dataset, batch_size, reading)
    own = loader.generator
    options = {
        "num_workers": loader.num_workers,
        "worker_init_fn": loader.worker_init_fn,
        # A sampler may draw from it, too, and must not meet torch's own draws from it for the processes.
        "generator": _generator(seed if own is None else own.initial_seed(), plan.start),
        "prefetch_factor": loader.prefetch_factor,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, IterableDataset):
        size = batch_size or loader.batch_size
        return StreamReader(dataset, size, plan, collate_fn=collate, drop_last=loader.drop_last, **options)
    order = _order_of(loader, seed, batch_size, plan)
    is_shared = plan.stride.step > 1
    if isinstance(order, SamplerOrder) and is_shared:
        order.check_alike(plan.epochs)
    reader = DemandReader if is_shared and not plan.on_demand else Reader
    if loader.batch_sampler is None:
        return reader(dataset, order, plan, collate_fn=Measured(collate), is_counted=True, **options)
    is_plain = loader.num_workers == 0 and collate is default_collate and order.batch_size is not None
    if is_plain and (part := _rows_of_tensors(dataset)):
        stride = plan.stride if plan.on_demand else ALL
        return TensorSource(part[0].tensors, pack, order, part[1], stride)
    return reader(dataset, order, plan, collate_fn=collate, **options)


class _Stream(IterableDataset[Any]):
    """An iterable as an IterableDataset."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def set_epoch(self, epoch: int) -> None:
        """Pass it on, where the iterable has it, too."""
        getattr(self.iterable, "set_epoch", lambda _: None)(epoch)


def readable(dataset: Any) -> Any:
    """A dataset in a form that can be opened.

    An object that can only be iterated is an IterableDataset. A StatefulDataLoader of torchdata becomes a
    plain one, for a run keeps its place by itself.
    """
    if isinstance(dataset, DataLoader) and type(dataset).__module__.startswith("torchdata."):
        return _without_state(dataset)
    has_more = isinstance(dataset, IterableDataset | Iterator) or any(hasattr(dataset, n) for n in READS)
    return _Stream(dataset) if hasattr(dataset, "__iter__") and not has_more else dataset


def _without_state(loader: DataLoader[Any]) -> DataLoader[Any]:
    names = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "multiprocessing_context")
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    options |= {"generator": loader.generator, "prefetch_factor": loader.prefetch_factor}
    own, sampler = loader.batch_sampler, cast("Any", loader.sampler)
    if loader.batch_size is None and own is not None:
        return DataLoader(loader.dataset, batch_sampler=own, **options)
    if not isinstance(loader.dataset, IterableDataset):
        # Its RandomSampler is no subclass of torch's.
        is_random = type(sampler).__name__ == "RandomSampler" and not sampler.replacement
        is_shuffled = is_random and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
        options |= {"shuffle": True} if is_shuffled else {"sampler": sampler}
    return DataLoader(loader.dataset, loader.batch_size, drop_last=loader.drop_last, **options)


def is_stream(dataset: object) -> bool:
    """Whether a dataset, or that of a DataLoader, is an IterableDataset."""
    return isinstance(dataset.dataset if isinstance(dataset, DataLoader) else dataset, IterableDataset)


# ---------------------------------------------------------------- the user's dataset
def dataset_length(dataset: object) -> int | None:
    """Number of samples of a dataset in any form; None where unknown."""
    if isinstance(dataset, DataLoader):
        dataset = dataset.dataset
    if isinstance(dataset, IterableDataset):
        return None
    tensors = _as_tensors(dataset)
    return _length(dataset) if tensors is None else len(tensors[0][0])


def _as_tensors(dataset: object) -> tuple[Sequence[Tensor], Pack] | None:
    """The tensors to gather from, and the function that packs their parts; None for any other dataset."""
    if isinstance(dataset, Tensor):
        named: dict[str, object] = {"the tensor": dataset}
        pack: Pack = itemgetter(0)
    elif isinstance(dataset, Mapping):
        keys = list(dataset)
        named = {repr(key): dataset[key] for key in keys}
        pack = partial(_by_key, keys)
    elif isinstance(dataset, tuple) or (
        isinstance(dataset, list) and any(isinstance(part, Tensor) for part in dataset)
    ):
        named = {f"element {i}": part for i, part in enumerate(dataset)}
        pack = getattr(dataset, "_make", type(dataset))  # a namedtuple is not made like a tuple
    else:
        return None
    return _check_tensors(named), pack


def _check_tensors(named: Mapping[str, object]) -> list[Tensor]:
    if not named:
        raise OptionError("the dataset is empty: give at least one tensor")
    for name, part in named.items():
        if not isinstance(part, Tensor) or part.dim() == 0:
            raise OptionError(
                f"{name} of the dataset is {part!r:.50}, not a tensor whose first dimension is the samples. "
                "Use torch.as_tensor for arrays; a dataset of samples is a list or a class with __len__ "
                "and __getitem__"
            )
    tensors = cast("list[Tensor]", list(named.values()))
    if len({len(tensor) for tensor in tensors}) > 1:
        lengths = ", ".join(f"{name} has {len(tensor)}" for name, tensor in zip(named, tensors, strict=True))
        raise OptionError(f"the tensors of the dataset differ in length (samples): {lengths}")
    return tensors


def _rows_of_tensors(dataset: Any) -> tuple[TensorDataset, Tensor | None] | None:
    """A `TensorDataset` and the rows that a `Subset` has of it, or a subset of that; None for any other.

    The rows of the `TensorDataset` itself are None: all.
    """
    rows: Tensor | None = None
    while type(dataset) is Subset:
        indices = dataset.indices
        try:
            given = indices if isinstance(indices, range | Tensor | np.ndarray) else list(indices)
            own = torch.as_tensor(np.asarray(given)).cpu()
        except (TypeError, ValueError, RuntimeError):
            return None
        if own.dim() != 1 or own.dtype not in (torch.int32, torch.int64):
            return None
        own = own.long()
        if ((own < 0) | (own >= _length(dataset.dataset))).any():
            return None  # counted from the end, or an error: read item by item
        rows = own if rows is None else own[rows]
        dataset = dataset.dataset
    return (dataset, rows) if type(dataset) is TensorDataset else None


def _length(dataset: object) -> int:
    reads = any(hasattr(dataset, name) for name in READS[1:])
    if isinstance(dataset, Iterator):
        raise OptionError(
            f"dataset={dataset!r} can be read only once: give the DataLoader or dataset behind it, or a "
            "torch IterableDataset whose __iter__ begins anew in each epoch"
        )
    if isinstance(dataset, (str, bytes)) or not reads or not hasattr(dataset, "__len__"):
        raise OptionError(
            f"dataset must be tensors of equal length, a dataset with __len__ and __getitem__ (or "
            f"get_batch), or a DataLoader, not {dataset!r}"
        )
    return len(dataset)


def _loader_of(dataset: Any, batch_size: int | None, reading: ReadingOptions) -> tuple[DataLoader[Any], Pack]:
    """A DataLoader that reads a dataset as these options say, and how parts of its tensors are packed."""
    if isinstance(dataset, DataLoader):
        _check_loader(dataset, reading)
        return dataset, list
    if batch_size is None:
        raise OptionError("batch_size is missing: how many samples one device trains in one step")
    check_int("batch_size", batch_size)
    collate, num_workers, drop_last = reading.collate_fn, reading.num_workers or 0, bool(reading.drop_last)
    shuffle = reading.shuffle is not False
    tensors, pack = _as_tensors(dataset) or (None, list)
    has_batches = hasattr(dataset, "get_batch")
    if isinstance(dataset, IterableDataset):
        if reading.shuffle is not None:
            raise OptionError(
                f"shuffle={reading.shuffle!r} has no use for {type(dataset).__name__}: an IterableDataset "
                f"has its own order"
            )
        shuffle = False
    else:
        if (collate is not None and (tensors or has_batches)) or (num_workers and tensors):
            raise OptionError(
                f"whole batches are made of this {type(dataset).__name__}, so collate_fn={collate!r} and "
                f"num_workers={reading.num_workers!r} have no use for it: leave them out, or wrap tensors in "
                "a torch TensorDataset"
            )
        if tensors:
            dataset = TensorDataset(*tensors)
        _check_batches(_length(dataset), batch_size, drop_last)
    if has_batches:
        dataset, collate = _WholeBatches(dataset), _as_it_is
    return DataLoader(
        dataset, batch_size, shuffle, drop_last=drop_last, collate_fn=collate, num_workers=num_workers
    ), pack


def _check_loader(loader: DataLoader[Any], reading: ReadingOptions) -> None:
    for name, value in vars(reading).items():
        if value is not None:
            raise OptionError(
                f"{name}={value!r} was given beside a DataLoader; give it to the DataLoader alone"
            )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise OptionError(
            f"{type(loader).__name__} iterates in its own way, which would be lost: its dataset is read in "
            f"flowdp's order. Give a plain torch DataLoader"
        )


def _order_of(loader: DataLoader[Any], seed: int, given: int | None, plan: ReadPlan) -> BatchOrder:
    limit, first = plan.limit, plan.start.done
    own: Any = loader.batch_sampler
    if own is not None and type(own) is not BatchSampler:
        _check_batches(_samples_of(own), 1, drop_last=False)
        _check_replaced(own, limit)
        return SamplerOrder(own, limit=limit, first=first)
    # Without a batch sampler each item is a batch.
    sampler: Any = loader.sampler if own is None else own.sampler
    batch_size, drop_last = (1, False) if own is None else (given or own.batch_size, own.drop_last)
    length = _length(loader.dataset)
    _check_batches(_samples_of(sampler), batch_size, drop_last)
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    if len(sampler) == length and (is_random or type(sampler) is SequentialSampler):
        shuffle = is_random and not limit.is_fixed
        return EpochOrder(length, batch_size, seed, shuffle, drop_last, limit, first)
    _check_replaced(sampler, limit)
    return SamplerOrder(sampler, batch_size, drop_last, limit, first)


def _samples_of(sampler: Any) -> int:
    if not hasattr(sampler, "__len__"):
        raise OptionError(
            f"the DataLoader's {type(sampler).__name__} has no __len__; the batches of an epoch must be "
            "known when it begins"
        )
    return len(sampler)


def _check_replaced(sampler: object, limit: Limit) -> None:
    """Refuse a sampler where each epoch is to have the same samples: it decides which there are."""
    if limit.is_fixed:
        raise OptionError(
            f"overfit_batches takes the first batches in the dataset's own order, and the DataLoader has a "
            f"{type(sampler).__name__}: give the dataset itself, with a batch_size, or a Subset of it"
        )


def _generator(seed: int, start: Position) -> torch.Generator:
    """Generator of the worker processes' seeds: a resumed run must not draw the first run's numbers again."""
    if start.global_step:
        seed = int(np.random.SeedSequence(seed, spawn_key=(start.global_step,)).generate_state(1)[0])
    return torch.Generator().manual_seed(seed)


def _check_batches(length: int, batch_size: int, drop_last: bool) -> None:
    if length == 0:
        raise OptionError("the dataset is empty: an epoch has no samples")
    if drop_last and length < batch_size:
        raise OptionError(
            f"drop_last=True leaves no batch: an epoch has {length} samples and batch_size is {batch_size}"
        )


# ---------------------------------------------------------------- how batches are put together
class _WholeBatches(Dataset[Any]):
    """A dataset whose `get_batch` stands where torch asks for the samples of a batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._dataset.get_batch(indices)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _by_key(keys: Sequence[object], parts: list[Tensor]) -> dict[object, Tensor]:
    return dict(zip(keys, parts, strict=True))


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
        plan: Epochs and batches to read, on demand.
        name: Purpose of the dataset, for errors.

    Raises:
        DataError: A sampler failed; see `open_source`.
        OptionError: The dataset cannot be read.
    """
    dataset = readable(dataset)
    size: int | None = batch_size
    try:
        shuffle = None if isinstance(dataset, IterableDataset) else False
        reading = replace(reading, shuffle=shuffle, drop_last=False)
        if isinstance(dataset, DataLoader):
            size, reading = None, ReadingOptions()
        elif _as_tensors(dataset) is not None:
            reading = replace(reading, collate_fn=None, num_workers=None)
        elif hasattr(dataset, "get_batch"):
            reading = replace(reading, collate_fn=None)
        return open_source(dataset, size, reading, replace(plan, epochs=None, on_demand=True))
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error
