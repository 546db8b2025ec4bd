"""The twin of an optimizer, which steps flat memory: its runs of parameters, and their state.

A run is parameters of one group that lie next to each other and have been stepped together. The twin has one
flat parameter for each; its state is the state of all parameters there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from flowdp.device.copies import ALIGNMENT
from flowdp.device.flat_gradients import FlatGradients
from flowdp.device.flat_parameters import FlatReplica

__all__ = ["ELEMENTWISE", "FUSED", "FlatMemory", "FlatTwin", "Run", "groups_form", "picks_fused"]

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

CHOICES = {"fused": None, "foreach": None, "capturable": False}
"""Options by which a user chooses how a step is computed, and their defaults."""


@dataclass(slots=True, eq=False)
class Run:
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


class FlatMemory:
    """The places of a replica's parameters in flat memory, and of values that are laid out like them.

    Attributes:
        parameters: As the gradients count them.
        views: The place of each.
        spans: The part of each dtype's memory that this rank steps; empty: all.
    """

    def __init__(self, replica: FlatReplica, gradients: FlatGradients) -> None:
        self.parameters = gradients.parameters
        self.views = [view for _, view in replica.parameters()]
        self.spans: dict[torch.dtype, slice] = {}
        self._pointers = [view.data_ptr() for view in self.views]
        self._flats = replica.flats
        self._homes = {home.dtype: home for home in gradients.homes}

    def own_span(self, rank: int) -> None:
        """Step this rank's span alone from here on."""
        self.spans = {flat.memory.dtype: flat.span(rank) for flat in self._flats}

    def bring_in(self, members: Sequence[int]) -> list[int]:
        """Copy in those of these parameters that the module keeps elsewhere; returns which ones."""
        pointers = [parameter.data_ptr() for parameter in self.parameters]
        if pointers == self._pointers or self.spans:  # of spans ranks copy them in and out at their meeting
            return []
        moved = [at for at in members if pointers[at] != self._pointers[at]]
        for at in moved:
            self.views[at].copy_(self.parameters[at].data)
        return moved

    def bring_out(self, moved: Sequence[int]) -> None:
        """Copy them out."""
        for at in moved:
            self.parameters[at].data.copy_(self.views[at])

    def run(self, start: int, stop: int) -> Run:
        """Parameters that lie next to each other, as far as they are in the span."""
        first, last = self.views[start], self.views[stop - 1]
        [memory] = [flat.memory for flat in self._flats if flat.memory.dtype == first.dtype]
        step = ALIGNMENT // first.dtype.itemsize
        begin = int(first.storage_offset())
        end = -(-(int(last.storage_offset()) + last.numel()) // step) * step
        if span := self.spans.get(first.dtype):
            begin, end = max(begin, span.start), min(end, span.stop)
        flat = nn.Parameter(memory[begin:end])
        flat.grad = gradient = self._homes[first.dtype][begin:end]
        return Run(start, stop, begin, flat, gradient)

    def holds(self, at: int) -> bool:
        """Whether a part of a parameter is in the span."""
        view = self.views[at]
        span, start = self.spans.get(view.dtype), view.storage_offset()
        return span is None or span.start - max(view.numel(), 1) < start < span.stop

    def part(self, run: Run, at: int) -> tuple[slice, slice]:
        """The part of a parameter that is in a run: as a slice of the run, and of the parameter's memory."""
        start = int(self.views[at].storage_offset())
        begin = max(start, run.begin)
        end = min(start + self.views[at].numel(), run.begin + run.flat.numel())
        return slice(begin - run.begin, end - run.begin), slice(begin - start, end - start)

    def dense(self, value: Tensor, at: int) -> Tensor:
        """A parameter's value as its elements lie in memory. Shape (elements,)."""
        view = self.views[at]
        if value.stride() != view.stride():
            like = torch.empty_strided(view.shape, view.stride(), dtype=value.dtype, device=value.device)
            value = like.copy_(value)
        return value.as_strided((view.numel(),), (1,))

    def join(self, at: int, pieces: Sequence[tuple[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
        """The state of a parameter, in its form: one piece is not copied, several come to the host.

        Args:
            at: The parameter.
            pieces: Where each begins, and its state: memory of shape (elements,), and numbers of shape [].
        """
        view, whole = self.views[at], dict(pieces[0][1])
        for name, value in whole.items():
            if not value.dim():
                continue
            memory = value
            if len(pieces) > 1:
                memory = torch.empty(view.numel(), dtype=value.dtype)
                for start, state in pieces:
                    memory[start : start + len(state[name])].copy_(state[name])
            whole[name] = memory.as_strided(view.shape, view.stride())
        return whole


class FlatTwin:
    """An optimizer of flat memory, with the groups and the state that another one has for its parameters.

    Args:
        own: The other one; its state moves here.
        memory: Where its parameters lie.

    Attributes:
        optimizer: Has one parameter for each run.
        picks_fused: Whether it takes torch's fused kernel by itself.
        seen: The `groups_form` of the other one's groups, as it was.
        members: Parameters of all runs.
        stepped: Those of them that have gradients in this step.
        revision: Counts up with every change of the runs.
    """

    def __init__(self, own: Optimizer, memory: FlatMemory) -> None:
        self._own, self._memory = own, memory
        self._names = ELEMENTWISE[type(own)]
        self.seen = groups_form(own)
        self.picks_fused = picks_fused(own, memory.views[0].device)
        self._touched: list[bool] = []  # of all parameters, those that have gradients in this step
        self.stepped: list[nn.Parameter] = []
        self.revision = 0
        options = {"fused": True} if self.picks_fused else {}
        places = {parameter: at for at, parameter in enumerate(memory.parameters)}
        groups: list[dict[str, Any]] = []
        self._runs: list[list[Run]] = []  # of each group
        for group in own.param_groups:
            members = sorted(places[parameter] for parameter in group["params"] if parameter in places)
            self._runs.append(list(self._runs_of(list(filter(memory.holds, members)))))
            groups.append({**group, **options, "params": []})
        kinds = inspect.signature(type(own)).parameters
        defaults = {name: value for name, value in own.defaults.items() if name in kinds}
        self.optimizer = type(own)(groups, **{**defaults, **options})
        self._fill_groups()
        self.members = [at for run in self.all_runs() for at in range(run.start, run.stop)]
        for run in self.all_runs():
            self._absorb(run)
        for parameter in memory.parameters:
            own.state.pop(parameter, None)

    def all_runs(self) -> Iterator[Run]:
        """The runs of all groups."""
        return chain.from_iterable(self._runs)

    def prepare(self, touched: Sequence[bool]) -> None:
        """Make it ready for a step, with all options that the groups have now, the rates among them.

        Args:
            touched: Flag per parameter: it has a gradient.
        """
        for mine, theirs in zip(self.optimizer.param_groups, self._own.param_groups, strict=True):
            parameters = mine["params"]
            mine.update(theirs)
            mine["params"] = parameters
            if self.picks_fused:
                mine["fused"] = True
        if touched != self._touched:
            self._choose(touched)
        if self.picks_fused and isinstance(self.optimizer, SGD):
            _begin_momentum(self.optimizer)

    def _fill_groups(self) -> None:
        self.revision += 1
        for group, runs in zip(self.optimizer.param_groups, self._runs, strict=True):
            group["params"] = [run.flat for run in runs]

    # ---------------------------------------------------------------- runs
    def _runs_of(self, members: Sequence[int]) -> Iterator[Run]:
        """The longest runs of parameters that lie next to each other and have been stepped together."""
        start, views = 0, self._memory.views
        for stop in range(1, len(members) + 1):
            before = members[stop - 1]
            if stop < len(members):
                at = members[stop]
                is_next = at == before + 1 and views[at].dtype == views[before].dtype
                if is_next and self._form(at) == self._form(before):
                    continue
            yield self._memory.run(members[start], before + 1)
            start = stop

    def _choose(self, touched: Sequence[bool]) -> None:
        """Choose the runs to step: those of parameters with gradients; divide the mixed ones."""
        self._touched = list(touched)
        self.stepped = [self._memory.parameters[at] for at in self.members if touched[at]]
        before = sum(map(len, self._runs))
        for runs in self._runs:
            runs[:] = chain.from_iterable(self._divide(run, touched) for run in runs)
        if sum(map(len, self._runs)) > before:
            self._fill_groups()
        for run in self.all_runs():
            if run.is_on != touched[run.start]:
                run.is_on = touched[run.start]
                run.flat.grad = run.gradient if run.is_on else None

    def _divide(self, run: Run, touched: Sequence[bool]) -> Iterator[Run]:
        pieces = [list(piece) for _, piece in groupby(range(run.start, run.stop), touched.__getitem__)]
        if len(pieces) == 1:
            yield run
            return
        state = self.optimizer.state.pop(run.flat, {})
        for piece in pieces:
            part = self._memory.run(piece[0], piece[-1] + 1)
            start = part.begin - run.begin
            if state:
                self.optimizer.state[part.flat] = {
                    name: value[start : start + part.flat.numel()] if name in self._names else value.clone()
                    for name, value in state.items()
                }
            yield part

    # ---------------------------------------------------------------- state
    def has_state(self) -> bool:
        """Whether all that is stepped has its state: a recording that makes it would make it in each step."""
        for group, runs in zip(self._own.param_groups, self._runs, strict=True):
            for run in runs if not isinstance(self._own, SGD) or group["momentum"] else ():
                state = self.optimizer.state.get(run.flat, {})
                if run.is_on and (not state or state.get("momentum_buffer", state) is None):
                    return False
        return True

    def pieces(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """A parameter, where the part of it begins that lies here, and its state: see `FlatMemory.join`."""
        for run in self.all_runs():
            if state := self.optimizer.state.get(run.flat):
                for at in range(run.start, run.stop):
                    mine, its = self._memory.part(run, at)
                    own = {
                        name: value[mine] if name in self._names else self._own_number(value)
                        for name, value in state.items()
                    }
                    yield at, its.start, own

    def _absorb(self, run: Run) -> None:
        """Copy the state of a run's parameters into flat memory."""
        memory = self._memory
        for name, value in self._state_of(run.start).items():
            if value is None:
                continue
            if name not in self._names:
                self.optimizer.state[run.flat][name] = self._twin_number(value)
                continue
            flat = torch.zeros(run.flat.numel(), dtype=value.dtype, device=run.flat.device)
            for at in range(run.start, run.stop):
                mine, its = memory.part(run, at)
                flat[mine].copy_(memory.dense(self._state_of(at)[name], at)[its])
            self.optimizer.state[run.flat][name] = flat

    def _twin_number(self, value: Tensor) -> Tensor:
        """A number of the state as the twin keeps it."""
        if self.picks_fused:
            return value.to(self._memory.views[0].device, torch.float32, copy=True)
        return value.clone()

    def _own_number(self, value: Tensor) -> Tensor:
        """A number of the state as the replica's optimizer would keep it."""
        if self.picks_fused:
            return value.to(torch.promote_types(torch.float32, torch.get_default_dtype()), copy=True)
        return value.clone()

    def _state_of(self, at: int) -> dict[str, Any]:
        state: dict[str, Any] = self._own.state.get(self._memory.parameters[at], {})
        return state

    def _form(self, at: int) -> list[object]:
        """Properties that parameters must share to lie in one flat state."""
        return [
            (name, value.dtype if name in self._names else float(value))
            for name, value in sorted(self._state_of(at).items())
            if value is not None
        ]


def groups_form(optimizer: Optimizer) -> list[object]:
    """Properties of the groups whose change makes another twin necessary."""
    return [(len(group["params"]), group.get("eps")) for group in optimizer.param_groups]


def picks_fused(optimizer: Optimizer, device: torch.device) -> bool:
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
