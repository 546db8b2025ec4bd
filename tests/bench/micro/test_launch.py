from __future__ import annotations

from multiprocessing import Pipe

import pytest

from bench.micro import launch
from bench.micro.launch import PROCESSES, Side, Task, Variant, compared, lines

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


def test_the_table_leaves_a_case_out_that_was_not_measured() -> None:
    del (seen := dict(SEEN))[PROCESSES, 2]
    assert lines(seen)[2:] == [
        "| processes | 110 (-, -) |  |",
        "| flowdp | 55 (-, 0.50) | 125 (2.25, -) |",
    ]


def test_a_remedy_that_this_flowdp_does_not_have_is_named() -> None:
    assert Variant("flowdp", options={"magic": 1}).missing == "this flowdp has no Trainer(magic=)"
    assert Variant("flowdp", options={"policy": "sync"}).missing == ""
    assert Variant("setup", options={"policy": "sync"}).missing == "this flowdp has no setup(policy=)"


@pytest.mark.parametrize("name", ["threads", "flowdp", "flowdp, one launches", "setup"])
def test_ranks_in_threads_give_a_rate_again_and_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WARM_S", 0.01)
    with launch.DOORS[launch.VARIANTS[name].how](TINY, launch.VARIANTS[name], 2) as rate:
        assert rate(0.01) > 0
        assert rate(0.01) > 0


def test_a_variant_that_fails_says_why() -> None:
    here, there = Pipe()
    with here, there:
        launch.serve(there, TINY, Variant("flowdp", options={"policy": "none"}), 1)
        with pytest.raises(RuntimeError, match="OptionError: policy"):
            Side([here]).answers()


def test_the_parts_of_a_step_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WARM_S", 0.02)
    parts = launch.parts_ms(TINY, 2, 0.05)
    assert len(parts) == len(launch.PARTS)
    assert all(part > 0 for part in parts)
