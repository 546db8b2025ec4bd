"""A terminal for tests and pictures: a pane of tmux, on a server of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.limits import HANG_S

__all__ = ["Terminal", "open_terminal"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Terminal:
    """A pane that runs a script.

    Attributes:
        socket: Socket of its server.
    """

    socket: Path

    def command(self, *words: str) -> str:
        """Run a command of tmux; returns its output."""
        done = subprocess.run(
            ["tmux", "-f", os.devnull, "-S", str(self.socket), *words],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        return done.stdout

    def wait_for_end(self) -> None:
        """Wait until the script has ended."""
        self.command("wait-for", "end")

    def wait_for(self, text: str) -> str:
        """Wait until the screen has a text; returns the screen."""
        deadline = time.monotonic() + HANG_S
        while text not in (screen := self.screen()):
            assert time.monotonic() < deadline, screen
        return screen

    def signal(self, channel: str) -> None:
        """Signal a channel that the script waits for."""
        self.command("wait-for", "-S", channel)

    def screen(self) -> str:
        """Text of the screen."""
        return self.command("capture-pane", "-p")


@contextmanager
def open_terminal(script: Path, columns: int = 100, rows: int = 40) -> Iterator[Terminal]:
    """Run a script in a terminal, and end its server."""
    terminal = Terminal(script.parent / "tmux")
    path = f"PYTHONPATH={shlex.quote(str(ROOT))}"
    run = f"{path} {shlex.quote(sys.executable)} {shlex.quote(str(script))}; tmux wait-for -S end; cat"
    terminal.command("new-session", "-d", "-x", str(columns), "-y", str(rows), run)
    try:
        yield terminal
    finally:
        terminal.command("kill-server")
