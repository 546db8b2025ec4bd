"""Training that goes on in the living processes when a machine is lost, and takes in machines that come."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flowdp.engine import active_runs
from flowdp.errors import CollectiveError, MachineLostError, MachineWaitsError, OptionError
from flowdp.network.quorum import Quorum, World, check_place
from flowdp.policy.formats import format_error
from flowdp.protocol.messages import Requested
from flowdp.validators import check_installed, check_int, check_number

__all__ = ["run_elastic"]

log = logging.getLogger("flowdp")

Answer = TypeVar("Answer")

SHORT_S = 60.0
SHORT_LIVES = 3
"""Lives so short, one after another, that a loss ended without a machine gone: then another try is no use."""


def run_elastic(
    train: Callable[[], Answer],
    *,
    lighthouse: str | None = None,
    min_machines: int = 1,
    start_machines: int | None = None,
    timeout: float = 600.0,
    host: str | None = None,
) -> Answer:
    """Train on all machines that are there, and when one is lost, go on with the others as they are.

    ::

        def train():
            trainer = flowdp.Trainer(..., checkpoint="/shared/runs/7", resume=True)
            return trainer.fit()

        state = flowdp.run_elastic(train)  # TORCHFT_LIGHTHOUSE=http://host:29510 in the environment

    Each machine runs one process of the script, without torchrun. They meet in the quorum of torchft's
    lighthouse (`pip install "flowdp[torchft]"`, then `torchft_lighthouse --min_replicas 1` on some host),
    make torch.distributed's default group, and call `train`.

    - **A machine is lost**: `train` raises `MachineLostError` on the others; the group is destroyed, those
      that live meet again, and `train` is called anew. It makes a new Trainer with `resume=True`, which goes
      on from the newest checkpoint; each sample of an epoch is trained once. Machine 0, of those that have
      been there longest, reads and writes the checkpoints: so that the others can go on without it, the
      folder must be on storage that all machines reach.
    - **A machine comes**, or comes back: it waits until the others let it in. They do behind a checkpoint
      which machine 0 makes for that purpose: their run ends by a `MachineWaitsError`, and all begin anew.
      Where no live run of a Trainer writes checkpoints, as in a loop with `setup`, it waits until a
      machine is lost or `train` returns.
    - **Any other error** of a machine is raised at once, there and on the others. Ctrl-C on one machine stops
      the run on all; outside a run it takes that machine out.

    Args:
        train: Function without parameters that makes the Trainers, or calls `setup`; called once for each set
            of machines. Must let `MachineLostError` and `MachineWaitsError` pass.
        lighthouse: Address of the lighthouse; None: that of `TORCHFT_LIGHTHOUSE`.
        min_machines: Least number of machines that train.
        start_machines: Number of machines for which the first start waits; None: `min_machines`.
        timeout: Seconds to wait for a quorum. A machine that waits for others which train waits as long as
            they do.
        host: Name or address by which the other machines reach this one; None: its host name.

    Returns:
        Result of `train`.

    Raises:
        CollectiveError: No quorum came about in time; or another machine has failed outside a run.
        MachineLostError: Machines are lost again and again although none is gone.
        OptionError: An argument or the environment is wrong; the message has the remedy.

    Threads:
        The one that trains. A thread of its own asks the lighthouse meanwhile.
    """
    if not callable(train):
        raise OptionError(f"train must be a function without parameters, not {train!r}")
    check_int("min_machines", min_machines)
    check_int("start_machines", start_machines, optional=True)
    check_number("timeout", timeout, above=True)
    for name, value in (("lighthouse", lighthouse), ("host", host)):
        if value is not None and not (isinstance(value, str) and value):
            raise OptionError(f"{name} must be a word or None, not {value!r}")
    check_installed("run_elastic", "torchft", "torchft")
    address = check_place(lighthouse)
    admission = _Admission()
    log.info("joining the lighthouse at %s", address)
    quorum = Quorum(address, min_machines, start_machines or min_machines, host, admission.heard)
    try:
        return _Lives(quorum, admission, timeout).run(train)
    finally:
        quorum.close()


class _Lives:
    """Calls of the user's function, one for each world.

    Args:
        quorum: The quorum of the job.
        admission: Lets other machines in.
        timeout_s: Longest wait for a quorum.
    """

    def __init__(self, quorum: Quorum, admission: _Admission, timeout_s: float) -> None:
        self._quorum, self._admission, self._timeout_s = quorum, admission, timeout_s
        self._names: list[str] = []  # of the last world's members
        self._short = 0  # short lives that a loss has ended, though all members were there again
        self._has_waited = False

    def run(self, train: Callable[[], Answer]) -> Answer:
        """See `run_elastic`."""
        loss: MachineLostError | None = None
        while True:
            world = self._quorum.form(self._timeout_s, self._tell_wait)
            if loss is not None:
                self._check_gone(world, loss)
            loss, self._names, self._has_waited = None, world.names, False
            begun_s = time.monotonic()
            try:
                self._quorum.begin_group(world)
                log.info("a world of %d machines trains: %s", len(world.members), ", ".join(world.names))
                self._admission.begin(self._quorum.me.name, world)
                return train()
            except MachineWaitsError as error:
                log.warning("%s", error)
            except MachineLostError as error:
                log.warning("a machine is lost, and the others meet again: %s", format_error(error))
                self._short = self._short + 1 if time.monotonic() - begun_s < SHORT_S else 0
                # Without its frames, which hold the replicas.
                loss = MachineLostError(str(error)).with_traceback(None)
            except Exception as error:
                if len(world.members) > 1:
                    self._quorum.tell(error)
                raise
            finally:
                self._admission.end()
                self._quorum.end_group()
            gc.collect()  # what the last life has left in cycles: groups, replicas

    def _check_gone(self, world: World, loss: MachineLostError) -> None:
        """Raise a loss that is none: what has ended so many lives is in the script, or in the network."""
        if not set(self._names) <= set(world.names):
            self._short = 0
        if self._short >= SHORT_LIVES:
            loss.add_note(
                f"{self._short} times in a row no machine was gone: their scripts differ, or a connection "
                "between two of them fails; where a host name is not known to all, give run_elastic(host=...)"
            )
            raise loss

    def _tell_wait(self, answer: World) -> None:
        """Say once for whom this machine waits."""
        training = sorted(
            member.host for member in answer.members if member.world not in ("", self._quorum.me.was)
        )
        if self._has_waited or not (training or answer.is_forming):
            return
        self._has_waited = True
        log.warning(
            "this machine waits for others, %d are here%s",
            len(answer.members),
            f"; in training: {', '.join(training)}, which let it in behind a checkpoint" if training else "",
        )


class _Admission:
    """Admission of waiting machines to a world: machine 0 ends its run behind a checkpoint.

    Threads:
        `begin` and `end`: the user's. `heard`: the quorum's.
    """

    def __init__(self) -> None:
        self._life: tuple[str, str, bool] | None = None  # names of machine and world, and whether it leads
        # A run, and its newest checkpoint when another one was requested; of the quorum's thread alone.
        self._asked: tuple[Any, Path | None] | None = None

    def begin(self, name: str, world: World) -> None:
        """Begin to watch for machines that wait for this world."""
        self._life = (name, world.name, world.rank_of(name) == 0)

    def end(self) -> None:
        """End that."""
        self._life = None

    def heard(self, answer: World) -> None:
        """Look at an answer of the lighthouse."""
        life = self._life
        if life is None:
            return
        name, world, leads = life
        others = [member for member in answer.members if member.name != name and not member.failed]
        if strangers := [other.host for other in others if other.world not in ("", world)]:
            self._leave(MachineLostError(f"{', '.join(strangers)} train without this machine"))
        elif leads and (waiting := [other.host for other in others if not other.world]):
            self._let_in(waiting)
        else:
            self._asked = None

    def _leave(self, error: CollectiveError) -> None:
        for engine in active_runs.runs():
            engine.fail(error)

    def _let_in(self, waiting: list[str]) -> None:
        """Request a checkpoint, and when it is written, end the run."""
        engine = next((run for run in active_runs.runs() if run.saver.has_folder), None)
        if engine is None:
            return
        if self._asked is None or self._asked[0] is not engine:
            self._asked = (engine, engine.saver.last)
            if engine.config.tasks.inside:  # else its next one is at the end of an epoch
                engine.request(Requested("checkpoint"))
        elif engine.saver.last != self._asked[1]:
            self._asked = None
            text = f"{', '.join(waiting)} waits to take part: the run has written a checkpoint, and ended"
            self._leave(MachineWaitsError(text))
