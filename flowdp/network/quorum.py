"""The quorum of a job whose machines come and go: who trains, agreed through torchft's lighthouse.

The lighthouse knows who is alive, by heartbeats. All members of a quorum ask it again and again, and it
answers all of them at once, with the same list: who has asked, and what each has said. So a decision that
depends on one answer alone is that of all. Each member says in which world it trains; it waits where it names
none. A list in which all wait is the next **world**: they make torch.distributed's default group of it. Thus
machines that train see one that waits. And machines that wait begin no second world beside one that trains,
since its members are in the list.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from flowdp.errors import CollectiveError, MachineLostError, OptionError
from flowdp.network.machines import backend_here
from flowdp.policy.formats import format_error

__all__ = ["Member", "Quorum", "World", "check_place", "next_world"]

log = logging.getLogger("flowdp")

HEARTBEAT_S = 0.1
"""Time between two heartbeats. A thread of torchft's sends them, which needs no interpreter lock."""

CONNECT_S = 30.0
"""Seconds for which the lighthouse is looked for at the start."""

ASK_S = 2.0
"""Longest wait for one answer; then the same is asked again. The end of a job waits so long, too."""

WAITING_PAUSE_S = 0.1
TRAINING_PAUSE_S = 1.0
"""Pauses from an answer to the next question."""

FORM_S = 30.0
"""Seconds within which all members of a world must have come to its group: they were waiting for it."""

TELL_S = 10.0
"""Seconds for which a machine that has failed waits until the others have read of it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A machine as the others read of it in an answer of the lighthouse.

    Attributes:
        name: Its name in the quorum.
        host: Its host, for people.
        store: Address of its store of torch.distributed.
        world: Name of the world in which it trains; "": it waits.
        was: World in which it trained last, if it waits or has failed.
        lives: Worlds of which it has been a member.
        failed: The error by which it leaves, in words; "": none.
    """

    name: str
    host: str
    store: str
    world: str = ""
    was: str = ""
    lives: int = 0
    failed: str = ""

    def said(self) -> dict[str, Any]:
        """The part that travels as free data."""
        words = asdict(self)
        del words["name"], words["store"]
        return words


@dataclass(frozen=True, slots=True)
class World:
    """Machines that train together, in the order of their ranks.

    Attributes:
        name: Name that no other world has.
        members: Its machines. Those that have been there longest come first, so that machine 0 stays machine
            0 as long as it lives.
    """

    name: str
    members: tuple[Member, ...]

    @property
    def is_forming(self) -> bool:
        """Whether all members wait, so that they may begin together."""
        return all(not member.world and not member.failed for member in self.members)

    @property
    def names(self) -> list[str]:
        """Names of the members, sorted."""
        return sorted(member.name for member in self.members)

    def rank_of(self, name: str) -> int:
        """Rank of a member."""
        return [member.name for member in self.members].index(name)


def next_world(answer: World, least: int, first: int) -> bool:
    """Whether the members of an answer are to begin a world; all read the same answer, and decide alike.

    Args:
        answer: An answer of the lighthouse.
        least: Least number of machines.
        first: Least number of machines where none has trained before.
    """
    is_new = all(not member.lives for member in answer.members)
    return answer.is_forming and len(answer.members) >= (first if is_new else least)


def check_place(lighthouse: str | None) -> str:
    """Check that this process can join a quorum, and find the address of the lighthouse.

    Raises:
        OptionError: No lighthouse is named, or the process belongs to a job of a launcher already.
    """
    address = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE", "")
    if not address:
        raise OptionError(
            "run_elastic needs torchft's lighthouse: start one, torchft_lighthouse --min_replicas 1, and "
            "give its address to each machine, run_elastic(train, lighthouse='http://host:29510') or "
            "TORCHFT_LIGHTHOUSE=http://host:29510 in its environment"
        )
    if not address.startswith(("http://", "https://")):
        raise OptionError(f"lighthouse must be an address such as 'http://host:29510', not {address!r}")
    if not dist.is_available():
        raise OptionError("run_elastic needs torch.distributed, and this torch is built without it")
    if dist.is_initialized():
        raise OptionError(
            "run_elastic makes torch.distributed's default group itself, for each set of machines, and there "
            "is one already: leave init_process_group out, or destroy the group before"
        )
    return address


class Quorum:
    """Membership of this process in the quorum of a job, from `join` to `leave`.

    Args:
        lighthouse: Address of the lighthouse.
        least: Least number of machines of a world.
        first: Least number of machines where none has trained before.
        host: Name or address by which other machines reach this one; None: its host name.
        heard: Called with each answer, on a thread of the quorum's own. Must not wait for this quorum.

    Raises:
        CollectiveError: The lighthouse does not answer.

    Threads:
        all methods: the user's. A daemon thread asks the lighthouse.
    """

    def __init__(
        self,
        lighthouse: str,
        least: int = 1,
        first: int = 1,
        host: str | None = None,
        heard: Callable[[World], None] = lambda _: None,
    ) -> None:
        from torchft.coordination import LighthouseClient, ManagerServer

        host = host or socket.gethostname()
        self._sizes = (least, first)
        self._address, self._client_of = lighthouse, LighthouseClient
        self._store = _open_store(host)  # one for all worlds: each has a part of that of its machine 0
        self.me = Member(f"{host}-{uuid4().hex[:12]}", host, f"{host}:{self._store.port}")
        try:
            self._client = self._connect(CONNECT_S)
            self._heart = ManagerServer(
                replica_id=self.me.name,
                lighthouse_addr=lighthouse,
                hostname=host,
                bind="[::]:0" if socket.has_ipv6 else "0.0.0.0:0",
                store_addr=self.me.store,
                world_size=1,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
                connect_timeout=timedelta(seconds=CONNECT_S),
                quorum_retries=0,
            )
        except Exception as error:
            raise CollectiveError(
                f"torchft's lighthouse at {lighthouse} does not answer within {CONNECT_S:g} s: "
                f"{format_error(error)}; start it, torchft_lighthouse --min_replicas 1, on a host that all "
                "machines reach"
            ) from error
        self._heard = heard
        self._condition = threading.Condition()  # guards the rest; reentrant
        self._number = 0  # how often this machine has said something new
        self._formed: World | None = None  # the world that this machine has waited for
        self._answer: World | None = None
        self._answered = 0  # the number of the words that the last answer has
        self._trouble = ""  # the error of the last question, if it had no answer
        self._failures: dict[str, str] = {}  # errors of machines, by the world in which they had them
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="flowdp-quorum", daemon=True)

    # ------------------------------------------------------------------ the user's thread
    def form(self, timeout_s: float, told: Callable[[World], None]) -> World:
        """Wait for the next world with this machine.

        Args:
            timeout_s: Longest wait while no other machines train; those that train are waited for.
            told: Called with each new answer meanwhile, to tell the user for whom this machine waits.

        Raises:
            CollectiveError: The time is up; or a machine of this one's last world has left by an error.
        """
        with self._condition:
            self._formed = None
            self._say(world="", was=self.me.world or self.me.was)
        if self._thread.ident is None:
            self._thread.start()
        deadline, seen = time.monotonic() + timeout_s, self._answer
        while True:
            with self._condition:
                self._condition.wait_for(partial(self._is_over_for, seen), ASK_S)
                formed, answer, trouble = self._formed, self._answer, self._trouble
                failure = self._failure()
            if failure:
                raise CollectiveError(failure)
            if formed is not None:
                return formed
            if answer is not None and answer is not seen:
                seen = answer
                told(answer)
                if any(member.world not in ("", self.me.was) for member in answer.members):
                    deadline = time.monotonic() + timeout_s  # others train, and will let this one in
            if time.monotonic() > deadline:
                raise CollectiveError(_late(answer, trouble, *self._sizes, timeout_s))

    def _is_over_for(self, seen: World | None) -> bool:
        """Whether there is more than the answer that was seen last."""
        return self._answer is not seen or self._formed is not None or bool(self._failure())

    def begin_group(self, world: World) -> None:
        """Make torch.distributed's default group of a world.

        Raises:
            MachineLostError: Not all of its members come.
        """
        rank, first = world.rank_of(self.me.name), world.members[0]
        host, _, port = first.store.rpartition(":")
        try:
            within = timedelta(seconds=FORM_S)
            store = self._store
            if rank:
                store = dist.TCPStore(host, int(port), is_master=False, timeout=within)  # type: ignore[attr-defined]
            part = dist.PrefixStore(world.name, store)  # type: ignore[attr-defined]
            dist.init_process_group(
                backend_here(), store=part, rank=rank, world_size=len(world.members), timeout=within
            )
            # A machine that does not come within it is lost; the user's own calls may take longer.
            dist.distributed_c10d._set_pg_timeout(dist.distributed_c10d.default_pg_timeout)
        except Exception as error:
            self.end_group()
            raise MachineLostError(
                f"not all {len(world.members)} machines came to their process group within {FORM_S:g} s: "
                f"{format_error(error)}"
            ) from error

    def end_group(self) -> None:
        """Destroy the default group, whoever of it is left."""
        if dist.is_initialized():
            with suppress(Exception):  # a machine that is gone breaks its connections
                dist.destroy_process_group()

    def tell(self, error: BaseException) -> None:
        """Tell the others of this world an error of this machine, unless one of them has told its own.

        Returns when they have read it, or after `TELL_S`.
        """
        self._say(failed=format_error(error)[:2000], world="", was=self.me.world or self.me.was)
        with self._condition:
            self._condition.wait_for(lambda: self._answered == self._number or self._failure(), TELL_S)

    def close(self) -> None:
        """Leave the quorum, and end the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._heart.shutdown()
        if self._thread.ident is not None:
            self._thread.join()

    def _say(self, **words: Any) -> None:
        with self._condition:
            self.me = replace(self.me, **words)
            self._number += 1
            self._condition.notify_all()

    def _failure(self) -> str:
        return self._failures.get(self.me.world or self.me.was, "")

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        """The body of the thread."""
        while True:
            with self._condition:
                if self._is_closed:
                    return
                me, number = self.me, self._number
            answer = self._ask(me)
            if answer is not None:
                self._take(answer, number)
                self._pass_on(answer)
            with self._condition:
                pause_s = TRAINING_PAUSE_S if me.world else WAITING_PAUSE_S
                self._condition.wait_for(partial(self._has_news, number), pause_s)

    def _has_news(self, number: int) -> bool:
        """Whether this machine says something else by now, or nothing more."""
        return self._is_closed or self._number != number

    def _take(self, answer: World, number: int) -> None:
        with self._condition:
            for member in answer.members:
                if member.failed and member.was and member.name != self.me.name:
                    self._failures.setdefault(member.was, f"{member.host} has failed: {member.failed}")
            self._answer, self._answered, self._trouble = answer, number, ""
            # Here, not by the user's thread: a question in between would say that this machine still waits.
            if number == self._number and self._formed is None and next_world(answer, *self._sizes):
                self._formed = answer
                self._say(world=answer.name, lives=self.me.lives + 1)
            self._condition.notify_all()

    def _pass_on(self, answer: World) -> None:
        try:
            self._heard(answer)
        except Exception:  # of a run that ends just now; the next answer comes soon
            log.exception("an answer of the lighthouse cannot be taken")

    def _ask(self, me: Member) -> World | None:
        """Ask the lighthouse once; None: no answer came, for a member of the last one has not asked yet."""
        try:
            reply = self._client.quorum(
                replica_id=me.name,
                timeout=timedelta(seconds=ASK_S),
                address="",
                store_address=me.store,
                step=me.lives,
                world_size=1,
                shrink_only=False,
                data=me.said(),
            )
        except TimeoutError:
            return None
        except Exception as error:
            self._complain(error)
            with suppress(Exception):
                self._client = self._connect(ASK_S)
            return None
        members = [
            Member(peer.replica_id, store=peer.store_address, **peer.data) for peer in reply.participants
        ]
        name = f"flowdp-{reply.created.seconds}-{reply.created.nanos}-{reply.quorum_id}"
        return World(name, tuple(sorted(members, key=lambda member: (-member.lives, member.name))))

    def _connect(self, within_s: float) -> Any:
        return self._client_of(self._address, timedelta(seconds=within_s))

    def _complain(self, error: Exception) -> None:
        with self._condition:
            is_news, self._trouble = not self._trouble, format_error(error)
        if is_news:
            log.warning(
                "torchft's lighthouse at %s does not answer (%s); a run under way goes on, and until it does "
                "no machine can come, and none be replaced",
                self._address,
                format_error(error),
            )


def _open_store(host: str) -> Any:
    """Open the store by which the members of a world find each other, if this machine leads it.

    Raises:
        OptionError: This machine does not reach itself by that name, so no other one will.
    """
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S)
        )
    except Exception as error:
        raise OptionError(
            f"host={host!r} is no name by which this machine can be reached: {format_error(error)}; give the "
            "one that the other machines know, or its address, run_elastic(host='10.0.0.7')"
        ) from error


def _late(answer: World | None, trouble: str, least: int, first: int, timeout_s: float) -> str:
    """Reason for which no world has come about."""
    reason = f"the lighthouse does not answer: {trouble}" if trouble else "it waits for other machines"
    if answer is not None and not trouble:
        training = [member.host for member in answer.members if member.world]
        wanted = first if all(not member.lives for member in answer.members) else least
        count, hosts = len(answer.members), ", ".join(sorted(member.host for member in answer.members))
        reason = f"of {wanted} machines {count} came ({hosts})"
        if training:
            reason = f"{', '.join(sorted(training))} still trains with machines that are lost"
    return f"no quorum within {timeout_s:g} s: {reason}"
