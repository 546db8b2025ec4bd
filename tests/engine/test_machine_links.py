"""Tests of the links between the machines of a run: real processes, and their gates."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowdp.checkpoint.saver import Saver
from flowdp.engine.failures import Failures
from flowdp.engine.machine_links import (
    Follower,
    FollowerLink,
    LeaderLink,
    RemoteError,
    _Orphaned,
    origin_of,
    sent_error,
)
from flowdp.engine.requests import Requests
from flowdp.errors import (
    CheckpointError,
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    DataError,
    DeviceError,
    FlowdpError,
    MachineLostError,
    MachineWaitsError,
    OptionError,
    OutOfDeviceMemory,
    ProtocolError,
    StallError,
    StateError,
    StepError,
)
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Phase
from flowdp.network.channel import Channel, Sign
from flowdp.network.machines import find_machines
from flowdp.network.team import Team
from flowdp.observe.records import Records
from flowdp.protocol.commands import AbortGate, Finish, Paused, RoundEnded, Send
from flowdp.protocol.messages import (
    Arrival,
    DataEnded,
    Directives,
    Exiting,
    Fact,
    Failed,
    Leave,
    Requested,
    SyncNow,
    Tick,
    WorkerReady,
)
from flowdp.threads.gate import Gate
from flowdp.threads.inbox import Inbox
from tests.collective.fake_world import in_threads
from tests.limits import HANG_S
from tests.torch_world import in_processes

HANG_MS = 1e3 * HANG_S
FINISH = Finish(None, False, 6, 1)


class Machine:
    """The link, gate and inboxes of this process: machines of 2, 1 and 1 ranks."""

    def __init__(self) -> None:
        machines = find_machines(timeout_s=HANG_S)
        assert machines is not None
        self.machines = machines
        self.team = Team((2, 1, 1)[: machines.count], machines)
        self.failures = Failures()
        self.requests = Requests(Records(()), self.failures)
        self.inboxes = {rank: Inbox[Any]() for rank in self.team.ranks}
        self.channel = Channel(machines, 0.25)
        services: Any = SimpleNamespace(
            team=self.team,
            channel=self.channel,
            requests=self.requests,
            failures=self.failures,
            evaluator=None,
            saver=Saver(),
        )
        posts = {rank: inbox.post for rank, inbox in self.inboxes.items()}
        self.link: LeaderLink | FollowerLink = (
            LeaderLink(services) if self.team.leads else FollowerLink(services, posts)
        )
        self.gate = Gate(self.team.world_size, None, self.link.ask, self.team.ranks)
        self.link.start(self.gate, self.sign)

    def sign(self) -> Sign:
        index = self.machines.index
        return Sign(10**index, 5.0 * index, index != 2)

    def enter(self, round: int, global_step: int) -> list[Any]:
        """All ranks of this machine come to a round; their outcomes or errors."""
        arrival = partial(Arrival, round=round, global_step=global_step, steps=1, samples=8)
        return in_threads(self.team.ranks, lambda rank: self.gate.enter(arrival(rank)))

    def next(self) -> Any:
        fact = self.requests.inbox.get(HANG_MS)
        assert fact is not None
        return fact

    def tick(self) -> None:
        """Let all machines come this far."""
        self.machines.gather(None)


def rounds(rank: int) -> dict[str, Any]:
    machine = Machine()
    link = machine.link
    found: dict[str, Any] = {}
    link.direct(Directives(lr=(Requested("scale_lr", 0.5),)))  # of a follower it stays where it is
    machine.tick()
    found["outcomes"] = [machine.enter(0, 0), machine.enter(1, 4)]
    if isinstance(link, LeaderLink):
        for other in (2, 3):
            link.order(other, SyncNow(other))
        link.relay(Paused(True))
        link.relay(Send(0, SyncNow(7)))  # an order goes its own way
        link.relay(FINISH)
        found["heard"] = sorted((machine.next() for _ in range(2)), key=lambda fact: fact.rank)
    else:
        assert isinstance(link, FollowerLink)
        link.send(WorkerReady(machine.team.ranks.start))
        link.relay(Paused(False))  # commands come from machine 0
        found["heard"] = [machine.next(), machine.next()]
        found["order"] = machine.inboxes[machine.team.ranks.start].get(HANG_MS)
    wanted = ([10, 100], [101], [11])[rank]
    while [sign.moves for sign in link.signs] != wanted:  # until every machine has signs of all others
        assert machine.requests.inbox.get(5.0) is None
    found["signs"] = link.signs
    machine.tick()
    machine.channel.close()
    found["names"] = [thread.name for thread in machine.channel.threads()]
    found["is_quiet"] = machine.requests.inbox.is_empty()
    found["error"] = machine.failures.first
    return found


def test_rounds_orders_facts_and_signs_of_three_machines(tmp_path: Path) -> None:
    leader, *followers = found = in_processes(rounds, tmp_path, 3)
    for number in range(2):
        outcomes = [outcome for one in found for outcome in one["outcomes"][number]]
        assert len(outcomes) == 4
        assert outcomes == [outcomes[0]] * 4
        assert (outcomes[0].round, outcomes[0].global_step) == (number, 4 + 4 * number)
        assert outcomes[0].lr == (() if number else (Requested("scale_lr", 0.5),))
    assert leader["heard"] == [WorkerReady(2), WorkerReady(3)]
    assert leader["signs"] == [Sign(10, 5.0, True), Sign(100, 10.0, False)]
    for rank, one in enumerate(followers, 2):
        assert one["heard"] == [Paused(True), FINISH]
        assert one["order"] == SyncNow(rank)
    # A follower hears of machine 0 and of all behind it: has one not started, the run has not.
    assert followers[0]["signs"] == [Sign(101, 10.0, False)]
    assert followers[1]["signs"] == [Sign(11, 5.0, True)]
    assert leader["names"] == ["flowdp-send-1", "flowdp-receive-1", "flowdp-send-2", "flowdp-receive-2"]
    for one in found:
        assert one["is_quiet"]  # the end of the links is that of the run
        assert one["error"] is None


def failure(rank: int) -> Any:
    machine = Machine()
    link = machine.link
    error = StepError("rank 2 failed: no such class", rank=2, device="cpu", indices=[4])
    if isinstance(link, LeaderLink):
        assert machine.next() == Exiting(2, "words")
        assert machine.next() == WorkerReady(2)  # said behind it
        link.relay(AbortGate("rank 2 failed"))
        machine.gate.abort("rank 2 failed")
    else:
        assert isinstance(link, FollowerLink)
        if rank == 1:
            machine.failures.add(error)
            link.send(Exiting(2, "words"))
            link.send(WorkerReady(2))
        assert machine.next() == AbortGate("rank 2 failed")
        # What falls down behind the first failure is not sent as one of its own.
        link.send(Failed("another one", (3,)))
    if rank == 0:
        assert {machine.next().error, machine.next().error} == {"another one"}
        link.relay(FINISH)
    elif rank:
        assert machine.next() == FINISH
    machine.tick()
    machine.gate.abort("rank 2 failed")
    aborted = machine.enter(0, 0)
    machine.channel.close()
    first = machine.failures.first
    assert first is not None
    return {
        "class": type(first).__name__,
        "text": str(first),
        "vars": {name: value for name, value in vars(first).items() if name != "__notes__"},
        "notes": getattr(first, "__notes__", []),
        "aborted": [type(one) for one in aborted],
    }


def test_the_first_failure_is_that_of_all_machines_and_named_once(tmp_path: Path) -> None:
    leader, origin, third = in_processes(failure, tmp_path, 3)
    for one in (leader, origin, third):
        assert one["class"] == "StepError"
        assert one["vars"] == {"rank": 2, "device": "cpu", "epoch": None, "step": None, "indices": (4,)}
        assert one["notes"] == []
        assert set(one["aborted"]) == {CollectiveAborted}
    assert origin["text"] == "rank 2 failed: no such class"
    assert leader["text"] == third["text"]
    assert leader["text"].startswith("machine 1 (")
    assert leader["text"].count("machine") == 1


def leaves(rank: int, who: int) -> Any:
    machine = Machine()
    machine.tick()
    if rank == who:
        machine.channel.close()
        return None
    fact = machine.next()
    machine.channel.close()
    return fact, str(machine.failures.first)


@pytest.mark.parametrize("who", [0, 1])
def test_a_machine_that_leaves_before_the_end_ends_the_run(tmp_path: Path, who: int) -> None:
    fact, text = in_processes(leaves, tmp_path, 2, who)[1 - who]
    assert text.startswith(f"machine {who} (")
    assert text.endswith(") has left the run before its end")
    assert isinstance(fact, _Orphaned if who == 0 else Failed)
    assert fact.error == f"MachineLostError: {text}"
    if who == 1:
        assert fact.ranks == (2,)


def loses(rank: int, folder: str) -> Any:
    machine = Machine()
    machine.tick()
    if rank == 1:
        os._exit(1)
    fact = machine.next()
    machine.channel.close()
    (Path(folder) / "found").write_bytes(pickle.dumps((fact, str(machine.failures.first))))
    os._exit(0)


@pytest.mark.posix
def test_a_lost_machine_takes_its_ranks_with_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="see what the processes wrote"):
        in_processes(loses, tmp_path, 2, str(tmp_path))
    fact, text = pickle.loads((tmp_path / "found").read_bytes())
    assert isinstance(fact, Failed)
    assert fact.ranks == (2,)
    assert "machine 1 (" in text
    assert f"was lost, or said nothing for {HANG_S:g} s" in text


# ---------------------------------------------------------------- pure
def follower(*ranks: int) -> tuple[Follower, list[Fact]]:
    sent: list[Fact] = []
    start = CoordinatorConfig(world_size=4, batches=12, epochs=1, machines=(4 - len(ranks), len(ranks)))
    return Follower(start, range(ranks[0], ranks[-1] + 1), sent.append), sent


def round_ended(global_step: int) -> RoundEnded:
    four = (1.0, 2.0, 3.0, 4.0)
    return RoundEnded(
        0, 1, 0, global_step, (1, 2, 3, 4), (8, 9, 10, 11), 0.5, 0.1, 9.0, four, four, four, 1.0, 1
    )


def test_a_follower_passes_facts_on_and_obeys_what_comes_back() -> None:
    machine, sent = follower(2, 3)
    assert machine.deadline_ms() is None
    assert machine.handle(WorkerReady(2), 0.0) == []
    assert sent == [WorkerReady(2)]
    ended = round_ended(48)
    assert machine.handle(ended, 1.0) == [ended]
    assert machine.global_step == 48
    assert machine.handle(Tick(), 1.0) == []  # machine 0 has a clock of its own
    end = DataEnded(0, 3, machine=1, machines=2)
    assert machine.handle(end, 1.0) == []
    assert sent == [WorkerReady(2), end]
    assert machine.phase is Phase.RUNNING
    assert machine.handle(FINISH, 2.0) == [FINISH]
    assert machine.phase is Phase.DONE


def test_a_follower_without_machine_0_ends_when_its_ranks_have_left() -> None:
    machine, _ = follower(2, 3)
    machine.handle(Exiting(2), 0.0)
    lost = _Orphaned("CollectiveError: machine 0 was lost")
    assert machine.handle(lost, 1.0) == [AbortGate(lost.error), Send(3, Leave(lost.error))]
    assert machine.phase is Phase.FAILING
    assert machine.handle(Exiting(3, "aborted"), 2.0) == [Finish(lost.error, True, 0, 0)]
    assert machine.phase is Phase.DONE


# ---------------------------------------------------------------- errors on their way
HERE = "machine 1 (b)"

ERRORS = [
    FlowdpError("it failed"),
    OptionError("it failed"),
    DataError("it failed", epoch=2, indices=[3, 4]),
    StepError("it failed", rank=3, device="cuda:1", epoch=1, step=7, indices=[5]),
    DeviceError("it failed"),
    OutOfDeviceMemory("it failed", rank=2),
    CollectiveError("it failed"),
    CollectiveAborted("it failed"),
    CollectiveTimeout("it failed"),
    MachineLostError("it failed"),
    MachineWaitsError("it failed"),
    StallError("it failed", ranks=["idle"], stacks={"flowdp-worker-0": "File ..."}),
    CheckpointError("it failed", path="a/b.ckpt", version=4),
    StateError("it failed", state={"a": 1}),
    ProtocolError("it failed", events=["one", "two"]),
]


def raised(error: BaseException) -> BaseException:
    def loss_of_the_user() -> None:
        raise error

    try:
        loss_of_the_user()
    except BaseException as caught:
        return caught
    raise AssertionError


def arrived(error: BaseException) -> BaseException:
    """The error as another machine has it."""
    sent: RemoteError = pickle.loads(pickle.dumps(sent_error(raised(error), HERE)))
    return sent.error(2)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_its_class_with_its_attributes(error: FlowdpError) -> None:
    there = arrived(error)
    assert type(there) is type(error)
    assert vars(there) == vars(error)
    assert str(there) == f"{HERE}: {error}"


def test_the_traceback_of_its_machine_is_the_cause() -> None:
    error = StepError("rank 3 failed", rank=3, device="cpu")
    error.__cause__ = ZeroDivisionError("division by zero")
    error.add_note("Then rank 4: the same")
    text = str(arrived(error).__cause__)
    assert "in loss_of_the_user\n    raise error" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "Then rank 4: the same" in text


def test_what_is_sent_on_names_the_machine_that_it_came_from() -> None:
    assert origin_of(ValueError()) is None
    there = arrived(MachineLostError("it failed"))
    assert origin_of(there) == 2
    assert sent_error(there, "machine 0").text == f"{HERE}: it failed"


def test_an_error_of_the_users_is_one_of_flowdp_with_its_text() -> None:
    class OwnError(Exception):
        """Not known on other machines."""

    there = arrived(OwnError("no such user"))
    assert type(there) is FlowdpError
    assert str(there) == f"{HERE}: OwnError: no such user"
    assert "in loss_of_the_user" in str(there.__cause__)


def test_an_error_that_cannot_be_pickled_keeps_its_text() -> None:
    there = arrived(StateError("the model does not take it", state=lambda: None))
    assert type(there) is FlowdpError
    assert str(there) == f"{HERE}: the model does not take it"
    assert "StateError" in str(there.__cause__)
