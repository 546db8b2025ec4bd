"""Messages between the threads of a run: frozen records, no tensors, no torch.

Orders go down (imperative), facts go up (past tense), commands go from the coordinator machine to its
shell. An action of all ranks in the same round is in none of them: it is decided once, at the gate, and
comes back as an `Outcome`. Durations are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowdp.policy.tally import MetricArray, Work
from flowdp.protocol.gate import Arrival, Directives, Outcome, Requested, Window

__all__ = [
    "Arrival",
    "Averaged",
    "BarrierTask",
    "BatchRead",
    "BatchReady",
    "CheckpointWritten",
    "Checksum",
    "CopyReplica",
    "DataEnded",
    "Directives",
    "Evaluate",
    "Evaluation",
    "Exiting",
    "Fact",
    "Failed",
    "Leave",
    "Order",
    "Outcome",
    "Pace",
    "RequestParams",
    "Requested",
    "SampleRange",
    "SaveState",
    "Settle",
    "SnapshotReady",
    "StartEpoch",
    "StepsDone",
    "SyncAck",
    "SyncNow",
    "SyncPoints",
    "TaskDone",
    "Throttle",
    "Tick",
    "Update",
    "Window",
    "Work",
    "WorkerReady",
]


# ---------------------------------------------------------------- orders
@dataclass(frozen=True, slots=True)
class Pace:
    """A rank's own steps in the run's: its step i after the last mean is at `i * steps // quota`.

    Attributes:
        steps: Steps all ranks take together while this rank takes `quota`.
        quota: Steps of this rank, at least 1.
    """

    steps: int
    quota: int


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Samples [start, stop) of a batch are this rank's (exact); none where both are equal.

    Attributes:
        start: The first.
        stop: The first that is not.
        ranks: Those that have a part of the batch, where they make each forward together; else none.
        forwards: And as many of each; 0: by the size of a micro-batch.
        by_all: Whether every rank has a part of the batch.
    """

    start: int
    stop: int
    ranks: tuple[int, ...] = ()
    forwards: int = 0
    by_all: bool = True

    @property
    def samples(self) -> int:
        """Number of samples; may be 0."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SyncPoints:
    """The meetings of an order: the gate is entered after every `every` steps of the order, `count` times.

    Attributes:
        round: Number of the first round; the following ones count up.
        every: Steps of this rank before each meeting; may be 0.
        count: Rounds armed.
        global_step: Steps of all ranks before the first round.
        steps: Steps of all ranks in one of the rounds.
        drift: Whether the distance from the mean is measured.
        compare: Whether the replicas are compared after the last of the rounds (exact).
        inner: Only the last of the rounds is one of all machines: in those before it each machine's ranks
            meet by themselves, and cannot void what is armed.
        short: Steps of this rank by which the rounds fall short of `count` times `every`, as they end an
            epoch: it enters its last gates with fewer.
    """

    round: int
    every: int
    count: int
    global_step: int
    steps: int
    drift: bool = False
    compare: bool = False
    inner: bool = False
    short: int = 0


@dataclass(frozen=True, slots=True)
class StartEpoch:
    """Train these batches, and meet the other ranks as `sync` says.

    Attributes:
        plan: Number of the plan; an order of a void plan is dropped by its reader.
        epoch: Epoch of the batches, from 0.
        batches: Batch numbers within the epoch, in the order of training.
        sync: The rounds it arms; None: no meeting (async).
        pace: Position of the steps where `sync` is None.
        metrics: Losses of the epochs before, that of the last one behind them, where a scheduler waits for
            them: a rank may have had no order in some. None: an epoch that the scheduler does not see.
        parts: Samples of each batch that are this rank's; every rank gets the same batches then, and meets
            after each (exact). None: the batches are this rank's alone. Shape (batches,).
        alone: One rank trains all batches, with a step after each, and the others take over its replica at
            the meeting behind them (exact).
        group: Batches that make one step of this rank; the last step of an epoch may have fewer.
        report_every: Steps after which this rank reports, where `sync` is None; 0: at the end of the order.
        slack_ms: Time that this rank will wait at the gates for the others, if all are as fast as expected.
        guarded: The divergence guard has shortened the rounds.
    """

    plan: int
    epoch: int
    batches: tuple[int, ...]
    sync: SyncPoints | None = None
    pace: Pace | None = None
    metrics: tuple[float | None, ...] = ()
    parts: tuple[SampleRange, ...] | None = None
    alone: bool = False
    group: int = 1
    report_every: int = 0
    slack_ms: float = 0.0
    guarded: bool = False

    @property
    def steps(self) -> int:
        """Steps that its batches make."""
        return -(-len(self.batches) // self.group)

    def until(self, end: DataEnded) -> StartEpoch:
        """The order without the batches that its epoch does not have."""
        kept = tuple(batch for batch in self.batches if end.has(batch))
        return replace(self, batches=kept) if end.epoch == self.epoch else self


@dataclass(frozen=True, slots=True)
class BatchRead:
    """A batch of an epoch of unknown length was read, and can be dealt (exact).

    Attributes:
        epoch: Epoch index, from 0.
        batch: Its number in the epoch.
        samples: Its samples.
    """

    epoch: int
    batch: int
    samples: int


@dataclass(frozen=True, slots=True)
class DataEnded:
    """An epoch of unknown length has so many batches: those dealt beyond them never existed.

    A fact of the reader's, and an order to the ranks that hold some of that: the coordinator passes it on.

    Attributes:
        epoch: Epoch index, from 0.
        batches: Number of batches; of several machines, those of one, as each has its own.
        machine: This machine: its batch i has number i * `machines` + `machine`.
        machines: Machines of the run.
        read: Batches of the whole stream, where each machine reads all of it and trains some; else None.
    """

    epoch: int
    batches: int
    machine: int = 0
    machines: int = 1
    read: int | None = None

    def has(self, batch: int) -> bool:
        """Whether a batch of the epoch exists, as far as this tells."""
        return batch % self.machines != self.machine or batch // self.machines < self.batches


@dataclass(frozen=True, slots=True)
class SyncNow:
    """Enter the gate at the next step boundary, with the steps taken so far.

    Holds for every round up to this number, so it changes nothing where it comes late, and an order that arms
    one of these rounds may come behind it.

    Attributes:
        round: Number of the last of these rounds.
    """

    round: int


@dataclass(frozen=True, slots=True)
class Throttle:
    """Take no step beyond this one, although batches of an order are left; a later `Throttle` replaces it.

    It goes out before the batches that it holds back, so no rank can be ahead of it; raised, it releases.

    Attributes:
        limit: Steps of this rank since the run began.
        reason: Why, in words.
    """

    limit: int
    reason: str


@dataclass(frozen=True, slots=True)
class RequestParams:
    """Put a snapshot of your replica down for this round (async)."""

    round: int


@dataclass(frozen=True, slots=True)
class Update:
    """The mean of a round is there: add its difference to your snapshot (async).

    Attributes:
        round: The round of the snapshot.
        global_step: Steps of all ranks up to the snapshots.
    """

    round: int
    global_step: int


@dataclass(frozen=True, slots=True)
class Leave:
    """End the thread.

    Attributes:
        reason: None at the end of the run, else the failure of another rank in words.
    """

    reason: str | None = None


# ---------------------------------------------------------------- tasks at a barrier
# Between two rounds, with nothing dealt, the replicas are equal and no order can be obeyed in different
# rounds: one in the inbox is enough.
@dataclass(frozen=True, slots=True)
class Evaluate:
    """All ranks stand still: evaluate the replicas, which are equal, on the batches of the evaluation.

    Attributes:
        epoch: The epoch that has ended, or that is under way.
        number: Index of the evaluation in the run.
        global_step: Steps of all ranks at which it was due; None: at the end of the epoch.
        merges: Its batches are done: merge the metrics of all ranks, and compute their values.
    """

    epoch: int
    number: int
    global_step: int | None = None
    merges: bool = False


@dataclass(frozen=True, slots=True)
class SaveState:
    """At a barrier: copy this rank's state to the host for a checkpoint.

    Attributes:
        number: Index of the saving in the run.
        model: The rank that also puts down the model.
        is_best: The model is the best so far: a rank of each machine puts it down, for its own user.
    """

    number: int
    model: int = 0
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class CopyReplica:
    """At a barrier: this replica had NaN or inf parameters, and copies another one.

    Attributes:
        donor: The rank to take optimizer state, parameters and buffers from.
        receiver: The rank that copies it from another machine, where its own has no healthy replica: both
            ranks get this order then, and both answer. None: the donor is on the machine of the rank that
            gets the order, and gets none itself.
    """

    donor: int
    receiver: int | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """At a barrier of machines whose means travel while they train: make all replicas equal.

    Nothing was trained since the round of the mean that is on its way, so the replicas become that mean,
    those of a machine that weighed nothing too. Buffers, which do not travel with it, are averaged now.
    """


BarrierTask = Evaluate | SaveState | CopyReplica | Settle
"""Task of a rank at a barrier."""

Evaluation = tuple[int, float, tuple[tuple[str, float], ...]]
"""Result of a batch of an evaluation: its number, its samples (or another weight of the means), and (name,
mean) pairs."""


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A rank has done its barrier task.

    It has no batch of the evaluation left to take, or has merged the metrics of all ranks; its state is on
    its way to the host; its replica equals the others or was given to a rank of another machine; or no mean
    is on its way to it.

    Attributes:
        rank: Rank index.
        results: Results of the batches that it has evaluated.
        arrays: Values of merged metrics with several elements, by their names.
        has_metrics: It has updated metrics, which are to be merged with those of the other ranks.
    """

    rank: int
    results: tuple[Evaluation, ...] = ()
    arrays: tuple[tuple[str, MetricArray], ...] = ()
    has_metrics: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The writer is done with a checkpoint and all before it; those that failed are none the less done.

    Attributes:
        version: Number of the checkpoint.
    """

    version: int


Order = StartEpoch | DataEnded | SyncNow | Throttle | RequestParams | Update | Leave | BarrierTask


# ---------------------------------------------------------------- facts
@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The replica of this rank stands and waits for its first order."""

    rank: int


@dataclass(frozen=True, slots=True)
class StepsDone:
    """Steps of an order without a meeting were taken, since the last report (async).

    Attributes:
        rank: Rank index.
        plan: The plan of the order.
        work: The work done.
        is_last: The order has ended with them.
        mean: Round of the last mean that the rank had by then; -1: none.
    """

    rank: int
    plan: int
    work: Work
    is_last: bool = True
    mean: int = -1


@dataclass(frozen=True, slots=True)
class Checksum:
    """Sum of the bits of a replica's parameters.

    Attributes:
        kind: Of the device that steps them: those of different kinds may round differently.
        sum: The sum.
    """

    kind: str
    sum: int


@dataclass(frozen=True, slots=True)
class SyncAck:
    """An order ended with a mean: all its rounds were held, or `outcome` voided the rest.

    Attributes:
        rank: Rank index.
        outcome: Outcome of the last round held.
        work: The work done, all rounds of the order together; `bad` is there, too, where the device has left
            the rank out of the last mean, which no outcome could tell.
        sync_ms: Averaging time of the last round, without waiting.
        drift: ||replica - mean|| / ||mean|| in the last round; None where not measured.
        checksum: Of the replica after the step of the last round, where its outcome compares; else None.
        norm: 2-norm of the averaged parameters in the last round; None where the drift is not measured.
    """

    rank: int
    outcome: Outcome
    work: Work
    sync_ms: float = 0.0
    drift: float | None = None
    checksum: Checksum | None = None
    norm: float | None = None


@dataclass(frozen=True, slots=True)
class SnapshotReady:
    """The snapshot of this rank lies ready (async).

    Attributes:
        rank: Rank index.
        round: The round it was asked for.
        steps: Steps since the last mean that it applied.
        samples: Samples of those steps: its weight; 0 where `bad`.
        bad: The replica has NaN or inf parameters.
    """

    rank: int
    round: int
    steps: int
    samples: int
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Averaged:
    """The mean of a round's snapshots lies ready (async).

    Attributes:
        round: The round.
        sync_ms: Time it took.
        drifts: ||snapshot - mean|| / ||mean|| per rank, or empty.
        norm: ||mean||; None where not measured.
    """

    round: int
    sync_ms: float
    drifts: tuple[float, ...] = ()
    norm: float | None = None


@dataclass(frozen=True, slots=True)
class BatchReady:
    """A batch that a worker waits for has been read. Goes to the worker, which looks for it."""


@dataclass(frozen=True, slots=True)
class Exiting:
    """A worker thread ends.

    Attributes:
        rank: Rank index.
        error: None after an order to leave, else the failure in words.
        is_alone: The failure is this rank's own: no mean and no barrier task of the others depends on it.
        unreported_samples: Samples already averaged into the model that this rank has not reported yet.
    """

    rank: int
    error: str | None = None
    is_alone: bool = False
    unreported_samples: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """Something beside the workers failed: the reader, the averaging, a whole machine.

    Attributes:
        error: In words.
        ranks: Ranks that are gone with it, of which no word comes any more: those of a lost machine.
    """

    error: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline that the machine asked for has passed."""


Fact = (
    WorkerReady
    | StepsDone
    | SyncAck
    | SnapshotReady
    | Averaged
    | BatchRead
    | DataEnded
    | TaskDone
    | CheckpointWritten
    | Exiting
    | Failed
    | Requested
    | Tick
)
