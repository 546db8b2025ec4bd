"""`__all__` tells the truth, and every public name says what it is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import flowdp

MODULES = ["flowdp"] + sorted(
    info.name
    for info in pkgutil.walk_packages(flowdp.__path__, "flowdp.")
    if not info.name.endswith("__main__")
)


def undocumented(module: ModuleType) -> list[str]:
    """Names of `__all__` that are classes or functions without a docstring of their own.

    A dataclass without one is given its signature as `__doc__`, which says nothing.
    """
    silent = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            text = value.__doc__ or ""
            if not text.strip() or text.startswith(f"{name}("):
                silent.append(name)
    return silent


@pytest.mark.parametrize("name", MODULES)
def test_all_names_what_is_there(name: str) -> None:
    module = importlib.import_module(name)
    if hasattr(module, "__path__") and not hasattr(module, "__all__"):
        return  # a room that re-exports nothing
    listed = module.__all__
    assert len(set(listed)) == len(listed), f"{name}.__all__ lists a name twice"
    assert [n for n in listed if not hasattr(module, n)] == [], f"{name}.__all__ lists what is not there"
    assert undocumented(module) == [], f"{name}: public and without a docstring"


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from flowdp import *", names)
    assert set(flowdp.__all__) <= names.keys()
    assert flowdp.__all__, "flowdp has no public names"
