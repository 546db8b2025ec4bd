"""A loop of your own on several devices: `setup` makes a `DataParallel`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.checks import check_loop_backend, fixed_ratios
from flowdp.collective.select import open_loop
from flowdp.data_parallel.arguments import (
    OptimizerOption,
    check_cadence,
    check_layers,
    check_loss,
    check_model,
    check_optimizers,
    set_epoch,
)
from flowdp.data_parallel.balancer import Balancer
from flowdp.data_parallel.call import Run, call_parts
from flowdp.data_parallel.comparison import Call, Schedule, check_call
from flowdp.data_parallel.cut import Arguments, Part
from flowdp.data_parallel.layout import Callee, DimOption, JoinFunction, Layout, ReduceOption, SplitFunction
from flowdp.data_parallel.loader import Epoch
from flowdp.data_parallel.loss_context import (
    BatchPlan,
    Inputs,
    InputsOption,
    LossFunction,
    Results,
    check_tags,
)
from flowdp.data_parallel.machine_sum import MachineSum, check_machines, check_norms
from flowdp.data_parallel.optimizer_hooks import OptimizerHooks
from flowdp.data_parallel.pace import Pace
from flowdp.data_parallel.predict import batches_of, predict
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.windows import Window, WindowResult, detached, run_window
from flowdp.device.compiled import make_room
from flowdp.device.copies import move
from flowdp.device.cores import LentThreads, pool_sizes
from flowdp.device.discovery import resolve_devices
from flowdp.device.dispatch import prepare_torch
from flowdp.device.process_tuning import as_tuning, tuned_process
from flowdp.device.streams import open_lanes
from flowdp.device.torch_modes import watcher
from flowdp.device.trees import batch_length, tree_map
from flowdp.engine.active_runs import check_free
from flowdp.engine.shared_batches import evaluating
from flowdp.errors import FlowdpError
from flowdp.graphs.captured_call import captured_call
from flowdp.modules.stand_in import StandInModule
from flowdp.modules.training_mode import start_training
from flowdp.network.machines import find_machines
from flowdp.observe.banner import tell_devices
from flowdp.options import (
    Buffers,
    CadenceOptions,
    LoopBackend,
    MachineOptions,
    ProcessTuning,
)
from flowdp.policy.el_che import ElChe
from flowdp.policy.schedule import Recheck
from flowdp.validators import check_flag, check_number, one_of

__all__ = ["DataParallel", "setup"]

log = logging.getLogger("flowdp")


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
        capture: Whether training calls of the module are recorded as CUDA graphs, forward and backward, on
            one CUDA device of one machine. "auto": where the first 50 show that the device waits for
            launches, and the log says so; True: from the third call of a form on, and an error with other
            devices.
        tune_process: Process-wide settings while this lives (see `ProcessTuning`); False leaves all alone.
        progress: False leaves out the line on stderr that names the devices, once in a process.

    Raises:
        OptionError: An argument is wrong, or the machines have different models. No thread has been started
            then.
        CollectiveError: backend="nccl" does not work here; or not all machines came here in time.
    """
    check_model(model)
    check_number("max_grad_norm", max_grad_norm, above=True, optional=True)
    one_of("buffers", buffers, Buffers)
    chosen = resolve_devices(devices)
    plan = BatchPlan(Inputs(inputs, model), check_tags(tags), check_loss(loss_fn))
    check_loop_backend(backend, chosen)
    ratios = None if partition_ratios is None else fixed_ratios(partition_ratios, len(chosen))
    options, windows = check_cadence(cadence, chosen, ratios)
    check_layers(model, chosen, windows=windows)
    layout = Layout(dim, split, join, reduce)
    check_flag("check", check)
    between = check_machines(machines, model)
    tuning = as_tuning(tune_process)
    check_free(chosen)
    check_flag("progress", progress)
    if progress:
        tell_devices(chosen)
    with ExitStack() as stack:
        model.to(chosen[0])
        if optimizer is not None:
            start_training(model)
        sums = None
        if between is not None and (found := find_machines(timeout_s=between.timeout)) is not None:
            stack.callback(found.close)  # if the machines, or the threads, do not get to work
            check_norms(model)
            windows = False  # they go by the speed of one machine's devices
            sums = MachineSum(found, model, payload=between.payload, averages=buffers == "average")
            stack.callback(sums.close)
        optimizers = check_optimizers(optimizer, model)
        made = DataParallel(
            model,
            optimizers,
            chosen,
            plan,
            options,
            windows,
            buffers,
            max_grad_norm,
            ratios,
            layout,
            check,
            backend,
            tuning,
            sums,
            capture,
        )
        stack.pop_all()
        return made


class DataParallel(StandInModule):
    """A module on several devices; made by `setup`.

    It stands for the module: its `state_dict`, `parameters()`, modes and attributes are the module's own, and
    the module's methods are reached by `call`, or by `module`. Called like the module, it cuts tensors of the
    batch's length among the devices, sends everything else whole, and joins the outputs on the first device.
    With one device it calls the module, and does nothing else.

    Attributes:
        module: The user's module.
        devices: One per rank.
        world_size: Number of devices.
        max_grad_norm: `step()` clips to it; None: not at all.

    Threads: the user's; they take turns.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        devices: Sequence[torch.device],
        plan: BatchPlan,
        options: CadenceOptions,
        windows: bool,
        buffers: Buffers,
        max_grad_norm: float | None,
        ratios: tuple[float, ...] | None,
        layout: Layout,
        check: bool,
        backend: LoopBackend,
        tuning: ProcessTuning,
        sums: MachineSum | None = None,
        capture: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(module)
        self.devices = tuple(devices)
        self.world_size = len(devices)
        self.max_grad_norm = max_grad_norm
        self._plan = plan
        self._layout = layout
        self._schedules: dict[Any, Schedule] = {}
        self._checks = check
        self._averages = buffers == "average"
        self._windows = Recheck()
        self._told: set[str] = set()  # reasons for which the first device does a call alone
        self._epochs = 0
        self._sums = sums  # over machines; None: there is one
        self._lanes = open_lanes(devices)
        self._captured = captured_call(module, self._lanes, capture, is_summed=sums is not None)
        self._replicas: Replicas | None = None
        with ExitStack() as stack:
            if sums is not None:
                stack.callback(sums.close)
            if self._captured is not None:
                stack.callback(self._captured.close)
            if self.world_size > 1:
                prepare_torch()
                make_room(self.world_size)
                stack.enter_context(tuned_process(tuning))
                # Where shares follow measured speed, too, the order of sums is free.
                threads = pool_sizes(devices, tuning, adapts=ratios is None)
                link = partial(open_loop, backend) if optimizers or backend == "nccl" else None
                repeats = ratios is not None
                self._replicas = Replicas(module, self._lanes, threads, repeats=repeats, link=link)
                stack.callback(self._replicas.close)
                self._threads = LentThreads(devices, tuning)
                self._threads.lend()
                stack.callback(self._threads.take_back)
            self._close = weakref.finalize(self, stack.pop_all().close)
        self._is_on_host = devices[0].type == "cpu"
        chooses = self._replicas is not None and ratios is None and not windows
        self._pace = Pace(self._lanes, type(module).__name__) if chooses else None
        self._balancer = Balancer(module, self._replicas, options, windows=windows, ratios=ratios)
        self._steps = 0
        self._optimizer_hooks = OptimizerHooks(module, self._stepped)
        self._optimizer_hooks.use(optimizers or None)
        self._seal()

    def __repr__(self) -> str:
        pace = "" if self._pace is None else f"; {self._pace}"
        where = ", ".join(map(str, self.devices))
        if self._pace is not None and self._pace.is_settled:
            where = f"{self.devices[0]} alone, of {where}"
        captured = "; calls are captured" if self._captured is not None and self._captured.has_graphs else ""
        return f"<DataParallel of {type(self.module).__name__} on {where}{pace}{captured}>"

    # ------------------------------------------------------------------ properties
    @property
    def replicas(self) -> tuple[nn.Module, ...]:
        """The modules on the other devices, in order; the user's own is `module`."""
        return () if self._replicas is None else self._replicas.modules[1:]

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The user's optimizers, which `step` steps; the replicas are sent the result."""
        return self._optimizer_hooks.optimizers

    @property
    def training_step(self) -> int:
        """Steps of the first optimizer so far."""
        return self._steps

    @property
    def is_distributed(self) -> bool:
        """Whether there are several devices."""
        return self._replicas is not None

    @property
    def cadence(self) -> ElChe | None:
        """The cadence that sizes the windows; None where batches are cut."""
        return None if self._balancer.cadence is None else self._balancer.cadence.el_che

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """Fraction of a batch that each device takes. Shape (world_size,)."""
        return self._balancer.ratios

    @property
    def throughput(self) -> tuple[float, ...]:
        """Samples a second of each of several devices, smoothed; 0.0 if not measured. Shape (world_size,)."""
        return tuple(1e3 * per_ms for per_ms in self._balancer.throughput)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Samples that each of several devices had in the last call or window. Shape (world_size,)."""
        return self._balancer.shard_sizes

    @property
    def loss_fn(self) -> LossFunction | None:
        """The loss function of `forward_batch`."""
        return self._plan.loss

    # ------------------------------------------------------------------ forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Args:
            args: Its arguments, any pytrees. The length of the first tensor that has one is the batch's.
            kwargs: Those by name.

        Returns:
            The outputs, on the first device: tensors joined along dim 0 (`dim`), numbers in tensors averaged
            with the samples as weights (`reduce`), everything else as it is.

        Raises:
            FlowdpError: The outputs cannot be joined.
            Exception: Raised by the module, with a note that names rank and device.
        """
        is_plain = self._replicas is None and self._captured is None
        if not is_plain and torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        return self._call("forward", args, kwargs)

    def call(self, function: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call another method of the module the same way, or `function(module, ...)`.

        Raises:
            AttributeError: The module has no such method.
        """
        # As in `dp.call(model.encode, x)`: each device calls it of its own module.
        if isinstance(function, MethodType) and function.__self__ is self.module:
            function = function.__func__
        return self._call(function, args, kwargs)

    def predict(self, data: Any, batch_size: int | None = None) -> Any:
        """The module's outputs for all samples of a dataset: in evaluation mode, without gradients.

        ::

            scores = dp.predict(loader)

        Args:
            data: A loader or another iterable of batches, of which the module gets the fields that `inputs`
                says; a map-style dataset, tensor or array, which is cut into batches.
            batch_size: Samples of a batch, for a dataset (None: 1), tensor or array (None: all).

        Returns:
            The module's outputs, joined over the batches in their order as over devices, on the CPU.

        Raises:
            OptionError: `batch_size` is none.
            DataError: There is no batch, or one without samples.
            FlowdpError: The outputs cannot be joined.
        """
        layout = self._layout
        batches = batches_of(data, batch_size, layout.dim if isinstance(layout.dim, int) else 0)
        with evaluating(self.module):
            return predict(self, batches, self._plan.inputs, layout, self._schedule("forward").callee)

    def _call(self, function: str | Callable[..., Any], args: Any, kwargs: Any) -> Any:
        replicas = self._replicas
        if replicas is None or (self._pace is not None and self._pace.is_settled):
            return self._call_alone(function, args, kwargs)
        if (seen := watcher()) is not None:
            self._tell_alone(f"{seen} sees one thread alone")
            return self._call_alone(function, args, kwargs)
        with replicas.turn:
            replicas.look()
            schedule = self._schedule(function)
            arguments = Arguments(self._layout, schedule.callee, args, kwargs)
            sizes = self._balancer.cut(arguments.samples) if arguments.samples else ()
            if arguments.samples is None:
                self._tell_alone("nothing in a call can be cut", f" ({arguments.described()})")
            is_cut = sum(size > 0 for size in sizes) > 1 and (self._pace is None or self._pace.is_cut)
            if not is_cut or schedule.is_alone or self._is_hooked():
                return self._call_alone(function, args, kwargs, arguments)

            def run(module: nn.Module, part: Part) -> Any:
                return _bound(function, module)(*part.args, **part.kwargs)

            form = replicas.flags, torch.is_grad_enabled(), arguments.pattern
            if self._checks and schedule.is_due(form):
                call = Call(self._layout, schedule.callee, run, args, kwargs, tuple(sizes), schedule.told)
                if why := check_call(replicas, call):
                    schedule.is_alone = True
                    self._tell_alone(why)
                    return self._call_alone(function, args, kwargs, arguments)
            outputs = self._run_cut(run, arguments, sizes)
            schedule.passed(form)
            self._did(sizes)
            if self._sums is not None and torch.is_grad_enabled():
                self._sums.attend(arguments.samples)
            return outputs

    def _call_alone(
        self, function: str | Callable[..., Any], args: Any, kwargs: Any, known: Arguments | None = None
    ) -> Any:
        """The outputs of a call, by the first device."""
        if not self._is_on_host:
            args, kwargs = tree_map(self._bring_home, [args, kwargs])
        if self._replicas is not None:
            samples = batch_length([args, kwargs]) if known is None else known.samples
            self._did_alone(samples or 0)
        elif self._captured is not None and function == "forward":
            return self._captured(args, kwargs)
        call = _bound(function, self.module)
        if self._sums is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        samples = Arguments(self._layout, self._schedule(function).callee, args, kwargs).samples
        outputs = call(*args, **kwargs)
        self._sums.attend(samples)
        return outputs

    def _run_cut(self, run: Run, arguments: Arguments, sizes: Sequence[int]) -> Any:
        """The outputs of a call, by all devices that have samples."""
        replicas = self._replicas
        assert replicas is not None
        parts = arguments.parts(sizes)
        try:
            made = call_parts(replicas, parts, run)
        except Exception as error:
            error.add_note(f"flowdp: called with {arguments.in_words(sizes)} of {arguments.described()}")
            raise
        outputs = arguments.join(made, parts)
        if self._averages:
            replicas.average_buffers(sizes)
        return outputs

    def _schedule(self, function: str | Callable[..., Any]) -> Schedule:
        """The schedule of a method's name, or of a function of the module."""
        # A lambda is another object in every call, and its code is not.
        inner = function.func if isinstance(function, partial) else function
        key = inner if isinstance(inner, str) else getattr(inner, "__code__", type(inner))
        if key not in self._schedules:
            if isinstance(function, str):
                callee = Callee(getattr(self.module, function, self.module.forward))
                callee.name = f"{type(self.module).__name__}.{function}"
            else:
                callee = Callee(function, skip=1)
            self._schedules[key] = Schedule(callee)
        return self._schedules[key]

    def _is_hooked(self) -> bool:
        """Whether a hook of the module sees what it returns: it would see the parts, in any order."""
        assert self._replicas is not None
        hook = self._replicas.hook()
        if hook is not None:
            self._tell_alone(f"the hook {hook} sees what the module's layers return")
        return hook is not None

    def _tell_alone(self, why: str, more: str = "") -> None:
        if why not in self._told:
            self._told.add(why)
            home = self.devices[0]
            log.warning(
                "%s%s, so %s does such calls alone, and the other devices do nothing", why, more, home
            )

    def _bring_home(self, leaf: Any) -> Any:
        return move(leaf, self.devices[0]) if isinstance(leaf, Tensor) else leaf

    def _did(self, samples: Sequence[int], batches: Sequence[int] | None = None) -> None:
        self._balancer.note_work(samples, batches)
        self._note(sum(samples))

    def _did_alone(self, samples: int) -> None:
        self._balancer.shard_sizes = (samples, *[0] * (self.world_size - 1))
        self._note(samples)

    def _note(self, samples: int) -> None:
        if self._pace is not None:
            self._pace.note(samples)
        if not self.optimizers:
            self._learn()  # no other moment tells when to look at the speed

    def _stepped(self) -> None:
        """Count a step of the first optimizer."""
        self._steps += 1
        self._learn()

    def _learn(self) -> None:
        """Learn from the time of a step."""
        self._balancer.step()
        if self._pace is not None:
            was_cut = self._pace.is_cut
            self._pace.step()
            if was_cut and not self._pace.is_cut:
                self._threads.take_back()
            elif self._pace.is_cut and not was_cut:
                self._threads.lend()

    # ------------------------------------------------------------------ windows
    def epoch(self, loader: Iterable[Any], epoch: int | None = None) -> Epoch:
        """Go through a loader once, in windows.

        ::

            for batch in dp.epoch(loader):
                result = dp.forward_batch(batch)
                dp.step()

        With a cadence a window holds whole batches, each device's by its speed; without one a single batch,
        cut. The last may hold fewer; no batch is left out.

        Whole batches go to CUDA devices through pinned memory; those of a list, and of a DataLoader with
        worker processes, one window ahead.

        Args:
            loader: Any iterable of batches, a DataLoader for instance.
            epoch: Told to its sampler, where that has `set_epoch`. None: one more than the last.

        Raises:
            OptionError: `setup` was given `dim`, `split`, `join` or `reduce`, which are for calls.
        """
        self._layout.check_plain()
        self._epochs = (self._epochs if epoch is None else epoch) + 1
        set_epoch(loader, self._epochs - 1)
        return Epoch(loader, self._lanes, self._balancer.cadence)

    def forward_batch(self, batch: Window, scaler: torch.amp.GradScaler | None = None) -> WindowResult:
        """Let every device work through its batches of a window, or its part of a single batch.

        With a `loss_fn`: forward, loss and backward; the gradients are summed when this returns. Without one:
        forward alone; compute a loss of `result.output` and call backward.

        Args:
            batch: From `epoch`.
            scaler: Scales the losses, for fp16; give it to `step`, too.

        Raises:
            FlowdpError: The loss is not one number, or depends on no parameter.
        """
        if not isinstance(batch, Window):
            raise FlowdpError(f"forward_batch takes what epoch() yields, not {type(batch).__name__}")
        scale = None if scaler is None else scaler.scale
        if self._balancer.cadence is not None:
            return self._run_window(batch, scale)
        return self._call_window(batch, scale)

    def _call_window(self, window: Window, scale: Callable[[Tensor], Tensor] | None) -> WindowResult:
        """A window of one batch, by a call and a backward of its loss."""
        plan, (piece,) = self._plan, window.pieces

        def forward_batch(module: nn.Module, batch: Any) -> Results:
            return plan.results(module, batch)

        piece.arrive()
        results: Results = self.call(forward_batch, piece.batch)
        if results.loss is not None:
            if torch.is_grad_enabled():
                (results.loss if scale is None else scale(results.loss)).backward()
            results = detached(results)
        return WindowResult(window.samples, results.loss, lambda: (results.output, results.traces))

    def _run_window(self, window: Window, scale: Callable[[Tensor], Tensor] | None) -> WindowResult:
        replicas = self._replicas
        assert replicas is not None
        if scale is not None:  # the scaler makes its number here, and not in the thread of a rank
            scale(torch.zeros((), device=self.devices[0]))
        with replicas.turn:
            replicas.look()
            is_due = self._checks and self._windows.is_due
            result = run_window(window, self._plan, replicas, scale=scale, guards=is_due)
            self._windows.passed()
            samples, batches = window.per_rank(self.world_size)
            if self._averages:
                replicas.average_buffers(samples)
            self._did(samples, batches)
            return result

    # ------------------------------------------------------------------ step
    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Clip, step the optimizers, zero the gradients.

        Args:
            scaler: Scaler of the losses' gradients; it decides whether the optimizers step.

        Raises:
            FlowdpError: There is no optimizer.
        """
        self._collect()
        self._optimizer_hooks.step(scaler, self.max_grad_norm)
        self.zero_grad()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all devices together; returns their norm. Shape []."""
        self._collect()
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def _collect(self) -> None:
        """Sum the gradients that backwards inside `no_sync` have left at the machines."""
        if self._sums is not None:
            self._sums.collect()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients at the machines: for accumulation over several backwards.

        The first backward outside, or `step`, sums them up, by the samples of all these backwards together.
        The devices of one machine sum theirs in each backward.
        """
        with nullcontext() if self._sums is None else self._sums.no_sync():
            yield

    def set_lr(self, lr: float) -> None:
        """Scale the learning rates of all groups of all optimizers so that the first that is not 0 has `lr`.

        Groups at 0 stay there.

        Raises:
            OptionError: Several groups, and all at 0.
        """
        self._optimizer_hooks.set_lr(lr)

    def set_loss_fn(self, loss_fn: LossFunction | None) -> None:
        """Replace the loss function of `forward_batch`."""
        self._plan = replace(self._plan, loss=check_loss(loss_fn))

    def set_optimizer(self, optimizer: OptimizerOption) -> None:
        """Replace the optimizers: one, several, a factory of them, or None; on all machines at once."""
        self._optimizer_hooks.use(optimizer)

    def close(self) -> None:
        """End the threads; a second time does nothing. Collecting the object does the same."""
        self._close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __prepare_scriptable__(self) -> nn.Module:
        """The module itself, for `torch.jit.script`."""
        return self.module


def _bound(function: str | Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A method of a module by its name, or a function that takes the module first."""
    if not isinstance(function, str):
        return partial(function, module)
    if function == "forward":
        return module
    method: Callable[..., Any] = getattr(module, function)
    return method
