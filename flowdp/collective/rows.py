"""Tensors packed into one row of memory per dtype, to be sent and summed at once."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowdp.device.copies import dense_strides
from flowdp.device.flat_parameters import ALIGNMENT

__all__ = ["PackedRows", "RowPlace"]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Place of a tensor.

    Attributes:
        row: Number of its row.
        start: Its first element there.
        length: Elements, two for a complex number.
        gap: Elements behind it, so that the next one is aligned.
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        strides: Those of a dense tensor in its memory format.
    """

    row: int
    start: int
    length: int
    gap: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Start of the next tensor."""
        return self.start + self.length + self.gap

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor can be put there."""
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.dtype == self.dtype
            and tensor.shape == self.shape
        )

    def flat(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor as they lie in the row: a view, or a copy. Shape (length,)."""
        plain = tensor.resolve_conj().resolve_neg() if self.dtype.is_complex else tensor
        if plain.stride() != self.strides:
            room = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=tensor.device)
            plain = room.copy_(tensor)
        real = torch.view_as_real(plain) if self.dtype.is_complex else plain
        return real.as_strided((self.length,), (1,))

    def view(self, row: Tensor) -> Tensor:
        """The tensor in a row."""
        if not self.dtype.is_complex:
            return row.as_strided(self.shape, self.strides, self.start)
        return row.view(self.dtype).as_strided(self.shape, self.strides, self.start // 2)


class PackedRows:
    """Places for tensors.

    Args:
        tensors: Like those that will be put there.
        dtypes: Real dtypes that may have a row.
        wanted: Whether each tensor may have a place; None: all.

    Attributes:
        places: One for each tensor; None for one that is empty, sparse, or of another dtype.
        sizes: Elements of each row, by its dtype, in order.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        dtypes: Container[torch.dtype],
        wanted: Sequence[bool] | None = None,
    ) -> None:
        self.places: list[RowPlace | None] = []
        self.sizes: dict[torch.dtype, int] = {}
        self._zeros: dict[tuple[torch.dtype, int, torch.device], Tensor] = {}
        numbers: dict[torch.dtype, int] = {}
        for tensor, is_wanted in zip(tensors, wanted or [True] * len(tensors), strict=True):
            real = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
            is_plain = tensor.layout is torch.strided and not tensor.is_inference()
            if not (is_wanted and is_plain and real in dtypes and tensor.numel()):
                self.places.append(None)
                continue
            start, row = self.sizes.get(real, 0), numbers.setdefault(real, len(numbers))
            length = tensor.numel() * (2 if tensor.dtype.is_complex else 1)
            gap = -length % (ALIGNMENT // real.itemsize)
            strides = dense_strides(tensor)
            self.places.append(RowPlace(row, start, length, gap, tensor.dtype, tensor.shape, strides))
            self.sizes[real] = start + length + gap

    def pack(self, tensors: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
        """Rows with copies of tensors on a device; zero where a tensor is None or does not fit its place.

        Threads: any, one for each device.
        """
        pairs: list[list[tuple[RowPlace, Tensor | None]]] = [[] for _ in self.sizes]
        for place, tensor in zip(self.places, tensors, strict=True):
            if place is not None:
                pairs[place.row].append((place, tensor))
        return [
            self.strip(own, device)
            if any(tensor is not None for _, tensor in own)
            else torch.zeros(size, dtype=dtype, device=device)
            for own, (dtype, size) in zip(pairs, self.sizes.items(), strict=True)
        ]

    @torch.no_grad()
    def strip(self, pairs: Sequence[tuple[RowPlace, Tensor | None]], device: torch.device) -> Tensor:
        """A part of a row: adjacent places and their tensors, by one operation. Shape (elements,)."""
        pieces: list[Tensor] = []
        for place, tensor in pairs:
            missing = place.length + place.gap
            if tensor is not None and place.fits(tensor):
                pieces.append(place.flat(tensor))
                missing = place.gap
            if missing:
                pieces.append(self._zero(place, missing, device))
        return torch.cat(pieces)

    def views(self, rows: Sequence[Tensor]) -> list[Tensor | None]:
        """The tensors in rows, each with a version counter of its own; None where there is no place."""
        return [None if place is None else place.view(rows[place.row]).data for place in self.places]

    def _zero(self, place: RowPlace, count: int, device: torch.device) -> Tensor:
        """Zeros for a row, kept where they are a gap."""
        dtype = place.dtype.to_real() if place.dtype.is_complex else place.dtype
        if count != place.gap:
            return torch.zeros(count, dtype=dtype, device=device)
        key = dtype, count, device
        if key not in self._zeros:
            self._zeros[key] = torch.zeros(count, dtype=dtype, device=device)
        return self._zeros[key]
