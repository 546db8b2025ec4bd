"""Checks of the Trainer's arguments, before anything is built."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from flowdp.data.limit import Limit, check_limit
from flowdp.data.source import Source
from flowdp.errors import OptionError
from flowdp.machine.policies import ROUNDS
from flowdp.options import (
    Backend,
    CadenceOptions,
    CaptureOptions,
    CheckpointOptions,
    FailureOptions,
    LoopBackend,
    OuterOptions,
    Policy,
    ReadingOptions,
)
from flowdp.policy.shares import normalised_ratios
from flowdp.replica.batch_sizes import Sizes
from flowdp.replica.factories import several_optimizers
from flowdp.replica.loss import of_model_and_batch
from flowdp.validators import (
    check_flag,
    check_function,
    check_int,
    check_number,
    is_int,
    is_number,
    one_of,
    takes,
)

__all__ = [
    "check_backend",
    "check_cadence",
    "check_capture",
    "check_checkpoint",
    "check_checkpoints",
    "check_clipping",
    "check_failures",
    "check_length",
    "check_limits",
    "check_loop_backend",
    "check_model_and_optimizer",
    "check_outer",
    "check_ratios",
    "check_record",
    "check_resume",
    "check_step",
    "fixed_ratios",
]

R = TypeVar("R")

log = logging.getLogger("flowdp")


def check_length(epochs: object, max_steps: object, max_time: object) -> float | None:
    """Check the length of the training; returns `max_time` in milliseconds.

    Raises:
        OptionError: It is missing, or no positive number.
    """
    check_int("epochs", epochs, optional=True)
    check_int("max_steps", max_steps, optional=True)
    if epochs is None and max_steps is None and max_time is None:
        raise OptionError(
            "epochs, max_steps or max_time must say how long to train: give one of them, or several"
        )
    return _in_ms(max_time)


def _in_ms(max_time: object) -> float | None:
    """A number of seconds, a timedelta, or a text "DD:HH:MM:SS", in milliseconds; None stays None."""
    seconds = max_time
    if isinstance(max_time, timedelta):
        seconds = max_time.total_seconds()
    elif isinstance(max_time, str) and re.fullmatch(r"\d+:\d+:\d+:\d+", max_time, re.ASCII):
        days, hours, minutes, rest = map(int, max_time.split(":"))
        seconds = timedelta(days=days, hours=hours, minutes=minutes, seconds=rest).total_seconds()
    if seconds is None:
        return None
    if not is_number(seconds) or seconds <= 0:
        raise OptionError(
            f"max_time must be a number of seconds above 0, a timedelta, a text 'DD:HH:MM:SS' or None, not "
            f"{max_time!r}"
        )
    return seconds * 1e3


def check_limits(
    limit_batches: object,
    overfit_batches: int | None,
    fast_dev_run: bool,
    sizes: Sizes,
    reading: ReadingOptions,
) -> Limit | None:
    """Check the limits of an epoch; returns that of the training.

    Raises:
        OptionError: One is out of its range, or they contradict each other or the reading.
    """
    limit = check_limit("limit_batches", limit_batches)
    check_int("overfit_batches", overfit_batches, optional=True)
    check_flag("fast_dev_run", fast_dev_run)
    given = {"limit_batches": limit_batches, "overfit_batches": overfit_batches, "fast_dev_run": fast_dev_run}
    said = [f"{name}={value!r}" for name, value in given.items() if value]
    if len(said) > 1:
        raise OptionError(f"{' and '.join(said)} each say which batches an epoch has: give one of them")
    if overfit_batches is not None:
        if reading.shuffle:
            raise OptionError(
                f"shuffle=True contradicts overfit_batches={overfit_batches}, which trains the same batches "
                "in each epoch: leave it out"
            )
        limit = Limit(overfit_batches, is_fixed=True)
    if limit is not None and is_int(limit.batches) and len(set(sizes.widths)) > 1:
        raise OptionError(
            f"{said[0]} cannot count batches where the devices' batch sizes differ: give one "
            "per_device_batch_size, or a fraction, limit_batches=0.1"
        )
    return limit


def check_model_and_optimizer(model: object, optimizer: object) -> None:
    """Check model and optimizer.

    Raises:
        OptionError: They are neither instances nor factories, or do not belong together.
    """
    if not isinstance(model, nn.Module):
        _check_model_factory(model)
    named: list[object] = [optimizer]
    if isinstance(optimizer, Mapping):
        named = list(optimizer.values())
    elif isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        named = list(optimizer)
    is_factory = len(named) == 1 and named[0] is optimizer and callable(optimizer)
    for given in named:
        if not isinstance(given, Optimizer) and not is_factory:
            raise OptionError(f"optimizer must be a torch optimizer or a factory of one, not {given!r}")
    if not named:
        raise OptionError(f"optimizer={optimizer!r} holds none")
    if is_factory:
        _check_optimizer_factory(optimizer)
    if not is_factory and not isinstance(model, nn.Module):
        raise OptionError(
            "an optimizer instance belongs to the parameters of one model: with a model factory, give an "
            "optimizer factory: optimizer=lambda params: ..."
        )


def _check_optimizer_factory(factory: Any) -> None:
    if not takes(factory, 1) and (takes(factory, 0) or not takes(factory, 0, "model")):
        raise OptionError(
            f"optimizer={factory!r} takes {signature(factory)}, and is called with the parameters of one "
            "model alone: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )


def _check_model_factory(model: object) -> None:
    if not callable(model):
        raise OptionError(f"model must be a torch.nn.Module or a factory of one, not {model!r}")
    if not (takes(model, 0, "device") or takes(model, 1)):
        name = getattr(model, "__name__", "make_model")
        raise OptionError(
            f"model={model!r} takes {signature(model)}, and a factory is called with a device or nothing: "
            f"give an instance, model={name}(...), or model=lambda: {name}(...)"
        )


def check_step(
    loss: object, train_step: object, policy: Policy, accumulation: object, optimizer: object
) -> None:
    """Check that a step is either a loss or the user's own.

    Raises:
        OptionError: Neither or both are given, or the policy cannot have the user's own.
    """
    if train_step is None:
        _check_loss(loss)
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise OptionError("loss is a criterion with parameters to train: make it a part of the model")
        if isinstance(optimizer, Mapping | Sequence) and len(optimizer) > 1:
            raise OptionError(several_optimizers(len(optimizer)))
        return
    if loss is not None:
        raise OptionError("loss and train_step each define a step: give one of them")
    check_function("train_step", train_step, "(worker, batch)", 2)
    if ROUNDS[policy].averages == "gradients":
        raise OptionError(
            "policy='exact' averages the gradient of one loss before the one step of its optimizer, and a "
            "train_step steps as it likes: use policy='sync', or give a loss"
        )
    if accumulation != 1:
        raise OptionError(
            "gradient_accumulation_steps cannot be kept with a train_step: one call gets one batch and is "
            "one step. Split the batch inside of it, and call worker.step after the last backward"
        )


def _check_loss(loss: object) -> None:
    if isinstance(loss, type):
        raise OptionError(f"loss={loss.__name__} is a class: give an instance, loss={loss.__name__}()")
    if isinstance(loss, nn.Module):
        return
    inner = loss.func if isinstance(loss, partial) else loss
    if callable(inner) and str(getattr(inner, "__module__", "")).startswith("torch."):
        raise OptionError(of_model_and_batch(loss))
    check_function("loss", loss, "(model, batch) or a criterion", 2)
    if loss is None:
        raise OptionError("loss must be a function of (model, batch) or a criterion, and is missing")


def check_backend(backend: Backend, policy: Policy, devices: Sequence[torch.device]) -> None:
    """Check the backend against policy and devices.

    Raises:
        OptionError: These devices or this policy cannot have it.
    """
    if backend == "nccl" and ROUNDS[policy].averages == "snapshots":
        raise OptionError(
            "backend='nccl' cannot be used with policy='async': its kernels wait for each other, and so may "
            "only be launched while all ranks stand at the gate; use backend='auto' or 'local'"
        )
    kinds = {device.type for device in devices}
    if backend == "nccl" and kinds != {"cuda"}:
        raise OptionError(f"backend='nccl' is for CUDA devices, not for {', '.join(map(str, devices))}")
    if backend == "local" and len(kinds) > 1:
        raise OptionError("backend='local' is for devices of one kind; between CPU and CUDA use 'cpu'")


def check_loop_backend(backend: LoopBackend, devices: Sequence[torch.device]) -> None:
    """Check the backend of a loop.

    Raises:
        OptionError: It is another word, or NCCL is for other devices.
    """
    one_of("backend", backend, LoopBackend)
    if backend == "nccl":
        check_backend(backend, "exact", devices)


def check_cadence(cadence: object, policy: Policy, world_size: int) -> CadenceOptions:
    """Check the options of the cadence; None is the default.

    Raises:
        OptionError: It is something else, names a rank that is not there, or the policy has no use for it.
    """
    options = check_record("cadence", cadence, CadenceOptions)
    shares = ROUNDS[policy].shares
    used = CadenceOptions(speed_hint=options.speed_hint) if shares == "samples" else CadenceOptions()
    if shares != "steps" and options != used:
        raise OptionError(
            f"cadence={options} has no use with policy={policy!r}, in which all devices meet after each "
            'step: add policy="cadence" (or "async"), or leave it out'
        )
    if options.speed_hint is not None and options.speed_hint[0] >= world_size:
        raise OptionError(
            f"cadence.speed_hint names rank {options.speed_hint[0]} as the slow one; the ranks are "
            f"0 to {world_size - 1}"
        )
    return options


def check_outer(
    outer: object,
    policy: Policy,
    cadence: CadenceOptions,
    backend: Backend,
    devices: Sequence[torch.device],
) -> OuterOptions | None:
    """Check the options of the outer step; None passes.

    Args:
        outer: As the user gave it.
        policy: As the user gave it: on one device, where nothing is averaged, the same are refused.
        cadence: Length of the rounds.
        backend: As the user gave it.
        devices: One per rank.

    Raises:
        OptionError: It is something else, or this policy or these devices cannot have it.
    """
    if outer is None:
        return None
    options = check_record("outer", outer, OuterOptions)
    if ROUNDS[policy].averages == "gradients":
        raise OptionError(
            f"outer needs the difference between two means of parameters, and policy={policy!r} averages "
            "gradients: leave outer out, or use policy='cadence' or 'async'"
        )
    is_each = ROUNDS[policy].shares == "equal" or not cadence.windows or cadence.max_anchor == 1
    if is_each:
        given = f"policy={policy!r}" if ROUNDS[policy].shares == "equal" else f"cadence={cadence!r}"
        raise OptionError(
            f"outer can harm where a mean is taken after each step, as with {given}: on Fashion-MNIST the "
            "loss was 10 to 32 % higher (docs/quality.md). Leave outer out, or use policy='cadence' with "
            "rounds of several steps"
        )
    kinds = {device.type for device in devices}
    is_copied = len(kinds) > 1 or (backend == "cpu" and kinds != {"cpu"})
    if ROUNDS[policy].averages == "snapshots" and is_copied:
        raise OptionError(
            f"outer with policy={policy!r} is for devices of one kind that average where they are, not for "
            f"{', '.join(map(str, devices))} with backend={backend!r}: use policy='cadence', or leave outer "
            "out"
        )
    return options


def check_capture(capture: bool | CaptureOptions | str, train_step: object) -> CaptureOptions | None:
    """Make options of the option `capture`; None: steps are not captured.

    Raises:
        OptionError: The step is the user's own, and was to be captured.
    """
    if capture is False or (capture == "auto" and train_step is not None):
        return None
    if train_step is not None:
        raise OptionError(
            "capture records forward and backward of a loss, and a train_step does both by itself, with its "
            "optimizers in between: give a loss, or leave capture out"
        )
    return capture if isinstance(capture, CaptureOptions) else CaptureOptions()


def check_ratios(ratios: object, policy: Policy, world_size: int) -> tuple[float, ...] | None:
    """Scale fixed shares of the work to sum to 1; None passes.

    Raises:
        OptionError: They are no numbers, one for each device, or the policy cannot keep them.
    """
    if ratios is None:
        return None
    if ROUNDS[policy].shares == "equal":
        raise OptionError(
            "partition_ratios cannot be kept under policy='sync', where every device takes one step of each "
            "round: use policy='cadence'"
        )
    return fixed_ratios(ratios, world_size)


def fixed_ratios(ratios: object, world_size: int) -> tuple[float, ...]:
    """Scale fixed shares of the work to sum to 1.

    Raises:
        OptionError: They are no numbers, one for each device.
    """
    numbers = list(ratios) if isinstance(ratios, Sequence) else []
    if not numbers or not all(is_number(n) for n in numbers):
        raise OptionError(f"partition_ratios must be numbers, one for each device, not {ratios!r}")
    return normalised_ratios(numbers, world_size)


def check_checkpoint(checkpoint: object) -> CheckpointOptions | None:
    """Make options of a folder; options and None pass.

    Raises:
        OptionError: It is neither options nor a folder.
    """
    if checkpoint is None or isinstance(checkpoint, CheckpointOptions):
        return checkpoint
    if not isinstance(checkpoint, (str, PathLike)) or not str(checkpoint):
        raise OptionError(f"checkpoint must be a folder or CheckpointOptions(...), not {checkpoint!r}")
    return CheckpointOptions(Path(checkpoint))


def check_resume(resume: object, checkpoint: CheckpointOptions | None) -> None:
    """Check from where the run resumes: a flag or a path.

    Raises:
        OptionError: It is something else, or the folder is missing.
    """
    if resume is True and checkpoint is None:
        raise OptionError("resume=True takes the newest checkpoint of the folder: give checkpoint='a folder'")
    if not isinstance(resume, (bool, str, PathLike)) or resume == "":
        raise OptionError(f"resume must be True, the path of a checkpoint or a TrainedState, not {resume!r}")


def check_clipping(max_norm: object, max_value: object) -> None:
    """Check the limits of the gradients.

    Raises:
        OptionError: One is no positive number, or there are two.
    """
    check_number("max_grad_norm", max_norm, above=True, optional=True)
    check_number("max_grad_value", max_value, above=True, optional=True)
    if max_norm is not None and max_value is not None:
        raise OptionError(
            f"max_grad_norm={max_norm!r} and max_grad_value={max_value!r} clip the same gradients, and the "
            "result would depend on which comes first: give one of them"
        )


def check_failures(failures: object, policy: Policy, world_size: int) -> FailureOptions:
    """Check the options of failures; None is the default.

    Raises:
        OptionError: It is something else, or the policy cannot go on without a rank.
    """
    options = check_record("failures", failures, FailureOptions)
    if options.on_failure == "raise":
        return options
    why = {
        "snapshots": "the steps of a rank since the last mean have been reported, and cannot be taken back",
        "gradients": "all devices together take one step, and a part of it would be missing",
    }.get(ROUNDS[policy].averages)
    if why is not None:
        raise OptionError(f"on_failure='continue' is for policy='sync' and 'cadence'; under {policy!r} {why}")
    if world_size == 1:
        raise OptionError("on_failure='continue' needs another device to go on with")
    return options


def check_record(name: str, given: object, kind: type[R]) -> R:
    """Check a record of options; None is the default.

    Raises:
        OptionError: It is something else.
    """
    if given is not None and not isinstance(given, kind):
        raise OptionError(f"{name} must be {kind.__name__}(...), not {given!r}")
    return kind() if given is None else given


def check_checkpoints(save: CheckpointOptions | None, source: Source) -> None:
    """Check that a run on this dataset can be resumed from the checkpoints that it is to write.

    Raises:
        OptionError: It cannot.
    """
    if save is None:
        return
    if save.unit != "epoch" and not source.can_resume_inside:
        raise OptionError(
            f"checkpoint.unit={save.unit!r} would write checkpoints inside an epoch of an IterableDataset on "
            "several machines, from which nothing can go on: use unit='epoch'"
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
