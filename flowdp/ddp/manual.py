"""Manual control: replicas on several devices, and collectives to call from a training loop of your own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.checks import check_loop_backend
from flowdp.collective.batch_norm import SharedStatistics, call_groups, check_sync_batch_norm, taking_part
from flowdp.collective.mean import Op, flat_view, reduce_all, split_equally, write_back
from flowdp.collective.nccl_loop import NcclLoop, row_sizes, rows_like
from flowdp.collective.process_group import ProcessGroup
from flowdp.collective.select import open_loop
from flowdp.device.compiled import FirstCalls, make_room
from flowdp.device.copies import carry
from flowdp.device.cores import pool_sizes, set_own_threads
from flowdp.device.discovery import resolve_devices
from flowdp.device.dispatch import prepare_torch
from flowdp.device.process_tuning import tuned_process
from flowdp.device.streams import open_lanes
from flowdp.device.structure import check_same, check_separate_memory, structure
from flowdp.device.torch_modes import caller_modes
from flowdp.errors import OptionError
from flowdp.options import LoopBackend, ProcessTuning
from flowdp.threads.crew import Crew

__all__ = ["Ddp"]


class Ddp:
    """Replicas for a training loop of your own: GANs, reinforcement learning, several losses.

    ::

        ddp = flowdp.Ddp.wrap([make() for _ in devices], devices)
        ddp.sync_params()                                   # all start from model 0
        optimizers = [torch.optim.AdamW(model.parameters()) for model in ddp.models]

        def backward(rank, model, batch):
            loss_of(model, batch).backward()
            return len(batch)

        for batches in ...:                                 # one batch per device, of any sizes
            counts = ddp.parallel(backward, batches)
            ddp.weighted_all_reduce_gradients(counts)       # every replica: the gradient of the whole
            for optimizer in optimizers:                    # so the replicas stay equal
                optimizer.step()
                optimizer.zero_grad()
        ddp.close()

    It is a context manager, which closes it. All calls work with one model, too.

    Attributes:
        models: The models given, one per rank.
        devices: Their devices, one per rank.

    Threads: one at a time, and none of those that `parallel` runs.
    Streams: on CUDA, work goes to the caller's current streams of all devices.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        devices: Sequence[torch.device],
        backend: LoopBackend = "auto",
    ) -> None:
        self.models = tuple(models)
        self.devices = tuple(devices)
        self._kinds = frozenset(device.type for device in devices)
        self._crew: Crew | None = None
        self._norms = [SharedStatistics(model) for model in models]
        self._calls: list[FirstCalls] = []  # made for the first function that `parallel` is given
        self._lanes = open_lanes(devices)
        self._shares_statistics = bool(self._norms[0]) and len(models) > 1
        self._nccl: NcclLoop | None = None
        with ExitStack() as stack:
            if len(models) > 1:
                trained = [parameter for parameter in models[0].parameters() if parameter.requires_grad]
                self._nccl = open_loop(backend, self._lanes, row_sizes(trained, is_wide=True))
                if self._nccl is not None:
                    stack.callback(self._nccl.close)
                prepare_torch()
                make_room(len(models))
                if self._kinds == {"cpu"}:
                    stack.enter_context(tuned_process(ProcessTuning()))
                threads = pool_sizes(devices, ProcessTuning())
                names = [f"flowdp-ddp-{rank}" for rank in range(len(models))]
                self._crew = Crew(names, partial(_thread_context, self.devices, threads))
                stack.callback(self._crew.close)
            self._close = weakref.finalize(self, stack.pop_all().close)

    @classmethod
    def wrap(
        cls,
        models: Sequence[nn.Module],
        devices: Sequence[torch.device | str | int] | None = None,
        *,
        backend: LoopBackend = "auto",
    ) -> Ddp:
        """Wrap models, one per rank.

        Args:
            models: Replicas of one structure. They are moved to their devices and not changed otherwise.
            devices: Device of each model. None: the devices on which the models are.
            backend: Transfer between CUDA devices: "nccl"; "local", by copies to and from the first device;
                "auto", by NCCL where each model has a CUDA device of its own and NCCL works.

        Raises:
            CollectiveError: backend="nccl" does not work here.
            OptionError: No model, one given twice or sharing tensors with another, a wrong number of devices,
                an unknown device, a model on several devices, models that differ in structure (the message
                names the parameter), or an embedding that needs the indices of all devices' batches.
        """
        if not models:
            raise OptionError("models is empty: give at least one model")
        if devices is not None and len(devices) != len(models):
            raise OptionError(
                f"{len(models)} models need {len(models)} devices, one each, not {len(devices)}"
            )
        check_same([structure(model) for model in models])
        check_separate_memory(models)
        present = [_device_of(rank, model) for rank, model in enumerate(models)]
        wanted = resolve_devices(present if devices is None else devices)
        check_sync_batch_norm(models[0], "exact", wanted)
        check_loop_backend(backend, wanted)
        if devices is not None:
            for model, device in zip(models, wanted, strict=True):
                model.to(device)
        return cls(models, wanted, backend)

    @property
    def world_size(self) -> int:
        """Number of models."""
        return len(self.models)

    def sync_params(self) -> None:
        """Copy the parameters and buffers of model 0 to all models."""
        self._send([[*model.parameters(), *model.buffers()] for model in self.models])

    def sync_buffers(self) -> None:
        """Copy the buffers of model 0 to all models."""
        self._send([list(model.buffers()) for model in self.models])

    def all_reduce_gradients(self) -> None:
        """Replace each gradient by its mean over the replicas.

        A gradient that is missing on a replica counts as zero there; missing on all of them it stays None.
        Frozen parameters keep the gradients that they have.

        Raises:
            OptionError: A gradient is sparse.
        """
        self._reduce("mean", None)

    def weighted_all_reduce_gradients(self, batch_counts: Sequence[int]) -> None:
        """Replace each gradient by the sum of the replicas' gradients, each times its share of the counts.

        Where each loss is the mean over a batch and the counts are the batch sizes, that is the gradient of
        the mean over all samples. A replica with count 0 is left out of the sum and receives it.

        Args:
            batch_counts: One per rank: numbers of samples, or `ElChe.batch_counts`.

        Raises:
            OptionError: A wrong number of counts, a negative one, or all are 0; a gradient is sparse; or the
                counts differ and the models have SyncBatchNorm.
        """
        counts = [float(count) for count in batch_counts]
        if len(counts) != len(self.models):
            raise OptionError(
                f"{len(self.models)} models need {len(self.models)} batch_counts, one each, not {len(counts)}"
            )
        total = sum(counts)
        if self._shares_statistics and len(set(counts)) > 1:
            raise OptionError(
                "with SyncBatchNorm each loss has entered the gradients of all replicas, with equal "
                "weights, and cannot be weighted afterwards: multiply each loss by count * replicas / sum "
                "of counts before backward, and call all_reduce_gradients()"
            )
        if not all(count >= 0 for count in counts) or not 0 < total < float("inf"):
            raise OptionError(f"batch_counts must be finite, 0 or more, and not all 0, not {batch_counts!r}")
        self._reduce("sum", [count / total for count in counts])

    def parallel(self, fn: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
        """Call `fn(rank, model, *its element of each of args)` for every replica at once, each in a thread.

        The threads use the caller's grad, inference and autocast modes and, on CUDA, its current streams.

        SyncBatchNorm computes the statistics of all replicas. Forward and backward must then run inside of
        `fn`, on all replicas; each replica's loss has the same weight.

        Returns:
            The results of the calls. Shape (world_size,).

        Raises:
            OptionError: An argument does not have one element per rank.
            BaseException: The error of the lowest rank that raised one, after all calls have ended, with a
                note that names rank and device.
            RuntimeError: This object is closed, or `parallel` is called inside of `fn`.
        """
        for number, elements in enumerate(args):
            if len(elements) != len(self.models):
                raise OptionError(
                    f"argument {number} of {getattr(fn, '__name__', 'fn')} needs one element for each of "
                    f"{len(self.models)} replicas, not {len(elements)}"
                )
        calls = [
            partial(fn, rank, model, *(elements[rank] for elements in args))
            for rank, model in enumerate(self.models)
        ]
        if self._crew is None:
            return [calls[0]()]
        self._calls = self._calls or [FirstCalls(model, fn) for model in self.models]
        modes = caller_modes(self._kinds)
        streams = [lane.on(lane.current()) for lane in self._lanes]
        with call_groups(self._lanes, range(len(calls)) if self._shares_statistics else ()) as groups:
            return self._crew.run(
                [
                    partial(self._call, rank, call, modes, stream, groups.get(rank))
                    for rank, (call, stream) in enumerate(zip(calls, streams, strict=True))
                ]
            )

    def close(self) -> None:
        """End the threads and release NCCL; further calls do nothing."""
        self._close()

    def __enter__(self) -> Ddp:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(
        self,
        rank: int,
        call: Callable[[], Any],
        modes: Callable[[], AbstractContextManager[None]],
        stream: AbstractContextManager[Any],
        group: ProcessGroup | None,
    ) -> Any:
        try:
            turn = nullcontext() if group else self._calls[rank].turn()
            with turn, modes(), stream, taking_part(self._norms[rank], group):
                return call()
        except Exception as error:
            error.add_note(f"flowdp: on rank {rank}, {self.devices[rank]}")
            raise

    @torch.no_grad()
    def _send(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        first = [tensor.detach() for tensor in tensors[0]]
        sent: list[list[Tensor | None]] = [[None] * len(first) for _ in self.devices]
        if self._nccl is not None:
            self._settle()
            sent = self._nccl.copies(first)
        for theirs, there, device in zip(tensors[1:], sent[1:], self.devices[1:], strict=True):
            _fill(theirs, there)
            rest = [tensor if view is None else None for tensor, view in zip(first, there, strict=True)]
            _fill(theirs, carry(rest, device))

    @torch.no_grad()
    def _reduce(self, op: Op, shares: Sequence[float] | None) -> None:
        gradients = [list(grads) for grads in zip(*self._columns(), strict=True)]  # by rank
        if self._nccl is not None and gradients:
            gradients = self._reduce_by_nccl(self._nccl, gradients, op, shares)
        if not gradients:
            return
        home = self.devices[0]
        near = [carry(grads, home) for grads in gradients]
        for column in zip(*near, strict=True):
            flats = [flat_view(tensor) for tensor in column]
            for piece in split_equally(flats):
                reduce_all(piece, op, shares)
            for tensor, flat in zip(column, flats, strict=True):
                write_back(flat, tensor)
        for grads, moved, device in zip(gradients, near, self.devices, strict=True):
            if moved[0] is not grads[0]:
                _fill(grads, carry(moved, device))

    def _reduce_by_nccl(
        self, nccl: NcclLoop, gradients: Sequence[list[Tensor]], op: Op, shares: Sequence[float] | None
    ) -> list[list[Tensor]]:
        """Reduce the gradients that have a place in rows; return the others, by rank."""
        self._settle()
        rows = rows_like(gradients[0], self.devices, is_wide=True)
        for rank, (grads, there) in enumerate(zip(gradients, rows, strict=True)):
            there.fill(grads)
            if shares is not None:
                for memory in there.memories:  # 0 times NaN would be NaN
                    memory.mul_(shares[rank]) if shares[rank] else memory.zero_()
        if rows[0].memories:
            nccl.all_reduce([rank_rows.memories for rank_rows in rows])
        for grads, there in zip(gradients, rows, strict=True):
            for memory in there.memories if op == "mean" else ():
                memory.div_(len(gradients))
            _fill(grads, there.views)
        left = [number for number, view in enumerate(rows[0].views) if view is None]
        return [[grads[number] for number in left] for grads in gradients] if left else []

    def _settle(self) -> None:
        """Wait for calls that an interrupt left running: they may allocate while NCCL is launched."""
        if self._crew is not None:
            self._crew.settle()

    def _columns(self) -> Iterator[list[Tensor]]:
        """All ranks' gradients, for each parameter that has one anywhere; missing ones become zero."""
        for (name, first), *others in zip(*(model.named_parameters() for model in self.models), strict=True):
            parameters = [first, *(parameter for _, parameter in others)]
            if not any(parameter.requires_grad and parameter.grad is not None for parameter in parameters):
                continue
            gradients = []
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad.layout is not torch.strided:
                    raise OptionError(
                        f"the gradient of parameter {name!r} is sparse, and only dense gradients are "
                        "averaged: make the layer with sparse=False"
                    )
                gradients.append(parameter.grad.detach())
            yield gradients


def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Copy values to tensors, except for those that are None."""
    pairs = [(tensor, value) for tensor, value in zip(tensors, values, strict=True) if value is not None]
    if pairs:
        torch._foreach_copy_([tensor for tensor, _ in pairs], [value for _, value in pairs])


@contextmanager
def _thread_context(devices: Sequence[torch.device], threads: Sequence[int], rank: int) -> Iterator[None]:
    """Context of a rank's thread: its number of OpenMP threads, and backward in this thread."""
    if devices[rank].type == "cpu":
        set_own_threads(threads[rank])
    # Backward runs in this thread, not in autograd's one per device, which replicas may share.
    with torch.autograd.set_multithreading_enabled(False):
        yield


def _device_of(rank: int, model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise OptionError(
            f"model {rank} is on {' and '.join(sorted(map(str, devices)))}: move it to one device, "
            "model.to(...)"
        )
    return devices.pop() if devices else torch.device("cpu")
