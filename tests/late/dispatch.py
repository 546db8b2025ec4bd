"""The dispatch mode that queues operations on tensors of emulated devices.

* An operation on tensors of the host alone runs.
* A view is made at once: it reads nothing.
* An operation in place, or with `out=`, is queued.
* One that makes tensors runs twice: at once, on the numbers that lie there, for the shapes; and late, for the
  values.
* One that draws random numbers draws them at once, from the device's generator. They are written late.
* One whose result the host needs (`item`, `nonzero`, a boolean index) waits for its stream, and runs.
* A copy between host and device is queued. The host waits where torch does.
* A copy between two devices is queued on the source's stream. The target's stream waits before and behind it,
  as in torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flowdp.device.dispatch import RankMode
from flowdp.device.draws import is_random, seeded_form
from tests.late.device import LateCuda, LateStream
from tests.late.memory import Memory, poison

__all__ = ["LateMode"]

HOST = torch.device("cpu")

NEEDED_BY_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

HIDDEN_WRITES = {
    "native_batch_norm": ("running_mean", "running_var"),
    "batch_norm_update_stats": ("running_mean", "running_var"),
}
"""Arguments that an operation writes, though its schema does not say so."""

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_pack_padded_sequence"}
"""Operations that take indices or lengths of the host beside tensors of a device."""

WITHOUT_VALUES = {"rand_like", "randn_like", "randint_like"}
"""Random operations for which the values of their arguments do not matter."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an operation.

    Attributes:
        name: Without its overload.
        is_view: Whether it changes or makes tensors without reading or writing memory.
        written: Position and name of the arguments that it writes.
        returned: Of those that it returns, in order.
        is_fresh: Whether it makes tensors.
        is_empty: Whether these have no values.
        is_needed: Whether the host needs its result.
    """

    name: str
    is_view: bool
    written: tuple[tuple[int, str], ...]
    returned: tuple[tuple[int, str], ...]
    is_fresh: bool
    is_empty: bool
    is_needed: bool


@cache
def traits_of(func: Any) -> Traits:
    """Properties of an operation, from its schema and tags."""
    schema = func._schema
    name = schema.name.split("::")[1]
    aliases = [value.alias_info for value in schema.returns]
    places = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    hidden = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.name in HIDDEN_WRITES.get(name, ())
    ]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return Traits(
        name,
        is_view or torch.Tag.inplace_view in func.tags or name in ("set_", "resize_"),
        (*places, *hidden),
        tuple(places) if aliases and all(aliases) else (),
        any(alias is None for alias in aliases),
        name.startswith(("empty", "new_empty")),
        not NEEDED_BY_HOST.isdisjoint(func.tags) and name not in ("index", "is_pinned"),
    )


def leaves_of(value: Any) -> Iterator[Tensor]:
    """Tensors among arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves_of(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves_of(part)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same arguments with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(part, change) for part in value])
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    return value


class LateMode(RankMode):
    """Queues the operations of a thread. Each thread has one of its own.

    Args:
        cuda: The machine.
        moves: Whether the thread is in a `.to()` now; see `tests.late.tensors`.
    """

    def __init__(self, cuda: LateCuda, moves: threading.local) -> None:
        super().__init__()
        self._cuda = cuda
        self._memory = cuda.memory
        self._moves = moves

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*leaves_of(args), *leaves_of(kwargs)]
        device = kwargs.get("device")
        if str(device) == "meta" or any(_is_odd(leaf) for leaf in inputs):
            return func(*args, **kwargs)
        ours = [memory for leaf in inputs if (memory := self._memory.of(leaf)) is not None]
        if not ours and (device is None or device.type == "cpu"):
            return self._on_host(func, args, kwargs)
        with self._cuda.lock:
            return self._on_device(func, args, kwargs, inputs, ours)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "pin_memory": False})
        self._memory.pin(made)
        return made

    def _on_device(
        self, func: Any, args: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor], ours: Sequence[Memory]
    ) -> Any:
        traits = traits_of(func)
        if traits.is_view:
            return func(*args, **kwargs)
        if traits.name == "copy_":
            return self._copy(*args, **kwargs)
        if traits.name == "_to_copy":
            return self._moved(func, args[0], kwargs)
        if traits.name == "_foreach_copy_" and len({self._device_of(leaf) for leaf in inputs}) > 1:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source, *args[2:], **kwargs)
            return None
        place = self._place(traits, kwargs, ours)
        if place == HOST:  # `empty_like(tensor, device="cpu")`
            return self._on_host(func, args, kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": HOST}
        self._check(traits, inputs, place)
        stream = self._cuda.current_stream(place)
        if traits.is_empty:
            return self._new(func(*args, **kwargs), stream, traits.name)
        if is_random(func, args, {}):
            return self._draw(func, traits, args, kwargs, inputs, stream)
        if traits.is_needed or (traits.name in INDEXING and _has_mask(args)):
            return self._now(func, args, kwargs, stream, traits)
        if not ours:  # its values are known: they come from the host's arguments alone
            value = func(*args, **kwargs)
            return self._late_copy(value, stream, traits.name)
        if not traits.is_fresh:
            self._queue(func, args, kwargs, (), inputs, stream, traits.name)
            return _returned(traits, args, kwargs)
        try:
            made = func(*self._scratch(traits, args), **self._scratch_named(traits, kwargs))
        except RuntimeError:  # it refuses such values, or its arguments: the real ones tell
            return self._now(func, args, kwargs, stream, traits)
        return self._late(func, args, kwargs, made, inputs, stream, traits.name)

    # ------------------------------------------------------------ operations
    def _late(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        made: Any,
        inputs: Sequence[Tensor],
        stream: LateStream,
        name: str,
    ) -> Any:
        """Queue an operation whose results have their shapes by now."""
        outs = list(leaves_of(made))
        if any(self._memory.of(out) is not None for out in outs):
            return made  # a view that its schema calls none
        for out in outs:
            self._new(out, stream, name)
        self._queue(func, args, kwargs, outs, inputs, stream, name)
        return made

    def _now(self, func: Any, args: Any, kwargs: dict[str, Any], stream: LateStream, traits: Traits) -> Any:
        """Wait for the stream, then run."""
        self._cuda.synchronize_stream(stream)
        result = func(*args, **kwargs)
        if traits.is_fresh:
            for out in leaves_of(result):
                if self._memory.of(out) is None:
                    self._memory.own(out, stream, traits.name)
        return result

    def _draw(
        self,
        func: Any,
        traits: Traits,
        args: Any,
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        stream: LateStream,
    ) -> Any:
        seeded = seeded_form(func) or func
        if seeded is not func or "generator" in {argument.name for argument in func._schema.arguments}:
            own = self._cuda.generators[stream.device.index]
            kwargs = {**kwargs, "generator": kwargs.get("generator") or own}
        ours = [leaf for leaf in inputs if self._memory.of(leaf) is not None]
        if not ours or traits.name in WITHOUT_VALUES:
            return self._late_copy(seeded(*args, **kwargs), stream, traits.name)
        if traits.written and ours == [args[0]]:
            drawn = seeded(torch.empty_like(args[0]), *args[1:], **kwargs)
            self._queue(
                torch.ops.aten.copy_.default, (args[0], drawn), {}, (), [args[0]], stream, traits.name
            )
            return args[0]
        return self._now(seeded, args, kwargs, stream, traits)

    def _late_copy(self, value: Any, stream: LateStream, name: str) -> Any:
        """New tensors that get these values late."""

        def late(leaf: Tensor) -> Tensor:
            made = self._new(torch.empty_like(leaf), stream, name)
            self._queue(torch.ops.aten.copy_.default, (made, leaf), {}, (), [made], stream, name)
            return made

        return mapped(value, late)

    def _new(self, out: Tensor, stream: LateStream, name: str) -> Tensor:
        self._cuda.allocate(stream)
        poison(out)
        self._memory.own(out, stream, name)
        return out

    # ------------------------------------------------------------ copies
    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        here, there = self._device_of(target), self._device_of(source)
        if HOST in (here, there) or here == there:
            place = here if there == HOST else there
            stream = self._cuda.current_stream(place)
            is_up, is_down = there == HOST, here == HOST
            if is_up and not self._memory.is_pinned(source):
                source = source.clone()
            if is_down:
                if not self._memory.is_pinned(target):
                    non_blocking = False
                elif not self._memory.is_busy(target):
                    poison(target)
            self._queue(
                torch.ops.aten.copy_.default, (target, source), {}, (), (target, source), stream, "copy_"
            )
            if (is_up or is_down) and not non_blocking:
                self._cuda.synchronize_stream(stream)
            return target
        with self._across(here, there) as stream:
            self._queue(
                torch.ops.aten.copy_.default, (target, source), {}, (), (target, source), stream, "copy_"
            )
        return target

    @contextmanager
    def _across(self, here: torch.device, there: torch.device) -> Iterator[LateStream]:
        """The stream of a copy between devices; that of the target waits before and behind it."""
        target, source = self._cuda.current_stream(here), self._cuda.current_stream(there)
        self._cuda.wait(source, self._cuda.mark(target))
        yield source
        self._cuda.wait(target, self._cuda.mark(source))

    def _moved(self, func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A copy of another type, or on another device."""
        there = self._device_of(source)
        here = kwargs.pop("device", None)
        if here is None or (here.type == "cpu" and not getattr(self._moves, "now", False)):
            # Autograd and autocast take a tensor of ours for one of the CPU, and want it to stay.
            here = there
        elif here.type == "cuda":
            here = self._cuda.place(here)
        non_blocking = bool(kwargs.pop("non_blocking", False))
        kwargs.pop("pin_memory", None)
        like = func(source, **kwargs)  # of the right form, with the values of now
        if here == HOST:
            if non_blocking:
                self._memory.pin(like)
            return self._copy(like, source, non_blocking)
        made = self._new(
            like if there != HOST else torch.empty_like(like), self._cuda.current_stream(here), "_to_copy"
        )
        return self._copy(made, source, non_blocking)

    # ------------------------------------------------------------ parts
    def _queue(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        outs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        stream: LateStream,
        name: str,
    ) -> None:
        ends: list[Callable[[], None]] = []

        def queued(leaf: Tensor) -> Tensor:
            if self._memory.of(leaf) is None and not self._memory.is_pinned(leaf):
                # A number is a parameter of the kernel; the host may change it at once.
                return leaf.clone() if leaf.numel() == 1 and leaf is not inputs[0] else leaf
            ends.append(self._memory.hold(leaf))
            return leaf.detach()

        uses = []
        for leaf in (*inputs, *outs):
            memory = self._memory.of(leaf)
            if memory is not None:
                other = memory.stream.device != stream.device
                uses.append((memory, self._cuda.current_stream(memory.stream.device) if other else stream))
        call: list[Any] = [mapped(args, queued), mapped(kwargs, queued), [queued(out) for out in outs]]

        def kernel() -> None:
            given, named, targets = call
            call.clear()
            made = func(*given, **named)
            if targets:
                for target, value in zip(targets, leaves_of(made), strict=True):
                    target.copy_(value)
            for end in ends:
                end()

        self._cuda.enqueue(stream, kernel, name, uses)

    def _scratch(self, traits: Traits, args: Sequence[Any]) -> list[Any]:
        """Arguments of a first call, which writes to none of them."""
        written = {place for place, _ in traits.written}
        return [mapped(value, torch.clone) if at in written else value for at, value in enumerate(args)]

    def _scratch_named(self, traits: Traits, kwargs: dict[str, Any]) -> dict[str, Any]:
        written = {name for _, name in traits.written}
        return {
            name: mapped(value, torch.clone) if name in written else value for name, value in kwargs.items()
        }

    def _place(self, traits: Traits, kwargs: dict[str, Any], ours: Sequence[Memory]) -> torch.device:
        """The device of an operation."""
        device = kwargs.get("device")
        if device is None:
            return ours[0].stream.device
        if device.type == "cuda":
            return self._cuda.place(device)
        is_internal = torch._C._current_graph_task_id() != -1
        return ours[0].stream.device if is_internal else HOST

    def _check(self, traits: Traits, inputs: Sequence[Tensor], place: torch.device) -> None:
        """Refuse tensors of several devices, as torch does; numbers of the host are parameters of kernels."""
        if traits.name.endswith("_like") or traits.name.startswith("new_"):
            return
        for leaf in inputs:
            device = self._device_of(leaf)
            if device == place or (device == HOST and (not leaf.dim() or traits.name in INDEXING)):
                continue
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {traits.name} got one on {device} and "
                f"one on {place}"
            )

    def _device_of(self, tensor: Tensor) -> torch.device:
        memory = self._memory.of(tensor)
        return HOST if memory is None else memory.stream.device


def _is_odd(leaf: Tensor) -> bool:
    """Whether a tensor has no memory to speak of, or a behaviour of its own."""
    is_own = type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return leaf.layout is not torch.strided or leaf.is_meta or is_own


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves_of(indices))


def _returned(traits: Traits, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Arguments that an operation returns."""
    found = [args[place] if place < len(args) else kwargs[name] for place, name in traits.returned]
    if not found:
        return None
    return found[0] if len(found) == 1 else tuple(found)
