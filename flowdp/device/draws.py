"""Random numbers: the generators of the process, and a generator of its own for a rank on the CPU.

Torch has one CPU generator in a process. Ranks that draw from it at once take turns by chance, so that no two
runs have the same dropout. In this mode every random operation of a thread takes the generator of the rank.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flowdp.device.accelerator import device_generator, started_devices
from flowdp.device.compiled import Uncompiled
from flowdp.device.dispatch import RankMode, make_operators
from flowdp.errors import FlowdpError, OptionError
from flowdp.validators import is_int

__all__ = [
    "OwnDraws",
    "SeededCalls",
    "draw_seed",
    "generators_kept",
    "is_random",
    "seed_everything",
    "seeded_form",
    "share_generator",
]

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

MADE_OF_DRAWS = (
    *("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "fractional_max_pool2d_with_indices"),
    "fractional_max_pool3d_with_indices",
    *("fractional_max_pool2d", "fractional_max_pool3d", "gumbel_softmax", "kaiming_uniform_", "lobpcg"),
    *("multi_head_attention_forward", "pca_lowrank"),
    *("rrelu", "svd_lowrank"),
)
"""Functions written in Python, inside which a mode for functions sees nothing."""


def draw_seed() -> int:
    """A seed from torch's CPU generator, which moves on by one number, as it does when a model draws from it.

    So `torch.manual_seed` and `torch.set_rng_state` have their effect on the ranks' draws.
    """
    return int(torch.randint(2**62, ()))


def share_generator(devices: Sequence[torch.device]) -> list[bool]:
    """Whether each rank shares its device's generator with others. Shape (world_size,)."""
    places = [torch.device("cpu") if device.type == "cpu" else device for device in devices]
    return [places.count(place) > 1 for place in places]


class OwnDraws(RankMode):
    """Mode in which a forward that a backward computes again may draw no random numbers.

    `torch.utils.checkpoint` puts the generator back to where it was before the forward. Where ranks share the
    generator, others have drawn from it in between, and where they have their own it is not that one: the
    numbers are not those of the forward, and the gradients would be wrong.

    With a seed random operations on the CPU draw from a generator of one job of one rank meanwhile.

    Args:
        seed: From `draw_seed`, the same for all ranks of a call; None: they draw from the device's generator.
        place: The rank, and other integers that the numbers depend on.

    Threads: the one that enters it, as often as it likes.
    """

    def __init__(self, seed: int | None = None, *place: int) -> None:
        super().__init__()
        self._compilation: Any = nullcontext() if seed is None else Uncompiled()
        self._seed, self._place = seed, place

    @cached_property  # made when something is drawn, mostly never
    def generator(self) -> torch.Generator | None:
        """Generator of the draws; None: the device's."""
        if self._seed is None:
            return None
        state = np.random.SeedSequence(self._seed, spawn_key=self._place).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(state[0]) >> 1)

    def __enter__(self) -> Any:
        """Enter it, in this thread; with a seed compiled functions run as they are written."""
        self._compilation.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Leave it, in the same thread."""
        super().__exit__(*error)
        self._compilation.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; a random one with the rank's generator.

        Raises:
            FlowdpError: It is a random one of a second forward, or cannot take a generator.
        """
        given = kwargs or {}
        if not is_random(func, args, given):
            return func(*args, **given)
        # Noise that a hook adds to gradients is no second forward, and drawn without a graph.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            raise FlowdpError(
                f"{func} draws random numbers in a forward that a backward computes again, as "
                "torch.utils.checkpoint does; they would be others than in the first, as ranks share the "
                "generator of their device, or draw by the seed: take the dropout out of the checkpointed "
                "part, or give each device one rank, without partition_ratios"
            )
        if self._seed is None:
            return func(*args, **given)
        seeded = seeded_form(func)
        if seeded is None:
            with self:  # under inference_mode torch has not taken it apart; one in eval mode draws nothing
                made = func.decompose(*args, **given)
            if made is not NotImplemented:
                return made
            raise FlowdpError(
                f"{func} takes no generator, so its numbers cannot be repeated with partition_ratios: draw "
                "them by another operation (torch.rand, tensor.normal_()), or leave partition_ratios out"
            )
        return seeded(*args, **{**given, "generator": self.generator})


class SeededCalls(TorchFunctionMode):
    """Mode in which those functions of torch that may draw random numbers run in `OwnDraws`.

    It costs a fraction of what that mode costs, which is asked about each operation.

    Threads: the one that enters it.
    """

    def __init__(self, draws: OwnDraws) -> None:
        super().__init__()
        self._draws = draws
        self._names = drawing_names()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        given = kwargs or {}
        if getattr(func, "__name__", "").lstrip("_") in self._names and _may_draw(func, args, given):
            with self._draws:
                return func(*args, **given)
        return func(*args, **given)


def _may_draw(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether dropout is on, in a function that has it; others may draw."""
    names = _parameter_names(func)
    named = {**dict(zip(names, args, strict=False)), **given}
    if func.__name__ in RECURRENT:
        # The builtins take (..., dropout: float, train: bool, ...) by position.
        place = next((k for k, value in enumerate(args) if type(value) is float), None)
        return place is None or bool(args[place] and args[place + 1])
    return bool(named.get("training", True) and named.get("p", 1.0) and named.get("dropout_p", 1.0))


@cache
def _parameter_names(func: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters) if isinstance(func, FunctionType) else ()


@cache
def drawing_names() -> frozenset[str]:
    """Names of the functions that may draw: operations that torch marks, and functions made of such."""
    make_operators()
    found = set(MADE_OF_DRAWS)
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if isinstance(packet, type(torch.ops.aten.add)) else ()
        if any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads):
            found.add(name.lstrip("_"))
    return frozenset(found)


def is_random(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether an operation draws from the device's generator; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags or given.get("generator") is not None:
        return False
    place = _dropout(func)
    if place is None:
        return True
    return bool(args[place] if place < len(args) else given.get("dropout_p", 0.0))


@cache
def _dropout(func: Any) -> int | None:
    """Position of attention's `dropout_p` among the arguments; None without one."""
    names = list(_arguments(func))
    return names.index("dropout_p") if "dropout_p" in names else None


@cache
def seeded_form(func: Any) -> Any:
    """The form of an operation that takes a generator beside the same arguments; None where there is none."""
    if "generator" in _arguments(func):
        return func
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = _arguments(other)
        if arguments.pop("generator", None) is not None and arguments == _arguments(func):
            return other
    return None


def _arguments(func: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in func._schema.arguments}


SEEDS = 2**32
"""Seeds that NumPy takes."""


def seed_everything(seed: int) -> None:
    """Seed the generators of `random`, `numpy.random`, and torch's of the CPU and all accelerators.

    Call it before the model is built: its first weights are drawn from torch's generator. The order of a
    run's samples, and a run's generators of accelerators, come from `Trainer(seed=)` and not from this.

    It cannot fix:

    - dropout and the like on several CPU devices, whose threads draw from torch's one generator in the order
      in which they come: `policy="exact"` with `partition_ratios` gives each a generator of its own;
    - shares that follow measured speed ("cadence", "async", and "exact" without `partition_ratios`): two runs
      differ in their rounding;
    - kernels of CUDA that add in any order: `torch.use_deterministic_algorithms(True)`;
    - generators of your own (`torch.Generator`, `numpy.random.default_rng`), and the order of sets of
      strings, which the environment variable PYTHONHASHSEED sets before Python starts.

    Args:
        seed: From 0 to 2**32 - 1.

    Raises:
        OptionError: It is something else.

    Threads:
        Any, while no run draws.
    """
    if not is_int(seed) or not 0 <= seed < SEEDS:
        raise OptionError(f"seed must be an int from 0 to 2**32 - 1, not {seed!r}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def generators_kept(own: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Context that puts the generators of `seed_everything` back to where they were.

    Args:
        own: More generators to put back.

    Threads:
        Any, while nothing else draws.
    """
    python, numpy = random.getstate(), np.random.get_state()
    generators = [torch.default_generator, *map(device_generator, started_devices()), *own]
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in states:
            generator.set_state(state)
