"""A short run of a Trainer's settings that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from flowdp.data.open_source import loader_generators
from flowdp.device.draws import generators_kept
from flowdp.errors import OptionError
from flowdp.observe.callbacks import Callback
from flowdp.trainer.config import RunConfig
from flowdp.trainer.run import Run
from flowdp.trainer.start import start_run

__all__ = ["trial_run"]


@contextmanager
def trial_run(config: RunConfig, callbacks: tuple[Callback, ...] = ()) -> Iterator[Run]:
    """A run that is joined at the block's end, or stopped where the block raises.

    It has no other callbacks, checkpoints, timeline or bar. The user's model and optimizer stay as they
    are, since replicas are copies; so do the process's generators, and those of a DataLoader and its sampler.
    Other state of a dataset or of the loss is the user's, and moves on.

    Args:
        config: Settings; those that would leave a trace are replaced.
        callbacks: In place of the run's own.

    Raises:
        FlowdpError: As of `Trainer.start` and `Run.join`.
        OptionError: The settings are those of a run on several machines, which would measure apart from each
            other, and go on with different numbers.
    """
    if config.team.is_spread:
        raise OptionError(
            f"find_lr, find_batch_size and compare measure on one machine, and this Trainer has "
            f"{len(config.team.sizes)}: give them one of Trainer(..., machines=False), before the long run"
        )
    quiet = replace(
        config,
        checkpoint=None,
        resume=False,
        callbacks=callbacks,
        timeline=False,
        max_ms=None,
        monitor=None,
        restores_best=False,
        runtime=replace(config.runtime, handle_sigterm=False),
        has_bar=False,
        tells_devices=False,
    )
    with generators_kept(own=loader_generators(config.dataset)), ExitStack() as undo:
        run = start_run(quiet, undo, fills_model=False)
        undo.pop_all()
        with run:
            yield run
