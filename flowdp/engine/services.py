"""What an engine is given beside what it trains: to watch over the run, and to keep its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowdp.checkpoint.folder import Store
from flowdp.engine.evaluation import Evaluator
from flowdp.engine.sigterm import SigtermStop
from flowdp.options import OnNan
from flowdp.policy.tally import EpochMetrics

__all__ = ["Care"]


@dataclass(kw_only=True)
class Care:
    """What watches over a run and keeps its state.

    Attributes:
        store: Where checkpoints go; None: nowhere.
        fingerprint: What must be the same where one of them is resumed.
        has_listeners: Somebody is told of each checkpoint.
        history: Records of the epochs that were complete before.
        best: Model of the best epoch before, where the run keeps it.
        evaluator: Evaluates; None: nothing does.
        stall_timeout_s: How long nothing may move, in seconds; None: for ever.
        on_nan: What becomes of a replica that leaves the numbers.
        sigterm: Has SIGTERM stop the run; None: it does not.
    """

    store: Store | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    has_listeners: bool = False
    history: Sequence[EpochMetrics] = ()
    best: Mapping[str, Tensor] | None = None
    evaluator: Evaluator | None = None
    stall_timeout_s: float | None = None
    on_nan: OnNan = "quarantine"
    sigterm: SigtermStop | None = None
