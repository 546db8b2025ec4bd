"""A process that has imported torch and flowdp once, and forks those of jobs, which need not do so again.

An import takes three seconds of a core. Apart from that, a forked process is like one that was started by
itself: it has variables, arguments and an output of its own, its session, and the interpreter's end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("torch._dynamo", "flowdp.api", "tests.machines.launch")


class Fork:
    """A process that was forked, with what a job needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _server().ask(ended=self.pid, options=os.WNOHANG)
        return self.returncode

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = _server().ask(ended=self.pid, options=0)


def fork(module: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Fork:
    """Start a module in a process of its own."""
    given = {"argv": [module, *arguments], "environment": dict(environment), "output": str(output)}
    return Fork(_server().ask(**given))


class _Server:
    """The process that forks, which ends with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._end)

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def _end(self) -> None:
        self._process.communicate()


_server = cache(_Server)


# ---------------------------------------------------------------- in the process that forks
def main() -> None:
    """Fork processes, and tell the status of one that has ended, as lines of stdin ask for it."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # or a collection would write to all of their memory, and so copy it
    for line in sys.stdin:
        order = json.loads(line)
        if "ended" in order:
            pid, status = os.waitpid(order["ended"], order["options"])
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            _become(order)
            return
        print(json.dumps(answer), flush=True)


def _become(order: Mapping[str, Any]) -> None:
    os.setsid()
    files = os.open(os.devnull, os.O_RDONLY), os.open(order["output"], os.O_WRONLY | os.O_APPEND)
    for number, file in zip((0, 1, 2), (files[0], files[1], files[1]), strict=True):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(order["environment"])
    module, *_ = sys.argv = order["argv"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
