"""Validators of single values: ints, numbers, flags, words and functions.

Each raises `OptionError` with the name of the argument, the kind of value that it takes, and the value given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from typing import Any, TypeGuard, get_args

from flowdp.errors import OptionError

__all__ = [
    "check_flag",
    "check_fraction",
    "check_function",
    "check_installed",
    "check_int",
    "check_number",
    "is_int",
    "is_number",
    "one_of",
    "takes",
]


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite int or float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def one_of(name: str, given: object, literal: object) -> None:
    """Check a word against the words of a `Literal`.

    Raises:
        OptionError: `given` is not one of them.
    """
    words = get_args(literal)
    if given not in words:
        listed = ", ".join(repr(word) for word in words)
        raise OptionError(f"{name} must be one of {listed}, not {given!r}")


def check_int(name: str, value: object, *, least: int = 1, optional: bool = False) -> None:
    """Check an int; None passes where it is optional.

    Raises:
        OptionError: It is something else, or less than `least`.
    """
    if value is None and optional:
        return
    if not is_int(value) or value < least:
        raise OptionError(f"{name} must be an int of at least {least}{_or_none(optional)}, not {value!r}")


def check_number(name: str, value: object, *, above: bool, optional: bool = False) -> None:
    """Check a finite number of at least 0, or above 0; None passes where it is optional.

    Raises:
        OptionError: It is something else.
    """
    if value is None and optional:
        return
    if not is_number(value) or value < 0 or (above and value == 0):
        bound = "above" if above else "of at least"
        raise OptionError(f"{name} must be a number {bound} 0{_or_none(optional)}, not {value!r}")


def check_fraction(name: str, value: object) -> None:
    """Check a number above 0 and at most 1.

    Raises:
        OptionError: It is something else.
    """
    if not is_number(value) or not 0 < value <= 1:
        raise OptionError(f"{name} must be a number above 0 and at most 1, not {value!r}")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Check True or False; None passes where it is optional.

    Raises:
        OptionError: It is something else.
    """
    if not isinstance(value, bool) and not (value is None and optional):
        words = "True, False or None" if optional else "True or False"
        raise OptionError(f"{name} must be {words}, not {value!r}")


def check_function(name: str, value: object, of: str, count: int | None = None, *named: str) -> None:
    """Check a function; None passes.

    Args:
        name: Name of the argument.
        value: As given.
        of: The function's parameters, for the message.
        count: Number of positional arguments with which it is called; None: not checked.
        named: Names of arguments that it gets besides, if it has them.

    Raises:
        OptionError: It cannot be called, or not so.
    """
    if value is None:
        return
    if not callable(value):
        raise OptionError(f"{name} must be a function of {of}, not {value!r}")
    if count is not None and not takes(value, count, *named):
        raise OptionError(f"{name} must be a function of {of}, and {value!r} takes {signature(value)}")


def takes(function: Callable[..., Any], count: int, *named: str) -> bool:
    """Whether a function can be called with so many positional arguments; True where it does not say.

    Args:
        function: Function, class or other callable.
        count: Number of positional arguments.
        named: Names of arguments that it gets besides, if it has them.
    """
    try:
        own = signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    try:
        own.bind(*range(count), **{name: None for name in named if name in own.parameters})
    except TypeError:
        return False
    return True


def check_installed(purpose: str, package: str, extra: str) -> None:
    """Check that a package which is not needed by `import flowdp` is installed; it is not imported.

    Args:
        purpose: Argument or class that needs it.
        package: Name by which it is imported.
        extra: The extra of flowdp that brings it.

    Raises:
        OptionError: It is not there.
    """
    found = find_spec(package)
    # A folder of this name in the working directory, such as wandb's own, is found as a namespace.
    if found is None or found.origin is None:
        raise OptionError(f"{purpose} needs {package}: pip install 'flowdp[{extra}]'")


def _or_none(optional: bool) -> str:
    return " or None" if optional else ""
