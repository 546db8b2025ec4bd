"""Structure of a model: its tensors by name, in words, the differences of models, and shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flowdp.errors import OptionError

__all__ = [
    "check_no_overlap",
    "check_same",
    "check_separate_memory",
    "difference",
    "structure",
    "tensor_form",
]


def structure(module: nn.Module, *, as_saved: bool = False) -> dict[str, str]:
    """Each parameter and buffer in words, by name, in order.

    Args:
        module: On any device.
        as_saved: Whether it is compared with a file: a tensor with several names is listed under each, not
            under the first alone, and its strides do not matter.

    Raises:
        OptionError: A tensor has no shape yet (lazy modules).
    """
    found = {}
    parameters = module.named_parameters(remove_duplicate=not as_saved)
    buffers = module.named_buffers(remove_duplicate=not as_saved)
    for kind, named in (("", parameters), ("buffer", buffers)):
        for name, tensor in named:
            if is_lazy(tensor):
                raise OptionError(f"{name!r} has no shape yet; run one batch through the model first")
            is_frozen = not kind and not tensor.requires_grad
            strides = "" if as_saved or is_frozen else _strides(tensor)
            found[name] = tensor_form(tensor.dtype, tensor.shape, "frozen" if is_frozen else kind) + strides
    return found


def _strides(tensor: Tensor) -> str:
    """The order of a tensor's elements in flat memory, where it is not that of its dimensions."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ""
    dense = torch.empty_like(tensor, device="meta")
    return "" if dense.is_contiguous() else f" with strides {dense.stride()}"


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
    structures: Sequence[Mapping[str, str]],
    places: Sequence[str] | None = None,
    remedy: str = "all ranks need the same model",
) -> None:
    """Check that models have the same structure; see `difference`.

    Args:
        structures: One for each model.
        places: Their places, for the message; None: of ranks.
        remedy: Last words of the message.

    Raises:
        OptionError: They differ; the message names the first tensor that does, its places and both forms.
    """
    places = places or [f"on rank {rank}" for rank in range(len(structures))]
    for own, place in zip(structures, places, strict=True):
        if found := difference(own, structures[0], place, places[0]):
            raise OptionError(f"the models differ: {found}; {remedy}")


def check_no_overlap(module: nn.Module) -> None:
    """Check that no trained parameter begins where another parameter or a buffer does.

    A copy of the module, and the flat memory of a replica, have a place for each tensor: they would come
    apart. One tensor under several names is none of these.

    Raises:
        OptionError: One does; the message names both.
    """
    known: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        address = _address(tensor)
        first, other = known.setdefault(address, (name, tensor))
        if address and other is not tensor and (other.requires_grad or tensor.requires_grad):
            raise OptionError(
                f"model: {name!r} lies in the memory of {first!r}, as `.data = other.data` makes it, and the "
                "devices' copies would have a memory for each: tie them by one nn.Parameter "
                f"(model.{name} = model.{first}), compute a part or a transpose of the other in "
                "forward, or give it memory of its own (.data = other.data.clone())"
            )


def check_separate_memory(models: Sequence[nn.Module]) -> None:
    """Check that no two models share a tensor or its memory.

    Raises:
        OptionError: Two models share one; the message names the tensor and both models.
    """
    owners: dict[tuple[torch.device, int], int] = {}
    for rank, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # By address: after `load_state_dict(..., assign=True)` two tensors have one memory.
            first = owners.setdefault((tensor.device, _address(tensor) or id(tensor)), rank)
            if first != rank:
                raise OptionError(
                    f"{name!r} is the same tensor in models {first} and {rank}: each rank needs a model of "
                    "its own, such as copy.deepcopy(model)"
                )


def _address(tensor: Tensor) -> int:
    """Address of a tensor's first element; 0 without memory."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass of tensors without memory of its own
        return 0
