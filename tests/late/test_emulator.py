"""The emulator itself: its operations have the values of the CPU, and it shows each kind of missing edge."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.late.device import LateCuda, LateStream
from tests.late.install import installed
from tests.late.nccl import LateNccl
from tests.late.orders import EAGER, LATE, Order, shuffled

CARD, OTHER = "cuda:0", "cuda:1"
ORDERS = [LATE, EAGER, shuffled(0)]


@pytest.fixture
def cuda() -> Iterator[LateCuda]:
    with installed(LateCuda(2)) as machine:
        yield machine


def value_of(tensor: Tensor) -> float:
    """What lies in a tensor now, whether it has been computed or not."""
    return float(torch._C.TensorBase.tolist(tensor.reshape(-1)[0].detach()))


def is_late(tensor: Tensor) -> bool:
    return value_of(tensor) != value_of(tensor)


# ---------------------------------------------------------------- values
def trained(device: str, **options: Any) -> list[Tensor]:
    """A few steps of a network with buffers, embeddings, a recurrent layer and dropout in float64."""
    torch.manual_seed(0)
    embedding, recurrent = nn.Embedding(11, 4), nn.LSTM(4, 5, batch_first=True)
    convolution, norm, last = nn.Conv1d(5, 6, 3), nn.BatchNorm1d(6), nn.Linear(6, 3)
    module = nn.ModuleList([embedding, recurrent, convolution, norm, last]).double().to(device)
    optimizer = options.pop("optimizer", torch.optim.SGD)(module.parameters(), lr=0.05, **options)
    losses = []
    for step in range(3):
        words = torch.arange(24, device=device).reshape(4, 6).add(step).remainder(11)
        hidden = recurrent(embedding(words))[0].transpose(1, 2)
        out = last(F.relu(norm(convolution(hidden)), inplace=True).amax(2))
        loss = F.cross_entropy(out, words[:, 0] % 3) + 0.1 * out.std()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        nn.utils.clip_grad_value_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
        losses.append(loss.detach())
    return [tensor.cpu() for tensor in (*losses, *module.state_dict().values())]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "foreach": True},
        {"optimizer": torch.optim.AdamW, "fused": True},
        {"optimizer": torch.optim.Adam, "foreach": True},
        {"optimizer": torch.optim.Adagrad},
    ],
    ids=["SGD", "foreach", "fused", "Adam foreach", "Adagrad"],
)
def test_training_has_the_bits_of_the_cpu(order: Order, options: dict[str, Any]) -> None:
    expected = trained("cpu", **options)
    with installed(LateCuda(1, order)) as cuda:
        found = trained(CARD, **options)
    assert all(map(torch.equal, found, expected))
    assert cuda.executed > 200


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "write by mask": lambda x: x.index_put_((x > 0,), x.new_zeros(())),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.round().unique(),
    "repeat_interleave": lambda x: x[0].repeat_interleave(torch.arange(4, device=x.device)),
    "index": lambda x: x[[2, 0]] + x[torch.tensor([1, 1])],
    "assignment": lambda x: x.__setitem__((slice(None), 1), 7.0),
    "assignment of a view": lambda x: x.t()[1].mul_(3.0),
    "sort": lambda x: x.sort(1),
    "cat": lambda x: torch.cat([x, x.new_ones(1, 4)]),
    "foreach": lambda x: torch._foreach_norm([x, x.flatten()]),
    "foreach in place": lambda x: torch._foreach_add_([x[0], x[1]], 2.0),
    "to": lambda x: x.to(torch.float16).to(x),
    "to, with a copy": lambda x: x.to(torch.float64, copy=True),
    "complex": lambda x: torch.fft.fft(x).abs(),
    "scalar of the host": lambda x: x * torch.tensor(2.0) + torch.tensor(1),
    "scatter": lambda x: x.scatter_add(1, torch.zeros(3, 4, dtype=torch.int64, device=x.device), x),
    "resize": lambda x: x.clone().resize_(2, 2),
    "deepcopy": lambda x: copy.deepcopy(x),
    "data": lambda x: setattr(x, "data", x + 1),
    "higher order": lambda x: torch.autograd.grad(
        torch.autograd.grad((y := x.clone().requires_grad_()).pow(3).sum(), y, create_graph=True)[0].sum(), y
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_the_values_of_the_cpu(cuda: LateCuda, name: str) -> None:
    host = torch.arange(-5.0, 7.0).reshape(3, 4) / 2
    card = (host.to(CARD, non_blocking=True) * 2) / 2
    expected, found = (OPERATIONS[name](x) for x in (host, card))
    for ours, theirs in zip(flat((found, card)), flat((expected, host)), strict=True):
        assert ours == theirs


def flat(value: Any) -> list[Any]:
    """Numbers of a result."""
    if isinstance(value, Tensor):
        return [tuple(value.shape), value.stride(), value.dtype, *value.reshape(-1).tolist()]
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, (list, tuple)) else [value]


def test_nothing_runs_before_it_is_waited_for(cuda: LateCuda) -> None:
    x = torch.ones(4, device=CARD)
    y = x + 1
    assert is_late(x)
    assert is_late(y)
    assert cuda.executed == 0
    assert y.sum().item() == 8.0
    assert value_of(x) == 1.0


def test_only_what_is_demanded_runs(cuda: LateCuda) -> None:
    here, there = cuda.Stream(CARD), cuda.Stream(CARD)
    event = cuda.Event()
    with cuda.stream(here):
        x = torch.ones(2, device=CARD)
        event.record()
        later = x + 1
    with cuda.stream(there):
        other = torch.ones(2, device=CARD)
    event.synchronize()
    assert [is_late(tensor) for tensor in (x, later, other)] == [False, True, True]


# ---------------------------------------------------------------- edges
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("has_edge", [False, True])
def test_a_missing_edge_gives_wrong_numbers(order: Order, has_edge: bool) -> None:
    with installed(LateCuda(1, order)) as cuda:
        one, two = cuda.Stream(CARD), cuda.Stream(CARD)
        event = cuda.Event()
        with cuda.stream(one):
            x = torch.zeros(2, device=CARD)
            for _ in range(9):
                x.add_(1)
            event.record()
        if has_edge:
            two.wait_event(event)
        with cuda.stream(two):
            y = x + 0
            found = y.tolist()
    assert not has_edge or found == [9.0, 9.0]
    if order is LATE:
        assert has_edge == (found == [9.0, 9.0])


def test_marks_of_other_devices_are_waited_for_and_not_recorded(cuda: LateCuda) -> None:
    event = cuda.Event()
    here, there = cuda.Stream(CARD), cuda.Stream(OTHER)
    with cuda.stream(here):
        x = torch.ones(1, device=CARD)
    event.record(here)
    there.wait_event(event)
    there.synchronize()
    assert not is_late(x)
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(there)


# ---------------------------------------------------------------- several devices


def test_a_copy_between_devices_takes_part_in_the_current_streams_of_both(cuda: LateCuda) -> None:
    here, there = cuda.Stream(CARD), cuda.Stream(OTHER)
    with cuda.stream(here), cuda.stream(there):
        source = torch.ones(2, device=CARD) + 1
        target = torch.zeros(2, device=OTHER).fill_(5)
        target.copy_(source)
        source.zero_()
        copied = target + 0
    here.synchronize()
    assert value_of(target) == 2.0
    there.synchronize()
    assert value_of(copied) == 2.0


def test_a_copy_between_devices_waits_for_the_target_too(cuda: LateCuda) -> None:
    here, there = cuda.Stream(CARD), cuda.Stream(OTHER)
    with cuda.stream(here), cuda.stream(there):
        target = torch.zeros(2, device=OTHER)
        read = target + 0
        target.copy_(torch.ones(2, device=CARD))
    here.synchronize()
    assert value_of(read) == 0.0


def test_without_the_targets_stream_a_copy_is_not_ordered_with_it(cuda: LateCuda) -> None:
    there = cuda.Stream(OTHER)
    with cuda.stream(there):
        target = torch.zeros(2, device=OTHER)
        target.fill_(5)
    target.copy_(torch.ones(2, device=CARD))  # on the default streams of both
    cuda.synchronize(CARD)
    there.synchronize()
    assert value_of(target) == 5.0


# ---------------------------------------------------------------- host and device
def test_pageable_memory_is_read_when_a_copy_is_called(cuda: LateCuda) -> None:
    host = torch.ones(2)
    card = host.to(CARD, non_blocking=True)
    host.fill_(7)
    assert is_late(card)
    assert card.tolist() == [1.0, 1.0]


def test_pinned_memory_is_read_when_a_copy_runs(cuda: LateCuda) -> None:
    pinned = torch.ones(2).pin_memory()
    assert pinned.is_pinned()
    card = torch.empty(2, device=CARD).copy_(pinned, non_blocking=True)
    pinned.fill_(7)
    assert card.tolist() == [7.0, 7.0]


def test_pinned_memory_is_written_when_a_copy_runs(cuda: LateCuda) -> None:
    pinned = torch.empty(2, pin_memory=True)
    pinned.copy_(torch.ones(2, device=CARD), non_blocking=True)
    assert pinned.isnan().all()
    cuda.current_stream().synchronize()
    assert pinned.tolist() == [1.0, 1.0]


def test_tensors_name_their_device(cuda: LateCuda) -> None:
    x = torch.ones(2, device=OTHER)
    assert (x.device, x.is_cuda, x.is_cpu) == (torch.device(OTHER), True, False)
    assert x.to(OTHER) is x
    assert x.cpu().device == torch.device("cpu")
    assert x.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert torch.empty_like(x, device="cpu").device == torch.device("cpu")
    assert torch.empty_like(x, device=CARD).device == torch.device(CARD)
    assert torch.empty_like(x, device="meta").device == torch.device("meta")
    assert torch.ones(2).cuda(1).device == torch.device(OTHER)
    with pytest.raises(TypeError, match="can't convert cuda:1"):
        x.numpy()


# ---------------------------------------------------------------- memory
def used_elsewhere(cuda: LateCuda, end: Callable[[LateStream, LateStream, Tensor], None]) -> Tensor:
    """Free memory that another stream uses, allocate again, and return the use's result."""
    owner, user = cuda.Stream(CARD), cuda.Stream(CARD)
    with cuda.stream(owner):
        x = torch.ones(2, device=CARD)
    user.wait_stream(owner)
    with cuda.stream(user):
        y = x + 1
    end(owner, user, x)
    del x
    with cuda.stream(owner):
        torch.zeros(2, device=CARD)
    owner.synchronize()
    user.synchronize()
    return y


ENDS: dict[str, Callable[[LateStream, LateStream, Tensor], None]] = {
    "nothing": lambda owner, user, x: None,
    "record_stream": lambda owner, user, x: x.record_stream(user),  # type: ignore[arg-type]
    "the owner waits": lambda owner, user, x: owner.wait_stream(user),
    "the host waits": lambda owner, user, x: user.synchronize(),
}


@pytest.mark.parametrize("end", ENDS)
def test_memory_that_is_freed_while_another_stream_uses_it(cuda: LateCuda, end: str) -> None:
    y = used_elsewhere(cuda, ENDS[end])
    hazards, is_right = len(cuda.memory.hazards), y.tolist() == [2.0, 2.0]
    assert (hazards, is_right) == ((1, False) if end == "nothing" else (0, True))


@pytest.mark.parametrize("order", [EAGER, shuffled(0)], ids=str)
def test_the_hazard_does_not_depend_on_the_order(order: Order) -> None:
    with installed(LateCuda(1, order)) as cuda:
        used_elsewhere(cuda, ENDS["nothing"])
    assert len(cuda.memory.hazards) == 1
    assert "was freed and may be allocated again" in cuda.memory.hazards[0]


def test_memory_that_is_referred_to_is_not_free(cuda: LateCuda) -> None:
    kept: list[Tensor] = []
    used_elsewhere(cuda, lambda owner, user, x: kept.append(x[:1]))
    assert not cuda.memory.hazards


# ---------------------------------------------------------------- NCCL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_a_sum_of_nccl_runs_when_all_streams_have_come_to_it(cuda: LateCuda, dtype: torch.dtype) -> None:
    nccl = LateNccl(cuda)
    numbers = {torch.float32: 7, torch.bfloat16: 9, torch.float64: 8, torch.int32: 2}
    streams = [cuda.Stream(CARD), cuda.Stream(OTHER)]
    rows = []
    for stream in streams:
        with cuda.stream(stream):
            rows.append(torch.ones(3, dtype=dtype, device=stream.device) * (1 + len(rows)))
    comms = [nccl.NcclCommunicator(2, b"", rank) for rank in range(2)]
    nccl.groupStart()
    for comm, row, stream in zip(comms, rows, streams, strict=True):
        address = row.data_ptr()
        comm.allReduce(address, address, 3, numbers[dtype], nccl.NCCL_SUM, stream.cuda_stream)
    nccl.groupEnd()
    assert cuda.executed == 0
    streams[1].synchronize()
    assert [torch._C.TensorBase.tolist(row) for row in rows] == [[3.0] * 3] * 2


# ---------------------------------------------------------------- threads
def test_each_thread_has_current_streams_of_its_own(cuda: LateCuda) -> None:
    found = {}

    def work() -> None:
        found["stream"] = cuda.current_stream(CARD)
        found["value"] = torch.ones(1, device=CARD).item()

    with cuda.stream(cuda.Stream(CARD)) as _, cuda.device(OTHER):
        assert cuda.current_stream().device == torch.device(OTHER)
        assert cuda.current_stream(CARD).role == "stream"
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == {"stream": cuda.default_stream(CARD), "value": 1.0}
    assert cuda.current_device() == 0


def test_nothing_is_left_behind() -> None:
    with installed(LateCuda(1)):
        torch.ones(1, device=CARD)
    assert torch.cuda.Stream.__module__.startswith("torch")
    assert "device" not in vars(torch.Tensor)
    x = torch.ones(1)
    assert x.device == torch.device("cpu")
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
