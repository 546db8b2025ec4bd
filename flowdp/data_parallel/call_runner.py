"""Calls of a module: cut among the devices, or done by the first one alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data_parallel.arguments import LoopOptions
from flowdp.data_parallel.balancer import Balancer
from flowdp.data_parallel.call import Run, call_parts
from flowdp.data_parallel.comparison import Call, Schedule, check_call
from flowdp.data_parallel.cut import Arguments, Part
from flowdp.data_parallel.layout import Callee
from flowdp.data_parallel.machine_sum import MachineSum
from flowdp.data_parallel.replicas import Replicas
from flowdp.device.copies import move
from flowdp.device.torch_modes import watcher
from flowdp.device.trees import batch_length, tree_map
from flowdp.graphs.captured_call import CapturedCall

__all__ = ["CallRunner"]

log = logging.getLogger("flowdp")


class CallRunner:
    """Runs the calls of the user's module, and decides which devices do them.

    Args:
        module: The user's.
        options: The options of the loop.
        balancer: Shares of the devices.
        replicas: The modules of all devices; None: there is one device.
        sums: Sums gradients over the machines; None: there is one.
        captured: Calls of one device as CUDA graphs; None: they are not captured.

    Threads: the user's; they take turns.
    """

    def __init__(
        self,
        module: nn.Module,
        options: LoopOptions,
        balancer: Balancer,
        replicas: Replicas | None,
        sums: MachineSum | None,
        captured: CapturedCall | None,
    ) -> None:
        self._module = module
        self._layout = options.layout
        self._checks = options.check
        self._averages = options.buffers == "average"
        self._balancer = balancer
        self._pace = balancer.pace
        self._replicas = replicas
        self._sums = sums
        self._captured = captured
        self._home = options.devices[0]
        self._is_on_host = self._home.type == "cpu"
        self._schedules: dict[Any, Schedule] = {}
        self._told: set[str] = set()  # reasons for which the first device does a call alone

    def run(self, function: str | Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The outputs of a method of the module, by its name, or of a function of it.

        Raises:
            FlowdpError: The outputs cannot be joined, or are not those of one device.
            Exception: Raised by the module, with a note that names rank and device.
        """
        replicas = self._replicas
        if replicas is None or (self._pace is not None and self._pace.is_settled):
            return self._call_alone(function, args, kwargs)
        if (seen := watcher()) is not None:
            self._tell_alone(f"{seen} sees one thread alone")
            return self._call_alone(function, args, kwargs)
        with replicas.turn:
            replicas.look()
            schedule = self.schedule(function)
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
                call = Call(arguments, run, tuple(sizes), schedule.told)
                if why := check_call(replicas, call):
                    schedule.is_alone = True
                    self._tell_alone(why)
                    return self._call_alone(function, args, kwargs, arguments)
            outputs = self._run_cut(run, arguments, sizes)
            schedule.passed(form)
            self._balancer.note_work(sizes)
            if self._sums is not None and torch.is_grad_enabled():
                self._sums.attend(arguments.samples)
            return outputs

    def _call_alone(
        self, function: str | Callable[..., Any], args: Any, kwargs: Any, known: Arguments | None = None
    ) -> Any:
        """The outputs of a call, by the first device."""
        if not self._is_on_host:
            args, kwargs = tree_map(self._bring_home, [args, kwargs])
        if self._replicas is not None or self._balancer.timeline is not None:
            samples = batch_length([args, kwargs]) if known is None else known.samples
            self._balancer.note_alone(samples or 0)
        if self._captured is not None and function == "forward":
            return self._captured(args, kwargs)
        call = _bound(function, self._module)
        if self._sums is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        samples = Arguments(self._layout, self.schedule(function).callee, args, kwargs).samples
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

    def schedule(self, function: str | Callable[..., Any]) -> Schedule:
        """The schedule of a method's name, or of a function of the module."""
        # A lambda is another object in every call, and its code is not.
        inner = function.func if isinstance(function, partial) else function
        key = inner if isinstance(inner, str) else getattr(inner, "__code__", type(inner))
        if key not in self._schedules:
            if isinstance(function, str):
                callee = Callee(getattr(self._module, function, self._module.forward))
                callee.name = f"{type(self._module).__name__}.{function}"
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
            home = self._home
            log.warning(
                "%s%s, so %s does such calls alone, and the other devices do nothing", why, more, home
            )

    def _bring_home(self, leaf: Any) -> Any:
        return move(leaf, self._home) if isinstance(leaf, Tensor) else leaf


def _bound(function: str | Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A method of a module by its name, or a function that takes the module first."""
    if not isinstance(function, str):
        return partial(function, module)
    if function == "forward":
        return module
    method: Callable[..., Any] = getattr(module, function)
    return method
