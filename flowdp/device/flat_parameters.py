"""A replica's trained parameters and buffers, packed into one tensor per dtype.

Parameters that require grad and all buffers move into one 1-D tensor per dtype, and the module's tensors
become views of it. So a mean, a snapshot, a difference or a norm is one operation on one memory instead of
one on each of some hundred tensors. Frozen parameters stay where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from flowdp.device.copies import ALIGNMENT, dense_strides
from flowdp.device.frozen_parameters import frozen_sums
from flowdp.errors import CollectiveError, OptionError

__all__ = ["Flat", "FlatReplica", "FlatTensors", "memory_key"]

_COUNTS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""Integer dtypes with a maximum in torch; the wider unsigned integers have none."""


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """All averaged tensors of one dtype: parameters, then buffers.

    Complex tensors lie in the memory of their real dtype. The gaps between tensors are zero.

    Attributes:
        memory: The tensors, one behind the other. Shape (elements,).
        split: Where the parameters end and the buffers begin, in elements.
        is_measured: Whether the distance of its parameters from a mean is part of the drift.
        spans: Equal parts into which the parameters are cut, one for each rank; 1: they are not.
    """

    memory: Tensor
    split: int
    is_measured: bool = True
    spans: int = 1

    def span(self, rank: int) -> slice:
        """The part of the parameters that is this rank's."""
        length = self.split // self.spans
        return slice(rank * length, (rank + 1) * length)

    @property
    def counts(self) -> bool:
        """Whether these are integers or flags: they take the maximum over the ranks, never a mean."""
        return not self.memory.dtype.is_floating_point


@dataclass(frozen=True, slots=True, eq=False)
class _Location:
    """Place and form of a tensor in its module: a buffer may be another object after every forward."""

    name: str
    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    table: dict[str, Tensor]
    key: str

    @property
    def tensor(self) -> Tensor:
        return self.table[self.key]


class FlatTensors(ABC):
    """Contribution of one rank to a mean, as flat memory; that of all ranks has one layout.

    Attributes:
        rank: Rank index.
        flats: One per dtype, or more.
    """

    rank: int
    flats: tuple[Flat, ...]

    @property
    def memories(self) -> list[Tensor]:
        """The memory of each flat, in order."""
        return [flat.memory for flat in self.flats]

    @abstractmethod
    def trained(self) -> list[Tensor]:
        """Trained memory of each dtype, without buffers. Shape (elements,) each."""

    def total(self) -> Tensor:
        """The sum of `trained`: not finite where a number is not, or where the sum itself is too large.

        The cheapest look at all numbers. Shape [], on the device.
        """
        # Nothing narrower than float32 overflows in float32, but for float16 all have its range.
        sums = [
            part.sum(dtype=torch.float32 if part.dtype == torch.float16 else part.dtype)
            for part in self.trained()
        ]
        return sums[0] if len(sums) == 1 else torch.stack([one.double() for one in sums]).sum()

    def largest(self) -> Tensor:
        """The largest absolute value in `trained`, NaN where there is one. Float64, shape []."""
        bounds = [torch.stack(torch.aminmax(part)).double() for part in self.trained()]
        return torch.cat(bounds).abs().amax()

    def is_finite(self) -> bool:
        """Whether all numbers that training has changed are finite; reads them.

        A finite loss does not promise finite parameters: the gradient may be infinite in the last step before
        the meeting, and no loss follows it.
        """
        # A sum is by far the fastest look. It overflows before its terms do: then every one is looked at.
        return isfinite(float(self.total())) or isfinite(float(self.largest()))

    @abstractmethod
    def gather(self) -> None:
        """Copy in tensors that lie outside of the flat memory, before a mean.

        Raises:
            CollectiveError: A tensor is gone or has another shape.
        """

    @abstractmethod
    def scatter(self) -> None:
        """Copy the mean out to the tensors that the last `gather` found outside."""


class FlatReplica(FlatTensors):
    """One rank's trained parameters and buffers as flat memory, one `Flat` per dtype.

    Parameter objects stay the same, so optimizers made before go on working; tied parameters stay tied.
    Strides are kept (channels_last stays) unless elements overlap or leave gaps.

    Args:
        module: The replica. Its parameters and buffers are re-pointed, values kept.
        rank: Named in errors.
        may_thaw: Whether a frozen parameter may be trained later: there is no other replica to differ from.
        spans: Equal parts, each a multiple of `ALIGNMENT`, that the parameters can be cut into.
        groups: Number of the group of each parameter that has one: those of one group lie in one piece.

    Attributes:
        rank: As given.
        flats: One per dtype, in the order in which the module shows the dtypes.
        has_buffers: Whether the module has buffers.
        thawable: Frozen parameters that may be trained later. They are in no flat.

    Raises:
        OptionError: A buffer is of a dtype that cannot be averaged.

    Threads: the owner of the replica, unless a method says otherwise.
    """

    def __init__(
        self,
        module: nn.Module,
        rank: int = 0,
        *,
        may_thaw: bool = False,
        spans: int = 1,
        groups: Mapping[Tensor, int] | None = None,
    ) -> None:
        self.rank = rank
        self._spans = spans
        frozen = {
            name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad
        }
        self.thawable = tuple(frozen.values()) if may_thaw else ()
        self._frozen = {} if may_thaw else frozen
        self._module = module
        self._registered = _registered(module)
        self._locations: list[_Location] = []
        self._views: list[Tensor] = []
        self._moved: list[int] = []
        self._kept: list[Tensor] = []  # the buffers of each flat at the last `keep_buffers`
        aliases: dict[Tensor, Tensor] = {}
        by_dtype: dict[torch.dtype, list[_Location]] = {}
        first: dict[object, Tensor] = {}
        for location in _locations(module):
            # Tensors that are two objects over one memory must share one view, or they would come apart.
            owner = first.setdefault(memory_key(location.tensor), location.tensor)
            if owner is location.tensor:
                by_dtype.setdefault(_real(location.dtype), []).append(location)
            else:
                aliases[location.tensor] = owner
        numbers = groups or {}
        last = max(numbers.values(), default=0) + 1
        for locations in by_dtype.values():
            locations.sort(key=lambda location: numbers.get(location.tensor, last))  # buffers stay behind
        self.flats = tuple(self._flatten(dtype, locations) for dtype, locations in by_dtype.items())
        for tensor, owner in aliases.items():
            tensor.data = owner.data
        self.has_buffers = any(flat.split < len(flat.memory) for flat in self.flats)
        self._pointers = [view.data_ptr() for view in self._views]

    def _flatten(self, dtype: torch.dtype, locations: list[_Location]) -> Flat:
        step = ALIGNMENT // dtype.itemsize
        places: list[tuple[int, int]] = []
        end = split = 0
        for location in locations:  # parameters come first: `_locations` yields them before any buffer
            start = end if location.kind == "parameter" else max(end, split)
            length = location.tensor.numel() * (2 if location.dtype.is_complex else 1)
            places.append((start, start + length))
            end = start + -(-length // step) * step
            if location.kind == "parameter":
                split = -(-end // (step * self._spans)) * step * self._spans
        memory = torch.zeros(max(end, split), dtype=dtype, device=locations[0].tensor.device)
        for location, (start, stop) in zip(locations, places, strict=True):
            tensor = location.tensor
            view = memory[start:stop].view(location.dtype).as_strided(location.shape, location.strides)
            view.copy_(tensor.data)
            tensor.data = view
            self._locations.append(location)
            self._views.append(view)
        return Flat(memory, split, spans=self._spans)

    def gather(self) -> None:
        """Copy in tensors that the module moved out of the flat memory, before a mean.

        Assigning `weight.data`, `load_state_dict(assign=True)` or a buffer that is computed anew in forward
        leave the memory behind; the module keeps its own storage, and `scatter` brings the mean there.

        Raises:
            CollectiveError: A tensor is gone or has another shape, or a parameter that was frozen is trained.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise CollectiveError(
                    f"rank {self.rank}: parameter {name!r} was frozen when the run started and requires grad "
                    "now, so its updates would stay on this device alone: let it require grad from the start "
                    "(a learning rate of 0 for its parameter group holds it still), or end the run and thaw "
                    "it between two runs"
                )
        try:
            pointers = [location.table[location.key].data_ptr() for location in self._locations]
        except (KeyError, AttributeError):
            lost = next(
                location
                for location in self._locations
                if not isinstance(location.table.get(location.key), Tensor)
            )
            raise CollectiveError(
                f"rank {self.rank}: {lost.kind} {lost.name!r} was there at the start and is gone; averaged "
                "tensors must stay in the module"
            ) from None
        if pointers == self._pointers:  # 160 tensors: about 10 us
            self._moved = []
            return
        pairs = zip(pointers, self._pointers, strict=True)
        self._moved = [index for index, (now, then) in enumerate(pairs) if now != then]
        for index in self._moved:
            location = self._locations[index]
            shape = tuple(location.tensor.shape)
            if shape != location.shape:
                raise CollectiveError(
                    f"rank {self.rank}: {location.kind} {location.name!r} had shape {location.shape} when "
                    f"the run started and has {shape} now; averaged tensors must keep their shape"
                )
            self._views[index].copy_(location.tensor.data)

    def scatter(self) -> None:
        """Copy the mean out to the tensors that the last `gather` found moved."""
        for index in self._moved:
            self._locations[index].tensor.data.copy_(self._views[index])

    def refresh(self) -> None:
        """Copy in, as they are now, the tensors that the last `gather` found moved."""
        for index in self._moved:
            self._views[index].copy_(self._locations[index].tensor.data)

    def trained(self) -> list[Tensor]:
        """The parameters; see `FlatTensors.trained`."""
        return [flat.memory[: flat.split] for flat in self.flats if flat.split]

    def set_parameters(self, values: Sequence[Tensor]) -> None:
        """Give the parameters these values; those found outside by the last `gather` get them there, too.

        Args:
            values: One memory for each of `trained`.
        """
        for part, value in zip(self.trained(), values, strict=True):
            part.copy_(value)
        for index in self._moved:
            if self._locations[index].kind == "parameter":
                self._locations[index].tensor.data.copy_(self._views[index])

    def keep_buffers(self) -> None:
        """Note the buffers as they are now: one copy for each dtype."""
        spans = self._buffers()
        if not self._kept:
            self._kept = [torch.empty_like(span) for span in spans]
        for outside, view in self._outside():
            view.copy_(outside)
        for kept, span in zip(self._kept, spans, strict=True):
            kept.copy_(span)

    def put_back_buffers(self) -> None:
        """Restore the buffers of the last `keep_buffers`."""
        for kept, span in zip(self._kept, self._buffers(), strict=True):
            span.copy_(kept)
        for outside, view in self._outside():
            outside.copy_(view)

    def _buffers(self) -> list[Tensor]:
        return [flat.memory[flat.split :] for flat in self.flats if flat.split < len(flat.memory)]

    def _outside(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Buffers that the module keeps elsewhere by now, and their places in the flat memory."""
        for location, view, pointer in zip(self._locations, self._views, self._pointers, strict=True):
            if location.kind == "buffer":
                tensor = location.table.get(location.key)
                if tensor is not None and tensor.data_ptr() != pointer and tensor.shape == view.shape:
                    yield tensor.data, view

    def parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every trained parameter, and its place in the flat memory."""
        for location, view in zip(self._locations, self._views, strict=True):
            if location.kind == "parameter":
                yield location.tensor, view  # type: ignore[misc]

    def named(self, memories: Sequence[Tensor]) -> dict[str, Tensor]:
        """Parts of memories laid out like `trained`, by the module's names; tied parameters have one.

        Args:
            memories: One for each of `trained`, of its dtype or a wider one.
        """
        homes = dict(zip((part.dtype for part in self.trained()), memories, strict=True))
        views: dict[object, Tensor] = {}
        for parameter, view in self.parameters():
            home = homes[_real(view.dtype)]
            home = home.view(view.dtype) if view.is_complex() else home
            own = home.as_strided(view.shape, view.stride(), view.storage_offset())
            views[id(parameter)] = views[memory_key(view)] = own
        found = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            own_or_none = views.get(id(parameter), views.get(memory_key(parameter.data)))
            if own_or_none is not None:
                found[name] = own_or_none
        return found

    def checksum(self) -> Tensor:
        """The sum of the bits of all parameters, also of frozen ones: equal replicas have the same.

        Int64, shape [].
        """
        self.gather()
        total = torch.zeros((), dtype=torch.int64, device=self.flats[0].memory.device)
        for flat in self.flats:
            total += flat.memory[: flat.split].view(torch.int64).sum()  # tensors start on 64 bytes
        for frozen in frozen_sums(self._module).values():
            total += frozen.to(total.device, non_blocking=True)
        return total

    def check_registered(self) -> None:
        """Check that the module has registered nothing since it was flattened, caches left alone.

        Raises:
            ValueError: It has: that is in no optimizer, and in no mean.
        """
        for name, kind in _registered(self._module).items():
            if name not in self._registered:
                raise ValueError(
                    f"{kind} {name!r} was registered in the first step, after optimizers and replicas were "
                    f"made: it would be neither trained nor averaged. Register it in __init__, or call the "
                    f"model once before the Trainer gets it"
                    + ("" if kind == "parameter" else "; or, if it is a cache, with persistent=False")
                )


def _locations(module: nn.Module) -> Iterator[_Location]:
    """All tensors to average: trained parameters of all modules, then buffers; each object once."""
    seen: set[Tensor] = set()
    for kind in ("parameter", "buffer"):
        for prefix, owner in module.named_modules():
            table = owner._parameters if kind == "parameter" else owner._buffers
            for key, tensor in table.items():
                if tensor is None or tensor in seen or tensor.layout is not torch.strided:
                    continue
                if kind == "parameter" and not tensor.requires_grad:
                    continue
                seen.add(tensor)
                name = f"{prefix}.{key}" if prefix else key
                dtype = tensor.dtype
                if not (dtype.is_floating_point or dtype.is_complex or dtype in _COUNTS):
                    raise OptionError(
                        f"{kind} {name!r} is {dtype}, for which torch has neither mean nor maximum; keep it "
                        f"in another dtype, or out of the module's buffers"
                    )
                # `empty_like` keeps dense strides and makes others (expanded, with gaps) dense.
                yield _Location(name, kind, tuple(tensor.shape), dense_strides(tensor), dtype, table, key)


def _registered(module: nn.Module) -> dict[str, str]:
    """Name -> kind of all that the module's state holds: parameters, and buffers that are no caches."""
    found = {name: "parameter" for name, _ in module.named_parameters()}
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = "buffer"
    return found


def memory_key(tensor: Tensor) -> object:
    """Equal for tensors that are the same elements in the same memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
