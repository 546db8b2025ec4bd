"""Batches of one dataset for all ranks of this machine: a rank that is free takes the next one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data.moving import await_dataset, keep_for
from flowdp.data.source import Batch, Source
from flowdp.data.tensor_source import TensorSource
from flowdp.device.accelerator import device_generator, is_accelerator
from flowdp.device.copies import move
from flowdp.device.streams import Lane
from flowdp.device.trees import tensors_of, tree_map
from flowdp.errors import DataError
from flowdp.modules.training_mode import put_modes
from flowdp.policy.formats import format_indices
from flowdp.replica.inference import InferenceReplica
from flowdp.replica.replica import Replica

__all__ = ["EvaluatedReplica", "SharedBatches", "evaluating", "to_lane"]

EvaluatedReplica = Replica | InferenceReplica
"""A rank's model and loss, with an optimizer or without one."""


class SharedBatches:
    """Readings of a dataset, one after another; its ranks share the batches of each.

    Args:
        source: Source of the batches; each epoch of it is a reading.

    Attributes:
        source: Source of the batches.

    Threads:
        The user's, unless a method says otherwise; it has made the dataset's tensors.
    """

    def __init__(self, source: Source) -> None:
        # A rank gathers for itself, on a stream of its own.
        self.source = source.for_all_streams() if isinstance(source, TensorSource) else source
        self._wake: Callable[[int, int, int], None]

        # Serialises everything below.
        self._lock = threading.Lock()
        self._ranks: set[int] = set()  # those that take part
        self._dealt: Counter[int] = Counter()  # batches of each reading
        self._ends: dict[int, int] = {}  # number of batches of datasets without a length
        self._is_cut = False

    def start(self, *, wake: Callable[[int, int, int], None], failed: Callable[[DataError], None]) -> None:
        """Start the dataset's processes, and no thread: reading begins with the first `take`.

        Call it before any other thread exists, that of another source included.

        Args:
            wake: Called as `wake(rank, epoch, batch)` when the event has come that this rank waits for: a
                batch, where the epoch is the number of the reading; the end or a cut, where both are 0. Must
                not block.
            failed: Called once, if reading fails.

        Raises:
            DataError: The processes could not be started.
        """
        self._wake = wake
        self.source.on_end(self._ended)
        self.source.start(wake=wake, failed=failed)

    def each(
        self,
        rank: int,
        replica: EvaluatedReplica,
        number: int,
        wait: Callable[[], bool],
        task: Callable[[int, Any, int], None],
        of: str = "",
    ) -> None:
        """Do a task with each batch that this rank claims, in evaluation mode, until none is left.

        Args:
            rank: Rank index.
            replica: Its own; the module's modes are put back, whatever happens.
            number: Number of the reading, from 0. Every rank takes part in each.
            wait: See `take`.
            task: Called as `task(number of the batch, batch on the device, samples)`.
            of: The reading, for the note of an error.

        Streams:
            All is enqueued on the current stream, which is the lane's `compute`.

        Threads:
            The thread of the rank, all of them at once.

        Raises:
            DataError: The dataset failed.
            Exception: Raised by the user's code, with a note of the batch.
        """
        with evaluating(replica.module), _own_generator(replica.device), torch.no_grad():
            while (taken := self.take(rank, number, wait)) is not None:
                batch, payload = taken
                try:
                    moved = tree_map(lambda leaf: to_lane(leaf, replica.lane), payload)
                    task(batch, moved, self.source.samples_in(number, batch))
                except Exception as error:
                    error.add_note(f"in {self._name(number, batch)}{of}")
                    raise

    def take(self, rank: int, number: int, wait: Callable[[], bool]) -> tuple[int, Batch] | None:
        """Claim a batch and wait until it is there; None where there is none left.

        Args:
            rank: Rank index.
            number: Number of the reading.
            wait: Blocks until `wake` was called for this rank, or more often; False: told to leave.

        Returns:
            The batch's number in the dataset, and the batch.

        Threads:
            The worker of the rank, all of them at once.

        Raises:
            DataError: The dataset failed.
        """
        first, step = self.source.stride
        with self._lock:
            batch = first + step * self._dealt[number]
            self._dealt[number] += 1
            self._ranks.add(rank)
        while not self._is_cut and ((end := self.end(number)) is None or batch < end):
            payload = self.source.take(rank, number, batch)
            if payload is not None:
                return batch, payload
            if not wait():
                return None
        return None

    def end(self, number: int) -> int | None:
        """Number of batches of a reading, of all machines together; None: not known yet."""
        batches = self.source.batches
        return self._ends.get(number) if batches is None else batches

    def cut(self) -> None:
        """Let no rank take another batch, of this reading or a later one.

        Threads:
            Any. Does not block.
        """
        with self._lock:
            self._is_cut = True
        self._wake_all()

    def _name(self, number: int, batch: int) -> str:
        """A batch with the indices of its samples."""
        indices = self.source.indices(number, batch)
        return f"batch {batch + 1}" + (f" (samples {format_indices(indices)})" if indices else "")

    def _ended(self, number: int, batches: int) -> None:
        """Note the end, on the reader thread, and wake the ranks that have claimed a batch beyond it."""
        self._ends[number] = batches
        self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            ranks = list(self._ranks)
        for rank in ranks:
            self._wake(rank, 0, 0)


def to_lane(leaf: Any, lane: Lane) -> Any:
    """A leaf of a batch on the lane's device; the current stream is its `compute`."""
    await_dataset(leaf, lane, lane.compute)
    if isinstance(leaf, Tensor):
        moved = move(leaf, lane.device)
    elif hasattr(leaf, "to"):
        moved = leaf.to(lane.device)
    else:
        return leaf
    # One that lies there already belongs to another stream, which gets its memory when we let go of it.
    keep_for(lane.compute, tensors_of(moved))
    return moved


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; then each submodule has its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        put_modes(modes)


@contextmanager
def _own_generator(device: torch.device) -> Iterator[None]:
    """Restore a device's generator: ranks share batches by speed, and training must not depend on it."""
    if not is_accelerator(device):
        yield
        return
    generator = device_generator(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
