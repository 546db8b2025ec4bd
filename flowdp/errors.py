"""The errors a user may meet.

```
FlowdpError
  OptionError (ValueError)   an argument is wrong; raised before any thread starts
  DataError                  the dataset broke its contract    .epoch .indices .sample
  StepError                  the user's code raised in a step  .rank .device .epoch .step .indices
  DeviceError                a device cannot be used
    OutOfDeviceMemory        it has no room for one more step    .rank
  CollectiveError            averaging failed
    CollectiveAborted        another rank failed first; that error is the one to read
    CollectiveTimeout        a rank does not make its call
    MachineLostError         another machine of the job has died, or says nothing
    MachineWaitsError        another machine waits to take part; run_elastic goes on with it
  StallError                 nothing has moved for a long time  .ranks .stacks
  CheckpointError            a checkpoint cannot be used        .path .version
  StateError                 the model does not take the state  .state
  ProtocolError              a bug of flowdp                   .events
```

Usage::

    try:
        state = run.join()
    except flowdp.StepError as error:
        print(error.rank, error.indices, error.__cause__)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "CheckpointError",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveTimeout",
    "DataError",
    "DeviceError",
    "FlowdpError",
    "MachineLostError",
    "MachineWaitsError",
    "OptionError",
    "OutOfDeviceMemory",
    "ProtocolError",
    "StallError",
    "StateError",
    "StepError",
]


class FlowdpError(Exception):
    """Base of all errors that flowdp raises on its own account."""


class OptionError(FlowdpError, ValueError):
    """An argument is wrong; the message has the value, the reason, and a remedy."""


class DataError(FlowdpError):
    """The dataset, sampler or collate function raised or broke its contract.

    Attributes:
        epoch: Epoch of the batch that was being read, from 0; None outside an epoch.
        indices: Dataset indices of that batch, empty where they are not known.
        sample: Dataset index of the sample whose `__getitem__` raised; None where it was not that.
    """

    def __init__(
        self,
        message: str,
        *,
        epoch: int | None = None,
        indices: Sequence[int] = (),
        sample: int | None = None,
    ) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.indices = tuple(indices)
        self.sample = sample


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


class OutOfDeviceMemory(DeviceError):
    """A device has no room for a step, not even sample by sample; torch's own error is `__cause__`.

    Attributes:
        rank: Index of the replica.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveError(FlowdpError):
    """Averaging the replicas failed."""


class CollectiveAborted(CollectiveError):
    """The round was given up because another rank failed first."""


class CollectiveTimeout(CollectiveError):
    """A rank of a process group has not made a call that the others have made, within the timeout."""


class MachineLostError(CollectiveError):
    """Another machine of the job has died, is cut off, or has said nothing for longer than the timeout.

    Where a machine has failed by an error of its own, the others raise that one instead.
    """


class MachineWaitsError(CollectiveError):
    """The run has written a checkpoint and ended, because another machine waits to take part.

    `run_elastic` makes it and goes on from that checkpoint, with all machines; let it pass.
    """


class StallError(FlowdpError):
    """No rank has moved for longer than `stall_timeout`.

    Attributes:
        ranks: Activity or wait of each rank, as text. Shape (world_size,).
        stacks: Python stack of each thread of the run by its name.
    """

    def __init__(
        self, message: str, *, ranks: Sequence[str] = (), stacks: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.stacks = dict(stacks or {})


class CheckpointError(FlowdpError):
    """A checkpoint cannot be written, is torn, is no checkpoint of flowdp, or does not fit this run.

    Attributes:
        path: The file, as text; None where there is none.
        version: Its number in its run; None where that is not known.
    """

    def __init__(self, message: str, *, path: str | None = None, version: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.version = version


class StateError(FlowdpError):
    """The run has ended well, but the user's model does not take its weights; `__cause__` says why.

    Attributes:
        state: Result of the run, a `TrainedState`.
    """

    def __init__(self, message: str, *, state: Any) -> None:
        super().__init__(message)
        self.state = state


class ProtocolError(FlowdpError):
    """A bug of flowdp: a machine met something that its protocol rules out.

    Attributes:
        events: The last events before it, oldest first, as text.
    """

    def __init__(self, message: str, *, events: Sequence[str] = ()) -> None:
        self.events = tuple(events)
        tail = "".join(f"\n  {line}" for line in self.events[-50:])
        super().__init__(message + ("\nThe last events:" + tail if tail else ""))
