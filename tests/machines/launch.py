"""Jobs of several processes: each by itself as on machines of its own, or under torchrun.

A script reports records with `report`; they come through one named pipe, as lines of JSON. Whatever happens,
no process of a job outlives its `with` block.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.limits import HANG_S
from tests.machines.forks import ROOT, Fork, fork

PIPE = "FLOWDP_TEST_PIPE"
RELEASE = "release"
"""Name of the pipe in a job's folder at which its processes wait."""


Record = dict[str, Any]


def report(what: str, **values: Any) -> None:
    """Send a record to the test that has started this job; of less than 4,000 characters, to stay whole."""
    line = json.dumps(
        {
            "what": what,
            "machine": int(os.environ["RANK"]),
            "life": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "pid": os.getpid(),
            "at": time.monotonic(),  # one clock for all processes of a host
            **values,
        }
    ).encode()
    assert len(line) < 4000, f"a record of {len(line)} bytes is not written at once"
    # Where the test was killed nobody reads: an error then, and no process that waits for ever.
    pipe = os.open(os.environ[PIPE], os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.set_blocking(pipe, True)
        os.write(pipe, line + b"\n")
    finally:
        os.close(pipe)


def await_release() -> None:
    """Wait until the test of this process lets it go on, if it is to wait."""
    gate = Path(os.environ["FLOWDP_TEST_FOLDER"], RELEASE)
    if gate.exists():
        gate.open().close()


class Job:
    """Processes of one script.

    Args:
        module: The script, as a module: `tests.machines.exact`.
        arguments: Its arguments.
        processes: How many of it run.
        restarts: Run them under torchrun, which starts all again so often after one has failed. None: start
            each alone, with the variables of torchrun; none is told what becomes of another one.
        environment: Further variables.
        waits: Its processes wait in `await_release` until `release`: a test that does something to a job that
            trains may come late, on a busy machine.

    Attributes:
        records: All records so far, in the order in which they came.
        folder: A folder for files of the job; gone after the `with` block.
        count: Number of processes that were asked for.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        processes: int = 2,
        restarts: int | None = None,
        environment: Mapping[str, str] | None = None,
        waits: bool = False,
    ) -> None:
        self._waits, self._released = waits, -1
        self._module = module
        self._arguments = [str(argument) for argument in arguments]
        self.count, self._restarts = processes, restarts
        self._more = dict(environment or {})
        self.records: list[Record] = []
        self._processes: list[subprocess.Popen[bytes] | Fork] = []
        self._rest = b""

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="flowdp-job-", ignore_cleanup_errors=True)
        self.folder = Path(self._scratch.name)
        os.mkfifo(self.folder / "records")
        if self._waits:
            os.mkfifo(self.folder / RELEASE)
        # Open for writing, too, so that the last writer's end is no end of the file.
        self._pipe = os.open(self.folder / "records", os.O_RDWR | os.O_NONBLOCK)
        self._output = (self.folder / "output").open("ab")
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.output(), file=sys.stderr)
            print(*self.records, sep="\n", file=sys.stderr)
        self._end()

    def _start(self) -> None:
        shared = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            PIPE: str(self.folder / "records"),
        }
        shared |= {"FLOWDP_TEST_FOLDER": str(self.folder), **self._more}
        # Or a life reads the addresses of the one before: pytorch/pytorch#135712.
        shared["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._start_all(shared)

    def _start_all(self, shared: Mapping[str, str]) -> None:
        self._shared = shared
        if self._restarts is not None:
            self._torchrun(
                "--standalone", "--nproc-per-node", str(self.count), "--max-restarts", str(self._restarts)
            )
            return
        for place in self.places():
            self.add(place)

    def places(self) -> list[dict[str, str]]:
        """Variables of torchrun for each process that is started alone."""
        common = {
            "WORLD_SIZE": str(self.count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())
        }  # fmt: skip
        return [{"RANK": str(rank), **common} for rank in range(self.count)]

    def add(self, place: Mapping[str, str]) -> None:
        """Start one more process alone, with variables of its own."""
        environment = {**self._shared, **place}
        self._processes.append(fork(self._module, self._arguments, environment, self.folder / "output"))

    def _torchrun(self, *options: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "-m", self._module, *self._arguments],
            cwd=ROOT,
            env=dict(self._shared),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)

    # ------------------------------------------------------------------ waiting
    def wait_for(
        self, what: str, count: int = 1, where: Callable[[Record], bool] = lambda one: True
    ) -> list[Record]:
        """Wait until `count` records of a kind are there; returns them all.

        Raises:
            AssertionError: The job ended, or hangs, without them.
        """

        def found() -> list[Record]:
            return [one for one in self.records if one["what"] == what and where(one)]

        self._wait(lambda: len(found()) >= count, f"{count} records of {what!r}", until_end=True)
        return found()

    def wait(self) -> list[int]:
        """Wait until all processes have ended; returns their exit statuses, under torchrun its own alone."""
        self._wait(lambda: all(one.poll() is not None for one in self._processes), "the end")
        return [one.poll() or 0 for one in self._processes]

    def ended(self) -> list[Record]:
        """Records of a job that must end well."""
        statuses = self.wait()
        assert not any(statuses), f"exit statuses {statuses}"
        return self.records

    def wait_end(self, machine: int) -> None:
        """Wait until a process that was started alone has ended."""
        self._wait(lambda: self._processes[machine].poll() is not None, f"the end of machine {machine}")

    def wait_until(self, is_done: Callable[[], bool], text: str) -> None:
        """Wait until something is so that no record tells.

        Raises:
            AssertionError: The job ended, or hangs, before.
        """
        self._wait(is_done, text, until_end=True)

    def _wait(self, is_done: Callable[[], bool], text: str, *, until_end: bool = False) -> None:
        deadline = time.monotonic() + HANG_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while True:
                is_over = all(one.poll() is not None for one in self._processes)
                self._read()
                if is_done():
                    return
                assert not (until_end and is_over), f"the job ended without {text}"
                assert time.monotonic() < deadline, f"waited {HANG_S:g} s for {text}"
                selector.select(0.02)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while part := os.read(self._pipe, 1 << 16):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        self.records += [json.loads(line) for line in lines]

    def output(self) -> str:
        """Text that all processes have written so far."""
        self._output.flush()
        return (self.folder / "output").read_text(errors="replace")

    # ------------------------------------------------------------------ ending
    def release(self) -> None:
        """Let all processes pass `await_release`, now and later."""
        if self._released < 0:
            # Without waiting for a reader, and none waits for a writer while it is open.
            self._released = os.open(self.folder / RELEASE, os.O_RDWR)

    def _end(self) -> None:
        with suppress(OSError):
            self._read()
        for process in self._processes:
            for pid in [*below(process.pid), process.pid]:
                _kill(pid)
        for pid in {one["pid"] for one in self.records}:
            if _is_ours(pid, self.folder):
                _kill(pid)
        for process in self._processes:
            process.wait()
        os.close(self._pipe)
        if self._released >= 0:
            os.close(self._released)
        self._output.close()
        self._scratch.cleanup()


def free_port() -> int:
    """Port of this host that nothing listens at.

    It is below those that the system gives to connections: none takes it before the job listens there.
    """
    for port in random.sample(range(15_000, 32_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def below(pid: int) -> list[int]:
    """Children of a process, and theirs. torchrun starts its in sessions of their own."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _is_ours(pid: int, folder: Path) -> bool:
    """Whether a process is still one of this job: its number may be another's by now."""
    import psutil

    try:
        return bool(psutil.Process(pid).environ().get("FLOWDP_TEST_FOLDER") == str(folder))
    except psutil.Error:
        return False


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
