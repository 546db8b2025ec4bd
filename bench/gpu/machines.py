"""Two machines on one card, each a process with one rank: a few cases of `bench.machines.one_card`."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.part import Figure, Finding, Note, Place
from bench.machines import one_card

LIMIT_S = 25.0
"""Of a case: processes of a part that is cut would stay on the card, so each is ended before."""

CASES = ("exact, host", "exact, nccl", "cadence, nccl", "cadence, host, overlap")


def measure(place: Place) -> Iterator[Finding]:
    faults = []
    for case in place.pick(CASES, CASES[:1]):
        found = one_card.measure(case, str(place.device), LIMIT_S)
        if "step_ms" in found:
            yield Figure(f"two machines on one card, {case}: step, ms", found["step_ms"])
        if "from_one_device" in found:
            yield Figure(f"two machines on one card, {case}: away from one device", found["from_one_device"])
        if "error" in found:
            faults.append(f"{case}: {found['error']}")
            yield Note(f"two machines on one card, {faults[-1]}")
    if faults:
        raise RuntimeError("; ".join(faults))
