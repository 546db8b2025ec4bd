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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation.

    Attributes:
        func: The operation.
        args: Its positional arguments.
        kwargs: Its other arguments.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def traits(self) -> Traits:
        """Properties of the operation."""
        return traits_of(self.func)

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.traits.name

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return [*leaves_of(self.args), *leaves_of(self.kwargs)]

    @property
    def written(self) -> list[Tensor]:
        """Tensors among the arguments that it writes."""
        return [leaf for value in self._values(self.traits.written) for leaf in leaves_of(value)]

    @property
    def returned(self) -> Any:
        """Arguments that it returns."""
        found = self._values(self.traits.returned)
        return (None if not found else found[0]) if len(found) < 2 else tuple(found)

    @property
    def has_mask(self) -> bool:
        """Whether it takes a boolean index."""
        indices = self.args[1] if self.name in INDEXING and len(self.args) > 1 else ()
        return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves_of(indices))

    def run(self) -> Any:
        """Call it."""
        return self.func(*self.args, **self.kwargs)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The same with other tensors."""
        return Call(self.func, mapped(self.args, change), mapped(dict(self.kwargs), change))

    def _values(self, places: Sequence[tuple[int, str]]) -> list[Any]:
        return [
            self.args[place] if place < len(self.args) else self.kwargs.get(name) for place, name in places
        ]


def copy_call(target: Tensor, source: Tensor) -> Call:
    """The call that copies a tensor into another one."""
    return Call(torch.ops.aten.copy_.default, (target, source))


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
        call = Call(func, args, kwargs or {})
        device, inputs = call.kwargs.get("device"), call.inputs
        if str(device) == "meta" or any(map(_is_odd, inputs)):
            return call.run()
        ours = [memory for leaf in inputs if (memory := self._memory.of(leaf)) is not None]
        if not ours and (device is None or device.type == "cpu") and not call.kwargs.get("pin_memory"):
            return call.run()  # the host's own
        with self._cuda.lock:
            return self._on_device(call, ours)

    def _on_device(self, call: Call, ours: Sequence[Memory]) -> Any:
        name = call.name
        if call.traits.is_view:
            return call.run()
        if name == "copy_":
            return self._copy(*call.args, **call.kwargs)
        if name == "_to_copy":
            return self._moved(call)
        if name == "_foreach_copy_" and len(set(map(self._device_of, call.inputs))) > 1:
            for target, source in zip(*call.args[:2], strict=True):
                self._copy(target, source, *call.args[2:], **call.kwargs)
            return None
        place = self._place(call, ours)
        if place == HOST:
            return self._on_host(call)
        if "device" in call.kwargs:
            call = replace(call, kwargs={**call.kwargs, "device": HOST})
        self._check(call, place)
        stream = self._cuda.current_stream(place)
        if call.traits.is_empty:
            return self._new(call.run(), stream, name)
        if is_random(call.func, call.args, {}):
            return self._draw(call, stream)
        if call.traits.is_needed or call.has_mask:
            return self._now(call, stream)
        if not ours:  # its values come from the host's arguments alone, and are known
            return self._late_copy(call.run(), stream, name)
        if not call.traits.is_fresh:
            self._queue(call, stream)
            return call.returned
        return self._make(call, stream)

    # ------------------------------------------------------------ operations
    def _on_host(self, call: Call) -> Tensor:
        """Make a tensor of the host: `empty_like(tensor, device="cpu")`, `empty(size, pin_memory=True)`."""
        made: Tensor = replace(call, kwargs={**call.kwargs, "pin_memory": False}).run()
        if call.kwargs.get("pin_memory"):
            self._memory.pin(made)
        return made

    def _make(self, call: Call, stream: LateStream) -> Any:
        """Make results of the right shapes, and queue what computes their values."""
        written = {id(leaf) for leaf in call.written}
        try:
            made = call.mapped(lambda leaf: leaf.clone() if id(leaf) in written else leaf).run()
        except RuntimeError:  # it refuses such values, or its arguments: the real ones tell
            return self._now(call, stream)
        outs = list(leaves_of(made))
        if all(self._memory.of(out) is None for out in outs):  # else a view that its schema calls none
            for out in outs:
                self._new(out, stream, call.name)
            self._queue(call, stream, outs)
        return made

    def _now(self, call: Call, stream: LateStream) -> Any:
        """Wait for the stream, then run."""
        self._cuda.synchronize_stream(stream)
        result = call.run()
        for out in leaves_of(result) if call.traits.is_fresh else ():
            if self._memory.of(out) is None:
                self._cuda.allocate(stream)
                self._memory.own(out, stream, call.name)
        return result

    def _draw(self, call: Call, stream: LateStream) -> Any:
        """Draw random numbers, now."""
        if (seeded := seeded_form(call.func)) is not None:
            own = call.kwargs.get("generator") or self._cuda.generators[stream.device.index]
            call = Call(seeded, call.args, {**call.kwargs, "generator": own})
        ours = [leaf for leaf in call.inputs if self._memory.of(leaf) is not None]
        if not ours or call.name in WITHOUT_VALUES:
            return self._late_copy(call.run(), stream, call.name)
        target = call.args[0]
        if call.traits.written and len(ours) == 1 and ours[0] is target:
            drawn = replace(call, args=(torch.empty_like(target), *call.args[1:])).run()
            self._queue(copy_call(target, drawn), stream)
            return target
        return self._now(call, stream)  # as many as there are probabilities

    def _late_copy(self, value: Any, stream: LateStream, name: str) -> Any:
        """New tensors that get these values late."""

        def late(leaf: Tensor) -> Tensor:
            made = self._new(torch.empty_like(leaf), stream, name)
            self._queue(copy_call(made, leaf), stream)
            return made

        return mapped(value, late)

    def _new(self, out: Tensor, stream: LateStream, name: str) -> Tensor:
        """Let a stream allocate a tensor."""
        self._cuda.allocate(stream)
        poison(out)
        self._memory.own(out, stream, name)
        return out

    # ------------------------------------------------------------ copies
    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        here, there = self._device_of(target), self._device_of(source)
        if here == there:
            self._queue(copy_call(target, source), self._cuda.current_stream(here))
        elif there == HOST:
            is_pinned = self._memory.is_pinned(source)
            stream = self._cuda.current_stream(here)
            self._queue(copy_call(target, source if is_pinned else source.clone()), stream)
            if not non_blocking:
                self._cuda.synchronize_stream(stream)
        elif here == HOST:
            is_pinned = self._memory.is_pinned(target)
            stream = self._cuda.current_stream(there)
            if is_pinned and not self._memory.is_busy(target):
                poison(target)
            self._queue(copy_call(target, source), stream)
            if not (non_blocking and is_pinned):
                self._cuda.synchronize_stream(stream)
        else:
            theirs, ours = self._cuda.current_stream(there), self._cuda.current_stream(here)
            self._cuda.wait(theirs, self._cuda.mark(ours))
            self._queue(copy_call(target, source), theirs)
            self._cuda.wait(ours, self._cuda.mark(theirs))
        return target

    def _moved(self, call: Call) -> Tensor:
        """A copy of another type, or on another device."""
        source: Tensor = call.args[0]
        kwargs = dict(call.kwargs)
        there = self._device_of(source)
        device, non_blocking = kwargs.pop("device", None), bool(kwargs.pop("non_blocking", False))
        if device is not None and device.type == "cuda":
            here = self._cuda.place(device)
        elif device is not None and getattr(self._moves, "now", False):
            here = HOST
        else:  # autograd and autocast take a tensor of ours for one of the CPU, and want it to stay
            here = there
        kwargs.pop("pin_memory", None)
        like: Tensor = replace(call, kwargs=kwargs).run()  # of the right form, with the numbers of now
        if here != HOST:
            # Numbers of the host must not lie there early.
            made = self._new(
                like if there != HOST else torch.empty_like(like), self._cuda.current_stream(here), call.name
            )
            return self._copy(made, source, non_blocking)
        if non_blocking:
            self._memory.pin(like)
        return self._copy(like, source, non_blocking)

    # ------------------------------------------------------------ parts
    def _queue(self, call: Call, stream: LateStream, outs: Sequence[Tensor] = ()) -> None:
        """Put a call on a stream, whose results go into tensors that are there."""
        ends: list[Callable[[], None]] = []
        uses: list[tuple[Memory, LateStream]] = []
        written = {id(leaf) for leaf in call.written}

        def queued(leaf: Tensor) -> Tensor:
            memory = self._memory.of(leaf)
            if memory is None and not self._memory.is_pinned(leaf):
                # A number of the host is a parameter of the kernel: the host may change it at once.
                return leaf.clone() if leaf.numel() == 1 and id(leaf) not in written else leaf
            if memory is not None:
                is_far = memory.stream.device != stream.device
                uses.append((memory, self._cuda.current_stream(memory.stream.device) if is_far else stream))
            ends.append(self._memory.hold(leaf))
            return leaf.detach()

        work: list[tuple[Call, list[Tensor]]] = [(call.mapped(queued), [queued(out) for out in outs])]

        def kernel() -> None:
            own, targets = work.pop()
            made = own.run()
            for target, value in zip(targets, leaves_of(made), strict=True) if targets else ():
                target.copy_(value)
            for end in ends:
                end()

        self._cuda.enqueue(stream, kernel, call.name, uses)

    def _place(self, call: Call, ours: Sequence[Memory]) -> torch.device:
        """The device of an operation."""
        device = call.kwargs.get("device")
        if device is not None and device.type == "cuda":
            return self._cuda.place(device)
        # In a backward the engine means by it the device of the tensor, which is one of the CPU to it.
        stays = device is None or torch._C._current_graph_task_id() != -1
        return ours[0].stream.device if ours and stays else HOST

    def _check(self, call: Call, place: torch.device) -> None:
        """Refuse tensors of several devices, as torch does; numbers of the host are parameters of kernels."""
        if call.name.endswith("_like") or call.name.startswith("new_"):
            return
        for leaf in call.inputs:
            device = self._device_of(leaf)
            if device == place or (device == HOST and (not leaf.dim() or call.name in INDEXING)):
                continue
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {call.name} got one on {device} and "
                f"one on {place}"
            )

    def _device_of(self, tensor: Tensor) -> torch.device:
        memory = self._memory.of(tensor)
        return HOST if memory is None else memory.stream.device


def _is_odd(leaf: Tensor) -> bool:
    """Whether a tensor has no memory to speak of, or a behaviour of its own."""
    is_own = type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return leaf.layout is not torch.strided or leaf.is_meta or is_own
