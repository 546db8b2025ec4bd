"""Tests of the settings of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from flowdp import OptionError, Trainer
from flowdp.network.team import Team


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.zeros(8, 2))


@pytest.mark.parametrize("policy", ["exact", "sync"])
def test_machines_cannot_share_the_batches_of_a_stream_by_samples(policy: Any) -> None:
    own = Trainer(
        torch.nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        dataset=Stream(),
        batch_size=4,
        epochs=1,
        devices=["cpu", "cpu"],
        policy=policy,
    ).config
    assert own.check() is None  # on one machine
    spread = replace(own, team=Team((2, 2)))
    if policy == "exact":
        with pytest.raises(OptionError, match="use policy='sync'"):
            spread.open_source()
    else:
        assert spread.open_source().close()
