"""Start of a run: from its settings to threads that train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from torch import nn

from flowdp.checkpoint.fingerprint import fingerprint, orders
from flowdp.checkpoint.folder import CheckpointFolder
from flowdp.checkpoint.machine_states import StateCollector
from flowdp.checkpoint.saver import Saver
from flowdp.checkpoint.state_sender import StateSender
from flowdp.checkpoint.writer import Outlet, Writer
from flowdp.checks import check_checkpoints
from flowdp.data.identity import check_identities
from flowdp.data.open_source import dataset_length, loader_order
from flowdp.data.source import Source
from flowdp.device.accelerator import is_accelerator
from flowdp.engine.active_runs import check_free
from flowdp.engine.build import build_engine
from flowdp.engine.evaluation import Evaluator
from flowdp.engine.failures import Failures
from flowdp.engine.parts import Services
from flowdp.engine.requests import Requests
from flowdp.engine.signals import check_sigterm
from flowdp.machine.config import BarrierPlan, CoordinatorConfig, GlobalBatch
from flowdp.machine.exact_rounds import LONE_RANK
from flowdp.machine.policies import ROUNDS
from flowdp.network.channel import Channel
from flowdp.network.transfer import Transfer
from flowdp.observe.bar import ProgressBar, tell, tell_devices
from flowdp.observe.callbacks import step_callbacks
from flowdp.observe.loggers.log import Setting
from flowdp.observe.observer import Observer
from flowdp.observe.records import Records
from flowdp.observe.timeline_file import TimelineFile
from flowdp.policy.interval import Interval
from flowdp.policy.monitor import number_of
from flowdp.replica.build import build_replicas
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.factories import all_of
from flowdp.replica.joint_step import owner_of
from flowdp.replica.replica import Replica
from flowdp.threads.shield import interrupts_held
from flowdp.timeline.timeline import Timeline, open_timeline
from flowdp.trainer.config import RunConfig
from flowdp.trainer.description import run_settings
from flowdp.trainer.inference import open_evaluator, try_evaluation
from flowdp.trainer.result import Results, TrainedState, resumed_from
from flowdp.trainer.resume import Resumed, find
from flowdp.trainer.run import Run

__all__ = ["barrier_plan", "find_start", "open_folder", "start_run"]

log = logging.getLogger("flowdp")

LOOKS = 4
"""Signs of life of a machine in the time after which a run that stands still fails."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Data, replicas and state of a run, before its threads are made.

    Attributes:
        folder: Folder of its checkpoints, on the machine that leads; None: there is none.
        resumed: State from which it goes on; None: it begins anew.
        channel: Messages between the machines; None: there is one machine.
        evaluator: Evaluates the averaged model; None: there are no evaluations.
        source: Source of the batches.
        replicas: One per rank of this machine, equal.
        fingerprint: Data that must be equal where the run is resumed.
        settings: Plain values for logs.
    """

    folder: CheckpointFolder | None
    resumed: Resumed | None
    channel: Channel | None
    evaluator: Evaluator | None
    source: Source
    replicas: Sequence[Replica]
    fingerprint: Mapping[str, object]
    settings: Mapping[str, Setting]


def start_run(config: RunConfig, undo: ExitStack, *, fills_model: bool = True) -> Run:
    """Build the replicas and start the threads.

    Args:
        config: Settings of the run.
        undo: Is given what takes everything back; it is closed by the caller where this raises.
        fills_model: `join()` writes the result into the user's model, if it is an instance.

    Raises:
        OptionError: See `Trainer.start`.
    """
    model = config.replica.model
    trained = model if fills_model and isinstance(model, nn.Module) else None
    check_free(config.devices, trained)
    prepared = _prepare(config, undo)
    team, source, replicas, resumed = config.team, prepared.source, prepared.replicas, prepared.resumed
    total_steps = config.total_steps(source.batches)
    # Callbacks and files belong to the machine that leads.
    callbacks = config.callbacks if team.leads else ()
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    if config.has_bar and team.leads:
        bar = ProgressBar(total_steps, source.batches, 0 if resumed is None else resumed.position.global_step)
        callbacks, aside = (bar, *callbacks), bar.aside
    if isinstance(config.timeline, Path) and team.leads:
        callbacks = (*callbacks, TimelineFile(config.timeline))
    records, failures = Records(() if resumed is None else resumed.reported), Failures()
    requests = Requests(records, failures)
    saver = _open_saver(config, prepared, records, requests)
    observer = Observer(records, callbacks, requests.fail, config.failures.stall_timeout)
    with interrupts_held() as held:
        if config.runtime.handle_sigterm:
            undo.callback(requests.close)
            requests.hear_sigterm()
        services = Services(
            team=team,
            channel=prepared.channel,
            source=source,
            records=records,
            failures=failures,
            requests=requests,
            saver=saver,
            evaluator=prepared.evaluator,
            trained=trained,
            tells=config.tells_devices and team.leads,
            step_callbacks=step_callbacks(config.callbacks),
            close_observer=observer.close,
            timeline=_open_timeline(config, prepared.settings),
        )
        plan = _plan(config, source, replicas, resumed)
        engine = build_engine(plan, replicas, services, config.failures, config.runtime, config.outer_step)
        undo.callback(engine.take_back)
        if resumed is not None:
            resumed.put_back_momentum(engine.ranks)
        results = Results(
            engine,
            model,
            prepared.fingerprint,
            is_numbered=source.can_resume_inside,
            leads=team.leads,
            restores_best=config.restores_best,
            trained=trained,
        )
        run = Run(
            engine,
            observer,
            results,
            settings=prepared.settings,
            aside=aside,
            total_steps=total_steps,
            timeline=services.timeline,
        )
        engine.start()
        observer.start(run, lambda: failures.first, results.answer, engine.latch.wait)
        held.release()
        engine.begin(run)
    return run


def _prepare(config: RunConfig, undo: ExitStack) -> _Prepared:
    """Open the datasets, build the replicas, and put the state back from which the run goes on."""
    if config.runtime.handle_sigterm:
        check_sigterm()
    team = config.team
    team.check()
    if config.tells_devices and team.leads:
        tell_devices(config.devices, () if team.machines is None else team.machines.names)
    folder = open_folder(config, undo) if team.leads else None
    resumed = find_start(config, folder) if team.leads else None
    channel: Channel | None = None
    if team.machines is not None:
        resumed = team.machines.share(resumed)  # the others need not see the files of machine 0
        stall_s = config.failures.stall_timeout
        channel = Channel(team.machines, None if stall_s is None else stall_s / LOOKS)
        undo.callback(channel.close)
    evaluator = open_evaluator(config, None if channel is None or team.leads else partial(channel.send, 0))
    fresh = config.open_source() if resumed is None else None
    # A resumed run has been checked, and draws the numbers of a run that was never interrupted.
    checks_loss = config.replica.checks_loss and resumed is None
    given = replace(config.replica, checks_loss=checks_loss, is_resumed=resumed is not None)
    replicas = build_replicas(given, config.devices, team)
    described = _fingerprint(config, replicas[0])
    settings = run_settings(config, replicas[0])
    if fresh is not None:
        source = fresh
    else:
        assert resumed is not None
        rates = replicas[0].learning_rate
        entered, source = resumed.enter(described, config.epochs, config.max_steps, rates, config.open_source)
        resumed = entered.watching(config.watched, config.restores_best)
        resumed.put_back(replicas, team.ranks)
        done, step = resumed.position.done, resumed.position.global_step
        line = f"resumed from {resumed}, epoch {done + 1}, step {step:,}"
        log.info("%s", line)
        if config.tells_devices and team.leads and done != config.epochs and step != config.max_steps:
            tell(line)
    check_checkpoints(config.checkpoint, source)
    size, samples = config.sizes.together(config.dataset), dataset_length(config.dataset)
    if team.leads and size is not None and samples is not None and size > samples:
        log.warning("a step of %d samples (batch_size) is above the %d of the dataset", size, samples)
    if team.machines is not None:
        check_identities(team.machines.gather(source.identity()), team.machines.names)
        if evaluator is not None:
            judged = team.machines.gather(evaluator.source.identity())
            check_identities(judged, team.machines.names, "evaluation's dataset")
    if resumed is None:
        try_evaluation(config, replicas)
    return _Prepared(
        folder=folder,
        resumed=resumed,
        channel=channel,
        evaluator=evaluator,
        source=source,
        replicas=replicas,
        fingerprint=described,
        settings=settings,
    )


def _open_saver(config: RunConfig, prepared: _Prepared, records: Records, requests: Requests) -> Saver:
    leads = config.team.leads
    has_listeners = config.has_checkpoint_listeners and leads
    writes = has_listeners or prepared.folder is not None
    transfer, channel = _open_transfer(config, writes=writes), prepared.channel
    outlet: Outlet | None = None
    collector: StateCollector | None = None
    if transfer is not None and channel is not None:
        if leads:
            collector = StateCollector(transfer, channel.tell_all)
        else:
            outlet = StateSender(transfer)
    if writes and outlet is None:
        outlet = Writer(
            prepared.folder,
            prepared.fingerprint,
            records.add if has_listeners else None,
            requests.fail,
            requests.written,
            evaluates=prepared.evaluator is not None,
            collector=collector,
        )
    return Saver(
        outlet,
        None if prepared.resumed is None else prepared.resumed.best,
        partial(orders, prepared.source),
        keeps_ranks=_has_own(config) and (leads or transfer is not None),
        keeps_generators=leads or transfer is not None,
    )


def open_folder(config: RunConfig, undo: ExitStack) -> CheckpointFolder | None:
    """Take the folder of the checkpoints for this run; None: it writes none.

    Args:
        config: Settings of the run.
        undo: Is given what returns the folder.

    Raises:
        OptionError: Another live run has the folder.
    """
    if config.checkpoint is None:
        return None
    folder = CheckpointFolder(config.checkpoint)
    undo.callback(folder.lock.give_back)
    with interrupts_held():
        folder.lock.take()
    return folder


def find_start(config: RunConfig, folder: CheckpointFolder | None) -> Resumed | None:
    """Find the state from which the run continues; None: it begins anew.

    Raises:
        CheckpointError: There is none, or it cannot be read.
        OptionError: The folder holds the checkpoints of another run.
    """
    state = config.resume
    if not isinstance(state, TrainedState):
        return find(state, folder)
    find(False, folder)  # its folder, too, must be its own
    return resumed_from(state)


def barrier_plan(config: RunConfig, resumed: Resumed | None, *, inside: bool = True) -> BarrierPlan:
    """Plan the tasks for which all ranks stand still: saving and evaluating.

    Args:
        config: Settings of the run.
        resumed: State from which the run continues.
        inside: The dataset can be entered inside an epoch.
    """
    save = None
    if config.checkpoint is not None:
        options = config.checkpoint
        save = Interval(options.every, options.unit, options.max_minutes if inside else None)
    elif config.has_checkpoint_listeners:
        save = Interval(1, "epoch")
    evaluation, kept = config.evaluation, config.keep_best
    history = () if resumed is None else resumed.history
    if kept is not None and any(number_of(kept.name, epoch) is not None for epoch in history):
        kept = None
    return BarrierPlan(
        save=save,
        evaluation=None if evaluation is None else Interval(evaluation.every, evaluation.unit),
        monitor=config.monitor,
        keeps_best=config.restores_best,
        keep_best=kept,
        is_saved=resumed is not None and resumed.path is not None and isinstance(config.resume, bool),
        inside=inside,
    )


def _open_transfer(config: RunConfig, *, writes: bool) -> Transfer | None:
    """Open the way of the other machines' states into a checkpoint; None: none of them is needed there.

    Args:
        config: Settings of the run.
        writes: Checkpoints go anywhere; that of machine 0 counts.
    """
    machines = config.team.machines
    if machines is None:
        return None
    told = machines.gather((writes, any(map(is_accelerator, config.devices))))
    writes, draw = told[0][0], any(draws for _, draws in told[1:])
    return Transfer(machines) if writes and (draw or _has_own(config)) else None


def _has_own(config: RunConfig) -> bool:
    """Whether ranks have optimizer states of their own; else all have that of rank 0."""
    return ROUNDS[config.replica.policy].averages != "gradients"


def _open_timeline(config: RunConfig, settings: Mapping[str, Setting]) -> Timeline | None:
    if config.timeline is False:
        return None
    about = " · ".join(
        (
            f"{settings['model']}, {settings['parameters']:,} parameters",
            f"policy {settings['policy']}",
            f"batch size {settings['batch_size']}",
            f"devices {settings['devices']}",
            f"{datetime.now():%Y-%m-%d %H:%M}",
        )
    )
    return open_timeline(config.devices, config.team.ranks.start, about)


def _fingerprint(config: RunConfig, replica: Replica) -> dict[str, object]:
    """Data of the run that must be equal where a checkpoint of it is resumed."""
    order = loader_order(config.dataset) or {
        "batch_size": None,
        "shuffle": config.reading.shuffle is not False,
        "drop_last": bool(config.reading.drop_last),
    }
    order["batch_size"] = config.sizes.source or order["batch_size"]
    if config.limit is not None:
        order["overfit_batches" if config.limit.is_fixed else "limit_batches"] = config.limit.batches
    return fingerprint(
        replica.module,
        all_of(replica.optimizers),
        dataset_length=dataset_length(config.dataset),
        monitor=config.watched,
        seed=config.replica.seed,
        **order,
    )


def _global_batch(config: RunConfig, source: Source, replicas: Sequence[Replica]) -> GlobalBatch | None:
    sizes, first = config.sizes, replicas[0]
    if sizes.window is None:
        return None
    # Callbacks are to see every step on every device: what they keep for each is copied to no other.
    exact = [replica for replica in replicas if isinstance(replica, ExactReplica)]
    is_shared = first.meets or bool(step_callbacks(config.callbacks))
    return GlobalBatch(
        sizes.window,
        source.samples,
        first.least,
        sizes.parts if first.meets else None,
        may_be_alone=bool(exact)
        and not is_shared
        and not config.team.is_spread
        and owner_of(exact) == LONE_RANK
        and not exact[LONE_RANK].lane.is_async,
    )


def _plan(
    config: RunConfig, source: Source, replicas: Sequence[Replica], resumed: Resumed | None
) -> CoordinatorConfig:
    first = replicas[0]
    return CoordinatorConfig(
        world_size=config.world_size,
        batches=source.batches,
        epochs=config.epochs,
        max_steps=config.max_steps,
        max_ms=config.max_ms,
        policy=config.replica.policy,
        cadence=config.cadence,
        ratios=config.ratios,
        wait_for_metric=first.learning_rate.waits_for_metric,
        global_batch=_global_batch(config, source, replicas),
        groups=config.sizes.groups,
        tasks=barrier_plan(config, resumed, inside=source.can_resume_inside and source.unseeded is None),
        on_failure=config.failures.on_failure,
        start=None if resumed is None else resumed.position,
        machines=config.team.sizes if config.team.is_spread else (),
        inner_rounds=config.team.options.rounds if config.team.is_spread else 1,
        overlaps=config.overlaps,
    )
