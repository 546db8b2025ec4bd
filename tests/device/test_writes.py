from __future__ import annotations

import torch
from torch import nn

from flowdp.device.writes import WritesNoted


def test_writes_to_what_was_there_are_found_and_undone() -> None:
    mine, part, listed, untouched = torch.ones(3), torch.zeros(4), torch.ones(2), torch.ones(2)
    with WritesNoted([]) as writes:
        mine.mul_(3)
        mine.add_(1)
        part[1:3].add_(2)
        part[0] = 5
        torch._foreach_add_([listed], 1)
        torch.add(untouched, 1, out=torch.empty(2))
    assert mine.tolist() == [4.0] * 3
    assert [tensor.data_ptr() for tensor in writes.found] == [one.data_ptr() for one in (mine, part, listed)]
    writes.undo()
    assert mine.tolist() == [1.0] * 3
    assert part.tolist() == [0.0] * 4
    assert listed.tolist() == [1.0] * 2


def test_own_and_known_tensors_are_not_found() -> None:
    known, module = torch.zeros(3), nn.Linear(3, 2)
    with WritesNoted([known]) as writes:
        known[1:].add_(1)
        made = torch.zeros(2)
        made.add_(1)
        made.view(1, 2).mul_(2)
        torch.tensor(1.0).add_(1)
        (module(torch.ones(1, 3)).relu_().sum() * 2).backward()
    assert writes.found == []
    assert known.tolist() == [0.0, 1.0, 1.0]
