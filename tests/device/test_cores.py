from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flowdp import Ddp, Trainer, setup
from flowdp.device import cores
from flowdp.device.cores import (
    LentThreads,
    cpu_quota,
    open_pools,
    thread_budget,
    threads_per_rank,
    usable_cores,
)
from flowdp.options import Policy, ProcessTuning
from flowdp.policy import pool_size
from tests.device.fresh_thread import in_thread

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

    def test_what_a_pool_may_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def pools(*, openmp: bool = True, adapts: bool = True) -> list[tuple[int, bool]]:
            made = open_pools([CPU, CARD], ProcessTuning(openmp=openmp), adapts=adapts)
            return [(pool.size, pool.is_fixed) for pool in made]

        machine(monkeypatch, 2, None)
        assert pools() == [(1, False), (1, True)]
        assert pools(adapts=False) == [(2, True), (1, True)]
        assert pools(openmp=False) == [(3, True), (3, True)]

    @pytest.mark.parametrize(
        ("wait_ms", "devices", "options", "is_told"),
        [
            (5.0, [CPU, CARD], {}, True),
            (0.02, [CPU, CARD], {}, False),
            (5.0, [CPU, CARD], {"adapts": True}, False),
            (5.0, [CPU, CPU], {}, False),
            (5.0, [CARD], {}, False),
        ],
    )
    def test_a_crowd_is_told_where_the_size_must_stay(
        self,
        wait_ms: float,
        devices: list[torch.device],
        options: dict[str, bool],
        is_told: bool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        machine(monkeypatch, 2, None)
        monkeypatch.setattr(cores, "barrier_ms", lambda count: wait_ms * (count == 2))
        open_pools(devices, ProcessTuning(), **options)
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == is_told
        assert all("2 threads take 5 ms" in line and "set_num_threads(1)" in line for line in told)

    @pytest.mark.usefixtures("deterministic")
    def test_deterministic_algorithms_leave_no_choice(self) -> None:
        assert open_pools([CPU], ProcessTuning(), adapts=True)[0].is_fixed


# Lines as written by the kernel, including mounts that are no control groups.
V1_HOST = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
36 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:15 - cgroup cgroup rw,cpu,cpuacct
37 31 0:33 / /sys/fs/cgroup/cpuset rw,nosuid shared:16 - cgroup cgroup rw,cpuset
"""
V1_CONTAINER = """\
2175 2173 0:32 /docker/0f5d /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:11 - cgroup cgroup rw,cpu,cpuacct
2177 2173 0:33 /docker/0f5d /sys/fs/cgroup/cpuset ro,nosuid master:12 - cgroup cgroup rw,cpuset
"""
V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_HIDDEN = "35 24 0:30 /../.. /sys/fs/cgroup ro,relatime - cgroup2 cgroup rw\n"
HYBRID = V1_HOST + "38 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
SPACE = "35 24 0:30 / /sys/fs/control\\040groups rw,relatime - cgroup2 cgroup2 rw\n"
OWN_V1 = "12:cpuset:/docker/0f5d\n4:cpu,cpuacct:/docker/0f5d\n1:name=systemd:/docker/0f5d\n"
SLICE = "0::/user.slice/user-1000.slice/session-3.scope\n"
CPU_V1, CPU_V2 = "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup"


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("own", "mounts", "files", "quota"),
    [
        pytest.param(OWN_V1, V1_HOST, v1(f"{CPU_V1}/docker/0f5d", 250_000), 2.5, id="v1"),
        pytest.param(OWN_V1, V1_HOST, v1(f"{CPU_V1}/docker/0f5d", -1), None, id="v1 without a limit"),
        pytest.param(OWN_V1, V1_CONTAINER, v1(CPU_V1, 200_000), 2.0, id="v1 in its container"),
        pytest.param(
            OWN_V1,
            V1_HOST,
            {**v1(f"{CPU_V1}/docker/0f5d", 800_000), **v1(f"{CPU_V1}/docker", 75_000, 50_000)},
            1.5,
            id="v1, a group above has less",
        ),
        pytest.param("0::/\n", V2, {f"{CPU_V2}/cpu.max": "50000 100000\n"}, 0.5, id="v2 in its container"),
        pytest.param("0::/\n", V2, {f"{CPU_V2}/cpu.max": "max 100000\n"}, None, id="v2 without a limit"),
        pytest.param("0::/\n", V2, {}, None, id="v2, the root group"),
        pytest.param(
            SLICE,
            V2,
            {
                f"{CPU_V2}/user.slice/user-1000.slice/session-3.scope/cpu.max": "max 100000\n",
                f"{CPU_V2}/user.slice/user-1000.slice/cpu.max": "300000 100000\n",
                f"{CPU_V2}/user.slice/cpu.max": "400000 100000\n",
            },
            3.0,
            id="v2, groups above have limits",
        ),
        pytest.param(
            "0::/../../pod1\n",
            V2_HIDDEN,
            {f"{CPU_V2}/cpu.max": "200000 100000\n"},
            2.0,
            id="v2, hidden",
        ),
        pytest.param(
            SLICE, V2, {f"{CPU_V2}/cpu.max": "200000 100000\n"}, 2.0, id="v2, a group of the host's"
        ),
        pytest.param(
            OWN_V1 + "0::/docker/0f5d\n",
            HYBRID,
            v1(f"{CPU_V1}/docker/0f5d", 100_000),
            1.0,
            id="both",
        ),
        pytest.param(
            "0::/a:b\n", SPACE, {"sys/fs/control groups/a:b/cpu.max": "100000 100000\n"}, 1.0, id="odd names"
        ),
        pytest.param("0::/\n", V2, {f"{CPU_V2}/cpu.max": "nonsense\n"}, None, id="nonsense"),
        pytest.param("0::/\n", V2, {f"{CPU_V2}/cpu.max": "100000 0\n"}, None, id="a period of 0"),
        pytest.param("\n", "a line of another system\n", {}, None, id="another system"),
    ],
)
def test_quota(own: str, mounts: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, content in {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert cpu_quota(tmp_path) == quota


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


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


@pytest.fixture
def climbing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that finds more threads faster each time."""
    for name, value in {"BLOCK_MS": 0.0, "BLOCKS": 1, "GAIN": math.inf, "SLOW": math.inf}.items():
        monkeypatch.setattr(pool_size, name, value)


@enough
@pytest.mark.usefixtures("climbing")
class TestChoice:
    @pytest.mark.parametrize(
        ("policy", "sizes"),
        [("cadence", [1, 2, 3]), ("async", [1, 2, 3]), ("sync", [3, 3, 3]), ("exact", [3, 3, 3])],
    )
    def test_a_worker_follows_it_where_no_bits_are_promised(self, policy: Policy, sizes: list[int]) -> None:
        seen = train(1, policy)
        assert seen[:3] == sizes
        assert set(seen[3:]) == {3}
        assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == (3, 3)

    def test_nothing_is_chosen_within_one_thread(self) -> None:
        torch.set_num_threads(1)
        assert set(train(1, "cadence")) == {1}

    def test_a_replica_of_setup_follows_it(self) -> None:
        torch.set_num_threads(usable_cores())
        seen = call(2)
        most = min(8, usable_cores() // 2)  # doubled in each of four calls
        assert (seen[:2], seen[-2:]) == ([1, 1], [most, most])

    @pytest.mark.usefixtures("deterministic")
    def test_deterministic_algorithms_keep_one_size(self) -> None:
        assert set(train(1, "cadence")) == {3}


def test_omp_num_threads_is_the_users_number() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "from flowdp.device.cores import *; print(thread_budget())"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.stdout == "1\n", child.stderr
