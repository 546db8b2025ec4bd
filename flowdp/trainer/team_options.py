"""Several machines: the ranks of a run on all of them, and options that they cannot have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import torch

from flowdp.device.accelerator import is_accelerator
from flowdp.device.discovery import resolve_devices
from flowdp.engine.metrics import named_metrics
from flowdp.errors import OptionError
from flowdp.machine.policies import ROUNDS
from flowdp.network.machines import Machines, find_machines, world_here
from flowdp.network.team import Team
from flowdp.options import MachineOptions
from flowdp.trainer.config import RunConfig

__all__ = ["check_team", "find_team"]


def find_team(
    devices: Literal["auto"] | int | Sequence[torch.device | str | int], machines: bool | MachineOptions
) -> tuple[tuple[torch.device, ...], Team]:
    """Find the devices of this machine, and the ranks of all.

    Where a launcher has started several processes on one host (`torchrun --nproc-per-node 8`), and `devices`
    is "auto", each of them has its part of the host's accelerators.

    Args:
        devices: As a Trainer's.
        machines: As a Trainer's.

    Raises:
        CollectiveError: Another machine was lost, or does not come here.
        OptionError: A value is wrong.
    """
    if not isinstance(machines, bool | MachineOptions):
        raise OptionError(f"machines must be True, False or MachineOptions(...), not {machines!r}")
    options = machines if isinstance(machines, MachineOptions) else MachineOptions()
    job = None if machines is False else find_machines(timeout_s=options.timeout)
    if job is None:
        chosen = resolve_devices(devices)
        return chosen, Team(
            (len(chosen),), options=options, world=world_here(), trains_alone=machines is False
        )
    with job.telling():
        chosen = resolve_devices(devices)
        if devices == "auto":
            chosen = _part_of(chosen)
        sizes = job.gather(len(chosen))
    return chosen, Team(tuple(sizes), job, options, world_here())


def _part_of(chosen: tuple[torch.device, ...]) -> tuple[torch.device, ...]:
    """The accelerators of this process, of all that it shares with others on its host."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local == 1 or not is_accelerator(chosen[0]):
        return chosen
    if len(chosen) % local:
        raise OptionError(
            f"devices='auto': {local} processes on this host cannot share its {len(chosen)} devices "
            "evenly; start one process on each host, which trains on all, or give each its own devices"
        )
    part, place = len(chosen) // local, int(os.environ.get("LOCAL_RANK", "0"))
    return chosen[place * part : (place + 1) * part]


def check_team(config: RunConfig) -> None:
    """Check that several machines can train a run, and that all of them mean the same run.

    Raises:
        CollectiveError: Another machine was lost.
        OptionError: They cannot, or do not.
    """
    machines, options = config.team.machines, config.team.options
    policy = config.replica.policy
    if options.rounds > 1 and ROUNDS[policy].shares != "steps":
        raise OptionError(
            f"machines=MachineOptions(rounds={options.rounds}) is for policy='cadence': under {policy!r} "
            "every mean is of all machines"
        )
    if machines is None:
        return
    if ROUNDS[policy].averages == "snapshots":
        raise OptionError(
            "policy='async' trains on one machine: on several use policy='cadence', whose means of all "
            "machines travel while the devices train on"
        )
    if config.failures.on_failure == "continue":
        raise OptionError(
            "failures.on_failure='continue' is for the devices of one machine: on several a failure ends the "
            "run. flowdp.run_elastic goes on without a machine that is lost, in the same processes; or the "
            "launcher starts all again (torchrun --max-restarts). Both go on from the checkpoint: resume=True"
        )
    _check_backend(config)
    _check_alike(machines, _described(config))


def _check_backend(config: RunConfig) -> None:
    """Check that means of several machines can take the path that was given."""
    backend, options = config.runtime.backend, config.team.options
    if backend == "local":
        raise OptionError(
            "runtime.backend='local' is for the devices of one machine: on several the means go by 'nccl' or "
            "through the hosts' memory ('cpu'); leave it out"
        )
    if backend == "nccl" and config.overlaps:
        raise OptionError(
            "runtime.backend='nccl' waits for the mean of all machines, and overlap=True trains on "
            "meanwhile: give machines=MachineOptions(overlap=False), or leave the backend out"
        )
    if backend == "nccl" and options.payload != "full":
        raise OptionError(
            f"runtime.backend='nccl' sends numbers as they are, not as payload={options.payload!r}: leave "
            "out one of the two"
        )


def _described(config: RunConfig) -> dict[str, Any]:
    """Settings in which the machines of a run must agree."""
    paths = (
        *("sizes", "epochs", "max_steps", "cadence", "outer", "runtime.backend", "ratios", "team.options"),
        *("limit", "failures.on_nan", "replica.policy", "replica.seed", "replica.precision"),
        *("replica.max_grad_norm", "replica.max_grad_value", "replica.ema_decay"),
    )
    evaluation = config.evaluation
    return {
        **{path: attrgetter(path)(config) for path in paths},
        "a train_step": config.replica.train_step is not None,
        "an evaluation": evaluation and (evaluation.every, evaluation.unit, evaluation.limit_batches),
        "metrics": _kinds(config.metrics),
        "torch": str(torch.__version__).partition("+")[0],
    }


def _kinds(metrics: object) -> dict[str, str]:
    """Classes of the evaluation's metrics, by their names."""
    named = named_metrics(metrics)
    return (
        {name: type(metric).__name__ for name, metric in named.items()} if isinstance(named, Mapping) else {}
    )


def _check_alike(machines: Machines, settings: Mapping[str, Any]) -> None:
    """Check that all machines have the same values; every machine raises where they do not."""
    described = machines.gather(settings)
    for name, value in described[0].items():
        for index, other in enumerate(described):
            if other.get(name) != value:
                raise OptionError(
                    f"the machines of this job mean different runs: {name} is {value!r} on "
                    f"{machines.names[0]} and {other.get(name)!r} on {machines.names[index]}; give every "
                    "machine the same arguments"
                )
