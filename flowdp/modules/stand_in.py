"""A module that stands for another one."""

from __future__ import annotations

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
    are the module's, to read and to set, also those that are named like one of the wrapper's class; its
    methods run it without the wrapper.

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

    def _seal(self) -> None:
        """Set attributes that are not this object's own on the module, from here on.

        Of methods and properties of this class that the module has, too, the module's count.
        """
        names = (set(dir(type(self))) - set(dir(nn.Module))) & set(dir(self.module))
        if twice := {name: _of_module(name) for name in names if not name.startswith("_")}:
            self.__class__ = type(type(self).__name__, (type(self),), twice)
        self.__dict__["_is_sealed"] = True

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")  # missing while a copy is being made
        if module is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in self.__dict__ or isinstance(getattr(type(self), name, None), property)
        if "_is_sealed" in self.__dict__ and not is_own:
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the module."""
        self.module.train(mode)
        return self


def _of_module(name: str) -> property:
    """An attribute of the module, as one of the wrapper's."""
    return property(
        lambda stand_in: getattr(stand_in.module, name),
        lambda stand_in, value: setattr(stand_in.module, name, value),
    )
