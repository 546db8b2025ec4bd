"""The settings of a run: one frozen record, made and checked by `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flowdp.data.open_evaluation import open_evaluation
from flowdp.data.open_source import open_source
from flowdp.data.source import Source
from flowdp.engine.evaluation import EvaluationOptions
from flowdp.observe.callbacks import Callback
from flowdp.options import (
    CadenceOptions,
    CheckpointOptions,
    FailureOptions,
    ReadingOptions,
    RuntimeOptions,
)
from flowdp.policy.monitor import Monitor
from flowdp.protocol.position import Position
from flowdp.replica.batch_sizes import Sizes
from flowdp.replica.build import ReplicaConfig
from flowdp.result import TrainedState

__all__ = ["DatasetOption", "RunConfig"]

DatasetOption = Dataset[Any] | DataLoader[Any] | Sequence[Tensor] | Mapping[str, Tensor] | Tensor


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run: arguments of a `Trainer`, checked, and what follows from them.

    Attributes:
        metrics: Metrics of the evaluation as they were given, each with a name; None: none.
        ratios: Fixed shares, summing to 1; None: by measured speed. Shape (world_size,).
        monitor: Metric that early stopping watches; None: there is no early stopping.
        restores_best: The run's result is the model of the best epoch.
        has_bar: There is a progress bar.
        tells_devices: A line on stderr names the devices.
    """

    devices: tuple[torch.device, ...]
    replica: ReplicaConfig
    dataset: DatasetOption
    reading: ReadingOptions
    epochs: int | None
    max_steps: int | None
    max_ms: float | None
    cadence: CadenceOptions
    ratios: tuple[float, ...] | None
    evaluation: EvaluationOptions | None
    metrics: object
    checkpoint: CheckpointOptions | None
    resume: bool | str | PathLike[str] | TrainedState
    callbacks: tuple[Callback, ...]
    monitor: Monitor | None
    restores_best: bool
    failures: FailureOptions
    runtime: RuntimeOptions
    has_bar: bool
    tells_devices: bool

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def sizes(self) -> Sizes:
        """Sizes of batches and steps."""
        return self.replica.sizes

    @property
    def watched(self) -> list[str] | None:
        """Name and mode of the metric that early stopping watches; None: there is none."""
        return None if self.monitor is None else [self.monitor.name, self.monitor.mode]

    @property
    def has_checkpoint_listeners(self) -> bool:
        """Whether a callback is called with each checkpoint."""
        return any(type(one).on_checkpoint is not Callback.on_checkpoint for one in self.callbacks)

    def open_source(self, start: Position | None = None) -> Source:
        """Open the dataset.

        Args:
            start: Position at which reading begins; None: the first epoch's beginning.

        Raises:
            CheckpointError: Reading cannot begin inside an epoch of an IterableDataset.
            OptionError: The dataset, or how it is to be read, is wrong.
        """
        return open_source(
            self.dataset,
            batch_size=self.sizes.source,
            window=self.sizes.window,
            seed=self.replica.seed,
            epochs=self.epochs,
            world_size=self.world_size,
            start=start,
            keeps=self.failures.on_failure == "continue",
            **vars(self.reading),
        )

    def open_evaluation(self) -> Source | None:
        """Open the dataset of the evaluation; None where there is no evaluation.

        Raises:
            OptionError: The dataset is wrong.
        """
        if self.evaluation is None:
            return None
        return open_evaluation(
            self.evaluation.dataset,
            batch_size=self.sizes.forward(self.dataset),
            collate_fn=self.reading.collate_fn,
            num_workers=self.reading.num_workers,
            world_size=self.world_size,
        )

    def total_steps(self, batches: int | None) -> int | None:
        """Steps of all ranks in the run; None: not known before its end.

        Args:
            batches: Batches of an epoch; None: not known.
        """
        an_epoch = None if batches is None else self.sizes.steps(batches, self.replica.policy)
        by_epochs = None if self.epochs is None or an_epoch is None else self.epochs * an_epoch
        return min((n for n in (by_epochs, self.max_steps) if n is not None), default=None)
