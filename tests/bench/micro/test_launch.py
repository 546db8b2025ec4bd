from __future__ import annotations

import pytest

from bench.micro import launch
from bench.micro.launch import Task

TINY = Task("cpu", layers=1, width=8, length=4)


@pytest.mark.parametrize("name", ["threads", "flowdp", "flowdp, one launches", "setup"])
def test_ranks_in_threads_give_a_rate_again_and_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WARM_S", 0.01)
    with launch.DOORS[launch.VARIANTS[name].how](TINY, launch.VARIANTS[name], 2) as rate:
        assert rate(0.01) > 0
        assert rate(0.01) > 0
