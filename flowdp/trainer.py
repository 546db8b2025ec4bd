"""The Trainer: what to train, on what, for how long. It owns the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from flowdp.data.dataset import open_source
from flowdp.data.reader import Source
from flowdp.device.process import ProcessTuning, as_tuning
from flowdp.device.streams import Lane, open_lanes
from flowdp.device.tensors import FlatReplica
from flowdp.device.topology import devices as find_devices
from flowdp.device.topology import resolve_devices
from flowdp.engine.build import (
    ModelOption,
    OptimizerOption,
    build_models,
    build_optimizer,
    equal_start,
    seed_devices,
    slow_optimizer,
)
from flowdp.engine.launch import Engine, check_free
from flowdp.engine.learning_rate import (
    LearningRate,
    LrLambda,
    SchedulerOption,
    check_schedule,
)
from flowdp.engine.replica import LossOption, Replica, loss_function
from flowdp.errors import OptionError
from flowdp.machine.coordinator import RunConfig
from flowdp.observe.bar import show_progress, wants_progress
from flowdp.options import Backend, CadenceOptions, Policy, Precision, SchedulerUnit, one_of
from flowdp.policy.schedule import lr_factor
from flowdp.policy.shares import normalised_ratios
from flowdp.run import Run, TrainedState

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
        optimizer: A factory that gets the parameters that require grad (or the module, if it names `model`);
            or an instance, made for the model instance and rebuilt for each replica.
        loss: Function of (model, batch) that returns the mean loss over the batch, (loss, scalars) or a
            mapping with "loss"; or a criterion, called as `criterion(model(x), y)`.
        dataset: Tensors of equal length (a tuple or a mapping), a map-style dataset, an IterableDataset, or a
            DataLoader.
        batch_size: Samples of one step of one device.
        epochs: Passes over the dataset.
        max_steps: Steps of all devices together after which the run ends. At least one of the two.
        devices: "auto", how many, or a list of devices; a device may repeat.
        policy: Who waits for whom: "sync" averages after every step; "cadence" after rounds in which each
            device takes steps by its speed; "async" while the devices train on.
        backend: How the bytes move, never who waits: "nccl" (cupy; CUDA devices, one rank each), "local"
            (within this process: CPU, or CUDA devices that reach each other), "cpu" (through host memory);
            "auto" takes the first of these that works here. "async" has no "nccl".
        cadence: How long the rounds are.
        partition_ratios: Fixed shares of the work, one per device; None: by measured speed.
        shuffle: None is True, or what the DataLoader says.
        seed: Of the order of the samples: the order of an epoch is a function of (seed, epoch) alone; and of
            each CUDA device's generator.
        drop_last: Leave out an epoch's last batch where it is not full. None is False.
        collate_fn: Makes a batch of a list of samples. None is torch's.
        num_workers: Processes that read the dataset. None is 0.
        max_grad_norm: Clip each replica's gradients to this 2-norm.
        precision: "32"; "bf16" or "fp16" for autocast, "fp16" with a gradient scaler per replica.
        scheduler: Factory of a torch scheduler, or an instance made for the optimizer instance.
        scheduler_unit: What the scheduler counts, "step" (of all devices) or "epoch".
        lr_lambda: Factor on the learning rate as a function of the global step, in place of a scheduler.
        lr_scale_ratio: Multiplies the learning rate by 1 + ratio * (devices - 1).
        progress: True for a progress bar (needs tqdm), "auto" for one where there is a terminal or notebook.
        story: File that the coordinator's events are written to, for `python -m flowdp.sim --replay`.
        tune_process: Process-wide settings while a run lives (see `ProcessTuning`); False leaves all alone.

    Raises:
        OptionError: An argument is wrong. Nothing has been started then.

    Threads:
        Any. A trainer holds no thread; each `start()` makes a run of its own.
    """

    def __init__(
        self,
        model: ModelOption,
        optimizer: OptimizerOption,
        loss: LossOption,
        *,
        dataset: DatasetOption,
        batch_size: int | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        devices: Literal["auto"] | int | Sequence[torch.device | str | int] = "auto",
        policy: Policy = "cadence",
        backend: Backend = "auto",
        cadence: CadenceOptions | None = None,
        partition_ratios: Sequence[float] | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        max_grad_norm: float | None = None,
        precision: Precision = "32",
        scheduler: SchedulerOption | None = None,
        scheduler_unit: SchedulerUnit | None = None,
        lr_lambda: LrLambda | None = None,
        lr_scale_ratio: float = 0.0,
        progress: bool | Literal["auto"] = "auto",
        story: str | PathLike[str] | None = None,
        tune_process: bool | ProcessTuning = True,
    ) -> None:
        one_of("policy", policy, Policy)
        one_of("backend", backend, Backend)
        one_of("precision", precision, Precision)
        _check_length(epochs, max_steps)
        _check_callables(model, optimizer, loss)
        check_schedule(scheduler, scheduler_unit, lr_lambda, optimizer)
        if max_grad_norm is not None:
            _check_number("max_grad_norm", max_grad_norm, above=True)
        _check_number("lr_scale_ratio", lr_scale_ratio, above=False)
        self.devices = resolve_devices(devices)
        self.cadence = _check_cadence(cadence, len(self.devices))
        self.partition_ratios = _check_ratios(partition_ratios, policy, len(self.devices))
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.dataset = dataset
        self.epochs = epochs
        self.max_steps = max_steps
        self.policy = policy
        self.backend = _check_backend(backend, policy, self.devices)
        self.max_grad_norm = max_grad_norm
        self.precision = precision
        self.scheduler = scheduler
        self.scheduler_unit = scheduler_unit
        self.lr_lambda = lr_lambda
        self.lr_scale_ratio = lr_scale_ratio
        self.story = _check_story(story)
        self.progress = wants_progress(progress)
        self.tuning = as_tuning(tune_process)
        self._reading: dict[str, Any] = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
            "collate_fn": collate_fn,
            "num_workers": num_workers,
        }
        self._first_source: Source | None = self._open()
        self._batches = self._first_source.batches

    @property
    def total_steps(self) -> int:
        """Steps of all devices together: what a schedule of the whole run is made for.

        Raises:
            OptionError: Nobody knows: the dataset is an IterableDataset, and there is no `max_steps`.
        """
        total = self._known_steps()
        if total is None:
            raise OptionError(
                "total_steps is not known before the run ends, for an IterableDataset has no length: give "
                "max_steps"
            )
        return total

    def _known_steps(self) -> int | None:
        by_epochs = None if self.epochs is None or self._batches is None else self.epochs * self._batches
        return min((n for n in (by_epochs, self.max_steps) if n is not None), default=None)

    def start(self) -> Run:
        """Build the replicas and start the threads; returns while they train.

        Raises:
            OptionError: The factories' results cannot be used, the story's file cannot be opened, or another
                run holds one of the devices.
            CollectiveError: backend="nccl" was asked for and does not work here; the message says why.
            DataError: The dataset's worker processes could not be started.
            OSError: The story's file cannot be written.

        Threads:
            The model and optimizer factories, and the dataset's worker processes, run in the calling thread.
        """
        log.info("%s", find_devices(probe=False))
        check_free(self.devices)
        lanes = open_lanes(self.devices)
        modules = build_models(self.model, lanes)
        flats = equal_start(modules, lanes)
        replicas = [self._replica(*parts) for parts in zip(modules, flats, lanes, strict=True)]
        seed_devices(self.devices, self._reading["seed"])
        if lanes[0].is_async and (advice := slow_optimizer(replicas[0].optimizer)):
            log.info("%s", advice)
        # The source that was opened to check the arguments serves the first run.
        source, self._first_source = self._first_source or self._open(), None
        config = RunConfig(
            world_size=len(self.devices),
            batches=source.batches,
            epochs=self.epochs,
            max_steps=self.max_steps,
            policy=self.policy,
            cadence=self.cadence,
            ratios=self.partition_ratios,
            wait_for_metric=replicas[0].learning_rate.waits_for_metric,
        )
        engine = self._engine(config, replicas, source)
        engine.start()
        bar = show_progress(engine.records, self._known_steps(), self._batches) if self.progress else None
        return Run(engine, self.model if isinstance(self.model, nn.Module) else None, bar)

    def fit(self) -> TrainedState:
        """Start and join."""
        return self.start().join()

    def _open(self) -> Source:
        return open_source(self.dataset, epochs=self.epochs, world_size=len(self.devices), **self._reading)

    def _engine(self, config: RunConfig, replicas: Sequence[Replica], source: Source) -> Engine:
        if self.story is None:
            return Engine(config, replicas, source, self.tuning, self.backend)
        file = _open_story(self.story)
        try:
            return Engine(config, replicas, source, self.tuning, self.backend, file.write, file.close)
        except OSError:  # of the first line, on a full disk; so there is nothing more to write either
            with suppress(OSError):
                file.close()
            raise

    def _replica(self, module: nn.Module, flat: FlatReplica, lane: Lane) -> Replica:
        source = self.model if isinstance(self.model, nn.Module) else None
        with lane.on(lane.compute):
            optimizer = build_optimizer(self.optimizer, module, source)
            rate = LearningRate(
                optimizer,
                self.scheduler,
                self.scheduler_unit,
                self.lr_lambda,
                lr_factor(self.lr_scale_ratio, len(self.devices)),
            )
            loss = loss_function(self.loss, lane.device)
            return Replica(module, flat, optimizer, loss, rate, lane, self.precision, self.max_grad_norm)


# ---------------------------------------------------------------- checks
def _check_length(epochs: object, max_steps: object) -> None:
    for name, value in (("epochs", epochs), ("max_steps", max_steps)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise OptionError(f"{name} must be an int of at least 1, not {value!r}")
    if epochs is None and max_steps is None:
        raise OptionError("how long shall it train? Give epochs, max_steps, or both")


def _check_callables(model: object, optimizer: object, loss: object) -> None:
    if not isinstance(model, nn.Module) and not callable(model):
        raise OptionError(f"model must be a torch.nn.Module or a factory of one, not {model!r}")
    if not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise OptionError(f"optimizer must be a torch optimizer or a factory of one, not {optimizer!r}")
    if isinstance(optimizer, Optimizer) and not isinstance(model, nn.Module):
        raise OptionError(
            "an optimizer instance belongs to the parameters of one model: with a model factory, give an "
            "optimizer factory: optimizer=lambda params: ..."
        )
    if not callable(loss):
        raise OptionError(f"loss must be a function of (model, batch) or a criterion, not {loss!r}")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise OptionError("the criterion has parameters to train: make it a part of the model")


def _check_number(name: str, value: object, above: bool) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= float(str(value)) < float("inf") or (above and value == 0):
        raise OptionError(f"{name} must be a number {'above' if above else 'of at least'} 0, not {value!r}")


def _check_backend(backend: Backend, policy: Policy, devices: Sequence[torch.device]) -> Backend:
    if backend == "nccl" and policy == "async":
        raise OptionError(
            "backend='nccl' cannot be used with policy='async': its kernels wait for each other, and so may "
            "only be launched while all ranks stand at the gate; use backend='auto' or 'local'"
        )
    kinds = {device.type for device in devices}
    if backend == "nccl" and kinds != {"cuda"}:
        raise OptionError(f"backend='nccl' is for CUDA devices, not for {', '.join(map(str, devices))}")
    if backend == "local" and len(kinds) > 1:
        raise OptionError("backend='local' is for devices of one kind; between CPU and CUDA use 'cpu'")
    return backend


def _check_cadence(cadence: object, world_size: int) -> CadenceOptions:
    if cadence is None:
        return CadenceOptions()
    if not isinstance(cadence, CadenceOptions):
        raise OptionError(f"cadence must be a CadenceOptions, not {cadence!r}")
    if cadence.speed_hint is not None and cadence.speed_hint[0] >= world_size:
        raise OptionError(
            f"cadence.speed_hint names rank {cadence.speed_hint[0]} as the slow one; the ranks are "
            f"0 to {world_size - 1}"
        )
    return cadence


def _check_ratios(
    ratios: Sequence[float] | None, policy: Policy, world_size: int
) -> tuple[float, ...] | None:
    if ratios is None:
        return None
    if policy == "sync":
        raise OptionError(
            "partition_ratios cannot be kept under policy='sync', where every device takes one step of each "
            "round: use policy='cadence'"
        )
    numbers = list(ratios) if isinstance(ratios, Sequence) else []
    if not numbers or not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
        raise OptionError(f"partition_ratios must be numbers, one for each device, not {ratios!r}")
    return normalised_ratios(numbers, world_size)


def _check_story(story: object) -> Path | None:
    if story is not None and not isinstance(story, (str, PathLike)):
        raise OptionError(f"story must be the path of a file, not {story!r}")
    return None if story is None else Path(story)


def _open_story(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise OptionError(
            f"the story cannot be written to {str(path)!r}: {error}; give another path"
        ) from error
