"""Makes torchvision importable next to a CPU build of torch."""

from __future__ import annotations

import importlib.util
import warnings

import torch

_library: torch.library.Library | None = None


def mend_torchvision() -> None:
    """Declare the operators that the import of torchvision lacks, if any.

    PyPI's wheel is built for CUDA. Next to a CPU build of torch its compiled operators cannot be loaded, and
    importing torchvision, and so timm and torchmetrics, fails when it registers a shape function for one.
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
