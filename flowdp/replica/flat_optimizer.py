"""An optimizer that steps the flat memory of a replica: few long tensors instead of some hundred short ones.

The replica's own optimizer stays as the user made it, parameter by parameter: schedulers, checkpoints and
state_dicts go on with it. A twin of the same class steps runs of parameters that lie next to each other in
one group, as one flat parameter each. At each step it takes over all options of the groups; its state is put
into the replica's optimizer, as views, whenever it is asked for, and read from there when it was loaded.

A parameter without a gradient is not stepped, as in torch. So a run whose parameters
do not all have one is divided, for good, and each of its parts is stepped when it has gradients.

Where ranks divide the flat memory, each has a twin for its span alone. The replica's optimizer then has no
state: `joined_state` has that of all, in torch's form.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.device.flat_gradients import FlatGradients
from flowdp.device.flat_parameters import FlatReplica
from flowdp.errors import FlowdpError, OptionError
from flowdp.replica.flat_twin import ELEMENTWISE, FlatMemory, FlatTwin, groups_form, picks_fused

__all__ = ["FlatOptimizer", "joined_state", "obstacle", "refuse_state"]

log = logging.getLogger("flowdp")

LARGE = 16_384
"""Elements of a parameter, in the mean over all, from which on the CPU writes and reads longer than it calls:
gradients that are added up in flat memory are zeroed and read once more, some 30 us for 200,000 elements."""

PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of options that a recorded step may repeat."""


def obstacle(optimizer: Optimizer, module: nn.Module, replica: FlatReplica) -> str | None:
    """Why an optimizer has to step its parameters one by one; None: it can step flat memory."""
    if type(optimizer) not in ELEMENTWISE:
        return f"{type(optimizer).__name__} is none of SGD, Adam and AdamW"
    if any(_step_hooks(optimizer)) or _has_own_step(optimizer):
        return "it has hooks, or a step of its own"
    if any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse for part in module.modules()):
        return "an embedding has sparse gradients"
    flat = {parameter for parameter, _ in replica.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(set(parameters)) < len(parameters):
        return "a parameter is in it twice"
    for parameter in parameters:
        if parameter.is_complex():
            return "a parameter is complex"
        if parameter._post_accumulate_grad_hooks:
            return "a parameter has a hook that runs when its gradient is there"
        if parameter.requires_grad and parameter not in flat:
            return "a parameter does not lie in the flat memory, or shares it with another one"
    return _unfit_options(optimizer) or _no_gain(optimizer, [view for _, view in replica.parameters()])


class FlatOptimizer:
    """Steps a replica's parameters as flat memory, in the name of its optimizer.

    A step is `prepare`, a step of the optimizer that this returns, then `finish`.

    Args:
        own: The replica's optimizer; `obstacle` has found none.
        replica: The flat memory.
        gradients: Gradients of the replica.

    Threads:
        The owner of the replica; `publish` any, while the replica is not stepped.

    Streams:
        On the current one; only `prepare` reads back, and only after a state was loaded.
    """

    def __init__(self, own: Optimizer, replica: FlatReplica, gradients: FlatGradients) -> None:
        self._own = own
        self._hooks = _step_hooks(own)
        self._gradients = gradients
        self._memory = FlatMemory(replica, gradients)
        self._twin: FlatTwin | None = None
        self.is_joining = False  # the state is asked for by `joined_state`
        self._is_ahead = False  # the state is the twin's, since the replica's optimizer got it last
        self._is_apart = False  # the replica's optimizer steps for itself, for good
        self._moved: list[int] = []  # parameters that the module keeps elsewhere
        self._revision = 0  # counts the twins
        self._lock = threading.Lock()
        this = weakref.ref(self)
        own.register_state_dict_pre_hook(lambda _: _publish(this()), prepend=True)
        own.register_load_state_dict_post_hook(lambda _: _reload(this()))

    def prepare(self, touched: Sequence[bool]) -> Optimizer:
        """Make all ready for a step by the gradients that lie in flat memory.

        Args:
            touched: Flag per parameter: it has a gradient.

        Returns:
            The optimizer to step.
        """
        own, twin = self._own, self._twin
        if not self._is_apart and (twin is None or groups_form(own) != twin.seen or any(self._hooks)):
            self._rebuild()
        if self._twin is not None and self._gradients.thawable and self._gradients.thawed():
            self._step_apart("a parameter that was frozen at first is trained")
        twin = self._twin
        if twin is None:
            self._gradients.show(touched)
            return own
        self._moved = self._memory.bring_in(twin.members)
        twin.prepare(touched)
        return twin.optimizer

    def finish(self) -> None:
        """Bring the optimizer's step to the module, to autograd and to schedulers."""
        twin = self._twin
        if twin is None:
            return
        if self._moved:
            self._memory.bring_out(self._moved)
        self._is_ahead = True
        # By its version autograd sees that a parameter has changed since a forward used it.
        torch.autograd.graph.increment_version(twin.stepped)
        self._own._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it

    def publish(self) -> None:
        """Give the replica's optimizer the state as it is: views of the flat one, and numbers of its own.

        A number for each parameter: an optimizer of torch's that loads one `step` for all would count it
        once for each.
        """
        with self._lock:
            twin = self._twin
            if twin is None or not self._is_ahead or self.is_cut:
                return
            for at, start, state in twin.pieces():
                self._own.state[self._memory.parameters[at]] = self._memory.join(at, [(start, state)])
            self._is_ahead = False

    def reload(self) -> None:
        """Drop the twin: the next step begins with a new state of the replica's optimizer."""
        self._twin = None
        self._is_ahead = False

    # ---------------------------------------------------------------- graphs
    @property
    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [group["lr"] for group in self._own.param_groups]

    def can_be_recorded(self) -> bool:
        """Whether a step can be recorded as a graph, its rates aside."""
        own, twin = self._own, self._twin
        if twin is None or any(self._hooks):
            return False
        if self.is_cut or self._moved:
            return False
        if any(view.dtype is torch.float64 for view in self._memory.views):
            return False  # a rate on the device is float32
        is_fused = twin.picks_fused or all(group.get("fused") for group in own.param_groups)
        options = [item for group in own.param_groups for item in group.items()]
        is_plain = all(isinstance(value, PLAIN) for name, value in options if name not in ("params", "lr"))
        return (
            is_fused and is_plain and twin.has_state() and all(isinstance(rate, float) for rate in self.rates)
        )

    def graph_key(self, touched: Sequence[bool]) -> object:
        """All that a recorded step depends on, but for the rates.

        Args:
            touched: As for `prepare`.
        """
        options = [
            [len(value) if name == "params" else value for name, value in group.items() if name != "lr"]
            for group in self._own.param_groups
        ]
        twin = self._twin
        revision = None if twin is None or any(self._hooks) else (self._revision, twin.revision)
        return revision, options, touched, bool(self._gradients.thawed())

    @contextmanager
    def recording(self, rates: Sequence[Tensor]) -> Iterator[None]:
        """Context in which a step of `prepare`'s optimizer is recorded, with its rates on the device."""
        assert self._twin is not None
        groups = self._twin.optimizer.param_groups
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True  # torch asks for it; the fused kernel is the same
        try:
            yield
        finally:
            for group, options in zip(groups, before, strict=True):
                group.update(options)

    # ---------------------------------------------------------------- spans
    @property
    def is_cut(self) -> bool:
        """Whether it steps a span alone."""
        return bool(self._memory.spans)

    def own_span(self, rank: int) -> None:
        """Step this rank's span of the flat memory alone, and have the state of that.

        Streams:
            On the current one, which has to wait for those that made the state.
        """
        self._memory.own_span(rank)
        self._rebuild()

    def unfit(self) -> str | None:
        """Why it has to step its parameters one by one by now; None: it has not."""
        own = self._own
        if any(self._hooks):
            return "hooks were registered on it"
        return _unfit_options(own) or self._unfit_state()

    def pieces(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """State of the span; see `FlatTwin.pieces`."""
        if self._twin is None:  # a state was loaded
            self._rebuild()
        assert self._twin is not None
        return self._twin.pieces()

    # ---------------------------------------------------------------- the twin
    def _rebuild(self) -> None:
        """Make a twin that has the groups and the state of the replica's optimizer."""
        own = self._own
        if self.is_cut and self._twin is not None:
            raise OptionError(
                "policy='exact' on several CUDA devices: hooks were registered on the optimizer during the "
                "run, or its groups or their eps were changed, while each device steps a part of its "
                "parameters: let the factory of the optimizer do that"
            )
        self.publish()
        self.reload()
        why = self.unfit()
        if why is not None and self.is_cut:  # a state was loaded
            raise OptionError(
                f"policy='exact' on several CUDA devices: {why}, since a state was loaded into the optimizer "
                "during the run, while each device steps a part of its parameters"
            )
        if why is not None:
            self._step_apart(why)
            return
        self._twin = FlatTwin(own, self._memory)
        self._is_ahead = True
        self._revision += 1

    def _step_apart(self, why: str) -> None:
        """Leave the steps to the replica's optimizer, for good."""
        log.debug("the optimizer steps its parameters one by one: %s", why)
        self.publish()
        self.reload()
        self._is_apart = True

    def _unfit_state(self) -> str | None:
        names = ELEMENTWISE[type(self._own)]
        for parameter in self._memory.parameters:
            for name, value in self._own.state.get(parameter, {}).items():
                shape = parameter.shape if name in names else ()
                if value is not None and (not isinstance(value, Tensor) or value.shape != shape):
                    return f"its state has {name!r} in another form than torch gives it"
        return None


def joined_state(owners: Sequence[FlatOptimizer]) -> dict[str, Any]:
    """The `state_dict()` of an optimizer whose state the ranks have in spans.

    Args:
        owners: In the order of the ranks.

    Returns:
        As torch's: state that one rank has as a whole is a view of it, and the host has the other.

    Threads:
        Any, while no rank steps; the devices have done all steps.
    """
    first = owners[0]
    first.is_joining = True
    whole: dict[str, Any] = first._own.state_dict()
    first.is_joining = False
    pieces: dict[int, list[tuple[int, dict[str, Tensor]]]] = {}
    for owner in owners:
        for at, start, state in owner.pieces():
            pieces.setdefault(at, []).append((start, state))
    places = {parameter: at for at, parameter in enumerate(first._memory.parameters)}
    listed = chain.from_iterable(group["params"] for group in first._own.param_groups)
    for number, parameter in enumerate(listed):
        if found := pieces.get(places.get(parameter, -1)):
            whole["state"][number] = first._memory.join(places[parameter], found)
    return whole


def _publish(flat: FlatOptimizer | None) -> None:
    if flat is None:
        raise FlowdpError(
            "the replica of this optimizer is gone with its run, and its state, too: take it from the run, "
            "run.join().optimizer_state, or from a checkpoint"
        )
    if flat.is_cut and not flat.is_joining:
        refuse_state()
    flat.publish()


def refuse_state(*_: object) -> NoReturn:
    """Say that the state of an optimizer lies on other devices, too.

    Raises:
        FlowdpError: Always.
    """
    raise FlowdpError(
        "policy='exact': the devices share the state of the optimizer, and this one has a part of it, or "
        "none: take it from a checkpoint, run.checkpoint(), or behind the run, run.join().optimizer_state"
    )


def _reload(flat: FlatOptimizer | None) -> None:
    if flat is not None:
        flat.reload()


def _step_hooks(optimizer: Optimizer) -> list[dict[int, Any]]:
    """The tables in which an optimizer keeps the hooks of its steps, for its life."""
    return [hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks") and "step" in name]


def _has_own_step(optimizer: Optimizer) -> bool:
    step = vars(optimizer).get("step")
    # Torch's schedulers wrap the step of the class, or one of the user's.
    return step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step


def _no_gain(optimizer: Optimizer, views: Sequence[Tensor]) -> str | None:
    device, elements = views[0].device, sum(view.numel() for view in views)
    if device.type != "cpu" or elements <= LARGE * len(views) or picks_fused(optimizer, device):
        return None
    return "few and large parameters on the CPU: adding up in flat memory costs more than the calls saved"


def _unfit_options(optimizer: Optimizer) -> str | None:
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "differentiable=True"
        for parameter in group["params"]:
            # The gaps between parameters are zero, and would become 0 / 0.
            if group.get("eps", 1.0) < torch.finfo(parameter.dtype).smallest_normal:
                return f"eps={group['eps']} is 0 in {parameter.dtype}"
    return None
