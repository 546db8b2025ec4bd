"""Structure of a model: its tensors by name, in words, the differences of two models, and shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flowdp.errors import OptionError

__all__ = ["check_no_overlap", "check_same", "difference", "structure", "tensor_form"]


def structure(module: nn.Module, *, every_name: bool = False) -> dict[str, str]:
    """Each parameter and buffer in words, by name, in order.

    Args:
        module: On any device.
        every_name: Whether a tensor with several names is listed under each, not under the first alone.

    Raises:
        OptionError: A tensor has no shape yet (lazy modules).
    """
    found = {}
    parameters = module.named_parameters(remove_duplicate=not every_name)
    buffers = module.named_buffers(remove_duplicate=not every_name)
    for kind, named in (("", parameters), ("buffer", buffers)):
        for name, tensor in named:
            if is_lazy(tensor):
                raise OptionError(f"{name!r} has no shape yet; run one batch through the model first")
            is_frozen = not kind and not tensor.requires_grad
            found[name] = tensor_form(tensor.dtype, tensor.shape, "frozen" if is_frozen else kind)
    return found


def tensor_form(dtype: torch.dtype, shape: Iterable[int], kind: str = "") -> str:
    """A tensor in words: "float32 (2, 3) frozen"."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {kind}".rstrip()


def difference(
    mine: Mapping[str, str], theirs: Mapping[str, str], here: str, there: str, most: int = 1
) -> str:
    """The first differences of two structures; "" where there are none.

    Args:
        mine: Tensors of one model.
        theirs: Tensors of the other.
        here: Place of the one, for the text: "on rank 1".
        there: Place of the other.
        most: Tensors that are named.
    """
    names = [*mine, *(name for name in theirs if name not in mine)]
    found = [
        f"{name!r} is {mine.get(name, 'missing')} {here} and {theirs.get(name, 'missing')} {there}"
        for name in names
        if mine.get(name) != theirs.get(name)
    ]
    if found:
        more = f"; and {len(found) - most} more" if len(found) > most > 1 else ""
        return "; ".join(found[:most]) + more
    for one, other in zip(mine, theirs, strict=True):
        if one != other:
            return (
                f"the same tensors are in another order {here} than {there}, from {other!r} on: submodules "
                f"must be registered in the same order"
            )
    return ""


def check_same(
    mine: Mapping[str, str], theirs: Mapping[str, str], here: str, there: str, remedy: str
) -> None:
    """Check that two models have the same structure; see `difference`.

    Raises:
        OptionError: They differ; the message names the first tensor that does, its places and both forms, and
            the remedy.
    """
    if found := difference(mine, theirs, here, there):
        raise OptionError(f"the models differ: {found}; {remedy}")


def check_no_overlap(module: nn.Module) -> None:
    """Check that no trained parameter has elements in common with another parameter or a buffer.

    A copy of the module, and the flat memory of a replica, have a place for each tensor: they would come
    apart. One tensor under several names is no overlap, and neither are parts of one memory that do not meet.

    Raises:
        OptionError: One has; the message names both.
    """
    for one, other in _crossing(sorted(_spans(module), key=lambda span: (span.device, span.begin))):
        if (one.is_trained or other.is_trained) and _has_common_element(one, other):
            first, second = sorted((one, other), key=lambda span: span.place)
            raise OptionError(
                f"model: {second.name!r} lies in the memory of {first.name!r}, as `.data = other.data` makes "
                "it, and the devices' copies would have a memory for each: tie them by one nn.Parameter "
                f"(model.{second.name} = model.{first.name}), compute a part or a transpose of the other in "
                "forward, or give it memory of its own (.data = other.data.clone())"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Memory of a tensor: addresses from its first element to behind the last."""

    place: int
    name: str
    tensor: Tensor
    device: str
    begin: int
    end: int

    @property
    def is_trained(self) -> bool:
        return self.tensor.requires_grad

    @property
    def is_dense(self) -> bool:
        return self.end - self.begin == self.tensor.numel() * self.tensor.itemsize


def _spans(module: nn.Module) -> Iterator[_Span]:
    named = [*module.named_parameters(), *module.named_buffers()]
    for place, (name, tensor) in enumerate(named):
        if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        try:
            begin = tensor.data_ptr()
        except RuntimeError:  # a subclass of tensors without memory of its own
            continue
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if begin:  # "meta" has none
            end = begin + (last + 1) * tensor.itemsize
            yield _Span(place, name, tensor, str(tensor.device), begin, end)


def _crossing(spans: Iterable[_Span]) -> Iterator[tuple[_Span, _Span]]:
    """Pairs whose addresses cross, of spans in order."""
    before: list[_Span] = []
    for span in spans:
        before = [one for one in before if one.device == span.device and one.end > span.begin]
        for one in before:
            yield one, span
        before.append(span)


def _has_common_element(one: _Span, other: _Span) -> bool:
    size = one.tensor.itemsize
    distance = other.begin - one.begin
    if (one.is_dense and other.is_dense) or other.tensor.itemsize != size or distance % size:
        return True
    # Columns of one matrix, say: addresses that cross, and no element in common.
    count = (max(one.end, other.end) - one.begin) // size
    elements = torch.arange(count)
    is_taken = torch.zeros(count, dtype=torch.bool)
    is_taken[elements.as_strided(one.tensor.shape, one.tensor.stride()).reshape(-1)] = True
    theirs = elements.as_strided(other.tensor.shape, other.tensor.stride(), distance // size)
    return bool(is_taken[theirs.reshape(-1)].any())
