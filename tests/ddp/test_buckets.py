from __future__ import annotations

import pytest
import torch

from flowdp.collective.local_group import local_groups
from flowdp.collective.process_group import ProcessGroup
from flowdp.ddp.buckets import GradientBucket, broadcast_all
from flowdp.device.copies import dense_strides
from flowdp.errors import OptionError
from tests.collective.fake_world import in_threads
from tests.limits import HANG_S


def test_tensors_lie_one_behind_the_other():
    bucket = GradientBucket(400)
    assert bucket.is_empty
    assert bucket.add(torch.tensor([1.0, 2.0, 3.0]))
    assert (bucket.size, bucket.nbytes, bucket.is_empty, bucket.is_full) == (3, 12, False, False)
    assert bucket.add(torch.tensor([[4.0], [5.0]]))
    assert bucket.data.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    first, second = bucket.extract()
    assert first.tolist() == [1.0, 2.0, 3.0]
    assert second.tolist() == [[4.0], [5.0]]
    bucket.data.mul_(2)
    assert second.tolist() == [[8.0], [10.0]]  # views


def test_what_does_not_fit_leaves_it_as_it_was():
    bucket = GradientBucket(5 * 8, torch.float64)
    assert bucket.add(torch.ones(3, dtype=torch.float64))
    assert not bucket.add(torch.ones(3, dtype=torch.float64))
    assert (bucket.size, bucket.is_full) == (3, False)
    assert bucket.add(torch.ones(2, dtype=torch.float64))
    assert bucket.is_full
    bucket.clear()
    assert (bucket.size, bucket.is_empty, bucket.extract()) == (0, True, [])
    assert bucket.add(torch.ones(5, dtype=torch.float64))


def test_a_tensor_larger_than_the_capacity_fits_an_empty_bucket_alone():
    bucket = GradientBucket(16)
    assert bucket.add(torch.arange(9.0))
    assert bucket.data.tolist() == list(range(9))
    assert bucket.is_full
    assert not bucket.add(torch.zeros(1))
    bucket.clear()
    assert bucket.add(torch.zeros(4))
    assert bucket.is_full
    assert not bucket.add(torch.zeros(1))  # its memory has grown, its capacity has not


def test_dtypes_and_devices_are_kept_apart():
    bucket = GradientBucket(16)
    with pytest.raises(OptionError, match="float64"):
        bucket.add(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(OptionError, match="meta"):
        bucket.add(torch.zeros(1, device="meta"))
    assert bucket.is_empty
    with pytest.raises(OptionError, match="capacity_bytes"):
        GradientBucket(0)


def test_strides_are_kept_where_they_are_dense():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    expanded = torch.randn(3, 1).expand(3, 4)
    bucket = GradientBucket(4096)
    assert bucket.add(image)
    assert bucket.add(expanded)
    first, second = bucket.extract()
    assert torch.equal(first, image)
    assert first.stride() == image.stride() == dense_strides(image)
    assert torch.equal(second, expanded)
    assert second.stride() == (4, 1)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_broadcast_of_many_tensors(bucket_bytes):
    def make(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        flags = torch.arange(6) % (rank + 2) == 0
        image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        return [torch.randn(7), torch.tensor(rank), torch.randn(3, 3).double(), image, flags, torch.empty(0)]

    held = [make(rank) for rank in range(3)]
    groups = local_groups(["cpu"] * 3, timeout=HANG_S)
    assert (
        in_threads(range(3), lambda rank: broadcast_all(groups[rank], held[rank], 1, bucket_bytes))
        == [None] * 3
    )
    for own in held:
        assert all(torch.equal(a, b) for a, b in zip(own, make(1), strict=True))


@pytest.mark.parametrize(
    ("bucket_bytes", "calls"), [(1, [3, 1, 1, 2, 2, 2]), (16, [4, 4, 1, 2]), (24, [6, 1, 4]), (1000, [1, 10])]
)
def test_calls_of_a_broadcast(bucket_bytes, calls):
    seen: list[int] = []

    class Spy(ProcessGroup):
        rank, size = 0, 1

        def broadcast(self, tensor, src=0, *, async_op=False):
            seen.append(tensor.numel())

        all_gather_object = barrier = _reduce = _broadcast = _gather = None

    tensors = [torch.zeros(n) for n in (3, 1, 2, 2, 2)]
    broadcast_all(Spy(), [*tensors[:2], torch.tensor(7), *tensors[2:]], 0, bucket_bytes)
    assert sorted(seen) == sorted(calls)


def test_broadcast_leaves_no_trace_in_a_graph_of_before():
    weight = torch.ones(3, requires_grad=True)
    buffer = torch.ones(3)
    loss = (weight * buffer).sum()

    class Other(ProcessGroup):
        def __init__(self):
            self.rank, self.size = 1, 2

        def broadcast(self, tensor, src=0, *, async_op=False):
            tensor.fill_(5.0)

        all_gather_object = barrier = _reduce = _broadcast = _gather = None

    broadcast_all(Other(), [buffer])
    assert buffer.tolist() == [5.0] * 3
    loss.backward()  # raises if a saved tensor is known to have changed
