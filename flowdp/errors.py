"""The errors a user may meet.

```
FlowdpError
  OptionError (ValueError)   an argument is wrong; raised before any thread starts
  DataError                  the dataset broke its contract    .epoch .indices
  StepError                  the user's code raised in a step  .rank .device .epoch .step .indices
  DeviceError                a device cannot be used
  CollectiveError            averaging failed
    CollectiveAborted        another rank failed first; that error is the one to read
    CollectiveTimeout        the devices do not get on with it
  ProtocolError              a bug of flowdp                   .story
```

What a user writes::

    try:
        state = run.join()
    except flowdp.StepError as error:
        print(error.rank, error.indices, error.__cause__)
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveTimeout",
    "DataError",
    "DeviceError",
    "FlowdpError",
    "OptionError",
    "ProtocolError",
    "StepError",
]


class FlowdpError(Exception):
    """Base of all errors that flowdp raises on its own account."""


class OptionError(FlowdpError, ValueError):
    """An argument is wrong: what was given, why it cannot work, what to do instead."""


class DataError(FlowdpError):
    """The dataset, sampler or collate function raised or broke its contract.

    Attributes:
        epoch: Epoch of the batch that was being read, from 0; None outside an epoch.
        indices: Dataset indices of that batch, empty where they are not known.
    """

    def __init__(self, message: str, *, epoch: int | None = None, indices: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.indices = tuple(indices)


class StepError(FlowdpError):
    """The user's code raised on a device; the original is `__cause__`.

    Attributes:
        rank: Index of the replica.
        device: Its device, as a string.
        epoch: Epoch of the batch, from 0; None before the first step.
        step: Steps this rank had completed in the run; None before the first step.
        indices: Dataset indices of the batch, empty where they are not known.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        device: str,
        epoch: int | None = None,
        step: int | None = None,
        indices: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.device = device
        self.epoch = epoch
        self.step = step
        self.indices = tuple(indices)


class DeviceError(FlowdpError):
    """A device is missing, unusable or in the hands of another run."""


class CollectiveError(FlowdpError):
    """Averaging the replicas failed."""


class CollectiveAborted(CollectiveError):
    """The round was given up because another rank failed first."""


class CollectiveTimeout(CollectiveError):
    """A round has begun on the devices and does not end: one of them, or a link between two, is dead."""


class ProtocolError(FlowdpError):
    """A bug of flowdp: a machine met something that its protocol rules out.

    Attributes:
        story: The last events before it, oldest first, as text.
    """

    def __init__(self, message: str, *, story: Sequence[str] = ()) -> None:
        self.story = tuple(story)
        tail = "".join(f"\n  {line}" for line in self.story[-50:])
        super().__init__(message + ("\nThe last events:" + tail if tail else ""))
