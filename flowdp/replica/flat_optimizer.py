"""An optimizer that steps the flat memory of a replica: few long tensors instead of some hundred short ones.

The replica's own optimizer stays as the user made it, parameter by parameter: schedulers, checkpoints and
state_dicts go on with it. A twin of the same class steps runs of parameters that lie next to each other in
one group, as one flat parameter each. At each step it takes over all options of the groups; its state is put
into the replica's optimizer, as views, whenever it is asked for, and read from there when it was loaded.

A parameter without a gradient is not stepped, as in torch. So a run whose parameters
do not all have one is divided, for good, and each of its parts is stepped when it has gradients.

Where ranks divide the flat memory, each has a twin for its span alone. The replica's optimizer then has no
state: `joined_state` has that of all, in torch's form.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from flowdp.device.flat_gradients import FlatGradients
from flowdp.device.flat_parameters import ALIGNMENT, FlatReplica
from flowdp.errors import FlowdpError, OptionError

__all__ = ["FlatOptimizer", "joined_state", "obstacle", "refuse_state"]

log = logging.getLogger("flowdp")

ELEMENTWISE: dict[type[Optimizer], frozenset[str]] = {
    SGD: frozenset({"momentum_buffer"}),
    Adam: frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    AdamW: frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
}
"""Optimizers that step flat memory, and the entries of their state in the parameter's form. They compute each
element from that element alone; the other entries are one number: steps. The fused kernel of each reads the
learning rate from the device, if it lies there."""

FUSED: dict[str, frozenset[type[Optimizer]]] = {
    "cpu": frozenset({Adam, AdamW}),  # torch 2.13's fused SGD computes nonsense in bfloat16 there
    "cuda": frozenset({SGD, Adam, AdamW}),
}
"""Where torch's fused kernel is taken if the user left the choice to torch."""

LARGE = 16_384
"""Elements of a parameter, in the mean over all, from which on the CPU writes and reads longer than it calls:
gradients that are added up in flat memory are zeroed and read once more, some 30 us for 200,000 elements."""

CHOICES = {"fused": None, "foreach": None, "capturable": False}
"""Options by which a user chooses how a step is computed, and their defaults."""


PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of options that a recorded step may repeat."""


@dataclass(slots=True, eq=False)
class _Run:
    """Parameters of one group, dtype and state that lie next to each other.

    Attributes:
        start: First parameter, as the gradients count them.
        stop: The one behind the last.
        begin: Where the first one lies in the memory of its dtype, or the span begins, in elements.
        flat: All of them, with the gaps between. Shape (elements,).
        gradient: Gradients of all of them. Shape (elements,).
        is_on: Whether they have gradients in this step.
    """

    start: int
    stop: int
    begin: int
    flat: nn.Parameter
    gradient: Tensor
    is_on: bool = True


def obstacle(optimizer: Optimizer, module: nn.Module, replica: FlatReplica) -> str | None:
    """Why an optimizer has to step its parameters one by one; None: it can step flat memory."""
    if type(optimizer) not in ELEMENTWISE:
        return f"{type(optimizer).__name__} is none of SGD, Adam and AdamW"
    if any(_step_hooks(optimizer)) or _has_own_step(optimizer):
        return "it has hooks, or a step of its own"
    if any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse for part in module.modules()):
        return "an embedding has sparse gradients"
    flat = {parameter for parameter, _ in replica.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(set(parameters)) < len(parameters):
        return "a parameter is in it twice"
    for parameter in parameters:
        if parameter.is_complex():
            return "a parameter is complex"
        if parameter._post_accumulate_grad_hooks:
            return "a parameter has a hook that runs when its gradient is there"
        if parameter.requires_grad and parameter not in flat:
            return "a parameter does not lie in the flat memory, or shares it with another one"
    return _unfit_options(optimizer) or _no_gain(optimizer, [view for _, view in replica.parameters()])


class FlatOptimizer:
    """Steps a replica's parameters as flat memory, in the name of its optimizer.

    A step is `prepare`, a step of the optimizer that this returns, then `finish`.

    Args:
        own: The replica's optimizer; `obstacle` has found none.
        replica: The flat memory.
        gradients: Gradients of the replica.

    Threads:
        The owner of the replica; `publish` any, while the replica is not stepped.

    Streams:
        On the current one; only `prepare` reads back, and only after a state was loaded.
    """

    def __init__(self, own: Optimizer, replica: FlatReplica, gradients: FlatGradients) -> None:
        self._own = own
        self._hooks = _step_hooks(own)
        self._gradients = gradients
        self._parameters = gradients.parameters
        self._views = [view for _, view in replica.parameters()]
        self._pointers = [view.data_ptr() for view in self._views]
        self._memories = {
            flat.memory.dtype: (flat.memory, home)
            for flat, home in zip(replica.flats, gradients.homes, strict=True)
        }
        self._flats = replica.flats
        self._spans: dict[torch.dtype, slice] = {}  # what this rank steps; empty: all
        self._names = ELEMENTWISE[type(own)]
        self._twin: Optimizer | None = None
        self.is_joining = False  # the state is asked for by `joined_state`
        self._is_ahead = False  # the twin has stepped since the replica's optimizer got its state
        self._is_apart = False  # the replica's optimizer steps for itself, for good
        self._seen: list[object] = []  # see `_look`
        self._runs: list[list[_Run]] = []  # of each group
        self._members: list[int] = []  # parameters of all runs
        self._touched: list[bool] = []  # of all parameters, those that have gradients in this step
        self._stepped: list[nn.Parameter] = []  # these, as far as they are members
        self._moved: list[int] = []  # those that the module keeps elsewhere
        self._picks_fused = False
        self._revision = 0  # counts up with every change of the runs
        self._lock = threading.Lock()
        self._strays = self._find_strays()
        this = weakref.ref(self)
        own.register_state_dict_pre_hook(lambda _: _publish(this()), prepend=True)
        own.register_load_state_dict_post_hook(lambda _: _reload(this()))

    def prepare(self, touched: Sequence[bool]) -> Optimizer:
        """Make all ready for a step by the gradients that lie in flat memory.

        Args:
            touched: Flag per parameter: it has a gradient.

        Returns:
            The optimizer to step.
        """
        own = self._own
        if not self._is_apart and (self._twin is None or self._look() != self._seen or any(self._hooks)):
            self._rebuild()
        if self._strays and self._twin is not None and any(stray.grad is not None for stray in self._strays):
            self._step_apart("a parameter that was frozen at first is trained")
        twin = self._twin
        if twin is None:
            self._gradients.show(touched)
            return own
        for mine, theirs in zip(twin.param_groups, own.param_groups, strict=True):
            parameters = mine["params"]
            mine.update(theirs)
            mine["params"] = parameters
            if self._picks_fused:
                mine["fused"] = True
        if touched != self._touched:
            self._choose(touched)
        pointers = [parameter.data_ptr() for parameter in self._parameters]
        self._moved = []
        if pointers != self._pointers and not self._spans:  # else ranks copy them in and out at their meeting
            self._moved = [at for at in self._members if pointers[at] != self._pointers[at]]
            for at in self._moved:
                self._views[at].copy_(self._parameters[at].data)
        if self._picks_fused and isinstance(twin, SGD):
            _begin_momentum(twin)
        return twin

    def finish(self) -> None:
        """Bring the optimizer's step to the module, to autograd and to schedulers."""
        if self._strays:
            self.drop_strays()
        if self._twin is None:
            return
        for at in self._moved:
            self._parameters[at].data.copy_(self._views[at])
        self._is_ahead = True
        # By its version autograd sees that a parameter has changed since a forward used it.
        torch.autograd.graph.increment_version(self._stepped)
        self._own._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it

    def drop_strays(self) -> None:
        """Clear the gradients of parameters that were frozen when the flat memory was made."""
        for parameter in self._strays:
            parameter.grad = None

    def publish(self) -> None:
        """Give the replica's optimizer the state as it is: views of the flat one, and numbers of its own.

        A number for each parameter: an optimizer of torch's that loads one `step` for all would count it
        once for each.
        """
        with self._lock:
            if self._twin is None or not self._is_ahead or self._spans:
                return
            state, own = self._twin.state, self._own.state
            for run in chain.from_iterable(self._runs):
                if found := state.get(run.flat):
                    for at in range(run.start, run.stop):
                        own[self._parameters[at]] = {
                            name: self._cut(value, run, at)
                            if name in self._names
                            else self._own_number(value)
                            for name, value in found.items()
                        }
            self._is_ahead = False

    def reload(self) -> None:
        """Drop the twin: the next step begins with a new state of the replica's optimizer."""
        self._twin = None
        self._runs = []
        self._is_ahead = False

    # ---------------------------------------------------------------- graphs
    @property
    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [group["lr"] for group in self._own.param_groups]

    def can_be_recorded(self) -> bool:
        """Whether a step can be recorded as a graph, its rates aside."""
        own, twin = self._own, self._twin
        if twin is None or any(self._hooks):
            return False
        if self._spans or self._strays or self._moved:
            return False
        if any(view.dtype is torch.float64 for view in self._views):
            return False  # a rate on the device is float32
        is_fused = self._picks_fused or all(group.get("fused") for group in own.param_groups)
        options = [item for group in own.param_groups for item in group.items()]
        is_plain = all(isinstance(value, PLAIN) for name, value in options if name not in ("params", "lr"))
        return (
            is_fused
            and is_plain
            and self._has_state()
            and all(isinstance(rate, float) for rate in self.rates)
        )

    def _has_state(self) -> bool:
        """Whether all that is stepped has its state: a recording that makes it would make it in each step."""
        assert self._twin is not None
        state = self._twin.state
        for group, runs in zip(self._own.param_groups, self._runs, strict=True):
            for run in runs if not isinstance(self._own, SGD) or group["momentum"] else ():
                found = state.get(run.flat, {})
                if run.is_on and (not found or found.get("momentum_buffer", found) is None):
                    return False
        return True

    def graph_key(self, touched: Sequence[bool]) -> object:
        """All that a recorded step depends on, but for the rates.

        Args:
            touched: As for `prepare`.
        """
        options = [
            [len(value) if name == "params" else value for name, value in group.items() if name != "lr"]
            for group in self._own.param_groups
        ]
        return self._revision, self._twin is None or any(self._hooks), options, touched

    @contextmanager
    def recording(self, rates: Sequence[Tensor]) -> Iterator[None]:
        """Context in which a step of `prepare`'s optimizer is recorded, with its rates on the device."""
        twin = self._twin
        assert twin is not None
        before = [dict(group) for group in twin.param_groups]
        for group, rate in zip(twin.param_groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True  # torch asks for it; the fused kernel is the same
        try:
            yield
        finally:
            for group, options in zip(twin.param_groups, before, strict=True):
                group.update(options)

    # ---------------------------------------------------------------- spans
    @property
    def is_cut(self) -> bool:
        """Whether it steps a span alone."""
        return bool(self._spans)

    def own_span(self, rank: int) -> None:
        """Step this rank's span of the flat memory alone, and have the state of that.

        Streams:
            On the current one, which has to wait for those that made the state.
        """
        self._spans = {flat.memory.dtype: flat.span(rank) for flat in self._flats}
        self._rebuild()

    def unfit(self) -> str | None:
        """Why it has to step its parameters one by one by now; None: it has not."""
        own = self._own
        if any(self._hooks):
            return "hooks were registered on it"
        return _unfit_options(own) or self._unfit_state()

    def pieces(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """State of the span: a parameter, where a part of it begins, and the state of that part."""
        if self._twin is None:  # a state was loaded
            self._rebuild()
        assert self._twin is not None
        for run in chain.from_iterable(self._runs):
            if found := self._twin.state.get(run.flat):
                for at in range(run.start, run.stop):
                    mine, its = self._part(run, at)
                    state = {
                        name: value[mine] if name in self._names else self._own_number(value)
                        for name, value in found.items()
                    }
                    yield at, its.start, state

    def _join(self, at: int, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        """The state of a parameter from its parts and where they begin."""
        view, memory = self._views[at], parts[0][1]
        if len(parts) > 1:
            memory = torch.empty(view.numel(), dtype=memory.dtype)
            for start, part in parts:
                memory[start : start + len(part)].copy_(part)
        return memory.as_strided(view.shape, view.stride())

    def _holds(self, at: int) -> bool:
        """Whether a part of a parameter is in the span."""
        view = self._views[at]
        span, start = self._spans.get(view.dtype), view.storage_offset()
        return span is None or span.start - max(view.numel(), 1) < start < span.stop

    def _part(self, run: _Run, at: int) -> tuple[slice, slice]:
        """The part of a parameter that is in a run: as a slice of the run, and of the parameter's memory."""
        start = int(self._views[at].storage_offset())
        begin = max(start, run.begin)
        end = min(start + self._views[at].numel(), run.begin + run.flat.numel())
        return slice(begin - run.begin, end - run.begin), slice(begin - start, end - start)

    # ---------------------------------------------------------------- the twin
    def _look(self) -> list[object]:
        """Properties of the groups whose change makes another twin necessary."""
        return [(len(group["params"]), group.get("eps")) for group in self._own.param_groups]

    def _rebuild(self) -> None:
        """Make a twin that has the groups and the state of the replica's optimizer."""
        own = self._own
        if self._spans and self._twin is not None:
            raise OptionError(
                "policy='exact' on several CUDA devices: hooks were registered on the optimizer during the "
                "run, or its groups or their eps were changed, while each device steps a part of its "
                "parameters: let the factory of the optimizer do that"
            )
        self.publish()
        self.reload()
        self._seen = self._look()
        self._strays = self._find_strays()
        why = self.unfit()
        if why is not None and self._spans:  # a state was loaded
            raise OptionError(
                f"policy='exact' on several CUDA devices: {why}, since a state was loaded into the optimizer "
                "during the run, while each device steps a part of its parameters"
            )
        if why is not None:
            self._step_apart(why)
            return
        self._picks_fused = _picks_fused(own, self._views[0].device)
        options = {"fused": True} if self._picks_fused else {}
        places = {parameter: at for at, parameter in enumerate(self._parameters)}
        groups: list[dict[str, Any]] = []
        for group in own.param_groups:
            members = sorted(places[one] for one in group["params"] if one in places)
            members = list(filter(self._holds, members))
            self._runs.append(list(self._runs_of(members)))
            groups.append({**group, **options, "params": []})
        kinds = inspect.signature(type(own)).parameters
        defaults = {name: value for name, value in own.defaults.items() if name in kinds}
        self._twin = type(own)(groups, **{**defaults, **options})
        self._fill_groups()
        self._members = [at for run in chain.from_iterable(self._runs) for at in range(run.start, run.stop)]
        self._touched = []
        for run in chain.from_iterable(self._runs):
            self._absorb(run)
        for parameter in self._parameters if self._spans else ():
            own.state.pop(parameter, None)

    def _step_apart(self, why: str) -> None:
        """Leave the steps to the replica's optimizer, for good."""
        log.debug("the optimizer steps its parameters one by one: %s", why)
        self.publish()
        self.reload()
        self._is_apart = True

    def _fill_groups(self) -> None:
        assert self._twin is not None
        self._revision += 1
        for group, runs in zip(self._twin.param_groups, self._runs, strict=True):
            group["params"] = [run.flat for run in runs]

    def _find_strays(self) -> list[Tensor]:
        flat = set(self._parameters)
        return [one for group in self._own.param_groups for one in group["params"] if one not in flat]

    # ---------------------------------------------------------------- runs
    def _runs_of(self, members: Sequence[int]) -> Iterator[_Run]:
        """The longest runs of parameters that lie next to each other and have been stepped together."""
        start = 0
        for stop in range(1, len(members) + 1):
            before = members[stop - 1]
            if stop < len(members):
                at = members[stop]
                if (
                    at == before + 1
                    and self._views[at].dtype == self._views[before].dtype
                    and self._form(at) == self._form(before)
                ):
                    continue
            yield self._run(members[start], before + 1)
            start = stop

    def _run(self, start: int, stop: int) -> _Run:
        first, last = self._views[start], self._views[stop - 1]
        memory, home = self._memories[first.dtype]
        step = ALIGNMENT // first.dtype.itemsize
        begin = int(first.storage_offset())
        end = -(-(int(last.storage_offset()) + last.numel()) // step) * step
        if span := self._spans.get(first.dtype):
            begin, end = max(begin, span.start), min(end, span.stop)
        flat = nn.Parameter(memory[begin:end])
        flat.grad = gradient = home[begin:end]
        return _Run(start, stop, begin, flat, gradient)

    def _choose(self, touched: Sequence[bool]) -> None:
        """Choose the runs to step: those of parameters with gradients; divide the mixed ones."""
        self._touched = list(touched)
        self._stepped = [self._parameters[at] for at in self._members if touched[at]]
        before = sum(map(len, self._runs))
        for runs in self._runs:
            runs[:] = chain.from_iterable(self._divide(run, touched) for run in runs)
        if sum(map(len, self._runs)) > before:
            self._fill_groups()
        for run in chain.from_iterable(self._runs):
            if run.is_on != touched[run.start]:
                run.is_on = touched[run.start]
                run.flat.grad = run.gradient if run.is_on else None

    def _divide(self, run: _Run, touched: Sequence[bool]) -> Iterator[_Run]:
        assert self._twin is not None
        pieces = [list(piece) for _, piece in groupby(range(run.start, run.stop), touched.__getitem__)]
        if len(pieces) == 1:
            yield run
            return
        state = self._twin.state.pop(run.flat, {})
        for piece in pieces:
            part = self._run(piece[0], piece[-1] + 1)
            start = part.begin - run.begin
            if state:
                self._twin.state[part.flat] = {
                    name: value[start : start + part.flat.numel()] if name in self._names else value.clone()
                    for name, value in state.items()
                }
            yield part

    # ---------------------------------------------------------------- state
    def _absorb(self, run: _Run) -> None:
        """Move the state of a run's parameters into flat memory; the replica's optimizer gets views of it."""
        assert self._twin is not None
        found = {name: value for name, value in self._state_of(run.start).items() if value is not None}
        if not found:
            return
        mine: dict[str, Tensor] = {}
        for name, value in found.items():
            if name not in self._names:
                mine[name] = self._twin_number(value)
                continue
            mine[name] = torch.zeros(run.flat.numel(), dtype=value.dtype, device=run.flat.device)
            for at in range(run.start, run.stop):
                saved = self._state_of(at)[name]
                if self._spans:
                    ours, its = self._part(run, at)
                    mine[name][ours].copy_(self._in_memory(saved, at)[its])
                    continue
                view = self._cut(mine[name], run, at)
                view.copy_(saved)
                self._own.state[self._parameters[at]][name] = view
        self._twin.state[run.flat] = mine

    def _cut(self, value: Tensor, run: _Run, at: int) -> Tensor:
        """A parameter's part of a flat state."""
        view = self._views[at]
        start = value.storage_offset() + view.storage_offset() - run.begin
        return value.as_strided(view.shape, view.stride(), start)

    def _in_memory(self, value: Tensor, at: int) -> Tensor:
        """A parameter's state as its elements lie in memory. Shape (elements,)."""
        view = self._views[at]
        dense = torch.empty_strided(view.shape, view.stride(), dtype=value.dtype, device=value.device)
        return dense.copy_(value).as_strided((view.numel(),), (1,))

    def _twin_number(self, value: Tensor) -> Tensor:
        """A number of the state as the twin keeps it."""
        if self._picks_fused:
            return value.to(self._views[0].device, torch.float32, copy=True)
        return value.clone()

    def _own_number(self, value: Tensor) -> Tensor:
        """A number of the state as the replica's optimizer would keep it."""
        if self._picks_fused:
            return value.to(torch.promote_types(torch.float32, torch.get_default_dtype()), copy=True)
        return value.clone()

    def _state_of(self, at: int) -> dict[str, Any]:
        found: dict[str, Any] = self._own.state.get(self._parameters[at], {})
        return found

    def _form(self, at: int) -> list[object]:
        """Properties that parameters must share to lie in one flat state."""
        return [
            (name, value.dtype if name in self._names else float(value))
            for name, value in sorted(self._state_of(at).items())
            if value is not None
        ]

    def _unfit_state(self) -> str | None:
        for at, parameter in enumerate(self._parameters):
            for name, value in self._state_of(at).items():
                shape = parameter.shape if name in self._names else ()
                if value is not None and (not isinstance(value, Tensor) or value.shape != shape):
                    return f"its state has {name!r} in another form than torch gives it"
        return None


def joined_state(owners: Sequence[FlatOptimizer]) -> dict[str, Any]:
    """The `state_dict()` of an optimizer whose state the ranks have in spans.

    Args:
        owners: In the order of the ranks.

    Returns:
        As torch's: state that one rank has as a whole is a view of it, and the host has the other.

    Threads:
        Any, while no rank steps; the devices have done all steps.
    """
    first = owners[0]
    first.is_joining = True
    whole: dict[str, Any] = first._own.state_dict()
    first.is_joining = False
    parts: dict[Tensor, list[tuple[int, int, dict[str, Tensor]]]] = {}
    for owner in owners:
        for piece in owner.pieces():
            parts.setdefault(first._parameters[piece[0]], []).append(piece)
    listed = chain.from_iterable(group["params"] for group in first._own.param_groups)
    for number, parameter in enumerate(listed):
        if found := parts.get(parameter):
            at, _, any_part = found[0]
            whole["state"][number] = {
                name: first._join(at, [(start, state[name]) for _, start, state in found])
                if name in first._names
                else value
                for name, value in any_part.items()
            }
    return whole


def _publish(flat: FlatOptimizer | None) -> None:
    if flat is None:
        raise FlowdpError(
            "the replica of this optimizer is gone with its run, and its state, too: take it from the run, "
            "run.join().optimizer_state, or from a checkpoint"
        )
    if flat.is_cut and not flat.is_joining:
        refuse_state()
    flat.publish()


def refuse_state(*_: object) -> NoReturn:
    """Say that the state of an optimizer lies on other devices, too.

    Raises:
        FlowdpError: Always.
    """
    raise FlowdpError(
        "policy='exact': the devices share the state of the optimizer, and this one has a part of it, or "
        "none: take it from a checkpoint, run.checkpoint(), or behind the run, run.join().optimizer_state"
    )


def _reload(flat: FlatOptimizer | None) -> None:
    if flat is not None:
        flat.reload()


def _step_hooks(optimizer: Optimizer) -> list[dict[int, Any]]:
    """The tables in which an optimizer keeps the hooks of its steps, for its life."""
    return [hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks") and "step" in name]


def _has_own_step(optimizer: Optimizer) -> bool:
    step = vars(optimizer).get("step")
    # Torch's schedulers wrap the step of the class, or one of the user's.
    return step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step


def _no_gain(optimizer: Optimizer, views: Sequence[Tensor]) -> str | None:
    device, elements = views[0].device, sum(view.numel() for view in views)
    if device.type != "cpu" or elements <= LARGE * len(views) or _picks_fused(optimizer, device):
        return None
    return "few and large parameters on the CPU: adding up in flat memory costs more than the calls saved"


def _picks_fused(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a fused kernel is taken, because there is one and the user has left the choice to torch."""
    groups = optimizer.param_groups
    if type(optimizer) is SGD and any(group["momentum"] and group["dampening"] for group in groups):
        return False  # the first gradient is not dampened, and all have to come at the same step
    return type(optimizer) in FUSED.get(device.type, ()) and not any(
        group.get(name) is not None and group[name] is not default
        for group in groups
        for name, default in CHOICES.items()
    )


def _begin_momentum(optimizer: SGD) -> None:
    """Let those that get their first gradient later than others of their group begin with a momentum of zero.

    Torch's fused kernel takes one step that is the first for all, or for none.
    """
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        stepped = [one for one in group["params"] if one.grad is not None]
        first = [one for one in stepped if optimizer.state[one].get("momentum_buffer") is None]
        for one in first if len(first) < len(stepped) else ():
            optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)


def _unfit_options(optimizer: Optimizer) -> str | None:
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "differentiable=True"
        for parameter in group["params"]:
            # The gaps between parameters are zero, and would become 0 / 0.
            if group.get("eps", 1.0) < torch.finfo(parameter.dtype).smallest_normal:
                return f"eps={group['eps']} is 0 in {parameter.dtype}"
    return None
