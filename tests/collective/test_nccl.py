"""The mean by NCCL: what it needs, its launches, its end. Numbers and edges are in test_on_streams.py."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flowdp.collective import communicators, nccl
from flowdp.collective.nccl import load
from flowdp.device.streams import QUIET
from flowdp.errors import CollectiveError
from tests.collective.fake_nccl import FakeNccl, NcclError
from tests.collective.fake_world import FakeWorld, nccl_mean
from tests.collective.test_communicators import wait_for_the_helper
from tests.limits import HANG_S


@pytest.fixture
def installed(monkeypatch):
    """A machine on which everything fits: torch for CUDA 13, and cupy with the same NCCL."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cupy, cuda, module = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nccl")
    cupy.cuda, cuda.nccl = cuda, module
    module.available = True
    for made in (cupy, cuda, module):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return SimpleNamespace(cupy=cupy, cuda=cuda, nccl=module)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda patch, nccl: patch.setenv("CUDA_LAUNCH_BLOCKING", "1"), "CUDA_LAUNCH_BLOCKING is set"),
        (lambda patch, nccl: patch.setattr(torch.version, "cuda", None), "without CUDA"),
        (
            lambda patch, nccl: patch.setitem(sys.modules, "cupy", None),
            r"pip install 'flowdp\[cuda13\]' \(cupy-cuda13x",
        ),
        (lambda patch, nccl: patch.setattr(nccl, "available", False), "pip install nvidia-nccl-cu13"),
    ],
)
def test_what_is_missing_is_named(installed, monkeypatch, change, said):
    assert load() is installed.nccl
    change(monkeypatch, installed.nccl)
    with pytest.raises(CollectiveError, match=said):
        load()


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(nccl_mean, (0, 1, 2))


def fake(world: FakeWorld) -> FakeNccl:
    return world.mean._nccl


# ---------------------------------------------------------------- rounds without ranks that left
def test_the_others_get_communicators_of_their_own(world, monkeypatch):
    """All old ones are aborted when the last mean is done, before the new ones are made."""
    nccl, order = fake(world), []
    world.read(world.hold([1, 2, 3]))
    opened = len(nccl.groups)
    for rank, lane in enumerate(world.lanes):
        drained = lambda rank=rank, real=lane.drain: (order.append(("drained", rank)), real())  # noqa: E731
        monkeypatch.setattr(lane, "drain", drained)
    comm = nccl.NcclCommunicator
    abort, make = comm.abort, comm.__init__
    monkeypatch.setattr(comm, "abort", lambda own: (order.append(("aborted", own.ndev)), abort(own))[1])

    def made(own, ndev, name, rank):
        order.append(("made", ndev, QUIET.locked(), world.cuda.current_stream()))
        make(own, ndev, name, rank)

    monkeypatch.setattr(comm, "__init__", made)
    world.gate.leave(0)
    world.read(world.hold([9, 2, 3], ranks=[1, 2]))
    assert order[:2] == [("drained", 1), ("drained", 2)]
    assert order[2:5] == [("aborted", 3)] * 3
    assert order[-2:] == [("made", 2, True, world.lanes[rank].comm) for rank in (1, 2)]
    # Two checks of the communicators, and the mean: all without other allocations meanwhile.
    assert [is_quiet for is_quiet, _ in nccl.groups[opened:]] == [True] * 3
    order.clear()
    world.read(world.hold([9, 2, 3], ranks=[1, 2]))
    assert order == []
    assert nccl.abused == []
    assert not QUIET.locked()
    world.mean.close()
    assert sorted(nccl.destroyed) == [0, 1]


def test_one_that_is_left_alone_has_no_communicator(world):
    nccl = fake(world)
    world.gate.leave(0)
    world.gate.leave(2)
    made = len(nccl.groups)
    world.read(world.hold([1, 2, 3], ranks=[1]))
    assert sorted(nccl.aborted) == [0, 1, 2]
    world.mean.close()
    assert (len(nccl.groups), nccl.destroyed, nccl.abused) == (made, [], [])


def remade(world: FakeWorld, monkeypatch: pytest.MonkeyPatch, doing: Callable[[], object]) -> list[object]:
    """A round of ranks 0 and 2, with an action while NCCL makes communicators for them."""
    real = communicators.CommunicatorSetup.wait

    def wait(opening, *limits):
        doing()
        return real(opening, *limits)

    monkeypatch.setattr(communicators.CommunicatorSetup, "wait", wait)
    world.gate.leave(1)
    return world.hold([1, 0, 2], ranks=[0, 2])


def test_a_run_that_ends_meanwhile_leaves_no_communicator(world, monkeypatch):
    errors = remade(world, monkeypatch, world.mean.abort)
    assert any("aborted or closed" in str(error) for error in errors)
    assert sorted(fake(world).aborted) == [0, 0, 1, 1, 2]
    assert fake(world).abused == []
    assert not QUIET.locked()


def test_no_communicator_is_made_for_a_run_that_has_ended(world):
    world.mean.abort()
    opened = len(fake(world).groups)
    world.gate.leave(1)
    errors = world.hold([1, 0, 2], ranks=[0, 2])
    assert any("aborted or closed" in str(error) for error in errors)
    assert (sorted(fake(world).aborted), len(fake(world).groups)) == ([0, 1, 2], opened)


@pytest.mark.parametrize("what", ["wrong", "hangs", "full"])
def test_where_that_fails_the_round_does(world, monkeypatch, what):
    said = {
        "wrong": "gives rank 0 wrong sums",
        "hangs": "did not make its communicators for cuda:0, cuda:2 within 0.01 s",
        "full": "no room for NCCL beside the replicas; backend='local' does without: CUDA out of memory",
    }[what]

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def now():
        if what == "full":
            monkeypatch.setattr(communicators, "_stand_in", full)
        fake(world).broken = what == "wrong"
        fake(world).hangs = "make" if what == "hangs" else None
        fake(world).wake.clear()

    monkeypatch.setattr(communicators, "REMAKING_S", 0.01 if what == "hangs" else 30.0)
    errors = remade(world, monkeypatch, now)
    fake(world).wake.set()
    wait_for_the_helper()
    assert any(
        f"rank 1 left, and NCCL does not work for the others alone: {'NCCL' if what != 'full' else 'no room'}"
        in str(e)
        and said in str(e)
        for e in errors
    )
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert fake(world).abused == []
    assert not QUIET.locked()


# ---------------------------------------------------------------- rounds


def test_a_round_is_one_group_that_is_launched_while_it_is_quiet(world):
    opened = len(fake(world).groups)
    for _ in range(3):
        world.read(world.hold([1, 2, 3], drift=True))
    groups = fake(world).groups[opened:]
    assert [is_quiet for is_quiet, _ in groups] == [True] * 3
    flats = world.replicas[0].flats
    sizes = [size for flat in flats for size in (flat.split, flat.memory.numel() - flat.split) if size]
    assert all(counts == [*sizes, 2] for _, counts in groups)
    assert not QUIET.locked()


def test_what_nccl_refuses_is_an_error_of_the_round(world, monkeypatch):
    def refuse(*_):
        raise NcclError("unhandled cuda error")

    monkeypatch.setattr(type(world.mean._comms._comms[0]), "allReduce", refuse)
    errors = world.hold([1, 2, 3])
    said = (
        "could not sum the replicas, which are scaled already and not to be used any more: NcclError: unhan"
    )
    assert any(said in str(error) for error in errors)
    assert all(isinstance(error, CollectiveError) for error in errors)


def test_an_abort_reaches_every_communicator_once_and_ends_it(world):
    fake(world).wake.set()
    world.mean.abort()
    world.mean.abort()
    assert sorted(fake(world).aborted) == [0, 1, 2]
    errors = world.hold([1, 2, 3])
    assert any("aborted or closed" in str(error) for error in errors)
    world.mean.close()
    assert fake(world).destroyed == []


@pytest.mark.parametrize("is_quiet", [True, False])
def test_an_abort_waits_for_a_launch_but_not_for_ever(world, monkeypatch, is_quiet):
    fake(world).wake.set()
    order = []

    class Quiet:
        def acquire(self, timeout):
            order.append((0 < timeout < 10, sorted(fake(world).aborted)))
            return is_quiet

        def release(self):
            order.append(sorted(fake(world).aborted))

    monkeypatch.setattr(communicators, "QUIET", Quiet())
    world.mean.abort()
    assert order == [(True, []), [0, 1, 2]][: 1 + is_quiet]
    assert sorted(fake(world).aborted) == [0, 1, 2]


def test_an_abort_releases_a_launch_that_hangs(world, monkeypatch):
    monkeypatch.setattr(communicators, "ABORT_S", 0.05)
    fake(world).hangs = "sum"
    hung = threading.Thread(target=world.hold, args=([1, 2, 3],))
    hung.start()
    assert fake(world).hanging.wait(HANG_S)
    world.mean.abort()
    hung.join(HANG_S)
    assert not hung.is_alive()
    assert not QUIET.locked()


def test_closing_destroys_when_the_streams_are_done(world, monkeypatch):
    order = []
    for lane in world.lanes:
        monkeypatch.setattr(lane, "drain", lambda: order.append("drained"))
    monkeypatch.setattr(type(world.mean._comms._comms[0]), "destroy", lambda comm: order.append(comm.rank))
    world.mean.close()
    assert order == ["drained"] * 3 + [0, 1, 2]
    world.mean.close()
    assert order[6:] == ["drained"] * 3


def test_closing_a_faulty_device_aborts_all(world, monkeypatch):
    """Otherwise the garbage collector would destroy them at any time."""

    def fault():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(world.lanes[1], "drain", fault)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world.mean.close()
    assert (sorted(fake(world).aborted), fake(world).destroyed) == ([0, 1, 2], [])
    world.mean.abort()
    assert fake(world).abused == []


def test_an_interrupted_close_aborts_the_rest(world, monkeypatch):
    real = type(world.mean._comms._comms[0]).destroy

    def destroy(comm):
        real(comm)
        if comm.rank == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(world.mean._comms._comms[0]), "destroy", destroy)
    with pytest.raises(KeyboardInterrupt):
        world.mean.close()
    assert (fake(world).destroyed, fake(world).aborted) == ([0, 1], [2])
    assert not QUIET.locked()


def test_what_a_sum_needs_is_allocated_while_nobody_launches(monkeypatch):
    seen = []
    real = nccl.Side
    monkeypatch.setattr(nccl, "Side", lambda *given: seen.append(QUIET.locked()) or real(*given))
    FakeWorld(nccl_mean, (0, 1))
    assert seen == [True] * 2


@pytest.mark.parametrize("where", [nccl, communicators])
def test_a_full_device_is_an_error_of_the_collective(monkeypatch, where):
    """On this error backend="auto" falls back to another one."""

    def side(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    monkeypatch.setattr(where, "Side", side)
    with pytest.raises(CollectiveError, match=r"no room for NCCL .*3\.00 GiB") as caught:
        FakeWorld(nccl_mean, (0, 1))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    wait_for_the_helper()
    assert not QUIET.locked()


@pytest.mark.parametrize("what", ["make", "allocate", "sum"])
def test_what_fails_keeps_no_memory(monkeypatch, what):
    """A fallback needs the memory, and cannot wait for the garbage collector."""
    made = []

    def refuse(*_, **__):
        raise torch.OutOfMemoryError if what == "allocate" else NcclError("unhandled cuda error")

    def side(*given, real=communicators.Side):
        own = real(*given)
        made.append(weakref.ref(own))
        return own

    monkeypatch.setattr(nccl, "Side", side)
    monkeypatch.setattr(communicators, "Side", side)
    at = {
        "make": (FakeNccl, "get_unique_id"),
        "allocate": (communicators, "_stand_in"),
        "sum": (communicators, "sum_replicas"),
    }
    monkeypatch.setattr(*at[what], refuse)
    with no_collection():
        with suppress(CollectiveError):
            FakeWorld(nccl_mean, (0, 1))
        wait_for_the_helper()
        assert [own() for own in made] == [None] * (4 if what == "sum" else 2)


@contextmanager
def no_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_drift_of_replicas_that_are_equal_is_not_below_zero(world):
    world.hold([1, 1, 1])
    results = world.read(world.hold([5, 3, 9], drift=True))
    assert {result.drift for result in results} == {results[0].drift}
    assert 0.0 <= results[0].drift < 1e-3
    # The effect of rounding on equal replicas.
    assert world.mean._drift(0, world.outcomes[0], [[0.5, 0.4999, 1.0]]) == (0.0, 1.0)


def test_drift_of_a_diverged_replica_is_not_a_number(world):
    world.modules[1][0].weight.data[0, 0] = float("nan")
    assert all(result.drift != result.drift for result in world.read(world.hold([1, 1, 1], drift=True)))
