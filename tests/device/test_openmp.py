from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch

from flowdp.device import openmp
from flowdp.device.openmp import barrier_ms, pause_openmp, set_own_threads
from flowdp.device.process_tuning import tuned_process
from flowdp.options import ProcessTuning
from tests.device.fresh_thread import in_thread

pytestmark = pytest.mark.usefixtures("three_threads")
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
        end_s = time.monotonic() + 20
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
            start.wait(60)
            set_own_threads(count)
            seen.append((count, torch.get_num_threads()))

        threads = [threading.Thread(target=work, args=(1 + place % 4,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
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
        monkeypatch.setattr(openmp, "_openmp_runtime", lambda: None)
        assert pause_openmp() is False
        with tuned_process(POOL):
            pass
