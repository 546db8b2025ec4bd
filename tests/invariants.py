"""Invariants of the coordinator's machine: its records agree, whatever fact it has taken."""

from __future__ import annotations

from collections import Counter

from flowdp.errors import ProtocolError
from flowdp.machine import async_rounds, planned_rounds
from flowdp.machine.async_rounds import AsyncRank, AsyncRounds
from flowdp.machine.coordinator import Coordinator, Phase
from flowdp.machine.epochs import Epochs
from flowdp.machine.planned_rounds import PlannedRounds
from flowdp.machine.rounds import Rounds
from flowdp.policy.ledger import Ledger
from flowdp.policy.streams_ledger import StreamsLedger


def check(machine: Coordinator | Rounds | Epochs | Ledger | StreamsLedger) -> None:
    """Check that the records of a machine or ledger, and of those that it has, agree.

    Raises:
        ProtocolError: They do not.
    """
    if isinstance(machine, Epochs):
        _check_epochs(machine)
    elif isinstance(machine, Rounds):
        _check_rounds(machine)
    elif isinstance(machine, Ledger | StreamsLedger):
        _check_ledger(machine)
    else:
        _check_epochs(machine.epochs)
        _check_rounds(machine.rounds)
        if machine.phase is Phase.DONE and len(machine._gone) != machine.config.world_size:
            raise ProtocolError(f"done while only {sorted(machine._gone)} have left")


def _check_epochs(epochs: Epochs) -> None:
    """No batch is lost or doubled, and the epochs are in their order."""
    for number, epoch in enumerate(epochs._open, epochs.done):
        _check_ledger(epoch.ledger)
        if epoch.ledger.epoch != number:
            raise ProtocolError(f"epoch {epoch.ledger.epoch} stands where {number} should")


def _check_ledger(ledger: Ledger | StreamsLedger) -> None:
    """Every batch is in one place."""
    if isinstance(ledger, StreamsLedger):
        for part in ledger._parts:
            _check_ledger(part)
        if ledger._room < 0:
            raise ProtocolError(
                f"epoch {ledger.epoch}: {-ledger._room} steps more than {ledger._limit} are dealt"
            )
        return
    remaining = ledger.batches - ledger.position + sum(map(len, ledger.left))
    if remaining != ledger.remaining or min(ledger.dealt, ledger.trained) < 0:
        raise ProtocolError(
            f"epoch {ledger.epoch}: {ledger.trained} batches trained, {ledger.dealt} dealt, {remaining} "
            f"remaining do not make {ledger.batches}"
        )


def _check_rounds(rounds: Rounds) -> None:
    """The orders that are out agree with the ledgers, and are not too many."""
    out: Counter[int] = Counter()  # batches by epoch
    if isinstance(rounds, PlannedRounds):
        orders, most = len(rounds._armed), planned_rounds.AHEAD
        for armed in rounds._armed:
            out[armed.epoch] += sum(map(len, armed.dealt.hands))
    else:
        assert isinstance(rounds, AsyncRounds)
        orders, most = max(len(state.orders) for state in rounds._ranks), async_rounds.AHEAD
        for state in rounds._ranks:
            _check_rank(state)
            for at, order in enumerate(state.orders):
                out[order.epoch] += len(order.batches) - (0 if at else state.reported)
    if orders > most:
        raise ProtocolError(f"{orders} orders are out, {most} may be")
    for epoch, batches in out.items():
        if batches and rounds.epochs.of(epoch).dealt != batches:
            raise ProtocolError(f"epoch {epoch}: {batches} batches are out, the ledger says otherwise")


def _check_rank(state: AsyncRank) -> None:
    if not state.mean <= state.snapshot <= state.dealt or state.trained > state.dealt:
        raise ProtocolError(f"counts out of order: {state}")
