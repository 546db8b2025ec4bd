"""Attributes of modules that are no parameters, buffers or submodules, on all ranks.

A dropout rate, a temperature, a counter, a configuration: the replicas have copies. Before a call the user's
module is compared with its state after the last one; the differences come from the loop, and are copied to
the replicas. The ranks' own forwards make the other changes, each for its own part of the batch.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdp.device.copies import move
from flowdp.errors import FlowdpError, OptionError
from flowdp.modules.hooks import FUNCTIONS, Twins, parts_of, twins_of
from flowdp.policy.formats import format_error

__all__ = ["ENTRIES", "OWN", "Attributes", "check_registered", "seal"]

ENTRIES = 1_000
"""Most entries of an attribute's containers that are compared; of more, only the number is."""

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
OWN = (frozenset(vars(nn.Module())) | {"_compiled_call_impl", "_flat_weights", "_flat_weight_refs"}) - {
    "_is_full_backward_hook"
}
"""Attributes that torch keeps in a module, but for the kind of its backward hooks."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ATOMS = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, nn.Module, nn.Parameter)

_Location = tuple[int, str]
"""The module's place, and the attribute's name."""


class Attributes:
    """The attributes of a module and of its replicas.

    Args:
        ranks: For each rank its modules with all submodules, in the same order. Shape (ranks, modules).

    Attributes:
        is_live: Whether forwards have been seen to change any.

    Raises:
        OptionError: A plain tensor requires grad, or a parameter of a module that is not registered.

    Threads: the user's, while no rank is at work.
    """

    def __init__(self, ranks: Sequence[Sequence[nn.Module]]) -> None:
        self.is_live = False
        self._ranks = ranks
        self._modules = ranks[0]
        self._due: list[dict[_Location, bool]] = [{} for _ in ranks]  # whether a copy must succeed
        self._by_forward: set[_Location] = set()
        self._doubts: set[_Location] = set()
        check_registered(self._modules)
        self._seen: list[tuple[list[str], list[Any]]] = [([], [])] * len(self._modules)
        self._contents: dict[int, tuple[_Location, Any, Any]] = {}  # by identity: location, itself, its seal
        self._flat: dict[int, tuple[_Location, Any, Any]] = {}  # those that a copy is compared with: the most
        self._hooks = [vars(module)[name] for module in self._modules for name in _HOOKS]
        self._hooks_seen = [dict(hooks) for hooks in self._hooks]
        for place in range(len(self._modules)):
            self._note(place)
        for due, modules in zip(self._due[1:], ranks[1:], strict=True):
            due.update(dict.fromkeys(self._other_numbers(modules), True))

    def _other_numbers(self, modules: Sequence[nn.Module]) -> Iterator[_Location]:
        """The numbers in which a replica differs from the start: its factory may know older ones."""
        for place, (mine, theirs) in enumerate(zip(self._modules, modules, strict=True)):
            for key, value in vars(mine).items():
                other = vars(theirs).get(key)
                numbers = isinstance(value, (bool, int, float)) and isinstance(other, (bool, int, float))
                if numbers and key not in OWN and other != value:
                    yield place, key

    def look(self) -> None:
        """Find the changes of the loop: those since the last look or note."""
        for place, is_strict in self._changes().items():
            value = vars(self._modules[place[0]]).get(place[1])
            # A call of the module itself, beside the ranks, changes its forward's containers, too.
            is_forwards = place in self._by_forward and not isinstance(value, Tensor)
            for due in self._due[1:]:
                due[place] = is_strict and not is_forwards

    def send(self) -> None:
        """Bring the changes to the replicas.

        Raises:
            FlowdpError: One cannot be copied.
        """
        due, self._due = self._due, [{} for _ in self._ranks]
        for rank, places in enumerate(due):
            for (place, key), is_strict in places.items():
                if self._has_graph((place, key), doubt=is_strict):
                    continue
                with nullcontext() if is_strict else suppress(FlowdpError):
                    self._bring(rank, place, key)

    def note(self, ran: set[int]) -> None:
        """Remember the attributes as a forward has left them.

        Args:
            ran: Ranks that took part; the others are given the first one's changes.

        Raises:
            FlowdpError: The loop had set a tensor with a graph, which cannot be copied.
        """
        changed = self._changes()
        self._by_forward.update(changed)
        self.is_live = self.is_live or bool(changed)
        for rank, due in enumerate(self._due):
            if rank and rank not in ran:
                due.update(dict.fromkeys(changed, False))
        lost, self._doubts = self._doubts.difference(changed), set()
        for place, key in lost:
            raise FlowdpError(
                f"{self._name(place, key)} has been set to a tensor with a graph, which replicas cannot "
                "have: give it to the call as an argument"
            )

    # ------------------------------------------------------------------ compare
    def _changes(self) -> dict[_Location, bool]:
        """Places that have changed since the last look, and whether a copy must succeed.

        An object that keeps a state of its own, a logger for instance, may not be copyable.
        """
        changed: dict[_Location, bool] = {}
        for place, module in enumerate(self._modules):
            table, (names, values) = vars(module), self._seen[place]
            if len(table) == len(names) and all(map(is_, table.values(), values)):  # 1 us
                continue
            then = dict(zip(names, values, strict=True))
            for key in [*table, *(key for key in then if key not in table)]:
                if key not in OWN and not _is_same(table.get(key, _GONE), then.get(key, _GONE)):
                    changed[place, key] = True
                    self._drop(place, key, then.get(key))
            self._note(place)
        for (place, key), content, sealed in list(self._flat.values()):
            if content != sealed:
                self._changed_inside(place, key, content, changed)
        for (place, key), content, sealed in list(self._contents.values()):
            if seal(content) != sealed:
                self._changed_inside(place, key, content, changed)
        if self._hooks != self._hooks_seen:
            for number, (hooks, seen) in enumerate(zip(self._hooks, self._hooks_seen, strict=True)):
                if hooks != seen:
                    place, name = divmod(number, len(_HOOKS))
                    changed[place, _HOOKS[name]] = True
            self._hooks_seen = [dict(hooks) for hooks in self._hooks]
        return changed

    def _changed_inside(self, place: int, key: str, content: Any, changed: dict[_Location, bool]) -> None:
        self._flat.pop(id(content), None)
        self._contents.pop(id(content), None)
        if vars(self._modules[place]).get(key) is content:
            changed[place, key] = isinstance(content, (list, dict, set, tuple, deque, Tensor))
            self._keep(place, key, content)

    def _note(self, place: int) -> None:
        table = vars(self._modules[place])
        self._seen[place] = [*table], [*table.values()]
        for key, value in table.items():
            if key not in OWN and _has_content(value):
                self._keep(place, key, value)

    def _keep(self, place: int, key: str, content: Any) -> None:
        if id(content) in self._flat or id(content) in self._contents:
            return
        if _is_flat(content):
            self._flat[id(content)] = (place, key), content, copy.copy(content)
        else:
            self._contents[id(content)] = (place, key), content, seal(content)

    def _drop(self, place: int, key: str, content: Any) -> None:
        """Let go of a value that is replaced: it may be large."""
        for kept in (self._flat, self._contents):
            if id(content) in kept and kept[id(content)][0] == (place, key):
                del kept[id(content)]

    def _has_graph(self, place: _Location, *, doubt: bool) -> bool:
        """Whether an attribute is a tensor with a graph: each rank makes one for its own part of a batch."""
        value = vars(self._modules[place[0]]).get(place[1])
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return False
        if doubt and place not in self._by_forward:
            self._doubts.add(place)  # the next forward makes it anew, or it is the loop's
        return True

    # ------------------------------------------------------------------ copy
    def _bring(self, rank: int, place: int, key: str) -> None:
        source, target = (vars(ranks[place]) for ranks in (self._modules, self._ranks[rank]))
        if key not in source:
            target.pop(key, None)
            return
        value, old = source[key], target.get(key)
        if old is value:  # a factory's replicas may have it in common
            return
        if isinstance(value, Tensor) and value.dim() > 0 and (place, key) in self._by_forward:
            raise FlowdpError(
                f"{self._name(place, key)} is a tensor that forward sets, for its own part of the batch on "
                "each device, and it has been set outside, too: give it to the call as an argument and "
                "return it; or, if that was a call of the module itself, call what setup() returned"
            )
        for name in _HOOKS if key in _HOOKS else (key,):
            value, kept = source[name], target[name] if key in _HOOKS else {}
            if kept:  # a replica has hooks of its own under the same numbers
                value = type(value)((n, one) for n, one in value.items() if n not in kept)
            made = self._copied(value, rank, place, name)
            if kept:
                made = type(made)((n, kept[n] if n in kept else made[n]) for n in source[name])
            if not _refill(target.get(name), made):
                target[name] = made

    def _copied(self, value: Any, rank: int, place: int, key: str) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, list) and all(isinstance(entry, _PLAIN) for entry in value):
            return list(value)
        memo = twins_of(self._modules, self._ranks[rank])
        has_functions = False
        for part in _walk(value):
            has_functions = has_functions or isinstance(part, FUNCTIONS)
            is_own = isinstance(part, nn.Module | nn.Parameter) or (
                isinstance(part, Tensor) and part.requires_grad
            )
            if is_own and id(part) not in memo:
                raise FlowdpError(
                    f"{self._name(place, key)} has been set to something with a {type(part).__name__}, which "
                    "replicas could not be trained with: build it in before setup()"
                )
        contained = self._contained(rank) if has_functions else {}
        if key in _HOOKS or isinstance(value, (*FUNCTIONS, partial)):
            contained.pop(id(value), None)
            memo = contained | memo
        known = set(memo)
        try:
            made = copy.deepcopy(value, memo)
        except Exception as error:
            raise FlowdpError(
                f"{self._name(place, key)} has been set to a {type(value).__name__}, which cannot be copied "
                f"for the replicas ({format_error(error)}): give it to the call as an argument"
            ) from error
        if isinstance(made, Tensor):
            made = move(made, self._device(rank, made.device))
        if has_functions:
            memo.pop(id(memo), None)  # where deepcopy keeps the originals alive
            twins = Twins(contained | memo)
            twins.rebind([one for key, one in memo.items() if key not in known])
            made = twins.fit(made)
        return made

    def _contained(self, rank: int) -> dict[int, Any]:
        """The replica's containers and objects, in the same places, by the identity of the user's."""
        found: dict[int, Any] = {}
        todo = [
            (value, vars(theirs).get(key))
            for mine, theirs in zip(self._modules, self._ranks[rank], strict=True)
            for key, value in vars(mine).items()
            if key not in OWN
        ]
        while todo:
            mine, other = todo.pop()
            if type(mine) is not type(other) or id(mine) in found or mine is other:
                continue
            entries, others = (_entries(one) if _has_content(one) else None for one in (mine, other))
            if entries is None or others is None:
                continue
            found[id(mine)] = other
            if not isinstance(mine, (set, frozenset)) and len(entries) == len(others) <= ENTRIES:
                todo += zip(entries, others, strict=True)
        return found

    def _device(self, rank: int, device: torch.device) -> torch.device:
        """The replica's device for a tensor of the user's module."""
        pairs = zip(_tensors(self._modules), _tensors(self._ranks[rank]), strict=False)
        return next((theirs.device for mine, theirs in pairs if mine.device == device), device)

    def _name(self, place: int, key: str) -> str:
        return _named(self._modules[place], key)


def check_registered(modules: Sequence[nn.Module]) -> None:
    """Check that all trained tensors of a module, given with its submodules, are among its parameters.

    Raises:
        OptionError: A plain tensor requires grad, or a parameter of a module that is not registered.
    """
    registered = {id(tensor) for tensor in _tensors(modules)}
    for module in modules:
        for key, value in vars(module).items():
            if key in OWN:
                continue
            for part in _listed(value):
                hidden = part.parameters() if isinstance(part, nn.Module) else (part,)
                if not any(tensor.requires_grad and id(tensor) not in registered for tensor in hidden):
                    continue
                found, remedy = "a tensor that requires grad and is no parameter", "an nn.Parameter"
                if isinstance(part, nn.Module):
                    found, remedy = "a module that is not registered", "a submodule, or an nn.ModuleList"
                raise OptionError(
                    f"model: {_named(module, key)} holds {found}, so the replicas' gradients of it would be "
                    f"lost: make it {remedy}"
                )


def _named(module: nn.Module, key: str) -> str:
    return f"the attribute {key!r} of {type(module).__name__}"


_GONE = object()
"""Stands for an attribute that is not there."""


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and isinstance(now, _PLAIN) and bool(now == then))


def _has_content(value: Any) -> bool:
    """Whether a value can change and stay the same object."""
    if isinstance(value, (*_PLAIN, *_ATOMS)):
        return False
    if type(value) is tuple:
        return any(_has_content(entry) for entry in value)
    return isinstance(value, (list, dict, set, deque, Tensor, np.ndarray)) or _state(value) is not None


def _is_flat(value: Any) -> bool:
    """Whether `==` compares the contents, and cheaply."""
    if type(value) not in (list, dict, set) or len(value) > ENTRIES:
        return False
    return all(isinstance(entry, _PLAIN) for entry in (value.values() if isinstance(value, dict) else value))


def seal(value: Any) -> Any:
    """A value that compares equal as long as the contents are the same."""
    return _sealed(value, [ENTRIES], {id(value)})


def _sealed(value: Any, budget: list[int], above: set[int]) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= ENTRIES and not value.dtype.hasobject else None
    if isinstance(value, _ATOMS):
        return id(value)
    entries = _entries(value)
    if entries is None:
        return id(value)
    budget[0] -= len(entries)
    if budget[0] < 0:
        return id(value), len(entries)
    sealed: list[Any] = [id(value)]
    for entry in entries:
        if id(entry) in above:
            sealed.append(id(entry))
        elif isinstance(entry, _PLAIN):
            sealed.append((type(entry), entry))
        else:
            sealed.append(_sealed(entry, budget, {*above, id(entry)}))
    return sealed


def _entries(value: Any) -> list[Any] | None:
    """The entries of a container, or of an object's own attributes; None where it has none."""
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=id)
    state = _state(value)
    return None if state is None else [*state, *state.values()]


def _state(value: Any) -> dict[Any, Any] | None:
    """An object's own attributes, those in slots included; None where its kind can have none."""
    table = getattr(value, "__dict__", None)
    own: dict[Any, Any] | None = table if isinstance(table, dict) else None
    kind: Any = type(value)  # mypy takes a class for not hashable
    slots = _slots(kind)
    if not slots:
        return own
    state = dict(own or {})
    for slot in slots:
        with suppress(AttributeError):  # nothing has been set
            state[slot] = slot.__get__(value)
    return state


@cache
def _slots(kind: type) -> tuple[MemberDescriptorType, ...]:
    """The slots of a class and of its bases."""
    found = [
        own
        for base in getattr(kind, "__mro__", ())
        if "__slots__" in vars(base)
        for own in vars(base).values()
    ]
    return tuple(own for own in found if isinstance(own, MemberDescriptorType))


def _walk(value: Any) -> Iterator[Any]:
    """A value and the entries of its containers, at any depth."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, _PLAIN):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, (FunctionType, MethodType, partial)):
            todo += parts_of(part)
        elif not isinstance(part, (*_ATOMS, Tensor)):
            todo += _entries(part) or []


def _listed(value: Any) -> Iterator[nn.Module | Tensor]:
    """Modules and leaves of a graph among the entries of plain containers."""
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, nn.Module) or (isinstance(part, Tensor) and part.is_leaf):
            yield part
        elif type(part) in (list, tuple):
            todo += part
        elif type(part) is dict:
            todo += part.values()


def _refill(old: Any, new: Any) -> bool:
    """Give a container the contents of another one, for others may hold it, too; False where it is none."""
    if type(old) is not type(new) or old is None:
        return False
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, deque) and old.maxlen == new.maxlen:
        old.clear()
        old.extend(new)
    elif isinstance(old, (*_PLAIN, *_ATOMS, Tensor, np.ndarray, tuple, deque)):
        return False
    else:
        before, after = _state(old), _state(new)
        if before is None or after is None:
            return False
        _set_state(old, before, after)
    return True


def _set_state(value: Any, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
    """Give an object another one's attributes, past its class's own way of setting them."""
    for name in [name for name in before if name not in after]:
        name.__delete__(value) if isinstance(name, MemberDescriptorType) else vars(value).pop(name)
    for name, entry in after.items():
        if isinstance(name, MemberDescriptorType):
            name.__set__(value, entry)
        else:
            vars(value)[name] = entry


def _tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (tensor for tensor in module._parameters.values() if tensor is not None)
        yield from (tensor for tensor in module._buffers.values() if tensor is not None)
