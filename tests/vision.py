"""timm, and the torchvision that it needs, next to a CPU build of torch."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["import_timm"]

VISION = Path(sys.prefix, "vision")
"""Folder into which `make` installs both. Others look for torchvision, and would fail where they find it."""

_library: torch.library.Library | None = None


def import_timm() -> Any:
    """timm of this environment or of its folder; without either, skip the tests of the module that asks."""
    if importlib.util.find_spec("timm") is None:
        sys.path.append(str(VISION))
    _mend_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("timm", reason=f"timm is not installed: `make test` puts it into {VISION}")


def _mend_torchvision() -> None:
    """Declare the operators that the import of torchvision lacks, if any.

    PyPI's wheel is built for CUDA. Next to a CPU build of torch its compiled operators cannot be loaded, and
    importing torchvision, and so timm, fails when it registers a shape function for one.
    """
    global _library
    if _library is not None or importlib.util.find_spec("torchvision") is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchvision  # noqa: F401
    except RuntimeError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
