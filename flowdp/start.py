"""Start of a run: from its settings to threads that train."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from uuid import uuid4

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flowdp.checkpoint.fingerprint import fingerprint, orders
from flowdp.checkpoint.folder import CheckpointFolder
from flowdp.checkpoint.machine_states import StateCollector, StateSender
from flowdp.checkpoint.rank_state import has_generator
from flowdp.checkpoint.resume import Resumed, find, shared_start
from flowdp.checkpoint.writer import Saver
from flowdp.checks import check_checkpoints
from flowdp.config import RunConfig
from flowdp.data.identity import check_identities
from flowdp.data.open_source import dataset_length, loader_order
from flowdp.data.source import Source
from flowdp.device.discovery import device_names, device_uuid
from flowdp.engine.active_runs import check_free
from flowdp.engine.engine import Engine
from flowdp.engine.evaluation import Evaluator
from flowdp.engine.failures import Failures
from flowdp.engine.records import Records
from flowdp.engine.requests import Requests
from flowdp.engine.services import Services
from flowdp.engine.sigterm import SigtermStop, check_sigterm
from flowdp.errors import OptionError
from flowdp.inference import open_evaluator, try_evaluation
from flowdp.machine.barrier_tasks import BarrierPlan, SavePlan
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.exact_rounds import LONE_RANK
from flowdp.machine.policies import ROUNDS
from flowdp.network.machines import Machines
from flowdp.network.quorum import is_elastic
from flowdp.network.transfer import Transfer
from flowdp.observe.banner import tell_devices
from flowdp.observe.bar import ProgressBar
from flowdp.observe.callbacks import step_callbacks
from flowdp.observe.observer import Observer
from flowdp.observe.timeline_file import TimelineFile
from flowdp.protocol.messages import Requested
from flowdp.replica.build import build_replicas
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.factories import ModelOption, all_of
from flowdp.replica.joint_step import owner_of
from flowdp.replica.replica import Replica
from flowdp.result import TrainedState
from flowdp.run import Run
from flowdp.settings import run_settings
from flowdp.threads.shield import interrupts_held
from flowdp.timeline.timeline import Timeline

__all__ = ["barrier_plan", "check_reach", "check_run", "find_start", "open_folder", "start_run"]

log = logging.getLogger("flowdp")


def check_run(config: RunConfig) -> int | None:
    """Open the datasets of a run, check that it can be trained on them, and close them.

    Returns:
        Batches of an epoch; None: not known before it is read.

    Raises:
        OptionError: A dataset, or how it is to be read, is wrong; or the run could not be resumed from the
            checkpoints that it is to write.
    """
    evaluation = config.open_evaluation()
    if evaluation is not None:
        evaluation.close()
    source = config.open_source()
    try:
        check_checkpoints(config.checkpoint, source)
        return source.batches
    finally:
        source.close()


def start_run(config: RunConfig, undo: ExitStack, *, fills_model: bool = True) -> Run:
    """Build the replicas and start the threads.

    Args:
        config: Settings of the run.
        undo: Is given what takes everything back; it is closed by the caller where this raises.
        fills_model: `join()` writes the result into the user's model, if it is an instance.

    Raises:
        OptionError: Under `torch.inference_mode()`, or a model that was made there; and see `Trainer.start`.
    """
    _check_inference_mode(config.replica.model)
    if config.runtime.handle_sigterm:
        check_sigterm()
    team = config.team
    team.check()
    if config.tells_devices and team.leads:
        tell_devices(config.devices, () if team.machines is None else team.machines.names)
    check_free(config.devices)
    folder = open_folder(config, undo) if team.leads else None
    resumed = find_start(config, folder) if team.leads else None
    if team.machines is not None:
        resumed = shared_start(resumed, team.machines)
        if config.checkpoint is not None and is_elastic():
            check_reach(team.machines, Path(config.checkpoint.dir))
    evaluator = open_evaluator(config)
    fresh = config.open_source() if resumed is None else None
    # A resumed run has been checked, and draws the numbers of a run that was never interrupted.
    checks_loss = config.replica.checks_loss and resumed is None
    replicas = build_replicas(replace(config.replica, checks_loss=checks_loss), config.devices, team)
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
        log.info("going on from %s: step %d", resumed, resumed.position.global_step)
    check_checkpoints(config.checkpoint, source)
    if team.machines is not None:
        _check_data(team.machines, source, evaluator)
    if resumed is None:
        try_evaluation(config, replicas)
    total_steps = config.total_steps(source.batches)
    bar = _bar(config, source, resumed, total_steps) if team.leads else None
    # Callbacks and files belong to the machine that leads.
    own_callbacks = config.callbacks if team.leads else ()
    callbacks = own_callbacks if bar is None else (bar, *own_callbacks)
    if isinstance(config.timeline, Path) and team.leads:
        callbacks = (*callbacks, TimelineFile(config.timeline))
    records = Records(() if resumed is None else resumed.reported)
    failures = Failures()
    requests = Requests(records, failures)
    has_listeners = config.has_checkpoint_listeners and team.leads
    transfer = _open_transfer(config, writes=has_listeners or folder is not None)
    saver = Saver(
        folder,
        described,
        records.add if has_listeners else None,
        requests.fail,
        best=None if resumed is None else resumed.best,
        evaluates=evaluator is not None,
        orders=partial(orders, source),
        written=requests.written,
        keeps_ranks=_has_own(config) and (team.leads or transfer is not None),
        keeps_generators=team.leads or transfer is not None,
        collector=StateCollector(transfer) if transfer is not None and team.leads else None,
        sender=None if transfer is None or team.leads else StateSender(transfer),
    )
    observer = Observer(records, callbacks, requests.fail, config.failures.stall_timeout)
    with interrupts_held() as held:
        services = Services(
            source=source,
            records=records,
            failures=failures,
            requests=requests,
            saver=saver,
            evaluator=evaluator,
            fingerprint=described,
            sigterm=_open_sigterm(config, requests, undo),
            step_callbacks=step_callbacks(config.callbacks),
            close_observer=observer.close,
            timeline=_open_timeline(config),
        )
        plan = _plan(config, source, replicas, resumed)
        engine = Engine(plan, replicas, services, config.failures, config.runtime, config.outer_step, team)
        undo.callback(engine.take_back)
        if resumed is not None:
            resumed.put_back_momentum(replicas)
        aside = nullcontext if bar is None else bar.aside
        run = Run(
            engine,
            config.replica.model,
            observer,
            settings=settings,
            restores_best=config.restores_best,
            fills_model=fills_model,
            aside=aside,
            total_steps=total_steps,
        )
        engine.start()
        observer.start(run, lambda: failures.first, run.answer, engine.latch.wait)
        held.release()
        engine.begin(run)
    return run


def _check_inference_mode(model: ModelOption) -> None:
    """Check that what is made here, and what the result is written to, are tensors that can be trained."""
    if torch.is_inference_mode_enabled():
        raise OptionError(
            "a run cannot be started under torch.inference_mode(), whose tensors cannot be trained: leave it "
            "first, or start inside `with torch.inference_mode(False):`"
        )
    if isinstance(model, nn.Module):
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if not is_lazy(tensor) and tensor.is_inference():
                raise OptionError(
                    f"model: {name!r} was made under torch.inference_mode(), so the trained values could not "
                    "be written to it: build or load the model outside"
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
    return Resumed.of(
        state.state_dict,
        state.optimizer_state,
        state.history,
        state.global_step,
        state.stopped_at,
        state.ema,
        state.outer_momentum,
    )


def barrier_plan(config: RunConfig, resumed: Resumed | None, *, inside: bool = True) -> BarrierPlan:
    """Plan the tasks for which all ranks stand still: saving and evaluating.

    Args:
        config: Settings of the run.
        resumed: State from which the run continues.
        inside: The dataset can be entered inside an epoch.
    """
    save = None
    if config.checkpoint is not None:
        save = SavePlan(config.checkpoint.every, config.checkpoint.unit)
    elif config.has_checkpoint_listeners:
        save = SavePlan(1, "epoch")
    return BarrierPlan(
        save=save,
        eval_every=None if config.evaluation is None else config.evaluation.every,
        eval_unit="epoch" if config.evaluation is None else config.evaluation.unit,
        monitor=config.monitor,
        keeps_best=config.restores_best,
        is_saved=resumed is not None and resumed.path is not None and isinstance(config.resume, bool),
        inside=inside,
    )


def check_reach(machines: Machines, folder: Path) -> None:
    """Warn of machines that do not see the checkpoints of machine 0: they could not go on without it.

    Args:
        machines: All of them; each makes this call.
        folder: Folder of the checkpoints, which is there on machine 0.

    Raises:
        CollectiveError: A machine was lost.
    """
    mark = folder / f".flowdp.{uuid4().hex}"
    if machines.leads:
        mark.touch()
    mark = folder / machines.share(mark.name)
    sees = machines.gather(mark.exists())
    if machines.leads:
        mark.unlink(missing_ok=True)
    if blind := [name for name, is_seen in zip(machines.names, sees, strict=True) if not is_seen]:
        log.warning(
            "%s %s the checkpoints of %s, %s: should that one be lost, the others begin anew; choose a "
            "folder on storage that all machines reach",
            ", ".join(blind),
            "does not see" if len(blind) == 1 else "do not see",
            machines.names[0],
            folder,
        )


def _check_data(machines: Machines, source: Source, evaluator: Evaluator | None) -> None:
    """Check that all machines have opened the same datasets."""
    check_identities(machines.gather(source.identity()), machines.names)
    if evaluator is not None:
        check_identities(machines.gather(evaluator.source.identity()), machines.names, "evaluation's dataset")


def _open_transfer(config: RunConfig, *, writes: bool) -> Transfer | None:
    """Open the way of the other machines' states into a checkpoint; None: none of them is needed there.

    Args:
        config: Settings of the run.
        writes: Checkpoints go anywhere; that of machine 0 counts.
    """
    machines = config.team.machines
    if machines is None:
        return None
    told = machines.gather((writes, any(map(has_generator, config.devices))))
    writes, draw = told[0][0], any(draws for _, draws in told[1:])
    return Transfer(machines) if writes and (draw or _has_own(config)) else None


def _has_own(config: RunConfig) -> bool:
    """Whether ranks have optimizer states of their own; else all have that of rank 0."""
    return ROUNDS[config.replica.policy].averages != "gradients"


def _bar(
    config: RunConfig, source: Source, resumed: Resumed | None, total_steps: int | None
) -> ProgressBar | None:
    begun = 0 if resumed is None else resumed.position.global_step
    return ProgressBar(total_steps, source.batches, begun) if config.has_bar else None


def _open_timeline(config: RunConfig) -> Timeline | None:
    if config.timeline is False:
        return None
    cards = [device for device in dict.fromkeys(config.devices) if device.type == "cuda"]
    uuids = {str(card): uuid for card in cards if (uuid := device_uuid(card)) is not None}
    return Timeline(device_names(config.devices), gpus=uuids)


def _open_sigterm(config: RunConfig, requests: Requests, undo: ExitStack) -> SigtermStop | None:
    if not config.runtime.handle_sigterm:
        return None
    sigterm = SigtermStop(partial(requests.request, Requested("stop")))
    undo.callback(sigterm.close)
    return sigterm


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
    if sizes.window is None or source.samples is None:
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
