"""Tests of a run as HTML."""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import flowdp
from flowdp.observe.run_html import RunView, run_html
from flowdp.policy.efficiency import Activity, RankTimes, efficiency_of
from tests.observe.test_tables import epoch
from tests.timeline.hostile import HOSTILE
from tests.timeline.test_timeline import ended


class Page(HTMLParser):
    """Tags and text of a fragment; every tag that opens closes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def view(**fields: Any) -> RunView:
    times = [RankTimes({Activity.STEP: 500.0, Activity.GATE: 500.0}, 60, 6, 1000.0)] * 2
    given: dict[str, Any] = {
        "phase": "running",
        "global_step": 50,
        "total_steps": 200,
        "history": [epoch(0, acc=(0.5, 1.0))],
        "rounds": [ended(number, loss=2.0 / (1 + number)) for number in range(10)],
        "report": efficiency_of(times, ("a", "b")),
    }
    return RunView(**{**given, **fields})


def test_it_says_where_the_run_is() -> None:
    page = Page(run_html(view()))
    text = "".join(page.texts)
    assert "running · epoch 2/3 · step 50/200 · 120 samples/s · 50 % of the speed in their steps" in text
    assert "width:25.0%" in run_html(view())
    assert "waiting for others 50 %" in text
    assert page.tags.count("polyline") == 1
    assert page.tags.count("tr") == 5


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(name: str) -> None:
    times = [RankTimes({Activity.STEP: 500.0}, 60, 6, 1000.0)]
    hostile = view(
        report=efficiency_of(times, [name]),
        history=[replace(epoch(0), scalars={name: math.nan}, eval={name: 1.0})],
        problems=[name],
        error=name,
    )
    page = Page(run_html(hostile))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.texts.count(name) == 4


def test_a_run_shows_itself() -> None:
    data = torch.randn(64, 2), torch.randn(64, 1)
    trainer = flowdp.Trainer(
        nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1),
        nn.MSELoss(),
        policy="cadence",
        dataset=data,
        per_device_batch_size=4,
        epochs=2,
        devices=["cpu"] * 2,
        progress=False,
    )
    run = trainer.start()
    run.join()
    text = "".join(Page(run._repr_html_()).texts)
    assert text.count("cpu (rank ") == 2
    assert "done · epoch 2/2 · step 32/32" in text
