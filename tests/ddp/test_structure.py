from __future__ import annotations

import pytest
import torch
from torch import nn

from flowdp.ddp.structure import check_same_structure, check_separate_memory
from flowdp.device.structure import structure
from flowdp.errors import OptionError


def model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def test_models_of_all_ranks_are_compared():
    check_same_structure([structure(model()) for _ in range(3)])
    with pytest.raises(OptionError, match=r"'0\.weight' is float32 \(4, 2\) on rank 1 and .* on rank 0"):
        check_same_structure([structure(model()), structure(model(4))])


def test_models_apart():
    first, second, third = model(), model(), model()
    check_separate_memory([first, second, third])
    check_separate_memory([nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")])
    third[1].weight = first[1].weight
    with pytest.raises(OptionError, match=r"'1\.weight' is the same tensor in models 0 and 2"):
        check_separate_memory([first, second, third])


def test_models_that_were_loaded_without_a_copy_are_not_apart():
    first, second = model(), model()
    second.load_state_dict(first.state_dict(), assign=True)
    with pytest.raises(OptionError, match=r"'0\.weight' is the same tensor in models 0 and 1"):
        check_separate_memory([first, second])
    first[1].register_buffer("sparse", torch.zeros(3).to_sparse())
    check_separate_memory([first, model()])
