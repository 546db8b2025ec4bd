"""Start of a run: at a checkpoint, at another run's result, or at its beginning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from flowdp.checkpoint.file import read
from flowdp.checkpoint.fingerprint import differences, orders
from flowdp.checkpoint.folder import CheckpointFolder
from flowdp.checkpoint.weights import Weights
from flowdp.data.source import Source
from flowdp.engine.parts import RankParts
from flowdp.errors import CheckpointError, OptionError
from flowdp.options import CheckpointOptions
from flowdp.policy.monitor import Best
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.position import Position
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.learning_rate import LearningRate
from flowdp.replica.rank_state import of_rank, restore, restore_momentum
from flowdp.replica.replica import Replica

__all__ = ["Resumed", "StopPosition", "find"]

ANEW = "the epoch in which the given state stood begins anew: %s"

log = logging.getLogger("flowdp")


@dataclass(frozen=True)
class StopPosition:
    """Position of a run, with the order of batches that it refers to.

    Attributes:
        position: The position.
        fingerprint: Fingerprint of the run.
        learning_rate: As of `LearningRate.state_dict`.
        orders: Checksums of a sampler's draws for the open epochs; None: unknown.
    """

    position: Position
    fingerprint: Mapping[str, Any]
    learning_rate: Mapping[str, Any]
    orders: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Resumed:
    """State that a run resumes from.

    Attributes:
        position: Position of the run.
        model: The module's state_dict.
        buffers: Buffers that are not in that; None: unknown.
        ranks: State of each rank; at least one.
        history: Records of the epochs that were complete.
        ema: Moving average of the parameters; empty: there is none.
        outer: Momentum of the means' outer step; empty: there is none.
        best: Weights of the best epoch, where they were kept.
        fingerprint: Fingerprint of the run; None: unknown.
        orders: Checksums of a sampler's draws for the open epochs; None: unknown.
        path: The file; None where there is none.
        stopped_at: Position inside its epochs, if `position` is merely the beginning of the first open one.
    """

    position: Position
    model: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]
    history: Sequence[EpochMetrics] = ()
    buffers: Mapping[str, Tensor] | None = None
    ema: Mapping[str, Tensor] = field(default_factory=dict)
    outer: Mapping[str, Tensor] = field(default_factory=dict)
    best: Weights | None = None
    fingerprint: Mapping[str, Any] | None = None
    orders: Mapping[int, int] | None = None
    path: Path | None = None
    stopped_at: StopPosition | None = None

    def enter(
        self,
        fingerprint: Mapping[str, Any],
        epochs: int | None,
        max_steps: int | None,
        learning_rate: LearningRate,
        open_source: Callable[[Position], Source],
    ) -> tuple[Resumed, Source]:
        """Open the dataset at the position where the run goes on; returns that state, too.

        A TrainedState may be used for anything: where the epoch in which it stood has other batches in this
        run, that begins anew, and the log says so; a run with another learning rate or other schedulers
        begins with its own. A file demands the same batches and schedulers.

        Args:
            fingerprint: Fingerprint of the run.
            epochs: Number of its epochs; None: no limit.
            max_steps: Steps of all ranks after which it ends; None: no limit.
            learning_rate: Learning rate of a newly built replica.
            open_source: Opens the dataset at a position.

        Raises:
            CheckpointError: Its model or its data are others.
            DataError: A sampler failed.
            OptionError: The run would end before.

        Threads:
            The one that starts the run; samplers draw in it.
        """
        given = self._rated(learning_rate)
        resumed = given._inside(fingerprint)
        resumed.check(fingerprint, epochs, max_steps)
        try:
            source = open_source(resumed.position)
            resumed.check_orders(source)
        except CheckpointError as error:
            if resumed is given:
                raise
            log.warning(ANEW, error)
            return given, open_source(given.position)
        return resumed, source

    def _rated(self, learning_rate: LearningRate) -> Resumed:
        if self.stopped_at is None or not learning_rate.is_like(self.stopped_at.learning_rate):
            return self
        return replace(self, ranks=[{**self.ranks[0], "learning_rate": self.stopped_at.learning_rate}])

    def _inside(self, fingerprint: Mapping[str, Any]) -> Resumed:
        stopped_at = self.stopped_at
        if stopped_at is None:
            return self
        is_open = bool(stopped_at.position.open)
        if found := differences(stopped_at.fingerprint, fingerprint, inside_epoch=is_open):
            if is_open:
                log.warning(ANEW, "; ".join(found))
            return self
        is_new = self.ranks[0]["learning_rate"] is None  # such a scheduler has no epochs to judge
        position = replace(
            stopped_at.position,
            metric=None if is_new else stopped_at.position.metric,
            # Resuming after early stopping must train at least one more epoch.
            best=replace(stopped_at.position.best, bad=0),
        )
        return replace(self, position=position, fingerprint=stopped_at.fingerprint, orders=stopped_at.orders)

    def check(self, fingerprint: Mapping[str, Any], epochs: int | None, max_steps: int | None) -> None:
        """Check that a run can go on from here; see `enter`.

        Raises:
            CheckpointError: Its model or its data are others.
            OptionError: The run would end before.
        """
        position = self.position
        if self.fingerprint is not None:
            others = differences(self.fingerprint, fingerprint, inside_epoch=bool(position.open))
            if others:
                raise self._refused(
                    f"{'; '.join(others)}. Give what it was trained with, or resume=False and another folder "
                    "to start anew"
                )
        # An epoch may have been opened ahead of time, and nothing dealt of it.
        begun = position.done + sum(bool(epoch.position) for epoch in position.open)
        if epochs is not None and epochs < begun:
            raise OptionError(f"epochs={epochs} is less than the {begun} that {self} has begun")
        if max_steps is not None and max_steps < position.global_step:
            raise OptionError(f"max_steps={max_steps} is less than the {position.global_step} of {self}")

    def check_orders(self, source: Source) -> None:
        """Check that partly trained epochs have the batches that they had, in a source that has not started.

        Where a sampler makes them it draws these epochs here, and no other. An IterableDataset is compared
        when it is read.

        Raises:
            CheckpointError: A sampler draws another order.
            DataError: It failed.

        Threads:
            The one that starts the run.
        """
        if source.checks_orders:
            source.orders = self.orders or {}
            return
        begun = [epoch.epoch for epoch in self.position.open]
        for epoch in begun:
            source.indices(epoch, 0)
        now = orders(source, self.position)
        for epoch in begun:
            if self.orders is not None and self.orders.get(epoch) != now.get(epoch):
                raise self._refused(
                    f"epoch {epoch + 1} is partly trained, and the sampler draws another order than it did "
                    "then; samples would be trained twice or left out. Give it a "
                    "`set_epoch` that seeds by the epoch, or a fresh sampler with the same seed, or go on "
                    "from a checkpoint at an epoch's end"
                )

    @property
    def reported(self) -> Sequence[EpochMetrics]:
        """The history without an epoch that is reported once more, with the evaluation that it lacks."""
        owed = self.position.owed_epoch
        return self.history if owed is None else self.history[: owed.epoch]

    def _refused(self, why: str) -> CheckpointError:
        path = None if self.path is None else str(self.path)
        return CheckpointError(
            f"this run cannot go on from {self}: {why}", path=path, version=self.position.versions
        )

    def watching(self, watched: Sequence[str] | None, restores_best: bool) -> Resumed:
        """The same, without early stopping's history where that is of another metric.

        Args:
            watched: Name and mode of the run's metric.
            restores_best: The result is the best model: one that was not kept cannot be beaten.
        """
        before = None if self.fingerprint is None else self.fingerprint.get("monitor")
        if before == watched and not (restores_best and self.best is None):
            return self
        return replace(self, best=None, position=replace(self.position, best=Best()))

    def put_back(self, replicas: Sequence[Replica], ranks: Sequence[int] | None = None) -> None:
        """Restore newly built replicas.

        Args:
            replicas: Those of this machine.
            ranks: Their ranks; None: from 0 on.

        A rank takes the state of the rank of its number; where there are more ranks than before, they begin
        with those of the first ones. Under exact all begin with that of rank 0.

        Raises:
            CheckpointError: Models, optimizers or schedulers are others.
        """
        for rank, replica in zip(range(len(replicas)) if ranks is None else ranks, replicas, strict=True):
            kept = of_rank(self.ranks, rank)
            if isinstance(replica, ExactReplica):  # all take one step together, so from one state
                kept |= {name: self.ranks[0][name] for name in ("optimizers", "scaler", "learning_rate")}
            restore(replica, kept, self.model, self.buffers, self.ema)

    def put_back_momentum(self, ranks: Sequence[RankParts]) -> None:
        """Restore the momentum of the means' outer step; where only one run has any, the log says so.

        Args:
            ranks: Those of this machine, with the models of their replicas restored.

        Raises:
            CheckpointError: It is of other parameters.
        """
        has_outer = any(parts.outer is not None for parts in ranks)
        if self.outer and not has_outer:
            log.warning("the outer momentum of %s is dropped: this run takes no outer step", self)
        elif has_outer and not self.outer:
            log.warning("%s has no outer momentum: it begins at zero", self)
        for parts in ranks if self.outer else ():  # CPU ranks share one, and give it the same values
            if parts.outer is not None:
                restore_momentum(parts.replica, parts.outer, self.outer)

    def __str__(self) -> str:
        return "the given state" if self.path is None else f"checkpoint {str(self.path)!r}"


def find(resume: bool | str | PathLike[str], folder: CheckpointFolder | None) -> Resumed | None:
    """The state to resume from; None: begin at the beginning.

    Args:
        resume: True: the newest checkpoint of the folder, if there is one; or the path of a checkpoint, or
            of a folder of such.
        folder: The folder of the run; it continues the found one.

    Raises:
        CheckpointError: There is none, or it cannot be read.
        OptionError: The run would write into the folder of another one.
    """
    if isinstance(resume, bool):
        start = _newest(folder) if resume and folder is not None else None
    else:
        path = Path(resume)
        start = _newest(CheckpointFolder(CheckpointOptions(path))) if path.is_dir() else (path, read(path))
        if start is None:
            raise CheckpointError(f"the folder {str(path)!r} holds no checkpoint", path=str(path))
    if folder is not None:
        _check_own(folder, None if start is None else start[0])
    return None if start is None else _resumed(*start, folder)


def _resumed(path: Path, state: Mapping[str, Any], folder: CheckpointFolder | None) -> Resumed:
    """The contents of a file; `folder` is the run's own."""
    if folder is not None:
        folder.follow(state)
    return Resumed(
        position=state["position"],
        model=state["model"],
        buffers=state["buffers"],
        ranks=state["ranks"],
        history=state["history"],
        ema=state["ema"],
        outer=state["outer"],
        best=Weights(state["best_model"], state["best_ema"]) if state["best_model"] else None,
        fingerprint=state["fingerprint"],
        orders=state["orders"],
        path=path,
    )


def _newest(folder: CheckpointFolder) -> tuple[Path, dict[str, Any]] | None:
    newest, there = folder.newest(), folder.paths()
    if newest is None and there:
        # To begin anew would be to lose, silently, perhaps days of training.
        raise CheckpointError(
            f"none of the {len(there)} checkpoints in {str(there[0].parent)!r} can be read; the log says "
            "why. Give the path of another one, or resume=False and another folder to begin anew",
            path=str(there[0]),
        )
    return newest


def _check_own(folder: CheckpointFolder, start: Path | None) -> None:
    """Check that the folder is this run's: another run's files there would be removed in time."""
    there = folder.paths()
    if there and (start is None or start.resolve().parent != there[0].resolve().parent):
        raise OptionError(
            f"the folder {str(there[0].parent)!r} holds checkpoints of another run, the newest "
            f"{there[0].name!r}: go on from it with resume=True, or give another folder"
        )
