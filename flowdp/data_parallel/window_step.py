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
from flowdp.data_parallel.loss_context import LossContext, Recipe, Traces
from flowdp.data_parallel.replicas import Peers
from flowdp.device.draws import OwnDraws
from flowdp.device.streams import Lane
from flowdp.errors import FlowdpError
from flowdp.graphs.base import Computed, Factors, Passed, shared
from flowdp.graphs.captured_step import Captured
from flowdp.options import CaptureOptions
from flowdp.replica.captured_steps import Capturing, modules_of

__all__ = ["Results", "WindowCapture", "WindowStep", "call", "differentiate", "last"]


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


def call(module: nn.Module, batch: Any, recipe: Recipe) -> tuple[Any, Traces]:
    """Outputs of a module and of its tagged submodules."""
    with recipe.taps.listening(module) as traces:
        args, kwargs = recipe.inputs.of(batch)
        return module(*args, **kwargs), traces


def last(traces: Traces) -> dict[str, Any]:
    """The return values of the tagged submodules in their last calls."""
    return {name: calls[-1] for name, calls in traces.items() if calls}


def _results(module: nn.Module, batch: Any, recipe: Recipe) -> Results:
    """Forward and loss, with their graph."""
    assert recipe.loss is not None
    output, traces = call(module, batch, recipe)
    loss = recipe.loss(LossContext(output, batch, last(traces), traces))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        form = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise FlowdpError(f"the loss function must return one number, the mean over the batch, not {form}")
    loss = loss.squeeze()
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise FlowdpError("the loss depends on no parameter of the model: compute it from the context")
    return Results(loss, output, traces)


def differentiate(
    module: nn.Module, batch: Any, recipe: Recipe, factors: Factors, peers: Peers | None, rank: int
) -> Results:
    """Forward, loss and, where gradients are enabled, backward of a batch.

    Args:
        module: Module of the rank.
        batch: On its device.
        recipe: Has a loss.
        factors: Its share, and its samples.
        peers: All ranks; None: it is the only one.
        rank: Index of the rank.

    Returns:
        All of it detached.

    Raises:
        FlowdpError: The loss is not one number, or depends on no parameter.
    """
    if peers is None:
        results = _results(module, batch, recipe)
    else:
        results = peers.launch(rank, factors.of, _results, module, batch, recipe)
    if torch.is_grad_enabled():
        loss = results.loss * factors.share
        loss = loss if recipe.scale is None else recipe.scale(loss)
        if peers is None:
            loss.backward()
        else:
            with peers.watch(rank):
                loss.backward(retain_graph=peers.frees_at_once(rank))
    return Results(*tree_map(_detached, [*results]))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class WindowStep:
    """Forward, loss and backward of the batches of one rank, captured where that can be; a `Capturable`.

    Args:
        module: Module of the rank.
        recipe: Inputs, loss and tags of each batch.
        lane: Lane of the rank.
        rank: Rank index.
        peers: All ranks; None: it is the only one.
        capturing: State that all ranks share.

    Attributes:
        module: As given.
        lane: As given.
        shares_generator: See `Capturable`; so are all others.

    Threads: the rank's. `captured`: any.
    """

    has_flat_gradients = False
    gives_gradients = True

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        lane: Lane,
        rank: int,
        peers: Peers | None,
        capturing: Capturing,
    ) -> None:
        assert recipe.loss is not None
        self.module = module
        self.lane = lane
        self.shares_generator = peers is not None and peers.shares_generator(rank)
        self.has_stepped = False
        meets = peers is not None and bool(SharedStatistics(module))
        self.obstacle = "its forwards meet those of the other ranks (SyncBatchNorm)" if meets else None
        self._recipe = recipe
        self._rank = rank
        self._peers = peers
        user: Callable[..., Any] = recipe.loss
        code = partial(user, recipe.inputs.function)  # all that is the user's, as one function
        own = {"": module}
        read = {**own, **modules_of(recipe.loss, module), **modules_of(recipe.inputs.function, module)}
        if isinstance(recipe.loss, nn.Module):
            read["the loss"] = recipe.loss
        # All ranks compute with the tensors that the loss holds: a recording must leave them alone.
        self.captured: Captured = capturing.of(self, code, read, read if peers is None else own)
        if self.obstacle is not None:
            self.captured.give_up(self.obstacle)

    @property
    def trained(self) -> Sequence[Tensor]:
        """The parameters that require grad."""
        if self._peers is None:
            return [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return self._peers.trained(self._rank)

    @property
    def draws(self) -> OwnDraws | None:
        """The random numbers of this rank in the window under way."""
        return None if self._peers is None else self._peers.own_draws(self._rank)

    @property
    def casts(self) -> object:
        """The autocast that the user has entered, with its dtype."""
        kinds = ("cpu", self.lane.device.type)
        found = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        return found or None

    def run(self, batch: Any, recipe: Recipe, factors: Factors) -> Results:
        """Forward, loss and backward of a batch; see `differentiate`."""
        self._recipe = recipe
        computed = None
        if recipe.scale is not None:
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
            results = differentiate(self.module, batch, self._recipe, factors, self._peers, self._rank)
        self.has_stepped = self.has_stepped or torch.is_grad_enabled()
        return Computed(results.loss * factors.share, outputs=[*results])

    def forward(self, batch: Any, _worker: None, share: float | Tensor, _of: int | Tensor) -> Passed:
        """Forward and loss, as they are recorded; see `Capturable.forward`."""
        assert isinstance(share, Tensor)
        results = _results(self.module, batch, self._recipe)
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
        recipe: Inputs, loss and tags; another loss needs another one of these.
        options: How that is captured.
        lanes: One per rank.
        peers: Runs the ranks; None: there is one.

    Attributes:
        steps: One per rank.
        lock: Hold it while the tables of the first rank's module are read beside its computing.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        recipe: Recipe,
        options: CaptureOptions,
        lanes: Sequence[Lane],
        peers: Peers | None,
    ) -> None:
        capturing = Capturing(options)
        self.lock = capturing.lock
        self.steps = [
            WindowStep(module, recipe, lane, rank, peers, capturing)
            for rank, (module, lane) in enumerate(zip(modules, lanes, strict=True))
        ]
        self._rest = options, lanes, peers

    @classmethod
    def of(
        cls, modules: Sequence[nn.Module], recipe: Recipe, lanes: Sequence[Lane], peers: Peers | None
    ) -> WindowCapture | None:
        """As the recipe says; None: nothing is captured."""
        return None if recipe.capture is None else cls(modules, recipe, recipe.capture, lanes, peers)

    @property
    def ended(self) -> tuple[str, ...]:
        """Why steps run eagerly, each reason once; empty where none does, or not yet."""
        return tuple(
            dict.fromkeys(one.captured.ended for one in self.steps if one.captured.ended is not None)
        )

    def anew(self, recipe: Recipe) -> WindowCapture:
        """Those of another loss; the graphs of this one are let go, and their memory."""
        for step in self.steps:
            step.captured.close()
        return WindowCapture([step.module for step in self.steps], recipe, *self._rest)
