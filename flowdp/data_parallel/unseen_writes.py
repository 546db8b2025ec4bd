"""Writes to the user's module that torch does not count, on a device that works while the host goes on.

`parameter.data.add_()`, and kernels of other libraries, leave a tensor's version as it was. A checksum of its
bits tells. In the first calls the host waits for the checksums of all tensors. Later, each call has the
device compare a few of those with the same version, in turn, and the host reads the answer once it is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowdp.device.streams import Lane
from flowdp.errors import FlowdpError

__all__ = ["UnseenWrites"]

FIRST = 8
"""Calls in which the host waits for all checksums."""

EACH = 4
"""Tensors that a later call compares."""

LATE = 2
"""Calls after which the host waits for an answer that is not there yet."""


_Counted = tuple[Tensor, float]
"""A tensor and its version."""


class UnseenWrites:
    """Finds writes past the version counters.

    Attributes:
        is_found: Whether there was one in the first calls: everything is to be sent before every call.

    Threads: the user's.

    Streams:
        The caller's current one.
    """

    def __init__(self, lane: Lane) -> None:
        self.is_found = False
        self._lane = lane
        self._calls = 0
        self._next = 0
        self._known: dict[int, tuple[_Counted, Tensor]] = {}  # by place: and its checksum
        self._last: dict[int, _Counted] = {}  # in the last call
        self._flag: Tensor | None = None
        self._asked_in = 0
        self._event = lane.event()

    def look(self, tensors: Sequence[_Counted]) -> bool:
        """Whether everything is to be sent anew, before this call.

        Raises:
            FlowdpError: There was a write that earlier calls have not seen.
        """
        if self.is_found:
            return True
        self._calls += 1
        self._read()
        if self._calls <= FIRST:
            places: Sequence[int] = range(len(tensors))
        else:
            # One that torch has counted a write to is sent anyway.
            still = [place for place, now in enumerate(tensors) if _is_same(now, self._last.get(place))]
            places = [still[(self._next + k) % len(still)] for k in range(min(EACH, len(still)))]
            self._next += EACH
        self._last = dict(enumerate(tensors))
        differing: list[Tensor] = []
        with torch.no_grad():
            for place in places:
                now, then = tensors[place], self._known.get(place)
                if (total := _checksum(now[0])) is None:
                    continue
                if then is not None and _is_same(now, then[0]):
                    differing.append(total != then[1])
                self._known[place] = now, total
            if differing:
                self._ask(torch.stack(differing).any())
        return self.is_found

    def forget(self) -> None:
        """Forget all checksums: the caller sends everything."""
        self._known.clear()
        self._last.clear()
        self._flag = None

    def _ask(self, differs: Tensor) -> None:
        if self._calls <= FIRST:
            self.is_found = bool(differs)
        elif self._flag is None:
            self._flag = differs.to("cpu", non_blocking=True)
            self._event.record(self._lane.current())
            self._asked_in = self._calls

    def _read(self) -> None:
        if self._flag is None or not (self._event.query() or self._calls - self._asked_in >= LATE):
            return
        self._event.synchronize()
        is_other, self._flag = bool(self._flag), None
        if is_other:
            self.forget()
            raise FlowdpError(
                "the model was written to in a way that torch does not count (parameter.data), so the "
                "replicas have computed with older values: call dp.sync_params() after such writes, or write "
                "under torch.no_grad() to the parameters themselves"
            )


def _is_same(now: _Counted, then: _Counted | None) -> bool:
    return then is not None and now[0] is then[0] and now[1] == then[1]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: Tensor) -> Tensor | None:
    """The sum of a tensor's bits, as int64, on its device; None where there is none. Shape []."""
    if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_quantized:
        return None
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits)
    return bits.view(_INTEGERS[bits.dtype.itemsize]).sum(dtype=torch.int64)
