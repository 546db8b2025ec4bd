"""Check of calls that are cut: the parts of a batch must give the outputs of the whole batch.

The module is run on the whole batch and on its parts, all on the first device, and the outputs are compared.
So models whose dim 0 is time, losses that are no mean by samples, and modules that look across the batch are
an error before they have trained anything; and where another way to cut gives the same as the whole batch,
the error says which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data.trees import column, flatten, tensors_of
from flowdp.data_parallel.gather import Joining, PartOutputs
from flowdp.data_parallel.layout import RETURN, Callee, Layout, output_name
from flowdp.data_parallel.scatter import Arguments, CallArguments
from flowdp.data_parallel.sharded_call import cut
from flowdp.engine.oom_retry import without_frames
from flowdp.errors import FlowdpError
from flowdp.modules.comparison import Difference, compare, is_close
from flowdp.modules.hooks import check_hooks
from flowdp.modules.trial_run import Trials

__all__ = ["Call", "check_call"]

log = logging.getLogger("flowdp")

OTHER_SEED = 20_417

WAYS = (
    (False, True, True),
    (False, False, True),
    (True, True, True),
    (True, False, True),
    (True, False, False),
)
"""(is_eval, is_wide, is_still) of trials, in the order in which they are tried until one works."""

WRITTEN = (
    "%s writes values of the batch to the buffers %s, and each device has only a part of the batch: with "
    "buffers='broadcast' the first device's part alone counts, with 'average' the mean of all; where that is "
    "wrong, return the values, and write them to the buffer in the loop"
)
NOTED = (
    "%s keeps results of the batch in the attributes %s, and each device has only a part of the batch: a "
    "loop that reads them, or takes their gradients, gets the first device's part; return them"
)

Run = Callable[[nn.Module, CallArguments], Any]


@dataclass(frozen=True)
class Call:
    """A call of a function with the whole batch, and how it is cut.

    Attributes:
        run: Calls the function, of a module, with a part.
        sizes: Samples of each part; at least two, none empty.
        device: Device of the trials.
        advice: Remedy for a difference; None: found by other trials.
    """

    callee: Callee
    run: Run
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[int, ...]
    layout: Layout
    device: torch.device
    advice: str | None = None

    @property
    def arguments(self) -> Arguments:
        """The arguments, with the dims along which they are cut."""
        return self.layout.arguments(self.callee, self.args, self.kwargs)

    @property
    def named(self) -> list[tuple[str | int, Any]]:
        """The names of the arguments, and their values."""
        names = self.callee.names(self.args, self.kwargs)
        return list(zip(names, (*self.args, *self.kwargs.values()), strict=True))

    def whole(self) -> CallArguments:
        """The whole batch, as one part."""
        return self.arguments.part(0, sum(self.sizes), self.device)

    def parts(self) -> list[CallArguments]:
        """The parts of the batch."""
        layout = self.layout
        split = None if layout.split is None else partial(layout.apart, self.args, self.kwargs)
        shards = cut(self.arguments, self.sizes, split)
        return [shard.arguments.part(shard.start, shard.samples, self.device) for shard in shards]

    def fewer(self) -> Call | None:
        """The same call with half the samples; None where fewer than two are left."""
        sizes = tuple(size // 2 for size in self.sizes if size > 1)
        if len(sizes) < 2:
            if sum(self.sizes) <= 2:
                return None
            sizes = (1, 1)
        arguments = self.arguments
        if arguments.listed:
            (args, kwargs), *_ = arguments.apart(self.args, self.kwargs, (sum(sizes),))
            return replace(self, args=args, kwargs=kwargs, sizes=sizes)
        part = arguments.part(0, sum(sizes), None)
        return replace(self, args=part.args, kwargs=part.kwargs, sizes=sizes)

    def how(self) -> str:
        """The cut in words, for messages."""
        pieces = f"{sum(self.sizes)} samples as {' + '.join(map(str, self.sizes))}"
        if self.layout.split is not None:
            is_own = getattr(self.layout.split, "__func__", None) is not Arguments.apart
            return f"{pieces}, by {'split' if is_own else 'the entries of its lists'}"
        dim = self.arguments.dim
        for name, value in self.named:
            for leaf in tensors_of(value):
                if leaf.dim() > dim and leaf.shape[dim] == sum(self.sizes):
                    shown = repr(name) if isinstance(name, str) else f"argument {name}"
                    return f"{pieces}, along dim {dim} of {shown} of shape {tuple(leaf.shape)}"
        return pieces


def check_call(module: nn.Module, call: Call) -> bool:
    """Check that the parts of a call give the outputs of the whole call.

    Where the device has no memory for the whole batch, half of it is tried.

    Returns:
        Whether it could be checked; else the log says why not.

    Raises:
        FlowdpError: They do not; the message has the difference, the cut of the call, and a remedy.

    Threads: one; no other may use the module meanwhile.
    """
    with torch.no_grad():
        while True:
            try:
                return _can_check(module, call)
            except torch.OutOfMemoryError as no_room:
                without_frames(no_room)
            fewer = call.fewer()
            if fewer is None:
                _warn_unchecked(call, "the first device has no memory for two samples beside what it holds")
                return False
            call = fewer


@dataclass
class _Mismatch:
    """A difference or failure of the parts."""

    text: str
    differences: Sequence[Difference] = ()
    cause: Exception | None = None
    returned: Sequence[PartOutputs] = ()
    has_advice: bool = False


def _can_check(module: nn.Module, call: Call) -> bool:
    failure: Exception | None = None
    is_random = False
    # First in its own modes, but for dropout and batch norms: what it returns may depend on them. A module
    # whose draws cannot be held is tried in eval mode.
    for is_eval, is_wide, is_still in WAYS:
        if is_random and not is_eval:
            continue
        trials = Trials(module, call.device, is_eval=is_eval, is_wide=is_wide, is_still=is_still)
        try:
            whole = _run(trials, call, call.whole())
        except torch.OutOfMemoryError:
            if is_wide:
                continue
            raise
        except Exception as error:
            failure = failure or error
            continue
        written, noted = trials.written, trials.noted
        found = _mismatch(trials, call, whole)
        if found is None or _is_rounding(module, call, found, is_eval=is_eval, is_still=is_still):
            _warn_of_differing(call, WRITTEN, written, trials.written, trials.epsilon)
            _warn_of_differing(call, NOTED, noted, trials.noted, trials.epsilon)
            runs = [partial(_run, trials, call, part) for part in (call.whole(), call.parts()[-1])]
            check_hooks(module, runs, call.callee.told, trials.epsilon)
            return True
        again = _run(trials, call, call.whole(), OTHER_SEED)
        if not compare(whole, again, trials.epsilon):
            raise _error(trials, call, whole, found) from found.cause
        is_random = True
    if is_random:
        _warn_unchecked(call, "its outputs differ from call to call, by random numbers that cannot be fixed")
    elif failure is not None:
        _warn_unchecked(call, f"with the whole batch it raises {type(failure).__name__}: {failure}")
    return False


def _is_rounding(module: nn.Module, call: Call, found: _Mismatch, *, is_eval: bool, is_still: bool) -> bool:
    """Whether values that differ are the same in double precision.

    A step between discrete choices, as between the entries of a codebook, makes much of a rounding; there are
    such ties in some batches, and not in others.
    """
    values = (one.mine for one in found.differences if one.mine is not None and one.other is not None)
    if not found.differences or any(own.dtype == torch.float64 for own in values):
        return False
    trials = Trials(module, call.device, is_eval=is_eval, is_wide=True, is_still=is_still, is_double=True)
    try:
        return _mismatch(trials, call, _run(trials, call, call.whole())) is None
    except Exception:  # it does not take float64, or there is no room
        return False


def _run(trials: Trials, call: Call, part: CallArguments, seed: int | None = None) -> Any:
    def run(module: nn.Module, given: Any) -> Any:
        args, kwargs = given
        return call.run(module, CallArguments(args, kwargs, []))

    return trials.run(run, (part.args, part.kwargs), seed=seed)


def _warn_of_differing(
    call: Call, text: str, of_whole: Mapping[str, Any], of_part: Mapping[str, Any], epsilon: float
) -> None:
    """Log the names of values that differ between the whole batch and its last part; each is told once."""
    told = call.callee.told
    names = [
        name
        for name, value in of_whole.items()
        if name not in told and (name not in of_part or compare(value, of_part[name], epsilon))
    ]
    if names:
        told.update(names)
        log.warning(text, call.callee.name, ", ".join(map(repr, names)))


def _warn_unchecked(call: Call, why: str) -> None:
    log.warning(
        "it could not be checked that %s gives the same when the batch is cut: %s",
        call.callee.name,
        why,
    )


def _mismatch(trials: Trials, call: Call, whole: Any) -> _Mismatch | None:
    """The difference or failure of the parts of a call; None without one."""
    returned: list[PartOutputs] = []
    joining = Joining(call.layout, call.callee, call.arguments.dim)
    for place, (part, size) in enumerate(zip(call.parts(), call.sizes, strict=True)):
        weights = joining.weigh(part)
        try:
            tree = _run(trials, call, part)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            text = f"part {place + 1} raises {type(error).__name__}: {error}"
            return _Mismatch(text, cause=error)
        returned.append(PartOutputs(tree, size, call.device, weights))
    try:
        outputs = joining.join(returned, [part.tensors for part in returned])
        joined = outputs.tree(outputs.tensors)
        if call.layout.join is not None:
            joined = call.layout.join(joined, call.sizes)
    except FlowdpError as error:
        # For anything but the rows of an output the error itself says it.
        return _Mismatch(str(error), returned=returned, has_advice=not joining.has_other_rows(returned))
    found = compare(whole, joined, trials.epsilon)
    if not found:
        return None
    return _Mismatch("; ".join(one.text for one in found[:3]), found, returned=returned)


def _error(trials: Trials, call: Call, whole: Any, found: _Mismatch) -> FlowdpError:
    advice = (
        call.advice
        or _other_dims(trials, call, whole)
        or _less_cut(trials, call, whole)
        or _other_reduction(trials, call, whole, found)
    )
    if advice is None and not found.has_advice:
        advice = _general_advice(call, whole, found)
    return FlowdpError(
        f"{call.callee.name} gives another result when the batch is cut: {found.text} ({call.how()}). "
        f"{f'{advice} ' if advice else ''}(check=False in setup() leaves this check out.)"
    )


def _general_advice(call: Call, whole: Any, found: _Mismatch) -> str:
    lists = [name for name, value in call.named if column(value) and any(map(torch.is_tensor, value))]
    if found.cause is not None and lists and call.layout.split is None:
        return (
            f"The tensors in {lists[0]!r} were taken for inputs that each have the batch along a dim. If "
            "each is a sample, stack them; or give a second list beside it, with a dict of tensors for each "
            "sample."
        )
    squeezed = [
        one
        for one in found.differences
        if one.mine is not None and one.other is not None and one.mine.dim() > 0 and one.other.dim() == 0
    ]
    if squeezed:
        return (
            "From a part of one sample comes one number, where a row is wanted: squeeze() drops the batch, "
            "too; name the dim, squeeze(-1)."
        )
    if found.differences and all(one.is_number for one in found.differences):
        return (
            "The number of each part is weighted by its samples. If it is a mean over something else, say "
            "over what: reduce=lambda labels: (labels != -100).sum(), with arguments of forward; if it is a "
            "sum, reduce='sum'. If it looks across the batch, as a contrastive loss does, return a row for "
            "each sample, and compute it outside, from the joined output."
        )
    if any(one.mine is not None and one.mine.dim() and one.mine.numel() == 1 for one in found.differences):
        return "A loss is one number, of no dim: return loss.mean() or loss.squeeze()."
    if found.returned and found.returned[0].form != flatten(whole)[1]:
        return (
            "Stack what is one tensor for each sample (torch.stack), or put the outputs of the parts "
            "together with join= in setup()."
        )
    if found.differences and all(one.mine is None for one in found.differences):
        return (
            "What is no tensor must be the same for each part: return an entry for each sample, or compute "
            "it outside, from the joined output."
        )
    across = (
        "If the module looks across the batch, return a row for each sample, and compute the rest outside, "
        "from the joined output."
    )
    if call.layout.dim != 0 or call.layout.split is not None:
        return (
            "An output without a dim for the samples is joined by join= in setup(); where dim= is a mapping, "
            f"the outputs' dims are under 'return'. {across}"
        )
    where = "dim= in setup() says where the samples are, and None that an argument goes whole"
    tensors = [leaf for _, value in call.named for leaf in tensors_of(value) if leaf.dim() > 0]
    # Of tokens, two dims are a batch of sequences; of floats, a batch of feature vectors.
    is_float = bool(tensors) and (tensors[0].is_floating_point() or tensors[0].is_complex())
    if tensors and tensors[0].dim() > (2 if is_float else 1):
        return (
            "Is dim 0 the batch? Recurrent and attention layers take time first unless batch_first=True; "
            f"{where}. {across}"
        )
    if len(tensors) > 1:
        return f"Is each of the arguments a part of the batch? {where}; split= cuts in another way. {across}"
    return across


# ---------------------------------------------------------------------- remedies
def _other_dims(trials: Trials, call: Call, whole: Any) -> str | None:
    """A `dim` with which the parts give the outputs of the whole batch, as advice."""
    layout = call.layout
    if layout.split is not None or layout.join is not None or not call.named:
        return None
    tensors = [leaf for _, value in call.named for leaf in tensors_of(value) if leaf.dim() > 0]
    if not tensors:
        return None
    places = [(dim, tensors[0].shape[dim]) for dim in range(min(tensors[0].dim(), 3))]
    places += [(0, leaf.shape[0]) for leaf in tensors[1:]]  # where the first one goes whole
    for dim, samples in dict.fromkeys(places):
        option = _dims_for(call, whole, dim, samples)
        is_as_it_was = samples == call.arguments.samples and layout.dim == 0 and _is_one(option, 0)
        if samples < 2 or is_as_it_was:
            continue
        half = samples // 2
        other = replace(call, sizes=(samples - half, half), layout=replace(layout, dim=option))
        if other.arguments.samples == samples and _mismatch(trials, other, whole) is None:
            if dim == 0:
                return f"With dim={_without_zeros(option)!r} in setup() it gives the same."
            shown = dim if _is_one(option, dim) else option
            return (
                f"Cut along dim {dim} it gives the same: say dim={shown!r} in setup(), or batch_first=True "
                f"in the layers."
            )
    return None


def _less_cut(trials: Trials, call: Call, whole: Any) -> str | None:
    """Arguments that are no part of the batch: given whole, the parts give the outputs of the whole batch.

    A mask (steps, steps) or positions (steps,) are cut where a batch has as many samples as steps.
    """
    layout, arguments = call.layout, call.arguments
    if layout.split is not None or layout.join is not None:
        return None
    names = [name for name, _ in call.named]
    ways = arguments.ways()
    places = dict.fromkeys(call.callee.named(path)[0] for path, length in ways.items() if length is None)
    for chosen in chain(combinations(places, 1), combinations(places, 2)):
        option = layout.dims_with(names, dict.fromkeys(chosen))
        other = replace(call, layout=replace(layout, dim=option))
        if other.arguments.samples == arguments.samples and _mismatch(trials, other, whole) is None:
            own = " and ".join(map(repr, chosen))
            return (
                f"With the whole of {own} on each device it gives the same: if that is no part of the batch "
                f"and has its length by chance, say dim={option!r} in setup()."
            )
    return None


def _is_one(option: dict[str | int, Any], dim: int) -> bool:
    return all(own == dim for own in option.values() if own is not None)


def _without_zeros(option: Mapping[Any, Any]) -> dict[Any, Any]:
    """A mapping of dims without those that need not be said."""
    dims = ((name, _without_zeros(dim) if isinstance(dim, Mapping) else dim) for name, dim in option.items())
    return {name: dim for name, dim in dims if dim != 0}


def _dims_for(call: Call, whole: Any, dim: int, samples: int) -> dict[str | int, Any]:
    option: dict[str | int, Any] = {}
    for name, value in call.named:
        shapes = [leaf.shape for leaf in tensors_of(value) if leaf.dim() > 0]
        if shapes:
            option[name] = _common_dim(shapes, dim, samples)
    outputs = {
        name: _common_dim([leaf.shape], dim, samples) or 0
        for name, leaf in _named_tensors(whole)
        if leaf.dim() > 0
    }
    dims = set(outputs.values()) or {dim}
    return {**option, RETURN: outputs if len(dims) > 1 else dims.pop()}


def _common_dim(shapes: Sequence[Sequence[int]], dim: int, samples: int) -> int | None:
    """The dim along which all have so many samples; the second of states, (layers, samples, hidden), too."""
    dims = (dim, 0, 1) if min(map(len, shapes)) > 2 else (dim, 0)
    fits = (own for own in dims if all(len(shape) > own and shape[own] == samples for shape in shapes))
    return next(fits, None)


def _other_reduction(trials: Trials, call: Call, whole: Any, found: _Mismatch) -> str | None:
    """A `reduce` with which the numbers of the parts give that of the whole batch, as advice."""
    if not found.differences or not all(one.is_number for one in found.differences):
        return None
    names = [name for name, _ in _named_tensors(whole)]
    chosen: dict[str, str] = {}
    for one in found.differences:
        name = output_name(one.path)
        assert one.mine is not None
        values = torch.stack([part.tensors[names.index(name)].double() for part in found.returned])
        mine = one.mine.double()
        fits = (
            text
            for text, weights in _weights(call)
            if is_close(
                mine,
                values.sum() if weights is None else values @ weights / weights.sum(),
                trials.epsilon,
            )
        )
        option = next(fits, None)
        if option is None:
            return None
        chosen[name] = option
    is_only = sum(leaf.dim() == 0 for _, leaf in _named_tensors(whole)) == 1
    options = ", ".join(f"{name!r}: {option}" for name, option in chosen.items())
    shown = next(iter(chosen.values())) if is_only else f"{{{options}}}"
    return f"With reduce={shown} in setup() it gives the same."


def _weights(call: Call) -> Iterator[tuple[str, Tensor | None]]:
    """Candidates for `reduce`: its text, and the weight of each part; None: a sum."""
    yield "'sum'", None
    parts = [
        dict(zip(call.callee.names(part.args, part.kwargs), (*part.args, *part.kwargs.values()), strict=True))
        for part in call.parts()
    ]
    for condition in ("!= -100", "!= 0"):
        for name, value in call.named:
            if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_floating_point():
                continue
            for rows in ("[:, 1:]", "") if value.dim() > 1 else ("",):
                own = [part[name][:, 1:] if rows else part[name] for part in parts]
                unlike = -100 if "100" in condition else 0
                weights = torch.stack([(tensor != unlike).sum() for tensor in own]).double()
                yield f"lambda {name}: ({name}{rows} {condition}).sum()", weights


def _named_tensors(tree: Any) -> list[tuple[str, Tensor]]:
    leaves, form = flatten(tree)
    named = zip(form.key_paths(), leaves, strict=True)
    return [(output_name(path), leaf) for path, leaf in named if isinstance(leaf, Tensor)]
