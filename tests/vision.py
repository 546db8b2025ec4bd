"""Makes torchvision importable beside a torch that is built for the CPU."""

from __future__ import annotations

import importlib.util
import warnings

import torch

_library: torch.library.Library | None = None


def mend_torchvision() -> None:
    """Declare what the import of torchvision lacks, where it does.

    PyPI's wheel is built for CUDA. Beside a CPU build of torch its compiled operators cannot be loaded, and
    the import of torchvision, and so of timm and torchmetrics, ends where it registers a shape for one.
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
