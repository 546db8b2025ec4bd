"""The learning rate of a replica's next step, as a function of where the step stands in the run.

Every replica owns a twin of the user's scheduler and steps it until its count equals the position, so the
curve is the same on 1, 2 or 8 devices. The factors of the user's rate (from the world size, `run.set_lr` and
the warm-up) are kept apart from the scheduler, which never sees them. Several optimizers have a scheduler
each; whatever multiplies the rates multiplies all of them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeGuard

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flowdp.errors import CheckpointError, OptionError
from flowdp.options import SchedulerUnit
from flowdp.policy.schedule import LrScaling, warm_up_factor
from flowdp.protocol.gate import Outcome
from flowdp.replica.factories import Optimizers, all_of
from flowdp.validators import check_function, check_int, check_number, one_of

__all__ = [
    "LearningRate",
    "LrLambda",
    "SchedulerOption",
    "SchedulerOptions",
    "check_scheduler",
    "no_rate_to_scale",
]


class Scheduler(Protocol):
    """Sets the rates of an optimizer: one of torch's, of timm's, or another with these methods."""

    optimizer: Any

    def step(self, *args: Any) -> Any:
        """Set the next rates. A scheduler of timm's gets the number of the epoch."""

    def state_dict(self) -> Any:
        """The state with which it can go on."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from there."""


SchedulerOption = Scheduler | Callable[[Optimizer], Scheduler]
LrLambda = Callable[[int], float]


@dataclass(frozen=True)
class SchedulerOptions:
    """Options of the learning rate's scheduler.

    ::

        SchedulerOptions(lambda optimizer: StepLR(optimizer, 30), unit="epoch")
        SchedulerOptions(lr_lambda=lambda step: 0.9999**step)
        SchedulerOptions(warmup_steps=500, lr_scaling="linear")

    Attributes:
        scheduler: Factory of a scheduler, or an instance made for the optimizer instance: one of torch's, of
            timm's, or of another class with `optimizer`, `step`, `state_dict` and `load_state_dict`.
        unit: Unit in which the scheduler counts, "step" (of all devices) or "epoch".
        lr_lambda: Factor on the learning rate as a function of the global step, in place of a scheduler.
        lr_scaling: Factor on the learning rate for n devices, whose mean is as one step on n times the
            samples: "linear" is n (Goyal et al. 2017, for SGD), "sqrt" the square root of n (Malladi et al.
            2022, for Adam), a number r is 1 + r * (n - 1). With "linear" a warm-up is customary.
        warmup_steps: Steps (of all devices) over which the learning rate grows in a straight line to what the
            other options say.

    Source:
        Goyal et al. 2017, arXiv:1706.02677, section 2; Malladi et al. 2022, arXiv:2205.10287, section 4,
        where the square root goes with betas and eps of other values, which are the optimizer's to set.
    """

    scheduler: SchedulerOption | None = None
    _: KW_ONLY
    unit: SchedulerUnit | None = None
    lr_lambda: LrLambda | None = None
    lr_scaling: LrScaling = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            OptionError: They contradict each other, or a guess would be needed.
        """
        check_function("scheduler.lr_lambda", self.lr_lambda, "the global step", 1)
        if isinstance(self.lr_scaling, str):
            one_of("scheduler.lr_scaling", self.lr_scaling, Literal["linear", "sqrt"])
        else:
            check_number("scheduler.lr_scaling", self.lr_scaling, above=False)
        check_int("scheduler.warmup_steps", self.warmup_steps, least=0)
        if self.scheduler is None:
            if self.unit is not None:
                raise OptionError(f"scheduler.unit={self.unit!r} is given without a scheduler")
            return
        if self.lr_lambda is not None:
            raise OptionError("scheduler and lr_lambda both set the learning rate: give one of them")
        if self.unit not in ("step", "epoch"):
            raise OptionError(
                f"scheduler needs unit='step' or 'epoch' (given {self.unit!r}), as in SchedulerOptions(..., "
                "unit='step'): a wrong guess would be a silently wrong schedule"
            )
        if not _is_scheduler(self.scheduler) and not callable(self.scheduler):
            raise OptionError(
                f"scheduler must be a torch scheduler or a factory of one, not {self.scheduler!r}; one of "
                "another class needs optimizer, step, state_dict and load_state_dict"
            )
        _check_unit(self.scheduler, self.unit)


def check_scheduler(scheduler: object, optimizer: object, *, grows: bool = False) -> SchedulerOptions:
    """Check the options of the learning rate against the optimizer and the batch; None is the default.

    Args:
        scheduler: As the user gave it.
        optimizer: As the user gave it.
        grows: Whether all devices together train more samples in a step than one.

    Raises:
        OptionError: They are no options, do not belong to the optimizer, or scale the rate of a batch that
            is the same on any number of devices.
    """
    if scheduler is None:
        return SchedulerOptions()
    if not isinstance(scheduler, SchedulerOptions):
        raise OptionError(
            f"scheduler must be SchedulerOptions(..., unit='step' or 'epoch'), not {scheduler!r}: a wrong "
            "guess of the unit would be a silently wrong schedule"
        )
    if scheduler.lr_scaling and not grows:
        raise OptionError(
            f"lr_scaling={scheduler.lr_scaling!r} is for a batch that grows with the devices, and batch_size "
            "is that of all devices together: leave lr_scaling out, or give per_device_batch_size in place "
            "of batch_size"
        )
    own = scheduler.scheduler
    if own is not None and _is_scheduler(own) and own.optimizer is not optimizer:
        raise OptionError(
            "a scheduler instance must be made for the optimizer instance that is given beside it; with "
            "an optimizer factory give a scheduler factory: SchedulerOptions(lambda optimizer: ...)"
        )
    return scheduler


class LearningRate:
    """Sets the learning rates of one replica's optimizers.

    Args:
        optimizers: The replica's own, in the form in which the user gave them.
        options: The user's; a twin of the scheduler is made for each optimizer.
        factor: Factor of the user's rates, from the world size.

    Raises:
        OptionError: An optimizer has no learning rate.

    Threads:
        The owner of the optimizers.

    Attributes:
        value: Learning rate of the first group of the first optimizer.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        options: SchedulerOptions | None = None,
        factor: float = 1.0,
    ) -> None:
        self._optimizers = own = all_of(optimizers)
        self._names = _group_names(optimizers)
        self._groups = [group for optimizer in own for group in optimizer.param_groups]
        for optimizer in own:
            if any(group.get("lr") is None for group in optimizer.param_groups):
                raise OptionError(
                    f"{type(optimizer).__name__} has no learning rate (lr=None): give it one, and switch off "
                    "that it computes its own (transformers' Adafactor: relative_step=False)"
                )
        options = options or SchedulerOptions()
        self._unit = options.unit
        self._lambda = options.lr_lambda
        self._factor = factor
        self._warmup_steps = options.warmup_steps
        self._warm_up = warm_up_factor(0, options.warmup_steps)
        self._rescaled = -1  # round whose wishes were obeyed last
        self._is_set = False  # the factor is the user's wish, and no more the world size's
        self._schedulers = _twins(options, own)
        self._count = 0
        self._plain = [float(group["lr"]) for group in self._groups]  # rates of the scheduler
        self._base = list(self._plain)
        self._write()

    @property
    def waits_for_metric(self) -> bool:
        """Whether the scheduler needs the loss of the epoch before."""
        return any(map(_watches, self._schedulers))

    def groups(self) -> dict[str, float]:
        """Learning rates of all groups, by name; empty where there is one group."""
        if len(self._groups) == 1:
            return {}
        factor = self._factor * self._warm_up
        return {name: lr * factor for name, lr in zip(self._names, self._plain, strict=True)}

    def advance(self, position: int, epoch: int, metrics: Sequence[float | None] = ()) -> None:
        """Set the rates for a step.

        Args:
            position: Steps of all ranks before it.
            epoch: Its epoch.
            metrics: Losses of the epochs before, that of the last one behind them, for a scheduler that
                watches them; None: one that it does not see.
        """
        if self._warmup_steps:
            warm_up, self._warm_up = self._warm_up, warm_up_factor(position, self._warmup_steps)
            if self._warm_up != warm_up:
                self._write()
        if self._lambda is not None:
            factor = float(self._lambda(position))
            self._plain = [base * factor for base in self._base]
            self._write()
        elif self._schedulers:
            count = position if self._unit == "step" else epoch
            if count > self._count:
                self._step_schedulers(count, metrics)

    def rescale(self, outcome: Outcome) -> None:
        """Obey the wishes of an outcome that change the factor, once, at the position advanced to."""
        if outcome.round == self._rescaled:  # by the thread that took the step for all ranks (exact)
            return
        self._rescaled = outcome.round
        for wish in outcome.lr:
            if wish.what == "set_lr":
                self.set(wish.value)
            elif wish.what == "scale_lr":
                self._factor *= wish.value
                self._is_set = True
                self._write()

    def reschedule(self, outcome: Outcome, epoch: int) -> None:
        """Obey the wishes of an outcome for another scheduler, which begins here at the present rates."""
        for wish in outcome.lr:
            if wish.what == "set_scheduler":
                self._write(plain=True)
                self._unit, self._lambda = wish.value.unit, wish.value.lr_lambda
                self._schedulers = self._replacement(wish.value, self._optimizers)
                self._count = outcome.global_step if self._unit == "step" else epoch
                self._plain = [float(group["lr"]) for group in self._groups]
                self._write()

    def check_scheduler(self, options: SchedulerOptions) -> bool:
        """Try the scheduler that is to replace this one's, on a copy of the groups.

        Returns:
            Whether it needs the loss of the epoch before.

        Raises:
            OptionError: See `SchedulerOptions`.

        Threads:
            Any.
        """
        copies = [copy.copy(optimizer) for optimizer in self._optimizers]
        for optimizer in copies:
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        return any(map(_watches, self._replacement(options, copies)))

    @staticmethod
    def _replacement(options: SchedulerOptions, optimizers: Sequence[Optimizer]) -> list[Any]:
        """Schedulers in the place of others: they begin at the rates that the groups have."""
        for optimizer in optimizers if options.scheduler is not None else ():
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)
        return _twins(options, optimizers)

    def set(self, lr: float) -> None:
        """Scale all groups so that the first one with a rate has `lr` here, and keep that scale.

        A group that is held still by a rate of 0 stays so.

        Raises:
            OptionError: See `check_set`.
        """
        self.check_set()
        if lead := self._lead():
            self._factor = lr / (lead * self._warm_up)
        else:
            self._plain = self._base = [lr / self._warm_up]
            self._factor = 1.0
        self._is_set = True
        self._write()

    def check_set(self) -> None:
        """Check that there is a rate to scale, or one group alone.

        Raises:
            OptionError: Several groups, and all at 0: which of them are to be thawed is not known.

        Threads:
            Any.
        """
        if len(self._groups) > 1 and not self._lead():
            raise OptionError(no_rate_to_scale(len(self._groups)))

    def _lead(self) -> float:
        """The rate that `set` replaces: that of the first group that has one; 0 where none has."""
        for plain, base, group in zip(self._plain, self._base, self._groups, strict=True):
            rate = plain or base
            if not rate and len(self._groups) > 1:  # a scheduler may begin at 0
                rate = float(group.get("initial_lr", 0.0))
            if rate:
                return rate
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """State of the rates; shares no memory with the schedulers."""
        return {
            "count": self._count,
            "plain": list(self._plain),
            "base": list(self._base),
            "factor": self._factor if self._is_set else None,
            "warm_up": self._warm_up,
            "schedulers": [
                {"kind": type(scheduler).__name__, "state": copy.deepcopy(scheduler.state_dict())}
                for scheduler in self._schedulers
            ],
        }

    def is_like(self, state: Mapping[str, Any]) -> bool:
        """Whether a state, as of `state_dict`, is of the same schedulers and the same rates to begin with."""
        return self._kinds() == _kinds(state) and self._base == state["base"]

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load another one's state, without going through the steps before.

        The factor of the rates is taken over where the user had set it, else it stays that of this world
        size. The groups of the optimizers hold what they held then.

        Args:
            state: As of `state_dict`; nothing is shared with it. None: unknown, and the rates continue from
                this one's own.

        Raises:
            CheckpointError: It is of other schedulers or other groups.
        """
        if state is None:
            self._write()
            return
        kinds, theirs = self._kinds(), _kinds(state)
        if kinds != theirs or len(state["plain"]) != len(self._groups):
            raise CheckpointError(
                f"the checkpoint has {_listed(theirs)} (parameter groups: {len(state['plain'])}), this run "
                f"has {_listed(kinds)} ({len(self._groups)}): resume with the same scheduler and optimizer"
            )
        for scheduler, saved in zip(self._schedulers, copy.deepcopy(state["schedulers"]), strict=True):
            scheduler.load_state_dict(saved["state"])
        self._count = state["count"]
        self._plain, self._base = list(state["plain"]), list(state["base"])
        if self._warmup_steps:  # a rank may take no step after a resume at the end
            self._warm_up = state["warm_up"]
        if state["factor"] is not None:
            self._factor, self._is_set = state["factor"], True
        self._write()

    def _kinds(self) -> list[str]:
        return [type(scheduler).__name__ for scheduler in self._schedulers]

    def _step_schedulers(self, count: int, metrics: Sequence[float | None]) -> None:
        # Many schedulers compute the next rate from the one in the group: it must be their own.
        self._write(plain=True)
        while self._count < count:
            self._count += 1
            behind = count - self._count
            metric = metrics[-1 - behind] if behind < len(metrics) else None
            for scheduler in self._schedulers:
                if _is_of_timm(scheduler):
                    if self._unit == "step":
                        scheduler.step_update(self._count)
                    elif metric is not None or not _watches(scheduler):
                        scheduler.step(self._count, metric)
                elif not _watches(scheduler):
                    scheduler.step()
                elif metric is not None:
                    scheduler.step(metric)
        self._plain = [float(group["lr"]) for group in self._groups]
        self._write()

    def _write(self, plain: bool = False) -> None:
        factor = 1.0 if plain else self._factor * self._warm_up
        self.value = self._plain[0] * factor
        for group, lr in zip(self._groups, self._plain, strict=True):
            if isinstance(group["lr"], float):
                group["lr"] = lr * factor
            else:  # a tensor, for capturable optimizers; or an int
                group["lr"] = group["lr"] * 0 + lr * factor


def no_rate_to_scale(groups: int) -> str:
    """Error text for a learning rate that is set where all groups are at 0."""
    return (
        f"set_lr() scales the groups' learning rates, and all {groups} are 0: it cannot know which of them "
        "are to stay so; give each group that is to be trained a rate from the start (set_lr(0) holds them "
        "still)"
    )


def _group_names(optimizers: Optimizers) -> list[str]:
    """Names of all groups, of the parts that tell them apart: "critic", "1", "critic/1"."""
    named = optimizers.items() if isinstance(optimizers, Mapping) else enumerate(optimizers)
    names, places = [], []
    for place, (key, optimizer) in enumerate(named):
        groups = optimizer.param_groups
        for index, group in enumerate(groups):
            own = group["name"] if isinstance(group.get("name"), str) else index
            parts = [key] * (len(optimizers) > 1) + [own] * (len(groups) > 1)
            names.append("/".join(map(str, parts)))
            places.append(f"{place}/{index}")
    return names if len(set(names)) == len(names) else places


def _kinds(state: Mapping[str, Any]) -> list[str]:
    return [scheduler["kind"] for scheduler in state["schedulers"]]


def _listed(kinds: Sequence[str]) -> str:
    return "the schedulers " + ", ".join(kinds) if kinds else "no scheduler"


def _check_unit(scheduler: object, unit: SchedulerUnit | None) -> None:
    if _watches(scheduler) and unit != "epoch":
        raise OptionError("ReduceLROnPlateau watches the loss of an epoch: scheduler.unit must be 'epoch'")
    if not _is_of_timm(scheduler):
        return
    is_of_epochs = getattr(scheduler, "t_in_epochs", unit == "epoch")
    if is_of_epochs is not (unit == "epoch"):  # it would leave the rates alone, and say nothing
        raise OptionError(
            f"scheduler.unit={unit!r} does not go with a {type(scheduler).__name__} of timm with "
            f"t_in_epochs={is_of_epochs}: say unit={'epoch' if is_of_epochs else 'step'!r}"
        )


def _is_scheduler(given: object) -> TypeGuard[Scheduler]:
    wanted = ("optimizer", "step", "state_dict", "load_state_dict")
    return not isinstance(given, type) and all(hasattr(given, name) for name in wanted)


def _is_of_timm(scheduler: object) -> bool:
    return hasattr(scheduler, "step_update")


def _watches(scheduler: object) -> bool:
    """Whether a scheduler needs the loss of the epoch before."""
    return isinstance(
        getattr(scheduler, "lr_scheduler", scheduler), ReduceLROnPlateau
    )  # timm's has one inside


def _twins(options: SchedulerOptions, optimizers: Sequence[Optimizer]) -> list[Any]:
    """The user's scheduler for each of these optimizers; empty where there is none."""
    scheduler = options.scheduler
    return [] if scheduler is None else [_twin(scheduler, options.unit, one) for one in optimizers]


def _twin(scheduler: SchedulerOption, unit: SchedulerUnit | None, optimizer: Optimizer) -> Any:
    made: Any
    if _is_scheduler(scheduler):
        # Nested schedulers share the optimizer: the memo gives all of them the new one.
        made = copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
    else:
        assert callable(scheduler)
        made = scheduler(optimizer)
        if not _is_scheduler(made):
            raise OptionError(
                f"the scheduler factory returned {made!r}, not a torch scheduler, nor another with "
                "optimizer, step, state_dict and load_state_dict"
            )
        if made.optimizer is not optimizer:
            raise OptionError("the scheduler factory must use the optimizer that it is given")
    _check_unit(made, unit)
    _mark_step_as_called(optimizer)
    return made


def _mark_step_as_called(optimizer: Optimizer) -> None:
    """Set torch's mark that an optimizer has stepped: without it torch warns of a scheduler that steps first.

    A rank that had no batch yet steps its scheduler first, rightly.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    step = partial(type(optimizer).step, weakref.proxy(optimizer))
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step.__wrapped__ = type(optimizer).step  # type: ignore[attr-defined]  # as torch's own mark has it
    optimizer.step = step  # type: ignore[method-assign, assignment]
