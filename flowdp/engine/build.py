"""Composition of a run's engine: every object is made whole, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial

from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.on_streams import StreamedMean
from flowdp.collective.outer import OuterMomentum
from flowdp.collective.select import open_collective
from flowdp.data.open_feeds import open_feeds
from flowdp.device.compiled import make_room
from flowdp.device.cores import pool_sizes, thread_budget
from flowdp.device.memory import keep_memory
from flowdp.device.process_tuning import as_tuning
from flowdp.engine.coordinator_thread import EngineParts
from flowdp.engine.diagnostics import Diagnostics
from flowdp.engine.engine import Engine
from flowdp.engine.machine_links import Follower, FollowerLink, LeaderLink, Posts
from flowdp.engine.parts import Mail, MeetingPoint, RankParts, Services
from flowdp.engine.rank_pool import RankPool
from flowdp.engine.worker_thread import Worker
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.event_log import EventLog
from flowdp.machine.policies import ROUNDS
from flowdp.options import Backend, FailureOptions, OuterOptions, RuntimeOptions
from flowdp.policy.stall import StallWatch
from flowdp.protocol.messages import Order
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.joint_step import JointStep, SpanStep, cut_gradients
from flowdp.replica.replica import Replica
from flowdp.threads.gate import Gate
from flowdp.threads.inbox import Inbox

__all__ = ["build_engine"]

Link = LeaderLink | FollowerLink | None
"""Link to the other machines; None: there are none."""


def build_engine(
    config: CoordinatorConfig,
    replicas: Sequence[Replica],
    services: Services,
    failures: FailureOptions,
    runtime: RuntimeOptions,
    outer: OuterOptions | None = None,
) -> Engine:
    """Build all objects of a run's threads; none is started.

    Args:
        config: The run, for its coordinator.
        replicas: One per rank of this machine, equal.
        services: What the threads share; closed at the end of the run.
        failures: Errors, stalls and NaNs: which of them end the run.
        runtime: Use of devices and process.
        outer: The outer step of the means; None: there is none.

    Raises:
        CollectiveError: NCCL was asked for and does not work here.
        DeviceError: The dataset could not be brought to a device.
    """
    make_room(len(replicas))
    inboxes = [Inbox[Mail]() for _ in replicas]
    link, machine, posts = _open_link(config, services, inboxes)
    event_log = EventLog()
    timeout_s = failures.stall_timeout
    settings = ExitStack()
    with ExitStack() as undo:
        undo.callback(settings.close)
        _close_at_end(services, settings)
        meeting = _open_meeting(config, replicas, services, link, runtime.backend, outer, settings)
        momenta: Sequence[OuterMomentum | None] = meeting.collective.outer or [None] * len(replicas)
        ranks = _open_ranks(config, replicas, services, runtime, inboxes, momenta, settings)
        workers = [Worker(rank, replicas, services, meeting, failures, config.start) for rank in ranks]
        parts = EngineParts(
            services=services,
            meeting=meeting,
            workers=workers,
            threads=[_thread_of(worker) for worker in workers],
            machine=machine,
            event_log=event_log,
            posts=posts,
            watch=StallWatch(None if timeout_s is None else timeout_s * 1e3),
            diagnostics=Diagnostics(workers, meeting.gate, services.sources, event_log.tail, link),
            link=link,
            tuning=as_tuning(runtime.tune_process),
            settings=settings,
        )
        engine = Engine(config, parts)
        undo.pop_all()
    return engine


def _thread_of(worker: Worker) -> threading.Thread:
    """The thread of a worker, in the settings of the calling one: torch.compile's belong to a thread."""
    return threading.Thread(
        target=copy_context().run, args=(worker.run,), name=f"flowdp-worker-{worker.parts.rank}", daemon=True
    )


def _open_link(
    config: CoordinatorConfig, services: Services, inboxes: Sequence[Inbox[Mail]]
) -> tuple[Link, Coordinator | Follower, Posts]:
    """Open the link to the other machines, what coordinates the ranks of this one, and the way of orders.

    Args:
        config: The run.
        services: Its services.
        inboxes: One per rank of this machine.
    """
    team = services.team
    posts: dict[int, Callable[[Order], None]] = {
        rank: inbox.post for rank, inbox in zip(team.ranks, inboxes, strict=True)
    }
    if not team.is_spread:
        return None, Coordinator(config), posts
    if not team.leads:
        follower = FollowerLink(services, posts)
        return follower, Follower(config, team.ranks, follower.send), posts
    leader = LeaderLink(services)
    others = (rank for rank in range(config.world_size) if rank not in team.ranks)
    return leader, Coordinator(config), posts | {rank: partial(leader.order, rank) for rank in others}


def _close_at_end(services: Services, settings: ExitStack) -> None:
    if services.team.machines is not None:
        settings.callback(services.team.machines.closer())
    settings.callback(services.saver.close_transfer)
    settings.callback(services.requests.close)
    if services.channel is not None:
        settings.callback(services.channel.close)


def _open_meeting(
    config: CoordinatorConfig,
    replicas: Sequence[Replica],
    services: Services,
    link: Link,
    backend: Backend,
    outer: OuterOptions | None,
    settings: ExitStack,
) -> MeetingPoint:
    """Open the gate and the collective of the run."""
    team, lanes = services.team, [replica.lane for replica in replicas]
    exact = [replica for replica in replicas if isinstance(replica, ExactReplica)]
    is_cut = cut_gradients(exact)
    averaged = [replica.averaged for replica in replicas]
    collective = open_collective(
        backend,
        config.policy,
        averaged,
        lanes,
        lambda index: gate.finish(team.ranks[index]),
        outer,
        team,
        overlaps=config.overlaps,
    )
    settings.callback(collective.close)
    joint: JointStep | SpanStep | None = None
    if is_cut and isinstance(collective, StreamedMean):  # not in the host's memory
        joint = SpanStep(exact, collective)
    elif exact:
        joint = JointStep(exact, collective, lambda index: gate.finish(team.ranks[index]))
    launch = collective.launch if joint is None else joint.launch
    gate = Gate(config.world_size, launch, None if link is None else link.ask, team.ranks)
    is_async = ROUNDS[config.policy].averages == "snapshots" and config.world_size > 1
    return MeetingPoint(
        gate=gate,
        collective=collective,
        snapshots=SnapshotMean(averaged, lanes, collective.outer) if is_async else None,
        joint=joint,
    )


def _open_ranks(
    config: CoordinatorConfig,
    replicas: Sequence[Replica],
    services: Services,
    runtime: RuntimeOptions,
    inboxes: Sequence[Inbox[Mail]],
    momenta: Sequence[OuterMomentum | None],
    settings: ExitStack,
) -> list[RankParts]:
    """Open what each rank has for itself: its feed, and the threads that it computes with."""
    ranks, lanes = services.team.ranks, [replica.lane for replica in replicas]
    feeds = open_feeds(
        services.source,
        lanes,
        held=[(config.groups or (1,) * config.world_size)[rank] for rank in ranks],
        spans=() if services.timeline is None else services.timeline.ranks,
        usage=runtime.memory_fraction,
        depth=runtime.prefetch_depth,
    )
    for lane, feed in zip(lanes, feeds, strict=True):
        settings.callback(lane.drain)
        settings.callback(feed.close)
    settings.callback(keep_memory, lanes)
    tuning = as_tuning(runtime.tune_process)
    # A run whose results do not depend on measured speed must not depend on the size of a pool.
    sizes = pool_sizes(
        [lane.device for lane in lanes], tuning, adapts=ROUNDS[config.policy].shares == "steps"
    )
    return [
        RankParts(
            rank=rank,
            index=index,
            replica=replicas[index],
            feed=feeds[index],
            inbox=inboxes[index],
            pool=RankPool(sizes[index], thread_budget() if tuning.openmp else sizes[index]),
            outer=momenta[index],
        )
        for index, rank in enumerate(ranks)
    ]
