"""Agents of torchrun on one host, as on machines of their own, which come and go."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping

from tests.machines.launch import Job, below, free_port

QUICK = "last_call_timeout=2,keep_alive_interval=1"
"""Settings of the rendezvous: seconds until it begins without others, and until a dead agent is forgotten."""


class Agents(Job):
    """A job of one or two machines, each with an agent of its own; the first one keeps the rendezvous.

    Args:
        module: The script, as a module.
        arguments: Its arguments.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        super().__init__(module, *arguments)
        self._port = free_port()

    def _start_all(self, shared: Mapping[str, str]) -> None:
        self._shared = shared
        self.add_agent()

    def add_agent(self) -> None:
        """Start another agent."""
        if self._processes:  # or this one keeps the rendezvous
            self._wait(self._is_open, "the rendezvous")
        options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5"]
        options += ["--monitor-interval", "0.2", "--rdzv-id", "job", "--rdzv-backend", "c10d"]
        options += ["--rdzv-endpoint", f"localhost:{self._port}", "--rdzv-conf", QUICK]
        self._torchrun(*options)

    def _is_open(self) -> bool:
        with socket.socket() as asking:
            return asking.connect_ex(("localhost", self._port)) == 0

    def kill(self, index: int) -> None:
        """Kill an agent and all that it has started, at once, as a machine that loses its power."""
        agent = self._processes.pop(index)
        for pid in (agent.pid, *below(agent.pid)):
            os.kill(pid, signal.SIGKILL)
        agent.wait()
