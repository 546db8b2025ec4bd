"""Comparison of a call that is cut with the same call on one device.

The module is run on the whole batch on the first device, and on the parts on all devices as the call itself
does it. Outputs and gradients must be the same. So models whose dim 0 is time, losses that are no mean by
samples, modules that look across the batch, and state that the devices do not share are an error before they
have trained anything.

Both runs are of replicas that leave no trace in the module, and nothing in them is random.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdp.data.trees import tensors_of, tree_map, walk
from flowdp.data_parallel.call import Graphs, Run, call_parts
from flowdp.data_parallel.cut import Arguments, Part
from flowdp.data_parallel.layout import Callee, Layout
from flowdp.data_parallel.replicas import Replicas, StandIns
from flowdp.device.compiled import Uncompiled
from flowdp.device.copies import move
from flowdp.device.seeding import generators_kept, seed_everything
from flowdp.errors import FlowdpError
from flowdp.modules.comparison import compare
from flowdp.modules.constant_draws import TF32, ConstantDraws
from flowdp.modules.shallow import SHARED

__all__ = ["Call", "Result", "Trial", "check_call", "lost_gradient", "outside"]

log = logging.getLogger("flowdp")

NARROW = (torch.float16, torch.bfloat16)

SEEDS = range(20_417, 20_425)
"""Seeds of runs that tell whether a result is random: with one or two it may be the same by chance."""

GENERAL = (
    "If an argument is no part of the batch, say dim={its name: None}. A number is averaged by samples: if "
    "it is a mean over something else, say over what, reduce=lambda labels: (labels != -100).sum(). "
    "A module that looks across the batch returns a row for each sample, and the loop computes the rest."
)

LEFT_OUT = "(check=False in setup() leaves this check out.)"


@dataclass(frozen=True)
class Call:
    """A call with the whole batch, and how it is cut.

    Attributes:
        run: Calls the function, of a module, with a part.
        sizes: Samples of each rank's part. Shape (world_size,).
        told: Names that the log has had.
        advice: Finds a remedy for a difference; None: there is none.
    """

    layout: Layout
    callee: Callee
    run: Run
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[int, ...]
    told: set[str]
    advice: Callable[[Trial, Result], str | None]

    @property
    def arguments(self) -> Arguments:
        """The arguments, with the dims along which they are cut."""
        return Arguments(self.layout, self.callee, self.args, self.kwargs)

    def fewer(self) -> Call | None:
        """The same call with half the samples; None where two ranks would not have any."""
        sizes = tuple(size // 2 for size in self.sizes)
        if sum(size > 0 for size in sizes) < 2:
            return None
        first, _ = self.arguments.parts((sum(sizes), sum(self.sizes) - sum(sizes)))
        return replace(self, args=tuple(first.args), kwargs=first.kwargs, sizes=sizes)


@dataclass
class Result:
    """The result of a run.

    Attributes:
        output: Its output, without a graph.
        gradients: Gradients of the module's tensors and of the arguments, by name, from a backward of the
            output, and from backwards of the forward's own.
        kept: Numbers in buffers and attributes of the first device, by name.
        leaves: Tensors at the ends of its graph that are none of those.
        error: The error by which it ended; None: none.
    """

    output: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    kept: dict[str, list[Any]] = field(default_factory=dict)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None


def check_call(replicas: Replicas, call: Call) -> str:
    """Check that a call that is cut gives what one device gives for the whole batch.

    Where the first device has no memory for the whole batch, half of it is tried. The log says why a call
    cannot be compared.

    Returns:
        The reason why the calling thread alone gives the right result; empty: the others do, too.

    Raises:
        FlowdpError: They differ; the message has the difference, the cut of the call, and a remedy.

    Threads: the one that holds the turn of the replicas.
    """
    try:
        return _compare(replicas, call)
    except torch.OutOfMemoryError:
        fewer = call.fewer()
    if fewer is None:
        return _warn(call, "the first device has no memory for it beside what it holds")
    return check_call(replicas, fewer)


def _compare(replicas: Replicas, call: Call) -> str:
    for wide in (torch.float32, None):
        trial = Trial(replicas, call, wide)
        whole = trial.here()
        if whole.error is None:
            break
    if isinstance(whole.error, FlowdpError):
        raise whole.error
    parts = trial.parts()
    if whole.error is not None:
        if parts.error is not None:
            return _warn(call, f"with the whole batch it raises {_words(whole.error)}")
        raise FlowdpError(
            f"{call.callee.name} raises an error for the whole batch, which is cut "
            f"({call.arguments.in_words(call.sizes)}): {_words(whole.error)}. {LEFT_OUT}"
        ) from whole.error
    for key in whole.leaves.keys() & parts.leaves.keys():
        raise lost_gradient("the module's forward", whole.leaves[key])
    found = trial.differences(whole, parts)
    if found and not _is_rounding(replicas, call, trial):
        # Outputs that cannot be joined say why.
        cannot_join = isinstance(parts.error, FlowdpError)
        if not cannot_join and any(trial.differences(whole, trial.here(seed)) for seed in SEEDS):
            return _warn(call, f"its results differ from call to call ({found[0]})")
        if parts.error is None and not trial.differences(whole, trial.here(is_cut=True)):
            return f"{call.callee.name} gives another result in other threads ({found[0]})"
        text = str(parts.error) if cannot_join else "; ".join(found[:3])
        remedy = call.advice(trial, whole) or ("" if cannot_join else GENERAL)
        cut = call.arguments.in_words(call.sizes)
        words = f"{call.callee.name} gives another result when the batch is cut: {text} ({cut})."
        raise FlowdpError(" ".join(filter(None, (words, remedy, LEFT_OUT)))) from parts.error
    _warn_of_kept(call, trial, whole, parts)
    return ""


class Trial:
    """Runs of one call that leave no trace.

    Args:
        replicas: The modules.
        call: The call.
        wide: Dtype of floats of 16 bits meanwhile, without autocast: their rounding would hide differences;
            float64: of all floats. None: all is as it is.

    Attributes:
        call: As given.
    """

    def __init__(self, replicas: Replicas, call: Call, wide: torch.dtype | None) -> None:
        self.call = call
        self._replicas = replicas
        self._wide = wide
        self._draws = [ConstantDraws()]
        module = replicas.module
        known = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._tensors = [*replicas.parameters(), *replicas.buffers()]
        self._names = [known[id(tensor)] for tensor in self._tensors]
        # Another thread of the user's may step the optimizer meanwhile.
        self._values = [tensor.detach().clone() for tensor in self._tensors]

    @property
    def epsilon(self) -> float:
        """The coarsest rounding of what ran."""
        device = self._replicas.devices[0]
        return max(one.rounding(device) for one in self._draws)

    @property
    def coarse(self) -> float:
        """The rounding of sums of many roundings, as gradients are."""
        return self.epsilon if self.epsilon < 1e-12 else max(self.epsilon, TF32)

    def here(self, seed: int | None = None, *, is_cut: bool = False) -> Result:
        """Run the whole batch, or its parts, on the first device in the calling thread.

        Args:
            seed: Seed of generators meanwhile; None: they go on.
            is_cut: Whether the parts are run, one after another.
        """
        replicas, home = self._replicas, self._replicas.devices[0]

        def run(arguments: Arguments, isolated: StandIns) -> Any:
            replicas.follow(isolated)
            parts = _cut(self.call, arguments) if is_cut else [arguments.whole()]
            given = [part.replaced([move(tensor, home) for tensor in part.tensors]) for part in parts]
            known = [{id(leaf) for leaf in walk([part.args, part.kwargs])} for part in given]
            with self._draws[0]:
                made = [self.call.run(replicas.modules[0], part) for part in given]
            returned = {id(leaf) for leaf in walk(made)}  # as the cache of a language model
            for part, before in zip(given, known, strict=True):
                new = [leaf for leaf in walk([part.args, part.kwargs]) if id(leaf) not in before]
                if any(isinstance(leaf, Tensor) and id(leaf) not in returned for leaf in new):
                    raise FlowdpError(
                        f"{self.call.callee.name} puts tensors into a list, dict or other container among "
                        "its arguments, and each device does so for its part: let it return them"
                    )
            tensors = [tensor for part in given for tensor in part.tensors]
            if any(tensor._version for tensor in tensors if not tensor.is_inference()):
                raise FlowdpError(
                    f"{self.call.callee.name} writes to an argument, which several devices may have: let it "
                    "write to a copy, argument.clone()"
                )
            return arguments.join(made, parts)

        return self._run(self.call, run, seed)

    def parts(self, layout: Layout | None = None) -> Result:
        """Run the parts on all devices, and join their outputs; in another layout, if one is given."""
        call = self.call if layout is None else replace(self.call, layout=layout)

        def run(arguments: Arguments, isolated: StandIns) -> Any:
            parts = _cut(call, arguments)
            made = call_parts(self._replicas, parts, call.run, isolated=isolated, around=self._constant)
            return arguments.join(made, parts)

        return self._run(call, run)

    def differences(self, whole: Result, other: Result) -> list[str]:
        """The differences of another run from that of the whole batch."""
        if other.error is not None:
            return [f"a part raises {_words(other.error)}"]
        gradients = (
            compare(mine, other.gradients[name], self.coarse, f"the gradient of {name}")
            for name, mine in whole.gradients.items()
        )
        return compare(whole.output, other.output, self.epsilon) or next(filter(None, gradients), [])

    def _run(self, call: Call, run: Callable[[Arguments, StandIns], Any], seed: int | None = None) -> Result:
        replicas, result = self._replicas, Result()
        standing = [
            self._wider(value.clone()).requires_grad_(own.requires_grad)
            for own, value in zip(self._tensors, self._values, strict=True)
        ]
        isolated = dict(zip(map(id, self._tensors), standing, strict=True))
        with generators_kept(), ExitStack() as stack:
            if seed is not None:
                seed_everything(seed)
            stack.enter_context(Uncompiled())
            if self._wide is not None:
                for kind in {"cpu", *(device.type for device in replicas.devices)}:
                    stack.enter_context(torch.autocast(kind, enabled=False))
            try:
                leaves: list[Tensor] = []
                args, kwargs = tree_map(partial(self._given, leaves), [call.args, call.kwargs])
                output = run(Arguments(call.layout, call.callee, tuple(args), kwargs), isolated)
                for name, one, value in zip(self._names, standing, self._values, strict=True):
                    if compare(self._wider(value), one.detach(), 0.0):
                        raise FlowdpError(
                            f"{call.callee.name} writes to its parameter {name!r}, which all devices share: "
                            "write to it in the loop, after the step"
                        )
                inputs = {n: one for n, one in zip(self._names, standing, strict=True) if one.requires_grad}
                inputs |= {f"argument {number}": one for number, one in enumerate(leaves)}
                # Those that are found by another way than the module's tables are right in the call itself.
                result.leaves = outside(output, [*inputs.values(), *self._tensors])
                found = _gradients(output, [*inputs.values()], self._draws[0])
                result.gradients = dict(zip(inputs, found, strict=True))
                result.gradients |= {f"{n}, by forward,": one.grad for n, one in inputs.items()}
                result.output = tree_map(_bare, output)
                result.kept = _kept(replicas.modules[0])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                result.error = error
        return result

    def _wider(self, tensor: Tensor) -> Tensor:
        narrow = NARROW if self._wide is torch.float32 else (*NARROW, torch.float32)
        return tensor.to(self._wide) if self._wide is not None and tensor.dtype in narrow else tensor

    def _given(self, leaves: list[Tensor], leaf: Any) -> Any:
        """A copy of a leaf of the arguments, for the module may write to it."""
        if not isinstance(leaf, Tensor):
            is_open = isinstance(leaf, (list, np.ndarray, SimpleNamespace)) or is_dataclass(leaf)
            return copy(leaf) if is_open else leaf
        own = self._wider(leaf.detach().clone())
        if leaf.requires_grad and torch.is_grad_enabled():
            leaves.append(own.requires_grad_())
            return own.clone()
        return own

    def _constant(self) -> ConstantDraws:
        self._draws.append(ConstantDraws())
        return self._draws[-1]


def _kept(module: nn.Module) -> dict[str, list[Any]]:
    """The numbers in buffers and attributes of a module."""
    found = {name: [tensor.detach()] for name, tensor in module.named_buffers()}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in SHARED:
                leaves = [leaf for leaf in walk(value) if isinstance(leaf, (Tensor, np.ndarray, int, float))]
                found[f"{name}.{key}".removeprefix(".")] = [
                    _bare(leaf) for leaf in leaves if not isinstance(leaf, (bool, nn.Parameter))
                ]
    return found


def _cut(call: Call, arguments: Arguments) -> list[Part]:
    sizes, samples = call.sizes, arguments.samples or 0
    if samples != sum(sizes):  # along another dim
        sizes = (samples - samples // 2, samples // 2, *(0 for _ in sizes[2:]))
    if samples < 2:  # a remedy by which nothing is cut
        raise ValueError(f"{samples} samples cannot be cut")
    return arguments.parts(sizes)


def _gradients(output: Any, inputs: Sequence[Tensor], draws: ConstantDraws) -> list[Tensor | None]:
    """Gradients of an output's tensors, each times numbers that are the same in every run."""
    generator = torch.Generator().manual_seed(SEEDS[0])
    roots = [one for one in tensors_of(output) if one.requires_grad]
    if not torch.is_grad_enabled() or not roots or not inputs:
        return [None] * len(inputs)
    seeds = [
        torch.rand(one.shape, generator=generator, dtype=torch.float64).add(0.5).to(one.device, one.dtype)
        for one in roots
    ]
    with draws:  # a part of the forward may be computed again
        return list(torch.autograd.grad(roots, inputs, seeds, allow_unused=True))


def lost_gradient(owner: str, tensor: Tensor) -> FlowdpError:
    """The error for a tensor that requires grad and would get no gradient."""
    return FlowdpError(
        f"{owner} uses a tensor of shape {tuple(tensor.shape)} that requires grad and is neither a parameter "
        "of the module nor an argument of the call, so its gradient would be lost: make it a parameter of "
        "the module (layers in a list: nn.ModuleList), or give it as an argument; for parameters of a "
        "loss_fn leave loss_fn out, and compute the loss of result.output; if it is not trained, "
        "requires_grad_(False)"
    )


def outside(output: Any, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Leaves of an output's graph that are none of the inputs, by identity."""
    known = {id(one) for one in inputs}
    ends = {one.grad_fn for one in inputs if one.grad_fn is not None}
    todo = [one.grad_fn for one in tensors_of(output) if one.grad_fn is not None]
    found: dict[int, Tensor] = {}
    while todo:
        node = todo.pop()
        if node in ends:
            continue
        ends.add(node)
        inner = getattr(node, "graphs", None)
        if isinstance(inner, Graphs):
            todo += inner.last
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            found[id(leaf)] = leaf
        todo += [after for after, _ in node.next_functions if after is not None]
    return found


def _is_rounding(replicas: Replicas, call: Call, trial: Trial) -> bool:
    """Whether results that differ are the same in double precision.

    A step between discrete choices, as between the entries of a codebook, makes much of a rounding; there are
    such ties in some batches, and not in others.
    """
    if trial.epsilon < 1e-12:
        return False
    wide = Trial(replicas, call, torch.float64)
    whole = wide.here()
    return whole.error is None and not wide.differences(whole, wide.parts())


def _warn(call: Call, why: str) -> str:
    if why not in call.told:
        call.told.add(why)
        log.warning("%s could not be compared with one device: %s", call.callee.name, why)
    return ""


def _warn_of_kept(call: Call, trial: Trial, whole: Result, parts: Result) -> None:
    """Log the names of buffers and attributes that one device would have left with other values."""
    names = {
        name
        for name in whole.kept.keys() | parts.kept.keys()
        if compare(whole.kept.get(name), parts.kept.get(name), trial.coarse)
    } - call.told
    if names:
        call.told.update(names)
        log.warning(
            "%s keeps values of the batch in %s: a state that forward keeps is that of the first device's "
            "part (buffers='average': the mean of all parts); return what the loop needs of the whole batch",
            call.callee.name,
            ", ".join(map(repr, sorted(names))),
        )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _bare(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
