"""Forward, loss and backward of a rank's part of a window, eagerly or captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import SharedStatistics
from flowdp.data.trees import tree_map
from flowdp.data_parallel.loss_context import BatchPlan, LossContext, Traces
from flowdp.data_parallel.replicas import Replicas
from flowdp.device.draws import OwnDraws
from flowdp.device.streams import Lane
from flowdp.errors import FlowdpError
from flowdp.graphs.base import Computed, Factors, Passed, shared
from flowdp.graphs.captured_step import Captured
from flowdp.replica.captured_steps import Capturing, modules_of

__all__ = ["Results", "WindowCapture", "WindowStep", "call", "differentiate", "last_outputs"]


class Results(NamedTuple):
    """Loss and outputs of a batch.

    Attributes:
        loss: Mean over the batch. Shape [].
        output: Return value of the module.
        traces: Return values of the tagged submodules, call by call.
    """

    loss: Tensor
    output: Any
    traces: Traces


def call(module: nn.Module, batch: Any, plan: BatchPlan) -> tuple[Any, Traces]:
    """Outputs of a module and of its tagged submodules."""
    with plan.tagged.listening(module) as traces:
        args, kwargs = plan.inputs.of(batch)
        return module(*args, **kwargs), traces


def last_outputs(traces: Traces) -> dict[str, Any]:
    """The return values of the tagged submodules in their last calls."""
    return {name: calls[-1] for name, calls in traces.items() if calls}


def _results(module: nn.Module, batch: Any, plan: BatchPlan) -> Results:
    """Forward and loss, with their graph."""
    assert plan.loss is not None
    output, traces = call(module, batch, plan)
    loss = plan.loss(LossContext(output, batch, last_outputs(traces), traces))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        form = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise FlowdpError(f"the loss function must return one number, the mean over the batch, not {form}")
    loss = loss.squeeze()
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise FlowdpError("the loss depends on no parameter of the model: compute it from the context")
    return Results(loss, output, traces)


def differentiate(
    module: nn.Module,
    batch: Any,
    plan: BatchPlan,
    factors: Factors,
    replicas: Replicas | None,
    rank: int,
) -> Results:
    """Forward, loss and, where gradients are enabled, backward of a rank's batch; the results are detached.

    Raises:
        FlowdpError: The loss is not one number, or depends on no parameter.
    """
    if replicas is None:
        results = _results(module, batch, plan)
    else:
        results = replicas.launch(rank, factors.of, _results, module, batch, plan)
    if torch.is_grad_enabled():
        loss = results.loss * factors.share
        loss = loss if plan.scale is None else plan.scale(loss)
        if replicas is None:
            loss.backward()
        else:
            with replicas.watch(rank):
                loss.backward(retain_graph=replicas.frees_at_once(rank))
    return Results(*tree_map(_detached, [*results]))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class WindowStep:
    """Forward, loss and backward of the batches of one rank, captured where that can be; a `Capturable`.

    Threads: the rank's. `captured`: any.
    """

    has_flat_gradients = False
    gives_gradients = True

    def __init__(
        self,
        module: nn.Module,
        plan: BatchPlan,
        lane: Lane,
        rank: int,
        replicas: Replicas | None,
        capturing: Capturing,
    ) -> None:
        assert plan.loss is not None
        self.module = module
        self.lane = lane
        self.shares_generator = replicas is not None and replicas.shares_generator[rank]
        self.has_stepped = False
        meets = replicas is not None and bool(SharedStatistics(module))
        self.obstacle = "its forwards meet those of the other ranks (SyncBatchNorm)" if meets else None
        self._plan = plan
        self._rank = rank
        self._replicas = replicas
        user: Callable[..., Any] = plan.loss
        code = partial(user, plan.inputs.function)  # all that is the user's, as one function
        own = {"": module}
        read = own | modules_of(plan.loss, module) | modules_of(plan.inputs.function, module)
        if isinstance(plan.loss, nn.Module):
            read["the loss"] = plan.loss
        # All ranks compute with the tensors that the loss holds: a recording must leave them alone.
        self.captured: Captured = capturing.of(self, code, read, read if replicas is None else own)
        if self.obstacle is not None:
            self.captured.give_up(self.obstacle)

    @property
    def trained(self) -> Sequence[Tensor]:
        """The parameters that require grad."""
        if self._replicas is None:
            return [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return self._replicas.trained(self._rank)

    @property
    def draws(self) -> OwnDraws | None:
        """The random numbers of this rank in the window under way."""
        return None if self._replicas is None else self._replicas.own_draws[self._rank]

    @property
    def casts(self) -> object:
        """The autocast that the user has entered, with its dtype."""
        kinds = ("cpu", self.lane.device.type)
        found = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        return found or None

    def run(self, batch: Any, plan: BatchPlan, factors: Factors) -> Results:
        """Forward, loss and backward of a batch; see `differentiate`."""
        self._plan = plan
        computed = None
        if plan.scale is not None:
            self.captured.give_up("a GradScaler scales its loss by Python")
        elif _is_plain():
            computed = self.captured.run(batch, None, factors)
        if computed is None:
            computed = self.compute(batch, None, factors)
        outputs: Results = computed.outputs
        return Results(*outputs)

    def compute(self, batch: Any, _worker: None, factors: Factors) -> Computed:  # it has none
        """Forward, loss and backward by the user's Python; see `Capturable.compute`."""
        with self.draws or nullcontext():
            results = differentiate(self.module, batch, self._plan, factors, self._replicas, self._rank)
        self.has_stepped = self.has_stepped or torch.is_grad_enabled()
        return Computed(results.loss * factors.share, outputs=[*results])

    def forward(self, batch: Any, _worker: None, share: float | Tensor, _of: int | Tensor) -> Passed:
        """Forward and loss, as they are recorded; see `Capturable.forward`."""
        assert isinstance(share, Tensor)
        results = _results(self.module, batch, self._plan)
        return Passed(shared(results.loss, share), outputs=[*results])

    def scale(self, loss: Tensor) -> Tensor:
        """The loss itself; see `Capturable.scale`."""
        return loss


def _is_plain() -> bool:
    """Whether a step is its operations alone: with gradients, and no hooks on saved tensors."""
    return (
        torch.is_grad_enabled()
        and not torch.is_anomaly_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


class WindowCapture:
    """The captured steps of all ranks of a loop that the user owns.

    Args:
        modules: One per rank.
        plan: Inputs, loss, tags and capture; another loss needs another `WindowCapture`.
        lanes: One per rank.
        replicas: Runs the ranks; None: there is one.

    Attributes:
        steps: One per rank.
        lock: Hold it while the tables of the first rank's module are read beside its computing.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        plan: BatchPlan,
        lanes: Sequence[Lane],
        replicas: Replicas | None,
    ) -> None:
        assert plan.capture is not None
        capturing = Capturing(plan.capture)
        self.lock = capturing.lock
        self.steps = [
            WindowStep(module, plan, lane, rank, replicas, capturing)
            for rank, (module, lane) in enumerate(zip(modules, lanes, strict=True))
        ]

    @property
    def ended(self) -> tuple[str, ...]:
        """Reasons for which steps run eagerly, each once; empty where none does, or not yet."""
        reasons = (step.captured.ended for step in self.steps)
        return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))

    def close(self) -> None:
        """Let the graphs go, and their memory."""
        for step in self.steps:
            step.captured.close()
