"""The Trainer: what to train, on what, for how long. It owns the loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flowdp.checkpoint.fingerprint import fingerprint, orders
from flowdp.checkpoint.folder import Store
from flowdp.checkpoint.resume import Resumed
from flowdp.checks import (
    check_backend,
    check_cadence,
    check_capture,
    check_length,
    check_model_and_optimizer,
    check_ratios,
    check_reading,
    check_runtime,
    check_step,
    check_words,
)
from flowdp.data.open_source import dataset_length, loader_order, open_source
from flowdp.data.source import Source
from flowdp.device.discovery import resolve_devices
from flowdp.device.process_tuning import as_tuning
from flowdp.engine.active_runs import check_free
from flowdp.engine.engine import open_engine
from flowdp.engine.evaluation import EvaluationOptions
from flowdp.engine.services import Care
from flowdp.engine.sigterm import SigtermStop, check_sigterm
from flowdp.errors import OptionError
from flowdp.machine.config import GlobalBatch, RunConfig
from flowdp.observe.banner import tell_devices
from flowdp.observe.bar import ProgressBar, wants_progress
from flowdp.observe.callbacks import Callback
from flowdp.observe.observer import Observer
from flowdp.options import (
    CadenceOptions,
    CheckpointOptions,
    FailureOptions,
    Policy,
    Precision,
    ReadingOptions,
    RuntimeOptions,
)
from flowdp.policy.schedule import lr_factor
from flowdp.protocol.messages import Requested
from flowdp.protocol.position import Position
from flowdp.replica.batch_sizes import plan_sizes
from flowdp.replica.build import Parts, build_replicas
from flowdp.replica.custom_step import TrainStep
from flowdp.replica.factories import ModelOption, OptimizerOption, all_of
from flowdp.replica.learning_rate import SchedulerOptions, check_scheduler
from flowdp.replica.replica import LossOption, Replica
from flowdp.result import TrainedState
from flowdp.run import Run
from flowdp.threads.shield import interrupts_held
from flowdp.upkeep import Upkeep
from flowdp.validators import check_number

__all__ = ["Trainer"]

log = logging.getLogger("flowdp")

DatasetOption = Dataset[Any] | DataLoader[Any] | Sequence[Tensor] | Mapping[str, Tensor] | Tensor


class Trainer:
    """Trains one model on several devices of different speed, from this process.

    ::

        run = flowdp.Trainer(
            model=model,
            optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            dataset=(images, labels), batch_size=64, epochs=10,
        ).start()

    Args:
        model: A module, which starts the run with its weights, is not touched in between, and holds the
            result at `join()`; or a factory, called once per device: `f(device)`, `f(device=...)` or `f()`.
            Parts that are in eval mode (`model.train(); model.bn.eval()`) are trained so, on all devices; a
            model that is in eval mode itself is trained in training mode, and the log says so.
            On several devices a parameter that is frozen at the start stays so: one that thaws is an error.
        optimizer: A factory that gets a replica's parameters that require grad (or the replica, if it names
            `model`, for groups by name); or an instance, made for the model instance and rebuilt for each
            replica. With a `train_step` a sequence or a mapping of several.
        loss: Function of (model, batch) that returns the mean loss over the batch, (loss, scalars) or a
            mapping with "loss" (under "exact" also "weight", what the loss counts for where that is not its
            samples: tokens, say); or a criterion, called as `criterion(model(x), y)`.
        dataset: Tensors of equal length (a tuple or a mapping), a map-style dataset, an IterableDataset, or a
            DataLoader.
        batch_size: Samples of one forward of one device; or one number for each device.
        epochs: Passes over the dataset.
        max_steps: Steps of all devices together after which the run ends. At least one of the two.
        train_step: In place of a loss: function of (worker, batch) that does all of a step with
            `worker.model`, `worker.optimizers`, `worker.backward(loss)` and `worker.step(optimizer)`, and
            returns a mapping of scalars ("loss" among them is the loss of the step) or None. One call is one
            step of its device.
        devices: "auto", how many, or a list of devices; a device may repeat.
        policy: Who waits for whom: "sync" averages after every step; "cadence" after rounds in which each
            device takes steps by its speed; "async" while the devices train on; "exact" averages gradients,
            so that all devices together take the step of one that has the whole batch.
        cadence: How long the rounds are.
        global_batch_size: Samples of one step of all devices together, under "exact": each has its part, in
            micro-batches of at most batch_size. None: the sum of the devices' batch sizes. A DataLoader's
            dataset is batched anew.
        seed: Of the order of the samples: the order of an epoch is a function of (seed, epoch) alone; and of
            each CUDA device's generator.
        max_grad_norm: Clip each replica's gradients to this 2-norm; under "exact", the averaged gradient.
        gradient_accumulation_steps: Batches of a step of one device, each with a forward and a backward of
            its own; an epoch's last step may have fewer. Each counts for its samples.
        precision: "32"; "bf16" or "fp16" for autocast, "fp16" with a gradient scaler per replica.
        scheduler: How the learning rate changes; None: it stays.
        evaluation: A dataset, evaluated on the averaged model after every epoch by all devices together, or
            `EvaluationOptions`; the means stand in `EpochMetrics.eval`.
        checkpoint: A folder, for a checkpoint after every epoch, or `CheckpointOptions`. A run that ends
            well, by `stop()` and Ctrl-C too, leaves one at its end.
        resume: True: go on from the newest checkpoint of the folder, if there is one; or the path of a
            checkpoint, or a `TrainedState`.
        callbacks: `Callback` instances, called beside the training; `EarlyStopping` among them ends it.
        progress: True for a progress bar (needs tqdm), "auto" for one where there is a terminal or notebook;
            it steps aside for what is printed in a loop over `run.metrics()` or in a callback. False also
            leaves out the line on stderr that names the devices.
        reading: How the dataset becomes batches: order, workers, collation. A DataLoader says that itself.
        failures: Errors, stalls and NaNs: which end the run, and which it survives.
        runtime: How the run uses devices and process: backend, fixed shares, captured steps, SIGTERM.

    Raises:
        OptionError: An argument is wrong. Nothing has been started then.

    Threads:
        Any. A trainer holds no thread; each `start()` makes a run of its own.
    """

    def __init__(
        self,
        model: ModelOption,
        optimizer: OptimizerOption,
        loss: LossOption | None = None,
        *,
        dataset: DatasetOption,
        batch_size: int | Sequence[int] | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        train_step: TrainStep | None = None,
        devices: Literal["auto"] | int | Sequence[torch.device | str | int] = "auto",
        policy: Policy = "cadence",
        cadence: CadenceOptions | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        gradient_accumulation_steps: int = 1,
        precision: Precision = "32",
        scheduler: SchedulerOptions | None = None,
        evaluation: DatasetOption | EvaluationOptions | None = None,
        checkpoint: str | PathLike[str] | CheckpointOptions | None = None,
        resume: bool | str | PathLike[str] | TrainedState = False,
        callbacks: Sequence[Callback] = (),
        progress: bool | Literal["auto"] = "auto",
        reading: ReadingOptions | None = None,
        failures: FailureOptions | None = None,
        runtime: RuntimeOptions | None = None,
    ) -> None:
        check_words(policy, precision)
        check_length(epochs, max_steps)
        check_model_and_optimizer(model, optimizer)
        check_step(loss, train_step, policy, gradient_accumulation_steps, optimizer)
        schedule = check_scheduler(scheduler, optimizer)
        check_number("max_grad_norm", max_grad_norm, above=True, optional=True)
        reading, self.runtime = check_reading(reading), check_runtime(runtime)
        self.devices = resolve_devices(devices)
        self.cadence = check_cadence(cadence, len(self.devices))
        self.partition_ratios = check_ratios(self.runtime.partition_ratios, policy, len(self.devices))
        self.model = model
        self.dataset = dataset
        self.epochs, self.max_steps = epochs, max_steps
        self.policy = policy
        self.backend = check_backend(self.runtime.backend, policy, self.devices)
        self.upkeep = Upkeep(evaluation, checkpoint, resume, callbacks, failures)
        self.upkeep.check(train_step, policy, len(self.devices))
        event_log = self.runtime.event_log
        self.event_log = None if event_log is None else Path(event_log)
        self.progress, self.tells = wants_progress(progress), progress is not False
        self.tuning = as_tuning(self.runtime.tune_process)
        self.sizes = plan_sizes(
            dataset, batch_size, global_batch_size, gradient_accumulation_steps, policy, len(self.devices)
        )
        self.sizes.check_end(max_steps)
        self._parts = Parts(
            model=model,
            optimizer=optimizer,
            loss=loss,
            train_step=train_step,
            policy=policy,
            sizes=self.sizes,
            seed=seed,
            repeats=self.partition_ratios is not None,
            checks=self.upkeep.failures.check_loss,
            capture=check_capture(self.runtime.capture, train_step),
            precision=precision,
            max_grad_norm=max_grad_norm,
            schedule=(
                schedule.scheduler,
                schedule.unit,
                schedule.lr_lambda,
                lr_factor(schedule.lr_scale_ratio, len(self.devices)),
            ),
        )
        self._reading: dict[str, Any] = {
            "batch_size": self.sizes.source,
            "window": self.sizes.window,
            "seed": seed,
            **vars(reading),
        }
        self.upkeep.check_eval_dataset(**self._eval_reading())
        self._first_source = self._open()
        self._batches = self._first_source.batches

    def __setattr__(self, name: str, value: object) -> None:
        # `_batches` is what `__init__` sets last.
        if "_batches" in self.__dict__ and name in signature(Trainer).parameters:
            raise AttributeError(
                f"{name} of a Trainer is checked with its other arguments, and cannot be set afterwards: "
                f"make another one, Trainer(..., {name}=...)"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        model = type(self.model).__name__ if isinstance(self.model, nn.Module) else "a model factory"
        devices = ", ".join(map(str, self.devices))
        return f"<Trainer of {model} on {devices}, policy={self.policy!r}>"

    @property
    def total_steps(self) -> int:
        """Steps of all devices together: what a schedule of the whole run is made for.

        With gradient accumulation a step has that many batches; under "exact" all devices take one together.

        Raises:
            OptionError: Nobody knows: the dataset is an IterableDataset, and there is no `max_steps`; or the
                devices have batch sizes of their own, and shares by their speed.
        """
        total = self._known_steps()
        if total is None:
            raise OptionError(
                "total_steps is not known before the run ends: an IterableDataset has no length (give "
                "max_steps), or with a batch_size per device it depends on their speeds (schedule by epochs, "
                "or use policy='sync')"
            )
        return total

    def _known_steps(self) -> int | None:
        an_epoch = None if self._batches is None else self.sizes.steps(self._batches, self.policy)
        by_epochs = None if self.epochs is None or an_epoch is None else self.epochs * an_epoch
        return min((n for n in (by_epochs, self.max_steps) if n is not None), default=None)

    def start(self) -> Run:
        """Build the replicas and start the threads; returns while they train.

        A script that ends without `join()`, by an exception or `sys.exit()` too, first trains to the run's
        end; a run that is paused goes on then. In `with trainer.start() as run:` an exception stops the run.

        Raises:
            OptionError: The factories' results cannot be used, the event log cannot be opened, or another
                run holds one of the devices.
            CheckpointError: There is nothing to go on from, or this run cannot.
            CollectiveError: backend="nccl" was asked for and does not work here; the message says why.
            DataError: The dataset's worker processes could not be started.

        All or nothing: an error or a Ctrl-C leaves no thread, and the trainer can be started again.

        Threads:
            The model and optimizer factories, and the dataset's worker processes, run in the calling thread.
        """
        undo = ExitStack()
        try:
            return self._start(undo)
        except BaseException:
            undo.close()
            raise

    def _start(self, undo: ExitStack) -> Run:
        if self.runtime.handle_sigterm:
            check_sigterm()
        if self.tells:
            tell_devices(self.devices)
        check_free(self.devices)
        store, resumed = self.upkeep.begin(undo)
        # A run that goes on has been checked, and draws as one that never ended.
        parts = replace(self._parts, checks=self._parts.checks and resumed is None)
        replicas = build_replicas(parts, self.devices)
        care = self._care(store, replicas[0])
        # The source that was opened to check the arguments serves the first run, from the beginning.
        # Taken out at once: another thread may start this trainer, too.
        first: Source | None = self.__dict__.pop("_first_source", None)
        if resumed is None:
            source, start = first or self._open(None), None
        else:
            rates = replicas[0].learning_rate
            resumed, source = resumed.enter(care.fingerprint, self.epochs, self.max_steps, rates, self._open)
            resumed = resumed.watching(self.upkeep.watched, self.upkeep.restores_best)
            start, care.history, care.best = resumed.position, resumed.history, resumed.best
            resumed.put_back(replicas)
            log.info("going on from %s: step %d", resumed, start.global_step)
        self.upkeep.check_source(source)
        config = self._config(source, replicas, resumed)
        bar = self._bar(start)
        told = self.upkeep.callbacks if bar is None else (bar, *self.upkeep.callbacks)
        aside = nullcontext if bar is None else bar.aside
        module = self.model if isinstance(self.model, nn.Module) else None
        with interrupts_held() as held:
            engine = open_engine(
                self.event_log, config, replicas, source, self.tuning, self.backend, care=care
            )
            undo.callback(engine.take_back)
            observer = Observer(engine.records, told, engine.fail, self.upkeep.failures.stall_timeout)
            if self.runtime.handle_sigterm:
                care.sigterm = SigtermStop(partial(engine.request, Requested("stop")))
            engine.close_observer = observer.close
            engine.saver.orders = partial(orders, source)
            run = Run(engine, module, observer, restores_best=self.upkeep.restores_best, aside=aside)
            engine.start()
            observer.start(run, lambda: engine.failures.first, run.answer, engine.latch.wait)
            held.release()
            engine.begin(run)
        return run

    def _bar(self, start: Position | None) -> ProgressBar | None:
        begun = 0 if start is None else start.global_step
        return ProgressBar(self._known_steps(), self._batches, begun) if self.progress else None

    def _global_batch(self, source: Source, replica: Replica) -> GlobalBatch | None:
        if self.sizes.window is None or source.samples is None:
            return None
        forwards = self.sizes.parts if replica.meets else None
        return GlobalBatch(self.sizes.window, source.samples, replica.least, forwards)

    def _config(self, source: Source, replicas: Sequence[Replica], resumed: Resumed | None) -> RunConfig:
        return RunConfig(
            world_size=len(self.devices),
            batches=source.batches,
            epochs=self.epochs,
            max_steps=self.max_steps,
            policy=self.policy,
            cadence=self.cadence,
            ratios=self.partition_ratios,
            wait_for_metric=replicas[0].learning_rate.waits_for_metric,
            global_batch=self._global_batch(source, replicas[0]),
            groups=self.sizes.groups,
            tasks=self.upkeep.tasks(resumed, inside=source.can_resume_inside and source.unseeded is None),
            on_failure=self.upkeep.failures.on_failure,
            start=None if resumed is None else resumed.position,
        )

    def _care(self, store: Store | None, replica: Replica) -> Care:
        reading = self._reading
        order = loader_order(self.dataset) or {
            "batch_size": reading["batch_size"],
            "shuffle": reading["shuffle"] is not False,
            "drop_last": bool(reading["drop_last"]),
        }
        if reading["window"] is not None:
            order["batch_size"] = None  # of no account
        return self.upkeep.care(
            store,
            fingerprint(
                replica.module,
                all_of(replica.optimizers),
                dataset_length=dataset_length(self.dataset),
                monitor=self.upkeep.watched,
                global_batch_size=reading["window"],
                seed=reading["seed"],
                **order,
            ),
            **self._eval_reading(),
        )

    def _eval_reading(self) -> dict[str, Any]:
        return {
            "batch_size": self.sizes.forward(self.dataset),
            "collate_fn": self._reading["collate_fn"],
            "num_workers": self._reading["num_workers"],
            "world_size": len(self.devices),
        }

    def fit(self) -> TrainedState:
        """Start and join."""
        return self.start().join()

    def _open(self, start: Position | None = None) -> Source:
        world_size = len(self.devices)
        keeps = self.upkeep.failures.on_failure == "continue"
        return open_source(
            self.dataset, epochs=self.epochs, world_size=world_size, start=start, keeps=keeps, **self._reading
        )
