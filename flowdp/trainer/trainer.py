"""The Trainer: a training loop on several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from inspect import signature
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn

from flowdp.checks import (
    check_backend,
    check_cadence,
    check_capture,
    check_checkpoint,
    check_clipping,
    check_failures,
    check_length,
    check_limits,
    check_model_and_optimizer,
    check_outer,
    check_ratios,
    check_record,
    check_resume,
    check_step,
)
from flowdp.data.open_source import readable
from flowdp.engine.evaluation import EvaluationOptions, check_evaluation
from flowdp.engine.metrics import check_metrics
from flowdp.errors import OptionError
from flowdp.observe.bar import wants_progress
from flowdp.observe.callbacks import Callback, check_callbacks, ema_decay_of, monitor_of
from flowdp.observe.timeline_file import check_timeline
from flowdp.options import (
    CadenceOptions,
    CheckpointOptions,
    FailureOptions,
    MachineOptions,
    OuterOptions,
    Policy,
    Precision,
    ReadingOptions,
    RuntimeOptions,
)
from flowdp.policy.tally import MetricArray
from flowdp.replica.batch_sizes import grows, plan_sizes, policy_of
from flowdp.replica.build import ReplicaConfig
from flowdp.replica.custom_step import TrainStep
from flowdp.replica.factories import ModelOption, OptimizerOption
from flowdp.replica.learning_rate import SchedulerOptions, check_scheduler
from flowdp.replica.loss import LossOption
from flowdp.threads.stacks import Folding
from flowdp.trainer.config import DatasetOption, RunConfig
from flowdp.trainer.description import describe_run
from flowdp.trainer.inference import PredictStep, StateOption, predict, validate
from flowdp.trainer.result import TrainedState
from flowdp.trainer.run import Run
from flowdp.trainer.start import start_run
from flowdp.trainer.team_options import check_team, find_team
from flowdp.validators import check_int, one_of

__all__ = ["Trainer"]


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
        model: A module: the run starts with its weights, does not touch it, and writes the result into it at
            `join()`. Or a factory, called once per device: `f(device)`, `f(device=...)` or `f()`.
            Submodules in eval mode (`model.train(); model.bn.eval()`) stay in it, on all devices; a model
            that is in eval mode itself is trained in training mode, and the log says so.
            On several devices a parameter that is frozen at the start must stay frozen.
        optimizer: A factory, called with a replica's parameters that require grad (or with the replica, if
            its argument is named `model`, for groups by name); or an instance made for the model instance,
            which is rebuilt for each replica. With a `train_step` a sequence or a mapping of several.
        loss: Function of (model, batch) that returns the mean loss over the batch, (loss, scalars) or a
            mapping with "loss" (also "weight", where the loss is a mean over something other than samples:
            tokens, say); or a criterion, called as `criterion(model(x), y)`.
        dataset: Tensors of equal length (a tuple or a mapping), a map-style dataset, an IterableDataset, or a
            DataLoader.
        batch_size: Samples of one step of all devices together, so that a number which was found on one
            device holds on any number of them. Under "exact" they share each batch by their speed; under the
            other policies each device takes steps of an equal part, rounded up. A DataLoader has its own.
        per_device_batch_size: Samples of one forward of one device, or a number for each device. Under
            "exact" the most of one forward; without a `batch_size`, that is their sum. Under the other
            policies it stands in place of `batch_size`; beside a DataLoader, of the loader's.
        epochs: Passes over the dataset.
        max_steps: Steps of all devices together after which the run ends.
        max_time: Time of training after which the run ends as by `stop()`, with a last checkpoint: seconds, a
            timedelta, or "DD:HH:MM:SS". It counts from the first step, pauses included; a resumed run has it
            anew. Give at least one of `epochs`, `max_steps` and this; the first that is reached ends the run.
        limit_batches: How many of each epoch's batches are trained at most (int), or which fraction of them
            (float, rounded down, but one at least); under "exact" of its global batches. With it each epoch
            is that short: for `max_steps`, `total_steps`, schedulers and checkpoints. A number needs one
            `batch_size` for all devices, and an IterableDataset a number.
        overfit_batches: Train the first so many batches of the dataset, in its own order, in every epoch. An
            `evaluation` is of the same samples, in place of its own: can the model learn them?
        fast_dev_run: Try everything once: one step of each device (under "exact" one of all together), then
            the evaluation of as many batches as there are devices, then the end. `epochs` and `max_steps` are
            left out, as are `resume`, `checkpoint` (no file is written; `on_checkpoint` is called once) and
            callbacks with `skips_dev_run`.
        train_step: Function of (worker, batch) in place of a loss. It does a whole step with `worker.model`,
            `worker.optimizers`, `worker.backward(loss)` and `worker.step(optimizer)`, and returns a mapping
            of scalars ("loss" among them is the loss of the step) or None. One call is one step of its
            device.
        devices: "auto", a number, or a list of devices; a device may repeat.
        policy: How the replicas are kept one model. "exact" averages gradients, so that all devices together
            take the step that one device would take on the whole batch. "sync" averages parameters after
            every step; "cadence" after rounds in which each device takes as many steps as its speed allows;
            "async" averages while the devices train on.
        cadence: Length of the rounds.
        outer: A momentum on the difference between two means, for "cadence" and "async" with rounds of
            several steps and `batch_size` as the total. On one device, which takes no mean, it has no effect.
        seed: Seed of the order of the samples, which depends on (seed, epoch) alone, and of each GPU's
            generator.
        max_grad_norm: Clip each replica's gradients to this 2-norm; under "exact", the averaged gradient.
        max_grad_value: The same by value: clip each element to this absolute value. One of the two.
        gradient_accumulation_steps: Batches of a step, each with its own forward and backward; an epoch's
            last step may have fewer. Each counts for its samples. Under "exact" all devices share them.
        precision: "32"; "bf16" or "fp16" for autocast, "fp16" with a gradient scaler per replica.
        scheduler: Schedule of the learning rate; None: the rate is constant.
        evaluation: Dataset on which all devices together evaluate the averaged model after every epoch, or
            `EvaluationOptions`; the means are in `EpochMetrics.eval`.
        metrics: torchmetrics objects by their names, or a MetricCollection, for the evaluation: each device
            updates copies of its own, which are merged by their own reductions. Their values are in
            `EpochMetrics.eval`, those with several elements in `eval_arrays`. With a criterion as loss they
            are updated by `metric.update(model(x), y)`; otherwise by `EvaluationOptions.step`.
        checkpoint: A folder, for a checkpoint after every epoch, or `CheckpointOptions`. A run that does not
            fail writes one at its end, also after `stop()` or Ctrl-C.
        resume: True: continue from the newest checkpoint of the folder, if there is one; or the path of a
            checkpoint, or a `TrainedState`.
        callbacks: `Callback` instances, called beside the training; `EarlyStopping` among them may end it.
        timeline: True for a record of spans, events and samples, `run.timeline`; or the path of a .json or
            .html file, which is written at the end of the run.
        progress: True for a progress bar (needs tqdm), "auto" for one on a terminal or in a notebook; it
            makes room for prints in a loop over `run.metrics()` or in a callback. False also leaves out the
            line on stderr that names the devices.
        reading: Shuffling, collation and worker processes; not beside a DataLoader, which has its own.
        failures: Errors, stalls and NaNs: which of them end the run.
        runtime: Use of devices and process: backend, fixed shares, captured steps, SIGTERM.
        machines: True: where a launcher (torchrun, Slurm, Ray Train) has started this script on several
            machines, all of them train one run: each process has its own `devices`, and every one makes the
            same Trainer. `MachineOptions` for the means between them; False: this process trains alone.

    Raises:
        CollectiveError: Another machine of the job was lost, or does not make this Trainer.
        OptionError: An argument is wrong. The datasets are opened, and checked, by `start()` or `check()`.

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
        batch_size: int | None = None,
        per_device_batch_size: int | Sequence[int] | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        max_time: float | timedelta | str | None = None,
        limit_batches: int | float | None = None,
        overfit_batches: int | None = None,
        fast_dev_run: bool = False,
        train_step: TrainStep | None = None,
        devices: Literal["auto"] | int | Sequence[torch.device | str | int] = "auto",
        policy: Policy = "exact",
        cadence: CadenceOptions | None = None,
        outer: OuterOptions | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        gradient_accumulation_steps: int = 1,
        precision: Precision = "32",
        scheduler: SchedulerOptions | None = None,
        evaluation: DatasetOption | EvaluationOptions | None = None,
        metrics: Mapping[str, object] | nn.Module | None = None,
        checkpoint: str | PathLike[str] | CheckpointOptions | None = None,
        resume: bool | str | PathLike[str] | TrainedState = False,
        callbacks: Sequence[Callback] = (),
        timeline: bool | str | PathLike[str] = False,
        progress: bool | Literal["auto"] = "auto",
        reading: ReadingOptions | None = None,
        failures: FailureOptions | None = None,
        runtime: RuntimeOptions | None = None,
        machines: bool | MachineOptions = True,
    ) -> None:
        # First, so that an error of one machine alone finds the others, which wait for it.
        chosen, team = find_team(devices, machines)
        with Folding(), team.telling():
            one_of("policy", policy, Policy)
            one_of("precision", precision, Precision)
            max_ms = check_length(epochs, max_steps, max_time)
            check_model_and_optimizer(model, optimizer)
            runtime = check_record("runtime", runtime, RuntimeOptions)
            dataset = readable(dataset)
            given, policy = policy, policy_of(policy, team.world_size, dataset, train_step)
            check_step(loss, train_step, policy, gradient_accumulation_steps, optimizer)
            check_clipping(max_grad_norm, max_grad_value)
            check_int("seed", seed, least=0)
            check_backend(runtime.backend, policy, chosen)
            ratios = check_ratios(runtime.partition_ratios, policy, team.world_size)
            failures = check_failures(failures, policy, team.world_size)
            sizes = plan_sizes(
                dataset,
                batch_size,
                per_device_batch_size,
                gradient_accumulation_steps,
                policy,
                team.world_size,
            )
            sizes.check_end(max_steps)
            listed = check_callbacks(callbacks)
            save = check_checkpoint(checkpoint)
            if not isinstance(resume, TrainedState):
                check_resume(resume, save)
            monitor, restores_best = monitor_of(listed)
            judges = monitor is not None or (save is not None and save.keep_best is not None)
            options = check_evaluation(evaluation, train_step, judges=judges)
            step = None if options is None else options.step
            check_metrics(metrics, evaluates=options is not None, step=step, loss=loss)
            reading = check_record("reading", reading, ReadingOptions)
            limit = check_limits(limit_batches, overfit_batches, fast_dev_run, sizes, reading)
            rounds = check_cadence(cadence, given, team.world_size)
            outer = check_outer(outer, given, rounds, runtime.backend, chosen)
            config = RunConfig(
                devices=chosen,
                team=team,
                replica=ReplicaConfig(
                    model=model,
                    optimizer=optimizer,
                    loss=loss,
                    train_step=train_step,
                    policy=policy,
                    sizes=sizes,
                    seed=seed,
                    precision=precision,
                    max_grad_norm=max_grad_norm,
                    max_grad_value=max_grad_value,
                    scheduler=check_scheduler(
                        scheduler, optimizer, grows=grows(dataset, batch_size, per_device_batch_size, policy)
                    ),
                    capture=check_capture(runtime.capture, train_step),
                    is_capture_chosen=runtime.capture != "auto",
                    ema_decay=ema_decay_of(listed),
                    repeats=ratios is not None,
                    checks_loss=failures.check_loss,
                    launch_limit=runtime.launch_limit,
                ),
                dataset=dataset,
                reading=reading,
                limit=limit,
                epochs=epochs,
                max_steps=max_steps,
                max_ms=max_ms,
                cadence=rounds,
                outer=outer,
                ratios=ratios,
                evaluation=options,
                metrics=metrics,
                checkpoint=save,
                resume=resume,
                callbacks=listed,
                monitor=monitor,
                restores_best=restores_best,
                failures=failures,
                runtime=runtime,
                has_bar=wants_progress(progress),
                tells_devices=progress is not False,
                timeline=check_timeline(timeline),
            )
            check_team(config)
        self.config = config.as_dev_run() if fast_dev_run else config

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": it is of the run, run = trainer.start(); run.{name}" if hasattr(Run, name) else ""
            raise AttributeError(f"'Trainer' object has no attribute {name!r}{hint}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in signature(Trainer).parameters:
            raise AttributeError(
                f"{name} of a Trainer is checked with its other arguments, and cannot be set afterwards: "
                f"make another one, Trainer(..., {name}=...)"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        options = self.config.replica
        model = type(options.model).__name__ if isinstance(options.model, nn.Module) else "a model factory"
        devices = ", ".join(map(str, self.config.devices))
        return f"<Trainer of {model} on {devices}, policy={options.policy!r}>"

    def __str__(self) -> str:
        """Description of a run, as `print(trainer)` shows it; it opens the datasets, as `check()` does."""
        return describe_run(self.config)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of a run, one per rank."""
        return self.config.devices

    def check(self) -> None:
        """Open the datasets, check that a run can train on them, and close them; `start()` does it, too.

        Raises:
            OptionError: A dataset, or how it is to be read, is wrong.
        """
        self.config.check()

    @property
    def total_steps(self) -> int:
        """Steps of all devices together in the whole run, for schedules.

        With gradient accumulation a step has that many batches; under "exact" all devices take one together.

        Raises:
            OptionError: They are not known: the dataset is an IterableDataset without `max_steps`, or the
                devices have batch sizes of their own and shares by their speed. Or the dataset is wrong.
        """
        total = self.config.total_steps(self.config.check())
        if total is None:
            raise OptionError(
                "total_steps is not known before the run ends: an IterableDataset has no length (give "
                "max_steps), or with a per_device_batch_size that differs it depends on the devices' speeds "
                "(schedule by epochs, or use policy='sync' or 'exact')"
            )
        return total

    def start(self) -> Run:
        """Build the replicas and start the threads; returns while they train.

        A script that ends without `join()`, also by an exception or `sys.exit()`, first trains to the run's
        end, and continues a paused run for that. In `with trainer.start() as run:` an exception stops it.

        Raises:
            OptionError: A dataset or a factory's result cannot be used, or another run holds one of the
                devices.
            CheckpointError: There is no checkpoint to resume from, or this run does not fit it.
            CollectiveError: backend="nccl" was asked for and does not work here; the message says why.
            DataError: The dataset's worker processes could not be started.

        All or nothing: an error or a Ctrl-C leaves no thread, and the trainer can be started again.

        Threads:
            The model and optimizer factories, and the dataset's worker processes, run in the calling thread.
        """
        undo = ExitStack()
        try:
            with Folding(), self.config.team.starting():
                return start_run(self.config, undo)
        except BaseException:
            undo.close()
            raise

    def fit(self) -> TrainedState:
        """Start and join."""
        run = self.start()
        with Folding(KeyboardInterrupt):
            return run.join()

    def validate(self, state: StateOption | None = None) -> dict[str, float | MetricArray]:
        """Evaluate on the evaluation's dataset, by all devices together, without a run.

        Args:
            state: Weights to evaluate: a result, or the path of a checkpoint file or folder. None: those that
                the Trainer's model has now, which is not touched.

        Returns:
            Means and metrics by their names, as an epoch's `eval` and `eval_arrays` have them.

        Raises:
            CheckpointError: The checkpoint cannot be read, or is of another model.
            DataError: The dataset failed.
            OptionError: There is no evaluation, or another run holds one of the devices.
            StepError: The user's code raised; it names rank, device, batch and samples.

        Threads:
            Any; one per device is started, and ended before this returns, also by a Ctrl-C.
        """
        with Folding(KeyboardInterrupt):
            return validate(self.config, state)

    def predict(
        self,
        dataset: DatasetOption,
        step: PredictStep | None = None,
        *,
        state: StateOption | None = None,
        batch_size: int | None = None,
    ) -> Any:
        """Compute the model's outputs for each sample of a dataset, by all devices together, without a run.

        ::

            probabilities = trainer.predict(images, lambda model, x: model(x).softmax(1))

        Args:
            dataset: As the Trainer's; read in its own order, with the Trainer's `collate_fn` and
                `num_workers`. A DataLoader that shuffles is refused.
            step: Function of (model, batch) that returns tensors, or lists, as long as the batch; in tuples,
                mappings or dataclasses. None: the model's forward, for batches that are one tensor and, with
                a criterion as loss, for x of (x, y).
            state: See `validate`.
            batch_size: Samples of a batch; None: as in the training.

        Returns:
            The output as one device would return it for all samples at once, on the CPU: tensors
            concatenated along their first dimension, in the order of the samples. A list with an entry for
            each sample where `step` returns one for each batch, or where the tensors of several batches do
            not fit together.

        Raises:
            CheckpointError: The checkpoint cannot be read, or is of another model.
            DataError: The dataset failed, or is empty.
            OptionError: An argument is wrong, or another run holds one of the devices.
            StepError: The user's code raised; it names rank, device, batch and samples.

        Threads:
            As `validate`.
        """
        with Folding(KeyboardInterrupt):
            return predict(self.config, dataset, step, state, batch_size)
