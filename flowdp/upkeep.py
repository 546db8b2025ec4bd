"""What a Trainer was told of keeping a run: checkpoints, evaluation, callbacks, and what may go wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from typing import Any

from flowdp.checkpoint.folder import Store
from flowdp.checkpoint.resume import Resumed, find
from flowdp.checks import check_checkpoint, check_failures, check_resume
from flowdp.data.open_evaluation import open_evaluation
from flowdp.data.open_source import Source
from flowdp.engine.evaluation import Evaluator, check_evaluation
from flowdp.engine.services import Care
from flowdp.errors import OptionError
from flowdp.machine.barrier_tasks import BarrierPlan, SavePlan
from flowdp.observe.callbacks import Callback, check_callbacks, monitor_of
from flowdp.options import CheckpointOptions, Policy
from flowdp.result import TrainedState
from flowdp.threads.shield import interrupts_held

__all__ = ["Upkeep"]

log = logging.getLogger("flowdp")


@dataclass
class Upkeep:
    """As of `Trainer`, which documents them.

    Raises:
        OptionError: One is wrong.
    """

    evaluation: Any
    checkpoint: str | PathLike[str] | CheckpointOptions | None
    resume: bool | str | PathLike[str] | TrainedState
    callbacks: Sequence[Callback]
    failures: Any

    def check(self, train_step: object, policy: Policy, world_size: int) -> None:
        """Check all of them, against each other and against what is trained, and bring them into one form.

        Raises:
            OptionError: One is wrong.
        """
        self.evaluation = check_evaluation(self.evaluation, train_step)
        self.failures = check_failures(self.failures, policy, world_size)
        self.checkpoint = check_checkpoint(self.checkpoint)
        if not isinstance(self.resume, TrainedState):
            check_resume(self.resume, self.checkpoint)
        self.callbacks = check_callbacks(self.callbacks)
        self._monitor, self.restores_best = monitor_of(self.callbacks)

    @property
    def watched(self) -> list[str] | None:
        """Name and mode of what early stopping watches; None where there is none."""
        return None if self._monitor is None else [self._monitor.name, self._monitor.mode]

    def check_eval_dataset(self, **reading: Any) -> None:
        """Check that the evaluation's dataset can be read.

        Args:
            reading: As of `Evaluator`.

        Raises:
            OptionError: It cannot.
        """
        if self.evaluation is not None:
            open_evaluation(self.evaluation.dataset, **reading)

    def check_source(self, source: Source) -> None:
        """Check that a run of this dataset can go on from the checkpoints that this asks for.

        Raises:
            OptionError: It cannot.
        """
        save = self.checkpoint
        if not isinstance(save, CheckpointOptions):
            return
        if save.unit != "epoch" and not source.can_resume_inside:
            raise OptionError(
                f"checkpoint.unit={save.unit!r} would write checkpoints inside an epoch of an "
                "IterableDataset, from which nothing can go on: use unit='epoch'"
            )
        if source.unseeded is None:
            return
        advice = "give it a generator with a seed, or `set_epoch`"
        if save.unit != "epoch":
            raise OptionError(
                f"checkpoint.unit={save.unit!r} would write checkpoints inside an epoch of the sampler "
                f"{source.unseeded}, which draws another order each time, so that nothing could go on from "
                f"there: {advice}, or use unit='epoch'"
            )
        log.warning(
            "the sampler %s draws another order each time, so checkpoints are written at the ends of epochs "
            "alone, and a run that is stopped inside an epoch begins that one anew; %s, and it goes on there",
            source.unseeded,
            advice,
        )

    def tasks(self, resumed: Resumed | None, *, inside: bool = True) -> BarrierPlan:
        """What the ranks do while all stand still.

        Args:
            resumed: What the run goes on from.
            inside: The dataset can be entered inside an epoch.
        """
        is_saved = resumed is not None and resumed.path is not None and isinstance(self.resume, bool)
        save = None
        if isinstance(self.checkpoint, CheckpointOptions):
            save = SavePlan(self.checkpoint.every, self.checkpoint.unit)
        elif self._has_listeners:
            save = SavePlan(1, "epoch")
        return BarrierPlan(
            save=save,
            eval_every=None if self.evaluation is None else self.evaluation.every,
            monitor=self._monitor,
            keeps_best=self.restores_best,
            is_saved=is_saved,
            inside=inside,
        )

    def begin(self, undo: ExitStack) -> tuple[Store | None, Resumed | None]:
        """The folder of the checkpoints, taken for this run, and what the run goes on from.

        Args:
            undo: Takes what gives the folder back.

        Raises:
            CheckpointError: There is nothing to go on from, or it cannot be read.
            OptionError: The folder is that of another run.
        """
        store = Store(self.checkpoint) if isinstance(self.checkpoint, CheckpointOptions) else None
        if store is not None:
            undo.callback(store.give_back)
            with interrupts_held():
                store.take()
        if not isinstance(self.resume, TrainedState):
            return store, find(self.resume, store)
        find(False, store)  # its folder, too, must be its own
        state = self.resume
        kept = (state.state_dict, state.optimizer_state, state.history, state.global_step)
        return store, Resumed.of(*kept, state.stood)

    def care(self, store: Store | None, fingerprint: Mapping[str, Any], **reading: Any) -> Care:
        """What watches over a run and keeps its state; the evaluation's dataset is opened.

        Args:
            store: The folder.
            fingerprint: Of the run.
            reading: As of `Evaluator`, how its dataset is read.
        """
        evaluator = None
        if self.evaluation is not None:
            evaluator = Evaluator(self.evaluation.dataset, self.evaluation.step, **reading)
        return Care(
            store=store,
            fingerprint=fingerprint,
            has_listeners=self._has_listeners,
            evaluator=evaluator,
            stall_timeout_s=self.failures.stall_timeout,
            on_nan=self.failures.on_nan,
        )

    @property
    def _has_listeners(self) -> bool:
        return any(type(one).on_checkpoint is not Callback.on_checkpoint for one in self.callbacks)
