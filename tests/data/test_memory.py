"""Tests of batches' memory: their own, even if a dataset reuses its buffers, without needless copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from flowdp.data.memory import HELD_BATCHES, SAMPLED, OwnMemory
from flowdp.errors import DataError

BATCHES = 12


def owned(batches: Iterable[Any]) -> list[Any]:
    """All batches of a dataset, read before any is used."""
    memory = OwnMemory()
    return [memory.own(batch, f"batch {number}", 1) for number, batch in enumerate(batches)]


def filled(ring: int, kind: str, before: int = 0, shape: tuple[int, ...] = (4, 2)) -> Iterator[Any]:
    """Batches filled with their number, in buffers used in turn; the first `before` in new memory."""
    buffers = [torch.zeros(shape) for _ in range(ring)]
    for number in range(BATCHES):
        buffer = torch.zeros(shape) if number < before else buffers[number % ring]
        if kind == "tensor":
            buffer.fill_(number)
        else:
            buffer.numpy().fill(number)  # torch does not count the write
        yield (buffer.numpy() if kind == "array" else buffer[: len(buffer)],)


@pytest.mark.parametrize("kind", ["tensor", "array", "tensor of an array"])
@pytest.mark.parametrize("ring", range(1, HELD_BATCHES + 1))
def test_buffers_that_are_filled_again_are_copied(ring: int, kind: str) -> None:
    for number, (values,) in enumerate(owned(filled(ring, kind))):
        assert (values == number).all()


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_buffer_that_is_filled_again_later_on_is_an_error(kind: str) -> None:
    with pytest.raises(DataError, match=r"^batch 8 lies in the memory of a batch before it.*\.clone") as e:
        owned(filled(1, kind, before=6))
    assert e.value.epoch == 1


def test_a_large_buffer_is_told_by_some_of_its_elements() -> None:
    for number, (values,) in enumerate(owned(filled(1, "tensor", shape=(100, SAMPLED // 10)))):
        assert (values == number).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex128])
def test_buffers_of_any_type(dtype: torch.dtype) -> None:
    def dataset() -> Iterator[torch.Tensor]:
        buffer = torch.zeros(4, 2, dtype=dtype)
        for number in range(BATCHES):
            yield buffer.copy_(torch.full((4, 2), number % 2))

    for number, values in enumerate(owned(dataset())):
        assert (values.to(torch.complex128) == number % 2).all()


def test_containers_that_are_filled_again_are_copied() -> None:
    def dataset() -> Iterator[Any]:
        batch: dict[str, Any] = {}
        texts: list[str] = []
        for number in range(BATCHES):
            texts.clear()
            texts.append(str(number))
            batch["x"], batch["texts"], batch["more"] = torch.full((1,), number), texts, ([number], texts)
            yield batch

    for number, batch in enumerate(owned(dataset())):
        assert batch["x"].item() == number
        assert batch["texts"] == [str(number)]
        assert batch["more"] == ([number], [str(number)])


def series(length: int) -> torch.Tensor:
    return torch.arange(float(length))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(lambda x, number: x[4 * number : 4 * number + 4], id="views"),
        pytest.param(lambda x, number: x[number : number + 10], id="overlapping windows"),
        pytest.param(lambda x, number: x[:10], id="always the same"),
        pytest.param(lambda x, number: x[::2] if number % 2 else x[1::2], id="in between"),
        pytest.param(lambda x, number: x.numpy()[number : number + 10], id="arrays"),
        pytest.param(lambda x, number: torch.from_numpy(x.numpy()[number:]), id="tensors of arrays"),
        pytest.param(lambda x, number: x[:1].expand(4), id="expanded"),
    ],
)
def test_memory_that_is_shared_and_not_written_is_shared(batch: Callable[[torch.Tensor, int], Any]) -> None:
    x = series(100)
    given = [batch(x, number) for number in range(BATCHES)]
    taken = owned(given)
    for number, (one, other) in enumerate(zip(given, taken, strict=True)):
        assert (one == other).all()
        assert (one is other) == (number >= HELD_BATCHES)


def test_a_buffer_that_is_written_beside_its_batches_is_shared() -> None:
    def dataset() -> Iterator[torch.Tensor]:
        x = torch.zeros(100)
        for number in range(BATCHES):
            x[number + 4] = number
            yield x[number + 1 : number + 5]

    for number, values in enumerate(owned(dataset())):
        assert values[-1] == number


def test_a_loss_writes_into_its_own_copy_of_the_first_batches() -> None:
    x, memory = series(8), OwnMemory()
    for number in range(HELD_BATCHES):
        memory.own((x,), f"batch {number}")[0].add_(1)
    (last,) = memory.own((x,), "the last")
    assert last is x
    assert torch.equal(x, series(8))


def test_a_loss_that_writes_into_a_batch_that_others_share_is_an_error() -> None:
    x, memory = series(8), OwnMemory()
    for _ in range(HELD_BATCHES + 1):
        memory.own(x, "one").add_(1)
    with pytest.raises(DataError, match="if the loss writes into its batch"):
        memory.own(x, "the next")


def test_batches_in_new_memory_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = OwnMemory()
    for _ in range(HELD_BATCHES):
        memory.own((torch.zeros(4),), "one")
    monkeypatch.setattr("flowdp.data.memory._checksum", None)
    for _ in range(BATCHES):
        memory.own((torch.zeros(4), np.zeros(4), ["text"]), "one")


def test_an_object_that_is_filled_again_is_an_error() -> None:
    class Opaque:
        def __init__(self) -> None:
            self.x = torch.zeros(4)

    def dataset() -> Iterator[Opaque]:
        batch = Opaque()
        for number in range(BATCHES):
            batch.x.fill_(number)
            yield batch

    with pytest.raises(DataError, match="batch 1 lies"):
        owned(dataset())


def test_batches_of_anything() -> None:
    packed = pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
    batch = {
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(1),
        "sparse": torch.eye(2).to_sparse(),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "graph": torch.ones(2, requires_grad=True),
        "objects": np.array(["a", None], dtype=object),
        "texts": np.array(["a", "b"]),
        "packed": packed,
        "none": None,
        "meta": torch.ones(2, device="meta"),
    }
    for taken in owned([batch] * BATCHES):
        assert taken.keys() == batch.keys()
        assert taken["graph"] is batch["graph"]
        assert taken["packed"] is packed
        assert taken["objects"][1] is None
