"""Reports of machines: what they say of each other, and what a sum of them keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from flowdp.data_parallel.machine_report import (
    MachineReport,
    batch_checksum,
    difference_of,
    message_of,
    rate_of,
    reports_in,
)

NAMES = ("machine 0 (a)", "machine 1 (b)")


def of_rate(lr: float) -> float:
    return rate_of(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr))


def test_a_sum_of_messages_has_every_report_and_flag() -> None:
    reports = [
        MachineReport(0, 7, 3, of_rate(0.1), 2**32 - 1, 17),
        MachineReport(1, 7, 4, of_rate(1e300), 0, 9),
    ]
    flags = [[True, False, False], [True, True, False]]
    messages = [message_of(report, k, 2, flags[k]) for k, report in enumerate(reports)]
    found, any_flag = reports_in(messages[0] + messages[1], 2)
    assert found == reports
    assert any_flag == [True, True, False]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"samples": 5}, ""),  # machines may have unequal batches
        ({"steps": 2}, "optimizer steps.*: 1 on machine 0 (a), 2 on machine 1 (b)"),
        ({"rate": of_rate(0.25)}, ": 0.5 on machine 0 (a), 0.25 on machine 1 (b)"),
        ({"layout": 9}, "different parameters"),
        ({"ended": 1}, "epoch has ended"),
    ],
)
def test_differences(change: dict[str, float], text: str) -> None:
    report = MachineReport(0, 7, 1, of_rate(0.5), 0, 4)
    found = difference_of([report, replace(report, **change)], NAMES)
    assert all(part in found for part in text.split(".*"))
    assert bool(found) == bool(text)


def test_a_rate_in_a_tensor_is_not_waited_for() -> None:
    tensor = torch.tensor(0.1)
    assert rate_of(torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=tensor, capturable=True)) == 0
    assert rate_of(None) == 0


def test_checksums_of_batches() -> None:
    x, y = torch.arange(12.0).view(3, 4), torch.arange(3)
    assert batch_checksum((x, y)) == batch_checksum((x.clone(), y.clone()))
    assert batch_checksum((x, y)) != batch_checksum((x, y + 1))
    assert batch_checksum((x.to(torch.complex64), y)) != 0
    assert batch_checksum("text") == 0
