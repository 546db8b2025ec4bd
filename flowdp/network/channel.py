"""Messages between the machine that leads and those that follow.

One link for each follower, and on it two directions: whole messages, in order, each once. A message is a
frozen record without tensors, pickled, in one frame of fixed size, or in two. Silence is broken by a sign of
life several times within the timeout, so a machine that says nothing for so long is lost, whatever it does.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowdp.errors import CollectiveError, MachineLostError
from flowdp.network.machines import Machines
from flowdp.policy.formats import format_error

__all__ = ["Channel", "Sign"]

FRAME = 2048
"""Bytes of a first frame: nearly all messages fit. The rest of a longer one follows in a frame of its own."""

LENGTH = 8
"""Bytes of a first frame that say how long the message is."""

SIGNS = 4
"""Signs of life within the timeout."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign of life: how far a machine is, so that others do not take a long step there for a standstill.

    Attributes:
        moves: Counts up with all that its ranks do.
        longest_ms: The longest step of its ranks.
        has_started: Each of its ranks has ended its first step.
    """

    moves: int = 0
    longest_ms: float = 0.0
    has_started: bool = False

    def __add__(self, other: Sign) -> Sign:
        """Sign of life of two machines together."""
        return Sign(
            self.moves + other.moves,
            max(self.longest_ms, other.longest_ms),
            self.has_started and other.has_started,
        )


class _Bye:
    """The last message of a link."""


class Channel:
    """Messages between machine 0 and the others. Each machine of a run opens one, at the same place.

    Args:
        machines: Machines of the job.
        sign_s: Longest time between two signs of life; None: by the machines' timeout.

    Threads:
        `send` and `tell_all`: any, behind `start`; they do not block.
    """

    def __init__(self, machines: Machines, sign_s: float | None) -> None:
        self._machines = machines
        self._group: dist.ProcessGroup | None = machines.open_group()
        self._sign_s = min(sign_s or machines.timeout_s, machines.timeout_s / SIGNS)
        self._links: dict[int, _Link] = {}

    @property
    def others(self) -> Iterable[int]:
        """Machines at the other ends."""
        return range(1, self._machines.count) if self._machines.leads else (0,)

    def start(
        self,
        received: Callable[[int, Any], None],
        ended: Callable[[int, CollectiveError | None], None],
        sign: Callable[[int], Sign],
    ) -> None:
        """Start the threads of all links. They call back, and must not be blocked there.

        Args:
            received: Called as `received(machine, message)` with each message.
            ended: Called as `ended(machine, error)`, once for each machine, when nothing more comes from it:
                None where it has closed its channel, else the error by which it was lost.
            sign: Makes a sign of life for a machine.
        """
        assert self._group is not None
        self._links = {
            other: _Link(
                other, self._machines, self._group, partial(sign, other), self._sign_s, received, ended
            )
            for other in self.others
        }
        for thread in self.threads():
            thread.start()

    def send(self, machine: int, message: Any) -> None:
        """Send a message to one machine: machine 0, or from there any other."""
        self._links[machine].queue.put(message)

    def tell_all(self, message: Any) -> None:
        """Send a message to all machines at the other ends of this one's links."""
        for link in self._links.values():
            link.queue.put(message)

    def close(self) -> None:
        """Send all that was posted, and wait until the others have done so, too.

        At most the timeout for a machine that says nothing; one that is lost is not waited for. May be called
        again.

        Threads:
            Any but those of the links.
        """
        for link in self._links.values():
            link.queue.put(_Bye())
        for thread in self.threads():
            if thread.ident is not None:
                thread.join()
        for link in self._links.values():
            link.let_go()
        group, self._group = self._group, None  # the last reference holds its sockets
        if group is not None:
            self._machines.close_group(group)

    def threads(self) -> list[threading.Thread]:
        """Threads of the links, for diagnostics."""
        return [thread for link in self._links.values() for thread in link.threads]


class _Link:
    """Both directions between this machine and another one, with a thread for each.

    Attributes:
        queue: Messages to be sent.
        threads: Thread that sends, and thread that receives.
    """

    def __init__(
        self,
        other: int,
        machines: Machines,
        group: dist.ProcessGroup,
        sign: Callable[[], Sign],
        sign_s: float,
        received: Callable[[int, Any], None],
        ended: Callable[[int, CollectiveError | None], None],
    ) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self._other, self._name = other, machines.names[other]
        self._group, self._timeout_s = group, machines.timeout_s
        self._sign, self._sign_s = sign, sign_s
        self._received, self._ended = received, ended
        self._lock = threading.Lock()  # guards whether the end was told
        self._is_over = False
        self.threads = [
            threading.Thread(target=self._run, args=(body,), name=f"flowdp-{does}-{other}", daemon=True)
            for does, body in (("send", self._send), ("receive", self._receive))
        ]

    def let_go(self) -> None:
        """Drop the group, which no thread uses any more."""
        del self._group

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            what = f"{self._name} was lost, or said nothing for {self._timeout_s:g} s"
            self._fail(MachineLostError(f"{what}: {format_error(error)}"), error)
            self.queue.put(_Bye())  # for the other thread, which ends

    def _fail(self, failure: CollectiveError, cause: Exception) -> None:
        failure.__cause__ = cause
        self._end(failure)

    def _end(self, error: CollectiveError | None) -> None:
        """Tell the end, once."""
        with self._lock:
            is_news, self._is_over = not self._is_over, True
        if is_news:
            self._ended(self._other, error)

    def _send(self) -> None:
        """The body of the sending thread."""
        due_s = monotonic() + self._sign_s
        while True:
            try:
                message = self.queue.get(timeout=max(0.0, due_s - monotonic()))
            except Empty:
                message, due_s = self._sign(), monotonic() + self._sign_s
            self._put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            if isinstance(message, _Bye):
                return

    def _put(self, content: bytes) -> None:
        first, rest = content[: FRAME - LENGTH], content[FRAME - LENGTH :]
        head = len(content).to_bytes(LENGTH, "little") + first
        dist.send(_tensor(head.ljust(FRAME, b"\0")), self._other, group=self._group)
        if rest:
            dist.send(_tensor(rest), self._other, group=self._group)

    def _receive(self) -> None:
        """The body of the receiving thread."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        while True:
            dist.recv(frame, self._other, group=self._group)
            content = frame.numpy().tobytes()
            length = int.from_bytes(content[:LENGTH], "little")
            content = content[LENGTH : LENGTH + length]
            if length > len(content):
                rest = torch.empty(length - len(content), dtype=torch.uint8)
                dist.recv(rest, self._other, group=self._group)
                content += rest.numpy().tobytes()
            try:
                message = pickle.loads(content)
                if isinstance(message, _Bye):
                    self._end(None)
                    return
                if not self._is_over:
                    self._received(self._other, message)
            except Exception as error:
                # The other end goes on: what it sends is received and dropped, or it would wait for that.
                what = f"a message of {self._name} cannot be taken"
                self._fail(CollectiveError(f"{what}: {format_error(error)}"), error)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
