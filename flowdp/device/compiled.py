"""torch.compile on several ranks of one process: room for all replicas, one compilation where one will do.

Dynamo keeps compiled code with the code of the function: all instances and all threads share it, and
with it the limit of 8 compilations. Threads that come to a function at once each find nothing compiled, and
each compile it, one after another. So 12 ranks reach the limit in their first step, and from then on the
function runs as it is written, for as long as the process lives.

For dynamo replicas differ by their device alone, because parameters are arguments of the compiled code. So
ranks of one device need one compilation, if the first one is done before the others come.

Since torch 2.12 the settings of torch.compile belong to the context (`contextvars`) of the thread that makes
them, and another thread has the defaults. So the threads of ranks run in copies of their starter's context.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

__all__ = [
    "FirstCalls",
    "Uncompiled",
    "as_written",
    "compile_alike",
    "compiled_attributes",
    "compiled_like",
    "frees_at_once",
    "has_compiled",
    "make_room",
    "take_out",
    "uses_compile",
    "warn_of_draws",
]

log = logging.getLogger("flowdp")

LIMITS = ("recompile_limit", "accumulated_recompile_limit")

TURN_S = 300.0
"""The longest wait for the compilation of another rank, which may be waiting for this one in the user's code.
After it, both compile."""

SIZES = 4
"""Sizes whose first calls take turns. The second one makes dynamo compile for any, the size 1 excepted."""

_turn = threading.Lock()
_raised: dict[tuple[str, int], int] = {}  # the limits as they were, by those that were made of them


def make_room(ranks: int) -> None:
    """Raise dynamo's limits, which all replicas share, so that each has as much room as alone.

    They stay so: compiled code stays with the functions, too, and the user's thread may compile more of them
    when the run is over. A number that the user sets is raised at the next start.

    Threads:
        The one that starts the ranks' threads, which inherit its settings.
    """
    config = sys.modules.get("torch._dynamo.config")
    if config is None or ranks == 1:
        return  # torch.compile has not been used, and no optimizer made
    for name in LIMITS:
        now = getattr(config, name)
        own = _raised.get((name, now), now)
        if own * ranks > now:
            setattr(config, name, own * ranks)
            _raised[name, own * ranks] = own


class Uncompiled:
    """A context in which compiled functions run as they are written.

    In a dispatch mode they do so anyway, and dynamo would leave them so for good. It is a setting of the
    process: while a thread is inside, those of other threads run as written, too. Several may be inside.
    """

    _lock = threading.Lock()
    _inside = 0
    _setting = ExitStack()

    @classmethod
    def is_on(cls) -> bool:
        """Whether any thread is inside."""
        return cls._inside > 0

    def __enter__(self) -> None:
        """Enter it."""
        with Uncompiled._lock:
            if Uncompiled._inside == 0 and "torch._dynamo" in sys.modules:
                Uncompiled._setting.enter_context(torch.compiler.set_stance("force_eager"))
            Uncompiled._inside += 1

    def __exit__(self, *error: object) -> None:
        """Leave it; the last thread puts the setting back."""
        with Uncompiled._lock:
            Uncompiled._inside -= 1
            if Uncompiled._inside == 0:
                Uncompiled._setting.close()


def take_out(module: nn.Module) -> None:
    """Run the compiled parts of a module eagerly, by a change of their attributes."""
    for part in module.modules():
        own = vars(part)
        if own.get("_compiled_call_impl") is not None:
            own["_compiled_call_impl"] = None
        if "dynamo_ctx" in own:  # of torch.compile(module)
            own["forward"] = part._modules["_orig_mod"]


def warn_of_draws(devices: Iterable[torch.device], are_compiled: bool) -> None:
    """Log that compilation has no effect, because CPU ranks draw from generators of their own."""
    if are_compiled and any(device.type == "cpu" for device in devices):
        log.warning(
            "with partition_ratios, devices on the CPU draw by the seed, which compiled functions cannot: "
            "the functions of torch.compile run uncompiled there; they are compiled without partition_ratios"
        )


def as_written(function: Any) -> Any:
    """A function without its compilation."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def compile_alike(module: nn.Module, twin: nn.Module) -> None:
    """Compile the parts of a copy whose originals were compiled by `module.compile()`: copies lose that.

    Raises:
        ValueError: The settings of a compilation are not found.
    """
    for mine, theirs in zip(module.modules(), twin.modules(), strict=True):
        if vars(mine).get("_compiled_call_impl") is not None:
            theirs._compiled_call_impl = compiled_like(mine, theirs)


def compiled_attributes(module: nn.Module, twin: nn.Module, own: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that make a twin compiled as its module is.

    Args:
        module: The module.
        twin: Another one, of the same class.
        own: The twin's attributes so far, its submodules among them.

    Raises:
        ValueError: As `compiled_like`.
    """
    found: dict[str, Any] = {}
    if "dynamo_ctx" in own:  # of torch.compile(module)
        found["forward"] = own["dynamo_ctx"](own["_modules"]["_orig_mod"].__call__)
    if own.get("_compiled_call_impl") is not None:  # of module.compile()
        found["_compiled_call_impl"] = compiled_like(module, twin)
    return found


def compiled_like(module: nn.Module, twin: nn.Module) -> Any:
    """The call of a module's twin, compiled as `module.compile()` has compiled the module's.

    Raises:
        ValueError: The settings of the compilation are not found.
    """
    compiled = vars(module)["_compiled_call_impl"]
    if not hasattr(compiled, "_torchdynamo_orig_callable"):
        return compiled
    cells = (cell.cell_contents for cell in compiled.__closure__ or ())
    made_by = next((cell for cell in cells if hasattr(cell, "callback") and callable(cell)), None)
    if made_by is None:
        raise ValueError(
            f"{type(module).__name__}.compile() cannot be repeated for the copy; use torch.compile(model)"
        )
    return made_by(twin._call_impl)


class FirstCalls:
    """Turns for one rank's first calls of something compiled, behind those of other ranks.

    ::

        calls = FirstCalls(model, loss)
        with calls.turn(len(batch)):
            loss(model, batch).backward()

    Attributes:
        are_compiled: Whether the modules and functions of the run are compiled, in part; else no call waits
            for a turn.
    """

    def __init__(self, *parts: object) -> None:
        self.are_compiled = uses_compile(*parts)
        self._sizes: list[int] = []

    def turn(self, size: int | None = None) -> AbstractContextManager[object]:
        """A context for a call, which waits for its turn where the call may have to be compiled.

        Args:
            size: Samples of the call, as calls of another size may be compiled anew; None: not known.
        """
        if not self.are_compiled or size in self._sizes or len(self._sizes) == SIZES or Uncompiled.is_on():
            return nullcontext()
        self._sizes.append(-1 if size is None else size)
        return _in_turn()


@contextmanager
def _in_turn() -> Iterator[None]:
    has_turn = _turn.acquire(timeout=TURN_S)
    try:
        yield
    finally:
        if has_turn:
            _turn.release()


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters.get("frames"))


def frees_at_once(device: torch.device) -> bool:
    """Whether backwards keep their graph, and free it at once behind them, where ranks launch in turn.

    Tensors of a graph belong to Python as well, and the backward would ask for the interpreter lock to
    free each: some hundred times, against the rank that launches. On CUDA memory is dearer, and compiled
    backwards give parts of their graph away.
    """
    return device.type == "cpu" and not has_compiled()


def uses_compile(*parts: object) -> bool:
    """Whether modules or functions, or objects that they refer to, were made by torch.compile."""
    todo, seen = list(parts), set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if getattr(value, "__dict__", {}).get("_torchdynamo_orig_callable") is not None:
            return True
        todo += _inside(value)
    return False


def _inside(value: Any) -> Iterator[Any]:
    """The modules and functions that a value refers to, and containers that may hold some."""
    if isinstance(value, nn.Module):
        yield getattr(type(value), "forward", None)  # a scripted module has none
        yield from vars(value).values()
    elif isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType) and not (value.__module__ or "").startswith("torch."):
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (used for used in named if isinstance(used, FunctionType | nn.Module | partial))
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # empty
                yield cell.cell_contents
