from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from flowdp.device import openmp
from flowdp.device.openmp import Barriers, barriers, pause_openmp, running_threads, set_own_threads
from flowdp.device.process import ProcessTuning, tuned_process
from tests.device.fresh_thread import in_thread

pytestmark = pytest.mark.usefixtures("three_threads")
NONE = ProcessTuning(openmp=False, malloc=False, switch_interval=False)
POOL = ProcessTuning(malloc=False, switch_interval=False)
CORES = os.cpu_count() or 1

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that does not tell how many threads want to run: nothing looks."""
    monkeypatch.setattr(openmp, "running_threads", lambda: None)


def build_pool() -> None:
    torch.set_num_threads(3)
    torch.ones(1 << 20).add_(1)


class New:
    """Threads of this process that were not there before; others may still be on their way out."""

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
            start.wait(30)
            set_own_threads(count)
            seen.append((count, torch.get_num_threads()))

        threads = [threading.Thread(target=work, args=(1 + place % 4,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
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
@pytest.mark.usefixtures("unknown")
class TestPools:
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


class Machine:
    """Says how many threads want to run."""

    def __init__(self, running: int) -> None:
        self.running = running

    def __call__(self) -> int:
        return self.running


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(CORES + 1)
    monkeypatch.setattr(openmp, "running_threads", made)
    monkeypatch.setattr(openmp, "LOOK_S", 0.001)
    return made


@pytest.fixture
def own(machine: Machine) -> Iterator[Barriers]:
    made = Barriers()
    yield made
    while made._holders:
        made.release()


@linux
class TestBarriers:
    def test_one_more_pool_counts_while_there_is_a_crowd(self, machine: Machine, own: Barriers) -> None:
        new = New()
        own.hold()
        assert new() == 1 + CORES  # by the first look, before anything computes
        machine.running = CORES
        assert new.become(1)
        machine.running = CORES + 1
        assert new.become(1 + CORES)
        own.release()
        assert new.become(0)
        assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == (3, 3)

    def test_the_last_of_several_runs_ends_it(self, own: Barriers) -> None:
        new = New()
        own.hold()
        own.hold()
        own.release()
        assert new() == 1 + CORES
        in_thread(own.release)  # a run may end in another thread
        assert new.become(0)
        own.hold()
        assert new() == 1 + CORES
        own.release()
        assert new.become(0)

    def test_a_run_that_is_collected_while_another_one_starts(
        self, machine: Machine, own: Barriers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The collector may run anywhere, and what it collects lets go in the thread that it runs in."""
        new = New()
        own.hold()
        collected: list[int] = []

        def look() -> int:
            if not collected:
                collected.append(1)
                own.release()
            return machine.running

        monkeypatch.setattr(openmp, "running_threads", look)
        own.hold()
        assert own._holders == 1
        assert new() == 1 + CORES
        with own._lock:
            own.release()
        assert new.become(0)

    def test_a_run_holds_it_if_its_pools_have_barriers(self, machine: Machine) -> None:
        def held(tuning: ProcessTuning) -> bool:
            with tuned_process(tuning):
                return barriers._holders == 1

        assert held(POOL)
        assert not held(NONE)
        torch.set_num_threads(1)
        assert not held(POOL)
        assert barriers._holders == 0

    def test_where_no_thread_can_start(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        own, new = Barriers(), New()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            own.hold()
        own.release()
        assert new() == 0

    def test_a_system_that_does_not_tell(self, unknown: None) -> None:
        own, new = Barriers(), New()
        own.hold()
        assert new() == 0
        own.release()

    def test_this_thread_wants_to_run(self) -> None:
        running = running_threads()
        assert running is not None
        assert running >= 1
