"""The settings of a run: one frozen record, made and checked by `Trainer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flowdp.checks import check_checkpoints
from flowdp.data.epoch_order import NOTHING_TRAINED, Stride
from flowdp.data.limit import UNLIMITED, Limit
from flowdp.data.loader_source import ReadPlan
from flowdp.data.open_source import is_stream, open_evaluation, open_source
from flowdp.data.source import Source
from flowdp.engine.evaluation import EvaluationOptions
from flowdp.errors import OptionError
from flowdp.machine.policies import ROUNDS
from flowdp.network.team import Team
from flowdp.observe.callbacks import Callback
from flowdp.options import (
    CadenceOptions,
    CheckpointOptions,
    FailureOptions,
    OuterOptions,
    ReadingOptions,
    RuntimeOptions,
)
from flowdp.policy.ledger import ENDLESS
from flowdp.policy.monitor import Monitor
from flowdp.protocol.position import Position
from flowdp.replica.batch_sizes import Sizes
from flowdp.replica.build import ReplicaConfig
from flowdp.trainer.result import TrainedState

__all__ = ["DatasetOption", "RunConfig"]

DatasetOption = (
    Dataset[Any] | DataLoader[Any] | Iterable[Any] | Sequence[Tensor] | Mapping[str, Tensor] | Tensor
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run: arguments of a `Trainer`, checked, and what follows from them.

    Attributes:
        devices: Devices of this machine.
        team: The ranks of all machines.
        metrics: Metrics of the evaluation as they were given, each with a name; None: none.
        limit: Part of each epoch that is trained; None: all.
        ratios: Fixed shares, summing to 1; None: by measured speed. Shape (world_size,).
        monitor: Metric that early stopping watches; None: there is no early stopping.
        restores_best: The run's result is the model of the best epoch.
        has_bar: There is a progress bar.
        tells_devices: A line on stderr names the devices.
        timeline: Whether the run records its timeline; a path: where it is saved at the end.
    """

    devices: tuple[torch.device, ...]
    team: Team
    replica: ReplicaConfig
    dataset: DatasetOption
    reading: ReadingOptions
    limit: Limit | None
    epochs: int | None
    max_steps: int | None
    max_ms: float | None
    cadence: CadenceOptions
    outer: OuterOptions | None
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
    timeline: bool | Path

    @property
    def world_size(self) -> int:
        """Number of ranks of all machines."""
        return self.team.world_size

    @property
    def sizes(self) -> Sizes:
        """Sizes of batches and steps."""
        return self.replica.sizes

    @property
    def outer_step(self) -> OuterOptions | None:
        """The outer step behind each mean; None: the means are plain ones, or one device takes none."""
        is_plain = self.outer is None or self.outer.is_plain or self.world_size == 1
        return None if is_plain else self.outer

    @property
    def alone(self) -> RunConfig:
        """The same on this machine's devices alone, for forwards without a run."""
        return replace(self, team=Team((len(self.devices),), trains_alone=True))

    @property
    def overlaps(self) -> bool:
        """Whether means of all machines travel while the machines train on."""
        team = self.team
        return team.is_spread and team.options.overlap and ROUNDS[self.replica.policy].shares == "steps"

    @property
    def forward_size(self) -> int:
        """Samples of the largest forward of a device, for forwards without a gradient."""
        return max(self.sizes.forwards(self.dataset) or (1,))

    @property
    def watched(self) -> list[str] | None:
        """Name and mode of the metric that early stopping watches; None: there is none."""
        return None if self.monitor is None else [self.monitor.name, self.monitor.mode]

    @property
    def keep_best(self) -> Monitor | None:
        """Metric of the best checkpoints; None: none are kept for their metric."""
        keep_best = None if self.checkpoint is None else self.checkpoint.keep_best
        return None if keep_best is None else Monitor(*keep_best)

    @property
    def has_checkpoint_listeners(self) -> bool:
        """Whether a callback is called with each checkpoint."""
        return any(type(callback).on_checkpoint is not Callback.on_checkpoint for callback in self.callbacks)

    def check(self) -> int | None:
        """Open the datasets, check that a run can be trained on them, and close them.

        Returns:
            Batches of an epoch; None: not known before it is read.

        Raises:
            OptionError: A dataset, or how it is to be read, is wrong; or the run could not be resumed from
                the checkpoints that it is to write.
        """
        evaluation = self.open_evaluation()
        if evaluation is not None:
            evaluation.close()
        source = self.open_source()
        try:
            check_checkpoints(self.checkpoint, source)
            return source.batches
        finally:
            source.close()

    def open_source(self, start: Position | None = None) -> Source:
        """Open the dataset.

        Args:
            start: Position at which reading begins; None: the first epoch's beginning.

        Raises:
            CheckpointError: Reading cannot begin inside an epoch of an IterableDataset.
            OptionError: The dataset, or how it is to be read, is wrong.
        """
        machines = len(self.team.sizes)
        if self.sizes.window is not None and machines > 1 and is_stream(self.dataset):
            raise OptionError(
                "machines share an IterableDataset by whole batches, and policy='exact' shares batches by "
                "samples: use policy='sync' or 'cadence', or a map-style dataset"
            )
        plan = ReadPlan(
            self.epochs,
            # A batch that is shared is for all; of one that several machines share, each rank's part is read.
            1 if self.sizes.window is not None and machines == 1 else len(self.devices),
            start or NOTHING_TRAINED,
            keeps=self.failures.on_failure == "continue",
            limit=self.limit or UNLIMITED,
            stride=Stride(self.team.index, machines),
            is_part=self.team.is_spread and self.team.options.stream == "part",
        )
        return open_source(self.dataset, self.sizes.source, self.reading, plan, seed=self.replica.seed)

    def open_evaluation(self) -> Source | None:
        """Open the dataset of the evaluation; None where there is no evaluation.

        Raises:
            OptionError: The dataset is wrong.
        """
        if self.evaluation is None:
            return None
        is_overfitted = self.limit is not None and self.limit.is_fixed
        limit = self._trained_samples if is_overfitted else Limit(self.evaluation.limit_batches)
        plan = ReadPlan(
            None,
            len(self.devices),
            limit=limit or UNLIMITED,
            stride=Stride(self.team.index, len(self.team.sizes)),
        )
        dataset = self.dataset if is_overfitted else self.evaluation.dataset
        return open_evaluation(dataset, self.forward_size, self.reading, plan)

    @property
    def _trained_samples(self) -> Limit | None:
        """The samples of the limited training, for batches of another size."""
        limit = self.limit
        if limit is None or is_stream(self.dataset):
            return limit
        return replace(limit, batches=None, samples=self.sizes.samples(self.dataset, limit.of(ENDLESS)))

    def as_dev_run(self) -> RunConfig:
        """The same run as a trial: one step of each device and one evaluation; nothing is written."""
        batches, cadence, ratios = 1, self.cadence, self.ratios
        if self.replica.policy != "exact":
            batches = sum(self.sizes.groups)
            lead = 0 if self.replica.policy == "async" else None
            cadence, ratios = CadenceOptions(anchor=1, max_anchor=1, max_batch_diff=lead), None
        evaluation = self.evaluation
        if evaluation is not None:
            evaluation = replace(
                evaluation, every=1, unit="epoch", limit_batches=self.world_size, sanity_check=0
            )
        return replace(
            self,
            limit=Limit(batches),
            epochs=1,
            max_steps=None,
            cadence=cadence,
            ratios=ratios,
            evaluation=evaluation,
            checkpoint=None,
            resume=False,
            callbacks=tuple(callback for callback in self.callbacks if not callback.skips_dev_run),
            timeline=bool(self.timeline),
        )

    def total_steps(self, batches: int | None) -> int | None:
        """Steps of all ranks in the run; None: not known before its end.

        Args:
            batches: Batches of an epoch; None: not known.
        """
        an_epoch = None if batches is None else self.sizes.steps(batches, self.replica.policy)
        by_epochs = None if self.epochs is None or an_epoch is None else self.epochs * an_epoch
        return min((n for n in (by_epochs, self.max_steps) if n is not None), default=None)
