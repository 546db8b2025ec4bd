"""Start a training script again when its process dies.

::

    python -m flowdp.supervise train.py --epochs 90
    python -m flowdp.supervise --restarts 100 --backoff 5 -m project.train

A hard fault of a device kills the process, and no thread in it lives to do anything about that. So the script
runs in a child process, and when that ends by a signal, or with another exit code than 0, it is started anew:
with `Trainer(checkpoint=..., resume=True)` it goes on from its newest checkpoint. `FLOWDP_RESTARTS` in its
environment says how often it has been.

Between two starts there is a pause, each twice as long as the one before. A child that has lived for ten of
the longest pauses has got somewhere: after it, pauses and restarts are counted anew. A signal that asks for
an end (SIGINT, SIGTERM, SIGHUP) is passed on, and the child is not started again. The exit code is the last
child's, 128 + n where signal n ended it. It has a process group of its own, so that a Ctrl-C reaches it once,
and no standard input.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

__all__ = ["main"]

LONG = 10  # of the longest pauses: a child that has lived for so long has got somewhere
ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script until it ends well, is told to end, or has been restarted too often; its exit code.

    Args:
        argv: The arguments of the command line; None: those of this process.

    Threads:
        The main thread of a process that does nothing else: it takes the signals over, for good.
    """
    options, script = _parse(argv)
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), *script]  # type: ignore[attr-defined]
    name, signals = script[1] if options.module else script[0], _Signals()
    restarts, in_a_row, pause_s = 0, 0, options.backoff
    while True:
        began_s, environment = monotonic(), {**os.environ, "FLOWDP_RESTARTS": str(restarts)}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, process_group=0)
        is_asked = False
        while child.poll() is None:
            for number in signals.wait(None):
                _say(f"{number.name} is passed on to {name}, which is not started again")
                is_asked = True
                child.send_signal(number)
        lived_s, died_of = monotonic() - began_s, max(0, -child.returncode)
        code = 128 + died_of if died_of else child.returncode
        if is_asked or code == 0:
            return code
        if lived_s > LONG * options.max_backoff:
            in_a_row, pause_s = 0, options.backoff
        how = f"by signal {died_of} ({signal.strsignal(died_of)})" if died_of else f"with exit code {code}"
        ended = f"{name} ended {how} after {lived_s:.1f} s"
        if in_a_row == options.restarts:
            _say(f"{ended}; given up after {in_a_row} restarts")
            return code
        restarts, in_a_row, pause_s = restarts + 1, in_a_row + 1, min(pause_s, options.max_backoff)
        _say(f"{ended}; restart {in_a_row} of {options.restarts} in {pause_s:g} s")
        until_s = monotonic() + pause_s
        while (left_s := until_s - monotonic()) > 0:
            if signals.wait(left_s):
                _say(f"{name} is not started again")
                return code
        pause_s *= 2


class _Signals:
    """The signals that come, through a pipe: none is lost, whatever this process does at that moment."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: None)

    def wait(self, timeout_s: float | None) -> list[signal.Signals]:
        """Wait for any signal, for so long at most; those that came and ask for an end."""
        if not select.select([self._reader], [], [], timeout_s)[0]:
            return []
        return [signal.Signals(number) for number in os.read(self._reader, 4096) if number in ENDING]


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser("python -m flowdp.supervise", description="Restart a script that dies.")
    parser.add_argument("--restarts", type=int, default=10, metavar="N", help="at most so many in a row (10)")
    parser.add_argument("--backoff", type=float, default=1.0, metavar="S", help="first pause in seconds (1)")
    parser.add_argument("--max-backoff", type=float, default=60.0, metavar="S", help="longest pause (60)")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script and its arguments")
    options = parser.parse_args(argv)
    script = ["-m", *options.module] if options.module else options.script
    if not script or not (options.module or Path(script[0]).is_file()):
        parser.error("give a script that is there, or -m and a module")
    if options.restarts < 0 or not options.backoff >= 0 or not options.max_backoff > 0:
        parser.error("--restarts and --backoff must be at least 0, --max-backoff above 0")
    return options, script


def _say(what: str) -> None:
    print(f"flowdp.supervise: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
