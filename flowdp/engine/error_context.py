"""Epoch, batch and sample indices for error messages."""

from __future__ import annotations

import torch

from flowdp.data.source import Source
from flowdp.device.worker_context import CurrentWorker
from flowdp.errors import (
    CollectiveError,
    DataError,
    MachineLostError,
    OutOfDeviceMemory,
    ProtocolError,
    StepError,
)
from flowdp.machine.worker import Step
from flowdp.policy.formats import format_error, format_indices, format_text
from flowdp.threads.stacks import folded

__all__ = ["ErrorContext"]


class ErrorContext:
    """Current or last step of a rank.

    Attributes:
        step: Step of the rank; None before the first.
        call: Sentences on the call of the user's code that has failed; empty: none.
    """

    def __init__(self, current: CurrentWorker, source: Source) -> None:
        self.step: Step | None = None
        self.call = ""
        self._current = current
        self._source = source

    @property
    def indices(self) -> tuple[int, ...]:
        """The dataset indices of the step's first batch."""
        if self.step is None:
            return ()
        try:
            return self._source.indices(self.step.epoch, self.step.batches[0])
        except Exception:  # of the sampler, which is asked for them
            return ()

    def __str__(self) -> str:
        """Text of the context, which counts from 1; the indices are those of the dataset."""
        if self.step is None:
            return "before its first step"
        epoch, batch = self.step.epoch + 1, self.step.batches[0] + 1
        shown = format_indices(self.indices)
        return (
            f"in epoch {epoch}, at its step {self._current.local_step + 1} (batch {batch}, indices {shown})"
        )

    def explain(self, cause: BaseException, task: str = "") -> BaseException:
        """Build the user's error from an exception of this rank, whose traceback begins with the user's code.

        Args:
            cause: The exception.
            task: Description of the barrier task; empty within a step.
        """
        if isinstance(cause, OutOfDeviceMemory):
            return cause.with_traceback(None)  # of ours; its frames hold the replica
        if isinstance(cause, DataError | ProtocolError | MachineLostError):
            return cause
        # Of a link that broke; without a cause it is of the user's module, whose tensors have changed.
        if isinstance(cause, CollectiveError) and isinstance(cause.__cause__, RuntimeError):
            return cause
        if isinstance(cause, torch.OutOfMemoryError):
            return self.out_of_memory(cause, "what had no room cannot be done in pieces", task)
        who = f"rank {self._current.rank} on {self._current.device}"
        notes = "".join(f"; {note}" for note in getattr(cause, "__notes__", ()))
        where = f"while it {task}" if task else str(self)
        error = StepError(
            f"{who} failed {where}: {format_error(cause)}{notes}{'' if task else self.call}",
            rank=self._current.rank,
            device=str(self._current.device),
            epoch=None if self.step is None else self.step.epoch,
            step=self._current.local_step,
            indices=() if task else self.indices,
        )
        error.__cause__ = folded(cause)
        return error

    def out_of_memory(self, cause: torch.OutOfMemoryError, why: str, task: str = "") -> OutOfDeviceMemory:
        """Build the error of a rank that cannot continue.

        Args:
            cause: Torch's exception.
            why: Nothing smaller can be tried.
            task: See `explain`.
        """
        where = f"while it {task}" if task else str(self)
        sizes = "per_device_batch_size" + (", or batch_size= of predict(), limits" if task else " limits")
        error = OutOfDeviceMemory(
            f"rank {self._current.rank} on {self._current.device} ran out of memory {where}: {why}. "
            f"{sizes} the samples of one forward, per_device_batch_size=[...] those of "
            "each device; gradient_accumulation_steps makes large steps of small batches. torch says: "
            f"{format_text(cause)}",
            rank=self._current.rank,
        )
        error.__cause__ = cause
        return error
