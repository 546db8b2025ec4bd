"""Messages between the machine that leads and those that follow.

One link for each follower, and on it two directions: whole messages, in order, each once. A message is a
frozen record without tensors, pickled, in one frame of fixed size, or in two. Silence is broken by a sign of
life several times within the timeout, so a machine that says nothing for so long is lost, whatever it does.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowdp.errors import CollectiveError
from flowdp.network.machines import Machines
from flowdp.policy.formats import format_error

__all__ = ["Channel"]

FRAME = 2048
"""Bytes of a first frame: nearly all messages fit. The rest of a longer one follows in a frame of its own."""

LENGTH = 8
"""Bytes of a first frame that say how long the message is; 0: a sign of life."""

SIGNS = 4
"""Signs of life within the timeout."""


class _Bye:
    """The last message of a link."""


class Channel:
    """Messages between machine 0 and the others. Each machine of a run opens one, at the same place.

    Args:
        machines: Machines of the job.
        received: Called as `received(machine, message)` with each message. Must not block.
        lost: Called as `lost(machine, error)`, once for each machine that is lost. Must not block.

    Threads:
        `send` and `tell_all`: any; they do not block. The callbacks come from a thread for each link.
    """

    def __init__(
        self,
        machines: Machines,
        received: Callable[[int, Any], None],
        lost: Callable[[int, CollectiveError], None],
    ) -> None:
        group = machines.open_group()
        others = range(1, machines.count) if machines.leads else (0,)
        self._links = {
            other: _Link(
                other, machines.names[other], group, machines.timeout_s, received=received, lost=lost
            )
            for other in others
        }

    def start(self) -> None:
        """Start the threads of all links."""
        for link in self._links.values():
            link.start()

    def send(self, machine: int, message: Any) -> None:
        """Send a message to one machine: machine 0, or from there any other."""
        self._links[machine].queue.put(message)

    def tell_all(self, message: Any) -> None:
        """Send a message to all machines at the other ends of this one's links."""
        for link in self._links.values():
            link.queue.put(message)

    def close(self) -> None:
        """Send all that was posted, and wait until the others have done so, too.

        At most the timeout for a machine that says nothing; one that is lost is not waited for.

        Threads:
            Any but those of the links.
        """
        for link in self._links.values():
            link.queue.put(_Bye())
        for link in self._links.values():
            link.join()

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
        name: str,
        group: dist.ProcessGroup,
        timeout_s: float,
        *,
        received: Callable[[int, Any], None],
        lost: Callable[[int, CollectiveError], None],
    ) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self._other, self._name = other, name
        self._group, self._timeout_s = group, timeout_s
        self._received, self._lost = received, lost
        self._lock = threading.Lock()  # guards whether the loss was told
        self._is_over = False
        self.threads = [
            threading.Thread(target=self._run, args=(body,), name=f"flowdp-{does}-{other}", daemon=True)
            for does, body in (("send", self._send), ("receive", self._receive))
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def join(self) -> None:
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Tell the loss, once, and let the other thread end."""
        with self._lock:
            is_news, self._is_over = not self._is_over, True
        self.queue.put(_Bye())
        if is_news:
            loss = CollectiveError(
                f"{self._name} was lost, or said nothing for {self._timeout_s:g} s: {format_error(error)}"
            )
            loss.__cause__ = error
            self._lost(self._other, loss)

    def _send(self) -> None:
        """The body of the sending thread."""
        while not self._is_over:
            try:
                message = self.queue.get(timeout=self._timeout_s / SIGNS)
            except Empty:
                self._put(b"")
                continue
            if self._is_over:
                return
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
            if not length:
                continue
            content = content[LENGTH : LENGTH + length]
            if length > len(content):
                rest = torch.empty(length - len(content), dtype=torch.uint8)
                dist.recv(rest, self._other, group=self._group)
                content += rest.numpy().tobytes()
            message = pickle.loads(content)
            if isinstance(message, _Bye):
                return
            self._received(self._other, message)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
