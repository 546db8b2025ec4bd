"""Layout of the batch in a call's arguments and outputs: `dim`, `split`, `join`, `reduce` of `setup`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flowdp.errors import OptionError
from flowdp.validators import check_function, check_int, one_of

__all__ = [
    "PLAIN",
    "RETURN",
    "Call",
    "Callee",
    "DimOption",
    "JoinFunction",
    "KeyPath",
    "Layout",
    "ReduceOption",
    "Reduction",
    "SplitFunction",
    "WeightFunction",
    "output_name",
]

KeyPath = tuple[Any, ...]
"""See `Form.key_paths`."""

Call = tuple[Sequence[Any], dict[str, Any]]
"""(args, kwargs) of a call or a part."""

DimOption = int | Mapping[str | int, Any]
"""A dim of all tensors, or of each argument by name or position: an int, or None for "goes whole".

Under "return" is the outputs': an int, or a mapping from the name of an output, or of a container of them."""

SplitFunction = Callable[[tuple[Any, ...], dict[str, Any], tuple[int, ...]], Any]
"""(args, kwargs, samples of each part) -> for each part its (args, kwargs)."""

JoinFunction = Callable[[list[Any], tuple[int, ...]], Any]
"""(outputs of each part, samples of each part) -> the output."""

WeightFunction = Callable[..., Any]
"""A part's arguments, by name -> one number: how many things the part's mean is a mean of."""

Reduction = Literal["mean", "sum"] | WeightFunction
ReduceOption = Reduction | Mapping[str | int, Reduction]
"""One for all numbers that a module returns, or by the output's name."""

RETURN = "return"
"""Names the outputs in a mapping of dims, as in `__annotations__`."""


def output_name(path: KeyPath) -> str:
    """Name of an output within a return value: "loss", "1", "heads.0"; "" for the only one."""
    return ".".join(map(str, path))


class Callee:
    """The parameters of a function that is called with parts of a batch.

    Args:
        function: A module's `forward`, or another method or function.
        skip: Leading parameters that flowdp fills in itself.

    Attributes:
        name: For messages.
        positional: Names of the parameters that may be given by position, in order.
        has_entries: Whether lists among its arguments have been found to have an entry for each sample.
    """

    def __init__(self, function: Callable[..., Any], skip: int = 0) -> None:
        self.name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
        self.positional: tuple[str, ...] = ()
        self.has_entries = False
        try:
            parameters = list(inspect.signature(function).parameters.values())[skip:]
        except (TypeError, ValueError):  # a builtin, or a scripted method
            return
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = tuple(p.name for p in parameters if p.kind in by_position)

    def names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str | int]:
        """A name for each argument of a call: its parameter's, or its position where it has none."""
        known = self.positional[: len(args)]
        return [*known, *range(len(known), len(args)), *kwargs]


@dataclass(frozen=True, slots=True)
class Layout:
    """Options by which calls are cut, and their outputs joined.

    Attributes:
        dim: Where the samples lie.
        split: Cuts a call instead; None: along `dim`.
        join: Joins the outputs of the parts instead; None: along `dim`.
        reduce: Reduction of a number that each part returns.

    Raises:
        OptionError: One of them is of the wrong kind.
    """

    dim: DimOption = 0
    split: SplitFunction | None = None
    join: JoinFunction | None = None
    reduce: ReduceOption = "mean"

    def __post_init__(self) -> None:
        """Check the types."""
        for name, dim in _entries("dim", self.dim):
            if name == f"dim[{RETURN!r}]":
                for output, output_dim in _entries(name, dim):
                    check_int(output, output_dim, least=0)
            else:
                check_int(name, dim, least=0, optional=isinstance(self.dim, Mapping))
        check_function("split", self.split, "(args, kwargs, sizes)")
        check_function("join", self.join, "(outputs, sizes)")
        for name, reduction in _entries("reduce", self.reduce):
            if not callable(reduction):
                one_of(name, reduction, Literal["mean", "sum"])

    def check_plain(self) -> None:
        """Check that all options have their defaults, for windows.

        Raises:
            OptionError: One has not.
        """
        if self != PLAIN:
            raise OptionError(
                "dim, split, join and reduce are for calls of the module, and epoch() cuts along dim 0: call "
                "the module in a loop over the loader, or leave them out"
            )

    # ------------------------------------------------------------------ arguments
    def argument_dim(self, key: str | int, name: str | int) -> int | None:
        """The dim of an argument, by its position or its parameter's name; None: it goes whole."""
        if not isinstance(self.dim, Mapping):
            return self.dim
        dim: int | None = self.dim.get(key, self.dim.get(name, 0))
        return dim

    # ------------------------------------------------------------------ outputs
    def output_dim(self, path: KeyPath, dim: int) -> int:
        """The dim of one output; `dim` is that of the first argument that was cut."""
        if not isinstance(self.dim, Mapping):
            return self.dim
        return int(_by_name(self.dim.get(RETURN, dim), path, 0))

    def reduction(self, path: KeyPath) -> Reduction:
        """The reduction of an output that is one number from each part."""
        reduction: Reduction = _by_name(self.reduce, path, "mean")
        return reduction

    @torch.no_grad()
    def weigh(self, named: Mapping[str | int, Any]) -> dict[WeightFunction, Tensor]:
        """The weights of a part, each one number, but for functions for which the call has no arguments.

        Args:
            named: The arguments of the part by their names.
        """
        weights = {}
        for _, function in _entries("reduce", self.reduce):
            if callable(function):
                signature = inspect.signature(function)
                given = {name: named[name] for name in signature.parameters if named.get(name) is not None}
                try:
                    bound = signature.bind(**given)
                except TypeError:  # the call has no such arguments
                    continue
                weight = torch.as_tensor(function(*bound.args, **bound.kwargs))
                weights[function] = weight.detach().reshape(()).double()
        return weights


def _by_name(given: Any, path: KeyPath, default: Any) -> Any:
    """The value for an output: that of all, its own, or that of the innermost container with an entry."""
    if not isinstance(given, Mapping):
        return given
    known = {str(name): value for name, value in given.items()}
    names = (output_name(path[:length]) for length in range(len(path), -1, -1))
    return next((known[name] for name in names if name in known), default)


def _entries(name: str, option: Any) -> list[tuple[str, Any]]:
    """The values of an option, one for all or one for each name, and what a message calls them."""
    if isinstance(option, Mapping):
        return [(f"{name}[{key!r}]", value) for key, value in option.items()]
    return [(name, option)]


PLAIN = Layout()
"""Samples along dim 0, numbers reduced to their mean."""
