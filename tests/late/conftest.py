"""The machine of a test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def without_cuda() -> None:
    """Skip where there is CUDA: the emulator stands in the place of `torch.cuda`."""
    if torch.cuda.is_available():
        pytest.skip("the emulator replaces torch.cuda, which is at work on this machine")
