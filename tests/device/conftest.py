"""The number of threads that tests of OpenMP pools start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def three_threads() -> Iterator[None]:
    """The user's choice; put back, for this thread and those that start later."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
