"""A mode in which nothing is random, so that two outputs of a module can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowdp.device.dispatch import RankMode

__all__ = ["ConstantDraws"]

TF32 = 2.0**-11
"""Rounding of float32 products on tensor cores."""

DRAWS = frozenset(
    (
        *("bernoulli", "bernoulli_", "binomial", "cauchy", "cauchy_", "exponential", "exponential_"),
        *("geometric", "geometric_", "log_normal", "log_normal_", "multinomial", "normal", "normal_"),
        *("poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random"),
        *("random_", "randperm", "uniform", "uniform_", "_sample_dirichlet", "_standard_gamma"),
    )
)
"""Operations that return a random draw."""

MOST_DRAWS = 2_000
"""A forward that draws more often waits for a number that it likes: from there on it gets random ones."""

SWITCHES = ("dropout_p", "dropout", "p", "training")
"""Arguments of other operations that draw: probabilities, and whether it is training (`rrelu`)."""


class ConstantDraws(RankMode):
    """Torch mode in which random operations give constants, and dropout drops nothing.

    ::

        draws = ConstantDraws()
        with draws:
            output = model(x)

    Generators move on as they do without it. It may be entered several times, one after another.

    Attributes:
        epsilon: The coarsest rounding of the floats that operations gave: that of bfloat16, for instance.
        has_convolved: Whether a convolution or a recurrent layer ran.
        has_drawn: Whether an operation would have drawn.
        has_given_up: Whether it has let operations draw.
        has_seeded: Whether one would have drawn behind a `torch.manual_seed` inside, or from a generator that
            it was given.

    Threads: one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 0.0
        self.has_convolved = False
        self.has_drawn = False
        self.has_given_up = False
        self.has_seeded = False
        self._seed = torch.initial_seed()
        self._draws = 0

    def rounding(self, device: torch.device) -> float:
        """The coarsest rounding of what ran on this device, where CUDA may multiply float32 in TF32."""
        if device.type != "cuda" or self.epsilon < 1e-12:
            return self.epsilon
        try:
            is_exact = torch.get_float32_matmul_precision() == "highest"
        except RuntimeError:  # set by the newer interface, which does not mix with this one
            is_exact = False
        # In convolutions TF32 is on by default.
        return self.epsilon if is_exact and not self.has_convolved else max(self.epsilon, TF32)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation without its randomness."""
        kwargs = dict(kwargs or {})
        schema = getattr(func, "_schema", None)
        if schema is None:  # an operator of a higher order
            return func(*args, **kwargs)
        names = [argument.name for argument in schema.arguments]
        name = schema.name.partition("::")[2]
        self.has_convolved |= "conv" in name or "rnn" in name
        given = dict(zip(names, args, strict=False)) | kwargs
        if name in DRAWS:
            self._note_draw(given)
            self._draws += 1
            self.has_given_up |= self._draws > MOST_DRAWS
            drawn = func(*args, **kwargs)
            return drawn if self.has_given_up else _fill(name, drawn, given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            off = {switch: type(given[switch])(0) for switch in SWITCHES if given.get(switch)}
            if off:
                self._note_draw(given)
            args = tuple(off.get(key, value) for key, value in zip(names, args, strict=False))
            kwargs |= {key: value for key, value in off.items() if key in kwargs}
            if "training" in off and "noise" in given:  # `rrelu` without draws leaves what its backward reads
                mean = 0.5 * (given.get("lower", 1 / 8) + given.get("upper", 1 / 3))
                given["noise"].copy_(torch.where(given["self"] <= 0, mean, 1.0))
        output = func(*args, **kwargs)
        for leaf in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.epsilon = max(self.epsilon, torch.finfo(leaf.dtype).eps)
        return output

    def _note_draw(self, given: Mapping[str, Any]) -> None:
        self.has_drawn = True
        self.has_seeded |= torch.initial_seed() != self._seed or given.get("generator") is not None


def _fill(name: str, drawn: Any, given: Mapping[str, Any]) -> Any:
    if not isinstance(drawn, Tensor) or drawn.is_meta:
        return drawn
    if name == "randperm":
        return drawn.copy_(torch.arange(len(drawn), device=drawn.device))
    low = given.get("from", given.get("low", 0))
    value: float = low if isinstance(low, (int, float)) else 0
    if name.startswith(("bernoulli", "geometric")):
        value = 1
    elif name.startswith("uniform"):
        value = 0.5 * (value + given.get("to", 1.0))
    elif drawn.is_floating_point() and name not in ("binomial", "poisson") and "random" not in name:
        value = value if "randint" in name else 0.5
    return drawn.fill_(value)
