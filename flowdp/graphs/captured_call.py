"""Captured calls: when recorded graphs replace a module's forward in a loop that the user owns.

A `CapturedCall` stands between the loop and its module. It decides, for each call, whether graphs run or the
user's Python does, and compares the two now and then, as `Captured` does for the steps of a Trainer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data.trees import Form, flatten
from flowdp.device.accelerator import device_generator, untried
from flowdp.device.stopwatch import Stopwatch
from flowdp.device.streams import Lane, StreamLane
from flowdp.device.torch_modes import watcher
from flowdp.errors import OptionError
from flowdp.graphs.base import NotCaptured
from flowdp.graphs.call_graphs import CallGraphs, Pattern, unique_tensors
from flowdp.graphs.guards import Guards
from flowdp.graphs.trials import BOUND, HALF_BOUND, difference, spec_of, without_trace
from flowdp.options import CaptureOptions
from flowdp.policy.capture_plan import FUTILE, CapturePlan, FormPlan, LaunchWatch
from flowdp.policy.formats import format_error

__all__ = ["CapturedCall", "captured_call"]

log = logging.getLogger("flowdp")

MOST_AHEAD = 8
"""Calls on the device behind which no other is timed: the host would have to wait for one."""

MOST_PATTERNS = 4
"""Sets of outputs whose backward gets a graph of its own."""

MOST_SEEN = 64
"""Backwards of eager calls of a form that are remembered."""

Backwards = dict[int, set[int]]
"""Outputs that had gradients, in each backward, by the number that torch gives it."""

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
    lane, is_alone = lanes[0], len(lanes) == 1 and not is_summed
    is_fit = is_alone and untried(lane.device.type) is None
    if option is not False and is_fit and isinstance(lane, StreamLane):
        return CapturedCall(module, lane, None if option is True else LaunchWatch())
    if option is True:
        devices = ", ".join(str(one.device) for one in lanes)
        where = "the gradients are summed over machines" if is_summed else f"the devices are {devices}"
        raise OptionError(
            f"capture=True records calls as CUDA graphs on one CUDA device of one machine, and {where}; "
            "capture='auto' (the default) records them where that can be done and pays"
        )
    return None


class CapturedCall:
    """Decides for each training call of a module whether recorded graphs run; see the module.

    Args:
        module: Module that is called.
        lane: Lane of its device.
        watch: Tells whether capture pays; None: calls are captured in any case.
        options: Options.

    Attributes:
        ended: Why all calls are eager from now on; None: they are captured, or will be.

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
        options = options or CaptureOptions()
        self.ended: str | None = None
        self._module = module
        self._lane = lane
        self._watch = watch
        self._plan = CapturePlan(options.graphs, options.compare_every)
        self._turn = threading.Lock()
        self._inside: int | None = None  # the thread that has the turn
        self._stopwatch = Stopwatch(lane)
        self._launches_ms: deque[float] = deque()
        self._stream: Any = None
        self._guards: Guards | None = None
        self._changes = 0  # calls in a row before which something has changed
        self._obstacle: str | None = None  # until something changes
        self._forms: list[_Form] = []
        self._told: set[str] = set()

    @property
    def is_running(self) -> bool:
        """Whether calls run as graphs."""
        return any(form.graphs is not None for form in list(self._forms))

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The outputs of a call of the module.

        Raises:
            Exception: As the module raises it.
        """
        module = self._module
        if self.ended is not None or not module.training or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        if self._inside == threading.get_ident():  # a call inside of a call
            return module(*args, **kwargs)
        with self._turn:  # a recording has other tensors in the places of the parameters
            self._inside = threading.get_ident()
            try:
                return self._run(args, kwargs)
            finally:
                self._inside = None

    def close(self) -> None:
        """Let go of all graphs; calls are eager from now on."""
        self.ended = self.ended or "it is closed"
        self._forms.clear()

    def _run(self, args: Any, kwargs: Any) -> Any:
        if (seen := watcher()) is not None:
            self._tell(f"calls under {seen} are eager")
            return self._module(*args, **kwargs)
        if self._lane.device_module.is_current_stream_capturing():
            return self._module(*args, **kwargs)
        if self._guards is None and not self._begins():
            return self._time(args, kwargs)
        found = self._form_of(args, kwargs)
        if found is None:
            return self._module(*args, **kwargs)
        form, leaves = found
        if form.graphs is not None and form.graphs.is_busy:
            return self._module(*args, **kwargs)
        assert self._guards is not None
        change = self._guards.changed()
        self._changes = 0 if change is None else self._changes + 1
        if change is not None:
            self._void(change)
        elif form.graphs is not None and form.has_other_patterns:
            form.drop()
        if self.ended is not None or self._obstacle is not None:
            return self._module(*args, **kwargs)
        action = "eager" if change else form.plan.next(is_steady=self._plan.is_steady)
        if action == "record" and self._record(form, leaves):
            action = form.plan.next(is_steady=True)
        if self.ended is not None:
            return self._module(*args, **kwargs)
        if action == "eager":
            return self._eager(form, args, kwargs)
        assert form.graphs is not None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if action == "compare":
            return self._compare(form, form.graphs, tensors, args, kwargs)
        return form.graphs.run(tensors)

    # ------------------------------------------------------------ whether it pays
    def _begins(self) -> bool:
        """Whether calls are captured from this one on."""
        watch = self._watch
        if watch is not None:
            if watch.is_behind is None:
                return False
            if not watch.is_behind:
                self._end(
                    f"{self._lane.device} takes {watch.device_ms:.3g} ms for the kernels of a call, and the "
                    f"host {watch.launch_ms:.3g} ms to launch them"
                )
                return False
            self._tell(
                f"{self._lane.device} waits for launches, {watch.launch_ms:.3g} ms a call: calls run as CUDA "
                "graphs from now on, without the module's Python (capture=False leaves them eager)",
                is_shown=True,
            )
        self._stream = self._lane.current()
        self._guards = Guards({"": self._module}, self._module.forward)
        self._look()
        return self.ended is None

    def _time(self, args: Any, kwargs: Any) -> Any:
        """An eager call, timed; nothing waits for the device."""
        watch, stopwatch, launches = self._watch, self._stopwatch, self._launches_ms
        while launches and stopwatch.is_known:
            assert watch is not None
            watch.take(launches.popleft(), stopwatch.take_ms())
        if self.ended is not None or len(launches) >= MOST_AHEAD:
            return self._module(*args, **kwargs)
        is_ahead = bool(launches)  # the device has an earlier call to do, and waits for no launch of this one
        start_s = perf_counter()
        with stopwatch.running():
            outputs = self._module(*args, **kwargs)
        launches.append(0.0 if is_ahead else 1e3 * (perf_counter() - start_s))
        stopwatch.lap()
        self._observe(outputs, {})
        return outputs

    # ------------------------------------------------------------ forms
    def _form_of(self, args: Any, kwargs: Any) -> tuple[_Form, list[Any]] | None:
        """The form of a call, and the leaves of its arguments; None: it is eager."""
        lane = self._lane
        if lane.current() != self._stream:
            self._tell("calls on another stream than the first one are eager")
            return None
        leaves, tree = flatten([args, kwargs])
        kind = lane.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        try:
            specs = casts, *(spec_of(one, "a call") for one in leaves)
        except NotCaptured as reason:
            self._tell(f"{reason}: such calls are eager")
            return None
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            self._tell("calls whose arguments require grad are eager")
            return None
        for form in self._forms:
            if form.specs == specs and form.tree == tree:
                return form, leaves
        if (plan := self._plan.add()) is None:
            self._tell(
                f"calls come in more than {len(self._forms)} forms (shapes, numbers); others are eager"
            )
            return None
        self._forms.append(_Form(specs, tree, plan))
        return self._forms[-1], leaves

    def _record(self, form: _Form, leaves: Sequence[Any]) -> bool:
        try:
            assert self._guards is not None
            graphs = CallGraphs(self._module, self._lane, leaves, form.tree, self._guards.state)
            graphs.record(form.patterns)
        except NotCaptured as reason:
            self._end(str(reason))
            return False
        form.graphs = graphs
        form.plan.recorded()
        return True

    def _look(self) -> None:
        """Look at the module for what forbids to capture it as it is now."""
        assert self._guards is not None
        if self._guards.obstacle is not None:
            self._end(self._guards.obstacle)
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        hooked = [
            name or "the module"
            for name, part in self._module.named_modules()
            if any(getattr(part, key, None) for key in hooks)
        ]
        self._obstacle = f"{hooked[0]} has a hook, which would not be called" if hooked else None
        if self._obstacle is not None:
            self._tell(f"calls are eager: {self._obstacle}")

    # ------------------------------------------------------------ calls
    def _eager(self, form: _Form, args: Any, kwargs: Any) -> Any:
        """An eager call, to see what it changes, and of which outputs its backward has gradients."""
        assert self._guards is not None
        outputs = self._module(*args, **kwargs)
        self._observe(outputs, form.seen)
        change = self._guards.changed()
        if change is not None:
            self._guards.retake()
            self._look()
        if self._plan.stepped(has_changed=change is not None):
            self._end(f"each call changes Python's state, which a captured one would not do ({change})")
        return outputs

    def _observe(self, outputs: Any, seen: Backwards) -> None:
        """Note the outputs of which each backward has gradients."""
        own: Backwards = {}  # of this call
        for place, output in enumerate(unique_tensors(flatten(outputs)[0])):
            if output.requires_grad and not output.is_leaf:
                output.register_hook(partial(self._note, seen, own, place))

    def _note(self, seen: Backwards, own: Backwards, place: int, _gradient: Tensor) -> None:
        if torch.is_grad_enabled() and self.ended is None:
            self._end("its backward is differentiated again (create_graph=True)")
        backward = torch._C._current_graph_task_id()
        if backward not in own and any(place not in others for others in own.values()):
            self._end("several backwards go through different outputs of one call")
        own.setdefault(backward, set()).add(place)
        if len(seen) < MOST_SEEN:
            seen.setdefault(backward, set()).add(place)

    def _compare(
        self, form: _Form, graphs: CallGraphs, tensors: Sequence[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """The eager call, beside trials of forward and backward by graphs and by Python, from one state."""
        device = self._lane.device
        generator = device_generator(device)
        assert self._guards is not None
        buffers, state = list(self._module.buffers()), self._guards.state
        noise = partial(_noise, torch.Generator(device).manual_seed(form.plan.runs))
        failure, pairs = "", []
        try:
            with without_trace(state, generator):
                mine = graphs.forward(tensors)
                after, left = generator.get_state(), [buffer.clone() for buffer in buffers]
                given = [noise(place, one) for place, one in enumerate(mine)]
                made = {
                    pattern: graphs.backward(
                        [one if place in pattern else None for place, one in enumerate(given)]
                    )
                    for pattern in graphs.patterns
                }
            with without_trace(state, generator):
                right = graphs.eager(lambda place, _: given[place])
            names = {id(one): name for name, one in self._module.named_parameters()}
            for pattern, found in made.items():
                for parameter, one, other in zip(graphs.parameters, found, right[pattern], strict=True):
                    pairs.append((f"the gradient of {names[id(parameter)]!r}", one, other))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failure = f"it raises {format_error(error)[:400]}"
        outputs = self._eager(form, args, kwargs)
        if self.ended is not None:
            return outputs
        if not failure:
            theirs = unique_tensors(flatten(outputs)[0])
            if len(theirs) != len(mine):
                failure = "it has another number of outputs"
            pairs += zip(graphs.names, mine, theirs, strict=False)
            named = [f"buffer {name!r}" for name, _ in self._module.named_buffers()]
            pairs += zip(named, left, self._module.buffers(), strict=False)
            if not torch.equal(after, generator.get_state()):
                failure = "it draws other random numbers"
        for name, one, other in () if failure else pairs:
            if found_one := difference(one, other, self._bound):
                failure = f"{name} {found_one}"
                break
        if failure:
            self._end(f"a captured call differs from an eager one: {failure}", differs=True)
        return outputs

    @property
    def _bound(self) -> float:
        if torch.are_deterministic_algorithms_enabled():
            return 0.0
        is_half = torch.is_autocast_enabled(self._lane.device.type) or any(
            one.dtype in HALF for one in self._module.parameters()
        )
        return HALF_BOUND if is_half else BOUND

    def _void(self, change: str) -> None:
        assert self._guards is not None
        had_graphs = self.is_running
        for form in self._forms:
            form.graphs = None
        self._guards.retake()
        self._look()
        if self._plan.changed() or self._changes == FUTILE:
            self._end(f"the state that a call depends on changes too often, the last time: {change}")
        elif had_graphs:
            self._tell(f"{change}; the call is captured anew")

    def _end(self, reason: str, *, differs: bool = False) -> None:
        self.ended = reason
        self._forms.clear()
        how = "go on eagerly, from the eager result" if differs else "are eager"
        self._tell(f"calls {how}: {reason}", is_shown=differs)

    def _tell(self, text: str, *, is_shown: bool = False) -> None:
        """Log a text once, as a warning where the user has asked for captured calls, or has to see it."""
        if text not in self._told:
            self._told.add(text)
            level = logging.WARNING if is_shown or self._watch is None else logging.INFO
            log.log(level, "capture: %s: %s", type(self._module).__name__, text)


@dataclass(slots=True, eq=False)
class _Form:
    """A form of calls, and the graphs for it.

    Attributes:
        specs: Autocast; shape, strides and dtype of each tensor, and the values of other leaves.
        tree: How the leaves make the arguments.
        plan: Decides whether a call is eager, recorded, replayed or compared.
        graphs: Once they are recorded.
        seen: Outputs that had gradients, in each backward of eager calls.
    """

    specs: tuple[Any, ...]
    tree: Form
    plan: FormPlan
    graphs: CallGraphs | None = None
    seen: Backwards = field(default_factory=dict)

    @property
    def patterns(self) -> list[Pattern]:
        """Those of all backwards that have been seen, the first ones."""
        return list(dict.fromkeys(Pattern(places) for places in list(self.seen.values())))[:MOST_PATTERNS]

    @property
    def has_other_patterns(self) -> bool:
        """Whether a backward was of outputs for which the graphs have none of its own, and may have."""
        assert self.graphs is not None
        return bool(self.graphs.others) and self.graphs.may_have_more and len(self.patterns) < MOST_PATTERNS

    def drop(self) -> None:
        """Let go of the graphs, to record them anew, for the patterns that have come, too."""
        assert self.graphs is not None
        for pattern in self.graphs.others:
            self.seen[-1 - len(self.seen)] = set(pattern)
        self.graphs = None
        self.plan.void()


def _noise(generator: torch.Generator, _place: int, output: Tensor) -> Tensor:
    """Random gradients of an output; of one without, numbers that nothing reads."""
    dtype = output.dtype if output.is_floating_point() or output.is_complex() else torch.float32
    return torch.randn(output.shape, generator=generator, dtype=dtype, device=output.device)
