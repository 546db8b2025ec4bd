"""The slow link: when its packets arrive, and a ping through real namespaces."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from bench.machines.link import SlowLink, leftovers
from tests.limits import HANG_S


@pytest.mark.linux
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(),
    reason="needs root and /dev/net/tun, for namespaces",
)
def test_a_round_trip_takes_twice_the_delay() -> None:
    with SlowLink(delay_ms=20, megabits=100) as link:
        script = (
            "import socket, sys, time\n"
            "one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)\n"
            "started = time.monotonic()\n"
            "try: one.connect((sys.argv[1], 9))\n"
            "except ConnectionRefusedError: print('refused after', time.monotonic() - started)\n"
        )
        done = subprocess.run(
            link.command(0, ["python3", "-c", script, link.addresses[1]]),
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        took = re.findall(r"refused after ([\d.e-]+)", done.stdout)
        assert took, done.stderr
        assert float(took[0]) >= 0.040
        there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert there.count(f"flowdp-{os.getpid()}-") == 2
        assert leftovers() == []
    gone = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"flowdp-{os.getpid()}-" not in gone
