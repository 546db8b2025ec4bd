"""Two network namespaces, and a link between them that is as slow as one wants.

Each namespace has a TUN device, and a thread carries the packets of one to the other: late by `delay_ms`, and
at no more than `megabits` in a second, each way. TCP runs over it as over a wire. It stands in for `netem`,
which is no part of many kernels. Needs Linux and root.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType

__all__ = ["DEVICE", "Direction", "SlowLink", "leftovers"]

PREFIX = "flowdp"
DEVICE = "flowdp0"
MTU = 9000
QUEUE_BYTES = 1_500_000
"""Longest queue of a direction, as long as `netem`'s by default; packets beyond it are lost."""

TUN, NO_PACKET_INFO, TUNSETIFF = 0x0001, 0x1000, 0x400454CA


class Direction:
    """The packets on their way in one direction.

    Args:
        delay_ms: Time on the way.
        megabits: Rate of the link, in 1,000,000 bits per second.
    """

    def __init__(self, delay_ms: float, megabits: float) -> None:
        self._delay_s = delay_ms / 1e3
        self._s_per_byte = 8 / (megabits * 1e6)
        self._free_at = 0.0  # the link has sent all that came before
        self._packets: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes, now: float) -> bool:
        """Take a packet, unless the queue is full; returns whether it was taken."""
        start = max(self._free_at, now)
        if (start - now) / self._s_per_byte > QUEUE_BYTES:
            return False
        self._free_at = start + len(packet) * self._s_per_byte
        self._packets.append((self._free_at + self._delay_s, packet))
        return True

    def arrived(self, now: float) -> list[bytes]:
        """Packets that are there by now, in their order."""
        found = []
        while self._packets and self._packets[0][0] <= now:
            found.append(self._packets.popleft()[1])
        return found

    @property
    def next_at(self) -> float | None:
        """Time at which the next packet is there; None without any."""
        return self._packets[0][0] if self._packets else None


class SlowLink:
    """Two namespaces with a slow link, for the length of a `with` block.

    Args:
        delay_ms: Time of a packet on the way; a round trip takes twice as long.
        megabits: Rate, each way.

    Attributes:
        addresses: Address of each end.
    """

    def __init__(self, delay_ms: float, megabits: float) -> None:
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self._names = tuple(f"{PREFIX}-{os.getpid()}-{end}" for end in (0, 1))
        self._ways = tuple(Direction(delay_ms, megabits) for _ in range(2))
        self._devices: list[int] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SlowLink:
        try:
            for name in leftovers():
                _ip("netns", "del", name)
            for end, name in enumerate(self._names):
                self._open(end, name)
            self._wake, self._woken = os.pipe()
            self._thread = threading.Thread(target=self._carry, name="slow-link", daemon=True)
            self._thread.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def command(self, end: int, command: Sequence[str]) -> list[str]:
        """A command that runs another one at one end of the link."""
        return ["ip", "netns", "exec", self._names[end], *command]

    def _open(self, end: int, name: str) -> None:
        _ip("netns", "add", name)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._devices.append(device)
        own = f"fdp{os.getpid()}-{end}"[:15]  # its name here, where another link may be, too
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", own.encode(), TUN | NO_PACKET_INFO))
        _ip("link", "set", own, "netns", name)
        _ip("-n", name, "link", "set", own, "name", DEVICE, "mtu", str(MTU), "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", self.addresses[end], "peer", self.addresses[1 - end], "dev", DEVICE)

    def _carry(self) -> None:
        """The body of the thread: carry packets until the link is closed."""
        while True:
            due = [way.next_at for way in self._ways if way.next_at is not None]
            wait = max(0.0, min(due) - perf_counter()) if due else None
            ready, _, _ = select.select([*self._devices, self._wake], [], [], wait)
            if self._wake in ready:
                return
            for end, way in enumerate(self._ways):
                if self._devices[end] in ready:
                    with suppress(BlockingIOError):
                        while True:
                            way.take(os.read(self._devices[end], MTU + 100), perf_counter())
                for packet in way.arrived(perf_counter()):
                    with suppress(OSError):  # the other end is not up yet, or has no room: a packet is lost
                        os.write(self._devices[1 - end], packet)

    def _close(self) -> None:
        if self._thread is not None:
            os.write(self._woken, b"x")
            self._thread.join()
            os.close(self._wake)
            os.close(self._woken)
        for device in self._devices:
            os.close(device)
        for name in self._names:
            if name in _namespaces():
                _ip("netns", "del", name)


def leftovers() -> list[str]:
    """Namespaces of links whose process was killed."""
    return [
        name
        for name in _namespaces()
        if name.startswith(f"{PREFIX}-") and not Path("/proc", name.split("-")[1]).exists()
    ]


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
