from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flowdp import Ddp, Trainer, setup
from flowdp.device import cores
from flowdp.device.cores import (
    LentThreads,
    barrier_ms,
    cpu_quota,
    pause_openmp,
    pool_sizes,
    set_own_threads,
    thread_budget,
    threads_per_rank,
    usable_cores,
)
from flowdp.device.process_tuning import tuned_process
from flowdp.options import Policy, ProcessTuning
from tests.device.fresh_thread import in_thread
from tests.limits import HANG_S

pytestmark = pytest.mark.usefixtures("three_threads")
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def machine(monkeypatch: pytest.MonkeyPatch, count: int, quota: float | None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)


class TestBudget:
    @pytest.mark.parametrize(
        ("count", "quota", "budget"),
        [(64, None, 3), (2, None, 2), (64, 2.0, 2), (64, 2.5, 2), (64, 0.5, 1), (1, 8.0, 1)],
    )
    def test_the_users_choice_within_mask_and_quota(
        self, count: int, quota: float | None, budget: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine(monkeypatch, count, quota)
        assert thread_budget() == budget

    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs an affinity mask")
    def test_cores_follow_the_mask(self) -> None:
        def pinned() -> int:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # only of this thread
            return usable_cores()

        assert 1 <= usable_cores() <= (os.cpu_count() or 1)
        assert in_thread(pinned) == 1

    @pytest.mark.parametrize(
        ("devices", "budget", "threads"),
        [
            ([CPU, CPU], 2, [1, 1]),
            ([CPU] * 3, 16, [5, 5, 5]),
            ([CPU] * 8, 2, [1] * 8),
            ([CPU], 8, [8]),
            ([CARD, CPU, CARD], 8, [1, 8, 1]),
            ([CARD, CARD], 8, [1, 1]),
        ],
    )
    def test_cpu_ranks_share_it(self, devices: list[torch.device], budget: int, threads: list[int]) -> None:
        assert threads_per_rank(devices, budget) == threads

    @pytest.mark.parametrize(
        ("wait_ms", "adapts", "sizes", "told"),
        [
            (0.02, True, [2, 1], None),
            (5.0, True, [1, 1], "computes with one thread"),
            (5.0, False, [2, 1], "set_num_threads(1)"),
        ],
    )
    def test_a_crowd_leaves_one_thread_where_bits_are_free(
        self,
        wait_ms: float,
        adapts: bool,
        sizes: list[int],
        told: str | None,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        machine(monkeypatch, 2, None)
        monkeypatch.setattr(cores, "barrier_ms", lambda count: wait_ms * (count == 2))
        assert pool_sizes([CPU, CARD], ProcessTuning(), adapts=adapts) == sizes
        assert [told in record.getMessage() for record in caplog.records if told] == [True] * bool(told)
        caplog.clear()
        assert pool_sizes([CPU, CARD], ProcessTuning(), adapts=adapts, tells=False) == sizes
        assert not [record for record in caplog.records if record.levelno >= logging.INFO]
        assert pool_sizes([CPU, CPU], ProcessTuning(), adapts=adapts) == [1, 1]
        assert pool_sizes([CPU, CARD], ProcessTuning(openmp=False), adapts=adapts) == [3, 3]

    @pytest.mark.usefixtures("deterministic")
    def test_deterministic_algorithms_keep_the_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cores, "barrier_ms", lambda _: 5.0)
        machine(monkeypatch, 2, None)
        assert pool_sizes([CPU], ProcessTuning(), adapts=True) == [2]


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("50000 100000\n", 0.5),
        ("max 100000\n", None),
        ("nonsense\n", None),
        ("100000 0\n", None),
        (None, None),
    ],
)
def test_quota(text: str | None, quota: float | None, tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    if text is not None:
        limit.write_text(text, encoding="utf-8")
    assert cpu_quota(limit) == quota


# The purpose of the rules: the number that torch sees inside the user's code.
enough = pytest.mark.skipif(usable_cores() < 3, reason="with so few cores the number is not the user's")


class Model(nn.Linear):
    """Records the number of threads in each forward; replicas share the list."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.seen: list[int] = []

    def __deepcopy__(self, memo: dict[int, object]) -> Model:
        other = Model()
        other.seen = self.seen
        return other

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.get_num_threads())
        return super().forward(x)


def train(devices: int, policy: Policy = "sync") -> list[int]:
    model = Model()
    Trainer(
        model,
        lambda params: torch.optim.SGD(params, 0.1),
        lambda module, batch: module(batch).square().mean(),
        dataset=torch.ones(32, 2),
        per_device_batch_size=4,
        epochs=1,
        devices=devices,
        policy=policy,
    ).fit()
    return model.seen


def call(devices: int) -> list[int]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dp = setup(model, optimizer, devices=devices)
    for _ in range(4):
        dp(torch.ones(16, 2)).sum().backward()
        optimizer.step()
    dp.close()
    return model.seen


def by_hand(devices: int) -> list[int]:
    models = [Model() for _ in range(devices)]
    with Ddp.wrap(models) as ddp:
        ddp.parallel(lambda _, model: model(torch.ones(16, 2)))
    return [seen for model in models for seen in model.seen]


@enough
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("door", [train, call, by_hand])
@pytest.mark.parametrize(("choice", "share"), [(1, 1), (3, 1), (usable_cores(), usable_cores() // 2)])
def test_workers_share_the_users_number(door: Callable[[int], list[int]], choice: int, share: int) -> None:
    torch.set_num_threads(choice)
    assert set(door(2)) == {share}
    assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == (choice, choice)


@enough
def test_a_loop_computes_with_the_threads_of_a_rank_while_batches_are_cut() -> None:
    torch.set_num_threads(3)
    seen = []
    for option in (True, False):
        dp = setup(Model(), devices=[CPU] * 2, partition_ratios=(1, 1), tune_process=option, progress=False)
        seen += [torch.get_num_threads(), thread_budget(), in_thread(torch.get_num_threads)]
        dp.close()
        seen.append(torch.get_num_threads())
    assert seen == [1, 3, 3, 3] + [3] * 4


@enough
def test_threads_are_lent_to_several_loops_by_the_thread_that_has_them() -> None:
    torch.set_num_threads(3)
    one, other = LentThreads([CPU] * 2, ProcessTuning()), LentThreads([CPU] * 3, ProcessTuning())
    seen = []
    for do in (one.lend, other.lend, one.take_back, one.take_back, other.take_back, other.take_back):
        do()
        seen.append(torch.get_num_threads())
    assert seen == [1, 1, 1, 1, 3, 3]
    one.lend()
    in_thread(lambda: one.take_back() or 0)  # of another thread: it has lent nothing
    assert torch.get_num_threads() == 1
    one.take_back()
    assert torch.get_num_threads() == 3
    one.lend()
    torch.set_num_threads(2)
    one.take_back()
    assert torch.get_num_threads() == 2  # the user's later choice
    torch.set_num_threads(3)
    LentThreads([CARD] * 2, ProcessTuning()).lend()  # no rank computes on the CPU
    assert torch.get_num_threads() == 3


def test_omp_num_threads_is_the_users_number() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "from flowdp.device.cores import *; print(thread_budget())"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert child.stdout == "1\n", child.stderr


# ---------------------------------------------------------------- pools
NONE = ProcessTuning(openmp=False, malloc=False, switch_interval=False)
POOL = ProcessTuning(malloc=False, switch_interval=False)

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")


def build_pool() -> None:
    torch.set_num_threads(3)
    torch.ones(1 << 20).add_(1)


class New:
    """Threads of this process that did not exist before; others may still be ending."""

    def __init__(self) -> None:
        self.before = set(os.listdir("/proc/self/task"))

    def __call__(self) -> int:
        return len(set(os.listdir("/proc/self/task")) - self.before)

    def become(self, count: int) -> bool:
        end_s = time.monotonic() + HANG_S
        while self() != count and time.monotonic() < end_s:
            pass
        return self() == count


class TestOwnThreads:
    def test_no_other_thread_has_the_number(self) -> None:
        def work() -> tuple[int, int, object]:
            set_own_threads(1)
            return torch.get_num_threads(), threading.active_count(), in_thread(torch.get_num_threads)

        count = threading.active_count()
        assert in_thread(work) == (1, count + 1, 3)
        assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == (3, 3)

    def test_several_at_once(self) -> None:
        start = threading.Barrier(8)
        seen: list[tuple[int, int]] = []

        def work(count: int) -> None:
            start.wait(HANG_S)
            set_own_threads(count)
            seen.append((count, torch.get_num_threads()))

        threads = [threading.Thread(target=work, args=(1 + place % 4,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        assert len(seen) == 8
        assert all(wanted == had for wanted, had in seen)
        assert in_thread(torch.get_num_threads) == 3

    def test_where_no_thread_can_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        def work() -> int:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                set_own_threads(2)
            return torch.get_num_threads()

        assert in_thread(work) == 2


@linux
class TestPools:
    @pytest.mark.parametrize("count", [2, 3])
    def test_a_look_at_the_barriers_leaves_no_pool(self, count: int) -> None:
        def work() -> tuple[bool, bool, int]:
            new = New()
            took_ms = barrier_ms(count)
            return took_ms > 0, new.become(0), torch.get_num_threads()

        assert in_thread(work) == (True, True, 3)

    def test_the_pool_ends_and_comes_back(self) -> None:
        def work() -> tuple[bool, bool]:
            new = New()
            build_pool()
            assert new() == 2
            paused = pause_openmp() and new.become(0)
            build_pool()
            return paused, new() == 2

        assert in_thread(work) == (True, True)

    def test_every_start_gives_the_pool_back(self) -> None:
        def work() -> list[bool]:
            ended = []
            for tuning in (POOL, POOL):
                new = New()
                build_pool()
                assert new() == 2
                with tuned_process(tuning):
                    ended.append(new.become(0))
            new = New()
            build_pool()
            with tuned_process(NONE):
                ended.append(new() == 0)
            return ended

        assert in_thread(work) == [True, True, False]

    def test_a_runtime_without_the_symbol_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cores, "_openmp_runtime", lambda: None)
        assert pause_openmp() is False
        with tuned_process(POOL):
            pass
