"""Members of a quorum: one answer of the lighthouse, and the same conclusion in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch.distributed as dist

from flowdp.errors import CollectiveError, OptionError
from flowdp.network import quorum as module
from flowdp.network.quorum import Member, Quorum, World, check_place, next_world
from tests.limits import HANG_S

ONE, TWO, THREE = (Member(name, f"host-{name}", f"{name}:1") for name in "abc")


def world(*members: Member) -> World:
    return World("w", members)


# ---------------------------------------------------------------- one answer
@pytest.mark.parametrize(
    ("members", "least", "first", "begins"),
    [
        ([ONE], 1, 1, True),
        ([ONE], 1, 2, False),
        ([ONE], 2, 1, True),  # the first start waits for `first` alone
        ([ONE, TWO], 1, 3, False),
        ([replace(ONE, lives=1), TWO], 2, 3, True),
        ([replace(ONE, lives=1)], 2, 1, False),
        ([ONE, replace(TWO, world="v")], 1, 1, False),
        ([ONE, replace(TWO, failed="ValueError: no")], 1, 1, False),
    ],
)
def test_a_world_begins_where_all_wait(members: list[Member], least: int, first: int, begins: bool) -> None:
    assert next_world(world(*members), least, first) is begins


def test_what_is_said_is_read() -> None:
    said = Member("a", "h", "h:1", world="w", was="v", lives=3, failed="no")
    assert Member("a", store="h:1", **said.said()) == said


@pytest.mark.parametrize(
    ("answer", "trouble", "text"),
    [
        (None, "", "it waits for other machines"),
        (world(ONE), "refused", "does not answer: refused"),
        (world(ONE, TWO), "", r"of 7 machines 2 came \(host-a, host-b\)"),
        (world(replace(ONE, lives=1)), "", r"of 4 machines 1 came \(host-a\)"),
        (world(ONE, replace(TWO, world="v")), "", "host-b still trains with machines that are lost"),
    ],
)
def test_why_no_world_came_about(answer: World | None, trouble: str, text: str) -> None:
    with pytest.raises(CollectiveError, match=text):
        raise CollectiveError(module._late(answer, trouble, 4, 7, 5.0))


# ---------------------------------------------------------------- the place
def test_the_lighthouse_is_named_by_argument_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://there:1")
    assert check_place(None) == "http://there:1"
    assert check_place("http://here:2") == "http://here:2"
    with pytest.raises(OptionError, match="must be an address such as"):
        check_place("host:29510")
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE")
    with pytest.raises(OptionError, match=r"start one, torchft_lighthouse --min_replicas 1"):
        check_place(None)


def test_a_process_of_another_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(OptionError, match="default group itself"):
        check_place("http://here:2")


# ---------------------------------------------------------------- real lighthouses
@pytest.fixture
def joined() -> Iterator[Callable[..., Quorum]]:
    """Makes members of one quorum."""
    pytest.importorskip("torchft", reason="torchft is not installed: pip install 'flowdp[torchft]'")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=1000
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    with ExitStack() as ends:

        def join(least: int = 1, first: int = 1, heard: Callable[[World], None] = lambda _: None) -> Quorum:
            made = Quorum(address, least, first, "127.0.0.1", heard)
            ends.callback(made.close)
            return made

        yield join
    lighthouse.shutdown()


def together(members: list[Quorum], timeout_s: float = HANG_S) -> list[Any]:
    """Worlds for which all members wait at once, or the errors that they had."""

    def form(one: Quorum) -> Any:
        try:
            return one.form(timeout_s, lambda _: None)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(form, members))


def test_all_members_begin_the_same_world(joined: Callable[..., Quorum]) -> None:
    members = [joined(first=3) for _ in range(3)]
    first = together(members)
    assert first[0] == first[1] == first[2]
    assert sorted(first[0].rank_of(one.me.name) for one in members) == [0, 1, 2]
    assert all(one.me.world == first[0].name for one in members)
    second = together(members)  # nobody is gone, and it is another world all the same
    assert second[0] == second[1] == second[2]
    assert second[0].name != first[0].name


def test_the_others_go_on_without_one_that_has_left(joined: Callable[..., Quorum]) -> None:
    members = [joined(first=3) for _ in range(3)]
    together(members)
    members[1].close()
    one, other = together([members[0], members[2]])
    assert one == other
    assert one.names == sorted([members[0].me.name, members[2].me.name])


def test_a_machine_that_waits_is_heard_and_begins_with_the_others(joined: Callable[..., Quorum]) -> None:
    heard: SimpleQueue[World] = SimpleQueue()
    trains = joined(heard=heard.put)
    together([trains])
    comes = joined()
    seen: SimpleQueue[World] = SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        # Its own patience is short, and those that train are waited for all the same.
        coming = pool.submit(comes.form, 5.0, seen.put)
        while not any(
            one.name == comes.me.name and not one.world for one in heard.get(timeout=HANG_S).members
        ):
            pass
        while not any(one.world == trains.me.world for one in seen.get(timeout=HANG_S).members):
            pass
        assert not coming.done()
        assert together([trains]) == [coming.result(HANG_S)]


def test_an_error_of_one_ends_the_others(joined: Callable[..., Quorum]) -> None:
    members = [joined(first=2) for _ in range(2)]
    together(members)
    members[0].tell(ValueError("no such file"))
    (error,) = together([members[1]])
    assert str(error) == "127.0.0.1 has failed: ValueError: no such file"


def test_a_quorum_that_is_too_small_is_given_up(joined: Callable[..., Quorum]) -> None:
    (error,) = together([joined(2, 2)], timeout_s=0.5)
    assert "of 2 machines 1 came (127.0.0.1)" in str(error)


def test_a_lighthouse_that_is_not_there(
    joined: Callable[..., Quorum], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 1.0)
    with pytest.raises(CollectiveError, match=r"http://127.0.0.1:9 does not answer within 1 s.*start it"):
        Quorum("http://127.0.0.1:9", host="127.0.0.1")


def test_a_host_name_that_is_none(joined: Callable[..., Quorum], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 1.0)
    with pytest.raises(OptionError, match=r"host='no\.such\.host\.invalid' is no name by which"):
        Quorum("http://127.0.0.1:9", host="no.such.host.invalid")
