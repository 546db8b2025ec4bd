"""Status and results of a run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flowdp.checkpoint.weights import Weights, checked_average, load_average, save_weights
from flowdp.device.flat_parameters import memory_key
from flowdp.engine.engine import Engine
from flowdp.errors import FlowdpError, OptionError, StateError
from flowdp.policy.formats import format_epochs, format_error, format_metric
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.position import Position
from flowdp.replica.factories import ModelOption, new_module
from flowdp.replica.rank_state import named_momentum
from flowdp.trainer.resume import Resumed, StopPosition, find

__all__ = [
    "Results",
    "Status",
    "TrainedState",
    "alone",
    "load_checkpoint",
    "on_cpu",
    "resumed_from",
    "weights_on_cpu",
]


@dataclass(frozen=True, repr=False)
class TrainedState:
    """Result of a run.

    ::

        state.save("model.safetensors")               # or model.pt
        state.module.save_pretrained("folder")        # a model of transformers, for from_pretrained

    Attributes:
        state_dict: Parameters and buffers by the module's own names, on the CPU.
        optimizer_state: `state_dict()` of rank 0's optimizer, on the CPU; of several a list or a mapping, as
            they were given.
        history: One record per epoch; where `max_steps` ended the run inside an epoch, the last one is of a
            part of it, and has `is_complete=False`; where a stop came before the end of its evaluation, it
            has `owes_evaluation=True`.
        global_step: Steps of all ranks.
        epochs_done: Complete epochs, without one that `max_steps` cut short; `resume` continues in that.
        interrupted: The run was stopped before its last step or evaluation, by `stop()`, Ctrl-C, SIGTERM or
            `max_time`; not by early stopping. False of a file, which does not tell.
        stopped_at: Position of the run, for `resume`; None inside an epoch where reading cannot begin there.
        ema: `state_dict` with the moving average of `flowdp.EMA` in place of the trained parameters; None
            without it.
        outer_momentum: Momentum of the means' outer step by the parameters' names, for `resume`; None without
            `outer`.
    """

    state_dict: Mapping[str, Tensor]
    optimizer_state: Mapping[str, Any]
    history: tuple[EpochMetrics, ...]
    global_step: int
    epochs_done: int
    interrupted: bool
    stopped_at: StopPosition | None = field(default=None, repr=False)
    ema: Mapping[str, Tensor] | None = field(default=None, repr=False)
    outer_momentum: Mapping[str, Tensor] | None = field(default=None, repr=False)
    _model: ModelOption | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        loss = self.history[-1].loss if self.history else None
        last = "" if loss is None else f", loss {format_metric(loss)}"
        end = ", interrupted" if self.interrupted else ""
        epochs = format_epochs(self.epochs_done)
        tensors = len(self.state_dict)
        return f"<TrainedState: {tensors} tensors, {epochs}, step {self.global_step:,}{last}{end}>"

    def __getstate__(self) -> dict[str, Any]:
        """Contents of a pickle: a factory may be a lambda, and the module repeats the state."""
        return {name: value for name, value in vars(self).items() if name not in ("_model", "module")}

    @cached_property
    def module(self) -> nn.Module:
        """The trained model.

        After `join()` it is the instance that the Trainer was given. Else, with a factory, of a snapshot or
        in a callback, it is a new one on the CPU, built or copied when it is first asked for.

        Raises:
            OptionError: The state is from a file, or was pickled, so its model is not known; or the model
                cannot be copied.
        """
        if self._model is None:
            raise OptionError(
                "this state was read from a file, which has weights and no model: build the model, and "
                "state.load_into(model)"
            )
        return self.load_into(new_module(self._model, torch.device("cpu")))

    def load_into(self, module: nn.Module) -> nn.Module:
        """Copy the parameters and buffers into a module of the same structure, and return it."""
        module.load_state_dict(self.state_dict)
        return module

    def load_ema_into(self, module: nn.Module) -> nn.Module:
        """Copy `ema` into a module of the same structure, and return it.

        Raises:
            OptionError: There is none.
        """
        return load_average(self.ema, module)

    def save(self, path: str | PathLike[str], *, ema: bool = False) -> None:
        """Write the parameters and buffers to a file for other programs; not to resume from.

        Tied parameters are one tensor in the file; `safetensors.torch.load_model(model, path)` reads a
        `.safetensors` file, `model.load_state_dict(torch.load(path))` a `.pt`.

        Args:
            path: Its suffix says the format: `.safetensors`, `.pt` or `.pth`.
            ema: The moving average, in place of the last weights.

        Raises:
            OptionError: The suffix is another one; or safetensors is not installed, or cannot hold a value;
                or there is no moving average.
            OSError: It cannot be written.
        """
        save_weights(path, checked_average(self.ema) if ema else self.state_dict)


@dataclass(frozen=True)
class Status:
    """Status of a run; prints as one line.

    Attributes:
        phase: "running", "paused", "done", "stopped" or "failed". One that early stopping ended is "done".
        epochs_done: Complete epochs.
        global_step: Steps of all ranks in the rounds held so far.
        round: The last round, or None.
        local_steps: Steps per rank, those since the last round included. Shape (world_size,).
        throttled: Why a rank may take no step, per rank; None for one that may. Shape (world_size,).
        pieces: Into how many a micro-batch is cut, per rank, because its device ran out of memory; 1 where it
            is whole. Shape (world_size,).
        capture: How each rank's steps run: "captured", or "eager: ..." with the reason; None: on this device,
            or by the user's wish, they never are. Shape (world_size,).
        problems: Problems that did not end the run: replicas that had NaN or infinite numbers, ranks
            that left or ran out of memory, callbacks that raised or do not return, a checkpoint
            that could not be written, a standstill at the start or while paused.
        reason: Why the run has ended: its epochs or steps are trained, early stopping, `max_time`, a stop, or
            the error; "" while it has not.
    """

    phase: str
    epochs_done: int
    global_step: int
    round: int | None
    local_steps: tuple[int, ...]
    throttled: tuple[str | None, ...]
    pieces: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    capture: tuple[str | None, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        line = f"{self.phase} | {format_epochs(self.epochs_done)} | step {self.global_step:,}"
        line += f" | steps per rank {' '.join(map(str, self.local_steps))}"
        line += f" | problems: {len(self.problems)}" if self.problems else ""
        return line + (f" | {self.reason.splitlines()[0]}" if self.reason else "")


def resumed_from(state: TrainedState) -> Resumed:
    """State for another run to resume from; without `stopped_at`, at the beginning of an epoch."""
    optimizers: Any = state.optimizer_state
    is_one = isinstance(optimizers, Mapping) and "param_groups" in optimizers
    stopped_at, steps = state.stopped_at, state.global_step
    done = sum(epoch.is_complete for epoch in state.history)  # one that `max_steps` cut short has a record
    if stopped_at is not None:
        done = stopped_at.position.done
    rank = {"scaler": None, "generator": None, "learning_rate": None}
    return Resumed(
        position=Position(world_size=1, done=done, global_step=steps, planned=steps),
        model=state.state_dict,
        ranks=[{"optimizers": [optimizers] if is_one else optimizers, **rank}],
        history=state.history[:done],
        stopped_at=stopped_at,
        ema=state.ema or {},
        outer=state.outer_momentum or {},
    )


class Results:
    """Results of a run: snapshots while it trains, and one state at its end, which is read once.

    Args:
        engine: The run's.
        model: The Trainer's.
        fingerprint: Fingerprint of the run.
        is_numbered: Reading can begin inside an epoch.
        leads: This machine has the run's state.
        restores_best: The result is the model of the best epoch.
        trained: The user's module, into which the end's state is written; None: into none.

    Attributes:
        misfit: The model does not take the state.

    Threads:
        The user's, unless a method says otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        model: ModelOption,
        fingerprint: Mapping[str, Any],
        *,
        is_numbered: bool,
        leads: bool,
        restores_best: bool,
        trained: nn.Module | None,
    ) -> None:
        self.misfit: StateError | None = None
        self._engine, self._model = engine, model
        self._fingerprint, self._is_numbered, self._leads = fingerprint, is_numbered, leads
        self._restores_best = restores_best
        self._module = trained
        self._state: TrainedState | None = None
        self._reading = threading.Lock()  # the state is read, and the module filled, once

    def snapshot(self) -> TrainedState | None:
        """State at the end of this round; None where the run ends before.

        Raises:
            OptionError: This machine does not have the run's state.
        """
        if not self._leads:
            raise OptionError(
                "snapshot() is answered on machine 0, where the state of a run on several machines is put "
                "together; join() returns the result on all of them"
            )
        captured = self._engine.snapshot()
        if captured is None:
            return None
        kept, position = captured.read(), captured.position
        first = kept["ranks"][0]
        return self._state_of(
            captured.weights,
            first["optimizers"],
            kept["outer"],
            history=captured.history,
            global_step=position.global_step,
            epochs_done=position.done,
            interrupted=True,
            stopped_at=self._stopped_at(position, first["learning_rate"], captured.orders),
        )

    def answer(self) -> TrainedState | None:
        """Result of a run that is over, for `on_train_end`; the user's module is not touched.

        Threads:
            The observer's.
        """
        self._engine.records.wait(over=True)
        with self._reading:
            return None if self._engine.failures.first is not None else self._read()

    def fill(self) -> TrainedState:
        """Result of a run that is over and has not failed; the user's module is filled with it, once."""
        with self._reading:
            state = self._read()
            if self._module is not None:
                try:
                    vars(state)["module"] = state.load_into(self._module)
                except Exception as error:
                    self.misfit = _misfit(state, error)
                self._module = None  # after a Ctrl-C before this line the next call does it
            self._engine.let_go()
            return state

    def _read(self) -> TrainedState:
        if self._state is not None:
            return self._state
        engine, finish = self._engine, self._engine.records.finish
        if finish is None:
            raise FlowdpError("the run has no result yet")
        left = engine.failures.forgiven
        parts = next(parts for rank, parts in enumerate(engine.ranks) if rank not in left)
        replica = parts.replica
        best = engine.saver.best if self._restores_best else None
        average = {} if replica.average is None else replica.average.named()
        position, stopped_at = finish.position, None
        if position is not None and best is None:
            rates = replica.learning_rate.state_dict()
            stopped_at = self._stopped_at(position, rates, engine.saver.orders(position))
        self._state = self._state_of(
            best or Weights(replica.module.state_dict(), average),
            replica.optimizer_states(),
            named_momentum(replica, parts.outer if best is None else None),  # the best one stood elsewhere
            history=tuple(engine.records.epochs),
            global_step=finish.global_step,
            epochs_done=finish.epochs_done,
            interrupted=finish.stopped,
            stopped_at=stopped_at,
        )
        return self._state

    def _state_of(self, weights: Weights, optimizers: Any, momentum: Any, **counts: Any) -> TrainedState:
        average = weights.average
        return TrainedState(
            weights_on_cpu(weights.model),
            on_cpu(alone(optimizers)),
            ema=None if average is None else weights_on_cpu(average),
            outer_momentum=weights_on_cpu(momentum) or None,
            _model=self._model,
            **counts,
        )

    def _stopped_at(
        self, position: Position, learning_rate: Mapping[str, Any], orders: Mapping[int, int] | None
    ) -> StopPosition | None:
        """Record from which a run resumes; None where it would have to read on inside an epoch."""
        is_readable = self._is_numbered or not position.open
        return StopPosition(position, self._fingerprint, learning_rate, orders) if is_readable else None


def _misfit(state: TrainedState, error: Exception) -> StateError:
    why = " ".join(format_error(error).split())
    misfit = StateError(
        f"the run has ended well, but the model does not take its weights ({why}). They are in the `state` "
        f"of this error and of the run. A parameter or buffer that is registered in forward belongs in "
        f"__init__",
        state=state,
    )
    misfit.__cause__ = error
    return misfit


def alone(states: Any) -> Any:
    """The one of a list of one; anything else as it is."""
    return states[0] if isinstance(states, list) and len(states) == 1 else states


def on_cpu(tree: Any) -> Any:
    """A tree with its tensors copied to the CPU; anything else as it is."""

    def copied(value: Any) -> Any:
        # A copy: a view would keep, and a file would hold, the whole flat memory.
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    return tree_map(copied, tree)


def weights_on_cpu(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a state_dict on the CPU, in which tied parameters are one tensor, as in the module."""
    first: dict[object, str] = {}
    names = {
        name: first.setdefault(memory_key(value), name)
        for name, value in weights.items()
        if isinstance(value, Tensor)
    }
    made = on_cpu({name: value for name, value in weights.items() if names.get(name, name) == name})
    return {name: made[names.get(name, name)] for name in weights}


def load_checkpoint(path: str | PathLike[str]) -> TrainedState:
    """Read a checkpoint: to export its weights, or to go on from it in another run.

    ::

        flowdp.load_checkpoint("runs/a/best.pt").save("model.safetensors")
        flowdp.load_checkpoint("runs/a").load_into(model).save_pretrained("folder")

    Args:
        path: A file, or a folder of checkpoints, whose newest is read.

    Raises:
        CheckpointError: There is none, or it cannot be read.
        OptionError: It is no path.
    """
    if not isinstance(path, str | PathLike):
        raise OptionError(f"path must be that of a checkpoint or of a folder of such, not {path!r}")
    start = find(path, None)
    assert start is not None
    position, first = start.position, start.ranks[0]
    return TrainedState(
        start.model,
        on_cpu(alone(first["optimizers"])),  # a tensor for each: torch's optimizers change theirs in place
        history=tuple(start.history),
        global_step=position.global_step,
        epochs_done=position.done,
        interrupted=False,
        stopped_at=StopPosition(position, start.fingerprint or {}, first["learning_rate"], start.orders),
        ema=Weights(start.model, start.ema).average,
        outer_momentum=start.outer or None,
    )
