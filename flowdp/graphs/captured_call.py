"""Captured calls: when recorded graphs replace a module's forward in a loop that the user owns.

A `CapturedCall` stands between the loop and its module. For each training call graphs run or the user's
Python does, and the two are compared now and then, as `Captured` does for the steps of a Trainer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.device.accelerator import device_generator, untried
from flowdp.device.stopwatch import Stopwatch
from flowdp.device.streams import Lane, StreamLane
from flowdp.device.torch_modes import watcher
from flowdp.device.trees import flatten
from flowdp.errors import OptionError
from flowdp.graphs.base import NotCaptured
from flowdp.graphs.call_graphs import CallGraphs, unique_tensors
from flowdp.graphs.decisions import Decisions, Form, LogOnce
from flowdp.graphs.guards import Guards, hook_tables
from flowdp.graphs.trials import Pair, bound_of, first_difference, spec_of, without_trace
from flowdp.options import CaptureOptions
from flowdp.policy.formats import format_error
from flowdp.policy.worth import LaunchWatch, Periods

__all__ = ["CapturedCall", "captured_call"]

MOST_AHEAD = 8
"""Calls on the device behind which no other is timed: the host would have to wait for one."""

HALF = (torch.float16, torch.bfloat16)


def captured_call(
    module: nn.Module, lanes: Sequence[Lane], option: object, *, is_summed: bool
) -> CapturedCall | None:
    """The captured calls of a module, for `flowdp.setup(capture=option)`; None where they stay eager.

    Args:
        module: Module that is called.
        lanes: One per rank.
        option: As the user gave it.
        is_summed: Whether several machines sum the gradients.

    Raises:
        OptionError: `option` is none, or was True and calls cannot be captured.
    """
    if option != "auto" and not isinstance(option, bool):
        raise OptionError(f"capture must be 'auto', True or False, not {option!r}")
    lane = lanes[0]
    # Of several devices the first does calls alone where cutting does not pay. Nothing promises that.
    is_fit = not is_summed and (len(lanes) == 1 or option == "auto") and untried(lane.device.type) is None
    if option is not False and is_fit and isinstance(lane, StreamLane):
        return CapturedCall(module, lane, None if option is True else LaunchWatch())
    if option is True:
        devices = ", ".join(str(lane.device) for lane in lanes)
        where = "the gradients are summed over machines" if is_summed else f"the devices are {devices}"
        raise OptionError(
            f"capture=True records calls as CUDA graphs on one CUDA device of one machine, and {where}; "
            "capture='auto' (the default) records them where that can be done and pays"
        )
    return None


class CapturedCall(Decisions[CallGraphs]):
    """Decides for each training call of a module whether recorded graphs run; see the module.

    Args:
        module: Module that is called.
        lane: Lane of its device.
        watch: Tells whether capture pays; None: calls are captured in any case.
        options: Options.

    Threads: the user's; they take turns.

    Streams: The caller's current one. Calls on another stream than the first one are eager.
    """

    def __init__(
        self,
        module: nn.Module,
        lane: StreamLane,
        watch: LaunchWatch | None = None,
        options: CaptureOptions | None = None,
    ) -> None:
        super().__init__(
            "call",
            options or CaptureOptions(),
            lambda: Guards(module, module.forward),
            LogOnce(watch is None, type(module).__name__),
            watch,
        )
        self._module = module
        self._lane = lane
        self._turn = threading.RLock()
        self._stopwatch = Stopwatch(lane)
        self._launches_ms: deque[float] = deque()
        self._periods = None if watch is None else Periods()  # until they have told
        self._stream: Any = None

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The outputs of a call of the module.

        Raises:
            Exception: As the module raises it.
        """
        module = self._module
        if self.ended is not None or not module.training or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        with self._turn:  # a recording has other tensors in the places of the parameters
            return self._run(args, kwargs)

    def close(self) -> None:
        """Let go of all graphs; calls are eager from now on."""
        self.ended = self.ended or "it is closed"
        self.drop()

    def _run(self, args: Any, kwargs: Any) -> Any:
        if (periods := self._periods) is not None:
            periods.begins(1e3 * perf_counter())
            if periods.is_slower is not None:
                self._judge(periods)
        if self.ended is not None:
            return self._module(*args, **kwargs)
        if (seen := watcher()) is not None:
            self._tell(f"calls under {seen} are eager")
            return self._module(*args, **kwargs)
        if not self.begins(self._lane.device):
            outputs = self._time(args, kwargs)
            if periods is not None:
                periods.was(is_captured=False)
            return outputs
        self._stream = self._stream or self._lane.current()
        found = self._form_of(args, kwargs)
        if found is None:
            return self._module(*args, **kwargs)
        form, leaves = found
        if form.graph is not None and form.graph.is_busy:
            return self._module(*args, **kwargs)
        action = self.next(form, lambda: self._record(form, leaves))
        if action == "eager":
            return self._watched(args, kwargs)
        assert form.graph is not None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if action == "compare":
            return self._compare(form, form.graph, tensors, args, kwargs)
        if periods is not None:
            periods.was(is_captured=True)
        return form.graph.run(tensors)

    def _judge(self, periods: Periods) -> None:
        """End it where the loop has become slower."""
        self._periods = None
        if periods.is_slower:
            self.end(
                f"the loop takes {periods.captured_ms:.3g} ms from one captured call to the next, and "
                f"{periods.eager_ms:.3g} ms without graphs"
            )

    def _time(self, args: Any, kwargs: Any) -> Any:
        """An eager call, timed; nothing waits for the device."""
        watch, stopwatch, launches = self.watch, self._stopwatch, self._launches_ms
        while launches and stopwatch.is_known:
            assert watch is not None
            watch.take(launches.popleft(), stopwatch.take_ms())
        if self.ended is not None or len(launches) >= MOST_AHEAD:
            return self._module(*args, **kwargs)
        is_ahead = bool(launches)  # the device has an earlier call to do, and waits for no launch of this one
        start_s = perf_counter()
        with stopwatch.running():
            outputs = self._watched(args, kwargs)
        launches.append(0.0 if is_ahead else 1e3 * (perf_counter() - start_s))
        stopwatch.lap()
        return outputs

    def _form_of(self, args: Any, kwargs: Any) -> tuple[Form[CallGraphs], list[Any]] | None:
        """The form of a call, and the leaves of its arguments; None: it is eager."""
        lane = self._lane
        if lane.current() != self._stream:
            self._tell("calls on another stream than the first one are eager")
            return None
        leaves, tree = flatten([args, kwargs])
        kind = lane.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        try:
            specs = [spec_of(leaf, "a call") for leaf in leaves]
        except NotCaptured as reason:
            self._tell(f"{reason}: such calls are eager")
            return None
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            self._tell("calls whose arguments require grad are eager")
            return None
        form = self.form((casts, *specs), tree)
        return None if form is None else (form, leaves)

    def _record(self, form: Form[CallGraphs], leaves: Sequence[Any]) -> CallGraphs:
        for name, part in self._module.named_modules():
            if any(hook_tables(part)):
                raise NotCaptured(f"{name or 'the module'} has a hook, which would not be called")
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device != self._lane.device:
                raise NotCaptured(f"a tensor among the arguments lies on {leaf.device}")
        assert self.guards is not None
        graphs = CallGraphs(self._module, self._lane, leaves, form.tree, self.guards.state)  # type: ignore[arg-type]
        graphs.record()
        return graphs

    def _watched(self, args: Any, kwargs: Any) -> Any:
        """An eager call, to see whether its backward is one that graphs have."""
        outputs = self._module(*args, **kwargs)
        for output in unique_tensors(flatten(outputs)[0]):
            if output.requires_grad and not output.is_leaf:
                output.register_hook(self._note)
        return outputs

    def _note(self, _gradient: Tensor) -> None:
        if torch.is_grad_enabled() and self.ended is None:
            self.end("its backward is differentiated again (create_graph=True)")

    def _compare(
        self,
        form: Form[CallGraphs],
        graphs: CallGraphs,
        tensors: Sequence[Tensor],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The eager call, beside trials of forward and backward by graphs and by Python, from one state."""
        device = self._lane.device
        generator = device_generator(device)
        assert self.guards is not None
        buffers, state = list(self._module.buffers()), self.guards.state
        noise = torch.Generator(device).manual_seed(form.runs)
        failure = ""
        try:
            with without_trace(state, generator):
                mine = graphs.forward(tensors)
                after, left = generator.get_state(), [buffer.clone() for buffer in buffers]
                given = [_noise(noise, one) for one in mine]
                made = graphs.backward(given)
            with without_trace(state, generator):
                right = graphs.eager(given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failure = f"it raises {format_error(error)[:400]}"
        outputs = self._watched(args, kwargs)
        if not failure:
            theirs = unique_tensors(flatten(outputs)[0])
            names = {
                id(parameter): f"the gradient of {name!r}"
                for name, parameter in self._module.named_parameters()
            }
            pairs: list[Pair] = [
                *zip(graphs.names, mine, theirs, strict=False),
                *zip((names[id(parameter)] for parameter in graphs.parameters), made, right, strict=True),
                *zip((f"buffer {n!r}" for n, _ in self._module.named_buffers()), left, buffers, strict=False),
            ]
            is_half = torch.is_autocast_enabled(device.type) or any(
                parameter.dtype in HALF for parameter in self._module.parameters()
            )
            failure = first_difference(pairs, bound_of(is_half=is_half))
            if len(theirs) != len(mine):
                failure = "it has another number of outputs"
            elif not torch.equal(after, generator.get_state()):
                failure = failure or "it draws other random numbers"
        self.check(failure)
        return outputs


def _noise(generator: torch.Generator, output: Tensor) -> Tensor:
    """Random gradients of an output; of one without, numbers that nothing reads."""
    dtype = output.dtype if output.is_floating_point() or output.is_complex() else torch.float32
    return torch.randn(output.shape, generator=generator, dtype=dtype, device=output.device)
