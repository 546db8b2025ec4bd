"""Three threads per process at the start of each test of OpenMP pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def three_threads() -> Iterator[None]:
    """The user's setting; restored for this thread and later ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
