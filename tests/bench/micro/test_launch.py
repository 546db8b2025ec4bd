from __future__ import annotations

import pytest

from bench.micro import launch
from bench.micro.launch import PROCESSES, Task, compared

TINY = Task("cpu", layers=1, width=8, length=4)
SEEN = {
    (PROCESSES, 1): [100.0, 120.0],
    (PROCESSES, 2): [200.0, 200.0],
    ("flowdp", 1): [50.0, 60.0],
    ("flowdp", 2): [100.0, 150.0],
}


def test_a_case_is_compared_with_its_own_one_rank_and_with_as_many_processes() -> None:
    ratios = {(one.label, one.names): one.ratio for one in compared(SEEN)}
    assert ratios == {
        ("processes, 2 ranks", ("2 ranks", "1 rank")): pytest.approx((2.0 + 200 / 120) / 2),
        ("flowdp, 1 rank", ("flowdp", "processes")): 0.5,
        ("flowdp, 2 ranks", ("2 ranks", "1 rank")): pytest.approx(2.25),
        ("flowdp, 2 ranks", ("flowdp", "processes")): pytest.approx(0.625),
    }


@pytest.mark.parametrize("name", ["threads", "flowdp", "flowdp, one launches", "setup"])
def test_ranks_in_threads_give_a_rate_again_and_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WARM_S", 0.01)
    with launch.DOORS[launch.VARIANTS[name].how](TINY, launch.VARIANTS[name], 2) as rate:
        assert rate(0.01) > 0
        assert rate(0.01) > 0
