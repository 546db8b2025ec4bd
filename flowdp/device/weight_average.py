"""The exponential moving average of a replica's trained parameters, as flat memory beside theirs.

Where the ranks average their parameters, they average these too: a mean is linear, so the mean of the ranks'
moving averages is the moving average of the mean's path. Buffers have none: those of the module go with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from flowdp.device.flat_parameters import Flat, FlatReplica, FlatTensors
from flowdp.errors import OptionError

__all__ = ["WeightAverage"]


class WeightAverage(FlatTensors):
    """Moving average of one replica's trained parameters; that of bfloat16 and float16 lies in float32.

    The first update takes the parameters themselves, as `torch.optim.swa_utils.AveragedModel` does.

    Args:
        replica: The parameters.
        module: The module that they are of.
        decay: Part of the average that stays in an update, between 0 and 1.

    Attributes:
        rank: Rank of the replica.
        averages: The average of each of `FlatReplica.trained`.
        flats: The replica's, then those of the average, left out of the drift: the ranks average both.
        has_begun: Whether it holds the average of some steps, and not parameters before any.

    Raises:
        OptionError: A trained parameter is not in the module's state_dict.

    Threads:
        The owner of the replica.

    Streams:
        All is enqueued on the current one.
    """

    def __init__(self, replica: FlatReplica, module: nn.Module, decay: float) -> None:
        self._replica = replica
        self._weight = 1.0 - decay
        self.averages = [_wide(part).clone() for part in replica.trained()]
        self.rank = replica.rank
        self.flats = (
            *replica.flats,
            *(Flat(average, len(average), is_measured=False) for average in self.averages),
        )
        self.has_begun = False
        kept = module.state_dict().keys()
        if lacking := [name for name in self.named() if name not in kept]:
            raise OptionError(
                f"EMA: the state_dict of the model lacks its parameter {lacking[0]!r}, so the average could "
                "not be handed out or saved: let state_dict() name each parameter as named_parameters() does"
            )

    def update(self) -> None:
        """Take in the parameters after an optimizer step: one operation per dtype."""
        self._replica.gather()
        for own, part in zip(self.averages, self._replica.trained(), strict=True):
            if self.has_begun:
                own.lerp_(_wide(part), self._weight)
            else:
                own.copy_(part)
        self.has_begun = True

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the average in the module's parameters, which are themselves again afterwards, to the bit."""
        self._replica.gather()
        before = [part.clone() for part in self._replica.trained()]
        try:
            self._replica.set_parameters(self.averages)
            yield
        finally:
            self._replica.set_parameters(before)

    def named(self) -> dict[str, Tensor]:
        """The average of each trained parameter, by the module's names; tied ones are one tensor."""
        return self._replica.named(self.averages)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take over a saved average; of an empty one begin anew, at the parameters.

        Args:
            saved: As `named`; other names in it are left alone.

        Raises:
            KeyError: It lacks a parameter.
        """
        self.has_begun = bool(saved)
        if not saved:
            for own, part in zip(self.averages, self._replica.trained(), strict=True):
                own.copy_(part)
            return
        for name, own in self.named().items():
            own.copy_(saved[name])

    def copy_from(self, other: WeightAverage) -> None:
        """Take over the average of another replica, on the same device or not."""
        for mine, theirs in zip(self.averages, other.averages, strict=True):
            mine.copy_(theirs)
        self.has_begun = other.has_begun

    def trained(self) -> list[Tensor]:
        """The parameters; see `FlatTensors.trained`."""
        return self._replica.trained()

    def gather(self) -> None:
        """See `FlatReplica.gather`."""
        self._replica.gather()

    def scatter(self) -> None:
        """See `FlatReplica.scatter`. Behind a mean the average is that of all ranks' steps."""
        self._replica.scatter()
        self.has_begun = True


def _wide(part: Tensor) -> Tensor:
    """Parameters in the dtype of their average: steps as small as 1 - decay are lost in a narrow one."""
    return part if part.dtype.itemsize >= 4 else part.float()
