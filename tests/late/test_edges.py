"""Each edge between two streams is needed: without it, a scenario is wrong in one order at least.

An edge is a call in flowdp's source by which something waits, or marks what is waited for, or tells the
allocator of a use. All are found in the source, so a new one needs a row here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest

from tests.late.device import Site
from tests.late.doors import DOORS
from tests.late.edges import edges
from tests.late.feeds import FEEDS
from tests.late.means import MEANS
from tests.late.orders import LATE, Order, first
from tests.late.runs import Case
from tests.late.scenario import Scenario, faults_in

DOOR = {door.name: door for door in (*DOORS, *FEEDS, *MEANS)}

Trial = tuple[Scenario, Order]

STREAMED = Case("cadence", "nccl", (0, 1), "streamed")
MADE = Case("sync", "local", (0, 1), "made")
GATHERED = Case("sync", "local", (0, 0), "gathered")
EVALUATED = Case("sync", "local", (0, 0), evaluated="made")
EXACT = Case("exact", "local", (0, 0), "streamed")
UNLIKE = Case("exact", "local", (0, 1), "streamed", are_unlike=True)
CLIPPED = Case("exact", "local", (0, 1), options={"max_grad_norm": 0.1})


def late(name: str) -> list[Trial]:
    return [(DOOR[name], LATE)]


HOST = late("rounds of in_host on (0, 1)")
CARD = late("rounds of DeviceMean on (0, 0)")
BLOCKS = [(DOOR["blocks between cards"], order) for order in (LATE, first("aside"))]
SNAPSHOTS = late("snapshots on (0, 0)")
THREADS = late("threads, one device")
WHOLE = late("windows of whole batches")
LOOP = late("sums of NCCL")
WATCHED = late("setup, the replica watched")
OFTEN = 20
"""Trials of a scenario that is wrong only where one thread is ahead of another; one has to be."""

REUSED: list[Trial] = [(STREAMED, first("copy")), (STREAMED, LATE), (EXACT, first("copy"))] * OFTEN
MADE_BATCHES: list[Trial] = [(MADE, LATE), (EVALUATED, LATE)] * OFTEN

CAUGHT: dict[str, Sequence[Trial]] = {
    "checkpoint/host_copies.py HostCopies.wait: self._copied.synchronize()": late("resumed, sync"),
    "checkpoint/host_copies.py HostCopies.__init__: self._copied.record(blocks.lane.compute)": late(
        "resumed, sync"
    ),
    "collective/async_mean.py SnapshotMean.take: "
    "self._copied[rank].record(self._lanes[rank].compute)": SNAPSHOTS,
    "collective/async_mean.py SnapshotMean.average: start.record(lane.comm)": SNAPSHOTS,
    "collective/async_mean.py SnapshotMean.average: end.record(lane.comm)": SNAPSHOTS,
    "collective/async_mean.py SnapshotMean.apply: self._applied[rank].record(lane.compute)": SNAPSHOTS,
    "collective/async_mean.py SnapshotMean._wait_for: lane.comm.wait_event(self._applied[rank])": SNAPSHOTS,
    "collective/async_mean.py SnapshotMean._wait_for: lane.comm.wait_event(self._copied[rank])": SNAPSHOTS,
    "collective/host.py HostMean.prepare: self._ready[rank].record(lane.compute)": HOST,
    "collective/host.py HostMean.prepare: lane.comm.wait_event(self._ready[rank])": HOST,
    "collective/host.py HostMean.prepare: copies.down[1].synchronize()": HOST,
    "collective/host.py HostMean._bring: lane.compute.wait_event(copies.up[1])": [
        (DOOR["rounds of in_host on (0, 1)"], first("compute"))
    ],
    "collective/host.py HostMean.average.read: copies.up[1].synchronize()": HOST,
    "collective/host.py _copy: start.record(lane.comm)": HOST,
    "collective/host.py _copy: end.record(lane.comm)": HOST,
    "collective/local.py _Ahead.begin: self._begun.record(self._lane.comm)": BLOCKS,
    "collective/local.py _Ahead.begin: self._in.wait_event(self._begun)": BLOCKS,
    "collective/local.py _Ahead.fetch: self._in.wait_event(self._summed[slot])": BLOCKS,
    "collective/local.py _Ahead.fetch: self._fetched[slot].record(self._in)": BLOCKS,
    "collective/local.py _Ahead.await_fetch: self._lane.comm.wait_event(self._fetched[slot])": BLOCKS,
    "collective/local.py _Ahead.send: self._summed[slot].record(self._lane.comm)": BLOCKS,
    "collective/local.py _Ahead.send: self._out.wait_event(self._summed[slot])": BLOCKS,
    "collective/local.py _Ahead.end: self._sent.record(self._out)": BLOCKS,
    "collective/local.py _Ahead.end: self._lane.comm.wait_event(self._sent)": BLOCKS,
    "collective/local.py DeviceMean._meet: done.record(lane.comm)": [(CLIPPED, LATE)],
    "collective/local.py DeviceMean._meet: lane.comm.wait_event(done)": [(CLIPPED, LATE)],
    "collective/local_group.py _Rendezvous.wait: stream.wait_event(mark)": THREADS,
    "collective/local_group.py _Rendezvous.put: mark.record(lane.current())": THREADS,
    "collective/local_group.py _Rendezvous._enqueue: lane.comm.wait_event(mark)": THREADS,
    "collective/local_group.py _Rendezvous._enqueue: mark.record(lane.comm)": THREADS,
    "collective/nccl_loop.py NcclLoop._launch: ready.record(stream)": LOOP,
    "collective/nccl_loop.py NcclLoop._launch: self._lanes[0].comm.wait_event(ready)": LOOP,
    "collective/nccl_loop.py NcclLoop._launch: self._start.record(self._lanes[0].comm)": [
        (DOOR["sums of NCCL"], first("comm"))
    ],
    "collective/nccl_loop.py NcclLoop._launch: lane.comm.wait_event(self._start)": [
        (DOOR["sums of NCCL"], first("comm"))
    ],
    "collective/nccl_loop.py NcclLoop._launch: done.record(lane.comm)": LOOP,
    "collective/nccl_loop.py NcclLoop._launch: current.wait_event(done)": LOOP,
    "collective/nccl_loop.py NcclLoop._launch: lane.compute.wait_event(done)": late("freed rows of NCCL"),
    "collective/on_streams.py StreamedMean.prepare: "
    "self._ready[rank].record(self._lanes[rank].compute)": CARD,
    "collective/on_streams.py StreamedMean.launch: comm.wait_event(self._ready[member])": CARD,
    "collective/on_streams.py StreamedMean.launch: marks.start[worker].record(comm)": CARD,
    "collective/on_streams.py StreamedMean.launch: marks.done[worker].record(self._lanes[worker].comm)": CARD,
    "collective/on_streams.py StreamedMean.launch: marks.arrived[reporter].record(lane.comm)": CARD,
    "collective/on_streams.py StreamedMean.average: "
    "self._lanes[rank].compute.wait_event(marks.done[writer])": [
        (DOOR["rounds of DeviceMean on (0, 0)"], first("compute"))
    ],
    "collective/on_streams.py StreamedMean._read: marks.done[writer].synchronize()": CARD,
    "collective/on_streams.py StreamedMean._read: marks.arrived[reporter].synchronize()": CARD,
    "data/staging.py CopySpans.__init__: self._passed.synchronize()": late("spans of copies"),
    "data/staging.py CopySpans._land: end.synchronize()": late("timed"),
    "data/staging.py CopySpans._mark: event.record(self._lane.copy)": late("spans of copies"),
    "data/prefetch.py PrefetchFeed.take: self._lane.compute.wait_event(fetched.slot.ready)": [
        (STREAMED, LATE)
    ],
    "data/prefetch.py PrefetchFeed.release: slot.free.record(self._lane.compute)": REUSED,
    "data/prefetch.py Slots.give_back: self.lane.copy.wait_event(slot.free)": late(
        "a ring that gives a slot up"
    ),
    "data/prefetch.py PrefetchFeed._fill: self._lane.copy.wait_event(slot.free)": REUSED,
    "data/prefetch.py PrefetchFeed._fill: slot.ready.record(self._lane.copy)": [(STREAMED, LATE)],
    "data/resident.py ResidentData.__init__: self.copied.record(lane.copy)": late("steered"),
    "data/resident.py ResidentFeed.__init__: lane.await_caller()": late("resident by hand"),
    "data/resident.py ResidentFeed.__init__: lane.compute.wait_event(data.copied)": late("steered"),
    "data/resident.py ResidentFeed.__init__: keep_for(lane.compute, data.tensors)": late("resident, closed"),
    "data/moving.py keep_for: leaf.record_stream(stream)": MADE_BATCHES,
    "data/moving.py own_memory: keep_for(lane.compute, tensors_of(moved))": [(MADE, LATE)] * OFTEN,
    "data/moving.py await_dataset: lane.await_default(stream, device)": MADE_BATCHES,
    "data/staging.py Staging._lent: copied.record(self._lane.copy)": [
        *late("staged"),
        *[(GATHERED, LATE)] * OFTEN,
    ],
    "data/staging.py Staging._lent: copied.synchronize()": late("staged"),
    "data/tensor_source.py TensorSource.for_all_streams: "
    "device_module(device).current_stream(device).synchronize()": late("shared batches, made late"),
    "data_parallel/loader.py Epoch.__iter__: lane.await_caller(lane.copy)": late(
        "batches of a list, made late"
    ),
    "data_parallel/loader.py Epoch._piece: lane.await_caller(lane.copy)": late(
        "batches of a loader, made late"
    ),
    "data_parallel/loader.py Epoch._piece: copied.record(lane.copy)": WHOLE,
    "data_parallel/loader.py Epoch._piece.arrive: stream.wait_event(copied)": late(
        "windows of whole batches"
    ),
    "data_parallel/loader.py Epoch._piece.arrive: keep_for(stream, tensors_of(there))": late(
        "a window that is let go of"
    ),
    "data_parallel/replicas.py StreamOrder.begin: asked.record(stream)": WATCHED,
    "data_parallel/replicas.py StreamOrder.begin: home.aside(rank).wait_event(self._asked[0])": late(
        "windows of whole batches"
    ),
    "data_parallel/replicas.py StreamOrder.end: computed.record(lane.compute)": WATCHED,
    "data_parallel/replicas.py StreamOrder.end: here[rank].wait_event(computed)": WATCHED,
    "device/stopwatch.py Stopwatch.__init__: base.record(lane.current())": late("laps"),
    "device/stopwatch.py Stopwatch.running: start.record(lane.current())": late("laps"),
    "device/stopwatch.py Stopwatch.running: stop.record(lane.current())": late("laps"),
    "device/stopwatch.py Stopwatch.take_ms: stop.synchronize()": late("laps"),
    "device/streams.py Lane.drain: mark.record(stream)": late("resident by hand"),
    "device/streams.py Lane.drain: mark.synchronize()": late("resident by hand"),
    "device/streams.py Lane._await: mark.record(other)": late("resident by hand"),
    "device/streams.py Lane._await: stream.wait_event(mark)": late("resident by hand"),
    "engine/shared_batches.py to_lane: keep_for(lane.compute, tensors_of(moved))": [(EVALUATED, LATE)]
    * OFTEN,
    "engine/clocks.py wait_for: event.synchronize()": late("steered"),
    "engine/clocks.py DeviceClock.mark: event.record(self._lane.compute)": late("steered"),
    "engine/nan_guard.py NanGuard.judge: self._passed.record(self._lane.compute)": late("not finite") * OFTEN,
    "replica/factories.py build_models: lane.await_caller()": late("models of build_models"),
    "replica/joint_step.py JointStep.step: self._given.record(replica.lane.compute)": [(UNLIKE, LATE)]
    * OFTEN,
    "replica/joint_step.py JointStep.step: replica.lane.compute.wait_event(self._given)": [(UNLIKE, LATE)]
    * OFTEN,
    "replica/replica.py _after: mark.record(other.compute)": late("copied replicas"),
    "replica/replica.py _after: lane.compute.wait_event(mark)": late("copied replicas"),
    "trainer/run.py Run.paused: replica.lane.await_caller()": late("steered"),
}
"""Each edge, and scenarios, at least one of which is wrong without it.

Several where it is chance whether another wait of the host comes before: whether a report is due, say, or how
far the prefetch thread is.
"""

BEGIN = "data_parallel/replicas.py StreamOrder.begin: "
END = "data_parallel/replicas.py StreamOrder.end: "

TWICE: dict[str, tuple[str, Sequence[Trial], str]] = {
    BEGIN + "lane.compute.wait_event(self._asked[0])": (
        BEGIN + "lane.compute.wait_event(self._asked[rank])",
        late("setup on one device"),
        "on one device both are marks of one stream; on another, a rank touches the first device's memory by "
        "copies alone, which `aside` takes part in",
    ),
    END + "carried.record(home.aside(rank))": (
        END + "here[0].wait_event(computed)",
        late("setup"),
        "all work on `aside` belongs to copies with the rank's `compute`, which waits for it",
    ),
    END + "here[0].wait_event(carried)": (
        END + "here[0].wait_event(computed)",
        late("setup"),
        "as the row above",
    ),
    END + "here[0].wait_event(computed)": (
        END + "here[0].wait_event(carried)",
        late("setup"),
        "torch lets `aside` wait for every copy that `compute` makes to the first device",
    ),
}
"""Edges for which another one stands in: that one, scenarios that are wrong without both, and the reason."""

REDUNDANT = {
    "device/stopwatch.py Stopwatch.__init__: base.synchronize()": "it is for the time of the host",
    "collective/async_mean.py SnapshotMean.apply: lane.compute.wait_event(self._mean_ready)": (
        "the helper has waited for the mean before it tells anybody of it"
    ),
    "collective/async_mean.py SnapshotMean.average: end.synchronize()": (
        "the host reads the squares behind it, and waits for the mean by that, too; it is for the time"
    ),
    "collective/async_mean.py SnapshotMean.average: other.comm.synchronize()": (
        "the mean lies in pageable memory of the host: torch itself waits for a copy out of it"
    ),
    BEGIN + "lane.compute.wait_event(self._asked[rank])": (
        "each call sends the parameters, and torch lets the first device's stream wait for the other's "
        "before a copy; so does NCCL"
    ),
    "engine/clocks.py DeviceClock.settle: last.record(self._lane.compute)": (
        "a time alone: from here on the next step's wait for data counts"
    ),
}
"""Edges without which no number is wrong, and the reason."""

CAPTURED = "captured steps, which tests/fake_graphs.py has"

ELSEWHERE = {
    "data_parallel/replicas.py Replicas.call: "
    "keep_for(lane.compute, list(tensors_of(given)))": "a race of two threads: tests/data_parallel has it",
    "device/cuda_graphs.py GraphPool.capture: self._before.record(here)": CAPTURED,
    "device/cuda_graphs.py GraphPool.capture: lane.capturing.wait_event(self._before)": CAPTURED,
    "device/cuda_graphs.py GraphPool.capture: self._behind.record(lane.capturing)": CAPTURED,
    "device/cuda_graphs.py GraphPool.capture: here.wait_event(self._behind)": CAPTURED,
    "replica/joint_step.py JointStep.step: self._given.synchronize()": "a card beside a rank on the CPU",
}
"""Edges to which no run here comes, and those that do."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leave out the messages of runs that fail, as they are meant to."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def is_wrong(trial: Trial, removed: frozenset[Site]) -> bool:
    """Whether a scenario goes wrong without these edges.

    Numbers that are read too early are any numbers: what flowdp or the scenario makes of them may raise any
    error, the root of a negative square for one. With all edges a scenario raises none, see below.
    """
    try:
        return bool(faults_in(*trial, removed))
    except Exception:
        return True


def test_every_edge_of_the_source_has_a_row() -> None:
    listed = [*CAUGHT, *TWICE, *REDUNDANT, *ELSEWHERE]
    assert len(listed) == len(set(listed))
    assert set(listed) == edges().keys()


# A run that ends by such numbers before it is joined tells of them from its thread, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("edge", CAUGHT)
def test_without_an_edge_a_scenario_is_wrong(edge: str) -> None:
    assert any(is_wrong(trial, edges()[edge]) for trial in CAUGHT[edge])


@pytest.mark.parametrize("edge", TWICE)
def test_without_an_edge_and_the_one_that_stands_in_a_scenario_is_wrong(edge: str) -> None:
    other, trials, _ = TWICE[edge]
    assert not any(is_wrong(trial, edges()[edge]) for trial in trials)
    assert any(is_wrong(trial, edges()[edge] | edges()[other]) for trial in trials)


SCENARIOS = {
    f"{scenario}, {order}": (scenario, order)
    for trials in CAUGHT.values()
    for scenario, order in trials
    if isinstance(scenario, Case) or order is not LATE  # `test_doors.py` has all doors in that order
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_with_all_edges_the_scenarios_are_right(name: str) -> None:
    assert faults_in(*SCENARIOS[name]) == []
