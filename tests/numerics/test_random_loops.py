"""Random loops on several devices do what plain PyTorch does.

::

    python -m tests.numerics.test_random_loops --seeds 2000 --start 0    # many; exit code 1 on a failure
    python -m tests.numerics.test_random_loops --seeds 1 --start 37 --trace
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.numerics.random_loops import (
    Action,
    Difference,
    Program,
    Spread,
    draw,
    play,
    shrunk,
    spread,
)

SEEDS = 25


@pytest.fixture(autouse=True)
def lanes() -> str:
    """Plain CPU devices alone: what streams do has tests of its own."""
    return "cpu"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seeds(seed: int) -> None:
    play(draw(seed))


# ---------------------------------------------------------------- the generator and the comparison


@contextmanager
def alone(module: nn.Module, _: Optimizer, __: Program) -> Iterator[nn.Module]:
    yield module


@contextmanager
def halving(module: nn.Module, _: Optimizer, __: Program) -> Iterator[nn.Module]:
    """A side that loses gradients."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    yield module


@contextmanager
def refusing(module: nn.Module, _: Optimizer, __: Program) -> Iterator[nn.Module]:
    """A side that cannot do what plain PyTorch does."""

    def hook(module: nn.Module, args: object) -> None:
        if not torch.is_grad_enabled():
            raise RuntimeError("not here")

    module.register_forward_pre_hook(hook)
    yield module


FORWARD = Action("forward", {"model": 0, "data": 1, "size": 4, "way": "own"})
BACKWARD = Action("backward", {"which": 1, "retains": False, "syncs": True, "loss": "square"})
NO_GRAD = Action("no_grad", {"model": 0, "data": 1, "size": 4})


def test_a_wrong_gradient_is_found_and_the_program_shrunk() -> None:
    actions = (NO_GRAD, FORWARD, NO_GRAD, BACKWARD, NO_GRAD)
    program = Program(7, ("mlp",), "sgd", 2, None, actions)
    with pytest.raises(Difference, match=r"seed 7, action 4, backward(.|\n)*gradient of 0.weight of model 0"):
        play(program, halving)
    assert shrunk(program, halving).actions == (FORWARD, BACKWARD)


def test_an_error_where_plain_pytorch_runs_is_found() -> None:
    program = Program(7, ("mlp",), "sgd", 2, None, (FORWARD, NO_GRAD))
    with pytest.raises(Difference, match=r"action 2, no_grad.*plain PyTorch runs: RuntimeError: not here"):
        play(program, refusing)


# ---------------------------------------------------------------- the command line
def main(arguments: Sequence[str] | None = None, way: Spread = spread) -> int:
    """Play many seeds; the answer is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.numerics.test_random_loops")
    parser.add_argument("--seeds", type=int, default=2000, help="how many (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first (%(default)s)")
    parser.add_argument("--trace", action="store_true", help="print every program")
    parser.add_argument("--whole", action="store_true", help="leave a program that fails as it was drawn")
    given = parser.parse_args(arguments)
    started, failures, actions, errors = time.perf_counter(), 0, 0, 0
    for seed in range(given.start, given.start + given.seeds):
        program = draw(seed)
        if given.trace:
            print(f"seed {seed}: {program}")
        try:
            played = play(program, way)
        except Difference as error:
            failures += 1
            print(str(error).partition("\n")[0])
            print(program if given.whole else shrunk(program, way), flush=True)
            print(f"    python -m tests.numerics.test_random_loops --seeds 1 --start {seed}", flush=True)
        else:
            actions += played.actions
            errors += played.errors
    seconds = time.perf_counter() - started
    print(
        f"{given.seeds:,} loops in {seconds:.1f} s: {actions:,} actions, {errors:,} of which plain PyTorch "
        f"refuses; {failures} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
