"""A loop of your own on several devices: `setup` checks its arguments and makes a `DataParallel`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from typing import Literal

import torch
from torch import nn

from flowdp.checks import check_loop_backend, fixed_ratios
from flowdp.data_parallel.arguments import LoopOptions, check_cadence, check_layers, check_loss, check_model
from flowdp.data_parallel.layout import DimOption, JoinFunction, Layout, ReduceOption, SplitFunction
from flowdp.data_parallel.loss_context import BatchPlan, Inputs, InputsOption, LossFunction, check_tags
from flowdp.data_parallel.machine_sum import check_machines, open_machine_sum
from flowdp.data_parallel.optimizer_hooks import OptimizerOption, check_optimizers
from flowdp.data_parallel.wrapper import DataParallel
from flowdp.device.discovery import resolve_devices
from flowdp.device.process_tuning import as_tuning
from flowdp.engine.active_runs import check_free
from flowdp.modules.training_mode import start_training
from flowdp.observe.bar import tell_devices
from flowdp.observe.timeline_file import check_timeline
from flowdp.options import Buffers, CadenceOptions, LoopBackend, MachineOptions, ProcessTuning
from flowdp.validators import check_flag

__all__ = ["setup"]


def setup(
    model: nn.Module,
    optimizer: OptimizerOption = None,
    *,
    devices: Literal["auto"] | int | Sequence[torch.device | str | int] = "auto",
    cadence: CadenceOptions | bool | None = None,
    loss_fn: LossFunction | None = None,
    inputs: InputsOption = None,
    tags: Sequence[str] = (),
    buffers: Buffers = "broadcast",
    max_grad_norm: float | None = None,
    partition_ratios: Sequence[float] | None = None,
    dim: DimOption = 0,
    split: SplitFunction | None = None,
    join: JoinFunction | None = None,
    reduce: ReduceOption = "mean",
    check: bool = True,
    backend: LoopBackend = "auto",
    machines: bool | MachineOptions = True,
    capture: bool | Literal["auto"] = "auto",
    timeline: bool | str | PathLike[str] = False,
    tune_process: bool | ProcessTuning = True,
    progress: bool = True,
) -> DataParallel:
    """Spread a module over devices, for a training loop that stays as it is.

    ::

        dp = flowdp.setup(model, optimizer)             # instead of model.to(device)
        for x, y in loader:
            loss = F.cross_entropy(dp(x), y)            # instead of model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    `model` and `optimizer` are used themselves, on the first device; the other devices have replicas, which
    are sent the changes of the step. Gradients are summed onto `model` before `backward` returns.

    Args:
        model: Moved to the first device and, with an optimizer, set to training mode.
        optimizer: Optimizer of the model's parameters, or several; or a factory that gets those that require
            grad. None: the model is used as it is, for inference or as a frozen part.
        devices: "auto", a number, or a list of devices; a device may repeat. One device: no threads.
        cadence: Whether `epoch` yields windows of whole batches, by each device's speed, instead of single
            batches to cut. None: where the devices have different names. A record has options of the windows
            (max_anchor=0: there are none) and may carry a `speed_hint`.
        loss_fn: Loss of one batch, for `forward_batch`, which then runs backward, too.
        inputs: Fields of a batch that the model takes, in order: keys of a mapping or positions of a
            sequence; or a function of the batch. None: a tensor goes whole, the first field of a sequence,
            the fields of a mapping that are named like parameters of `forward`.
        tags: Submodules whose outputs are captured for `loss_fn` and the result of `forward_batch`.
        buffers: "broadcast": all devices get those of the first one before each forward; "average": the
            weighted mean of all devices' is taken at each step.
        max_grad_norm: `step()` clips the summed gradients to this 2-norm.
        partition_ratios: Fixed shares of each batch, one per device; None: by measured speed. With them CPU
            devices repeat a run bit for bit from the same `torch.manual_seed`, dropout included.
        dim: Batch dimension of the arguments and outputs of a call: one dim for all tensors, or a
            mapping from `forward`'s parameters (or positions) to dims, with None for arguments that go whole,
            0 for those it does not name, and under "return" the outputs', by name or position where they
            differ.
        split: Cuts a call instead: `split(args, kwargs, sizes)` returns (args, kwargs) for each part of so
            many samples. `dim` says how many samples there are.
        join: Joins the outputs instead: `join(outputs, sizes)`. It and `split` may ask for gradients; they
            are not called for a batch that one device does alone.
        reduce: The reduction of one number from each device: "mean", weighted by samples; "sum"; or the
            mean weighted by a function of the part's arguments, which it takes by name:
            `lambda labels: (labels[:, 1:] != -100).sum()`. Or a mapping from an output's name to these.
        check: Whether the first call that is cut, and some later ones, are compared with the same call on the
            first device alone: outputs, and in training gradients. A difference is an error with a remedy.
        backend: Transfer of parameters and gradients between CUDA devices: "nccl"; "local", by copies between
            each device and the first; "auto", by NCCL where each replica has a CUDA device of its own and
            NCCL works, else by copies. Without an optimizer only "nccl" uses NCCL.
        machines: Whether a process of a job (torchrun, Slurm, Ray) is one of several machines. Each runs the
            loop on batches of its own, and all start from the parameters of machine 0; each backward sums the
            gradients of all machines, weighted by the samples of their batches, through the host's memory,
            those of CUDA devices, too. The `timeout` and `payload` of a record count; True waits 10 minutes
            for a machine. False: this process trains alone.
        capture: Whether training calls that one CUDA device of one machine does alone are recorded as CUDA
            graphs, forward and backward. "auto": where the first 50 show that the device waits for launches,
            and the log says so; True: from the third call of a form on, and an error with other devices.
        timeline: True for a record of what each device does in each step, `dp.timeline` and `dp.report()`; or
            the path of a .json or .html file, which `close` writes.
        tune_process: Process-wide settings while this lives (see `ProcessTuning`); False leaves all alone.
        progress: False leaves out the line on stderr that names the devices, once in a process.

    Raises:
        OptionError: An argument is wrong, or the machines have different models. No thread has been started
            then.
        CollectiveError: backend="nccl" does not work here; or not all machines came here in time.
    """
    check_model(model)
    chosen = resolve_devices(devices)
    check_loop_backend(backend, chosen)
    ratios = None if partition_ratios is None else fixed_ratios(partition_ratios, len(chosen))
    sizes, windows = check_cadence(cadence, chosen, ratios)
    check_layers(model, chosen, windows=windows)
    options = LoopOptions(
        devices=tuple(chosen),
        plan=BatchPlan(Inputs(inputs, model), check_tags(tags), check_loss(loss_fn)),
        cadence=sizes,
        windows=windows,
        buffers=buffers,
        max_grad_norm=max_grad_norm,
        ratios=ratios,
        layout=Layout(dim, split, join, reduce),
        check=check,
        backend=backend,
        tuning=as_tuning(tune_process),
        capture=capture,
        timeline=check_timeline(timeline),
    )
    between = check_machines(machines, model)
    check_free(chosen)
    check_flag("progress", progress)
    if progress:
        tell_devices(chosen)
    model.to(chosen[0])
    if optimizer is not None:
        start_training(model)
    with ExitStack() as stack:
        sums = None
        if between is not None:
            sums = open_machine_sum(between, model, averages=buffers == "average")
        if sums is not None:
            stack.callback(sums.close)  # if the threads do not get to work
            options = replace(options, windows=False)  # they go by the speed of one machine's devices
        made = DataParallel(model, check_optimizers(optimizer, model), options, sums)
        stack.pop_all()
        return made
