"""Trial runs of a module that leave no trace, and give outputs that can be compared.

Two outputs can be compared only where both come from the same numbers. So operations that draw fill their
results with a constant instead, dropout is off, batch norms use the statistics that they have, and floats of
16 bits are widened, for their rounding would hide differences.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from flowdp.data.trees import tensors_of, tree_map
from flowdp.device.accelerator import device_generator, device_module, is_accelerator
from flowdp.device.compiled import Uncompiled, take_out, uses_compile
from flowdp.device.dispatch import RankMode
from flowdp.modules.attributes import OWN

__all__ = ["Trials"]

TF32 = 2.0**-11
"""Rounding of float32 products on tensor cores."""

NARROW = {
    torch.float32: (torch.float16, torch.bfloat16),
    torch.float64: (torch.float16, torch.bfloat16, torch.float32),
}
"""Floats that are widened, by the wide dtype."""

DRAWS = frozenset(
    (
        *("bernoulli", "bernoulli_", "binomial", "cauchy", "cauchy_", "exponential", "exponential_"),
        *("geometric", "geometric_", "log_normal", "log_normal_", "multinomial", "normal", "normal_"),
        *("poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random"),
        *("random_", "randperm", "uniform", "uniform_", "_sample_dirichlet", "_standard_gamma"),
    )
)
"""Operations that return a random draw."""

DROPS = frozenset(("dropout_p", "dropout", "p"))
"""Names of probabilities among the arguments of other operations that draw."""


class Trials:
    """Runs a module and undoes the changes to its tensors, its attributes and random states.

    Restored are parameters, buffers, other tensors among the attributes of all submodules, their plain
    attributes with the lists, dicts and sets in them, and the states of torch's, numpy's and Python's
    generators, those of attributes included; other effects of hooks and of the module are not.

    Args:
        module: All of it lies on the device.
        device: The device.
        is_eval: Whether everything is in eval mode; else only submodules that drop or use the batch's
            statistics.
        is_wide: Whether parameters and buffers of 16 bits are float32 meanwhile, and autocast is off.
        is_still: Whether draws are constants.
        is_double: Whether all floats are float64 instead, where the module's operations take them.
        is_alone: Whether no other thread draws meanwhile; else the generators of torch, numpy and Python
            are left as the runs leave them.

    Attributes:
        epsilon: The coarsest rounding of the floats that operations gave: that of bfloat16, for instance.
        written: The buffers that the last run wrote to, by name, as it left them.
        noted: The numbers, tensors and their containers that it set as attributes, by name.

    Threads: one; nothing else may use the module meanwhile.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        is_eval: bool,
        is_wide: bool,
        is_still: bool,
        is_double: bool = False,
        is_alone: bool = True,
    ) -> None:
        self.epsilon = 0.0
        self.written: dict[str, Tensor] = {}
        self.noted: dict[str, Any] = {}
        self._module = module
        self._device = device
        self._is_eval = is_eval
        self._is_wide = is_wide or is_double
        self._wide = torch.float64 if is_double else torch.float32
        self._is_still = is_still
        self._state = _State(module, device, is_alone=is_alone)

    @torch.no_grad()
    def run(self, call: Callable[[nn.Module, Any], Any], given: Any, *, seed: int | None = None) -> Any:
        """Call the module, and put everything back.

        Args:
            call: Calls the module with its arguments.
            given: The arguments, any pytree; its tensors are copied, for the module may write to them.
            seed: Seed of all generators for this run; None: it begins with their states.
        """
        if seed is not None:
            self._state.seed(seed)
        given = tree_map(self._own, given)
        still = _ConstantDraws(self._state) if self._is_still else None
        try:
            self._set_modes()
            with ExitStack() as stack:
                if self._is_wide:
                    stack.enter_context(_exact_products(self._device))
                    for kind in {"cpu", self._device.type}:
                        if torch.is_autocast_enabled(kind):
                            stack.enter_context(torch.autocast(kind, enabled=False))
                if uses_compile(self._module, call):  # by a decorator, for instance
                    stack.enter_context(Uncompiled())
                if still is not None:
                    stack.enter_context(still)
                output = call(self._module, given)
            self.written = self._state.written(self._module)
            self.noted = self._state.noted(self._module)
        finally:
            self._state.put_back()
        made = [_epsilon(leaf) for leaf in tensors_of(output)]
        self.epsilon = max([self.epsilon, still.epsilon if still else 0.0, *made])
        if self._device.type == "cuda" and self.epsilon > 1e-12 and _is_coarse(self._is_wide, still):
            self.epsilon = max(self.epsilon, TF32)
        return output

    def _own(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy(leaf) if type(leaf) in (list, np.ndarray) else leaf
        return leaf.to(self._wide, copy=True) if self._widens(leaf) else leaf.clone()

    def _widens(self, tensor: Tensor) -> bool:
        return self._is_wide and tensor.dtype in NARROW[self._wide]

    def _set_modes(self) -> None:
        # Put back like all else: the flags are attributes, the statistics buffers.
        take_out(self._module)
        if self._is_wide:
            for tensor in (*self._module.parameters(), *self._module.buffers()):
                if self._widens(tensor):
                    tensor.data = tensor.data.to(self._wide)
        for part in self._module.modules():
            if self._is_eval or isinstance(part, (_BatchNorm, _DropoutNd, nn.RNNBase)):
                part.training = False
            if isinstance(part, _BatchNorm) and part.running_mean is None:
                like = next(self._module.parameters(), torch.zeros(()))
                part._buffers["running_mean"] = like.new_zeros(part.num_features)
                part._buffers["running_var"] = like.new_ones(part.num_features)


class _State:
    """State that a run may change."""

    def __init__(self, module: nn.Module, device: torch.device, *, is_alone: bool) -> None:
        parts = list(module.modules())
        self._flags = [(part, part.training) for part in parts]
        tables = [vars(part) for part in parts]
        tables += [
            table
            for part in parts
            for table in (part._parameters, part._buffers, part._modules)
            if type(table) is dict
        ]
        self._dicts = [(table, dict(table)) for table in tables]
        values = list(_attributes(parts))
        self._containers = [_content(value) for value in values if type(value) in _WRITABLE]
        generators = [value for value in values if isinstance(value, torch.Generator)]
        common = [torch.default_generator, *_default_generators(device)] if is_alone else []
        self._generators = [*common, *generators]
        self._random = [*_random_states(values, is_alone=is_alone)]
        self._torch_states = [generator.get_state() for generator in self._generators]
        own = [*module.buffers(), *(value for value in values if isinstance(value, Tensor))]
        # An expanded tensor cannot be written to.
        self._kept = [
            _Kept(tensor, tensor.detach().clone())
            for tensor in own
            if torch._debug_has_internal_overlap(tensor) != 1
        ]
        values_of = {id(kept.tensor): kept.value for kept in self._kept if kept.value is not None}
        self._before = {name: values_of.get(id(buffer), buffer) for name, buffer in module.named_buffers()}
        # Parameters are copied when an operation is about to write to them.
        self._parameters = [_Kept(parameter) for parameter in module.parameters()]
        self._by_storage = {_storage(kept.alias): kept for kept in self._parameters}

    def written(self, module: nn.Module) -> dict[str, Tensor]:
        """The buffers with other values than they had."""
        return {
            name: buffer.clone()
            for name, buffer in module.named_buffers()
            if not _is_equal(buffer, self._before.get(name, buffer))
        }

    def noted(self, module: nn.Module) -> dict[str, Any]:
        """The attributes that are other objects than they were, or have other contents."""
        found: dict[str, Any] = {}
        then = {id(table): before for table, before in self._dicts}
        for prefix, part in module.named_modules():
            before = then.get(id(vars(part)), {})
            for key, value in vars(part).items():
                is_new = value is not before.get(key, _TABLES) or type(value) in _WRITABLE
                if key not in OWN and is_new and _holds_numbers(value):
                    found[f"{prefix}.{key}" if prefix else key] = copy(value)
        return found

    def before_write(self, tensor: Tensor) -> None:
        kept = self._by_storage.get(_storage(tensor))
        if kept is not None and kept.value is None:
            kept.value = kept.alias.clone()

    def seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def put_back(self) -> None:
        for table, before in self._dicts:
            for key in [key for key in table if key not in before]:
                del table[key]
            for key, value in before.items():
                if table.get(key, self) is not value:
                    table[key] = value
        for part, flag in self._flags:
            if part.training is not flag:
                part.training = flag
        for restore in self._containers:
            restore()
        for kept in (*self._kept, *self._parameters):
            kept.put_back()
        for generator, state in zip(self._generators, self._torch_states, strict=True):
            generator.set_state(state)
        for restore in self._random:
            restore()


class _Kept:
    """A tensor, the memory it has, and a copy of its values."""

    def __init__(self, tensor: Tensor, value: Tensor | None = None) -> None:
        self.tensor = tensor
        self.alias = tensor.detach()
        self.value = value
        self._asks = tensor.requires_grad
        self._version = None if tensor.is_inference() else tensor._version

    def put_back(self) -> None:
        if _storage(self.tensor) != _storage(self.alias):
            self.tensor.data = self.alias
        if self.value is not None:
            with torch.inference_mode(self.alias.is_inference()), torch.no_grad():
                self.alias.copy_(self.value)
        if self.tensor.requires_grad is not self._asks:
            self.tensor.requires_grad_(self._asks)
        if self._version is not None and self.tensor._version != self._version:
            # Nothing has changed: neither a graph nor a replica has to know.
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self._version,))


class _ConstantDraws(RankMode):
    """Torch mode in which draws are constants, and the state hears of each write before it."""

    supports_higher_order_operators = True

    def __init__(self, state: _State) -> None:
        super().__init__()
        self.epsilon = 0.0
        self.has_convolved = False
        self._state = state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        schema = getattr(func, "_schema", None)
        if schema is None:  # an operator of a higher order
            return func(*args, **kwargs)
        positional = zip(schema.arguments, args, strict=False)
        given = {argument.name: value for argument, value in positional} | kwargs
        if schema.is_mutable:
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in tree_leaves(given.get(argument.name)):
                        if isinstance(leaf, Tensor):
                            self._state.before_write(leaf)
        name = schema.name.partition("::")[2]
        self.has_convolved |= "conv" in name or "rnn" in name
        if name in DRAWS:
            return _fill(name, func(*args, **kwargs), given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            args, kwargs = _without_drops(schema, args, kwargs)
        output = func(*args, **kwargs)
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        self.epsilon = max(self.epsilon, *(_epsilon(leaf) for leaf in outputs), 0.0)
        return output


def _without_drops(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    still = tuple(
        0.0 if argument.name in DROPS and isinstance(value, float) else value
        for argument, value in zip(schema.arguments, args, strict=False)
    )
    return still, {name: 0.0 if name in DROPS else value for name, value in kwargs.items()}


def _fill(name: str, drawn: Any, given: Mapping[str, Any]) -> Any:
    if not isinstance(drawn, Tensor) or drawn.is_meta:
        return drawn
    if name == "randperm":
        return drawn.copy_(torch.arange(len(drawn), device=drawn.device))
    low = given.get("from", given.get("low", 0))
    value: float = low if isinstance(low, (int, float)) else 0
    if name.startswith(("bernoulli", "geometric")):
        value = 1
    elif name.startswith("uniform"):
        value = 0.5 * (value + given.get("to", 1.0))
    elif drawn.is_floating_point() and name not in ("binomial", "poisson") and "random" not in name:
        value = value if "randint" in name else 0.5
    return drawn.fill_(value)


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """Switch TF32 off in products of matrices, where it is on."""
    if device.type != "cuda" or (before := _precision()) in ("highest", None):
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer interface, which does not mix with this one
        return None


def _is_coarse(is_wide: bool, still: _ConstantDraws | None) -> bool:
    """Whether TF32 may have been used: in convolutions it is on by default."""
    precision = _precision()
    is_exact = precision == "highest" or (is_wide and precision is not None)
    return not is_exact or still is None or still.has_convolved


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple, deque)):
        return any(map(_holds_numbers, value))
    if isinstance(value, dict):
        return any(map(_holds_numbers, value.values()))
    return isinstance(value, (Tensor, int, float)) and not isinstance(value, (bool, nn.Parameter))


def _is_equal(mine: Tensor, other: Tensor) -> bool:
    return mine is other or torch.equal(mine.to(other.dtype), other)


def _epsilon(leaf: object) -> float:
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return 0.0
    return float(torch.finfo(leaf.dtype).eps)


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, or one without memory
        return id(tensor)


_TABLES = frozenset(("_parameters", "_buffers", "_modules"))
_WRITABLE = (list, dict, set, deque)


def _attributes(parts: Sequence[nn.Module]) -> Iterator[Any]:
    """The plain attributes of modules and the items of their lists, dicts, sets and tuples, each once."""
    todo = [value for part in parts for name, value in vars(part).items() if name not in _TABLES]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in (*_WRITABLE, tuple):
            todo += value.values() if isinstance(value, dict) else value


def _content(value: Any) -> Callable[[], None]:
    """A function that restores a list, dict, set or deque."""
    before = value.copy()

    def restore() -> None:
        now, then = _members(value), _members(before)
        if len(now) != len(then) or any(map(is_not, now, then)):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(before)

    return restore


def _members(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _default_generators(device: torch.device) -> list[torch.Generator]:
    if not is_accelerator(device):
        return []
    place = device_module(device).current_device() if device.index is None else device.index
    return [device_generator(torch.device(device.type, place))]


def _random_states(values: Sequence[Any], *, is_alone: bool) -> Iterator[Callable[[], None]]:
    """Functions that restore the states of generators that are not torch's."""
    if is_alone:
        yield partial(random.setstate, random.getstate())
        yield partial(np.random.set_state, np.random.get_state())
    for own in values:
        if isinstance(own, random.Random):
            yield partial(own.setstate, own.getstate())
        elif isinstance(own, np.random.Generator):
            yield partial(setattr, own.bit_generator, "state", own.bit_generator.state)
