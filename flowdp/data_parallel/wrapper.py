"""The module of a loop of your own on several devices; `setup` makes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.collective.select import open_loop
from flowdp.data_parallel.arguments import LoopOptions, check_loss
from flowdp.data_parallel.balancer import Balancer, Pace
from flowdp.data_parallel.call_runner import CallRunner
from flowdp.data_parallel.loader import Epoch, set_epoch
from flowdp.data_parallel.loop_timeline import LoopTimeline
from flowdp.data_parallel.loss_context import LossFunction, Results
from flowdp.data_parallel.machine_sum import MachineSum
from flowdp.data_parallel.optimizer_hooks import OptimizerHooks, OptimizerOption
from flowdp.data_parallel.predict import batches_of, predict
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.windows import Window, WindowResult, detached, run_window
from flowdp.device.compiled import make_room
from flowdp.device.cores import LentThreads, pool_sizes
from flowdp.device.dispatch import prepare_torch
from flowdp.device.process_tuning import tuned_process
from flowdp.device.streams import open_lanes
from flowdp.engine.shared_batches import evaluating
from flowdp.errors import FlowdpError
from flowdp.graphs.captured_call import captured_call
from flowdp.modules.stand_in import StandInModule
from flowdp.policy.efficiency import EfficiencyReport
from flowdp.policy.el_che import ElChe
from flowdp.policy.schedule import Recheck
from flowdp.timeline.timeline import Timeline

__all__ = ["DataParallel"]


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
        options: LoopOptions,
        sums: MachineSum | None = None,
    ) -> None:
        super().__init__(module)
        self.devices = options.devices
        self.world_size = len(options.devices)
        self.max_grad_norm = options.max_grad_norm
        self._options = options
        self._plan = options.plan
        self._recheck = Recheck()  # of windows
        self._epochs = 0
        self._sums = sums  # over machines; None: there is one
        self._lanes = open_lanes(options.devices)
        self._captured = captured_call(module, self._lanes, options.capture, is_summed=sums is not None)
        self._replicas: Replicas | None = None
        pace = timeline = None
        with ExitStack() as stack:
            if options.timeline:
                timeline = LoopTimeline(self._lanes, type(module).__name__)
                if isinstance(options.timeline, Path):
                    stack.callback(timeline.timeline.save, options.timeline)
                stack.callback(timeline.timeline.close)
            if sums is not None:
                stack.callback(sums.close)
            if self._captured is not None:
                stack.callback(self._captured.close)
            if self.world_size > 1:
                prepare_torch()
                make_room(self.world_size)
                stack.enter_context(tuned_process(options.tuning))
                # Where shares follow measured speed, too, the order of sums is free.
                repeats = options.ratios is not None
                threads = pool_sizes(options.devices, options.tuning, adapts=not repeats)
                uses_nccl = optimizers or options.backend == "nccl"
                link = partial(open_loop, options.backend) if uses_nccl else None
                self._replicas = Replicas(
                    module, self._lanes, threads, repeats=repeats, link=link, keeps=timeline is not None
                )
                stack.callback(self._replicas.close)
                lent = LentThreads(options.devices, options.tuning)
                lent.lend()
                stack.callback(lent.take_back)
                if not repeats and not options.windows:
                    pace = Pace(self._lanes, type(module).__name__, lent)
            self._close = weakref.finalize(self, stack.pop_all().close)
        self._optimizer_hooks = OptimizerHooks(module)
        self._balancer = Balancer(module, options, self._replicas, self._optimizer_hooks, pace, timeline)
        self._optimizer_hooks.use(optimizers or None, self._balancer.step)
        self._calls = CallRunner(module, options, self._balancer, self._replicas, sums, self._captured)
        self._seal()

    def __repr__(self) -> str:
        tried = self._balancer.pace
        pace = "" if tried is None else f"; {tried}"
        where = ", ".join(map(str, self.devices))
        if tried is not None and tried.is_settled:
            where = f"{self.devices[0]} alone, of {where}"
        captured = "; calls are captured" if self._captured is not None and self._captured.has_graphs else ""
        return f"<DataParallel of {type(self.module).__name__} on {where}{pace}{captured}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return copy, (self.module,)  # threads cannot be copied or saved, so the module is

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
        return self._optimizer_hooks.steps

    @property
    def is_distributed(self) -> bool:
        """Whether there are several devices."""
        return self._replicas is not None

    @property
    def cadence(self) -> ElChe | None:
        """The cadence that sizes the windows; None where batches are cut."""
        return None if self._balancer.cadence is None else self._balancer.cadence.el_che

    @property
    def timeline(self) -> Timeline:
        """Activities of all devices, steps, events and samples of the machine, so far.

        Raises:
            OptionError: `setup` was not asked for one.
        """
        return self._balancer.recorded.timeline

    def report(self) -> EfficiencyReport:
        """Attribute the time of all devices so far: their own throughput, the one reached, and the losses.

        Raises:
            OptionError: `setup` was not asked for a timeline.
        """
        return self._balancer.recorded.report()

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
        return self._calls.run("forward", args, kwargs)

    def call(self, function: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call another method of the module the same way, or `function(module, ...)`.

        Raises:
            AttributeError: The module has no such method.
        """
        # As in `dp.call(model.encode, x)`: each device calls it of its own module.
        if isinstance(function, MethodType) and function.__self__ is self.module:
            function = function.__func__
        return self._calls.run(function, args, kwargs)

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
        layout = self._options.layout
        batches = batches_of(data, batch_size, layout.dim if isinstance(layout.dim, int) else 0)
        with evaluating(self.module):
            return predict(self, batches, self._plan.inputs, layout, self._calls.schedule("forward").callee)

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
        self._options.layout.check_plain()
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
        results: Results = self._calls.run(forward_batch, (piece.batch,), {})
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
            is_due = self._options.check and self._recheck.is_due
            result = run_window(window, self._plan, replicas, scale=scale, guards=is_due)
            self._recheck.passed()
            samples, batches = window.per_rank(self.world_size)
            if self._options.buffers == "average":
                replicas.average_buffers(samples)
            self._balancer.note_work(samples, batches)
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
        self._optimizer_hooks.use(optimizer, self._balancer.step)

    def close(self) -> None:
        """End the threads; a second time does nothing. Collecting the object does the same."""
        self._close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def __prepare_scriptable__(self) -> nn.Module:
        """The module itself, for `torch.jit.script`."""
        return self.module
