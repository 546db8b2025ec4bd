"""The number of threads that may compute: the user's choice, within the limits of this process.

The user's choice is `torch.get_num_threads()`, which follows OMP_NUM_THREADS and `torch.set_num_threads`, and
is the number of physical cores without either. The machine grants the cores of the affinity mask, and no more
than the quota of the control groups that the process is in (`docker run --cpus`, Kubernetes limits, systemd's
CPUQuota).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import torch

from flowdp.device.openmp import barrier_ms, set_own_threads
from flowdp.options import ProcessTuning
from flowdp.policy.pool_size import PoolSize

__all__ = ["LentThreads", "cpu_quota", "open_pools", "thread_budget", "threads_per_rank", "usable_cores"]

log = logging.getLogger("flowdp")

CROWDED_MS = 1.0
"""Limit of a small parallel operation: a longer one waits for threads that have no core."""


def open_pools(
    devices: Sequence[torch.device], tuning: ProcessTuning, *, adapts: bool = False
) -> list[PoolSize]:
    """Choosers of the size of each rank's OpenMP pool.

    The size decides the order of sums, and so the bits of a result. Where it cannot follow the speed, and the
    machine is too busy for it, the log says so.

    Args:
        devices: One per rank.
        tuning: Settings of the run. Without `openmp` each rank has as many threads as the caller.
        adapts: Whether nothing is promised about bits, so that sizes may follow measured speed. With
            `torch.use_deterministic_algorithms` they never do.

    Returns:
        One per rank; without a choice the size is the rank's share of the budget. Shape (world_size,).

    Threads:
        The user's.
    """
    if not tuning.openmp:
        return [PoolSize(torch.get_num_threads(), adapts=False) for _ in devices]
    adapts = adapts and not torch.are_deterministic_algorithms_enabled()
    budget = thread_budget()
    shares = threads_per_rank(devices, budget)
    if not adapts and max(shares) > 1 and (wait_ms := barrier_ms(budget)) > CROWDED_MS:
        log.warning(
            "other programs want the cores: %d threads take %.0f ms for a parallel operation of 0.02 ms, and "
            "a step has hundreds. So that results repeat, each CPU worker of this run keeps its %d threads; "
            "with torch.set_num_threads(1) before the run none waits for another",
            budget,
            wait_ms,
            max(shares),
        )
    return [PoolSize(share, adapts=adapts) for share in shares]


def thread_budget() -> int:
    """Threads that may compute at once, those of all CPU workers together; at least 1.

    Threads:
        The user's: the number is that of the calling thread, with those that it has lent.
    """
    return max(1, min(_lent.own or torch.get_num_threads(), usable_cores()))


def threads_per_rank(devices: Sequence[torch.device], budget: int) -> list[int]:
    """Size of each rank's OpenMP pool.

    CPU ranks share the budget. More threads in all pools together than cores makes libgomp sleep and wake at
    every parallel region. The thread of any other rank only launches kernels.

    Returns:
        At least 1 each. Shape (world_size,).
    """
    workers = sum(device.type == "cpu" for device in devices)
    return [max(1, budget // workers) if device.type == "cpu" else 1 for device in devices]


class LentThreads:
    """The threads of a loop's own thread, which are its CPU ranks' while these compute the batches.

    Behind each operation of its own, a loss or the optimizer's step, the threads of its pool spin for
    milliseconds, on the cores that the ranks want next. So it computes with as many threads as a rank.

    Args:
        devices: One per rank.
        tuning: Settings of the loop; without `openmp` nothing is lent.

    Threads: any; what one has lent is its own to take back.
    """

    def __init__(self, devices: Sequence[torch.device], tuning: ProcessTuning) -> None:
        self._count = threads_per_rank(devices, thread_budget())[0]
        self._may_lend = tuning.openmp and any(device.type == "cpu" for device in devices)

    def lend(self) -> None:
        """Lend those of the calling thread."""
        if self._may_lend:
            _lent.own = _lent.own or torch.get_num_threads()
            _lent.lenders.add(self)
            set_own_threads(min(one._count for one in _lent.lenders))

    def take_back(self) -> None:
        """Take them back, unless the user has set another number; other loops here may still lend them."""
        if self not in _lent.lenders:
            return
        is_set = torch.get_num_threads() != min(one._count for one in _lent.lenders)
        _lent.lenders.remove(self)
        if not is_set:
            set_own_threads(min((one._count for one in _lent.lenders), default=_lent.own))
        if not _lent.lenders:
            _lent.own = 0


class _Lent(threading.local):
    """The number of the calling thread's own threads, 0 where it lends none, and the loops that have them."""

    def __init__(self) -> None:
        self.own = 0
        # One that another thread collects cannot take anything back here.
        self.lenders: weakref.WeakSet[LentThreads] = weakref.WeakSet()


_lent = _Lent()


def usable_cores() -> int:
    """Cores that the calling thread may run on, within the quota of its control groups; at least 1."""
    has_mask = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
    quota = cpu_quota()
    # Half a core more is no core: a pool that is stopped in the middle of a period waits for its barrier.
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control groups of this process may use.

    Args:
        root: Where `proc` and the mounted control groups lie.

    Returns:
        The smallest quota from this process's group upwards; None where no group has one.

    Source:
        cgroups(7), proc_pid_mountinfo(5); Linux, Documentation/admin-guide/cgroup-v2.rst, "CPU Interface
        Files", and Documentation/scheduler/sched-bwc.rst for version 1.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8")
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8")
        own = list(_cpu_groups(groups, mounts))
    except (OSError, ValueError):  # no Linux, or a sandbox with its own idea of these files
        return None
    quotas = [
        quota
        for is_v2, mount, group in own
        for folder in _upwards(root / mount.lstrip("/"), group)
        if (quota := _quota(folder, is_v2=is_v2)) is not None
    ]
    return min(quotas, default=None)


def _cpu_groups(groups: str, mounts: str) -> Iterator[tuple[bool, str, str]]:
    """Hierarchies that may limit CPU time: (version 2, mount point, group as seen from there)."""
    own: dict[bool, PurePosixPath] = {}
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            own[number == "0"] = PurePosixPath(path)
    for line in mounts.splitlines():
        about, _, kind = line.partition(" - ")
        fields, (name, _, options) = about.split(" "), kind.split(" ", 2)
        is_v2 = name == "cgroup2"
        if is_v2 in own and (is_v2 or (name == "cgroup" and "cpu" in options.split(","))):
            inside, point = fields[3], fields[4].replace("\\040", " ")
            group = own[is_v2]
            # In a container the path may be the host's, and only the part below the mount is visible.
            seen = group.relative_to(inside if group.is_relative_to(inside) else "/")
            yield is_v2, point, str(seen)


def _upwards(mount: Path, group: str) -> list[Path]:
    """The folder of a group and of those that it is in, up to the mount; the mount alone if it is hidden."""
    folder = mount / group
    if ".." in PurePosixPath(group).parts or not folder.is_dir():
        return [mount]
    return [folder, *folder.parents[: len(PurePosixPath(group).parts)]]


def _quota(folder: Path, *, is_v2: bool) -> float | None:
    """Cores' worth of a group; None where it has no limit of its own."""
    try:
        if is_v2:
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        cores = float(quota) / float(period)  # "max" is no number
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None
