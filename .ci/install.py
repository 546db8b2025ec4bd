"""Runs pip with one line of progress: `python .ci/install.py TITLE python -m pip install ...`.

On a terminal the line is written anew each second; a log has its beginning and its end.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

FETCHED = re.compile(r"\s*(?:Downloading|Using cached) ([^\s-]+)\S* \(([\d.]+) ([kMG]B)\)")
WIDTH = 100


def doing(line: str) -> str | None:
    """What a line of pip's output says that pip does now; None where it says nothing new."""
    if found := FETCHED.match(line):
        return f"downloading {found[1]}, {found[2]} {found[3]}"
    if line.startswith("Installing collected packages"):
        return f"unpacking {line.count(',') + 1} packages"
    return None


def install(title: str, command: Sequence[str], *, is_terminal: bool) -> int:
    """Run pip, print its progress, and all of its output if it fails; returns its exit status."""
    begin_s, has_ended = time.monotonic(), threading.Event()
    text, output = "looking up packages", []

    def show(text: str, end: str) -> None:
        line = f"{title}: {text}"
        print(f"\r{line[:WIDTH]:<{WIDTH}}" if is_terminal else line, end=end, flush=True)

    def tick() -> None:
        while not has_ended.wait(1.0):
            show(f"{text}, {time.monotonic() - begin_s:.0f} s", "")

    ticker = threading.Thread(target=tick)
    if is_terminal:
        ticker.start()
    else:
        print(title, flush=True)
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        ) as pip:
            for line in pip.stdout or ():
                output.append(line)
                text = doing(line) or text
    finally:
        has_ended.set()
        if is_terminal:
            ticker.join()
    show(f"{'failed after' if pip.returncode else 'done in'} {time.monotonic() - begin_s:.0f} s", "\n")
    if pip.returncode:
        sys.stderr.writelines(output)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1], sys.argv[2:], is_terminal=sys.stdout.isatty()))
