"""Forward, loss and backward of a rank's part of a window, eagerly or captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowdp.data.trees import tree_map
from flowdp.data_parallel.loss_context import BatchPlan, LossContext, Traces
from flowdp.device.streams import Lane
from flowdp.device.torch_modes import watcher
from flowdp.errors import FlowdpError
from flowdp.graphs.base import Computed, Factors, Passed, shared
from flowdp.graphs.captured_step import Captured
from flowdp.replica.captured_steps import Capturing, modules_of

__all__ = ["Results", "WindowCapture", "WindowStep", "call", "last_outputs", "results_of", "train"]


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


def results_of(module: nn.Module, batch: Any, plan: BatchPlan) -> Results:
    """Forward and loss of a batch, with their graph.

    Raises:
        FlowdpError: The loss is not one number, or depends on no parameter.
    """
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


def train(
    module: nn.Module, batch: Any, plan: BatchPlan, share: float, backward: Callable[[Tensor], object]
) -> Results:
    """Forward, loss and, where gradients are enabled, backward of a batch; the results are detached.

    Args:
        module: The model.
        batch: The batch, on its device.
        plan: Processing of the batch, with a loss function.
        share: Share of the loss in that of the step.
        backward: Called with the loss times its share, scaled.

    Raises:
        FlowdpError: The loss is not one number, or depends on no parameter.
    """
    results = results_of(module, batch, plan)
    if torch.is_grad_enabled():
        loss = results.loss * share
        backward(loss if plan.scale is None else plan.scale(loss))
    return Results(*tree_map(_detached, [*results]))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class WindowStep:
    """Forward, loss and backward of a batch on one device, captured where that can be; a `Capturable`.

    Threads: the user's.
    """

    has_flat_gradients = False
    gives_gradients = True
    shares_generator = False
    draws = None

    def __init__(self, module: nn.Module, plan: BatchPlan, lane: Lane, capturing: Capturing) -> None:
        assert plan.loss is not None
        self.module = module
        self.lane = lane
        self.has_stepped = False
        self._plan = plan
        user: Callable[..., Any] = plan.loss
        code = partial(user, plan.inputs.function)  # all that is the user's, as one function
        read = {"": module} | modules_of(plan.loss, module) | modules_of(plan.inputs.function, module)
        if isinstance(plan.loss, nn.Module):
            read["the loss"] = plan.loss
        self._read = list(read.values())
        self.captured: Captured = capturing.of(self, code, read, read)

    @property
    def trained(self) -> Sequence[Tensor]:
        """The parameters that require grad."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @property
    def obstacle(self) -> str | None:
        """Why nothing is captured; None: nothing stands in the way."""
        own = set(map(id, self.trained))
        for module in self._read:
            if any(one.requires_grad and id(one) not in own for one in module.parameters()):
                return (
                    "the loss reads a parameter that requires grad and is none of the model's; one that is "
                    "not trained, as a teacher's, is no obstacle: teacher.requires_grad_(False)"
                )
        return None

    @property
    def casts(self) -> object:
        """The autocast that the user has entered, with its dtype."""
        kinds = ("cpu", self.lane.device.type)
        found = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        return found or None

    def run(self, batch: Any, plan: BatchPlan, factors: Factors) -> Results:
        """Forward, loss and backward of a batch; see `train`."""
        self._plan = plan
        if plan.scale is not None:
            self.captured.give_up("a GradScaler scales its loss by Python")
        computed = self.captured.run(batch, None, factors) if _is_plain() else None
        outputs: Results = (computed or self.compute(batch, None, factors)).outputs
        return Results(*outputs)

    def compute(self, batch: Any, _worker: None, factors: Factors) -> Computed:  # it has none
        """Forward, loss and backward by the user's Python; see `Capturable.compute`."""
        results = train(self.module, batch, self._plan, factors.share, Tensor.backward)
        self.has_stepped = self.has_stepped or torch.is_grad_enabled()
        return Computed(results.loss * factors.share, outputs=[*results])

    def forward(self, batch: Any, _worker: None, share: float | Tensor, _of: int | Tensor) -> Passed:
        """Forward and loss, as they are recorded; see `Capturable.forward`."""
        assert isinstance(share, Tensor)
        results = results_of(self.module, batch, self._plan)
        return Passed(shared(results.loss, share), outputs=[*results])

    def scale(self, loss: Tensor) -> Tensor:
        """The loss itself; see `Capturable.scale`."""
        return loss


def _is_plain() -> bool:
    """Whether a step is its operations alone: with gradients, and nothing that sees the operations."""
    return torch.is_grad_enabled() and not torch.is_anomaly_enabled() and watcher() is None


class WindowCapture:
    """The captured step of a loop on one device.

    Args:
        module: The user's.
        plan: Inputs, loss, tags and capture; another loss needs another `WindowCapture`.
        lane: Lane of the device.

    Attributes:
        step: The step.
    """

    def __init__(self, module: nn.Module, plan: BatchPlan, lane: Lane) -> None:
        assert plan.capture is not None
        self.step = WindowStep(module, plan, lane, Capturing(plan.capture))

    @property
    def ended(self) -> tuple[str, ...]:
        """The reason for which steps run eagerly; empty where they do not, or not yet."""
        reason = self.step.captured.ended
        return () if reason is None else (reason,)

    def close(self) -> None:
        """Let the graphs go, and their memory."""
        self.step.captured.close()
