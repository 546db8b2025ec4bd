"""The ledger of an epoch that each machine reads from a stream of its own (IterableDataset)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

from flowdp.errors import ProtocolError
from flowdp.policy.ledger import ENDLESS, Deal, Ledger, interleave

__all__ = ["StreamsLedger"]


class StreamsLedger:
    """A `Ledger` for each machine, whose batches are dealt to its own ranks alone: no other machine has them.

    It has the methods of one `Ledger`, for the ranks of all machines. Batch i of machine m, of M machines,
    has number i * M + m. The epoch is over when all streams are.

    Args:
        epoch: Epoch index, from 0.
        max_steps: Most steps of the epoch, all of as many batches; None: no limit.
        sizes: Ranks of each machine. Shape (machines,).
        groups: As of `Ledger`.
    """

    is_ended = True

    def __init__(
        self, epoch: int, max_steps: int | None, sizes: Sequence[int], groups: Sequence[int] | None = None
    ) -> None:
        self.epoch = epoch
        self.groups = (1,) * sum(sizes) if groups is None else tuple(groups)
        self._ranks = [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        self._parts = [
            Ledger(epoch, ENDLESS, len(ranks), self.groups[ranks.start : ranks.stop]) for ranks in self._ranks
        ]
        self._group = max(self.groups)
        self._limit = ENDLESS if max_steps is None else max_steps

    @property
    def position(self) -> int:
        """First number behind all that were dealt."""
        count = len(self._parts)
        behind = ((part.position - 1) * count + machine + 1 for machine, part in enumerate(self._parts))
        return max(0, *behind)

    @property
    def left(self) -> list[list[int]]:
        """Numbers below the position that were not trained, by ranks that can."""
        position, count = self.position, len(self._parts)
        hands: list[list[int]] = []
        for machine, part in enumerate(self._parts):
            own = [self._numbers(machine, hand) for hand in part.left]
            own[0] += range(part.position * count + machine, position, count)
            hands += own
        return hands

    @property
    def dealt(self) -> int:
        """Batches that are out."""
        return sum(part.dealt for part in self._parts)

    @property
    def trained(self) -> int:
        """Batches that were counted back as trained."""
        return sum(part.trained for part in self._parts)

    @property
    def batches(self) -> int:
        """Batches of the epoch, as far as the limit goes; about `ENDLESS` until all ends are known."""
        return self.dealt + self.trained + self.remaining

    @property
    def remaining(self) -> int:
        """Batches that can still be dealt."""
        return min(sum(part.remaining for part in self._parts), self._room * self._group)

    @property
    def is_complete(self) -> bool:
        """Whether every batch was trained."""
        return not self.dealt and not self.remaining

    @property
    def _room(self) -> int:
        """Steps up to the limit. The last one of each stream may have fewer batches than the others."""
        return self._limit - sum(-(-(part.dealt + part.trained) // self._group) for part in self._parts)

    def planned_steps(self, group: int) -> int:
        """Steps of the epoch; see `Ledger.planned_steps`."""
        return min(self._limit, sum(part.planned_steps(group) for part in self._parts))

    def steps(self, rank: int, batches: Sequence[int]) -> int:
        """Steps of a rank that these batches make."""
        return -(-len(batches) // self.groups[rank])

    def whole_rounds(self, ranks: Collection[int]) -> int:
        """Rounds in which each of these ranks has a step; see `Ledger.whole_rounds`."""
        rounds = [part.whole_rounds(self._local(machine, ranks)) for machine, part in enumerate(self._parts)]
        return min(*rounds, self._room // len(ranks))

    def deal(self, quotas: Sequence[int], ms_per_step: Sequence[float], due: Sequence[int] = ()) -> Deal:
        """Deal a round; see `Ledger.deal`. Ranks of a machine whose stream has ended get nothing."""
        quotas = self._within_limit(quotas, ms_per_step)
        due = [rank for rank in due if quotas[rank]]
        hands: list[tuple[int, ...]] = []
        for machine, (part, ranks) in enumerate(zip(self._parts, self._ranks, strict=True)):
            own = slice(ranks.start, ranks.stop)
            dealt = part.deal(quotas[own], ms_per_step[own], self._local(machine, due))
            hands += [tuple(self._numbers(machine, hand)) for hand in dealt]
        return tuple(hands)

    def deal_to(self, rank: int, steps: int) -> tuple[int, ...]:
        """Nothing: no policy that deals to one rank alone has streams of several machines."""
        raise ProtocolError(f"epoch {self.epoch}: rank {rank} asks for {steps} steps of several streams")

    def count_back(self, rank: int, batches: Sequence[int], steps: int) -> None:
        """Count back dealt batches; see `Ledger.count_back`."""
        machine = next(at for at, ranks in enumerate(self._ranks) if rank in ranks)
        own = [batch // len(self._parts) for batch in batches]
        self._parts[machine].count_back(rank - self._ranks[machine].start, own, steps)

    def resume(self, position: int, left: Sequence[Sequence[int]]) -> None:
        """Begin the epoch anew: a stream cannot be entered in the middle."""
        if trained := position - sum(map(len, left)):
            raise ProtocolError(f"epoch {self.epoch}: {trained} batches of streams cannot be passed over")

    def reassign(self, rank: int, ranks: Sequence[int]) -> None:
        """Nothing: where there are several machines no run goes on without a rank."""
        raise ProtocolError(f"epoch {self.epoch}: {list(ranks)} cannot read the stream of rank {rank}")

    def end(self, batches: int, machine: int) -> None:
        """Set the length of a machine's stream, once its end is read; see `Ledger.end`."""
        self._parts[machine].end(batches)

    def rewind(self) -> None:
        """Take back left-overs from the positions; see `Ledger.rewind`."""
        for part in self._parts:
            part.rewind()

    def _within_limit(self, quotas: Sequence[int], ms_per_step: Sequence[float]) -> Sequence[int]:
        """The quotas or, where the limit leaves less, that many steps: those that would end first."""
        if sum(quotas) <= self._room:
            return quotas
        parts = zip(self._parts, self._ranks, strict=True)
        wanted = [quotas[rank] if part.remaining else 0 for part, ranks in parts for rank in ranks]
        chosen = Counter(interleave(wanted, ms_per_step)[: self._room])
        return [chosen[rank] for rank in range(len(quotas))]

    def _local(self, machine: int, ranks: Collection[int]) -> list[int]:
        """The ranks of a machine among some, by their places there."""
        own = self._ranks[machine]
        return [rank - own.start for rank in ranks if rank in own]

    def _numbers(self, machine: int, indices: Sequence[int]) -> list[int]:
        """Numbers of the batches of a machine."""
        return [index * len(self._parts) + machine for index in indices]
