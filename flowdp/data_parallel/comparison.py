"""Comparison of a call that is cut with the same call on one device.

The calling thread runs the whole batch, and then another one the parts, one after another: both on the first
device, by replicas that leave no trace in the module, and nothing in them is random. Outputs and gradients
must be the same. So models whose dim 0 is time, losses that are no mean by samples, modules that look across
the batch, and state that the devices do not share are an error before they have trained anything.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdp.data_parallel.call import Run
from flowdp.data_parallel.cut import Arguments, Part
from flowdp.data_parallel.layout import Callee
from flowdp.data_parallel.replicas import Replicas
from flowdp.device.compiled import Uncompiled
from flowdp.device.copies import move
from flowdp.device.draws import generators_kept, seed_everything
from flowdp.device.trees import tensors_of, tree_map, walk
from flowdp.errors import FlowdpError
from flowdp.modules.comparison import TF32, ConstantDraws, compare
from flowdp.modules.shallow import SHARED
from flowdp.policy.schedule import is_due_at

__all__ = ["Call", "Result", "Schedule", "Trial", "check_call", "lost_gradient", "outside"]

log = logging.getLogger("flowdp")

NARROW = (torch.float16, torch.bfloat16)

SEEDS = range(20_417, 20_425)
"""Seeds of runs that tell whether a result is random: with one or two it may be the same by chance."""

MOST_FORMS = 16
"""Forms of calls with a count of their own; all others have one in common."""

REMEDY = (
    "If the samples lie along dim 1, say dim=1 in setup(), or batch_first=True in the layers. If an argument "
    "is no part of the batch, say dim={its name: None}. A number is averaged by samples: if it is a sum, say "
    "reduce='sum'; if it is a mean over something else, say over what, "
    "reduce=lambda labels: (labels != -100).sum(). A module that looks across the batch returns a row for "
    "each sample, and the loop computes the rest. (check=False in setup() leaves this check out.)"
)


class Schedule:
    """Schedule of a function: the calls 1, 2, 4, 8, ... of each form, and every 500th, are compared.

    The form of a call is what is known before it: modes, and arguments that are cut. One comparison is not
    enough: a mean over tokens is one over samples until a batch is padded, and a branch that looks across the
    batch shows nothing while the parameter that weights it is 0.

    Attributes:
        callee: The function.
        told: What the log has had.
        is_alone: Whether it gives the right result in the calling thread alone.
    """

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self.is_alone = False
        self.told: set[str] = set()
        self._passed: Counter[Hashable] = Counter()

    def is_due(self, form: Hashable) -> bool:
        """Whether a call is to be compared."""
        return is_due_at(self._passed[self._key(form)] + 1)

    def passed(self, form: Hashable) -> None:
        """Count the call: it went well, compared or not."""
        self._passed[self._key(form)] += 1

    def _key(self, form: Hashable) -> Hashable:
        return form if form in self._passed or len(self._passed) < MOST_FORMS else None


@dataclass(frozen=True)
class Call:
    """A call with the whole batch, and how it is cut.

    Attributes:
        run: Calls the function, of a module, with a part.
        sizes: Samples of each rank's part. Shape (world_size,).
        told: Names that the log has had.
    """

    arguments: Arguments
    run: Run
    sizes: tuple[int, ...]
    told: set[str]

    @property
    def name(self) -> str:
        """The name of the function, for messages."""
        return self.arguments.callee.name


@dataclass
class Result:
    """The result of a run.

    Attributes:
        output: Its output, without a graph.
        gradients: Gradients of the module's tensors and of the arguments, by name, from a backward of the
            output, and from backwards of the forward's own.
        parameters: Parameters behind the run, by name: forward may have written to them.
        kept: Numbers in buffers and attributes of the first device, by name.
        leaves: Tensors at the ends of its graph that are none of those.
        fills: It puts tensors that it does not return into containers among its arguments.
        error: The error by which it ended; None: none.
    """

    output: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, list[Any]] = field(default_factory=dict)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    fills: bool = False
    error: Exception | None = None


def check_call(replicas: Replicas, call: Call) -> str:
    """Check that a call that is cut gives what one device gives for the whole batch.

    The log says why a call cannot be compared.

    Returns:
        The reason why the calling thread alone gives the right result; empty: the others do, too.

    Raises:
        FlowdpError: They differ; the message has the difference, the cut of the call, and remedies.

    Threads: the one that holds the turn of the replicas.
    """
    try:
        return _compare(replicas, call)
    except torch.OutOfMemoryError:
        return _warn(call, "the first device has no memory for it beside what it holds")


def _compare(replicas: Replicas, call: Call) -> str:
    for wide in (torch.float32, None):
        trial = Trial(replicas, call, wide)
        whole = trial.run()
        if whole.error is None:
            break
    if whole.error is not None:
        return _warn(call, f"with the whole batch it raises {_words(whole.error)}")
    if whole.fills:  # a list of auxiliary losses, which would stay empty
        raise FlowdpError(
            f"{call.name} puts tensors into a list, dict or other container among its arguments, and "
            "each device does so for its part: let it return them"
        )
    parts = trial.run(is_cut=True)
    for key in whole.leaves.keys() & parts.leaves.keys():
        raise lost_gradient("the module's forward", whole.leaves[key])
    differences = trial.differences(whole, parts)
    if differences and not _is_rounding(replicas, call, trial):
        # Outputs that cannot be joined say why.
        cannot_join = isinstance(parts.error, FlowdpError)
        if not cannot_join and any(trial.differences(whole, trial.run(seed)) for seed in SEEDS):
            return _warn(call, f"its results differ from call to call ({differences[0]})")
        if parts.error is None and not trial.differences(whole, trial.run(is_cut=True, is_here=True)):
            return f"{call.name} gives another result in other threads ({differences[0]})"
        text = str(parts.error) if cannot_join else "; ".join(differences[:3])
        cut = call.arguments.in_words(call.sizes)
        raise FlowdpError(
            f"{call.name} gives another result when the batch is cut: {text} ({cut}). {REMEDY}"
        ) from parts.error
    _warn_of_kept(call, trial, whole, parts)
    return ""


class Trial:
    """Runs of one call that leave no trace.

    Args:
        replicas: The modules.
        call: The call.
        wide: Dtype of floats of 16 bits meanwhile, without autocast: their rounding would hide differences;
            float64: of all floats. None: all is as it is.
    """

    def __init__(self, replicas: Replicas, call: Call, wide: torch.dtype | None) -> None:
        self._call = call
        self._replicas = replicas
        self._wide = wide
        self._draws = ConstantDraws()
        module = replicas.module
        known = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._tensors = [*replicas.parameters(), *replicas.buffers()]
        self._names = [known[id(tensor)] for tensor in self._tensors]
        # Another thread of the user's may step the optimizer meanwhile.
        self._values = [tensor.detach().clone() for tensor in self._tensors]

    @property
    def epsilon(self) -> float:
        """The coarsest rounding of what ran."""
        return self._draws.rounding(self._replicas.devices[0])

    @property
    def coarse(self) -> float:
        """The rounding of sums of many roundings, as gradients are."""
        return self.epsilon if self.epsilon < 1e-12 else max(self.epsilon, TF32)

    def run(self, seed: int | None = None, *, is_cut: bool = False, is_here: bool = False) -> Result:
        """Run the whole batch in the calling thread, or its parts in the first rank's, on the first device.

        Args:
            seed: Seed of generators meanwhile; None: they go on.
            is_cut: Whether the parts are run, one after another.
            is_here: Whether they are run in the calling thread, too.
        """
        result = Result()
        standing = [
            self._wider(value.clone()).requires_grad_(tensor.requires_grad)
            for tensor, value in zip(self._tensors, self._values, strict=True)
        ]
        with generators_kept(), ExitStack() as stack:
            if seed is not None:
                seed_everything(seed)
            stack.enter_context(Uncompiled())
            if self._wide is not None:
                for kind in {"cpu", self._replicas.devices[0].type}:
                    stack.enter_context(torch.autocast(kind, enabled=False))
            try:
                do = partial(self._run, result, standing, is_cut=is_cut)
                self._replicas.elsewhere(do) if is_cut and not is_here else do()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                result.error = error
        return result

    def differences(self, whole: Result, other: Result) -> list[str]:
        """The differences of another run from that of the whole batch."""
        if other.error is not None:
            return [f"a part raises {_words(other.error)}"]
        tables = (
            ("the gradient of", whole.gradients, other.gradients),
            ("its forward writes to parameters:", whole.parameters, other.parameters),
        )
        differences = (
            compare(mine, others[name], self.coarse, f"{what} {name}")
            for what, table, others in tables
            for name, mine in table.items()
        )
        return compare(whole.output, other.output, self.epsilon) or next(filter(None, differences), [])

    def _run(self, result: Result, standing: Sequence[Tensor], *, is_cut: bool) -> None:
        call, replicas = self._call, self._replicas
        leaves: list[Tensor] = []
        arguments = call.arguments.mapped(partial(self._given, leaves))
        parts = arguments.parts(call.sizes) if is_cut else [arguments.whole()]
        instead = dict(zip(map(id, self._tensors), standing, strict=True))
        modules, made = [], []
        for part in parts:
            modules.append(replicas.isolated(part.rank, instead))
            given = part.replaced([move(tensor, replicas.devices[0]) for tensor in part.tensors])
            with self._draws:
                before = _tensors_in(given)
                made.append(call.run(modules[-1], given))
            # Those that it returns, too, are the caller's to take: the cache of a language model.
            result.fills |= bool(_tensors_in(given) - before - set(map(id, tensors_of(made[-1]))))
        output = arguments.join(made, parts)
        inputs = {n: tensor for n, tensor in zip(self._names, standing, strict=True) if tensor.requires_grad}
        inputs |= {f"argument {number}": leaf for number, leaf in enumerate(leaves)}
        # Those that are found by another way than the module's tables are right in the call itself.
        result.leaves = outside(output, [*inputs.values(), *self._tensors])
        gradients = _gradients(output, [*inputs.values()], self._draws)
        result.gradients = dict(zip(inputs, gradients, strict=True))
        result.gradients |= {f"{n}, by forward,": tensor.grad for n, tensor in inputs.items()}
        result.output = tree_map(_bare, output)
        count = len(replicas.parameters())
        result.parameters = {
            name: tensor.detach() for name, tensor in zip(self._names[:count], standing[:count], strict=True)
        }
        result.kept = _kept(modules[0])

    def _wider(self, tensor: Tensor) -> Tensor:
        narrow = NARROW if self._wide is torch.float32 else (*NARROW, torch.float32)
        return tensor.to(self._wide) if self._wide is not None and tensor.dtype in narrow else tensor

    def _given(self, leaves: list[Tensor], leaf: Any) -> Any:
        """A copy of a leaf of the arguments, for the module may write to it."""
        if not isinstance(leaf, Tensor):
            is_open = isinstance(leaf, (list, np.ndarray, SimpleNamespace)) or is_dataclass(leaf)
            return copy(leaf) if is_open else leaf
        twin = self._wider(leaf.detach().clone())
        if leaf.requires_grad and torch.is_grad_enabled():
            leaves.append(twin.requires_grad_())
            return twin.clone()
        return twin


def _tensors_in(part: Part) -> set[int]:
    return set(map(id, tensors_of([part.args, part.kwargs])))


def _kept(module: nn.Module) -> dict[str, list[Any]]:
    """The numbers in buffers and attributes of a module."""
    numbers: dict[str, list[Any]] = {name: [buffer.detach()] for name, buffer in module.named_buffers()}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in SHARED:
                leaves = [leaf for leaf in walk(value) if isinstance(leaf, (Tensor, np.ndarray, int, float))]
                plain = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                numbers[f"{name}.{key}".removeprefix(".")] = plain
    return numbers


def _gradients(output: Any, inputs: Sequence[Tensor], draws: ConstantDraws) -> list[Tensor | None]:
    """Gradients of an output's tensors, each times numbers that are the same in every run."""
    generator = torch.Generator().manual_seed(SEEDS[0])
    roots = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if not torch.is_grad_enabled() or not roots or not inputs:
        return [None] * len(inputs)
    seeds = [
        torch.rand(root.shape, generator=generator, dtype=torch.float64).add(0.5).to(root.device, root.dtype)
        for root in roots
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
    known = {id(tensor) for tensor in inputs}
    seen = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    todo = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
    leaves: dict[int, Tensor] = {}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            leaves[id(leaf)] = leaf
        todo += [after for after, _ in node.next_functions if after is not None]
    return leaves


def _is_rounding(replicas: Replicas, call: Call, trial: Trial) -> bool:
    """Whether results that differ are the same in double precision.

    A step between discrete choices, as between the entries of a codebook, makes much of a rounding; there are
    such ties in some batches, and not in others.
    """
    if trial.epsilon < 1e-12:
        return False
    wide = Trial(replicas, call, torch.float64)
    whole = wide.run()
    return whole.error is None and not wide.differences(whole, wide.run(is_cut=True))


def _warn(call: Call, why: str) -> str:
    if why not in call.told:
        call.told.add(why)
        log.warning("%s could not be compared with one device: %s", call.name, why)
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
            call.name,
            ", ".join(map(repr, sorted(names))),
        )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _bare(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
