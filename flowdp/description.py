"""Description of a run before it starts: what it will do, as aligned text.

Each line asks the code that decides. The datasets are opened, as `Trainer.check()` does it, which starts no
thread or process and reads no sample; checkpoints are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from flowdp.collective.select import choose_path
from flowdp.config import RunConfig
from flowdp.data.open_source import dataset_length
from flowdp.device.discovery import look_at
from flowdp.device.process_tuning import as_tuning
from flowdp.errors import FlowdpError
from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.cadence_rounds import CadenceRounds
from flowdp.machine.exact_rounds import ExactRounds
from flowdp.machine.policies import rounds_class
from flowdp.machine.sync_rounds import SingleRounds
from flowdp.network.machines import Machines
from flowdp.network.team import Team
from flowdp.options import CheckpointOptions
from flowdp.policy.cadence import Cadence
from flowdp.policy.schedule import lr_factor
from flowdp.replica.batch_sizes import listed
from flowdp.result import TrainedState
from flowdp.start import check_run

__all__ = ["describe_run"]

WIDTH = 15


def describe_run(config: RunConfig) -> str:
    """Describe a run: a title, and a line for each of its parts."""
    lines = [f"Trainer of {_model(config)}"]
    for name, value in _parts(config):
        lines += [f"  {label:<{WIDTH}}{text}" for label, text in _labelled(name, value)]
    return "\n".join(lines)


def _labelled(name: str, value: str | Sequence[str]) -> list[tuple[str, str]]:
    texts = [value] if isinstance(value, str) else list(value)
    return [(name if index == 0 else "", text) for index, text in enumerate(texts)]


def _parts(config: RunConfig) -> Iterator[tuple[str, str | Sequence[str]]]:
    own = config.replica
    yield "devices", _devices(config.devices, config.team.ranks.start)
    if config.team.machines is not None:
        yield "machines", _machines(config.team, config.team.machines)
    yield "policy", f"{own.policy}: {_policy(config)}"
    if config.outer is not None:
        yield "outer step", _outer(config)
    if config.world_size > 1:
        yield "backend", _backend(config)
    yield "batch size", _batch_size(config)
    yield "steps", _steps(config)
    yield "learning rate", _learning_rate(config)
    clipped = "" if own.max_grad_norm is None else f", gradients clipped to a norm of {own.max_grad_norm:g}"
    clipped += (
        "" if own.max_grad_value is None else f", gradients clipped to values of {own.max_grad_value:g}"
    )
    yield "precision", ("float32" if own.precision == "32" else f"{own.precision} by autocast") + clipped
    yield "evaluation", _evaluation(config)
    yield "checkpoints", "none" if config.checkpoint is None else _checkpoints(config.checkpoint)
    yield "resume", _resume(config)
    if config.timeline is not False:
        yield "timeline", "recorded" if config.timeline is True else f"saved to {config.timeline} at the end"
    if config.callbacks:
        yield "callbacks", ", ".join(type(one).__name__ for one in config.callbacks)
    yield "process", _tuning(config)


def _model(config: RunConfig) -> str:
    model = config.replica.model
    if not isinstance(model, nn.Module):
        return f"a model of {getattr(model, '__qualname__', 'a factory')}"
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return f"{type(model).__name__}, {trained:,} parameters"


def _devices(devices: Sequence[torch.device], first: int) -> list[str]:
    ranks: dict[torch.device, list[str]] = {}
    for rank, device in enumerate(devices, first):
        ranks.setdefault(device, []).append(str(rank))
    return [
        f"{device} {look_at(device)}: rank{'s' if len(of) > 1 else ''} {', '.join(of)}"
        for device, of in ranks.items()
    ]


def _machines(team: Team, machines: Machines) -> list[str]:
    return [
        f"{name}: {size} {'rank' if size == 1 else 'ranks'}" + (", this one" if index == team.index else "")
        for index, (name, size) in enumerate(zip(machines.names, team.sizes, strict=True))
    ]


def _backend(config: RunConfig) -> str:
    own, team = config.replica, config.team
    path = choose_path(config.runtime.backend, own.policy, config.devices, team, overlaps=config.overlaps)
    if not team.is_spread:
        return str(path)
    every = f"every {team.options.rounds} rounds" if team.options.rounds > 1 else "every round"
    travels = ", and travels while they train on" if config.overlaps else ""
    payload = ", as bfloat16" if team.options.payload == "bf16" else ""
    return f"{path}; a mean of all {every}{travels}{payload}"


def _policy(config: RunConfig) -> str:
    kind = rounds_class(config.replica.policy, config.world_size, config.cadence)
    shares = "by speed" if config.ratios is None else " : ".join(f"{one:.3g}" for one in config.ratios)
    if kind is SingleRounds:
        return "one device, so no mean is taken"
    if kind is ExactRounds:
        return f"all devices take one step together on the mean of their gradients; shares {shares}"
    if kind is AsyncRounds:
        return f"devices train on while snapshots of their parameters are averaged; shares {shares}"
    if kind is CadenceRounds:
        el_che = Cadence(config.world_size, config.cadence, config.ratios).el_che
        return (
            f"the mean of the parameters after {el_che.anchor} to {el_che.max_anchor} steps of the slowest "
            f"device; shares {shares}"
        )
    return "the mean of the parameters after one step of every device"


def _outer(config: RunConfig) -> str:
    options = config.outer_step
    if options is None:
        return "none: " + ("one device takes no mean" if config.world_size == 1 else "the plain mean")
    kind = "Nesterov's momentum" if options.nesterov else "momentum"
    return f"{kind} {options.momentum:g} on the difference between two means, rate {options.lr:g}"


def _batch_size(config: RunConfig) -> str:
    sizes = config.sizes
    forwards, together = sizes.forwards(config.dataset), sizes.together(config.dataset)
    if forwards is None or together is None:
        return "as the DataLoader's batches are, each for one device"
    if sizes.window is not None:
        return f"{together} in all; forwards of at most {listed(forwards)}"
    each = f"{listed(forwards)} on each device"
    if sum(forwards) != together and sizes.groups is not None:
        each += f", {listed([together * group // sum(sizes.groups) for group in sizes.groups])} in a step"
    return f"{together} in all; {each}"


def _steps(config: RunConfig) -> list[str]:
    try:
        batches = check_run(config)
    except FlowdpError as error:
        return [f"not known, and start() will fail: {error}"]
    total = config.total_steps(batches)
    length = dataset_length(config.dataset)
    an_epoch = None if batches is None else config.sizes.steps(batches, config.replica.policy)
    ends = [] if config.epochs is None else [f"{config.epochs:,} epochs"]
    ends += [] if config.max_steps is None else [f"at most {config.max_steps:,} steps"]
    ends += [] if config.max_ms is None else [f"at most {config.max_ms / 1e3:g} s"]
    return [
        f"{'not known before the end' if total is None else f'{total:,} of all devices'}: {', '.join(ends)}",
        f"{'an unknown number' if an_epoch is None else f'{an_epoch:,}'} in an epoch"
        f"{'' if length is None else f' of {length:,} samples'}"
        f"{'' if config.limit is None else ', of which only a part is trained'}",
    ]


def _learning_rate(config: RunConfig) -> str:
    options, ranks = config.replica.scheduler, config.world_size
    if options.lr_lambda is not None:
        parts = ["by lr_lambda, in steps of all devices"]
    elif options.scheduler is not None:
        given = options.scheduler
        name = getattr(given, "__qualname__", type(given).__name__)
        parts = [f"by {'a scheduler' if '<lambda>' in name else name}, in {options.unit}s"]
    else:
        parts = ["constant"]
    factor = lr_factor(options.lr_scaling, ranks)
    parts += [f"times {factor:.4g} for {ranks} devices"] if factor != 1 else []
    parts += [f"a warm-up of {options.warmup_steps:,} steps"] if options.warmup_steps else []
    return ", ".join(parts)


def _evaluation(config: RunConfig) -> str:
    options = config.evaluation
    if options is None:
        return "none"
    length = dataset_length(options.dataset)
    samples = "" if length is None else f" on {length:,} samples"
    return f"after {_each(options.every, options.unit)}{samples}"


def _checkpoints(options: CheckpointOptions) -> list[str]:
    kept = f"the newest {options.keep_last} are kept"
    if options.keep_best is not None:
        best = "the best" if options.top_k == 1 else f"the best {options.top_k}"
        kept += f", and {best} by {options.keep_best[0]} ({options.keep_best[1]})"
    return [f"in {options.dir} after {_each(options.every, options.unit)}, and at the end", kept]


def _each(every: float, unit: str) -> str:
    return f"every {unit}" if every == 1 else f"every {every:g} {unit}s"


def _resume(config: RunConfig) -> str:
    if config.resume is False:
        return "no: it begins anew"
    if isinstance(config.resume, TrainedState):
        return f"from {config.resume!r}"
    if config.resume is not True:
        return f"from {config.resume}"
    folder = "the folder" if config.checkpoint is None else str(config.checkpoint.dir)
    return f"from the newest checkpoint in {folder}, if there is one"


def _tuning(config: RunConfig) -> str:
    tuning = as_tuning(config.runtime.tune_process)
    said = {
        "OpenMP pool given back": tuning.openmp,
        "freed memory kept (glibc)": tuning.malloc,
        "threads switch every 0.5 ms": tuning.switch_interval,
    }
    return "; ".join(text for text, is_on in said.items() if is_on) or "its settings are left alone"
