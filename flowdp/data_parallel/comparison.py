"""Comparison of a call that is cut with the same call on one device.

The module is run on the whole batch on the first device, and on the parts on all devices as the call itself
does it. Outputs, gradients and writes to parameters must be the same. So models whose dim 0 is time, losses
that are no mean by samples, modules that look across the batch, and state that the devices do not share are
an error before they have trained anything.

Both runs are of replicas that leave no trace in the module, and nothing in them is random.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import plain_layers
from flowdp.data.trees import tensors_of, tree_map
from flowdp.data_parallel.call import Graphs, Run, call_parts
from flowdp.data_parallel.cut import Arguments, Part
from flowdp.data_parallel.layout import Callee, Layout
from flowdp.data_parallel.replicas import Isolated, Replicas
from flowdp.device.accelerator import device_generator, is_accelerator
from flowdp.device.compiled import Uncompiled, take_out
from flowdp.device.copies import move
from flowdp.errors import FlowdpError
from flowdp.modules.comparison import Difference, compare
from flowdp.modules.constant_draws import ConstantDraws
from flowdp.modules.shallow import CONTAINERS, SHARED, own_containers

__all__ = ["Call", "Result", "Trial", "Verdict", "check_call", "lost_gradient", "outside"]

log = logging.getLogger("flowdp")

NARROW = (torch.float16, torch.bfloat16)

SEED = 20_417

GENERAL = (
    "If an argument is no part of the batch, say dim={its name: None}. A number is averaged by samples: if "
    "it is a mean over something else, say over what, reduce=lambda labels: (labels != -100).sum(). "
    "A module that looks across the batch returns a row for each sample, and the loop computes the rest. "
    "State of the calling thread alone (threading.local) is not seen by other threads: use a ContextVar."
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
        return replace(self, args=first.args, kwargs=first.kwargs, sizes=sizes)


@dataclass
class Result:
    """The result of a run.

    Attributes:
        output: Its output, without a graph.
        gradients: Gradients of the module's tensors and of the arguments.
        written: Parameters that it wrote to, by name, as it left them.
        kept: Buffers, and attributes that it set, of the first device.
        leaves: Tensors at the ends of its graph that are none of those.
        has_backward: Whether its forward has added to gradients.
        error: The error by which it ended; None: none.
    """

    output: Any = None
    gradients: list[Tensor | None] = field(default_factory=list)
    written: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    has_backward: bool = False
    error: Exception | None = None


@dataclass(frozen=True)
class Verdict:
    """The end of a comparison; true where the call could be compared.

    Attributes:
        why: The reason why the call is for the calling thread alone; empty: it is not.
        output: The output of the parts, for a look at that of the call itself; None where the two need
            not be the same, because of random numbers or statistics of the batch.
        counts: Torch's counts of writes to the parameters that it belongs to.
        epsilon: The coarsest rounding in it.
    """

    could_compare: bool
    why: str = ""
    output: Any = None
    counts: Sequence[int] = ()
    epsilon: float = 0.0

    def __bool__(self) -> bool:
        return self.could_compare

    def check(self, outputs: Any, counts: Sequence[int]) -> None:
        """Check that the call itself has given what the comparison has.

        Args:
            outputs: Outputs of the call.
            counts: Counts of writes now: another thread of the user's may have stepped the optimizer.

        Raises:
            FlowdpError: It has not: the devices have disturbed each other, or the replicas are unlike.
        """
        if self.output is None or counts != self.counts:
            return
        floats = [one for one in tensors_of(outputs) if one.is_floating_point() or one.is_complex()]
        rounding = max([self.epsilon, *(torch.finfo(one.dtype).eps for one in floats)])
        if found := compare(self.output, tree_map(_bare, outputs), rounding):
            raise FlowdpError(
                f"the devices together gave another result than in the comparison with one device: "
                f"{found[0].text}. The forward writes to an object that all devices share (a global, an "
                f"attribute of a class of its own), or looks a layer up by its identity: keep such things in "
                f"lists, dicts or attributes of the module. {LEFT_OUT}"
            )


UNCOMPARED = Verdict(could_compare=False)


def check_call(replicas: Replicas, call: Call) -> Verdict:
    """Check that a call that is cut gives what one device gives for the whole batch.

    Where the first device has no memory for the whole batch, half of it is tried.

    Returns:
        Whether it could be compared; else the log says why not. A call that gives the right result in the
        calling thread alone is for this thread.

    Raises:
        FlowdpError: They differ; the message has the difference, the cut of the call, and a remedy.

    Threads: the one that holds the turn of the replicas.
    """
    while True:
        try:
            return _can_compare(replicas, call)
        except torch.OutOfMemoryError:
            fewer = call.fewer()
        if fewer is None:
            return _warn(call, "the first device has no memory for it beside what it holds")
        call = fewer


def _can_compare(replicas: Replicas, call: Call) -> Verdict:
    for wide in (torch.float32, None):
        trial = Trial(replicas, call, wide)
        whole = trial.whole()
        if whole.error is None:
            break
    parts = trial.parts()
    if isinstance(parts.error, FlowdpError) and not trial.has_joined:
        raise parts.error
    if whole.error is not None:
        # The log has had reasons, too, which are no names.
        keeps = ", ".join(repr(name) for name in sorted(call.told) if " " not in name)
        if parts.error is not None and not keeps:
            return _warn(call, f"with the whole batch it raises {_words(whole.error)}")
        because = (
            f" It keeps values of one call for the next in {keeps}: give them as arguments." if keeps else ""
        )
        raise FlowdpError(
            f"{call.callee.name} raises an error for the whole batch, which is cut "
            f"({call.arguments.in_words(call.sizes)}): {_words(whole.error)}.{because} {LEFT_OUT}"
        ) from whole.error
    for key in whole.leaves.keys() & parts.leaves.keys():
        raise lost_gradient("the module's forward", whole.leaves[key])
    if whole.has_backward:
        raise FlowdpError(
            f"{call.callee.name} calls backward itself, on each device for its part, so the gradients would "
            "be the sum of means: return the loss, and let the loop call backward"
        )
    if trial.has_seeded:
        return Verdict(True, f"{call.callee.name} seeds a generator that all threads have in common")
    found = trial.differences(whole, parts)
    if found and not _is_rounding(replicas, call, trial):
        again = trial.whole(SEED)
        cannot_join = isinstance(parts.error, FlowdpError)  # it says why
        changes = not cannot_join and (again.error is not None or trial.differences(whole, again))
        if trial.draws_freely or (changes and trial.has_drawn):
            return _warn(call, "its results differ from call to call, by random numbers that cannot be held")
        if changes:
            raise FlowdpError(
                f"{call.callee.name} gives another result each time it is called ({found[0].text}), and "
                "nothing random was drawn: it depends on an object that each call changes, an iterator or a "
                f"counter, of which the devices have one in common: give it as an argument. {LEFT_OUT}"
            )
        if parts.error is None and not trial.differences(whole, trial.here()):
            return Verdict(
                True, f"{call.callee.name} gives another result in other threads ({found[0].text})"
            )
        error = _error(trial, whole, parts, found)
        raise error from (None if error is parts.error else parts.error)
    _warn_of_kept(call, trial, whole, parts)
    is_exact = trial.is_exact and not found  # a choice that hangs on a rounding falls anew in each call
    return Verdict(True, "", parts.output if is_exact else None, trial.counts, trial.epsilon)


class Trial:
    """Runs of one call that leave no trace.

    Args:
        replicas: The modules.
        call: The call.
        wide: Dtype of floats of 16 bits meanwhile, without autocast: their rounding would hide differences;
            float64: of all floats. None: all is as it is.

    Attributes:
        call: As given.
        has_joined: Whether the parts of the last run have all returned.
        counts: Torch's counts of writes to the parameters, whose values the runs have.
    """

    def __init__(self, replicas: Replicas, call: Call, wide: torch.dtype | None) -> None:
        self.call = call
        self.has_joined = False
        self._replicas = replicas
        self._wide = wide
        self._has_widened = False
        self._draws = [ConstantDraws()]
        self._is_stilled = False
        self._moved: set[str] = set()  # generators that runs have drawn from
        self._seen: list[tuple[nn.Module, dict[str, Any]]] = []
        known = {id(t): name for name, t in replicas.module.named_parameters(remove_duplicate=False)}
        self._own_tensors = [*replicas.parameters(), *replicas.buffers()]
        self._parameters = [known.get(id(tensor), "") for tensor in replicas.parameters()]
        self.counts = replicas.versions()
        # Another thread of the user's may step the optimizer meanwhile.
        self._values = [tensor.detach().clone() for tensor in self._own_tensors]

    @property
    def epsilon(self) -> float:
        """The coarsest rounding of what ran."""
        device = self._replicas.devices[0]
        return max(one.rounding(device) for one in self._draws)

    def whole(self, seed: int | None = None) -> Result:
        """Run the whole batch on the first device, in the calling thread."""
        replicas = self._replicas

        def run(arguments: Arguments, isolated: Isolated) -> Any:
            replicas.follow(isolated)
            standing = [isolated.instead[id(tensor)] for tensor in replicas.parameters()]
            before, whole = list(map(_writes_to, standing)), arguments.whole()
            part = whole.replaced([move(tensor, replicas.devices[0]) for tensor in whole.tensors])
            with self._draws[0]:
                output = self.call.run(replicas.modules[0], part)
            now = map(_writes_to, standing)
            counts = enumerate(zip(before, now, strict=True))
            replicas.apart |= {number for number, (then, count) in counts if count != then}
            return output

        return self._run(self.call, run, seed)

    def parts(self, layout: Layout | None = None) -> Result:
        """Run the parts on all devices, and join their outputs; in another layout, if one is given."""
        call = self.call if layout is None else replace(self.call, layout=layout)

        def run(arguments: Arguments, isolated: Isolated) -> Any:
            parts = _cut(call, arguments)
            self.has_joined = False
            made = call_parts(self._replicas, parts, call.run, isolated=isolated, around=self._constant)
            self.has_joined = True
            return arguments.join(made, parts)

        return self._run(call, run)

    def here(self) -> Result:
        """Run the parts one after another on the first device, in the calling thread."""

        def run(arguments: Arguments, isolated: Isolated) -> Any:
            parts, made = _cut(self.call, arguments), []
            for part in parts:
                self._replicas.follow(isolated)
                with self._draws[0]:
                    made.append(self.call.run(self._replicas.modules[0], part))
            return arguments.join(made, parts)

        return self._run(self.call, run)

    @property
    def is_exact(self) -> bool:
        """Whether the call itself gives the same: nothing was drawn, wider, or of the batch's statistics."""
        has_drawn = self.has_drawn or any(one.has_drawn for one in self._draws)
        return not self._is_stilled and not self._has_widened and not has_drawn

    @property
    def draws_freely(self) -> bool:
        """Whether there are random numbers in the results: Python's, NumPy's, those that a loop waits for."""
        return bool(self._moved - {"torch"}) or any(one.has_given_up for one in self._draws)

    @property
    def has_seeded(self) -> bool:
        """Whether a forward has drawn behind a seed, or from a `torch.Generator`, of its own."""
        return any(one.has_seeded for one in self._draws)

    @property
    def has_drawn(self) -> bool:
        """Whether a default generator was drawn from."""
        return bool(self._moved)

    def differences(self, whole: Result, other: Result) -> list[Difference]:
        """The differences of another run from that of the whole batch."""
        if other.error is not None:
            return [Difference((), f"a part raises {_words(other.error)}")]
        for name in whole.written.keys() | other.written.keys():
            text = self._difference(whole.written.get(name), other.written.get(name))
            if text:
                return [
                    Difference(
                        (),
                        f"its forward writes to its parameter {name!r}, which all devices share: that {text}",
                    )
                ]
        found = compare(whole.output, other.output, self.epsilon)
        if found:
            return found
        pairs = zip(whole.gradients, other.gradients, strict=True)
        trained = [
            name for name, one in zip(self._parameters, self._own_tensors, strict=False) if one.requires_grad
        ]
        names = [*trained, *("an argument" for _ in whole.gradients)]
        for name, (mine, its) in zip(names, pairs, strict=False):
            text = self._difference(mine, its)
            if text:
                return [Difference((), f"the gradient of {name} {text}")]
        return []

    def _difference(self, mine: Tensor | None, its: Tensor | None) -> str:
        if mine is None or its is None:
            return "" if mine is its else f"is {'not ' if its is None else ''}there for the parts alone"
        # Sums of many roundings: what is compared is an error of the mathematics.
        found = compare(mine, its, max(self.epsilon, 4e-7) if mine.dtype != torch.float64 else self.epsilon)
        return found[0].text.removeprefix("output ") if found else ""

    def _run(self, call: Call, run: Callable[[Arguments, Isolated], Any], seed: int | None = None) -> Result:
        replicas, result = self._replicas, Result()
        standing = [
            self._wider(value.clone()).requires_grad_(own.requires_grad)
            for own, value in zip(self._own_tensors, self._values, strict=True)
        ]
        isolated = Isolated(self._still, dict(zip(map(id, self._own_tensors), standing, strict=True)))
        with _generators_kept(replicas.devices, seed, self._moved), ExitStack() as stack:
            stack.enter_context(Uncompiled())
            if self._wide is not None:
                for kind in {"cpu", *(device.type for device in replicas.devices)}:
                    if torch.is_autocast_enabled(kind):
                        self._has_widened = True
                        stack.enter_context(torch.autocast(kind, enabled=False))
            try:
                leaves: list[Tensor] = []
                args, kwargs = tree_map(partial(self._given, leaves), [call.args, call.kwargs])
                output = run(Arguments(call.layout, call.callee, tuple(args), kwargs), isolated)
                result.has_backward = any(one.grad is not None for one in standing)
                inputs = [*(one for one in standing if one.requires_grad), *leaves]
                # Those that are found by another way than the module's tables are right in the call itself.
                result.leaves = outside(output, [*inputs, *self._own_tensors])
                result.gradients = _gradients(output, inputs, self._draws[0])
                result.output = tree_map(_bare, output)
                result.kept = self._kept()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                result.error = error
        for name, one, value in zip(self._parameters, standing, self._values, strict=False):
            if not torch.equal(one.detach(), self._wider(value)):
                result.written[name] = one.detach()
        return result

    def _widens(self, tensor: Tensor) -> bool:
        narrow = NARROW if self._wide is torch.float32 else (*NARROW, torch.float32)
        return self._wide is not None and tensor.dtype in narrow

    def _wider(self, tensor: Tensor) -> Tensor:
        if not self._widens(tensor):
            return tensor
        self._has_widened = True
        return tensor.to(self._wide)

    def _given(self, leaves: list[Tensor], leaf: Any) -> Any:
        """A copy of a leaf of the arguments, for the module may write to it."""
        if not isinstance(leaf, Tensor):
            is_record = is_dataclass(leaf) or isinstance(leaf, SimpleNamespace)
            return copy(leaf) if is_record else own_containers(leaf)
        own = self._wider(leaf.detach().clone())
        if leaf.requires_grad and torch.is_grad_enabled():
            leaves.append(own.requires_grad_())
            return own.clone()
        return own

    def _constant(self) -> ConstantDraws:
        self._draws.append(ConstantDraws())
        return self._draws[-1]

    def _still(self, module: nn.Module, rank: int) -> None:
        """Prepare a replica for a run: nothing is random, and batch norms use their running statistics."""
        take_out(module)
        for part in module.modules():
            if isinstance(part, (nn.SyncBatchNorm, nn.RNNBase)):
                self._is_stilled |= part.training
                part.training = False
        for norm in plain_layers(module):
            self._is_stilled |= norm.training or norm.running_mean is None
            norm.training = False
            if norm.running_mean is None:
                like = next(self._replicas.module.parameters(), torch.zeros(()))
                norm._buffers["running_mean"] = like.detach().new_zeros(norm.num_features)
                norm._buffers["running_var"] = like.detach().new_ones(norm.num_features)
        if rank == 0:
            self._seen = [(part, dict(vars(part))) for part in module.modules()]

    def _kept(self) -> dict[str, Any]:
        """Buffers and attributes as the first device's forward has left them."""
        module = self._seen[0][0]
        names = {id(part): name for name, part in module.named_modules()}
        found: dict[str, Any] = {name: tensor.detach() for name, tensor in module.named_buffers()}
        for part, before in self._seen:
            for key, value in vars(part).items():
                is_new = value is not before.get(key) or isinstance(value, (Tensor, np.ndarray, *CONTAINERS))
                if is_new and key not in SHARED and _holds_numbers(value):
                    found[f"{names.get(id(part), '')}.{key}".removeprefix(".")] = tree_map(_bare, value)
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
    generator = torch.Generator().manual_seed(SEED)
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
            todo += inner.ends
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
    whole = wide.whole()
    return whole.error is None and not wide.differences(whole, wide.parts())


def _error(trial: Trial, whole: Result, parts: Result, found: Sequence[Difference]) -> FlowdpError:
    call = trial.call
    text, general = "; ".join(one.text for one in found[:3]), GENERAL
    if isinstance(parts.error, FlowdpError):  # outputs that cannot be joined: it says why
        text, general = str(parts.error), ""
    cut = call.arguments.in_words(call.sizes)
    return FlowdpError(
        f"{call.callee.name} gives another result when the batch is cut: {text} ({cut}). "
        f"{call.advice(trial, whole) or general} {LEFT_OUT}"
    )


def _warn(call: Call, why: str) -> Verdict:
    if why not in call.told:
        call.told.add(why)
        log.warning("%s could not be compared with one device: %s", call.callee.name, why)
    return UNCOMPARED


def _warn_of_kept(call: Call, trial: Trial, whole: Result, parts: Result) -> None:
    """Log the names of buffers and attributes that one device would have left with other values."""
    names = [
        name
        for name in whole.kept.keys() | parts.kept.keys()
        if name not in call.told
        and compare(whole.kept.get(name), parts.kept.get(name), max(trial.epsilon, 4e-7))
    ]
    if names:
        call.told.update(names)
        log.warning(
            "%s keeps values of the batch in %s: a state that forward keeps is that of the first device's "
            "part (buffers='average': the mean of all parts); where the loop needs it of the whole batch, "
            "return it",
            call.callee.name,
            ", ".join(map(repr, sorted(names))),
        )


def _writes_to(tensor: Tensor) -> tuple[int, int]:
    """Torch's count of writes to a tensor, 0 where it does not count, and its address."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _bare(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_numbers, value))
    if isinstance(value, dict):
        return any(map(_holds_numbers, value.values()))
    return isinstance(value, (Tensor, np.ndarray, int, float)) and not isinstance(value, (bool, nn.Parameter))


@contextmanager
def _generators_kept(devices: Sequence[torch.device], seed: int | None, moved: set[str]) -> Iterator[None]:
    """Restore the states of all default generators at the end.

    Args:
        devices: All devices.
        seed: Number from which they go on meanwhile, if any.
        moved: Gets the names of the libraries whose generators have been drawn from, but from a seed.
    """
    places = {device for device in devices if is_accelerator(device)}
    generators = [torch.default_generator, *map(device_generator, places)]
    states = [generator.get_state() for generator in generators]
    numpy, python = np.random.get_state(), random.getstate()
    if seed is not None:
        for generator in generators:
            generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
    try:
        yield
    finally:
        if seed is None:
            if python != random.getstate():
                moved.add("Python")
            if not all(map(np.array_equal, numpy, np.random.get_state())):
                moved.add("NumPy")
            if not all(
                torch.equal(one.get_state(), state) for one, state in zip(generators, states, strict=True)
            ):
                moved.add("torch")
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        np.random.set_state(numpy)
        random.setstate(python)
