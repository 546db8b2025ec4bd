"""Messages between real processes: whole, in order, and with an end that every side hears of."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

import pytest

from flowdp.errors import CollectiveError
from flowdp.network.channel import FRAME, LENGTH, Channel, Sign
from flowdp.network.machines import Machines, find_machines
from tests.limits import HANG_S
from tests.torch_world import in_processes


class Ends:
    """A channel of this process, and all that it has heard."""

    def __init__(self, timeout_s: float = HANG_S, sign_s: float = HANG_S) -> None:
        found = find_machines(timeout_s=timeout_s)
        assert isinstance(found, Machines)
        self.machines = found
        self.heard: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self.signs: SimpleQueue[tuple[int, Sign]] = SimpleQueue()
        self.ended: SimpleQueue[tuple[int, CollectiveError | None, float]] = SimpleQueue()
        self.channel = Channel(found, sign_s)
        self.channel.start(
            lambda other, one: (self.signs if isinstance(one, Sign) else self.heard).put((other, one)),
            lambda other, error: self.ended.put((other, error, monotonic())),
            lambda other: Sign(found.index * 10 + other, 2.5, True),
        )

    def hear(self, count: int) -> list[tuple[int, Any]]:
        return [self.heard.get(timeout=HANG_S) for _ in range(count)]

    def loss(self) -> tuple[int, str, float]:
        """The loss of a machine: its number, the error, and seconds that it took from now."""
        start_s = monotonic()
        other, error, at_s = self.ended.get(timeout=HANG_S)
        assert error is not None
        return other, str(error), at_s - start_s

    def close(self) -> float:
        """Close the channel; returns the seconds that it took."""
        start_s = monotonic()
        self.channel.close()
        assert not any(thread.is_alive() for thread in self.channel.threads())
        return monotonic() - start_s


LENGTHS = (0, 1, FRAME - LENGTH, FRAME, 3 * FRAME, 1_000_000)


def texts(sender: int) -> list[Any]:
    """Messages of many lengths; among them one that fills a frame to its last byte."""
    filled = FRAME - LENGTH - len(pickle.dumps(b"x" * 1000, pickle.HIGHEST_PROTOCOL)) + 1000
    return [(sender, number, bytes([number]) * length) for number, length in enumerate(LENGTHS)] + [
        b"x" * (filled + more) for more in (-1, 0, 1)
    ]


def exchange(rank: int) -> dict[str, Any]:
    ends = Ends()
    others = list(ends.channel.others)
    many = 200
    if rank == 0:
        for text in texts(0):
            ends.channel.tell_all(text)

        def send(sender: int) -> None:
            for number in range(many):
                ends.channel.send(1 + number % 2, (sender, number))

        senders = [threading.Thread(target=send, args=(sender,)) for sender in range(3)]
        for thread in senders:
            thread.start()
        for thread in senders:
            thread.join()
        ends.channel.tell_all("the last")
    else:
        for text in texts(rank):
            ends.channel.send(0, text)
        ends.channel.send(0, "the last")
    count = len(texts(0)) + 1 + (3 * many // 2 if rank else 0)
    heard = ends.hear(count if rank else 2 * count)
    ends.close()
    assert ends.heard.empty()
    return {
        "others": others,
        "heard": heard,
        "ended": [ends.ended.get()[:2] for _ in others],
        "more": ends.ended.empty(),
        "threads": len(ends.channel.threads()),
    }


def test_messages_come_whole_in_order_and_once(tmp_path: Path) -> None:
    filled = texts(0)[-2]
    assert len(pickle.dumps(filled, pickle.HIGHEST_PROTOCOL)) == FRAME - LENGTH
    leader, *followers = in_processes(exchange, tmp_path, 3)
    assert leader["others"] == [1, 2]
    for machine in (1, 2):
        assert [one for other, one in leader["heard"] if other == machine] == [*texts(machine), "the last"]
    for machine, follower in enumerate(followers, 1):
        assert {other for other, _ in follower["heard"]} == {0}
        heard = [one for _, one in follower["heard"]]
        assert heard[: len(texts(0))] == texts(0)
        assert heard[-1] == "the last"
        # Of several senders each one's messages are in order.
        for sender in range(3):
            wanted = [number for number in range(200) if 1 + number % 2 == machine]
            assert [one[1] for one in heard[len(texts(0)) : -1] if one[0] == sender] == wanted
    for one in (leader, *followers):
        # Both ends have closed: no machine is lost.
        assert sorted(one["ended"]) == [(other, None) for other in one["others"]]
        assert one["more"]
        assert one["threads"] == 2 * len(one["others"])


def signs(rank: int) -> dict[str, Any]:
    ends = Ends(timeout_s=4.0)  # so a sign of life comes once a second
    others = list(ends.channel.others)
    first = [ends.signs.get(timeout=HANG_S) for _ in range(5 * len(others))]
    ends.machines.gather(None)  # the others have theirs, too
    ends.close()
    return {"signs": set(first), "lost": [ends.ended.get()[1] for _ in others]}


def test_signs_of_life_break_a_silence_longer_than_the_timeout(tmp_path: Path) -> None:
    leader, follower = in_processes(signs, tmp_path, 2)
    assert leader["signs"] == {(1, Sign(10, 2.5, True))}
    assert follower["signs"] == {(0, Sign(1, 2.5, True))}
    assert leader["lost"] == follower["lost"] == [None]


@dataclass(frozen=True)
class Unloadable:
    """A message that the other end cannot read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise, ("no such class here",)


def _raise(text: str) -> None:
    raise AttributeError(text)


def bad_message(rank: int) -> Any:
    ends = Ends()
    found: list[Any]
    if rank == 1:
        ends.channel.send(0, Unloadable())
        ends.channel.send(0, "behind it")
        found = ends.hear(1)
    else:
        found = [ends.loss()[:2]]
        ends.channel.send(1, "all the same")
    close_s = ends.close()
    return found, close_s, ends.heard.empty(), ends.ended.empty()


def test_a_message_that_cannot_be_read_ends_what_is_heard_but_not_the_link(tmp_path: Path) -> None:
    reader, writer = in_processes(bad_message, tmp_path, 2)
    [(other, text)], close_s, heard_no_more, told_once = reader
    assert other == 1
    assert re.fullmatch(
        r"a message of machine 1 \(.*\) cannot be taken: AttributeError: no such class here", text
    )
    assert heard_no_more
    assert told_once
    # The other end is not kept waiting for somebody who receives.
    assert writer[0] == [(0, "all the same")]
    assert max(close_s, writer[1]) < HANG_S / 2


def dies(rank: int, folder: str, way: str) -> Any:
    ends = Ends(timeout_s=2.0 if way == "stopped" else HANG_S)
    own = Path(folder) / str(rank)
    own.write_text(str(os.getpid()))
    ends.machines.gather(None)
    if rank == 1:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        return None
    other, text, loss_s = ends.loss()
    close_s = ends.close()
    if way == "stopped":
        os.kill(int((Path(folder) / "1").read_text()), signal.SIGKILL)
    # The survivor cannot end by `in_processes`, whose last barrier is of all processes.
    (Path(folder) / "found").write_bytes(pickle.dumps((other, text, loss_s, close_s, ends.ended.empty())))
    os._exit(0)


@pytest.mark.posix
@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_machine_that_is_lost_is_told_once_and_closing_does_not_wait_for_it(
    tmp_path: Path, way: str
) -> None:
    with pytest.raises(AssertionError, match="see what the processes wrote"):
        in_processes(dies, tmp_path, 2, str(tmp_path), way)
    other, text, loss_s, close_s, is_once = pickle.loads((tmp_path / "found").read_bytes())
    assert other == 1
    assert text.startswith("machine 1 (")
    assert f"was lost, or said nothing for {2 if way == 'stopped' else round(HANG_S)} s: " in text
    # Long before the time after which a silent machine is lost, but for a stopped one, which has a short one.
    assert max(loss_s, close_s) < HANG_S / 2
    assert is_once
