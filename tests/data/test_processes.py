"""Tests of a DataLoader's worker processes: a death is reported at once, and none is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from flowdp.data import processes
from flowdp.data.processes import Processes, begin
from tests.limits import HANG_S


class Numbers(Dataset[Any]):
    """Numbers 0 to 5; the process that reads 3 may die."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.dies and index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def opened(dataset: Any, **options: Any) -> tuple[Any, Processes]:
    iterator = iter(DataLoader(dataset, 1, num_workers=2, **options))
    return iterator, Processes(iterator, dataset)


@pytest.mark.posix
def test_the_wait_ends_when_a_process_dies(monkeypatch):
    iterator, processes = opened(Numbers(dies=True))
    monkeypatch.setattr(type(iterator)._try_get_data, "__defaults__", (HANG_S,))  # torch's own look at them
    begin_s = time.perf_counter()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(iterator)
    assert time.perf_counter() - begin_s < HANG_S / 2
    processes.shut_down()


@pytest.mark.posix
def test_processes_inside_the_dataset_are_ended():
    class Stuck(Numbers):
        inside = multiprocessing.get_context("fork").Semaphore(0)

        def __getitem__(self, index):
            self.inside.release()
            threading.Event().wait()

    iterator, processes = opened(Stuck())
    for _ in iterator._workers:
        assert Stuck.inside.acquire(timeout=HANG_S)
    processes.terminate()
    for process in iterator._workers:
        process.join(HANG_S)
        assert not process.is_alive()
    processes.shut_down()


def test_a_process_begins_deaf_to_ctrl_c_and_with_what_the_user_wants(monkeypatch):
    monkeypatch.setattr(processes, "get_worker_info", lambda: SimpleNamespace(dataset=Numbers()))
    begun: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        begin(begun.append, 3)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == [3]
