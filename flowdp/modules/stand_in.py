"""A module that stands for another one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any, Self

from torch import nn

__all__ = ["StandInModule"]

TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of a module in which torch keeps its parts."""

METHODS = ("state_dict", "load_state_dict", "_load_from_state_dict")
"""Methods that are the module's own; a larger module that holds a part loads it by the last one."""


class StandInModule(nn.Module):
    """Wraps a module and shares its parameters, buffers and submodules under their own names.

    `state_dict`, `named_parameters` and the like show the module's own entries, without a prefix, also
    where the wrapper is a part of a larger module; `train()` and `eval()` reach the module. Other attributes
    are the module's, to read and to set, but for its methods: they would run the module without the wrapper.

    Args:
        module: Module that it stands for.

    Attributes:
        module: As given. Not a submodule: its tables are this one's own.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        del self.__dict__["training"]  # the module's flag counts
        self.__dict__ |= {"module": module} | {name: getattr(module, name) for name in (*TABLES, *METHODS)}

    def _seal(self, maker: Callable[..., Any], fixed: Container[str] = ()) -> None:
        """Set other attributes than this object's own on the module, from here on.

        Args:
            maker: The function that made it; to set one of its arguments is an error.
            fixed: Attributes of this object's own that cannot be set, either.
        """
        self.__dict__ |= {"_fixed": fixed, "_maker": maker}

    def _instead(self, method: str) -> str:
        """Advice for calling a method of the module."""
        return f"`.module.{method}(...)` calls it on the module itself"

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")  # missing while a copy is being made
        if module is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(module, name)
        if inspect.ismethod(value) and value.__self__ is module:
            raise AttributeError(
                f"{name!r} is a method of {type(module).__name__}, for which {type(self).__name__} does not "
                f"stand: {self._instead(name)}"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        maker = self.__dict__.get("_maker")
        if maker is None or name in self.__dict__ or hasattr(type(self), name):
            if maker is not None and name in self._fixed:
                raise AttributeError(f"{name} cannot be set: call {maker.__name__}() again")
            super().__setattr__(name, value)
            return
        if not hasattr(self.module, name) and name in inspect.signature(maker).parameters:
            raise AttributeError(
                f"{name} is an argument of {maker.__name__}(), and has no effect afterwards: call "
                f"{maker.__name__}() again; an attribute of the module is set by .module.{name} = ..."
            )
        setattr(self.module, name, value)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the module."""
        self.module.train(mode)
        return self
